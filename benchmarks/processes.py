"""Times the exchange of a gradient of 100 leaves of 100 KB between two processes over gloo.

    python benchmarks/processes.py                 # starts both processes itself
    python benchmarks/processes.py --rounds 60 --json processes.json

    leaves      by hand: one program with a jax.lax.pmean of the tree; gloo sends leaf by leaf
    jdp         jdp.all_reduce(), which joins leaves into flat buckets between CPU processes
    one array   a single array of the same 10 MB: what the wire allows

The processes talk through the loopback interface, one device each. All must end at the same mean.
"""

import dataclasses
import multiprocessing
import multiprocessing.connection
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import measure
import numpy as np
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from measure import Goal

import jdp


@dataclasses.dataclass(frozen=True)
class Config:
    """Times an exchange between processes in three arms."""

    processes: int = 2
    leaves: int = 100
    leaf_bytes: int = 100_000
    rounds: int = 30
    quick: bool = False  # few small leaves and rounds, to see that it runs
    json: Path | None = None  # where to write the results


def main(config: Config) -> None:
    if config.quick:
        config = dataclasses.replace(config, rounds=2, leaves=4, leaf_bytes=400)
    launch(work, config, config.processes)


def launch(work: Callable[[Any, str, int], None], config: Any, processes: int) -> None:
    """Runs `work(config, coordinator, index)` in so many processes, and ends with them."""
    start, coordinator = multiprocessing.get_context("spawn").Process, free_coordinator()
    children = [start(target=work, args=(config, coordinator, i)) for i in range(processes)]
    try:
        for child in children:
            child.start()
        waiting = [child.sentinel for child in children]
        while waiting and not any(child.exitcode for child in children):
            ended = multiprocessing.connection.wait(waiting)
            waiting = [sentinel for sentinel in waiting if sentinel not in ended]
        if any(child.exitcode for child in children):
            raise SystemExit("A process failed; see its message above.")
    finally:
        for child in children:
            child.kill()  # one that waits for a failed one would wait for ever


def free_coordinator() -> str:
    """An address whose port is free now, and hardly taken a moment later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def work(config: Config, coordinator: str, index: int) -> None:
    """What each process does."""
    jdp.emulate_devices(1)
    jdp.initialize(coordinator, num_processes=config.processes, process_id=index)
    rows = compare(config)
    if index == 0:
        goal = Goal("jdp / leaf by leaf", rows[1]["/ leaves"]["median"], 0.10)
        measure.report("processes", dataclasses.asdict(config), rows, [goal], config.json)


def compare(config: Config) -> list[dict[str, Any]]:
    """The rows of the table; every process makes the same calls in the same order."""
    mesh = jdp.make_mesh()
    rng = np.random.default_rng(0)
    shape = (config.processes, config.leaves, config.leaf_bytes // 4)
    host = rng.standard_normal(shape).astype(np.float32)
    leaves = [split(host[:, i], mesh) for i in range(config.leaves)]
    whole = split(host.reshape(config.processes, -1), mesh)
    exchanges = {
        "leaves": (by_hand(mesh), leaves),
        "jdp": (by_jdp(mesh), leaves),
        "one array": (by_hand(mesh), whole),
    }
    expected, turns, errors = host.astype(np.float64).mean(0), {}, {}
    for name, (exchange, values) in exchanges.items():
        means = [np.asarray(mean) for mean in jax.tree.leaves(exchange(values))]
        errors[name] = measure.gradient_error(np.stack(means).reshape(expected.shape), expected)
        turns[name] = measure.stepper(lambda state, f=exchange, x=values: (state, f(x)), None)
    times = measure.interleave(turns, config.rounds)
    return [
        {
            "arm": name,
            "exchange_ms": measure.median_ms(seconds),
            "/ leaves": measure.ratio(seconds, times["leaves"]),
            "/ one array": measure.ratio(seconds, times["one array"]),
            "GB/s": host[0].nbytes / 1e6 / measure.median_ms(seconds),
            "gradient_error": errors[name],
        }
        for name, seconds in times.items()
    ]


def by_hand(mesh: Mesh) -> Any:
    def local(values: Any) -> Any:
        return jax.lax.pmean(jax.tree.map(lambda x: x[0], values), "data")

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P()))


def by_jdp(mesh: Mesh) -> Any:
    tx = jdp.all_reduce()

    def exchange(values: list[jax.Array]) -> Any:
        grads = [jdp.PerReplica(value, axes=("data",), mesh=mesh) for value in values]
        return tx.update(grads, tx.init(values))[0]

    return jax.jit(exchange)


def split(host: np.ndarray, mesh: Mesh) -> jax.Array:
    """A global array [N, ...] of which each process holds its own row."""
    sharding = NamedSharding(mesh, P("data"))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
