"""Which devices a collective joins, and along which mesh axes they lie.

    replica_groups={{0,1},{2,3}} | [2,2]<=[4] | mesh['a'=2,'b'=2] {'b'}  --groups-->  lists of ids
    ids, mesh  --axes_of-->  ("b",)

An id is the position of a device in the mesh, as a program that `jax.jit` made numbers its
partitions. Nothing is compiled here.
"""

import math
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jdp.hlo import Instruction

Groups = tuple[tuple[int, ...], ...]


def groups(instruction: Instruction, count: int) -> Groups:
    """The groups of devices among which a collective communicates.

    Args:
        instruction: A collective, or what starts one.
        count: Devices of the program; an empty list of groups means all of them.

    Returns:
        Positions of devices, group by group. Of a collective-permute: the pairs, source first.

    Raises:
        ValueError: If the groups are written in a way that is not known.

    Example:
        >>> from jdp.hlo import Instruction
        >>> attributes = "replica_groups=[2,2]<=[2,2]T(1,0)"
        >>> one = Instruction("x", "all-reduce", [], (), 0, attributes, "")
        >>> groups(one, 4)
        ((0, 2), (1, 3))
    """
    attributes = instruction.attributes
    if pairs := re.search(r"source_target_pairs=\{([{}\d,]*)\}", attributes):
        return _listed(pairs.group(1))
    found = re.search(
        r"replica_groups=(\{[{}\d,\s]*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
        r"|@?\w*\[[^\]]*\](?:,\s*device_ids=\((?:[^()]|\([\d,]*\))*\))?\s*\{[^}]*\})",
        attributes,
    )
    if found is None:
        if "replica_groups=" in attributes:
            start = attributes.index("replica_groups=")
            raise ValueError(
                f"The collective {instruction.name} writes its groups of devices as "
                f"{attributes[start : start + 60]!r}, which jdp cannot read, so it cannot be told "
                "which mesh axes it is for. Please report it with the versions of jax and jaxlib."
            )
        return (tuple(range(count)),)
    return _read(found.group(1)) or (tuple(range(count)),)


def _read(text: str) -> Groups:
    if text.startswith("{"):
        return _listed(text[1:-1])
    if text.startswith("["):
        return _iota(text)
    return _by_axes(text)


def _listed(text: str) -> Groups:
    """Explicit lists: {0,1},{2,3}."""
    found = re.findall(r"\{([\d,]*)\}", text)
    return tuple(tuple(int(x) for x in group.split(",") if x) for group in found if group)


def _iota(text: str) -> Groups:
    """[groups,size]<=[dims]T(order): 0, 1, ... of shape dims, transposed, then regrouped."""
    shape, _, turned = text.partition("<=")
    rows = _turned(turned).reshape(_ints(shape[1:-1]))
    return tuple(tuple(int(x) for x in row) for row in rows)


def _turned(text: str) -> np.ndarray:
    """[dims]T(order): 0, 1, ... of shape dims, transposed."""
    dims, *order = re.findall(r"[\[(]([\d,]+)[\])]", text)
    ids = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return ids.transpose(_ints(order[0])) if order else ids


def _ints(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def _by_axes(text: str) -> Groups:
    """mesh['a'=2,'b'=4] {'b'}: the devices that differ along b only.

    An axis may be used in part: 'b':(2)2 is the part of size 2 behind one of size 2. Devices in
    another order follow the axes, listed or transposed: device_ids=(2,0,3,1) or ([2,2]T(1,0)).
    """
    head, _, used = text.partition("{")
    sizes = {name: int(size) for name, size in re.findall(r"['\"]([^'\"]+)['\"]=(\d+)", head)}
    parts = re.findall(r"['\"]([^'\"]+)['\"](?::\((\d+)\)(\d+))?", used)
    whole = {name: (1, sizes[name]) for name, before, _ in parts if not before}
    chosen = whole | {name: (int(b), int(size)) for name, b, size in parts if b}
    dims, places = [], []
    for name, size in sizes.items():
        before, part = chosen.get(name, (size, 1))
        if name in chosen:
            places.append(len(dims) + 1)
        dims += [before, part, size // (before * part)]
    order = [d for d in range(len(dims)) if d not in places] + places
    ids = np.arange(math.prod(dims))
    if placed := re.search(r"device_ids=\((.*)\)", head):
        written = placed.group(1)
        ids = _turned(written) if written.startswith("[") else np.array(_ints(written))
    rows = ids.reshape(dims).transpose(order).reshape(-1, math.prod(dims[p] for p in places))
    return tuple(tuple(int(x) for x in row) for row in rows)


def axes_of(found: Groups, mesh: Mesh | AbstractMesh | None) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ; () without a mesh.

    Args:
        found: Groups of positions, as `groups` gives them.
        mesh: The mesh that the program was compiled for.
    """
    if mesh is None:
        return ()
    sizes = tuple(mesh.shape.values())
    differ = [False] * len(sizes)
    for group in found:
        if not group or max(group) >= math.prod(sizes):
            return ()
        places = np.array(np.unravel_index(np.array(group), sizes))
        differ = [a or bool((row != row[0]).any()) for a, row in zip(differ, places, strict=True)]
    return tuple(name for name, moves in zip(mesh.axis_names, differ, strict=True) if moves)


def size_of(found: Groups, axes: Sequence[str], mesh: Mesh | AbstractMesh | None) -> int:
    """Devices that take part together: of a permutation, those along its axes."""
    if axes and mesh is not None and len(found[0]) == 2:
        return max(2, math.prod(mesh.shape[name] for name in axes))
    return max(len(group) for group in found)
