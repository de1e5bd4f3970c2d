"""`jdp.plan`: which strategy, found by formula and confirmed by the compiler.

    loss, shapes, optimizer  --enumerate-->  every stage, microbatch, remat, wire, mesh, offload
                             --predict---->  memory (`jdp.memory_model`), seconds (`jdp.costs`)
                             --compile---->  the best few, for the target (`jdp.report`)
                                        -->  Plan: ranked rows, advice in words, best: Strategy

Nothing runs, and no array is made. What is predicted without a compiler is marked with "~". What a
`Strategy` holds plugs into `jdp.make_mesh`, `jdp.init_state` and `jdp.train_step`.
"""

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from jdp.hardware import Chip
from jdp.holdings import human
from jdp.memory_model import Predicted, predict
from jdp.planned import Plan, Row, time_of, worth_of_devices
from jdp.probe import Guess, Probe, guess, probe
from jdp.report import Report, explain
from jdp.split_advice import advise
from jdp.state import init_state
from jdp.step_time import Seconds, Setting, scale_of, step_seconds
from jdp.strategy import REMATS, WIRES, Strategy, strategies
from jdp.wanted import Job, job_of

__all__ = ["Plan", "Row", "Strategy", "plan"]


def plan(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    tx: optax.GradientTransformation,
    *,
    target: str | None = None,
    global_batch: int | None = None,
    links: Any = None,
    chip: Chip | None = None,
    compile_best: int = 3,
    probes: int = 4,
    microbatches: Sequence[int] | None = None,
    remats: Sequence[bool | str] = REMATS,
    wires: Sequence[str] = WIRES,
    allow_lossy: bool = False,
    key: Any = None,
    model_state: Any = None,
    cache: Any = True,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Finds the strategy for a loss, a model and an optimizer, on devices that need not be here.

    Every ZeRO stage, size of microbatch, rematerialisation, dtype or compressor on the wire, mesh
    (flat, node x device, split within nodes) and offload of the optimizer state is predicted; what
    does not fit is set aside; the best few are compiled for the target, and ranked by what the
    compiler says.

    Guarantees:
        - Nothing runs and no array is made: shapes are enough.
        - `best` fits, computes exactly what plain data parallelism would (unless `allow_lossy`),
          and was compiled (unless `compile_best=0`).

    Args:
        loss_fn: See `jdp.value_and_grad`.
        params: Parameters, or shapes.
        batch: A batch, or shapes.
        tx: The optimizer, without communication, such as `optax.adamw(3e-4)`.
        target: Such as "h100:2x8", see `jdp.targets`; `None` takes the devices at hand.
        global_batch: Rows of a step over all devices; `None` takes those of `batch`.
        links: Links as measured, instead of those of the table: what `jdp.links.measure` gave, a
            `Link`, or a dictionary of "inner", "outer" and "host".
        chip: Figures of the device, instead of those of the table.
        compile_best: How many to compile.
        probes: How many to compile for four devices, which corrects the memory of many.
        microbatches: Sizes of microbatches to try, in rows; `None` halves a device's share.
        remats: Rematerialisations to try.
        wires: What to try on the wire.
        allow_lossy: Let `best` be one that rounds or compresses gradients.
        key: A random key, if the loss takes one.
        model_state: Model state, if the loss takes some.
        cache: See `jdp.explain`.
        progress: Is told what is being done.

    Returns:
        A `Plan`.

    Raises:
        ValueError: If there is no such target, no number of devices divides the batch, or `tx`
            communicates already.
        TypeError: If a parameter is not real floating point.

    Example:
        >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> params, batch = {"w": jnp.ones((64, 8))}, jnp.ones((32, 64))
        >>> found = plan(loss_fn, params, batch, optax.adam(1e-3), compile_best=0, probes=0)
        >>> found.best.step(loss_fn).mesh.size == found.best.devices
        True

    References:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
        2020. Williams et al., Roofline, 2009.
    """
    say = progress or (lambda text: None)
    job = job_of(loss_fn, params, batch, tx, target, global_batch, links, chip, key, model_state)
    ways = list(
        strategies(
            tx,
            rows=job.rows,
            devices=len(job.devices),
            nodes=job.nodes,
            offloads=(False,) if job.chip.platform == "cpu" else (False, True),
            microbatches=microbatches,
            remats=remats,
            wires=wires,
        )
    )
    say(f"{len(ways)} strategies")
    known: dict[Any, Guess | Probe] = {}
    for microbatch, remat in sorted({(s.microbatch, s.remat) for s in ways}, key=str):
        known[microbatch, remat] = guess(
            loss_fn,
            job.params,
            job.batch,
            microbatch=microbatch,
            remat=remat,
            key=key,
            model_state=model_state,
        )
    ways = [s for s in ways if _saves(s, known)]
    rows = _rows(job, ways, known)
    for _ in range(2 if probes else 0):
        _probe(job, rows, known, -(-probes // 2), say, allow_lossy)
        rows = _rows(job, ways, known)
    rows, notes = _compile(job, rows, compile_best, allow_lossy, cache, say)
    fitting = [r for r in rows if r.fits and (allow_lossy or r.strategy.wire == "exact")]
    best = fitting[0].strategy if fitting else None
    advice = _advice(job, rows, fitting)
    return Plan(job.name, job.rows, job.chip.memory, tuple(rows), advice, best, len(ways), notes)


def _saves(s: Strategy, known: Mapping[Any, Any]) -> bool:
    """Whether its rematerialisation, if any, keeps less than none would."""
    none = known.get((s.microbatch, False))
    return not s.remat or none is None or known[s.microbatch, s.remat].kept < 0.97 * none.kept


def _rows(job: Job, ways: Sequence[Strategy], known: Mapping[Any, Guess | Probe]) -> list[Row]:
    """All rows, ranked."""
    dtype = getattr(job.loss_fn, "compute_dtype", None)
    scales = []
    for name, found in known.items():
        base = known[name[-2:]]
        if isinstance(found, Probe) and isinstance(base, Guess):
            scale = scale_of(job.sizes, base, found, job.chip, dtype)
            scales += [] if scale is None else [scale]
    scale = statistics.median(scales) if scales else 1.0
    return _ranked([_row(job, s, known, scale) for s in ways])


def _row(job: Job, strategy: Strategy, known: Mapping[Any, Guess | Probe], scale: float) -> Row:
    """What is to be expected of a strategy."""
    s = strategy
    base = known[s.microbatch, s.remat]
    found = known.get((s.stage, min(s.microbatches, 2), s.microbatch, s.remat), base)
    used = predict(
        job.sizes,
        found,
        stage=s.stage,
        devices=s.devices,
        split_over=s.split_over,
        rows=s.microbatch * s.microbatches,
        microbatches=s.microbatches,
        platform=job.chip.platform,
        offload=s.offloaded,
        residuals=s.wire in ("int8", "power_sgd") and s.stage == 0,
    )
    assert isinstance(base, Guess)
    seconds = step_seconds(job.sizes, base, _setting(job, s), scale)
    fits = used.total <= job.chip.memory
    return _described(job, s, used, seconds, fits, "probe" if found is not base else "formula")


def _setting(job: Job, s: Strategy) -> Setting:
    nodes = job.nodes if s.devices == len(job.devices) else -(-s.devices // job.per_node)
    return Setting(
        stage=s.stage,
        devices=s.devices,
        nodes=max(1, nodes) if s.devices % max(1, nodes) == 0 else 1,
        split_over=s.split_over,
        microbatches=s.microbatches,
        wire=s.wire,
        hierarchical=len(s.shape) == 2,
        offload=s.offloaded,
        chip=_chip_among(job, s.devices),
        compute_dtype=getattr(job.loss_fn, "compute_dtype", None),
    )


def _chip_among(job: Job, count: int) -> Chip:
    """What each of so many devices can do: emulated ones share the cores, fewer have more each."""
    chip, more = job.chip, len(job.devices) / count
    if chip.platform != "cpu" or job.nodes > 1 or more == 1:
        return chip
    inner = chip.inner._replace(bytes_per_s=more * chip.inner.bytes_per_s)
    return chip._replace(
        flops={dtype: more * flops for dtype, flops in chip.flops.items()},
        memory_bytes_per_s=more * chip.memory_bytes_per_s,
        inner=inner,
    )


def _described(
    job: Job, s: Strategy, used: Predicted, seconds: Seconds, fits: bool, source: str
) -> Row:
    """The row, with the reason in words."""
    if not fits:
        over = used.total - job.chip.memory
        kinds = {
            "parameters": used.params,
            "optimizer state": used.opt_state,
            "activations and gradients": used.temporaries,
        }
        largest = max(kinds, key=lambda kind: kinds[kind])
        reason = f"{human(over)} too much; {largest} take {human(kinds[largest])}"
        bound = "memory"
    else:
        bound, reason = seconds.bound()
    return Row(
        s, used.total, fits, 1e6 * seconds.total, 1e6 * seconds.exposed, bound, reason, source
    )


# Times that differ by less are taken for equal; the plainer strategy is then the better one.
_ALIKE = 0.02


def _ranked(rows: Sequence[Row]) -> list[Row]:
    """Those that fit first, by time; of equals the plainest. The others by memory."""

    def order(row: Row) -> Any:
        s = row.strategy
        plain = (s.wire != "exact", s.offloaded, bool(s.remat), s.stage, len(s.shape))
        if not row.fits:
            return (True, row.memory, plain, 0.0)
        alike = math.floor(math.log(max(row.step_us, 1e-9)) / math.log(1 + _ALIKE))
        return (False, alike, plain, row.step_us)

    return sorted(rows, key=order)


def _probe(
    job: Job,
    rows: Sequence[Row],
    known: dict[Any, Any],
    most: int,
    say: Callable[[str], None],
    allow_lossy: bool,
) -> None:
    """Compiles the best few kinds of row for a few devices."""
    done = 0
    for row in rows:
        s = row.strategy
        name = (s.stage, min(s.microbatches, 2), s.microbatch, s.remat)
        if done >= most or name in known or s.devices < len(job.devices):
            continue
        if s.wire != "exact" and not allow_lossy:
            continue
        say(f"probing {s}")
        try:
            found = probe(
                job.loss_fn,
                job.params,
                job.tx,
                job.batch,
                stage=s.stage,
                microbatch=s.microbatch,
                microbatches=name[1],
                remat=s.remat,
                devices=job.devices,
                key=job.key,
                model_state=job.model_state,
            )
        except jax.errors.JaxRuntimeError:  # a compiler's failure: the guess will do
            found = None
        done += 1
        if found is not None:
            known[name] = found


def _compile(
    job: Job,
    rows: list[Row],
    most: int,
    allow_lossy: bool,
    cache: Any,
    say: Callable[[str], None],
) -> tuple[list[Row], tuple[str, ...]]:
    """The rows with the best few as compiled; until enough of them fit, or tried thrice as many."""
    done: dict[Strategy, Row] = {}
    notes: list[str] = []
    tries = 3 * most
    for row in rows:
        fitting = sum(r.fits for r in done.values())
        if fitting >= most or tries == 0 or not row.fits:
            break
        if not allow_lossy and row.strategy.wire != "exact":
            continue
        tries -= 1
        say(f"compiling {row.strategy}")
        try:
            report = _report(job, row.strategy, cache)
        except jax.errors.JaxRuntimeError as error:  # some slices are no whole TPU slice
            notes.append(f"{row.strategy} was not compiled: {str(error).splitlines()[0][:200]}")
            continue
        done[_name(row.strategy)] = _compiled_row(job, row, report)
        notes += [n for n in report.notes if n not in notes]
    ratios = [
        done[_name(row.strategy)].step_us / row.step_us
        for row in rows
        if _name(row.strategy) in done and done[_name(row.strategy)].fits
    ]
    scale = statistics.median(ratios) if ratios else 1.0  # so that the others compare
    rest = [
        row._replace(step_us=scale * row.step_us, exposed_us=scale * row.exposed_us)
        for row in rows
        if _name(row.strategy) not in done
    ]
    fit, fail = ([r for r in done.values() if r.fits is fits] for fits in (True, False))
    return [*_ranked(fit), *_ranked([*rest, *fail])], tuple(notes)


def _name(s: Strategy) -> Any:
    return s._replace(optimizer=None)


def _report(job: Job, s: Strategy, cache: Any) -> Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options that the compiler does not know
        mesh = s.mesh(job.devices)
        step = s.step(job.loss_fn, mesh)
        state = init_state(job.params, s.tx, mesh, key=job.key, model_state=job.model_state)
        return explain(
            step, state, job.batch, cache=cache, progress=lambda text: None, chip=job.chip
        )


def _compiled_row(job: Job, row: Row, report: Report) -> Row:
    """The row with the compiler's figures in place of the predicted ones."""
    if report.memory is None or report.memory.total > job.chip.memory or report.fits is False:
        size = report.memory.total if report.memory else row.memory
        reason = "the compiler needs more than the device has"
        return row._replace(
            memory=size, fits=False, bound="memory", reason=reason, source="compiled"
        )
    row = row._replace(memory=report.memory.total, source="compiled")
    if report.step_us is None:  # the compiler for CPUs models no times
        return row
    exposed = report.exposed_us or 0.0
    bound = "communication" if exposed > 0.3 * report.step_us else row.bound
    reason = f"compute {time_of(report.compute_us or 0.0)}, wire {time_of(report.sent_us or 0.0)}"
    if report.sent_us:
        reason += f" ({time_of(report.sent_us - exposed)} of it hidden)"
    return row._replace(step_us=report.step_us, exposed_us=exposed, bound=bound, reason=reason)


def _advice(job: Job, rows: Sequence[Row], fitting: Sequence[Row]) -> tuple[str, ...]:
    """What to know, in sentences."""
    if not fitting:
        least = min(rows, key=lambda row: row.memory)
        return (
            f"No data-parallel strategy fits: the least, {least.strategy}, needs "
            f"{human(least.memory)} of {human(job.chip.memory)} on each device.",
            *advise(job.sizes, job.params, job.batch, job.chip, len(job.devices), job.rows),
        )
    best, total = fitting[0], len(job.devices)
    said = [f"Take {best.strategy}: {best.reason}."]
    if best.strategy.stage == 0 and best.strategy.devices > 1:
        said.append("Plain data parallelism is best: everything fits whole, and it sends least.")
    said += worth_of_devices(rows, total)
    lossy = [r for r in rows if r.fits and r.strategy.wire != "exact"]
    if lossy:
        quick = min(lossy, key=lambda row: row.step_us)
        if quick.step_us < 0.9 * best.step_us:
            said.append(
                f"Rounded gradients would save time: {quick.strategy} is predicted at "
                f"{time_of(quick.step_us)} instead of {time_of(best.step_us)}."
            )
    return tuple(said)
