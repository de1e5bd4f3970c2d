"""Times PowerSGD's reduction alone, beside the arithmetic that its paper counts.

    python benchmarks/power.py                      # both models, 2 and 8 emulated devices
    python benchmarks/power.py --models mlp --devices 2 --ranks 4 --json power.json

    all_reduce   jdp.all_reduce: what is to be saved
    power_sgd    jdp.power_sgd, two all-reduces
    single       jdp.power_sgd(single=True), one
    matmuls      by hand, on each device and nothing sent: per matrix M = g + e, M Q, M^T P, P Q^T
                 and e = M - P Q^T, 6mnr floating-point operations
    orth         orthonormalisation of all P and all Q alone, O((m + n) r^2)

The overhead is the time of `power_sgd` over that of `matmuls`: what error feedback of each
replica's own, orthonormalisation, grouping and two all-reduces cost beside the paper's three
products. Emulated devices have no wire, so nothing here says what compression saves; what is sent
is read from the compiled programs.
"""

import dataclasses
import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import measure
import models
import numpy as np
import payload
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from measure import Goal

import jdp

MIN_RATE = 2.0  # jdp.power_sgd's own


@dataclasses.dataclass(frozen=True)
class Config:
    """Times PowerSGD's reduction beside its paper's arithmetic."""

    models: tuple[Literal["mlp", "lm"], ...] = ("mlp", "lm")
    devices: tuple[int, ...] = (2, 8)
    ranks: tuple[int, ...] = (1, 2, 4)
    rounds: int = 10
    clock: Literal["wall", "cpu"] = "wall"  # cpu: for a machine that others use as well
    quick: bool = False  # tiny models and few rounds, to see that it runs
    json: Path | None = None  # where to write the results


class Arm(NamedTuple):
    """A program from state to (state, result), its first state, and the bytes that it sends."""

    name: str
    step: Callable[[Any], tuple[Any, Any]]
    state: Any
    payload: int


def main(config: Config) -> None:
    if config.quick:
        config = dataclasses.replace(config, rounds=2, ranks=config.ranks[:1])
    jdp.emulate_devices(max(config.devices))
    results, goals = [], []
    for name in config.models:
        for count in config.devices:
            for rank in config.ranks:
                rows, reached = compare(name, count, rank, config)
                results += rows
                goals += reached
                gc.collect()
    measure.report("power", dataclasses.asdict(config), results, goals, config.json)


def compare(
    name: str, count: int, rank: int, config: Config
) -> tuple[list[dict[str, Any]], list[Goal]]:
    """The rows of one model, number of devices and rank, and the goals they speak to."""
    model, mesh = models.make(name, quick=config.quick), jdp.make_mesh(num_devices=count)
    contenders = arms(model.params, mesh, rank)
    clock = measure.CLOCKS[config.clock]
    turns = {arm.name: measure.stepper(arm.step, arm.state, clock=clock) for arm in contenders}
    times = measure.interleave(turns, config.rounds)
    matrices = [shape for shape in shapes_of(model.params) if compresses(shape, rank)]
    rows = []
    for arm in contenders:
        row = {"model": name, "devices": count, "rank": rank, "arm": arm.name}
        row["ms"] = measure.median_ms(times[arm.name])
        for base in ("matmuls", "all_reduce"):
            row[f"/ {base}"] = measure.ratio(times[arm.name], times[base])
        row["sent / all_reduce"] = arm.payload / contenders[0].payload
        if arm.name == "matmuls":
            operations = count * sum(6 * m * n * min(rank, m, n) for m, n in matrices)
            row["gflop"] = operations / 1e9
            row["gflop / s"] = row["gflop"] / row["ms"] * 1e3
        rows.append(row)
    goals = []
    if (name, rank) == ("mlp", 4):
        goals.append(
            Goal(f"mlp, {count} devices, rank 4: sent", row_of(rows, "power_sgd"), 1 / 150)
        )
    return rows, goals


def row_of(rows: list[dict[str, Any]], arm: str) -> float:
    return next(row["sent / all_reduce"] for row in rows if row["arm"] == arm)


def arms(params: Any, mesh: Mesh, rank: int) -> list[Arm]:
    grads = gradients(params, mesh)
    links = {
        "all_reduce": jdp.all_reduce(),
        "power_sgd": jdp.power_sgd(rank, min_rate=MIN_RATE),
        "single": jdp.power_sgd(rank, min_rate=MIN_RATE, single=True),
    }
    found = []
    for name, tx in links.items():
        state = jdp.init_state(params, tx, mesh).opt_state
        found.append(arm(name, tx.update, grads, state))
    shapes = [shape for shape in shapes_of(params) if compresses(shape, rank)]
    place = NamedSharding(mesh, P("data"))
    leaves = [leaf for leaf in jax.tree.leaves(grads) if compresses(leaf.shape[1:], rank)]
    errors = [jnp.zeros(leaf.shape, device=place) for leaf in leaves]
    factors = [jnp.ones((n, min(rank, m, n))) for m, n in shapes]
    thin = [jnp.ones((k, min(rank, m, n))) for m, n in shapes for k in (m, n)]
    return [
        *found,
        arm("matmuls", matmuls(mesh), leaves, (errors, jdp.replicate(factors, mesh))),
        arm("orth", orth(mesh), (), jdp.replicate(thin, mesh)),
    ]


def arm(name: str, update: Callable[[Any, Any], tuple[Any, Any]], grads: Any, state: Any) -> Arm:
    jitted = jax.jit(update, donate_argnums=1)
    compiled = jitted.lower(grads, state).compile()
    sent = payload.costs(compiled).payload

    def step(state: Any) -> tuple[Any, Any]:
        result, state = jitted(grads, state)
        return state, result

    return Arm(name, step, state, sent)


def matmuls(mesh: Mesh) -> Callable[[Any, Any], tuple[Any, Any]]:
    """The paper's products, with this device's error as its programs take it."""

    def local(grads: Any, errors: Any, factors: Any) -> Any:
        means, kept = [], []
        for grad, error, q in zip(grads, errors, factors, strict=True):
            matrix = grad[0] + error[0]
            p = matrix @ q
            product = p @ (matrix.T @ p).T
            means.append(product[None])
            kept.append((matrix - product)[None])
        return means, kept

    split = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=P("data")
    )

    def update(grads: Any, state: Any) -> tuple[Any, Any]:
        errors, factors = state
        means, errors = split(grads, errors, factors)
        # times 0: with P that is not orthonormal errors would grow without bounds
        return means, ([0 * error for error in errors], factors)

    return update


def orth(mesh: Mesh) -> Callable[[Any, Any], tuple[Any, Any]]:
    def local(factors: Any) -> Any:
        return [jnp.linalg.qr(factor)[0] for factor in factors]

    split = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P())
    return lambda grads, state: ((), split(state))


def gradients(params: Any, mesh: Mesh) -> Any:
    """Random gradients of each replica."""
    random, axes = np.random.default_rng(0), ("data",)
    count, place = jdp.axis_size(mesh, axes), NamedSharding(mesh, P(axes))

    def one(param: Any) -> jdp.PerReplica:
        value = random.standard_normal((count, *param.shape), np.float32)
        return jdp.PerReplica(jax.device_put(value, place), axes=axes, mesh=mesh)

    return jax.tree.map(one, params)


def shapes_of(params: Any) -> list[tuple[int, int]]:
    """Of all leaves that are matrices."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim >= 2]
    return [(math.prod(shape[:-1]), shape[-1]) for shape in shapes]


def compresses(shape: tuple[int, ...], rank: int) -> bool:
    if len(shape) < 2:
        return False
    m, n = math.prod(shape[:-1]), shape[-1]
    return m * n >= MIN_RATE * min(rank, m, n) * (m + n)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
