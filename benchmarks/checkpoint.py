"""Times what checkpoints cost a run: the GPT of the examples, saved every 50 steps.

    python benchmarks/checkpoint.py                  # 8 emulated devices
    python benchmarks/checkpoint.py --every 20 --json checkpoint.json

A turn is `every` steps; two of the three arms save after the first of them, in the background or
in the foreground, and end when the checkpoint is there. Emulated devices and the writing share the
cores, so all of its work is counted, not only what the loop waits for.
"""

import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import measure
import numpy as np
import tyro
from measure import Goal

import jdp

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, GPTConfig
from train_gpt import Config as Training
from train_gpt import loss_fn, make_optimizer


@dataclasses.dataclass(frozen=True)
class Config:
    """Times checkpoints in the background and in the foreground beside none."""

    every: int = 50  # steps
    rounds: int = 12
    devices: int = 8
    clock: Literal["wall", "cpu"] = "wall"  # cpu: for a machine that others use as well
    quick: bool = False  # a small model and few steps, to see that it runs
    folder: Path | None = None  # where to save; by default a temporary folder
    json: Path | None = None  # where to write the results


Turn = Callable[[], float]


def main(config: Config) -> None:
    if config.quick:
        config = dataclasses.replace(config, every=3, rounds=2)
    jdp.emulate_devices(config.devices)
    run, state = training(config)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    with tempfile.TemporaryDirectory(dir=config.folder) as folder:
        calls: dict[str, list[float]] = {"background": [], "foreground": []}
        turns: dict[str, Turn] = {"none": turn(config, run, state)}
        for name, waits in calls.items():
            checkpoints = jdp.Checkpoints(Path(folder) / name, asynchronous=name == "background")
            turns[name] = turn(config, run, state, checkpoints, waits)
        for once in turns.values():
            once()  # the first save imports Orbax
        times = measure.interleave(turns, config.rounds)
    rows = [
        {
            "arm": name,
            "step_ms": measure.median_ms(found) / config.every,
            "/ none": measure.ratio(found, times["none"]),
            "save_ms": measure.median_ms(calls[name][1:]) if name in calls else 0.0,
            "saved_MB": size / 1e6 if name in calls else 0.0,
        }
        for name, found in times.items()
    ]
    ratio = rows[1]["/ none"]["median"]
    goals = [Goal(f"steps, saved every {config.every} in the background / not", ratio, 1.03)]
    measure.report("checkpoint", dataclasses.asdict(config), rows, goals, config.json)


def training(config: Config) -> tuple[Any, Any]:
    """A function that takes a step, and its first state."""
    example = Training(model=GPTConfig(width=32, layers=1) if config.quick else GPTConfig())
    mesh, model, tx = jdp.make_mesh(), GPT(example.model), make_optimizer(example)
    step = jdp.train_step(functools.partial(loss_fn, model), tx, mesh, microbatch=2)
    params = model.init(jax.random.key(0), jnp.zeros((1, 1), int))["params"]
    text = np.random.default_rng(0).integers(0, 256, (example.batch, example.model.context + 1))
    rows = {"tokens": text.astype(np.uint8), "weight": np.ones(example.batch, np.float32)}
    (batch,) = jdp.feed([rows], mesh, microbatch=2)
    return lambda state: step(state, batch), jdp.init_state(params, tx, mesh)


def turn(
    config: Config,
    run: Any,
    state: Any,
    checkpoints: jdp.Checkpoints | None = None,
    waits: list[float] | None = None,
) -> Turn:
    """A turn of an arm; what each call of save took is added to `waits`."""
    clock = measure.CLOCKS[config.clock]
    number, state = 0, jax.tree.map(jnp.copy, state)

    def take() -> float:
        nonlocal state, number
        state, metrics = run(state)
        jax.block_until_ready(state)
        start = clock()
        for i in range(config.every):
            state, metrics = run(state)
            float(metrics["loss"])  # as a loop that prints it
            number += 1
            if i == 0 and checkpoints is not None and waits is not None:
                before = time.perf_counter()
                checkpoints.save(state)
                waits.append(time.perf_counter() - before)
        if checkpoints is not None:
            checkpoints.wait()
        return clock() - start

    return take


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
