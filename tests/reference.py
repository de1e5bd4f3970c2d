"""The definition on one device: whole global batch, no sharding, a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp


def loss_value(loss_fn, params, batch, *args):
    """The loss of a batch on one device; a `Mean` divided, aux dropped."""
    out = loss_fn(params, batch, *args)
    loss = out[0] if isinstance(out, tuple) else out
    return loss.total / loss.weight if isinstance(loss, jdp.Mean) else loss


def gradient(loss_fn, params, batch, *args):
    """Loss and gradient over the whole batch."""
    return jax.value_and_grad(lambda p: loss_value(loss_fn, p, batch, *args))(params)


def train(loss_fn, params, tx, batches):
    """Parameters and losses of a plain loop."""
    opt_state, losses = tx.init(params), []
    for batch in batches:
        loss, grads = gradient(loss_fn, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return params, losses


def squares(params, batch):
    """The squared outputs of a linear model, one for each row."""
    return (batch["x"] @ params["w"]) ** 2


def plain(params, batch):
    return squares(params, batch).mean()


def masked(params, batch):
    return jdp.Mean((squares(params, batch) * batch["mask"]).sum(), batch["mask"].sum())


def mlp(key=0):
    """Parameters, a loss and a masked loss of a small two-layer network, and a batch of 64."""
    keys = jax.random.split(jax.random.key(key), 5)
    params = {
        "w1": jax.random.normal(keys[0], (16, 24)) / 4,
        "b1": jnp.zeros(24),
        "w2": jax.random.normal(keys[1], (24, 8)) / 5,
    }
    batch = {
        "x": jax.random.normal(keys[2], (64, 16)),
        "y": jax.random.normal(keys[3], (64, 8)),
        # very unequal from replica to replica, and 0 for some of them
        "mask": (jax.random.uniform(keys[4], (64,)) < jnp.linspace(-0.3, 1.2, 64)) * 1.0,
    }

    def losses(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
        return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2, axis=-1)

    def loss(params, batch):
        return jnp.mean(losses(params, batch))

    def masked(params, batch):
        return jdp.Mean(jnp.sum(losses(params, batch) * batch["mask"]), jnp.sum(batch["mask"]))

    return params, loss, masked, batch


def mean_gradient(grads):
    """The plain mean over the replica axis, which is by contract the gradient."""
    is_leaf = lambda x: isinstance(x, jdp.PerReplica)  # noqa: E731
    return jax.tree.map(lambda g: np.asarray(g.value, np.float64).mean(0), grads, is_leaf=is_leaf)


def assert_close(actual, expected, rtol=1e-6):
    """Compares trees leaf by leaf, relative to each leaf's largest entry."""
    paths = jax.tree_util.tree_flatten_with_path(expected)[0]
    for (path, want), got in zip(paths, jax.tree.leaves(actual), strict=True):
        want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
        assert got.shape == want.shape, (jax.tree_util.keystr(path), got.shape, want.shape)
        bound = rtol * max(np.abs(want).max(initial=0), 1e-30)
        error = np.abs(got - want).max(initial=0)
        assert error <= bound, f"{jax.tree_util.keystr(path)} is off by {error:.3g} > {bound:.3g}"


def assert_same_copies(tree):
    """Every device's copy of what claims to be replicated has the same bits."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
            copies = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
            assert len(set(copies)) == 1, f"{jax.tree_util.keystr(path)} differs between devices"
