"""Rows of a plan as compiled: what the compiler says in place of what was predicted.

    rows, the best few  --compile (`jdp.report`)-->  memory, and times if the compiler models them
    the others          --their ratio----------->    times that compare with those

Nothing runs. A strategy that the compiler or the loss refuses is left out, with a note.
"""

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jdp.planned import Row, ranked
from jdp.report import Report, explain
from jdp.reporting import microseconds
from jdp.state import init_state
from jdp.strategy import Strategy
from jdp.wanted import Job

# How a strategy is refused by what it consists of: a loss, an optimizer, a chain of both.
REFUSALS = (ValueError, TypeError, NameError, NotImplementedError)


def confirmed(
    job: Job,
    rows: Sequence[Row],
    again: Callable[..., Row],
    *,
    most: int,
    allow_lossy: bool,
    cache: Any,
    say: Callable[[str], None],
) -> tuple[list[Row], tuple[str, ...]]:
    """The rows with the best few as compiled; until enough of them fit, or tried thrice as many.

    One on all devices is among them if the compiler tells times, for fewer to be compared with.

    Args:
        job: What is planned for.
        rows: As predicted, ranked.
        again: Predicts a strategy: `again(strategy, factor of its times, fits=None)`.
        most: How many that fit are wanted.
        allow_lossy: Whether the best may round.
        cache: See `jdp.explain`.
        say: Is told what is compiled.

    Returns:
        The rows, ranked, compiled ones that fit first; and notes.
    """
    done: dict[Strategy, Row | Exception] = {}
    notes: list[str] = []
    wanted = [row for row in rows if allow_lossy or row.strategy.wire == "exact"]

    def confirm(row: Row) -> None:
        say(f"compiling {row.strategy}")
        done[_name(row.strategy)], more = _confirm(job, row, again, cache)
        notes.extend(note for note in more if note not in notes)

    for row in wanted[: max(0, 3 * most)]:
        fitting = _fitting(done)
        # a formula may be wrong by so much that nothing seemed to fit
        if len(fitting) < most and (row.fits or (not fitting and _near(job, row))):
            confirm(row)
    errors = [found for found in done.values() if isinstance(found, REFUSALS)]
    if errors and len(errors) == len(done):
        raise errors[0]
    widest = max(row.strategy.devices for row in rows)
    wide = [row for row in wanted if row.fits and row.strategy.devices == widest]
    timed = [row for row in _fitting(done) if row.timed == "compiled"]
    if wide and timed and all(row.strategy.devices < widest for row in timed):
        confirm(wide[0])
    return _with_compiled(rows, done, again), tuple(notes)


def _fitting(done: Mapping[Strategy, Row | Exception]) -> list[Row]:
    return [row for row in done.values() if isinstance(row, Row) and row.fits]


def _near(job: Job, row: Row) -> bool:
    """Whether it would fit if what was predicted is a little too much."""
    return row.memory < (1.1 if row.source == "probe" else 1.5) * job.chip.memory


def _confirm(
    job: Job, row: Row, again: Callable[..., Row], cache: Any
) -> tuple[Row | Exception, Sequence[str]]:
    """The row as compiled, or why it is not; and notes."""
    try:
        report = _report(job, row.strategy, cache)
    except jax.errors.JaxRuntimeError as error:  # some slices are no whole TPU slice
        if "RESOURCE_EXHAUSTED" in str(error):  # not even the state can be made
            return _no_room(row, None), ()
        return error, [f"{row.strategy} was not compiled: {str(error).splitlines()[0][:200]}"]
    except REFUSALS as error:
        return error, [f"{row.strategy} is left out: {str(error).splitlines()[0][:200]}"]
    row = row if row.fits else again(row.strategy, 1.0, fits=True)
    return _compiled_row(job, row, report), report.notes


def _with_compiled(
    rows: Sequence[Row],
    done: Mapping[Strategy, Row | Exception],
    again: Callable[..., Row],
) -> list[Row]:
    """All rows but those refused, those not compiled with times that compare."""
    names = {_name(row.strategy): row for row in rows}
    compiled = {name: row for name, row in done.items() if isinstance(row, Row)}
    ratios = [
        row.step_us / names[name].step_us
        for name, row in compiled.items()
        if row.timed == "compiled"
    ]
    longer = statistics.median(ratios) if ratios else 1.0
    rest = [
        again(row.strategy, longer)
        for name, row in names.items()
        if name not in compiled and not isinstance(done.get(name), REFUSALS)
    ]
    fit, fail = ([r for r in compiled.values() if r.fits is fits] for fits in (True, False))
    return [*ranked(fit), *ranked([*rest, *fail])]


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


def _no_room(row: Row, size: int | None) -> Row:
    """A row that the compiler found no memory for."""
    reason = "the compiler needs more than the device has"
    source = row.source if size is None else "compiled"
    return row._replace(
        memory=size or row.memory, fits=False, bound="memory", reason=reason, source=source
    )


def _compiled_row(job: Job, row: Row, report: Report) -> Row:
    """The row with the compiler's figures in place of the predicted ones."""
    if report.memory is None or report.memory.total > job.chip.memory or report.fits is False:
        return _no_room(row, report.memory.total if report.memory else None)
    row = row._replace(memory=report.memory.total, source="compiled")
    if report.step_us is None:  # the compiler for CPUs models no times
        return row
    exposed, sent = report.exposed_us or 0.0, report.sent_us or 0.0
    waits = exposed > 0.3 * report.step_us
    formula = row.bound if row.bound not in ("communication", "latency") else "compute"
    reason = f"compute {microseconds(report.compute_us or 0.0)}, wire {microseconds(sent)}"
    if sent - exposed > 0.01 * sent:
        reason += f" ({microseconds(sent - exposed)} of it hidden)"
    return row._replace(
        step_us=report.step_us,
        exposed_us=exposed,
        bound="communication" if waits else formula,
        reason=reason,
        timed="compiled",
    )
