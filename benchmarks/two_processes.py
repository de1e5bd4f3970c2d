"""What two processes cost beside one that has the same eight devices: gloo, and feeding.

    python benchmarks/two_processes.py                   # the GPT of the examples
    python benchmarks/two_processes.py --model mlp --rounds 30 --json two_processes.json

    one     a process with eight emulated devices
    two     two processes with four each, which send over gloo

Each takes steps with a batch that is in place ("step") and steps whose batches `jdp.Batches` reads
("fed"). All three processes live throughout and take turns, so that each has both cores for itself.
Before anything is timed, both must have the same loss.
"""

import dataclasses
import functools
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import measure
import models
import numpy as np
import optax
import tyro
from processes import free_coordinator

import jdp

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, GPTConfig
from train_gpt import loss_fn

DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Config:
    """Times the same steps on one process and on two."""

    model: Literal["gpt", "mlp"] = "gpt"
    batch: int = 64  # examples of all devices together
    rounds: int = 20
    calls: int = 5  # steps of a turn
    quick: bool = False  # a tiny model, to see that it runs
    json: Path | None = None  # where to write the results


def main(config: Config) -> None:
    if config.quick:
        config = dataclasses.replace(config, rounds=2, calls=1, batch=8)
    start = multiprocessing.get_context("spawn")
    groups: dict[str, list[Connection]] = {}
    children = []
    for name, processes in (("one", 1), ("two", 2)):
        coordinator, groups[name] = free_coordinator(), []
        for index in range(processes):
            ours, theirs = start.Pipe()
            given = (config, coordinator, processes, index, theirs)
            children.append(start.Process(target=work, args=given, daemon=True))
            groups[name].append(ours)
    try:
        for child in children:
            child.start()
        rows = compare(groups, config)
    finally:
        for child in children:
            child.kill()
    measure.report("two processes", dataclasses.asdict(config), rows, [], config.json)


def compare(groups: dict[str, list[Connection]], config: Config) -> list[dict[str, Any]]:
    """The rows of the table."""
    losses = [ask(ends, "loss") for ends in groups.values()]
    if not math.isclose(*losses, rel_tol=1e-5):
        raise SystemExit(f"One process has the loss {losses[0]}, two have {losses[1]}.")
    turns = {
        f"{name}, {what}": functools.partial(ask, ends, what)
        for name, ends in groups.items()
        for what in ("step", "fed")
    }
    times = measure.interleave(turns, config.rounds)
    return [
        {
            "arm": name,
            "step_ms": measure.median_ms(found),
            "/ one, step": measure.ratio(found, times["one, step"]),
            "/ one, fed": measure.ratio(found, times["one, fed"]),
        }
        for name, found in times.items()
    ]


def ask(ends: list[Connection], what: str) -> float:
    """Has a group's processes do it, all at once; the seconds of the slowest, or its loss."""
    for end in ends:
        end.send(what)
    try:
        return max(end.recv() for end in ends)
    except (EOFError, ConnectionResetError):
        raise SystemExit("A process failed; see its message above.") from None


def work(config: Config, coordinator: str, processes: int, index: int, orders: Connection) -> None:
    """What each process does: as it is told, until it is killed."""
    jdp.emulate_devices(DEVICES // processes)
    if processes > 1:
        jdp.initialize(coordinator, num_processes=processes, process_id=index)
    step, fresh, batches = training(config)
    batch = next(batches)
    loss = float(step(fresh(), batch)[1]["loss"])  # compiles

    def turn(draw: Callable[[], Any]) -> Callable[[], float]:
        return measure.stepper(lambda state: step(state, draw()), fresh(), config.calls)

    answers = {
        "loss": lambda: loss,
        "step": turn(lambda: batch),
        "fed": turn(lambda: next(batches)),
    }
    while True:
        orders.send(answers[orders.recv()]())


def as_mean(loss: Any, params: Any, batch: Any) -> jdp.Mean:
    """Of rows that all count: `jdp.Batches` fills up none here."""
    rows = batch["weight"].sum()
    return jdp.Mean(loss(params, batch) * rows, rows)


def training(config: Config) -> tuple[Any, Callable[[], Any], Iterator[Any]]:
    """A step, a maker of its first state, and batches without end."""
    mesh, tx = jdp.make_mesh(), optax.chain(jdp.all_reduce(), optax.adamw(1e-3))
    if config.model == "mlp":
        _, params, mean, rows = models.make("mlp", quick=config.quick, times=16)
        loss = functools.partial(as_mean, mean)
    else:
        shape = GPTConfig(width=32, layers=1) if config.quick else GPTConfig()
        model = GPT(shape)
        loss = functools.partial(loss_fn, model)
        params = model.init(jax.random.key(0), jnp.zeros((1, 1), int))["params"]
        text = np.random.default_rng(0).integers(0, 256, (4096, shape.context + 1))
        rows = {"tokens": text.astype(np.uint8)}
    microbatch = config.batch // DEVICES
    batches = jdp.Batches(
        jdp.Columns(rows), mesh, batch=config.batch, seed=0, microbatch=microbatch
    )
    step = jdp.train_step(loss, tx, mesh, microbatch=microbatch)
    return step, lambda: jdp.init_state(params, tx, mesh), iter(batches)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
