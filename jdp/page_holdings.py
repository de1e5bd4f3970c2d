"""Who holds what of a state, as a picture: leaves by devices.

    Holdings, mesh  --held-->  a section of HTML

A column stands for a device, a row for a leaf, or for the same leaf of several layers; what of it a
device holds is filled. A leaf that all hold whole is a full row, one that is split a staircase.
"""

import math
import re
from collections.abc import Sequence

from jdp.holdings import Holding, Holdings, human
from jdp.page_parts import Column, page_text, table

_MOST_LEAVES = 12  # rows of each part of a state
_INDEX = r"(?<=\[)\d+(?=\])"
_APART = 64  # devices: of more, columns touch

_Layers = tuple[str, int, Holding]  # what they are called, how many, one of them


def held(found: Holdings, mesh: dict[str, int]) -> str:
    """The picture, part by part of the state: parameters, optimizer state, the rest.

    Args:
        found: What each device holds.
        mesh: Size of each mesh axis.
    """
    parts: dict[str, list[Holding]] = {name: [] for name in found.parts}
    for row in found.rows:
        parts.setdefault(re.split(r"[.\[]", row.path, maxsplit=1)[0], []).append(row)
    body = "".join(
        _part(name, rows, found.parts.get(name, 0), mesh)
        for name, rows in sorted(parts.items(), key=lambda x: _rank(x[0], found))
        if rows
    )
    last = math.prod(mesh.values()) - 1
    columns = [
        Column("leaf"),
        Column("shape", "more"),
        Column(f"devices 0 to {last}" if last else "device 0"),
        Column("each", "number"),
        Column("lies", "more"),
    ]
    return (
        f"<section><h2>Who holds what of the state: {human(found.total)} on each device</h2>"
        "<p>A column for each device, filled with what it holds of the leaf: all of it, or a "
        f"part.</p>{table(columns, body, 'held')}</section>"
    )


def _rank(part: str, found: Holdings) -> tuple[int, int]:
    """Parameters first, then their optimizer's state, then the largest."""
    first = ("params", "opt_state")
    return (first.index(part) if part in first else len(first), -found.parts.get(part, 0))


def _part(name: str, rows: Sequence[Holding], size: int, mesh: dict[str, int]) -> str:
    color = {"params": "params", "opt_state": "opt"}.get(name, "rest")
    order = sorted(layers(rows), key=lambda x: -x[1] * x[2].bytes)
    most = len(order) if len(order) == _MOST_LEAVES + 1 else _MOST_LEAVES  # not a single one apart
    shown, rest = order[:most], order[most:]
    body = "".join(_leaf(x, name, color, mesh) for x in shown)
    if rest:
        count, small = sum(x[1] for x in rest), sum(x[1] * x[2].bytes for x in rest)
        body += _row('class="faint"', f"{count} smaller leaves", "", "", human(small), "")
    if len(rows) == 1 and rows[0].path == name:
        return body
    return _row('class="part"', page_text(name), "", "", human(size), "") + body


def layers(rows: Sequence[Holding]) -> list[_Layers]:
    """The same leaf of several layers as one, with the range of its index in its name.

    Args:
        rows: Leaves of one part of a state.
    """
    groups: dict[Holding, list[str]] = {}
    for row in rows:
        groups.setdefault(row._replace(path=re.sub(_INDEX, "", row.path)), []).append(row.path)
    return [(_name(paths), len(paths), row) for row, paths in groups.items()]


def _name(paths: Sequence[str]) -> str:
    between = re.split(_INDEX, paths[0])
    indices = zip(*([int(x) for x in re.findall(_INDEX, path)] for path in paths), strict=True)
    ranges = [f"{min(x)}..{max(x)}" if min(x) < max(x) else str(x[0]) for x in indices]
    return "".join(a + b for a, b in zip(between, [*ranges, ""], strict=True))


def _leaf(found: _Layers, part: str, color: str, mesh: dict[str, int]) -> str:
    path, count, row = found
    name = path.removeprefix(part).lstrip(".") if path != part else part
    where = row.lies + (f", in {row.memory_kind}" if row.memory_kind else "")
    shape = f"{f'{count} of ' if count > 1 else ''}{' x '.join(map(str, row.shape)) or 'scalar'}"
    tip = page_text(f"{path}: {shape} {row.dtype}\n{where}")
    return _row(
        f'title="{tip}"',
        page_text(name),
        f"{shape} <small>{page_text(row.dtype)}</small>",
        _strip(row, color, mesh),
        human(count * row.bytes),
        f"<small>{page_text(where)}</small>",
    )


def _row(attributes: str, name: str, shape: str, strip: str, size: str, lies: str) -> str:
    return (
        f'<tr {attributes}><th scope="row"><bdi>{name}</bdi></th><td class="more">{shape}</td>'
        f'<td class="strip">{strip}</td><td class="number">{size}</td>'
        f'<td class="more">{lies}</td></tr>'
    )


def _strip(row: Holding, color: str, mesh: dict[str, int]) -> str:
    """What each device holds, as a height between top and bottom of the leaf."""
    if not row.bytes:
        return ""
    count = math.prod(mesh.values())
    wide = 0.9 if count <= _APART else 1.0
    axes = [x for names in re.findall(r"over ([^()]+) \(", row.lies) for x in names.split(", ")]
    high = 100 / math.prod(mesh.get(name, 1) for name in axes)
    path = "".join(
        f"M{k} {high * _place(k, axes, mesh):.2f}h{wide}v{high:.2f}h-{wide}z" for k in range(count)
    )
    return (
        f'<svg viewBox="0 0 {count} 100" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="f-{color}" d="{path}"/></svg>'
    )


def _place(device: int, axes: Sequence[str], mesh: dict[str, int]) -> int:
    """The number of the part that a device holds, from its place in the mesh."""
    at, rest = {}, device
    for name in reversed(mesh):
        rest, at[name] = divmod(rest, mesh[name])
    number = 0
    for name in axes:
        number = number * mesh.get(name, 1) + at.get(name, 0)
    return number
