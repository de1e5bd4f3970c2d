"""Whether `jdp.doctor` finds what was injected: each figure it gives beside the truth.

    python benchmarks/doctor.py
    python benchmarks/doctor.py --steps 40 --json doctor.json

    slow loader       batches come every so many ms: a step must take that long, and its input is
                      that time less the step alone
    slow process      one of two processes sleeps inside its step: its replica computes longer by
                      the sleep, and the other waits that much longer than it would
    heavy sending     between two processes: communication in the trace beside the step less the
                      same step compiled without it
    in a loop         a mean over the replicas in a scan of the loss: how often it is said to run
    payoffs           bfloat16, ZeRO-1 and accumulation built and timed in turns: predicted ratio
                      of step times beside measured, with what the doctor said of it

Two processes of one device each talk over gloo; the rest runs on emulated devices.
"""

import dataclasses
import json as json_format
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
import tyro
from measure import Goal
from processes import launch

import jdp
from jdp.diagnose import Diagnosis, doctor
from jdp.hardware import Link
from jdp.pays import EVERY

LINK = Link(1e9, 1e-4, "stated, where payoffs do not matter")
WIDTH = 512


@dataclasses.dataclass(frozen=True)
class Config:
    """Injects a fault, asks the doctor, and compares."""

    steps: int = 20
    loader_ms: float = 100.0  # between two batches
    sleep_ms: float = 50.0  # in each step of the slow process
    loops: int = 7  # times that the collective runs
    rounds: int = 10  # of the payoffs
    devices: int = 8
    quick: bool = False  # a tiny run, to see that it works
    json: Path | None = None  # where to write the results


def main(config: Config) -> None:
    if config.quick:
        config = dataclasses.replace(config, steps=4, rounds=2, loader_ms=30.0, sleep_ms=20.0)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        os.environ["JDP_DOCTOR_ANSWER"] = str(answer)
        launch(work, config, 2)
        rows = json_format.loads(answer.read_text())
    jdp.emulate_devices(config.devices)
    rows += [slow_loader(config), in_a_loop(config), *payoffs(config)]
    goals = [Goal(row["fault"], row["off"], row["limit"]) for row in rows if row["limit"]]
    measure.report("doctor", dataclasses.asdict(config), rows, goals, config.json)


def work(config: Config, coordinator: str, index: int) -> None:
    """What each of the two processes does."""
    jdp.emulate_devices(1)
    jdp.initialize(coordinator, num_processes=2, process_id=index)
    rows = [*slow_process(config, index), *heavy_sending(config, index), *payoffs(config, index)]
    if index == 0:
        Path(os.environ["JDP_DOCTOR_ANSWER"]).write_text(json_format.dumps(rows))


def row(
    fault: str, truth: float, found: float, limit: float | None, unit: str = "ms"
) -> dict[str, Any]:
    """A line of the table; `off` is the relative error."""
    off = abs(found - truth) / abs(truth)
    return {
        "fault": fault,
        "truth": truth,
        "found": found,
        "unit": unit,
        "off": off,
        "limit": limit,
    }


def layers(params: Any, x: jax.Array) -> jax.Array:
    for weights in params:
        x = jnp.tanh(x @ weights)
    return x


def squares(params: Any, batch: Any) -> jdp.Mean:
    return jdp.Mean.of(jnp.mean(layers(params, batch["x"]) ** 2, axis=-1), batch["weight"])


def batches(rows: int, index: int = 0, wait_ms: float = 0.0) -> Iterator[Any]:
    """Batches without end, no two processes' alike."""
    for number in range(10**6):
        time.sleep(wait_ms / 1e3)
        yield {"x": np.full((rows, WIDTH), 1.0 + number % 7 + 100 * index, np.float32)}


def ask(
    loss: Callable[..., Any], loader: Iterator[Any], config: Config, count: int = 3, **kept: Any
) -> Diagnosis:
    """The doctor on a small network."""
    mesh, tx = jdp.make_mesh(), optax.chain(jdp.all_reduce(), optax.adam(1e-3))
    params = [np.full((WIDTH, WIDTH), 0.01, np.float32) for _ in range(count)]
    step, state = jdp.train_step(loss, tx, mesh), jdp.init_state(params, tx, mesh)
    return doctor(step, state, jdp.feed(loader, mesh), steps=config.steps, links=LINK, **kept)


def slow_loader(config: Config) -> dict[str, Any]:
    """With the loader the bottleneck, a step takes what a batch takes."""
    found = ask(squares, batches(256, wait_ms=config.loader_ms), config, check=False)
    busy = found.compute_ms + found.communication_ms + found.host_ms
    named = found.findings[0].what.startswith("input")
    print(f"slow loader: named first: {named}; step {found.step_ms:.1f} ms", file=sys.stderr)
    truth = config.loader_ms - busy
    return row("slow loader: input", truth, found.input_ms, 0.15)


def slow_process(config: Config, index: int) -> list[dict[str, Any]]:
    """The sleep of one process is compute of its replica, and waiting of the other."""

    def late(x: Any) -> Any:
        time.sleep(config.sleep_ms / 1e3 * index)
        return x

    def loss(params: Any, batch: Any) -> jdp.Mean:
        x = layers(params, batch["x"])
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        slow = jax.pure_callback(late, scalar, jax.lax.stop_gradient(x[0, 0]))
        return jdp.Mean.of(jnp.mean(x**2, axis=-1) + 0 * slow, batch["weight"])

    found = ask(loss, batches(64, index), config, check=False)
    fast, slow = (replica.compute_ms for replica in found.replicas)
    waits = found.processes[0].waiting_ms
    return [
        row("slow process: its replica's extra compute", config.sleep_ms, slow - fast, 0.25),
        row("slow process: the other waits", config.sleep_ms, waits, 0.25),
    ]


def heavy_sending(config: Config, index: int) -> list[dict[str, Any]]:
    """Many parameters and few rows: two ways to find what sending adds."""
    found = ask(squares, batches(8, index), config, count=12)
    assert found.check is not None
    told = found.communication_ms - found.waiting_ms
    named = any(finding.what.startswith("communication") for finding in found.findings)
    print(f"heavy sending: named: {named}; step {found.step_ms:.1f} ms", file=sys.stderr)
    return [row("heavy sending: trace beside check", found.check.added_ms, told, 0.25)]


def in_a_loop(config: Config) -> dict[str, Any]:
    """How often a collective in a scan of the loss runs, as the finding says."""

    def loss(params: Any, batch: Any) -> jdp.Mean:
        def body(x: jax.Array, _: Any) -> Any:
            x = layers(params, x)
            return x - jax.lax.pmean(x.mean(), "data"), None

        x, _ = jax.lax.scan(body, batch["x"], length=config.loops)
        return jdp.Mean.of(jnp.mean(x**2, axis=-1), batch["weight"])

    quick = dataclasses.replace(config, steps=2)
    found = ask(loss, batches(64), quick, count=1, check=False)
    named = [finding.what for finding in found.findings if "in a loop" in finding.what]
    print("\n".join(named), file=sys.stderr)
    times = max((int(what.split(" times")[0].split()[-1]) for what in named), default=0)
    return row("in a loop: times", config.loops, times, 1e-9, "times")


def payoffs(config: Config, index: int = 0) -> list[dict[str, Any]]:
    """Predicted ratios of step times beside those of the real steps, taking turns."""
    mesh, inner = jdp.make_mesh(), optax.adamw(1e-4)
    params = [np.full((WIDTH, WIDTH), 0.01, np.float32) for _ in range(4 if config.quick else 12)]
    arms = {
        "now": optax.chain(jdp.all_reduce(), inner),
        "bfloat16 wire": optax.chain(jdp.all_reduce(wire_dtype=jnp.bfloat16), inner),
        "ZeRO 1": jdp.zero1(inner),
        "accumulation": jdp.multi_steps(optax.chain(jdp.all_reduce(), inner), every=EVERY),
    }
    batch = next(jdp.feed(batches(64, index), mesh, prefetch=0))
    steps = {name: jdp.train_step(squares, tx, mesh) for name, tx in arms.items()}
    states = {name: jdp.init_state(params, tx, mesh) for name, tx in arms.items()}
    given = [batch] * (config.steps + 10)
    found = doctor(steps["now"], states["now"], given, steps=config.steps)
    states["now"] = found.state

    def turn(name: str) -> Callable[[], float]:
        def update(state: Any) -> Any:  # as many batches as accumulation takes for one
            metrics = None
            for _ in range(EVERY):
                state, metrics = steps[name](state, batch)
            return state, metrics

        return measure.stepper(update, states[name])

    times = measure.interleave({name: turn(name) for name in arms}, config.rounds)
    told = {payoff.what: payoff for payoff in found.payoffs}
    says = {True: "yes", None: "cannot tell", False: "no"}
    where = f"{jax.process_count()} process(es)"
    return [
        row(
            f"payoff of {name}, {where}: {says[told[name].pays]}",
            measure.ratio(times[name], times["now"])["median"],
            told[name].then_ms / told[name].now_ms,
            None,  # a forecast, and on shared cores no two rounds agree within a third
            "ratio",
        )
        for name in ("bfloat16 wire", "ZeRO 1", "accumulation")
    ]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
