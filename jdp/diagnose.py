"""Where the time of a run goes, and what to change: `doctor`.

    step, state, batches  --steps, traced-->  compute | communication | input | host
                          --steps, timed-->   milliseconds of a step, compilations
                          --in turns with the same step without communication-->  what sending adds
                          --of all processes-->  slowest replica, who keeps whom waiting
                          --thresholds, links-->  findings and payoffs, ranked

The steps are real ones: the state goes on, and comes back in the `Diagnosis`. Measuring is done
here; reading traces in `jdp.trace`, judging in `jdp.findings` and `jdp.pays`.
"""

import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp import findings as judging
from jdp import trace as tracing
from jdp.chain import parts
from jdp.diagnosis import Check, Diagnosis, DiagnosisError, Process, Replica
from jdp.hardware import Link, find_chip
from jdp.holdings import holdings
from jdp.links import Links
from jdp.machine import Machine, doctor_machine
from jdp.mesh import axis_size, data_axes
from jdp.payoff_facts import shares_cores, two_links
from jdp.pays import pays
from jdp.processes import Channel
from jdp.schedule import walk
from jdp.silent import silence
from jdp.split import find_placement
from jdp.train import TrainStep
from jdp.watch import Run, timed, traced, warm_up

__all__ = ["Diagnosis", "DiagnosisError", "Machine", "doctor", "doctor_machine"]

DRAIN = 4  # steps after a pause, in which `jdp.feed` has made three batches in advance
TRACED = 10  # steps, at most: a trace grows with each
ROUNDS = 6  # of a step with and one without communication


def doctor(
    step: TrainStep,
    state: Any,
    batches: Iterable[Any],
    *,
    steps: int = 20,
    check: bool = True,
    links: Links | Link | None = None,
    folder: Path | None = None,
) -> Diagnosis:
    """Measures where a run's time goes, and says what to change.

    Guarantees:
        - Trains for real: `result.state` has seen every batch that was taken, once, and its
          values are those of the plain loop. The state given is consumed, as by the step.
        - Once a step was taken, every error is a `DiagnosisError` with the last state: if the
          loader or a step fails, batches run out, or no trace can be recorded. Ctrl-C, too, leaves
          with the state as an attribute of its exception.
        - Before, a folder that cannot be written or links of another mesh are refused, and nothing
          was run.
        - Compute, communication, input and host add up to the step.

    On CPU devices of one host, which share its cores, a figure of communication counts only
    moments in which none of them computes.

    Args:
        step: A step of `jdp.train_step`.
        state: Its state.
        batches: Batches as the loop has them, best of `jdp.feed`; at most `steps` + 10 are taken:
            two to warm up, and from 10 steps on, before each of two stretches, four, as some
            were made in advance. Several processes give equally many.
        steps: Steps to measure. Half of them, at most ten, are traced.
        check: Also time the step without its communication, see `jdp.silent`, on a copy of the
            state, and what would pay. It compiles anew and needs the memory of a second state.
        links: Measured links for `jdp.pays`; `None` measures for a few seconds.
        folder: Where to keep the profiler's trace, for xprof or Perfetto.

    Returns:
        What was found, and the state.

    Raises:
        TypeError: If step is not a step of jdp, batches is one batch, or links are no links.
        ValueError: If there are no batches, or the folder cannot be written; the state is then as
            it was.
        DiagnosisError: If the loader, a step or the profiler failed.

    Example:
        >>> tx, mesh = optax.chain(jdp.all_reduce(), optax.sgd(0.1)), jdp.make_mesh()
        >>> step = jdp.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh)
        >>> state = jdp.init_state({"w": jnp.ones((256, 64))}, tx, mesh)
        >>> found = doctor(step, state, [np.ones((16, 256), np.float32)] * 8, steps=4, check=False)
        >>> int(found.state.step), found.steps
        (6, 4)
    """
    _validate(step, batches, steps)
    if links is not None:
        two_links(links, step.mesh, data_axes(step.mesh))  # refuses those of another mesh
    folder = None if folder is None else _writable(folder)
    run = Run(step, state, batches)
    with run.kept("Measuring"):
        return _examine(run, steps, check and step.mesh.size > 1, links, folder)


def _examine(
    run: Run, steps: int, check: bool, links: Links | Link | None, folder: Path | None
) -> Diagnosis:
    """What `doctor` does with what it was given."""
    step, compile_s = run.step, warm_up(run)
    most, drain = max(1, min(TRACED, steps // 2)), DRAIN if steps >= TRACED else 0
    text = step.lower(run.state, run.batch).compile().as_text()  # kept by JAX: not compiled again
    run.some(drain)
    trace, window, traced_steps = traced(run, most, text, folder)
    run.some(drain)
    step_s, timed_steps, compiled = timed(run, steps - traced_steps)
    traced_s = (window[1] - window[0]) / traced_steps
    found = tracing.breakdown(trace, *window)
    per_step = step_s or traced_s
    scale = per_step / found.total  # the trace slows a step; its shares are kept
    parts = (found.compute, found.communication, found.input, found.host, found.least)
    ours = Process(jax.process_index(), *(1e3 * scale * x for x in parts))
    busy = {
        device: (1e3 * a / traced_steps, 1e3 * b / traced_steps)
        for device, (a, b) in tracing.busy(trace, *window).items()
    }
    processes, replicas = _of_all(step.mesh, ours, busy)
    ours = next(process for process in processes if process.process == ours.process)
    checked, notes = _check(run, step.mesh) if check else (None, [])
    result = Diagnosis(
        state=run.state,
        steps=traced_steps + timed_steps,
        compile_s=compile_s,
        step_ms=1e3 * per_step,
        compute_ms=ours.compute_ms,
        communication_ms=ours.communication_ms,
        input_ms=ours.input_ms,
        host_ms=ours.host_ms,
        waiting_ms=ours.waiting_ms,
        hidden_ms=1e3 * scale * found.hidden,
        traced_ms=1e3 * traced_s,
        check=checked,
        processes=processes,
        replicas=replicas,
        findings=(),
        payoffs=(),
        notes=(*run.notes, *notes, *_notes(trace, step, traced_s, step_s, steps)),
        shares_cores=shares_cores(step.mesh),
    )
    if check and axis_size(step.mesh, data_axes(step.mesh)) > 1:
        result = _with_payoffs(result, run, links)
    facts = _facts(result, run, text, compiled)
    return result._replace(findings=judging.find(facts, result.payoffs))


def _writable(folder: Path | str) -> Path:
    """The folder, made if it is not there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Path(folder)
    except OSError as error:
        raise ValueError(
            f"The trace cannot be kept in folder={str(folder)!r}: {error.strerror}. Give a folder "
            "that can be written, or leave it out to keep no trace. No step was run."
        ) from error


def _validate(step: Any, batches: Any, steps: Any) -> None:
    if not isinstance(step, TrainStep):
        raise TypeError(
            f"jdp.doctor was given a {type(step).__name__} where a step of jdp.train_step belongs: "
            "it builds the step anew without communication, so it must know its parts. Build it "
            "with jdp.train_step(loss_fn, tx, mesh)."
        )
    if isinstance(batches, dict | np.ndarray | jax.Array | str) or not hasattr(batches, "__iter__"):
        raise TypeError(
            f"jdp.doctor takes an iterable of batches, but got one {type(batches).__name__}. Give "
            "the loader of the loop, such as jdp.feed(loader, mesh), or [batch] * 22 to leave the "
            "loader out."
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(
            f"jdp.doctor got steps={steps!r}; it is the number of steps to measure, 1 or more. 20 "
            "are enough where steps are alike."
        )


def _check(run: Run, mesh: Mesh) -> tuple[Check | None, list[str]]:
    """The step in turns with itself without communication, on a copy of the state."""
    try:
        silent = silence(run.step, run.state, run.batch)
        copy = _copied(run.state)
        turns = {"with": run.step, "without": silent.run}
        meet = _meeting(mesh)
        times: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(ROUNDS + 1):
            for name in ("with", "without") if number % 2 else ("without", "with"):
                meet()
                start = time.perf_counter()
                copy, metrics = turns[name](copy, run.batch)
                jax.block_until_ready((copy, metrics))
                times[name].append(time.perf_counter() - start)
    except Exception as error:
        if jax.process_count() > 1:  # the others would wait
            raise
        why = f"{type(error).__name__}: {error}"
        if "RESOURCE_EXHAUSTED" in str(error):
            why = "there is no memory for a second state"
        return None, [f"The check without communication was left out: {why}."]
    notes = []
    if silent.left:
        notes.append(
            f"Collectives of {silent.left} bytes that the compiler adds by itself stay in the "
            "step without communication."
        )
    pairs = list(zip(times["with"][1:], times["without"][1:], strict=True))
    together, alone = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    added = 1e3 * statistics.median(a - b for a, b in pairs)
    return Check(together, alone, added, silent.replaced, silent.left), notes


def _meeting(mesh: Mesh) -> Callable[[], Any]:
    """Waits for the other processes: who is ahead would count waiting as communication."""
    members = sorted({device.process_index for device in mesh.devices.flat})
    if len(members) == 1:
        return lambda: None
    channel = Channel("jdp.doctor", members)
    return lambda: channel.exchange("")


def _copied(state: Any) -> Any:
    """Another state of the same values, which may be consumed."""
    places = jax.tree.map(lambda x: x.sharding, state)
    copy = jax.jit(lambda tree: jax.tree.map(jax.numpy.copy, tree), out_shardings=places)
    return jax.block_until_ready(copy(state))


def _of_all(
    mesh: Mesh, ours: Process, busy: dict[int, tuple[float, float]]
) -> tuple[tuple[Process, ...], tuple[Replica, ...]]:
    """What all processes and replicas spend: each process knows its own."""
    by_local = {device.local_hardware_id: device.id for device in jax.local_devices()}
    mine = {by_local.get(device, device): spent for device, spent in busy.items()}
    members = sorted({device.process_index for device in mesh.devices.flat})
    answers = {ours.process: json.dumps([ours._asdict(), list(mine.items())])}
    if len(members) > 1:
        answers = Channel("jdp.doctor", members).exchange(answers[ours.process])
    told = {process: json.loads(text) for process, text in answers.items()}
    every = [Process(**told[process][0]) for process in sorted(told)]
    least = min(process.waiting_ms for process in every)  # so far: what each has at least
    processes = tuple(
        process._replace(waiting_ms=max(0.0, process.communication_ms - least)) for process in every
    )
    spent = {device: tuple(pair) for _, pairs in told.values() for device, pair in pairs}
    return processes, tuple(_replicas(mesh, spent))


def _replicas(mesh: Mesh, spent: dict[int, tuple[float, float]]) -> Iterator[Replica]:
    """One for each replica; of several devices, the one that computes longest."""
    axes = data_axes(mesh)
    count = axis_size(mesh, axes)
    places = NamedSharding(mesh, P(axes)).devices_indices_map((count,))
    for number in range(count):
        own = [x for x, index in places.items() if index[0].indices(count)[0] == number]
        own = [x for x in own if x.id in spent]
        if own:
            device = max(own, key=lambda x: spent[x.id][0])
            yield Replica(number, device.process_index, device.id, *spent[device.id])


def _with_payoffs(result: Diagnosis, run: Run, links: Links | Link | None) -> Diagnosis:
    """What would pay, given the mean of the two figures of exposed communication.

    Waiting for others is none that sending less could spare. The figures are what it may be at
    least and at most.
    """
    sending = max(0.0, result.communication_ms - result.waiting_ms)
    added = sending if result.check is None else max(0.0, result.check.added_ms)
    exposed, idle = (sending + added) / 2, result.input_ms + result.host_ms
    off = abs(sending - added) / 2 / exposed if exposed else 0.0
    figures = _agreed(run.step.mesh, exposed, result.step_ms, -off, -idle)
    exposed, step_ms, off, idle = figures
    try:
        rows = pays(
            run.step,
            run.state,
            run.batch,
            links=links,
            step_seconds=step_ms / 1e3,
            exposed_seconds=exposed / 1e3,
            off=-off,
            idle_seconds=-idle / 1e3,
        )
    except Exception as error:
        if jax.process_count() > 1:  # the others would wait
            raise
        note = f"What would pay was left out ({type(error).__name__}: {error})."
        return result._replace(notes=(*result.notes, note))
    return result._replace(payoffs=rows)


def _agreed(mesh: Mesh, *figures: float) -> tuple[float, ...]:
    """The least of all processes' figures, so that all decide alike."""
    members = sorted({device.process_index for device in mesh.devices.flat})
    if len(members) == 1:
        return figures
    answers = Channel("jdp.doctor", members).exchange(json.dumps(figures))
    return tuple(float(x) for x in np.min([*map(json.loads, answers.values())], axis=0))


def _facts(result: Diagnosis, run: Run, text: str, compiled: tuple[int, float]) -> judging.Facts:
    """What findings are made of."""
    mesh, state = run.step.mesh, run.state
    whole = [
        (f"opt_state{row.path}", row.bytes)
        for row in holdings(state.opt_state).rows
        if row.lies.startswith("whole on each") and row.bytes >= judging.LARGE_LEAF
    ]
    chip = find_chip(mesh.devices.flat[0].device_kind)
    faster = 1.0
    if chip is not None and _multiplies_float32(run):
        faster = chip.flops.get("bf16", 1.0) / chip.flops.get("f32", 1.0)
    asked = parts(run.step.recipe.tx)
    late = [process.input_ms + process.host_ms for process in result.processes]
    who = int(np.argmax(late))
    return judging.Facts(
        step=result.step_ms,
        compute=result.compute_ms,
        communication=result.communication_ms,
        waiting=result.waiting_ms,
        input=result.input_ms,
        host=result.host_ms,
        replica_ms=tuple(replica.compute_ms for replica in result.replicas),
        shares_cores=result.shares_cores,
        recompiled=compiled[0],
        compile_ms=compiled[1],
        collectives=walk(text, mesh).collectives,
        large=() if find_placement(state.opt_state) else tuple(whole),
        replicas=axis_size(mesh, data_axes(mesh)),
        half_is_faster=faster,
        microbatch=run.step.recipe.microbatch,
        reduction=asked.reduction,
        stage=0 if asked.zero is None else asked.zero.number,
        waits_on_others=(who, max(late) - min(late)) if len(late) > 1 else None,
    )


def _multiplies_float32(run: Run) -> bool:
    """Whether most matrix products of the step have float32 on both sides."""
    text = run.step.lower(run.state, run.batch).as_text()
    found = re.findall(r"stablehlo\.(?:dot_general|convolution).*: \(tensor<[\dx]*x(\w+)>", text)
    return found.count("f32") > len(found) / 2


def _notes(
    trace: tracing.Trace, step: TrainStep, traced_s: float, step_s: float | None, steps: int
) -> Iterator[str]:
    if shares_cores(step.mesh):
        yield (
            f"{len(step.mesh.local_devices)} emulated devices take turns on the cores of one host. "
            "Their shares tell what the host spends, not what devices of their own would: "
            "communication counts only where none of them computes, and a replica's compute "
            "includes waiting for a core."
        )
    if not trace.ops:
        yield "The trace shows no operation of a device, so all but input is counted as host."
    if step_s is not None and traced_s > 1.2 * step_s:
        yield (
            f"Tracing made a step {traced_s / step_s:.1f} times as long; shares are those of "
            "traced steps."
        )
    if step_s is None:
        yield "No step was timed without a trace, which slows it: " + (
            "steps=1 leaves none." if steps == 1 else "there were too few batches."
        )
