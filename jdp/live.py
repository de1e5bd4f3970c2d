"""Which temporary arrays of a compiled program are alive when they take most memory.

    Program  --peak-->  buffers alive at the fullest moment, each with the instruction that made it

The program is walked in the order it runs. An array lives from the instruction that makes it to
the last that reads it; tuples, bitcasts, loops, updates in place and transfers under way make
none. Arguments and results are not counted: their sizes are exact without this. The compiler
itself tells one number, `temp_size_in_bytes`; compare it with the sum found here, which knows
nothing of alignment, gaps, and memory reused for something of another size.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jdp.hlo import Computation, Instruction, Leaf, Program, Shape

# What returns its operands, or parts of them, and makes nothing.
_VIEWS = frozenset(
    {"add-dependency", "bitcast", "domain", "opt-barrier", "optimization-barrier", "while"}
)
_NOTHING = frozenset({"after-all", "constant", "partition-id", "replica-id"})

# Elementwise operations may write over an operand that nobody reads later.
_ELEMENTWISE = frozenset(
    {"abs", "add", "and", "clamp", "compare", "convert", "copy", "divide", "exponential", "log"}
    | {"maximum", "minimum", "multiply", "negate", "not", "or", "power", "rsqrt", "select", "sign"}
    | {"sqrt", "subtract", "tanh", "xor"}
)


class Buffer(NamedTuple):
    """A temporary array.

    Attributes:
        instruction: What made it.
        leaf: Its dtype, dims and bytes.
        op_name: Where in the traced program it, or what it was made of, comes from; may be "".
        sent: Whether a collective made it, or it was made for one.
    """

    instruction: Instruction
    leaf: Leaf
    op_name: str
    sent: bool

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        return self.leaf.bytes


def peak(
    program: Program,
    on_device: Callable[[int], bool],
    among: Callable[[Buffer], bool] = lambda buffer: True,
) -> list[Buffer]:
    """Finds the temporaries that are alive when they take most bytes.

    Args:
        program: The program.
        on_device: Whether arrays of a memory space (see `Leaf.space`) count.
        among: Looks at these temporaries only.

    Returns:
        The buffers, in the order they are made.
    """
    walk = _Walk(program, on_device, among)
    entry = program.computations[program.entry]
    return walk.run(entry, None, program.donated)[1]


def main_memory(platform: str) -> Callable[[int], bool]:
    """Which spaces are a device's main memory: space 1 is on chip in a TPU, but not in a GPU."""
    spaces = {0} if platform == "tpu" else {0, 1}
    return lambda space: space in spaces


class _Life:
    """An array, and the instructions from and to which it is alive, by index."""

    def __init__(self, owner: object, buffer: Buffer, first: int) -> None:
        self.owner = owner  # the run of a computation that it belongs to
        self.buffer = buffer
        self.first = self.last = first
        self.over: list[_Life] = []  # operands whose memory it may take


_Value = Any  # a _Life; None for what does not count; a list of values for a tuple


def _flat(value: _Value) -> Iterator[_Life]:
    if isinstance(value, _Life):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _flat(part)


class _Walk:
    """Walks the computations of a program."""

    def __init__(
        self,
        program: Program,
        on_device: Callable[[int], bool],
        among: Callable[[Buffer], bool],
    ) -> None:
        self._computations = program.computations
        self._counts = on_device
        self._among = among

    def run(
        self,
        computation: Computation,
        given: list[_Value] | None,
        donated: dict[int, int] | None = None,
    ) -> tuple[_Value, list[Buffer]]:
        """What it returns, and the temporaries alive at its peak, inner computations' included."""
        owner = object()
        values: dict[str, _Value] = {}
        lives: list[_Life] = []
        inner: dict[int, list[Buffer]] = {}
        for index, instruction in enumerate(computation.instructions):
            operands = [values.get(name) for name in instruction.operands]
            value, within = self._step(instruction, operands, given)
            if within:
                inner[index] = within
            for life in _flat(value):
                if life.owner is not owner and life.owner in (_NEW, _ARGUMENT):
                    if life.owner is _NEW:
                        lives.append(life)
                    life.owner, life.first, life.last = owner, index, index
            for life in _flat(operands):
                if life.owner is owner:
                    life.last = index
            values[instruction.name] = value
        result = values[computation.root]
        kept = set(map(id, _flat(result)))
        own = [life for life in lives if id(life) not in kept]
        _reuse(own, _places(values, computation, result, donated or {}))
        for life in lives:
            if id(life) in kept:  # whoever called counts it
                life.owner = _NEW
        chosen = [life for life in own if self._among(life.buffer)]
        return result, _fullest(chosen, inner, len(computation.instructions))

    def _step(
        self, instruction: Instruction, operands: list[_Value], given: list[_Value] | None
    ) -> tuple[_Value, list[Buffer]]:
        """The value of an instruction, and what is alive inside of it at its peak."""
        opcode = instruction.opcode
        if opcode == "parameter":
            return (given[instruction.number] if given else self._argument(instruction)), []
        if opcode in _NOTHING:
            return None, []
        if opcode == "get-tuple-element":
            whole = operands[0]
            return (whole[instruction.number] if isinstance(whole, list) else None), []
        if opcode == "tuple":
            return operands, []
        if opcode == "call":
            called = self._computations[instruction.called("to_apply")[0]]
            return self.run(called, operands)
        if opcode.endswith("-done"):
            return _finished(opcode, operands[0]), []
        if opcode == "while":  # what is to be filled in a loop is the loop's
            for life in _flat(operands):
                if "jvp(" in instruction.op_name and "jvp(" not in life.buffer.op_name:
                    life.buffer = life.buffer._replace(op_name=instruction.op_name)
        value = operands[0] if opcode in _VIEWS else self._make(instruction, operands)
        return value, self._inside(instruction, operands)

    def _inside(self, instruction: Instruction, operands: list[_Value]) -> list[Buffer]:
        """Temporaries of the fullest of the computations that a loop or a branch runs."""
        names: list[tuple[str, list[_Value]]] = []
        if instruction.opcode == "while":
            names = [
                (n, operands) for key in ("body", "condition") for n in instruction.called(key)
            ]
        elif instruction.opcode == "conditional":
            keys = ("branch_computations", "true_computation", "false_computation")
            branches = [name for key in keys for name in instruction.called(key)]
            names = list(zip(branches, ([operand] for operand in operands[1:]), strict=True))
        found = [self.run(self._computations[name], given)[1] for name, given in names]
        return max(found, key=_total, default=[])

    def _argument(self, instruction: Instruction) -> _Value:
        return self._new(
            instruction.shape, lambda leaf: _Life(_ARGUMENT, _buffer(instruction, leaf), 0)
        )

    def _make(self, instruction: Instruction, operands: list[_Value]) -> _Value:
        """New arrays, except where an operand is written to in place or only being sent."""
        origin, sent = self._origin(instruction, operands)
        below = list(_flat(operands)) if self._elementwise(instruction) else []

        def fresh(leaf: Leaf) -> _Life:
            life = _Life(_NEW, Buffer(instruction, leaf, origin, sent), 0)
            life.over = [x for x in below if x.buffer.leaf.bytes == leaf.bytes]
            return life

        value = self._new(instruction.shape, fresh)
        if instruction.opcode.endswith("-start") and isinstance(value, list):
            return _started(instruction.opcode, value, operands)
        for place, operand, part in self._in_place(instruction):
            _put(value, place, _get(operands[operand], part)) if place else None
            value = value if place else _get(operands[operand], part)
        return value

    def _new(self, shape: Shape, make: Callable[[Leaf], _Life]) -> _Value:
        if isinstance(shape, Leaf):
            return make(shape) if shape.bytes and self._counts(shape.space) else None
        return [self._new(part, make) for part in shape]

    def _origin(self, instruction: Instruction, operands: list[_Value]) -> tuple[str, bool]:
        """Where it comes from, and whether it is a collective's."""
        called = [self._computations[name] for name in instruction.called("calls")]
        inside = [x for computation in called for x in computation.instructions]
        sent = bool(instruction.collective) or any(x.collective for x in inside)
        op_name = instruction.op_name or next((x.op_name for x in inside if x.op_name), "")
        first = next(_flat(operands), None)
        if first is not None and not op_name:  # a copy, or the like
            op_name, sent = first.buffer.op_name, sent or first.buffer.sent
        if instruction.collective:
            for life in _flat(operands):  # packed for it by the compiler
                if not life.buffer.instruction.op_name:
                    life.buffer = life.buffer._replace(sent=True)
        return op_name, sent

    def _elementwise(self, instruction: Instruction) -> bool:
        return instruction.opcode in _ELEMENTWISE or (
            instruction.opcode == "fusion" and "kind=kLoop" in instruction.attributes
        )

    def _in_place(self, instruction: Instruction) -> Iterator[tuple[list[int], int, list[int]]]:
        """(part of the result, operand, part of the operand) that share their memory."""
        if instruction.opcode in ("dynamic-update-slice", "scatter"):
            yield [], 0, []
        pairs = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", instruction.attributes)
        for place, operand, part in re.findall(
            r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}", pairs.group(1) if pairs else ""
        ):
            yield _numbers(place), int(operand), _numbers(part)
        if instruction.opcode == "fusion" and not pairs:
            fused = self._computations[instruction.called("calls")[0]]
            yield from _updated(fused)


def _updated(fused: Computation) -> Iterator[tuple[list[int], int, list[int]]]:
    """Parameters of a fusion that it updates a slice of, and returns."""
    named = {x.name: x for x in fused.instructions}
    root = named[fused.root]
    results = root.operands if root.opcode == "tuple" else (root.name,)
    for place, name in enumerate(results):
        instruction = named[name]
        while instruction.opcode == "bitcast":
            instruction = named[instruction.operands[0]]
        if instruction.opcode != "dynamic-update-slice":
            continue
        while instruction.opcode in ("bitcast", "dynamic-update-slice"):
            instruction = named[instruction.operands[0]]
        if instruction.opcode == "parameter":
            yield [place] if root.opcode == "tuple" else [], instruction.number, []


_NEW, _ARGUMENT = object(), object()


def _buffer(instruction: Instruction, leaf: Leaf) -> Buffer:
    return Buffer(instruction, leaf, instruction.op_name, False)


def _started(opcode: str, value: list[_Value], operands: list[_Value]) -> _Value:
    """A transfer under way: its tuple holds operands beside results."""
    if opcode == "copy-start":
        return [value[0], operands[0], None]
    if opcode == "all-reduce-start":
        return value
    return [operands if isinstance(value[0], list) else operands[0], *value[1:2]]


def _finished(opcode: str, started: _Value) -> _Value:
    if not isinstance(started, list) or opcode == "all-reduce-done":
        return started
    return started[0] if opcode == "copy-done" else started[1]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _get(value: _Value, place: list[int]) -> _Value:
    for number in place:
        value = value[number] if isinstance(value, list) else None
    return value


def _put(value: _Value, place: list[int], part: _Value) -> None:
    _get(value, place[:-1])[place[-1]] = part


def _total(buffers: list[Buffer]) -> int:
    return sum(buffer.bytes for buffer in buffers)


def _places(
    values: dict[str, _Value], computation: Computation, result: _Value, donated: dict[int, int]
) -> dict[int, int]:
    """Until when a donated argument's memory is free, once nobody reads the argument."""
    until = {}
    for instruction in computation.instructions:
        if instruction.opcode == "parameter" and instruction.number in donated:
            argument = values[instruction.name]
            new = result[donated[instruction.number]] if isinstance(result, list) else result
            if isinstance(argument, _Life) and isinstance(new, _Life) and new is not argument:
                until[id(argument)] = new.first
    return until


def _reuse(lives: list[_Life], donated: dict[int, int]) -> None:
    """Lets elementwise operations write over an operand that is read for the last time."""
    own = set(map(id, lives))
    for life in lives:
        for below in life.over:
            if below.last != life.first or below.first >= life.first:
                continue
            if id(below) in own:
                below.last -= 1
                break
            if life.last <= donated.get(id(below), -1):
                donated.pop(id(below))
                life.last = life.first - 1
                break


def _fullest(lives: list[_Life], inner: dict[int, list[Buffer]], count: int) -> list[Buffer]:
    """What is alive at the instruction where most bytes are."""
    changes = [0] * (count + 1)
    for life in lives:
        changes[life.first] += life.buffer.bytes
        changes[life.last + 1] -= life.buffer.bytes
    totals = list(itertools.accumulate(changes[:-1]))
    for index, buffers in inner.items():
        totals[index] += _total(buffers)
    best = max(range(count), key=totals.__getitem__, default=0)
    alive = [life.buffer for life in lives if life.first <= best <= life.last]
    return alive + inner.get(best, [])
