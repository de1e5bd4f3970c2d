"""ZeRO's stages as one table, a model with every kind of leaf, and the loop they must equal.

In: a stage, a mesh, a loss. Out: the state after some steps, which must be that of `train`, a plain
loop over microbatches on one device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from programs import collectives

import jdp

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
STAGES = {
    "0": lambda inner, **_: optax.chain(jdp.all_reduce(), inner),
    "1": jdp.zero1,
    "2 step": functools.partial(jdp.zero2, reduce="step"),
    "2": functools.partial(jdp.zero2, reduce="microbatch"),
    "3": jdp.zero3,
    "3 kept": functools.partial(jdp.zero3, regather=False),
}
CLIP = 0.5
INNER = optax.chain(optax.clip_by_global_norm(CLIP), optax.sgd(1.0, momentum=0.9))
_random = np.random.default_rng(0)
_normal = lambda *shape: (_random.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)  # noqa: E731
PARAMS = {  # what eight devices divide, what they do not, and scalars
    "up": {"kernel": _normal(16, 24), "bias": _normal(24)},
    "down": _normal(24, 8),
    "odd": _normal(10, 3),
    "three": _normal(3),
    "scale": np.float32(1.5),
}
BATCH = {
    "x": _normal(64, 16) * 8,
    "y": _normal(64, 8) * 8,
    # very unequal from replica to replica, and 0 for some of them
    "mask": (_random.uniform(size=64) < np.linspace(-0.3, 1.2, 64)).astype(np.float32),
}
BATCHES = [jax.tree.map(lambda a, i=i: np.roll(a, 8 * i, axis=0), BATCH) for i in range(3)]
KEY = 3


@functools.cache
def mesh_of(count=8, kind="auto", names=("data",), shape=None):
    types = (KINDS[kind],) * len(names)
    return jdp.make_mesh(names, shape, num_devices=None if shape else count, axis_types=types)


def losses(params, batch, key=None):
    """One loss for each row, of all parameters."""
    hidden = jnp.tanh(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"])
    if key is not None:  # dropout
        hidden *= jax.random.bernoulli(key, 0.7, hidden.shape)
    extra = jnp.tanh(batch["x"][:, :10] @ params["odd"]) @ params["three"]
    out = params["scale"] * (hidden @ params["down"]) + extra[:, None]
    return jnp.mean((out - batch["y"]) ** 2, axis=-1)


def plain(params, batch):
    return jnp.mean(losses(params, batch))


def masked(params, batch):
    return jdp.Mean(jnp.sum(losses(params, batch) * batch["mask"]), jnp.sum(batch["mask"]))


def rich(params, batch, key):
    """A masked loss with dropout, and metrics of both kinds."""
    each = losses(params, batch, key) * batch["mask"]
    loss = jdp.Mean(each.sum(), batch["mask"].sum())
    return loss, {"worst": each.max(), "square": jdp.Mean((each**2).sum(), batch["mask"].sum())}


def train(loss_fn, params, tx, batches, *, microbatch=None, key=None):
    """Parameters and the metrics of each step, of a plain loop over microbatches."""
    params = jax.tree.map(jnp.asarray, params)
    opt_state, metrics = tx.init(params), []
    for number, batch in enumerate(batches):
        rows = len(jax.tree.leaves(batch)[0])
        own = None if key is None else jax.random.fold_in(jax.random.key(key), number)
        parts = [
            _part(loss_fn, params, _rows(batch, i, microbatch or rows), own, j)
            for j, i in enumerate(range(0, rows, microbatch or rows))
        ]
        means, grads = jax.tree.map(lambda *x: sum(x), *parts)
        weight = means["loss"].weight
        grads = jax.tree.map(lambda g, weight=weight: g / weight, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        metrics.append({name: float(mean.value) for name, mean in means.items()})
    return params, metrics


def _rows(batch, start, size):
    return jax.tree.map(lambda x: x[start : start + size], batch)


@functools.partial(jax.jit, static_argnums=0)
def _part(loss_fn, params, rows, key, j):
    """Loss and metrics of one microbatch, each as a Mean, and the gradient of the total."""

    def total(params):
        given = () if key is None else (jax.random.fold_in(key, j),)
        out = loss_fn(params, rows, *given)
        loss, aux = out if isinstance(out, tuple) else (out, {})
        means = {"loss": loss} | aux
        share = getattr(loss, "weight", 1.0)  # of the microbatch; plain numbers count by it
        means = {
            name: mean if isinstance(mean, jdp.Mean) else jdp.Mean(share * mean, share)
            for name, mean in means.items()
        }
        return means["loss"].total, means

    (_, means), grads = jax.value_and_grad(total, has_aux=True)(params)
    return means, grads


def run(tx, loss_fn, mesh, batches, *, params=PARAMS, key=None, model_state=None, **options):
    """The state and the metrics after a step for each batch."""
    step = jdp.train_step(loss_fn, tx, mesh, **options)
    key = None if key is None else jax.random.key(key)
    state = jdp.init_state(params, tx, mesh, key=key, model_state=model_state)
    metrics = []
    for batch in batches:
        state, values = step(state, batch)
        metrics.append(values)
    return state, metrics


def assert_same_shards(tree):
    """What several devices hold a copy of has the same bits on each of them."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            continue
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        where = jax.tree_util.keystr(path)
        assert all(len(bits) == 1 for bits in copies.values()), f"{where} differs between devices"


def places(tree):
    """Shape, dtype and what lies on one device, of every leaf."""
    return [(x.shape, str(x.dtype), x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)]


def device_bytes(tree):
    """Bytes of a tree on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def compiled(tx, loss_fn, mesh, batch, *, params, key=None, **options):
    """The compiled step, and what it sends apart from scalars."""
    step = jdp.train_step(loss_fn, tx, mesh, **options)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    program = step.lower(jdp.init_state(shapes, tx, mesh), batch).compile()
    # loss and weight are not counted: at most four entries of float32
    return program, [c for c in collectives(program.as_text()) if c.bytes > 16]
