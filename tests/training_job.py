"""A small training run that one process or several can do, each on its part of the data."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from reference import assert_same_copies, mlp

import jdp

BATCHES = ((0, 32), (32, 64), (8, 32))  # rows of three global batches; the last is ragged


def loss_fn(params, batch, key):
    """Masked, with dropout, and exact for padded rows."""
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    hidden *= 2.0 * jax.random.bernoulli(key, 0.5, hidden.shape)
    losses = jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2, axis=-1)
    weight = batch["mask"] * batch["weight"]
    return jdp.Mean(jnp.sum(losses * weight), jnp.sum(weight)), {
        "real": jdp.Mean(batch["weight"].sum(), batch["weight"].size)
    }


def part(process, processes=2):
    """Process p's part of each global batch."""
    for start, stop in BATCHES:
        share = (stop - start) // processes
        mine = slice(start + process * share, start + (process + 1) * share)
        yield {name: np.asarray(x)[mine] for name, x in mlp()[3].items()}


def whole():
    """The global batches as two processes make them: each pads its own part."""
    for first, second in zip(part(0), part(1), strict=True):
        batch = {}
        for name in first:
            sides = [
                np.concatenate([x, np.zeros_like(x)])[:16] for x in (first[name], second[name])
            ]
            batch[name] = np.concatenate(sides)
        ones = np.ones(len(first["x"]), np.float32)
        batch["weight"] = np.tile(np.concatenate([ones, 0 * ones])[:16], 2)
        yield batch


def train(batches):
    """Three steps in windows of two, the last flushed. Returns the state and the losses."""
    mesh = jdp.make_mesh()
    tx = jdp.multi_steps(optax.chain(jdp.all_reduce(), optax.sgd(1.0, momentum=0.9)), every=2)
    state = jdp.init_state(mlp()[0], tx, mesh, key=jax.random.key(5))
    step = jdp.train_step(loss_fn, tx, mesh, microbatch=2)
    losses = []
    for batch in jdp.feed(batches, mesh, microbatch=2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))  # readable on every process
    state = jdp.flush(state, tx)
    assert_same_copies(state.params)
    return state, losses
