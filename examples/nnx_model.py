"""A training step with Flax NNX and nnx.Optimizer, made data-parallel by changing two lines.

    python examples/nnx_model.py

    -    tx = optax.sgd(0.1, momentum=0.9)
    +    tx = optax.chain(jdp.all_reduce(), optax.sgd(0.1, momentum=0.9))
    -    value_and_grad = nnx.value_and_grad(loss_fn)
    +    value_and_grad = jdp.value_and_grad(loss_fn, jdp.make_mesh())

The loss goes on taking a module, which is a pytree. (jax.jit with split and merge around it costs
far less per call than nnx.jit.) Trains both, on one device and on eight emulated ones: the loss
falls from 1.3 to below 0.02, no parameter differs by more than 1e-6. Takes 10 seconds.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

import jdp


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run is made of."""

    steps: int = 100
    batch: int = 64


class MLP(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner, self.outer = nnx.Linear(2, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, 2]` to `[batch]`."""
        return self.outer(nnx.tanh(self.inner(x)))[:, 0]


def examples(config: Config) -> Iterator[dict[str, np.ndarray]]:
    """Points of the plane, and the wave over them that is to be learnt."""
    random = np.random.default_rng(0)
    for _ in range(config.steps):
        x = random.uniform(-1, 1, (config.batch, 2)).astype(np.float32)
        yield {"x": x, "y": np.sin(3 * x[:, 0]) + x[:, 1]}


def loss_fn(model: MLP, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def train(config: Config, *, data_parallel: bool) -> tuple[MLP, list[float]]:
    """The same training either way; returns the trained model and the loss of each step."""
    if data_parallel:
        tx = optax.chain(jdp.all_reduce(), optax.sgd(0.1, momentum=0.9))
        value_and_grad = jdp.value_and_grad(loss_fn, jdp.make_mesh())
    else:
        tx = optax.sgd(0.1, momentum=0.9)
        value_and_grad = nnx.value_and_grad(loss_fn)

    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    @jax.jit
    def step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        loss, grads = value_and_grad(model, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    losses = []
    for batch in examples(config):
        state, loss = step(state, batch)
        losses.append(float(loss))  # waits for the step; train_gpt.py reads one step late
    return nnx.merge(graph, state)[0], losses


def main(config: Config) -> dict[str, float]:
    """Trains both ways and compares."""
    jdp.emulate_devices(8)
    one, losses = train(config, data_parallel=False)
    many, same = train(config, data_parallel=True)
    furthest = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(abs(a - b).max()), one, many)))
    print(f"one device:    loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print(f"data-parallel: loss {same[0]:.4f} to {same[-1]:.4f}")
    print(f"largest difference of a parameter: {furthest:.1e}")
    return {"first": same[0], "last": same[-1], "furthest": furthest}


if __name__ == "__main__":
    main(tyro.cli(Config))
