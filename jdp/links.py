"""How fast devices reach each other and their host: measured, and fitted to a latency and a rate.

    mesh  --measure-->  Links: for each axis and collective, seconds by size; a `Link` for each axis

Each collective is run alone, on arrays of a few sizes, some times; the median of each size enters a
least-squares fit of the alpha-beta model of `jdp.costs`, so what `collective_seconds` makes of the
fitted link is the time that was measured. All processes of the mesh must measure together. Nothing
here knows a model or a step.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.costs import collective_seconds
from jdp.hardware import Link
from jdp.holdings import human, table
from jdp.processes import Channel
from jdp.reporting import as_json

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
SIZES = (2**12, 2**16, 2**20, 2**23)
SECONDS = 20.0
_REPEATS = 7  # an odd number, for the median
_MISFIT = 0.5  # relative error of a fit beyond which its figures are called into question
_UNSEEN = 1e15  # bytes a second, where time does not grow with the size
_UNIT = Link(1.0, 0.0, ""), Link(float("inf"), 1.0, "")  # seconds for each byte/s, each latency


class Measured(NamedTuple):
    """Times of one collective along one axis.

    Attributes:
        axis: Mesh axis.
        kind: As XLA calls it, such as "all-reduce".
        devices: How many take part.
        sizes: Bytes of the whole array: what is reduced, gathered or exchanged.
        seconds: Median time of each size; of several processes, the slowest one's.
        link: What fits these.
        off: Largest difference of the fit from a time, relative to the time.
    """

    axis: str
    kind: str
    devices: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    link: Link
    off: float


class Links(NamedTuple):
    """What was measured; printing it shows a table.

    Attributes:
        rows: One for each axis and collective.
        axes: What fits all collectives of an axis; `jdp.plan(links=...)` takes them.
        to_device: From host memory to a device.
        to_host: Back.
        seconds: How long it took to measure.
        notes: What to know when reading the figures.
    """

    rows: tuple[Measured, ...]
    axes: dict[str, Link]
    to_device: Link
    to_host: Link
    seconds: float
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """As JSON; `from_json` reads it."""
        return json.dumps(as_json(self))

    @classmethod
    def from_json(cls, text: str) -> "Links":
        """Reads what `to_json` wrote."""
        return cls.of(json.loads(text))

    @classmethod
    def of(cls, told: Any) -> "Links":
        """From the dictionaries and lists of the JSON."""
        rows = [
            Measured(
                **row
                | {key: tuple(row[key]) for key in ("sizes", "seconds")}
                | {"link": Link(**row["link"])}
            )
            for row in told["rows"]
        ]
        axes = {name: Link(**link) for name, link in told["axes"].items()}
        ends = {name: Link(**told[name]) for name in ("to_device", "to_host")}
        return cls(tuple(rows), axes, **ends, seconds=told["seconds"], notes=tuple(told["notes"]))

    def __repr__(self) -> str:
        return str(self)  # in a terminal or a notebook, too

    def __str__(self) -> str:
        lines = [("axis", "collective", "devices", "latency", "rate", "fit within")]
        for row in self.rows:
            off = f"{row.off:.0%}"
            lines.append((row.axis, row.kind, str(row.devices), *_figures(row.link), off))
        for name, link in self.axes.items():
            lines.append((name, "all of them", "", *_figures(link), ""))
        lines.append(("host", "to a device", "1", *_figures(self.to_device), ""))
        lines.append(("host", "from a device", "1", *_figures(self.to_host), ""))
        text = table(lines, numbers=(2, 3, 4, 5))
        return "\n".join([text, *(f"Note: {note}" for note in self.notes)])


def _figures(link: Link) -> tuple[str, str]:
    rate = "not seen" if link.bytes_per_s >= _UNSEEN else f"{human(int(link.bytes_per_s))}/s"
    return f"{1e6 * link.latency_s:.1f} us", rate


def measure(
    mesh: Mesh,
    *,
    kinds: Sequence[str] = KINDS,
    sizes: Sequence[int] = SIZES,
    seconds: float = SECONDS,
) -> Links:
    """Measures each collective along each axis of a mesh, and copies between host and device.

    Guarantees:
        - `collective_seconds(kind, size, devices, row.link)` is the measured time within `row.off`.
        - Once `seconds` are over no larger size is begun; the two smallest of each collective are
          always measured, since a line needs two points.

    Args:
        mesh: The mesh. Every process of it must call this, with the same arguments.
        kinds: Collectives: "all-reduce", "all-gather", "reduce-scatter", "all-to-all".
        sizes: Bytes of the whole array, at least two.
        seconds: When to stop, about.

    Returns:
        Times and links.

    Raises:
        ValueError: If there are fewer than two sizes, or no such kind.

    Example:
        >>> found = measure(jdp.make_mesh(), kinds=["all-reduce"], sizes=[2**10, 2**18])
        >>> found.rows[0].devices, found.axes["data"].bytes_per_s > 0
        (8, True)
    """
    _validate(kinds, sizes)
    began, channel = time.perf_counter(), _channel(mesh)
    late = lambda: _slowest(time.perf_counter() - began, channel) > seconds  # noqa: E731
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    rows = [_collective(mesh, axis, kind, sizes, channel, late) for axis in axes for kind in kinds]
    by_axis = {
        axis: fit(
            [
                (row.kind, size, row.devices, spent)
                for row in rows
                if row.axis == axis
                for size, spent in zip(row.sizes, row.seconds, strict=True)
            ],
            f"measured along {axis!r}, {mesh.shape[axis]} devices",
        )[0]
        for axis in axes
    }
    (to_device, *there), (to_host, *back) = _host_links(mesh, sizes)
    fits = [(f"{row.kind} along {row.axis!r}", row.off) for row in rows]
    fits += [("host to device", max(there)), ("device to host", max(back))]
    notes = (*_notes(mesh, axes), *_misfits(fits))
    taken = time.perf_counter() - began
    return Links(tuple(rows), by_axis, to_device, to_host, taken, notes)


def _validate(kinds: Sequence[str], sizes: Sequence[int]) -> None:
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or len(set(sizes)) < 2 or min(sizes) < 1:
        raise ValueError(
            f"Links cannot be measured with kinds={list(kinds)} and sizes={list(sizes)}: the kinds "
            f"are {', '.join(KINDS)}, and a latency and a rate need two sizes in bytes or more."
        )


def _notes(mesh: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    notes = []
    if not axes:
        notes.append("The mesh has one device: there is no link between devices to measure.")
    if mesh.devices.flat[0].platform == "cpu" and len(mesh.local_devices) > 1:
        notes.append(
            f"{len(mesh.local_devices)} emulated devices share the cores and the memory of one "
            "host: what is called a link here is copying and waiting for threads to meet. It says "
            "nothing about a GPU or TPU."
        )
    return tuple(notes)


def _misfits(fits: Sequence[tuple[str, float]]) -> Iterator[str]:
    """A note on times that no latency and rate explain."""
    worst = [f"{name} (off by {off:.0%})" for name, off in fits if off > _MISFIT]
    if worst:
        yield (
            f"Times of {', '.join(worst)} do not follow a latency and a rate, so these figures "
            "mean little: something else was running, or sizes take different ways. Measure again "
            "on a quiet machine, or believe the seconds of each size in `rows`."
        )


def _channel(mesh: Mesh) -> Channel | None:
    members = sorted({device.process_index for device in mesh.devices.flat})
    return Channel("jdp.links", members) if len(members) > 1 else None


def _slowest(seconds: float, channel: Channel | None) -> float:
    """The longest of the times of all processes, so that all decide alike."""
    return max(map(float, channel.exchange(repr(seconds)).values())) if channel else seconds


def _collective(
    mesh: Mesh,
    axis: str,
    kind: str,
    sizes: Sequence[int],
    channel: Channel | None,
    late: Callable[[], bool],
) -> Measured:
    """Times of one collective along one axis, for as many sizes as there is time for."""
    devices, found = mesh.shape[axis], {}
    for size in sorted(set(sizes)):
        if len(found) >= 2 and late():
            break
        run, array = _program(mesh, axis, kind, size)
        taken = _slowest(_median(lambda run=run, x=array: run(x)), channel)
        found[array.nbytes // devices] = taken  # `_program` rounds up
    points = [(kind, size, devices, spent) for size, spent in found.items()]
    link, off = fit(points, f"{kind} measured along {axis!r}, {devices} devices")
    return Measured(axis, kind, devices, tuple(found), tuple(found.values()), link, off)


def _program(mesh: Mesh, axis: str, kind: str, size: int) -> tuple[Callable[..., Any], jax.Array]:
    """A collective and what to give it: the whole array of `size` bytes on each device."""
    count = mesh.shape[axis]
    length = -(-size // (4 * count)) * count  # float32, to be divided by the devices
    if kind == "all-gather":
        # each device gives its part only; kept whole beside it so that sizes read alike
        body = lambda x: jax.lax.all_gather(x[: length // count], axis, tiled=True)  # noqa: E731
    elif kind == "reduce-scatter":
        body = lambda x: jax.lax.psum_scatter(x, axis, tiled=True)  # noqa: E731
    elif kind == "all-to-all":
        body = lambda x: jax.lax.all_to_all(x, axis, 0, 0, tiled=True)  # noqa: E731
    else:
        body = lambda x: jax.lax.psum(x, axis)  # noqa: E731
    spec = P() if kind == "all-reduce" else P(axis)
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(axis), out_specs=spec))
    placed = NamedSharding(mesh, P(axis))
    zeros = jax.jit(lambda: jax.numpy.zeros(length * count, np.float32), out_shardings=placed)
    return run, zeros()


def _median(run: Callable[[], Any]) -> float:
    """Median seconds of a call that is waited for; the first two are not counted."""
    found = []
    for call in range(_REPEATS + 2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        if call > 1:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def _host_links(mesh: Mesh, sizes: Sequence[int]) -> tuple[tuple[Link, float], tuple[Link, float]]:
    """Copies to this process's first device, and back."""
    device, there, back = mesh.local_devices[0], [], []
    for size in sorted(set(sizes)):
        host = np.ones(-(-size // 4), np.float32)
        put = lambda host=host: jax.device_put(host, device, may_alias=False)  # noqa: E731
        there.append(("collective-permute", host.nbytes, 2, _median(put)))
        arrays = iter([jax.block_until_ready(put()) for _ in range(_REPEATS + 2)])
        # a new array each time: one that was read keeps its copy
        fetch = lambda arrays=arrays: np.array(next(arrays), copy=True)  # noqa: E731
        back.append(("collective-permute", host.nbytes, 2, _median(fetch)))
    return (
        fit(there, "measured, host memory to a device"),
        fit(back, "measured, a device to host memory"),
    )


def fit(points: Sequence[tuple[str, int, int, float]], source: str) -> tuple[Link, float]:
    """The link that explains times of collectives best.

    Of all latencies and rates it takes those with the least sum of squared relative errors, so
    that small sizes count as much as large ones.

    Args:
        points: Kind, bytes, devices and seconds of each measurement.
        source: Where they come from, for `Link.source`.

    Returns:
        The link, and its largest relative error.

    Example:
        >>> true = Link(1e9, 1e-6, "")
        >>> sizes = [10**3, 10**6]
        >>> link, off = fit(
        ...     [("all-reduce", s, 8, collective_seconds("all-reduce", s, 8, true)) for s in sizes],
        ...     "made up")
        >>> f"{link.bytes_per_s:.3g} {link.latency_s:.3g}"
        '1e+09 1e-06'
    """
    spent = np.array([seconds for *_, seconds in points])
    made_of = [[collective_seconds(*p[:3], unit) for unit in _UNIT] for p in points]
    scaled = np.array(made_of) / spent[:, None]  # what x = (1 / rate, latency) makes of it: 1
    found = np.linalg.lstsq(scaled, np.ones(len(points)))[0]
    if min(found) <= 0:  # noise, or a size at which the other term is not to be seen
        alone = [column @ np.ones(len(points)) / (column @ column) for column in scaled.T]
        errors = [np.square(scaled[:, k] * alone[k] - 1).sum() for k in (0, 1)]
        best = int(np.argmin(errors))
        found = np.array([alone[k] if k == best else 0.0 for k in (0, 1)])
    rate = min(1 / found[0], _UNSEEN) if found[0] > 0 else _UNSEEN
    off = float(np.abs(scaled @ found - 1).max())
    return Link(float(rate), float(found[1]), source), off
