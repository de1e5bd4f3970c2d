"""`jdp.explain`: what the compiler makes of a training step, here or on hardware that is not here.

    step, state, batch, target  --explain-->  Report (`jdp.reporting`)

The step is compiled for the devices (`jdp.compiling`), the program is read (`jdp.schedule`,
`jdp.memory`), its products are counted in what was traced (`jdp.flops`), and set beside what the
chip can do (`jdp.hardware`, `jdp.costs`). Nothing runs, nothing is allocated, and the report of a
program that was seen before is read from the user's cache.
"""

import hashlib
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jdp.asked import as_asked, sends
from jdp.compiling import (
    Job,
    Outcome,
    asked_and_limit,
    compile_for_report,
    on_target,
)
from jdp.costs import collective_seconds, floor_bytes
from jdp.flops import flops
from jdp.groups import Groups
from jdp.hardware import Chip, find_chip
from jdp.holdings import Holdings, holdings, human
from jdp.memory import Memory, memory_of
from jdp.mesh import axis_size, data_axes
from jdp.padded import logical
from jdp.reporting import Floor, Report, microseconds
from jdp.roofline import Roofline
from jdp.schedule import Seconds, walk
from jdp.sent import Sent, Walked
from jdp.split import find_placement
from jdp.targets import Target
from jdp.targets import target as find_target
from jdp.train import TrainStep

__all__ = ["Floor", "Report", "explain"]


def explain(
    step: TrainStep,
    state: Any,
    batch: Any,
    target: str | None = None,
    *,
    cache: bool | str | os.PathLike[str] = True,
    progress: Callable[[str], None] | None = None,
    chip: Chip | None = None,
) -> Report:
    """Compiles a step and tells what it sends, keeps, computes and hides.

    Guarantees:
        - What is sent and kept is read from the compiled program; times are modelled, by the
          compiler where it tells.
        - Nothing runs, and no array is made: shapes will do.
        - A program that does not fit is an answer: `fits` is False and `verdict` says what lacks.

    Args:
        step: What `jdp.train_step` returned.
        state: Its state, or shapes (`jdp.init_state` with shapes for parameters).
        batch: A global batch, or shapes.
        target: Hardware that need not be here, such as "v5e:4x4" or "h100:2x8", see
            `jdp.targets`; `None` takes the step's own devices.
        cache: Use and keep reports in the user's cache folder, or in the folder given.
        progress: Is told what is being done; `None` shows it where a terminal is.
        chip: Figures to use instead of those in `jdp.hardware`, with measured links for example.

    Returns:
        A `Report`.

    Raises:
        ValueError: If there is no such target, or the batch does not divide among its devices.
        ImportError: If the compiler for it is not installed.

    Example:
        >>> tx, mesh = optax.chain(jdp.all_reduce(), optax.sgd(0.1)), jdp.make_mesh()
        >>> step = jdp.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh)
        >>> state = jdp.init_state({"w": jnp.ones((256, 64))}, tx, mesh)
        >>> found = explain(step, state, jnp.ones((16, 256)), cache=False)
        >>> [(x.kind, x.axes, x.times, x.made_by) for x in found.collectives]
        [('all-reduce', ('data',), 1, 'jdp.all_reduce')]
        >>> found.flops, found.floor.ratio < 1.001
        (131072.0, True)
    """
    _check(step, state)
    there = None if target is None else find_target(target)
    with _telling(progress) as say:
        say(f"tracing for {target or 'the devices at hand'}")
        job = on_target(step, state, batch, there)
        device = job.mesh.devices.flat[0]
        chip = chip or (there.chip if there else find_chip(device.device_kind))
        held = holdings(job.state)
        if job.lack:  # not even the state can be made there
            return _report(job, held, Outcome(None, job.lack, ()), chip, None, there)
        traced = job.step.trace(job.state, job.batch)
        lowered = traced.lower()
        kept = _kept(cache, lowered, job, held, target, chip)
        if kept is not None and (known := _read(kept)):
            return known._replace(cached=True)
        say(f"compiling for {target or device.platform}, which may take a minute")
        begin = time.perf_counter()
        outcome = compile_for_report(lowered, device.platform)
        seconds = time.perf_counter() - begin
        say("reading the program")
        made = _report(job, held, outcome, chip, traced, there)
        made = made._replace(collectives=as_asked(made.collectives, sends(lowered)))
    found = made._replace(compile_s=seconds, notes=(*made.notes, *outcome.notes))
    if kept is not None:
        _write(kept, found)
    return found


def _check(step: Any, state: Any) -> None:
    if not isinstance(step, TrainStep):
        raise TypeError(
            f"jdp.explain got a {type(step).__name__} as its step, but it needs to build the step "
            "anew for other devices. Give what jdp.train_step returned."
        )
    if not all(hasattr(state, name) for name in ("step", "params", "opt_state")):
        raise TypeError(
            f"jdp.explain got a {type(state).__name__} as its state. Give what jdp.init_state "
            "returned; jdp.explain(step, state, batch)."
        )


def _report(
    job: Job, held: Holdings, outcome: Any, chip: Chip | None, traced: Any, target: Target | None
) -> Report:
    mesh, compiled = job.mesh, outcome.compiled
    device = mesh.devices.flat[0]
    limit = chip.memory if chip and device.platform != "cpu" else None
    if compiled is None:
        walked = Walked((), (), None, None, None, None, 0.0, ())
        used, told = asked_and_limit(outcome.lack)
        memory, limit = _lacking(held, job, used), told or limit
        fits = False
    else:
        seconds = _seconds(chip, mesh, target)
        walked = walk(compiled.as_text(), mesh, seconds=seconds, roofline=_roofline(chip))
        memory = memory_of(compiled, job.state, job.batch)
        fits = None if limit is None else memory.total <= limit
    count = None if traced is None else flops(traced.jaxpr, mesh.size)
    peak = chip.flops.get("bf16", 0.0) if chip else 0.0
    us = walked.step_us
    report = Report(
        target=target.name if target else "",
        devices=mesh.size,
        mesh=dict(mesh.shape),
        platform=device.platform,
        chip=chip.name if chip else None,
        versions=_versions(device.platform),
        compile_s=None,
        cached=False,
        fits=fits,
        collectives=walked.collectives,
        memory=memory,
        memory_limit=limit,
        flops=count,
        bytes_moved=walked.bytes_moved or None,
        compute_us=walked.compute_us,
        sent_us=walked.sent_us,
        exposed_us=walked.exposed_us,
        step_us=us,
        mfu=count / (us * 1e-6 * peak) if count and us and peak else None,
        verdict="",
        floor=_floor(job, walked.collectives),
        spans=walked.spans,
        holdings=held,
        notes=(*job.notes, *walked.notes),
    )
    return report._replace(verdict=_verdict(report, chip, outcome.lack))


def _roofline(chip: Chip | None) -> Roofline | None:
    """What a chip can do at best, if its figures are known."""
    if chip is None or chip.platform == "cpu" or not {"bf16", "f32"} <= set(chip.flops):
        return None
    return Roofline(chip.flops, chip.memory_bytes_per_s)


def _seconds(chip: Chip | None, mesh: Mesh, target: Target | None) -> Seconds | None:
    """How long collectives take on a chip's links, within nodes and between them."""
    if chip is None or chip.platform == "cpu":
        return None
    devices = list(mesh.devices.flat)
    if target is None:
        node = [device.process_index for device in devices]
    else:
        place = {device: k // target.per_node for k, device in enumerate(target.devices)}
        node = [place[device] for device in devices]

    def seconds(kind: str, size: int, group: int, groups: Groups) -> float:
        nodes = max(len({node[member] for member in found}) for found in groups)
        if nodes == 1 or chip.outer is None:
            return collective_seconds(kind, size, group, chip.inner)
        if group % nodes:  # pairs of a permutation, groups that lie unevenly
            return collective_seconds(kind, size, group, chip.outer)
        return collective_seconds(kind, size, group, chip.inner, outer=chip.outer, nodes=nodes)

    return seconds


def _lacking(held: Holdings, job: Job, used: int | None) -> Memory | None:
    """Memory of a program that there is not: state and batch as they lie, the rest unexplained."""
    if used is None:
        return None
    batch = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(job.batch))
    batch //= axis_size(job.mesh, data_axes(job.mesh))
    params, opt_state = held.parts.get("params", 0), held.parts.get("opt_state", 0)
    other = held.total - params - opt_state
    return Memory(
        parameters=params,
        optimizer_state=opt_state,
        other_state=other,
        batch=batch,
        outputs=0,
        gradients=0,
        activations=0,
        collectives=0,
        other=0,
        padding=0,
        unexplained=max(0, used - held.total - batch),
        total=max(used, held.total + batch),
        host=0,
        largest={},
        method="what the compiler asked for in vain, beyond state and batch",
    )


def _floor(job: Job, collectives: tuple[Sent, ...]) -> Floor:
    """What is sent beside what the strategy has to send."""
    axes = data_axes(job.mesh)
    count = axis_size(job.mesh, axes)
    placement = find_placement(job.state.opt_state)
    stage = placement.stage if placement else 0
    shapes = jax.eval_shape(lambda: logical(job.state.params))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    times = 3 if stage == 3 else 2
    least = times * floor_bytes("all-gather", size, count)
    sent = sum(x.wire_bytes for x in collectives if not x.axes or set(x.axes) & set(axes))
    what = {
        0: "an all-reduce of the gradients",
        1: "gradients scattered, parameters gathered",
        2: "gradients scattered, parameters gathered",
        3: "parameters gathered twice, gradients scattered",
    }[stage]
    ratio = sent / least if least else 1.0
    words = (
        f"{human(round(sent))} by each device; {what} needs {times} (N-1)/N x {human(size)} = "
        f"{human(round(least))} at N = {count}: {ratio:.3g} times that."
    )
    if ratio < 0.99:
        words += " The compiler gathers some parameters once only, or in a narrower dtype."
    return Floor(sent, least, ratio, words)


def _verdict(report: Report, chip: Chip | None, lack: str) -> str:
    """What bounds the step."""
    where = report.target or "this device"
    if report.fits is False:
        need = human(report.memory.total) if report.memory else "more memory than there is"
        has = f" of {human(report.memory_limit)}" if report.memory_limit else ""
        largest = _largest(report.holdings)
        return (
            f"It does not fit: a device of {where} would need {need}{has}. {largest} Take smaller "
            "microbatches, remat=True, or a further ZeRO stage (jdp.zero1 to jdp.zero3)."
        )
    if report.step_us is None or chip is None:
        sent = human(round(report.floor.sent))
        return f"Each device sends {sent} a step. No times: its compiler models none."
    return _bound(report, chip)


def _largest(held: Holdings) -> str:
    rows = sorted(held.rows, key=lambda row: -row.bytes)[:1]
    return "".join(f"Of the state, {x.path} is the largest: {human(x.bytes)}." for x in rows)


def _bound(report: Report, chip: Chip) -> str:
    """The roofline: products, memory, or links."""
    step, exposed = report.step_us or 0.0, report.exposed_us or 0.0
    share = exposed / step if step else 0.0
    products = 1e6 * (report.flops or 0.0) / chip.flops["bf16"]
    memory = 1e6 * (report.bytes_moved or 0.0) / chip.memory_bytes_per_s
    hidden = report.hidden
    hides = "" if hidden is None or not report.sent_us else f" {hidden:.0%} of it is hidden."
    waits = [x for x in report.collectives if x.exposed_us]
    if share > 0.3 and waits:  # the share that people act on
        worst = max(waits, key=lambda x: x.exposed_us or 0.0)
        return (
            f"Communication-bound: {share:.0%} of a step of {microseconds(step)} waits for it, "
            f"most for {worst.kind} of {human(worst.bytes)} x {worst.times}"
            f"{f' ({worst.where})' if worst.where else ''}.{hides}"
        )
    mfu = f" {report.mfu:.0%} of the chip's peak." if report.mfu is not None else ""
    bound = "Compute-bound" if products >= memory else "Memory-bound"
    return (
        f"{bound}: a step takes {microseconds(step)}, compute {microseconds(report.compute_us)} of "
        f"it; products need {microseconds(products)} at "
        f"the chip's peak, its memory {microseconds(memory)}, communication "
        f"{microseconds(report.sent_us)}.{hides}{mfu}"
    )


def _versions(platform: str) -> dict[str, str]:
    names = ["jax", "jaxlib", "jdp-train"]
    names += {"tpu": ["libtpu"], "gpu": ["jax-cuda12-plugin"]}.get(platform, [])
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _kept(
    cache: Any, lowered: Any, job: Job, held: Holdings, target: Any, chip: Any
) -> Path | None:
    """The file of a report: named by all that it depends on."""
    if cache is False:
        return None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "jdp" / "explain" if cache is True else Path(cache)
    text = lowered.as_text(debug_info=True)  # with source lines, which the report names
    options = sorted(job.step.options.items())
    places = [str(x) for x in held.rows]
    parts = (text, options, places, target, chip, _versions(job.mesh.devices.flat[0].platform))
    key = hashlib.sha256(repr((*parts, Report._fields, Sent._fields)).encode()).hexdigest()
    return folder / f"{key[:32]}.json"


def _read(path: Path) -> Report | None:
    try:
        return Report.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write(path: Path, report: Report) -> None:
    """A cache that cannot be written is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(report.to_json(), encoding="utf-8")
        part.replace(path)
    except OSError:
        return


def _telling(progress: Callable[[str], None] | None) -> Any:
    """A context that gives a function to tell what is being done."""
    if progress is not None:
        return nullcontext(progress)
    if not sys.stderr.isatty():
        return nullcontext(lambda text: None)
    try:
        from rich.console import Console
    except ImportError:
        return nullcontext(lambda text: print(f"jdp: {text}", file=sys.stderr))
    return _Spinner(Console(stderr=True))


class _Spinner:
    """Rich's spinner as a context whose value is a function of the text."""

    def __init__(self, console: Any) -> None:
        self._status = console.status("")

    def __enter__(self) -> Callable[[str], None]:
        self._status.__enter__()
        return self._status.update

    def __exit__(self, *error: Any) -> None:
        self._status.__exit__(*error)
