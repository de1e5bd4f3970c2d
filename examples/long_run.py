"""A run that survives: it saves, stops when it is asked to, and goes on from where it was.

    python examples/long_run.py                              # the same again goes on
    jdp launch -n 2 --devices 4 --max-restarts 3 examples/long_run.py

Kill it at any time, in any way, and start it again, with another number of processes or devices if
you like. Its parameters end as if nothing had happened (to the bit on the same devices), each
example has been seen once an epoch, and out/long_run/log.jsonl has each step once. On SIGTERM it
saves and ends with code 85: start me again.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import jdp


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run is made of."""

    steps: int = 2000
    save_every: int = 100
    out: Path = Path("out/long_run")
    devices: int | None = 8  # emulated, where there is no GPU or TPU; None: as `jdp launch` says


def two_spirals(count: int = 4096) -> dict[str, np.ndarray]:
    """Points of two spirals that are wound around each other, and whose spiral each is of."""
    random = np.random.default_rng(0)
    label = random.integers(0, 2, count)
    angle = 3 * np.pi * np.sqrt(random.random(count))
    turn = angle + np.pi * label
    x = np.stack([angle * np.cos(turn), angle * np.sin(turn)], 1) / 10
    return {"x": x.astype(np.float32), "label": label.astype(np.float32)}


def loss_fn(params: Any, batch: dict[str, jax.Array]) -> jdp.Mean:
    """How far a perceptron with two hidden layers is from telling the spirals apart."""
    hidden = batch["x"]
    for w, b in params[:-1]:
        hidden = jnp.tanh(hidden @ w + b)
    w, b = params[-1]
    losses = optax.sigmoid_binary_cross_entropy((hidden @ w + b)[:, 0], batch["label"])
    return jdp.Mean.of(losses, batch["weight"])


def initial() -> list[tuple[np.ndarray, np.ndarray]]:
    """Parameters to begin with."""
    random = np.random.default_rng(0)
    layer = lambda n, m: (random.normal(0, 1.5 / n**0.5, (n, m)), np.zeros(m))  # noqa: E731
    return jax.tree.map(np.float32, [layer(2, 64), layer(64, 64), layer(64, 1)])


def main(config: Config) -> int:
    """Trains, from the last checkpoint on if there is one; returns the exit code."""
    if config.devices is not None:
        jdp.emulate_devices(config.devices)
    jdp.initialize()
    mesh, tx = jdp.make_mesh(), jdp.zero1(optax.adam(3e-3))
    step = jdp.train_step(loss_fn, tx, mesh)
    state = jdp.init_state(initial(), tx, mesh)
    batches = jdp.Batches(jdp.Columns(two_spirals()), mesh, batch=64, seed=0)
    log = jdp.JsonLines(config.out / "log.jsonl")
    folder = config.out / "checkpoints"
    with jdp.Stop() as stop, jdp.Checkpoints(folder, every_steps=config.save_every) as checkpoints:
        state = checkpoints.resume(state, batches)
        state = jdp.run(
            step,
            state,
            batches,
            steps=config.steps,
            checkpoints=checkpoints,
            log=[log],
            stop=stop,
        )
    if stop.reason:
        print(f"stopped after step {int(state.step)}: {stop.reason}", file=sys.stderr)
    return stop.code if stop.reason else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config)))
