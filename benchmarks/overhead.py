"""Times what a call costs by itself: a step over 64 tiny leaves and their Adam state.

    python benchmarks/overhead.py                  # 1, 2 and 8 emulated devices
    python benchmarks/overhead.py --json overhead.json

There is next to no arithmetic, so what is left is Python, the dispatch of 193 arrays to each
device, and one small all-reduce.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import arms
import measure
import models
import tyro
from measure import Goal

import jdp


@dataclasses.dataclass(frozen=True)
class Config:
    """Times the overhead of a call in four arms."""

    devices: tuple[int, ...] = (1, 2, 8)
    rounds: int = 40
    calls: int = 10  # in each turn
    clock: Literal["wall", "cpu"] = "wall"  # cpu: for a machine that others use as well
    quick: bool = False  # few leaves and rounds, to see that it runs
    json: Path | None = None  # where to write the results


def main(config: Config) -> None:
    if config.quick:
        config = dataclasses.replace(config, rounds=2, calls=2)
    jdp.emulate_devices(max(config.devices))
    results, goals = [], []
    for count in config.devices:
        rows = compare(count, config)
        results += rows
        what = f"{count} device(s): call / hand-written shard_map"
        goals.append(Goal(what, rows[0]["/ shard_map"]["median"], 1.05))
    measure.report("overhead", dataclasses.asdict(config), results, goals, config.json)


def compare(count: int, config: Config) -> list[dict[str, Any]]:
    """The rows of one number of devices."""
    model = models.make("leaves", quick=config.quick)
    contenders = arms.steps(model, jdp.make_mesh(num_devices=count))
    times, errors = arms.race(contenders, model, config.rounds, config.clock, config.calls)
    return [
        {
            "devices": count,
            "arm": arm.name,
            "call_ms": measure.median_ms(times[arm.name]),
            "/ jit": measure.ratio(times[arm.name], times["jit"]),
            "/ shard_map": measure.ratio(times[arm.name], times["shard_map"]),
            "gradient_error": errors[arm.name],
        }
        for arm in contenders
    ]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
