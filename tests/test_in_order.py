"""The same bits on any number of devices, and what stands in the way of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sharded
from jax.sharding import AxisType
from programs import collectives, sent_bytes
from reference import assert_close

import jdp
from jdp import tree

pytestmark = pytest.mark.either

_random = np.random.default_rng(8)
_normal = lambda *shape: (_random.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)  # noqa: E731
WIDTH, ROWS = 32, 48
MLP = {"in": _normal(WIDTH, 64), "out": _normal(64, WIDTH), "bias": _normal(13)}
ATTENTION = {name: _normal(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
BATCH = {"x": _normal(ROWS, 6, WIDTH) * 7, "mask": np.arange(ROWS) % 5 != 1}
INNER = optax.sgd(0.5)
ARMS = {
    "all_reduce": optax.chain(jdp.all_reduce(), INNER),
    "in order": optax.chain(jdp.all_reduce_in_order(), INNER),
    "adam": optax.chain(jdp.all_reduce_in_order(), optax.adam(0.01)),
    "zero2": jdp.zero2(INNER, reduce="in order", min_size=0),
}


def mean(errors, batch, weighted):
    each = jnp.mean(errors**2, axis=(1, 2))
    mask = batch["mask"].astype(jnp.float32)
    return jdp.Mean(jnp.sum(each * mask), jnp.sum(mask)) if weighted else jnp.mean(each)


def mlp(params, batch, weighted=False):
    x = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
    return mean(x.at[..., :13].add(params["bias"]) - batch["x"], batch, weighted)


def by_reciprocals(x):
    e = jnp.exp(x - jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True)))
    return e * (1 / jnp.sum(e, axis=-1, keepdims=True))


def attention(params, batch, softmax=jax.nn.softmax):
    x = batch["x"]
    heads = lambda w: (x @ w).reshape(*x.shape[:2], 4, 8).swapaxes(1, 2)  # noqa: E731
    q, k, v = (heads(params[name]) for name in "qkv")
    y = softmax(q @ k.swapaxes(-1, -2) / 8**0.5) @ v
    return mean(y.swapaxes(1, 2).reshape(x.shape) @ params["out"] - x, batch, False)


LOSSES = {
    "mlp": (mlp, MLP),
    "weighted": (functools.partial(mlp, weighted=True), MLP),
    "attention": (attention, ATTENTION),
    "reciprocals": (functools.partial(attention, softmax=by_reciprocals), ATTENTION),
}


@functools.cache
def bits(arm, name, count, microbatch, kind=AxisType.Auto):
    """Parameters and losses of three steps."""
    loss_fn, params = LOSSES[name]
    mesh = jdp.make_mesh(num_devices=count, axis_types=kind)
    state, metrics = sharded.run(
        ARMS[arm], loss_fn, mesh, [BATCH] * 3, params=params, microbatch=microbatch
    )
    arrays = [*jax.tree.leaves(jdp.logical(state.params)), *(m["loss"] for m in metrics)]
    return [np.asarray(x).tobytes() for x in arrays]


@pytest.mark.filterwarnings("ignore:jdp.zero2 over a single device")
@pytest.mark.parametrize(
    ("arm", "name", "counts", "microbatch"),
    [
        ("in order", "mlp", (1, 2, 4, 8), 3),  # 16 microbatches
        ("in order", "weighted", (1, 2, 8), 1),  # 48, of which 3 are added up one by one
        ("adam", "mlp", (2, 8), 6),  # eight devices have one each
        ("in order", "attention", (2, 4, 8), 3),
        ("in order", "reciprocals", (1, 2, 8), 3),
        ("zero2", "mlp", (1, 4, 8), 3),
    ],
)
def test_the_same_bits_on_any_number_of_devices(arm, name, counts, microbatch):
    first, *others = [bits(arm, name, count, microbatch) for count in counts]
    assert all(other == first for other in others)


def test_explicit_axes():
    assert bits("in order", "mlp", 8, 3, AxisType.Explicit) == bits("in order", "mlp", 8, 3)


def test_the_control_case_differs():
    assert bits("all_reduce", "mlp", 2, 3) != bits("all_reduce", "mlp", 8, 3)


def test_on_one_device_an_optimizer_may_round_otherwise():
    """Adam's moments, from gradients of the same bits; if this fails, it has become better."""
    assert bits("adam", "mlp", 1, 3) != bits("adam", "mlp", 2, 3)


def test_on_one_device_the_gradient_of_softmax_is_another():
    """XLA multiplies by reciprocals there; if this fails, it has become better: say so."""
    assert bits("in order", "attention", 1, 3) != bits("in order", "attention", 2, 3)


@pytest.mark.parametrize("arm", ["in order", "zero2"])
@pytest.mark.parametrize("name", ["mlp", "weighted"])
def test_the_steps_are_those_of_one_device(arm, name):
    loss_fn, params = LOSSES[name]
    mesh = jdp.make_mesh()
    state, _ = sharded.run(ARMS[arm], loss_fn, mesh, [BATCH] * 3, params=params, microbatch=2)
    want, _ = sharded.train(loss_fn, params, INNER, [BATCH] * 3)
    assert_close(jdp.logical(state.params), want, 1e-5)


@pytest.mark.parametrize(("arm", "most"), [("in order", 1.01), ("zero2", 1.05)])
def test_what_is_sent(arm, most):
    """What an all-reduce sends, after the loop over microbatches (zero2 pads a little)."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), MLP)
    step = jdp.train_step(mlp, ARMS[arm], jdp.make_mesh(), microbatch=3)
    compiled = step.lower(jdp.init_state(shapes, ARMS[arm], jdp.make_mesh()), BATCH).compile()
    sent = [c for c in collectives(compiled.as_text()) if c.bytes > 64]
    kinds = {c.kind for c in sent}
    assert kinds == {"collective-permute", "all-gather"}
    assert not any(c.in_loop for c in sent)
    permuted = sum(c.bytes for c in sent if c.kind == "collective-permute")
    gathered = sent_bytes([c for c in sent if c.kind == "all-gather"], 8)
    total = sharded.nbytes(MLP)
    assert permuted + gathered == pytest.approx(2 * 7 / 8 * total, rel=most - 1)


@pytest.mark.parametrize("axes", [("data",), ("node", "device")])
def test_sums_between_devices_are_those_of_the_tree(axes):
    mesh = jdp.make_mesh(axes, (8,) if len(axes) == 1 else (2, 4))
    x = (_random.normal(size=(8, 24, 5)) * 10.0 ** _random.integers(-6, 6, (8, 24, 5))).astype("f4")
    want = x
    while len(want) > 1:
        want = want[::2] + want[1::2]
    spec = jax.sharding.PartitionSpec

    def on_each(fn, out):
        run = jax.shard_map(lambda x: fn(x[0]), mesh=mesh, in_specs=spec(axes), out_specs=out)
        return np.asarray(jax.jit(run)(x))

    assert not np.array_equal(want[0], np.sum(x, axis=0))  # order matters
    np.testing.assert_array_equal(on_each(lambda x: tree.all_sum(x, axes), spec()), want[0])
    for dim, out in enumerate((spec(axes), spec(None, axes))):
        rows = x[:, :, :1].repeat(8, 2) if dim else x
        run = jax.shard_map(
            lambda x, dim=dim: tree.scatter_sum(x[0], axes, dim=dim),
            mesh=mesh,
            in_specs=spec(axes),
            out_specs=out,
        )
        whole = want[0][:, :1].repeat(8, 1) if dim else want[0]
        np.testing.assert_array_equal(np.asarray(jax.jit(run)(rows)), whole)


def test_bad_input():
    mesh = jdp.make_mesh(num_devices=6)
    state = jdp.init_state(MLP, ARMS["in order"], mesh)
    with pytest.raises(ValueError, match=r"needs a power of two of devices along .*there are 6"):
        jdp.train_step(mlp, ARMS["in order"], mesh, microbatch=1)(state, BATCH)
    _, grads = jdp.value_and_grad(mlp, mesh)(MLP, BATCH)
    with pytest.raises(ValueError, match=r"all_reduce_in_order was given gradients that are not"):
        ARMS["in order"].update(grads, state.opt_state, state.params)
