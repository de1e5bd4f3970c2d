"""`jdp.plan`: which strategy, found by formula and confirmed by the compiler.

    loss, shapes, optimizer  --enumerate-->  every stage, microbatch, remat, wire, mesh, offload
                             --predict---->  memory (`jdp.memory_model`), seconds (`jdp.costs`)
                             --compile---->  the best few, for the target (`jdp.report`)
                                        -->  Plan: ranked rows, advice in words, best: Strategy

Nothing runs, and no array is made. What is predicted without a compiler is marked with "~". What a
`Strategy` holds plugs into `jdp.make_mesh`, `jdp.init_state` and `jdp.train_step`.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from jdp.confirmed import REFUSALS, confirmed
from jdp.grad import value_and_grad
from jdp.hardware import Chip
from jdp.holdings import human
from jdp.memory_model import Predicted, predict
from jdp.mesh import make_mesh
from jdp.planned import Plan, Row, advice_on, ranked
from jdp.probe import Guess, Probe, few_of, guess, probe
from jdp.sizes import as_shapes, with_rows
from jdp.split_advice import advise
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
    compiler says. Times within 5 % or 5 us of each other count as equal, and the plainer is taken:
    exact, no offload, no rematerialisation, lowest stage, one axis, one microbatch, fewer devices.

    Guarantees:
        - Nothing runs and no array is made: shapes are enough.
        - `best` fits; it computes what plain data parallelism would, with the microbatches that it
          names (unless `allow_lossy`); and it was compiled, unless `compile_best=0` or a note says
          that the compiler refused.
        - Every figure of the advice stands in the table, where "~" marks what is not a compiler's.

    What it cannot see:
        - A loss whose value depends on which rows share a microbatch (BatchNorm, in-batch
          negatives) trains differently with other microbatches: give `microbatches`.
        - Times by formula are least ones, at the peaks of chip and links. They know no kernels, no
          shape that suits a chip badly, and nothing of Python, input, checkpoints, stragglers or
          other jobs on the network. Compilers for GPU and TPU model times; none is measured, and
          for CPUs all times are by formula.
        - Overlap by formula is half of the backward pass, on CPUs none.
        - Memory by formula counts what the traced backward pass keeps, before fusion: it may be
          twice too much. From a probe it is within 5 % as a rule. Of rounded or compressed wires
          it is an upper estimate. What allocators lose to fragments is not in any figure.
        - How long the loss, the optimizer or rounding takes to converge.
        - Axes of your own, such as "model": only data axes are planned.

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
        probes: How many to compile with one or two microbatches, which corrects the memory of many.
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
        ValueError: If there is no such target, no number of devices divides the batch, `tx`
            communicates or is offloaded already, or the loss is none (see `jdp.value_and_grad`).
        TypeError: If a parameter is not real floating point, or the loss takes other arguments.

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
    every = list(
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
    say(f"{len(every)} strategies")
    ways, known, notes = _guesses(job, every)
    rows = _rows(job, ways, known)
    for turn in range(2 if probes > 0 else 0):
        _probe(job, _to_probe(job, rows, turn, allow_lossy), known, -(-probes // 2), say)
        rows = _rows(job, ways, known)
    rows, more = confirmed(
        job,
        rows,
        lambda s, longer, fits=None: _row(job, s, known, _scale(job, known), longer, fits),
        most=compile_best,
        allow_lossy=allow_lossy,
        cache=cache,
        say=say,
    )
    fitting = [r for r in rows if r.fits and (allow_lossy or r.strategy.wire == "exact")]
    best = fitting[0].strategy if fitting else None
    advice = _advice(job, rows, fitting)
    notes = (*notes, *more)
    return Plan(job.name, job.rows, job.chip.memory, tuple(rows), advice, best, len(every), notes)


def _guesses(
    job: Job, ways: Sequence[Strategy]
) -> tuple[list[Strategy], dict[Any, Guess | Probe], tuple[str, ...]]:
    """What each microbatch takes; and the ways without those that the loss cannot be had in."""
    known: dict[Any, Guess | Probe] = {}
    failed: dict[int, Exception] = {}
    for microbatch, remat in sorted({(s.microbatch, s.remat) for s in ways}, key=str):
        try:
            known[microbatch, remat] = _guess(job, microbatch, remat)
        except Exception as error:  # of a loss, which may not take every number of rows
            failed[microbatch] = error
    _check_loss(
        job, max(microbatch for microbatch, _ in known or dict.fromkeys([(max(failed), 0)]))
    )
    if not known:
        raise failed[max(failed)]
    notes = [
        f"Microbatches of {rows} row{'s' if rows > 1 else ''} are left out, the loss does not take "
        f"them: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        for rows, error in sorted(failed.items())
    ]
    ways = [s for s in ways if (s.microbatch, s.remat) in known and _saves(s, known)]
    if any(len(s.shape) == 2 for s in ways):
        try:
            _guess(job, *next(iter(known)), axes=("node", "device"))
        except NameError:
            ways = [s for s in ways if len(s.shape) == 1]
            notes.append(
                "Meshes of node x device are left out: the loss names the axis 'data', which they "
                "do not have."
            )
    return ways, known, tuple(notes)


def _guess(job: Job, microbatch: int, remat: Any, axes: tuple[str, ...] = ("data",)) -> Guess:
    return guess(
        job.loss_fn,
        job.params,
        job.batch,
        microbatch=microbatch,
        remat=remat,
        key=job.key,
        model_state=job.model_state,
        axes=axes,
    )


def _check_loss(job: Job, rows: int) -> None:
    """Says what is wrong with a loss, as training would."""
    call = value_and_grad(job.loss_fn, make_mesh(devices=jax.devices()[:1]))
    given = job.params, with_rows(job.batch, rows), as_shapes(job.key), as_shapes(job.model_state)
    try:
        jax.eval_shape(lambda p, b, k, m: call(p, b, k, model_state=m), *given)
    except NameError as error:
        raise ValueError(
            f"The loss names a mesh axis that jdp.plan has not ({error}). It plans data axes, and "
            'calls them "data", or ("node", "device") between nodes.'
        ) from error


def _saves(s: Strategy, known: Mapping[Any, Any]) -> bool:
    """Whether its rematerialisation, if any, keeps less than none would."""
    none = known.get((s.microbatch, False))
    return not s.remat or none is None or known[s.microbatch, s.remat].kept < 0.97 * none.kept


def _rows(job: Job, ways: Sequence[Strategy], known: Mapping[Any, Guess | Probe]) -> list[Row]:
    """All rows, ranked."""
    scale = _scale(job, known)
    return ranked([_row(job, s, known, scale) for s in ways])


def _scale(job: Job, known: Mapping[Any, Guess | Probe]) -> float:
    """How much longer compute takes than formulas say, by the probes that have times."""
    scales = []
    for name, found in known.items():
        base = known[name[-2:]]
        if isinstance(found, Probe) and isinstance(base, Guess):
            scale = scale_of(job.sizes, base, found, job.chip)
            scales += [] if scale is None else [scale]
    return statistics.median(scales) if scales else 1.0


def _row(
    job: Job,
    s: Strategy,
    known: Mapping[Any, Guess | Probe],
    scale: float,
    longer: float = 1.0,
    fits: bool | None = None,
) -> Row:
    """What is to be expected of a strategy, its times longer by a factor."""
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
        wire=s.wire,
        hierarchical=s.stage == 0 and len(s.shape) == 2,
    )
    assert isinstance(base, Guess)
    seconds = step_seconds(job.sizes, base, _setting(job, s), scale).times(longer)
    fits = used.total <= job.chip.memory if fits is None else fits
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
        reason = f"{human(over)} too much; {human(kinds[largest])} are {largest}"
        bound = "memory"
    else:
        bound, reason = seconds.bound()
    return Row(
        s, used.total, fits, 1e6 * seconds.total, 1e6 * seconds.exposed, bound, reason, source
    )


def _to_probe(job: Job, rows: Sequence[Row], turn: int, allow_lossy: bool) -> list[Row]:
    """The best rows; at the second turn first those that formulas may wrongly rule out."""
    most = max(row.strategy.devices for row in rows)
    wanted = [
        row
        for row in rows
        if row.strategy.devices == most and (allow_lossy or row.strategy.wire == "exact")
    ]
    best = next((row.step_us for row in wanted if row.fits), float("inf"))
    doubted = [
        row
        for row in wanted
        if not row.fits
        and row.source == "formula"
        and row.memory < 2 * job.chip.memory
        and row.step_us < best
    ]
    return [*sorted(doubted, key=lambda row: row.step_us), *wanted] if turn else wanted


def _probe(
    job: Job,
    rows: Sequence[Row],
    known: dict[Any, Any],
    most: int,
    say: Callable[[str], None],
) -> None:
    """Compiles the first few kinds of row with one or two microbatches."""
    done = 0
    for row in rows:
        s = row.strategy
        name = (s.stage, min(s.microbatches, 2), s.microbatch, s.remat)
        if done >= most or name in known:
            continue
        say(f"probing {s}")
        done += 1
        whole = s.devices == len(job.devices) or job.chip.platform != "tpu"
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
                devices=job.devices[: s.devices] if whole else few_of(job.devices),
                key=job.key,
                model_state=job.model_state,
            )
        except (jax.errors.JaxRuntimeError, *REFUSALS):  # the guess will do; compiling will tell
            continue
        if found is not None:
            known[name] = found


def _advice(job: Job, rows: Sequence[Row], fitting: Sequence[Row]) -> tuple[str, ...]:
    """What to know, in sentences."""
    if fitting:
        return tuple(advice_on(rows, fitting[0], len(job.devices), job.rows))
    if lossy := [row for row in rows if row.fits]:
        return (
            f"Of what was tried only rounded gradients fit: {lossy[0].strategy} takes "
            f"{human(lossy[0].memory)} of {human(job.chip.memory)}. Take it with allow_lossy=True, "
            'or try wires=["exact"] too.',
        )
    least = min(rows, key=lambda row: row.memory)
    return (
        f"No data-parallel strategy fits: the least, {least.strategy}, needs "
        f"{human(least.memory)} of {human(job.chip.memory)} on each device.",
        *advise(job.sizes, job.params, job.batch, job.chip, len(job.devices), job.rows),
    )
