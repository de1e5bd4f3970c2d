"""Who holds which bytes: a table of a state, leaf by leaf.

    TrainState, or any pytree of arrays or of shapes with shardings  --holdings-->  Holdings

Sizes come from the shardings: what a device holds of an array is the array's shard, and that is
exact. What a program needs besides is read from the program, see `jdp.memory`.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, Sharding

from jdp.replica import is_per_replica, is_stored
from jdp.split import is_padded


class Holding(NamedTuple):
    """What each device holds of one leaf.

    Attributes:
        path: The leaf's path in the tree.
        shape: Its logical shape, without padding.
        dtype: Its dtype.
        lies: How it lies, in words.
        bytes: Bytes on each device that holds any of it.
        memory_kind: Memory of the device that it lies in; `None` for the default one.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    lies: str
    bytes: int
    memory_kind: str | None


class Holdings(NamedTuple):
    """The table that `jdp.holdings` makes; printing it shows it.

    Attributes:
        rows: One for each leaf.
        parts: Bytes per device of each top-level part of the tree ("params", "opt_state").
        total: Bytes per device of all.
    """

    rows: tuple[Holding, ...]
    parts: dict[str, int]
    total: int

    def __str__(self) -> str:
        shape = lambda row: "x".join(map(str, row.shape)) or "scalar"  # noqa: E731
        lines = [("leaf", "shape", "dtype", "lies", "bytes per device")]
        for row in self.rows:
            memory = f", in {row.memory_kind}" if row.memory_kind else ""
            lines.append((row.path, shape(row), row.dtype, row.lies + memory, human(row.bytes)))
        for name, size in (*self.parts.items(), ("total", self.total)):
            lines.append((name, "", "", "", human(size)))
        return table(lines, numbers=(4,))


def holdings(tree: Any) -> Holdings:
    """Tells how each leaf of a state lies, and how many bytes of it a device holds.

    Args:
        tree: A pytree of arrays, or of `jax.ShapeDtypeStruct`s with shardings, such as a state
            of `jdp.init_state`. Nothing is read from the devices.

    Returns:
        A table with one row for each leaf, and totals.

    Example:
        >>> tx, mesh = jdp.zero1(optax.sgd(0.1, momentum=0.9)), jdp.make_mesh()
        >>> state = jdp.init_state({"w": jnp.ones((64, 8))}, tx, mesh)
        >>> [(row.lies, row.bytes) for row in holdings(state).rows if "w" in row.path]
        [('whole on each of 8', 2048), ('split: dim 0 over data (8)', 256)]
    """
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_stored)[0]
    rows, parts = [], {}
    for path, leaf in paths:
        found = _rows(path, leaf)
        rows += found
        part = str(getattr(path[0], "name", jax.tree_util.keystr(path[:1]))) if path else ""
        parts[part] = parts.get(part, 0) + sum(row.bytes for row in found)
    return Holdings(tuple(rows), parts, sum(parts.values()))


def _rows(path: Any, leaf: Any) -> list[Holding]:
    """One row; two for a `PerReplica` that has a weight."""
    where = jax.tree_util.keystr(path).lstrip(".")
    if is_per_replica(leaf):
        weight = [] if leaf.weight is None else [_row(f"{where}.weight", leaf.weight)]
        return [_row(f"{where}.value", leaf.value), *weight]
    if not is_padded(leaf):
        return [_row(where, leaf)]
    row = _row(where, leaf.value)
    padded = f"padded {leaf.length} -> {leaf.value.shape[leaf.dim]}, "
    return [row._replace(shape=tuple(leaf.shape), lies=padded + row.lies)]


def _row(path: str, leaf: Any) -> Holding:
    if not hasattr(leaf, "dtype"):
        return Holding(path, (), type(leaf).__name__, "not on a device", 0, None)
    sharding = getattr(leaf, "sharding", None)
    shape, dtype = tuple(leaf.shape), str(leaf.dtype)
    if sharding is None:
        return Holding(path, shape, dtype, "not on a device", 0, None)
    kind = sharding.memory_kind if sharding.memory_kind not in (None, "device") else None
    return Holding(path, shape, dtype, lies(sharding, shape), device_bytes(leaf, sharding), kind)


def device_bytes(leaf: Any, sharding: Sharding) -> int:
    """Bytes that one device holds of an array, or of a shape, placed so."""
    return math.prod(sharding.shard_shape(tuple(leaf.shape))) * leaf.dtype.itemsize


def lies(sharding: Sharding, shape: Sequence[int]) -> str:
    """How an array of a shape lies, in words."""
    count = len(sharding.device_set)
    if sharding.is_fully_replicated or math.prod(sharding.shard_shape(tuple(shape))) == math.prod(
        shape
    ):
        return f"whole on each of {count}" if count > 1 else "whole on one device"
    if not isinstance(sharding, NamedSharding):
        return f"in parts of {sharding.shard_shape(tuple(shape))} on {count} devices"
    sizes, used, parts = sharding.mesh.shape, set(), []
    for dim, entry in enumerate(sharding.spec):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        used.update(names)
        number = math.prod(sizes[name] for name in names)
        if number > 1:
            parts.append(f"dim {dim} over {', '.join(names)} ({number})")
    copies = [name for name in sizes if name not in used and sizes[name] > 1]
    rest = f"; a copy for each of {', '.join(copies)}" if copies else ""
    return f"split: {' and '.join(parts)}{rest}"


def human(size: int) -> str:
    """Bytes with a decimal unit, three digits: 1.23 GB."""
    value, units = float(abs(size)), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    digits = 0 if units[0] == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{'-' if size < 0 else ''}{value:.{digits}f} {units[0]}"


def table(lines: Iterable[Sequence[str]], *, numbers: Sequence[int]) -> str:
    """Lines of cells as text, columns aligned; those named in `numbers` to the right."""
    rows = [tuple(line) for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = [
        "  ".join(
            cell.rjust(width) if place in numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(text)
