"""Times gradient accumulation: k = 8 microbatches of the MLP's batch in each update.

    python benchmarks/accumulate.py                # 2 and 8 emulated devices
    python benchmarks/accumulate.py --devices 8 --json accumulate.json

    jdp                jdp.train_step(microbatch=...): nothing is sent until the last microbatch
    shard_map          by hand: a scan inside jax.shard_map, one pmean after it
    jit                plain jax.jit with a scan; the compiler puts the all-reduce into the loop
    jdp.multi_steps    k calls, one microbatch each, which send in the k-th
    optax.MultiSteps   k calls of a hand-written shard_map step, which send in each

Each arm makes one update from the same examples, and all must end at the gradient of one device.
"""

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import arms
import jax
import jax.numpy as jnp
import measure
import models
import optax
import payload
import tyro
from arms import Arm
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from measure import Goal
from models import Model

import jdp


@dataclasses.dataclass(frozen=True)
class Config:
    """Times gradient accumulation in five arms."""

    devices: tuple[int, ...] = (2, 8)
    every: int = 8  # k, microbatches in an update
    rounds: int = 5
    clock: Literal["wall", "cpu"] = "wall"  # cpu: for a machine that others use as well
    quick: bool = False  # a tiny model and few rounds, to see that it runs
    json: Path | None = None  # where to write the results


def main(config: Config) -> None:
    if config.quick:
        config = dataclasses.replace(config, rounds=2)
    jdp.emulate_devices(max(config.devices))
    results, goals = [], []
    for count in config.devices:
        rows, reached = compare(count, config)
        results += rows
        goals += reached
        gc.collect()
    measure.report("accumulate", dataclasses.asdict(config), results, goals, config.json)


def compare(count: int, config: Config) -> tuple[list[dict[str, Any]], list[Goal]]:
    """The rows of one number of devices, and the goals they speak to."""
    every, mesh = config.every, jdp.make_mesh(num_devices=count)
    model = models.make("mlp", quick=config.quick, times=every)
    contenders = [
        arms.jdp_step(model, mesh, microbatch=len(model.batch["y"]) // every // count),
        shard_map_scan(model, mesh, every),
        jit_scan(model, mesh, every),
        jdp_multi_steps(model, mesh, every),
        optax_multi_steps(model, mesh, every),
    ]
    times, errors = arms.race(contenders, model, config.rounds, config.clock)
    single = costs(arms.jdp_step(models.make("mlp", quick=config.quick), mesh))
    rows = []
    for arm in contenders:
        cost, calls = costs(arm), 1 if "." not in arm.name else every
        row = {"devices": count, "arm": arm.name, "update_ms": measure.median_ms(times[arm.name])}
        for base in ("jit", "optax.MultiSteps", "shard_map"):
            row[f"/ {base}"] = measure.ratio(times[arm.name], times[base])
        sent = calls * cost.payload + cost.branch_payload
        row |= {"payload / k=1": sent / single.payload, "memory / k=1": cost.live / single.live}
        rows.append(row | {"gradient_error": errors[arm.name]})
    ours, where = rows[0], f"{count} devices, k={every}: "
    return rows, [
        Goal(where + "update / plain jit's scan", ours["/ jit"]["median"], 0.85),
        Goal(where + "update / optax.MultiSteps", ours["/ optax.MultiSteps"]["median"], 0.40),
        Goal(where + "payload / k=1", ours["payload / k=1"], 1.00),
        Goal(where + "memory / k=1", ours["memory / k=1"], 1.01),
    ]


def costs(arm: Arm) -> payload.Costs:
    return payload.costs(arm.lower(arm.start()).compile())


def shard_map_scan(model: Model, mesh: Mesh, every: int) -> Arm:
    def local(state: Any, batch: Any) -> Any:
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state[0])
        params, zeros = jax.lax.pcast((state[0], zeros), "data", to="varying")
        loss, grads = scan(model, params, _split(batch, every), zeros)
        loss, grads = jax.lax.pmean((loss, grads), "data")
        return arms.apply(state, grads), loss

    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    return arms.jitted("shard_map", step, model, mesh, arms.place(model.batch, mesh, P("data")))


def jit_scan(model: Model, mesh: Mesh, every: int) -> Arm:
    def step(state: Any, batch: Any) -> Any:
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state[0])
        loss, grads = scan(model, state[0], batch, zeros)
        return arms.apply(state, grads), loss

    batch = arms.place(_split(model.batch, every), mesh, P(None, "data"))
    return arms.jitted("jit", step, model, mesh, batch)


def scan(model: Model, params: Any, microbatches: Any, zeros: Any) -> Any:
    """Mean loss and gradient over the microbatches."""

    def body(sums: Any, rows: Any) -> Any:
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(model.loss)(params, rows)), None

    sums, _ = jax.lax.scan(body, zeros, microbatches)
    return jax.tree.map(lambda x: x / len(microbatches["y"]), sums)


def jdp_multi_steps(model: Model, mesh: Mesh, every: int) -> Arm:
    tx = jdp.multi_steps(optax.chain(jdp.all_reduce(), arms.OPTIMIZER), every)
    step = jdp.train_step(model.loss, tx, mesh)
    start = lambda: jdp.init_state(model.params, tx, mesh)  # noqa: E731
    return _in_calls("jdp.multi_steps", start, step, _parts(model, mesh, every))


def optax_multi_steps(model: Model, mesh: Mesh, every: int) -> Arm:
    optimizer = optax.MultiSteps(arms.OPTIMIZER, every).gradient_transformation()

    def local(state: Any, batch: Any) -> Any:
        params = jax.lax.pcast(state[0], "data", to="varying")
        loss, grads = jax.lax.pmean(jax.value_and_grad(model.loss)(params, batch), "data")
        return arms.apply(state, grads, optimizer), loss

    step = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()), donate_argnums=0
    )
    start = lambda: arms.replicated(model, mesh, optimizer)  # noqa: E731
    return _in_calls("optax.MultiSteps", start, step, _parts(model, mesh, every))


def _in_calls(name: str, start: Callable[[], Any], step: Any, parts: list[Any]) -> Arm:
    """An arm whose update takes one call for each part of the batch."""

    def update(state: Any) -> Any:
        loss = None
        for part in parts:
            state, loss = step(state, part)
        return state, loss

    return Arm(name, start, update, lambda state: step.lower(state, parts[0]))


def _parts(model: Model, mesh: Mesh, every: int) -> list[Any]:
    parts = [jax.tree.map(lambda x: x[j], _split(model.batch, every)) for j in range(every)]  # noqa: B023
    return [arms.place(part, mesh, P("data")) for part in parts]


def _split(batch: Any, every: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(every, -1, *x.shape[1:]), batch)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
