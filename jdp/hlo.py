"""Reads the text of a compiled program: computations, instructions, the bytes of what they make.

    compiled.as_text()  --parse-->  Program: computations of instructions, in the order they run

XLA prints the scheduled program the same way for every backend; nothing but that text is used, so
programs for devices that are not here are read like others. What is not needed to know where
bytes lie (layouts beyond their tiling, shardings, most attributes) is skipped.
"""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

HOST_SPACE = 5  # what XLA writes as S(5)


class Leaf(NamedTuple):
    """One array of a result.

    Attributes:
        dtype: As XLA writes it, such as "bf16".
        dims: Sizes of the dims.
        bytes: Size in memory, with the padding of its tiles.
        space: Memory space; 0 is the device's own, 5 the host's.
    """

    dtype: str
    dims: tuple[int, ...]
    bytes: int
    space: int

    @property
    def dense_bytes(self) -> int:
        """Size without the padding of its tiles, as it is sent."""
        return -(-math.prod(self.dims) * bits_of(self.dtype) // 8)


Shape: TypeAlias = Leaf | list[Any]
"""A `Leaf`, or a list of `Shape`s for a tuple."""


class Instruction(NamedTuple):
    """One instruction of a computation.

    Attributes:
        name: Its name.
        opcode: What it does, such as "fusion".
        shape: What it returns.
        operands: Names of what it is given.
        number: Which parameter, of a "parameter"; which part, of a "get-tuple-element"; the value
            of a whole "constant".
        attributes: The rest of the line.
        op_name: Where in the traced program it comes from; "" if the compiler made it.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    number: int
    attributes: str
    op_name: str

    def called(self, key: str) -> list[str]:
        """The computations that an attribute such as "calls" or "body" names."""
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return re.findall(r"[\w.\-]+", found.group(1)) if found else []

    @property
    def collective(self) -> str | None:
        """Which collective it is, or starts; `None` if none."""
        kind = self.opcode.removesuffix("-start").removesuffix("-done")
        return kind if kind in COLLECTIVES else None


class Computation(NamedTuple):
    """A scheduled list of instructions; the last to be marked is what it returns."""

    name: str
    instructions: list[Instruction]
    root: str


class Program(NamedTuple):
    """A compiled program.

    Attributes:
        computations: By name.
        entry: The name of the one that is run.
        donated: Which of its results takes the place of an argument, by the argument's number.
    """

    computations: dict[str, Computation]
    entry: str
    donated: dict[int, int]

    def trips(self, loop: Instruction) -> int | None:
        """How often the body of a "while" runs, if the compiler tells or its condition shows it.

        XLA:CPU and XLA:GPU write the number down. XLA:TPU does not; there a loop that counts from 0
        compares with it.
        """
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
            return int(known.group(1))
        condition = self.computations[loop.called("condition")[0]]
        named = {x.name: x for x in condition.instructions}
        test = named[condition.root]
        if "direction=LT" not in test.attributes:
            return None
        limits = [named[name].number for name in test.operands if named[name].opcode == "constant"]
        return limits[0] if len(limits) == 1 else None


def parse(text: str) -> Program:
    """Reads the text of a compiled program (`compiled.as_text()`)."""
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", []
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name, lines = head.group(2), []
            entry = name if head.group(1) else entry
        elif line.startswith("}") and name:
            computations[name] = _computation(name, lines)
            name = ""
        elif name:
            lines.append(line)
    header = text[: text.index("\n")]
    aliases = re.findall(r"\{(\d*)\}: \((\d+), \{\}, \w+-alias\)", header)
    return Program(computations, entry, {int(k): int(place or 0) for place, k in aliases})


def _computation(name: str, lines: list[str]) -> Computation:
    instructions, root = [], ""
    for line in lines:
        match = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
        if match:
            instructions.append(_instruction(match.group(2), line[match.end() :]))
            root = match.group(2) if match.group(1) else root
    return Computation(name, instructions, root or instructions[-1].name)


def _instruction(name: str, rest: str) -> Instruction:
    end = _end_of_shape(rest)
    opcode, _, rest_of_line = rest[end:].lstrip().partition("(")
    close = _closing(rest_of_line)
    given, attributes = rest_of_line[:close], rest_of_line[close:]
    index = re.search(r"\bindex=(\d+)", attributes)
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', rest_of_line)
    told = opcode in ("parameter", "constant") and re.fullmatch(r"-?\d+", given)
    return Instruction(
        name,
        opcode,
        shape_of(rest[:end]),
        tuple(re.findall(r"%([\w.\-]+)", given)),
        int(given if told else index.group(1) if index else 0),
        attributes,
        op_name.group(1) if op_name else "",
    )


def _closing(text: str) -> int:
    """Where the parenthesis closes that was opened before the text."""
    depth = 1
    for place, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return place
    return len(text)


def _end_of_shape(text: str) -> int:
    if text.startswith("("):
        return _closing(text[1:]) + 2
    return text.index(" ")


_TOKENS = re.compile(r"/\*.*?\*/|([(),])|([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?|(\w+\[?\]?)|\s+")


def shape_of(text: str) -> Shape:
    """Reads a shape such as `(f32[8,128]{1,0:T(8,128)}, s32[])`."""
    stack: list[list[Any]] = [[]]
    for token in _TOKENS.finditer(text):
        mark, dtype, dims, layout, _ = token.groups()
        if mark == "(":
            stack.append([])
        elif mark == ")":
            done = stack.pop()
            stack[-1].append(done)
        elif dtype:
            stack[-1].append(_leaf(dtype, dims, layout or ""))
    return stack[0][0] if stack[0] else []


def _leaf(dtype: str, dims: str, layout: str) -> Leaf:
    sizes = tuple(int(d) for d in re.findall(r"\d+", dims))
    space = re.search(r"S\((\d+)\)", layout)
    bits = re.search(r"E\((\d+)\)", layout)
    each = int(bits.group(1)) if bits else bits_of(dtype)
    count = _padded_count(sizes, layout)
    return Leaf(dtype, sizes, -(-count * each // 8), int(space.group(1)) if space else 0)


def _padded_count(sizes: tuple[int, ...], layout: str) -> int:
    """Elements with those that fill up the last tiles: T(8,128) rounds up the two minor dims."""
    tile = re.search(r"T\(([\d,]+)\)", layout)
    order = re.match(r"\{([\d,]*)", layout)
    if not tile or not order:
        return math.prod(sizes)
    minor_first = [sizes[int(d)] for d in order.group(1).split(",") if d] or [1]
    tiles = [int(t) for t in reversed(tile.group(1).split(","))]
    padded = [-(-size // tile) * tile for size, tile in zip(minor_first, tiles, strict=False)]
    return math.prod(padded) * math.prod(minor_first[len(padded) :])


def bits_of(dtype: str) -> int:
    """Bits of an element; "pred" takes a byte, tokens nothing."""
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype.removeprefix("f8e").removeprefix("f4e"))
    if dtype.startswith("f8"):
        return 8
    if dtype.startswith("f4"):
        return 4
    return int(digits.group()) if digits and dtype != "token" else 0


def leaves(shape: Shape) -> Iterator[Leaf]:
    """The arrays of a shape, in order."""
    if isinstance(shape, Leaf):
        yield shape
    else:
        for part in shape:
            yield from leaves(part)
