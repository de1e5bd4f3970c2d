"""Where the time went, from the profiler's own trace: what each device ran, and what the host did.

    with record() as recording: ...      jax.profiler writes a trace, which is read again
    recording.trace  --breakdown-->  compute | exposed communication | input | host

What is read is `jax.profiler.ProfileData`: on GPUs and TPUs the planes of the devices, on CPU the
operations that XLA's threads note, each with the device it ran for. Nothing is measured here by
any clock but the profiler's, and nothing of jdp's is changed while it runs.

Every moment belongs to the first of these that holds:

    compute          an operation that is no collective runs
    communication    a collective runs, or waits for other devices: exposed, since none computes
    input            the host is inside `marked("input")`
    host             anything else: dispatch, the loop's own Python, gaps between operations

Accelerators are looked at one by one, and averaged. Emulated devices take turns on the cores of
one host: there a moment is compute if *any* of them computes, so that waiting for one's turn is
not called communication.
"""

import contextlib
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jdp.hlo import COLLECTIVES

_DEVICE_PLANE = re.compile(r"/device:(?:GPU|TPU):(\d+)")
_MARK = "jdp: "
# Lines of a device's plane that repeat what others say: modules, steps, source code.
_OTHER_LINES = ("XLA Modules", "Steps", "Framework", "Source", "TensorFlow", "Launch Stats")
_CONTAINERS = re.compile(r"(while|conditional|call)(\.[\w.]+)?$")

Intervals: TypeAlias = np.ndarray
"""Starts and ends in seconds, [count, 2], sorted and apart."""


class Op(NamedTuple):
    """An operation that a device ran.

    Attributes:
        device: Its device, counted on its own process.
        name: As the compiled program calls it.
        communicates: Whether it is a collective.
        start: Seconds since the trace began.
        end: Likewise.
    """

    device: int
    name: str
    communicates: bool
    start: float
    end: float


class Mark(NamedTuple):
    """What the host was doing, see `marked`."""

    name: str
    start: float
    end: float


class Trace(NamedTuple):
    """What a trace tells.

    Attributes:
        ops: Operations of devices. Those that only hold others (loops, calls) are left out.
        marks: What the host has marked.
        shares_cores: Whether the devices are CPU devices, which share the cores of their host.
    """

    ops: tuple[Op, ...]
    marks: tuple[Mark, ...]
    shares_cores: bool


class Breakdown(NamedTuple):
    """Seconds of a stretch of time, by what they went to; the first four add up to it.

    Who comes to a collective last waits for nobody: what others are in it for longer is waiting.

    Attributes:
        compute: Devices computed.
        communication: They were in a collective and did not compute.
        input: The host waited for the next batch, and the devices for it.
        host: The rest.
        hidden: Of compute, the time in which collectives ran beside it.
        least: Of communication, what the device had of it that had least.
    """

    compute: float
    communication: float
    input: float
    host: float
    hidden: float
    least: float

    @property
    def total(self) -> float:
        """Seconds of the stretch."""
        return self.compute + self.communication + self.input + self.host


class Recording:
    """A trace that is being written; `trace` is there once the `with` has ended."""

    trace: Trace


@contextlib.contextmanager
def record(collectives: Collection[str] = (), folder: Path | None = None) -> Iterator[Recording]:
    """Traces what runs inside the `with`, and reads the trace.

    Args:
        collectives: Names of operations that are collectives, besides those whose names say so.
        folder: Where to keep the trace, for xprof or Perfetto; `None` keeps none.

    Yields:
        A `Recording`.

    Raises:
        RuntimeError: If another trace is being recorded.

    Example:
        >>> with record() as recording, marked("input"):
        ...     _ = jnp.ones(8).block_until_ready()
        >>> [mark.name for mark in recording.trace.marks]
        ['input']
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each Python call would cost more than a small operation
    recording = Recording()
    with contextlib.ExitStack() as stack:
        kept = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            jax.profiler.start_trace(str(kept), profiler_options=options)
        except Exception as error:
            raise RuntimeError(
                f"jax.profiler did not start ({error}). Only one trace can be recorded at a time: "
                "end the other one, or measure without it."
            ) from error
        try:
            yield recording
        finally:
            jax.profiler.stop_trace()
        recording.trace = read(kept, collectives)


def marked(name: str) -> Any:
    """A context whose time the trace knows by this name."""
    return jax.profiler.TraceAnnotation(_MARK + name)


def read(folder: Path, collectives: Collection[str] = ()) -> Trace:
    """Reads the newest trace in a folder that `jax.profiler` has written, see `record`.

    Raises:
        FileNotFoundError: If there is none.
    """
    files = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(
            f"There is no trace (*.xplane.pb) in {folder}. It is the folder that was given to "
            "jax.profiler.trace."
        )
    with warnings.catch_warnings():
        # Of types without a module, which jaxlib makes; where warnings are errors, it aborts.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _read(jax.profiler.ProfileData.from_file(str(files[-1])), collectives)


def _read(data: Any, collectives: Collection[str]) -> Trace:
    """What the planes of a profile tell."""
    ops, marks, shares_cores = [], [], False
    for plane in data.planes:
        device = _DEVICE_PLANE.match(plane.name)
        for line in plane.lines:
            if device and not line.name.startswith(_OTHER_LINES):
                found = _device_ops(line, int(device.group(1)), collectives)
                beside = line.name.startswith("Async")  # copies, which leave the cores free
                ops += [op for op in found if op.communicates or not beside]
            elif plane.name.startswith("/host:CPU"):
                found = list(_host_ops(line, collectives))
                shares_cores |= bool(found)
                ops += found
                marks += _marks(line)
    return Trace(
        tuple(_without_containers(ops)), tuple(sorted(marks, key=lambda x: x.start)), shares_cores
    )


def _host_ops(line: Any, collectives: Collection[str]) -> Iterator[Op]:
    """What XLA:CPU ran: events that tell their operation and device."""
    for event in line.events:
        if event.name.startswith(("ThreadpoolListener", "end: ")):
            continue
        told = dict(event.stats)
        if "hlo_op" in told and "device_ordinal" in told:
            yield _op(event, int(told["device_ordinal"]), str(told["hlo_op"]), collectives)


def _device_ops(line: Any, device: int, collectives: Collection[str]) -> Iterator[Op]:
    """What an accelerator ran; a TPU names an operation by its whole line of the program."""
    for event in line.events:
        told = str(dict(event.stats).get("hlo_op", event.name))
        if name := re.match(r"%?([\w.\-]+)", told):
            yield _op(event, device, name.group(1), collectives)


def _op(event: Any, device: int, name: str, collectives: Collection[str]) -> Op:
    communicates = name.startswith(COLLECTIVES) or name in collectives
    start = event.start_ns / 1e9
    return Op(device, name, communicates, start, start + event.duration_ns / 1e9)


def _marks(line: Any) -> Iterator[Mark]:
    for event in line.events:
        if event.name.startswith(_MARK):
            start = event.start_ns / 1e9
            yield Mark(event.name.removeprefix(_MARK), start, start + event.duration_ns / 1e9)


def _without_containers(ops: Iterable[Op]) -> Iterator[Op]:
    """Leaves out loops and calls around other operations: what is inside is there by itself."""
    by_device: dict[int, list[Op]] = defaultdict(list)
    for op in ops:
        by_device[op.device].append(op)
    for some in by_device.values():
        some.sort(key=lambda op: (op.start, -op.end))
        for op, after in zip(some, [*some[1:], None], strict=True):
            holds = after is not None and after.end <= op.end
            if not (holds and _CONTAINERS.match(op.name)):
                yield op


def breakdown(trace: Trace, start: float, end: float) -> Breakdown:
    """What the time from `start` to `end` went to, see the module.

    Args:
        trace: The trace.
        start: Seconds since the trace began, such as the start of a mark.
        end: Likewise.

    Returns:
        Seconds; of several accelerators, their mean.
    """
    devices = sorted({op.device for op in trace.ops})
    groups = [set(devices)] if trace.shares_cores or not devices else [{one} for one in devices]
    found = [_of_group(trace, group, start, end) for group in groups]
    means = Breakdown(*(float(np.mean(column)) for column in zip(*found, strict=True)))
    return means._replace(least=min(one.least for one in found))


def _of_group(trace: Trace, devices: set[int], start: float, end: float) -> Breakdown:
    mine = [op for op in trace.ops if op.device in devices]
    window = np.array([[start, end]])
    computes = common(window, union((op.start, op.end) for op in mine if not op.communicates))
    sends = common(window, union((op.start, op.end) for op in mine if op.communicates))
    waits = common(window, union((m.start, m.end) for m in trace.marks if m.name == "input"))
    busy = union([*computes, *sends])
    compute, hidden = length(computes), length(common(computes, sends))
    communication = length(sends) - hidden
    waiting = length(waits) - length(common(waits, busy))
    rest = end - start - length(busy) - waiting
    return Breakdown(compute, communication, waiting, rest, hidden, communication)


def busy(trace: Trace, start: float, end: float) -> dict[int, tuple[float, float]]:
    """Seconds in which each device computed, and in which it was in collectives."""
    window = np.array([[start, end]])

    def seconds(device: int, communicates: bool) -> float:
        mine = (op for op in trace.ops if op.device == device and op.communicates is communicates)
        return length(common(window, union((op.start, op.end) for op in mine)))

    devices = sorted({op.device for op in trace.ops})
    return {device: (seconds(device, False), seconds(device, True)) for device in devices}


def union(intervals: Iterable[Sequence[float]]) -> Intervals:
    """The times that any of the intervals covers.

    Example:
        >>> union([(0, 2), (1, 3), (5, 6)]).tolist()
        [[0.0, 3.0], [5.0, 6.0]]
    """
    some = np.array(sorted(map(tuple, intervals)), float).reshape(-1, 2)
    if not len(some):
        return some
    reached = np.maximum.accumulate(some[:, 1])
    first = np.concatenate([[True], some[1:, 0] > reached[:-1]])
    last = np.concatenate([np.flatnonzero(first)[1:] - 1, [len(some) - 1]])
    return np.stack([some[first, 0], reached[last]], axis=1)


def common(a: Intervals, b: Intervals) -> Intervals:
    """The times that both cover.

    Example:
        >>> common(union([(0, 3), (5, 9)]), union([(2, 6)])).tolist()
        [[2.0, 3.0], [5.0, 6.0]]
    """
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i, 0], b[j, 0]), min(a[i, 1], b[j, 1])
        if start < end:
            found.append((start, end))
        if a[i, 1] < b[j, 1]:
            i += 1
        else:
            j += 1
    return np.array(found, float).reshape(-1, 2)


def length(intervals: Intervals) -> float:
    """Seconds of all of them."""
    return float((intervals[:, 1] - intervals[:, 0]).sum()) if len(intervals) else 0.0
