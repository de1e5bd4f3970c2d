"""Reads what a program sends: from StableHLO (`lowered.as_text()`) or from compiled HLO."""

import dataclasses
import math
import re

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
BYTES = {"f64": 8, "s64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "u16": 2}
BYTES |= {"u8": 1, "s8": 1, "pred": 1, "f8e4m3fn": 1, "f8e5m2": 1}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One communicating operation; `bytes` is the size of its largest side on one device."""

    kind: str
    dtypes: tuple[str, ...]
    operands: int
    bytes: int
    in_loop: bool
    in_branch: bool
    line: str


def collectives(compiled_text: str) -> list[Collective]:
    """All collectives of a compiled program, with whether a loop or branch holds them."""
    computations = _computations(compiled_text)
    where = _reach(computations)
    found = []
    for name, lines in computations.items():
        for line in lines:
            match = re.search(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(", line)
            if not match:
                continue
            kind = match.group(2)
            loop, branch = where.get(name, (False, False))
            shapes = _shapes(match.group(1))
            if match.group(3) and kind != "all-reduce":  # this start lists operands and results
                shapes = shapes[len(shapes) // 2 :]
            size = sum(BYTES[d] * n for d, n in shapes)
            if kind == "reduce-scatter":
                size = sum(BYTES[d] * n for d, n in _operand_shapes(line, computations[name]))
            dtypes = tuple(sorted({d for d, _ in shapes}))
            found.append(Collective(kind, dtypes, len(shapes), size, loop, branch, line.strip()))
    return found


def sent_bytes(found: list[Collective], count: int) -> float:
    """Bytes each of `count` devices sends, by the ring algorithm."""
    factor = {"all-reduce": 2.0, "collective-permute": count / (count - 1)}
    return sum(factor.get(c.kind, 1.0) * c.bytes * (count - 1) / count for c in found)


def live_bytes(compiled) -> int:
    """Bytes a device holds while the program runs."""
    m = compiled.memory_analysis()
    return (
        m.argument_size_in_bytes
        + m.output_size_in_bytes
        - m.alias_size_in_bytes
        + m.temp_size_in_bytes
    )


def lowered_collectives(stablehlo_text: str) -> list[tuple[str, str]]:
    """(kind, element type) of each collective before any backend pass."""
    found = []
    pattern = r'"?stablehlo\.(all_reduce|reduce_scatter|all_gather|all_to_all|collective_permute)"?'
    for match in re.finditer(pattern, stablehlo_text):
        rest = stablehlo_text[match.end() :]
        # the type of an all_reduce follows the region that adds
        types = re.search(r"(?:\}\) |\}> )?: \(tensor<(?:[0-9x]*x)?([a-z0-9]+)>", rest)
        found.append((match.group(1).replace("_", "-"), types.group(1) if types else "?"))
    return found


def _computations(text):
    found, name = {}, None
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            name = head.group(1)
            found[name] = []
            if line.startswith("ENTRY"):
                found["ENTRY"] = found[name]
        elif name is not None:
            found[name].append(line)
    entry = found.pop("ENTRY", [])
    return {"ENTRY" if lines is entry else name: lines for name, lines in found.items()}


def _reach(computations):
    """For each computation, whether a loop or a branch leads to it."""
    where, todo = {"ENTRY": (False, False)}, ["ENTRY"]
    while todo:
        name = todo.pop()
        loop, branch = where[name]
        for line in computations.get(name, ()):
            for key, group in re.findall(
                r"(body|condition|to_apply|calls|branch_computations|true_computation|"
                r"false_computation)=(\{[^}]*\}|%?[\w.\-]+)",
                line,
            ):
                for callee in re.findall(r"[\w.\-]+", group):
                    state = (loop or key in ("body", "condition"), branch or "comp" in key)
                    if where.get(callee) != state and callee in computations:
                        old = where.get(callee, (False, False))
                        new = (old[0] or state[0], old[1] or state[1])
                        if where.get(callee) != new:
                            where[callee] = new
                            todo.append(callee)
    return where


def _shapes(text):
    return [
        (dtype, math.prod(int(d) for d in dims.split(",") if d))
        for dtype, dims in re.findall(r"\b([a-z]+[0-9a-z]*)\[([0-9,]*)\]", text)
        if dtype in BYTES
    ]


def _operand_shapes(line, lines):
    names = re.findall(r"%([\w.\-]+)", line[line.index("(") :].split(")")[0])
    shapes = []
    for name in names:
        for other in lines:
            match = re.match(rf"\s*(?:ROOT )?%{re.escape(name)} = (\S+|\(.*?\)) ", other)
            if match:
                shapes += _shapes(match.group(1))
    return shapes
