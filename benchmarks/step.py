"""Times one training step: jdp beside a hand-written shard_map, plain jax.jit, and pmap.

    python benchmarks/step.py                      # both models, 2 and 8 emulated devices
    python benchmarks/step.py --models mlp --devices 8 --rounds 60 --json step.json
    LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4 python benchmarks/step.py

Also compiles each arm anew a few times, and reads from the compiled program what it sends, what
memory it holds and how many bytes its operations move; these are exact: equal programs show there
before they show in times. All arms must end at the gradient of one device.
"""

import dataclasses
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import arms
import jax
import measure
import models
import payload
import tyro
from measure import Goal

import jdp

# Limits of jdp's step time over plain jax.jit, by model and devices, on two CPU cores.
LIMITS = {("mlp", 8): 0.55, ("mlp", 2): 0.50, ("lm", 8): 0.95, ("lm", 2): 1.05}


@dataclasses.dataclass(frozen=True)
class Config:
    """Times one training step in four arms."""

    models: tuple[Literal["mlp", "lm"], ...] = ("mlp", "lm")
    devices: tuple[int, ...] = (2, 8)
    rounds: int = 20
    compile_rounds: int = 3
    clock: Literal["wall", "cpu"] = "wall"  # cpu: for a machine that others use as well
    quick: bool = False  # tiny models and few rounds, to see that it runs
    json: Path | None = None  # where to write the results


def main(config: Config) -> None:
    if config.quick:
        config = dataclasses.replace(config, rounds=2, compile_rounds=1)
    jdp.emulate_devices(max(config.devices))
    results, goals = [], []
    for name in config.models:
        for count in config.devices:
            rows, reached = compare(name, count, config)
            results += rows
            goals += reached
            gc.collect()
    measure.report("step", dataclasses.asdict(config), results, goals, config.json)


def compare(name: str, count: int, config: Config) -> tuple[list[dict[str, Any]], list[Goal]]:
    """The rows of one model on one number of devices, and the goals they speak to."""
    model = models.make(name, quick=config.quick)
    clock = measure.CLOCKS[config.clock]
    contenders = arms.steps(model, jdp.make_mesh(num_devices=count))
    cost: dict[str, payload.Costs] = {}
    compilers = {arm.name: functools.partial(compile_anew, arm, clock, cost) for arm in contenders}
    compilers["jit"]()  # the first one also warms up what all share
    building = measure.interleave(compilers, config.compile_rounds)
    times, errors = arms.race(contenders, model, config.rounds, config.clock)
    rows = []
    for arm in contenders:
        seconds, compiling = times[arm.name], building[arm.name]
        row = {"model": name, "devices": count, "arm": arm.name}
        row |= {
            "step_ms": measure.median_ms(seconds),
            "/ jit": measure.ratio(seconds, times["jit"]),
            "/ shard_map": measure.ratio(seconds, times["shard_map"]),
            "compile_s": measure.median_ms(compiling) / 1e3,
            "compile / shard_map": measure.ratio(compiling, building["shard_map"]),
            "payload / params": cost[arm.name].payload / (4 * models.num_params(model)),
            "live_MB": cost[arm.name].live / 1e6,
            "moved_MB": cost[arm.name].moved / 1e6,
            "gradient_error": errors[arm.name],
        }
        rows.append(row)
    return rows, judge({row["arm"]: row for row in rows}, name, count)


def compile_anew(
    arm: arms.Arm, clock: Callable[[], float], cost: dict[str, payload.Costs]
) -> float:
    """Seconds to trace and compile as in a new process; notes what the program costs."""
    state = arm.start()
    jax.clear_caches()
    start = clock()
    program = arm.lower(state).compile()
    seconds = clock() - start
    cost[arm.name] = payload.costs(program)
    return seconds


def judge(rows: dict[str, dict[str, Any]], name: str, count: int) -> list[Goal]:
    ours, theirs = rows["jdp"], rows["shard_map"]
    where, limit = f"{name}, {count} devices: ", LIMITS.get((name, count))
    goals = [] if limit is None else [Goal(where + "step / jit", ours["/ jit"]["median"], limit)]
    return [
        *goals,
        Goal(where + "step / shard_map", ours["/ shard_map"]["median"], 1.02),
        Goal(where + "memory / shard_map", ours["live_MB"] / theirs["live_MB"], 1.02),
        Goal(where + "compile / shard_map", ours["compile / shard_map"]["median"], 1.10),
        Goal(where + "payload / 4 bytes a parameter", ours["payload / params"], 1.0001),
    ]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
