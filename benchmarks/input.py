"""What jdp.Batches costs: examples a second against loaders written by hand, arms taking turns.

    python benchmarks/input.py [--rounds 5]

A memory-mapped file of 16-bit tokens, windows of 256, global batches of 256 on 8 emulated devices.
Arms read the same number of batches, each in its own order:

    by hand      a NumPy permutation, np.stack, jax.device_put; no thread, no checks
    Grain        MapDataset.shuffle.batch through jdp.feed
    Batches      as it comes (a thread that reads ahead)
    threads=2    the same, batches read by two threads
    workers=2    the same, by two processes

CPU time is this process's, without the workers'; it is the figure to compare when others use the
machine. Then the order alone (CPU µs a batch, for datasets of 10^4 to 10^12 examples), and `pace`
of a loop whose transform sleeps: known truth for the share of time that it is said to wait.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Generator
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdp

LENGTH, BATCH, STEPS = 256, 256, 40


def by_hand(source: jdp.TokenFile, mesh: jax.sharding.Mesh) -> Generator[Any, None, None]:
    order = np.random.default_rng(0).permutation(len(source))
    sharding = NamedSharding(mesh, P("data"))
    for start in range(0, len(order), BATCH):
        rows = np.stack([source[i]["tokens"] for i in order[start : start + BATCH]])
        yield jax.device_put({"tokens": rows}, sharding)


def through_grain(source: jdp.TokenFile, mesh: jax.sharding.Mesh) -> Generator[Any, None, None]:
    loader = grain.MapDataset.source(source).shuffle(seed=0).batch(BATCH)
    return jdp.feed(loader, mesh)


def speed(batches: Generator[Any, None, None]) -> tuple[float, float]:
    """Examples a second, and this process's CPU µs an example, without the first batch."""
    jax.block_until_ready(next(batches))
    start, spent = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        jax.block_until_ready(next(batches))
    number, spent = STEPS * BATCH, time.process_time() - spent
    return number / (time.perf_counter() - start), spent / number * 1e6


def compare(source: jdp.TokenFile, mesh: jax.sharding.Mesh, rounds: int) -> None:
    def ours(**how: Any) -> Callable[[], Generator[Any, None, None]]:
        return lambda: jdp.Batches(source, mesh, batch=BATCH, seed=0, **how).one_epoch()

    arms: dict[str, Callable[[], Generator[Any, None, None]]] = {
        "by hand": lambda: by_hand(source, mesh),
        "Grain": lambda: through_grain(source, mesh),
        "Batches": ours(),
        "threads=2": ours(threads=2),
        "workers=2": ours(workers=2),
    }
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, make in arms.items():
            batches = make()
            seen[name].append(speed(batches))
            batches.close()
    for name, found in seen.items():
        speeds, spent = zip(*found, strict=True)
        print(
            f"{name:10} {statistics.median(speeds):9.0f} examples/s ({min(speeds):.0f} to "
            f"{max(speeds):.0f}), {statistics.median(spent):5.1f} µs of CPU an example"
        )


def order() -> None:
    for exponent in (4, 6, 9, 12):
        start = time.process_time()
        for step in range(200):
            jdp.shuffled(np.arange(BATCH) + step, 10**exponent, seed=0, epoch=0)
        print(f"order of 10^{exponent}: {(time.process_time() - start) / 200 * 1e6:.0f} µs a batch")


def waiting(mesh: jax.sharding.Mesh) -> None:
    """Loads that take 20 ms against steps of 5 and of 40: three quarters waited, and nothing."""
    source = [{"x": np.float32(i)} for i in range(8)]

    def slow(example: Any) -> Any:
        time.sleep(0.02 / len(source))
        return example

    for step_seconds in (0.005, 0.04):
        batches = jdp.Batches(source, mesh, batch=8, seed=0, epochs=60, transform=slow)
        for _ in batches:
            time.sleep(step_seconds)
        pace = batches.pace
        print(
            f"steps of {step_seconds * 1e3:.0f} ms, loads of 20 ms and the clock's rest: waited "
            f"{pace.waiting:.0%}, loader {pace.examples_per_second:.0f} examples/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    jdp.emulate_devices(8)
    mesh = jdp.make_mesh()
    warnings.simplefilter("ignore", RuntimeWarning)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "tokens.bin")
        ids = np.random.default_rng(0).integers(0, 2**16, LENGTH * BATCH * (STEPS + 4) + 1)
        ids.astype(np.uint16).tofile(path)
        compare(jdp.TokenFile(path, LENGTH), mesh, rounds)
    order()
    waiting(mesh)


if __name__ == "__main__":
    main()
