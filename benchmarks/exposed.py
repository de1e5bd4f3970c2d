"""What communication adds to a training step between two processes over gloo.

    python benchmarks/exposed.py                       # starts both processes itself
    python benchmarks/exposed.py --model lm --rounds 40 --json exposed.json

    nothing     no gradient is sent: local steps that never agree (a wrong run, and a lower bound)
    leaves      by hand: a jax.lax.pmean of the tree, which gloo runs leaf by leaf
    float32     jdp.all_reduce(), leaves joined
    bfloat16    jdp.all_reduce(wire_dtype=jnp.bfloat16)
    int8        jdp.all_reduce(wire_dtype=jnp.int8)

"exposed" is a step less the step of "nothing" in the same round. AdamW, one device a process.
"""

import dataclasses
import statistics
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import measure
import models
import optax
import tyro
from jax.sharding import Mesh
from measure import Goal
from processes import by_hand, launch

import jdp
from jdp.replica import take_per_replica


@dataclasses.dataclass(frozen=True)
class Config:
    """Times a step between processes with less and less of its communication."""

    model: Literal["mlp", "lm"] = "mlp"
    processes: int = 2
    rounds: int = 20
    quick: bool = False  # a tiny model, to see that it runs
    json: Path | None = None  # where to write the results


def main(config: Config) -> None:
    launch(
        work, dataclasses.replace(config, rounds=2) if config.quick else config, config.processes
    )


def work(config: Config, coordinator: str, index: int) -> None:
    """What each process does."""
    jdp.emulate_devices(1)
    jdp.initialize(coordinator, num_processes=config.processes, process_id=index)
    rows = compare(config)
    if index == 0:
        goals = [
            Goal("exposed, float32 / leaf by leaf", rows["float32"]["/ leaves"], 1.0),
            Goal("exposed, bfloat16 / float32", rows["bfloat16"]["/ float32"], 0.70),
        ]
        measure.report("exposed", dataclasses.asdict(config), [*rows.values()], goals, config.json)


def compare(config: Config) -> dict[str, dict[str, Any]]:
    """The rows of the table; every process makes the same calls in the same order."""
    mesh, model = jdp.make_mesh(), models.make(config.model, quick=config.quick)
    inner = optax.adamw(1e-4)
    arms = {
        "nothing": jdp.local_sgd(inner, every=2**30),
        "leaves": optax.chain(leaf_by_leaf(mesh), inner),
        "float32": optax.chain(jdp.all_reduce(), inner),
        "bfloat16": optax.chain(jdp.all_reduce(wire_dtype=jnp.bfloat16), inner),
        "int8": optax.chain(jdp.all_reduce(wire_dtype=jnp.int8), inner),
    }
    batch = jdp.replicate(model.batch, mesh)
    turns = {name: turn(tx, model, batch, mesh) for name, tx in arms.items()}
    times = measure.interleave(turns, config.rounds)
    exposed = {
        name: 1e3 * statistics.median(a - b for a, b in zip(seconds, times["nothing"], strict=True))
        for name, seconds in times.items()
    }
    return {
        name: {
            "arm": name,
            "step_ms": measure.median_ms(seconds),
            "/ nothing": measure.ratio(seconds, times["nothing"]),
            "exposed_ms": exposed[name],
            "/ leaves": exposed[name] / exposed["leaves"],
            "/ float32": exposed[name] / exposed["float32"],
        }
        for name, seconds in times.items()
    }


def turn(tx: Any, model: models.Model, batch: Any, mesh: Mesh) -> Any:
    """A step of one arm, to be timed."""
    step = jdp.train_step(model.loss, tx, mesh)
    return measure.stepper(lambda state: step(state, batch), jdp.init_state(model.params, tx, mesh))


def leaf_by_leaf(mesh: Mesh) -> optax.GradientTransformation:
    """The mean as it is written first."""
    exchange = by_hand(mesh)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        values, _, _ = take_per_replica(updates, "leaf_by_leaf")
        return exchange(values), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
