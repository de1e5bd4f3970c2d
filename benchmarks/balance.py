"""Trains on two processes of unequal speed: equal shares, balanced ones, and a change of roles.

    python benchmarks/balance.py                   # starts both processes itself
    python benchmarks/balance.py --slowdown 2 --json balance.json

    equal       each process takes half of the microbatches, and the fast one waits
    balanced    jdp.balance of the measured seconds a microbatch
    swapped     the other process is slow from now on, and nobody has noticed yet
    followed    after six measurements, jdp.rebalance has

A microbatch sleeps, longer on the slow process: other load on the machine then disturbs little.
Each arm is compared with the harmonic optimum, M / sum(1 / t_i), of the times measured just then.
"""

import dataclasses
import statistics
import time
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

ROWS = 4  # examples per microbatch
ROUNDS_TO_FOLLOW = 6  # halves the old average each time: 1 / 64 of it is left


@dataclasses.dataclass(frozen=True)
class Config:
    """Times a training step with shares, one process being slower than the other."""

    microbatches: int = 24  # of a global batch
    milliseconds: float = 40.0  # that the fast process sleeps in each
    slowdown: float = 3.0  # how many times as long the slow one does
    steps: int = 8
    quick: bool = False  # few short steps, to see that it runs
    json: Path | None = None  # where to write the results


def main(config: Config) -> None:
    if config.quick:
        config = dataclasses.replace(config, microbatches=8, milliseconds=1.0, steps=2)
    launch(work, config, 2)


def work(config: Config, coordinator: str, index: int) -> None:
    """What each process does."""
    jdp.emulate_devices(1)
    jdp.initialize(coordinator, num_processes=2, process_id=index)
    rows = Run(config).compare()
    if index == 0:
        goals = [
            Goal(f"{row['arm']} / optimum", row["/ optimum"], 1 / 0.9)  # within 10 % of throughput
            for row in rows
            if row["arm"] in ("balanced", "followed")
        ]
        measure.report("balance", dataclasses.asdict(config), rows, goals, config.json)


class Run:
    """One process's side of the run; both make the same calls in the same order."""

    def __init__(self, config: Config) -> None:
        self.config, self.me, self.slow = config, jax.process_index(), 1
        self.mesh = jdp.make_mesh()
        tx = optax.chain(jdp.all_reduce(), optax.sgd(0.01))
        self.step = jdp.train_step(self.loss, tx, self.mesh, microbatch=ROWS)
        params = {"w": np.ones((64, 64), np.float32)}
        self.state = jdp.init_state(params, tx, self.mesh)
        self.local = jax.jit(jax.value_and_grad(self.loss))
        self.params = params

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """A small product, and the sleep that stands for a large one."""
        slept = jax.pure_callback(self.sleep, jax.ShapeDtypeStruct((), jnp.float32), batch[0, 0])
        return jnp.mean(jnp.tanh(batch @ params["w"]) ** 2) + slept

    def sleep(self, _: Any) -> np.ndarray:
        """What a microbatch costs on this process."""
        longer = self.config.slowdown if self.me == self.slow else 1.0
        time.sleep(self.config.milliseconds / 1e3 * longer)
        return np.zeros((), np.float32)

    def measured(self) -> np.ndarray:
        """Seconds a microbatch of both processes; each times its own, without the other."""
        batch, seconds = np.ones((ROWS, 64), np.float32), []
        for _ in range(6):
            start = time.perf_counter()
            jax.block_until_ready(self.local(self.params, batch))
            seconds.append(time.perf_counter() - start)
        return jdp.exchange_times(statistics.median(seconds[1:]), self.mesh)

    def times(self, shares: np.ndarray) -> list[float]:
        """Seconds of each step with these shares, but for the first, which may compile."""
        mine = np.random.default_rng(self.me).normal(size=(shares[self.me] * ROWS, 64))
        batches = [mine.astype(np.float32)] * (self.config.steps + 1)
        seconds = []
        for batch in jdp.feed(batches, self.mesh, microbatch=ROWS, shares=shares.tolist()):
            start = time.perf_counter()
            self.state, metrics = self.step(self.state, batch, shares=shares)
            if not np.isfinite(float(metrics["loss"])):
                raise SystemExit("The loss is not finite: shares and batches do not fit.")
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    def compare(self) -> list[dict[str, Any]]:
        """The rows of the table."""
        count = self.config.microbatches
        equal = jdp.balance([1.0, 1.0], count)
        rows = [self.row("equal", equal)]
        state = jdp.rebalance(None, self.measured(), count)
        rows.append(self.row("balanced", state.shares))
        self.slow = 0
        rows.append(self.row("swapped", state.shares))
        for _ in range(ROUNDS_TO_FOLLOW):
            state = jdp.rebalance(state, self.measured(), count)
        rows.append(self.row("followed", state.shares))
        return rows

    def row(self, arm: str, shares: np.ndarray) -> dict[str, Any]:
        """Steps with these shares, beside the optimum for how fast the processes are just now."""
        seconds = statistics.median(self.times(shares))
        each = self.measured()
        optimum = self.config.microbatches / (1 / each).sum()
        return {
            "arm": arm,
            "shares": " + ".join(map(str, shares)),
            "microbatch_ms": " / ".join(f"{1e3 * t:.1f}" for t in each),
            "step_ms": 1e3 * seconds,
            "optimum_ms": 1e3 * optimum,
            "/ optimum": seconds / optimum,
            "throughput": optimum / seconds,
        }


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
