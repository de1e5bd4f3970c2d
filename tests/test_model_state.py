"""Mutable model state: BatchNorm's statistics are the global batch's, or the step is refused."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from reference import assert_close, assert_same_copies, mean_gradient

import jdp

ROWS = 32
# replica i's rows are shifted by i, as when each replica reads another shard
X = np.random.default_rng(3).normal(size=(ROWS, 3)).astype(np.float32)
X += np.repeat(np.arange(8), 4)[:, None].astype(np.float32)
BATCH = {"x": X, "y": X[:, 0] ** 2}
W = {"w": jnp.arange(1.0, 4.0) / 3}


class Net(nn.Module):
    """Dense, BatchNorm, Dense; or BatchNorm of the raw input first."""

    axis_name: Any = "data"
    on_input: bool = False

    @nn.compact
    def __call__(self, x, train=True):
        axis_name = self.axis_name if train else None
        norm = nn.BatchNorm(use_running_average=not train, axis_name=axis_name, momentum=0.9)
        x = norm(x) if self.on_input else norm(nn.Dense(4)(x))
        return nn.Dense(1)(jnp.tanh(x))[..., 0]


@functools.cache
def variables(on_input=False):
    both = Net(None, on_input).init(jax.random.key(0), X)
    return both["params"], {"batch_stats": both["batch_stats"]}


def linen_loss(axis_name: Any = "data", on_input: Any = False, weighted: Any = False):
    def loss_fn(params, batch, model_state):
        net = Net(axis_name, on_input)
        y, state = net.apply({"params": params, **model_state}, batch["x"], mutable="batch_stats")
        losses = (y - batch["y"]) ** 2
        return jdp.Mean(losses.sum(), len(y)) if weighted else losses.mean(), None, state

    return loss_fn


def take(rows):
    return jax.tree.map(lambda x: x[rows], BATCH)


def by_hand(loss_fn, params, state, groups):
    """The definition: each round of microbatches is one batch that is normalised together."""

    def loss(params):
        total, now = 0.0, state
        for rows in groups:
            now = jax.tree.map(lambda x: x, now)  # flax.nnx updates only what this trace made
            mean, _, now = loss_fn(params, take(rows), model_state=now)
            mean = mean.total / mean.weight if isinstance(mean, jdp.Mean) else mean
            total += mean * len(rows) / ROWS
        return total, now

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def rounds(num_devices, microbatch):
    """Rows that are worked on at the same time: each replica's k-th microbatch."""
    rows = np.arange(ROWS).reshape(num_devices, -1, microbatch)
    return [rows[:, k].ravel() for k in range(rows.shape[1])]


@pytest.fixture(scope="module")
def mesh():
    return jdp.make_mesh()


CASES = [
    (1, None, AxisType.Auto, {}),
    (8, None, AxisType.Auto, {}),
    (8, None, AxisType.Explicit, {"weighted": True}),
    (4, 4, AxisType.Auto, {"weighted": True}),
    (4, 2, AxisType.Auto, {}),
    (8, None, AxisType.Auto, {"on_input": True}),
    (8, 2, AxisType.Auto, {"on_input": True, "weighted": True}),
]


@pytest.mark.parametrize(("num_devices", "microbatch", "axis_type", "kind"), CASES)
def test_a11_linen_batchnorm_is_that_of_the_global_batch(num_devices, microbatch, axis_type, kind):
    mesh = jdp.make_mesh(num_devices=num_devices, axis_types=(axis_type,))
    params, state = variables(kind.get("on_input", False))
    fn = jdp.value_and_grad(linen_loss(**kind), mesh, microbatch=microbatch)
    (loss, aux, new), grads = fn(params, BATCH, model_state=state)
    groups = rounds(num_devices, microbatch or ROWS // num_devices)
    want, gradient = by_hand(linen_loss(axis_name=None, **kind), params, state, groups)
    assert aux is None
    assert_close((loss, new), want, rtol=3e-6)
    # a bias before a BatchNorm has no gradient but rounding: compare with the largest leaf
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient))
    for got, g in zip(
        jax.tree.leaves(mean_gradient(grads)), jax.tree.leaves(gradient), strict=True
    ):
        np.testing.assert_allclose(got, g, rtol=0, atol=3e-6 * largest)
    assert_same_copies(new)


def test_a11_running_variance_has_the_variance_between_replicas(mesh):
    params, state = variables(on_input=True)
    fn = jdp.value_and_grad(linen_loss(on_input=True, weighted=True), mesh)
    (_, _, new), _ = fn(params, BATCH, model_state=state)
    norm = new["batch_stats"]["BatchNorm_0"]
    assert_close(norm["mean"], 0.1 * X.mean(0), rtol=2e-6)
    assert_close(norm["var"], 0.9 + 0.1 * X.var(0), rtol=2e-6)
    # averaging the replicas' own variances would give a third of it
    assert (X.reshape(8, 4, 3).var(1).mean(0) < X.var(0) / 3).all()


def test_a11_batchnorm_without_axis_is_refused_and_the_leaf_named(mesh):
    params, state = variables()
    cases: list[dict[str, Any]] = [{}, {"microbatch": 2}, {"remat": True}]
    for options in cases:
        fn = jdp.value_and_grad(linen_loss(axis_name=None), mesh, **options)
        with pytest.raises(
            ValueError,
            match=r"model_state\['batch_stats'\]\['BatchNorm_0'\]\['mean'\] differs by replica.*"
            r"BatchNorm\(axis_name='data'\)",
        ):
            jax.eval_shape(lambda p, s, fn=fn: fn(p, BATCH, model_state=s), params, state)


def test_a11_batchnorm_over_one_of_two_data_axes_is_refused():
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    params, state = variables()
    fn = jdp.value_and_grad(linen_loss(axis_name="device"), mesh)
    with pytest.raises(ValueError, match=r"differs by replica.*axis_name='node'"):
        jax.eval_shape(lambda p, s: fn(p, BATCH, model_state=s), params, state)


def test_a11_batchnorm_over_two_data_axes():
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    params, state = variables()
    fn = jdp.value_and_grad(linen_loss(axis_name=("node", "device")), mesh)
    (loss, _, new), _ = fn(params, BATCH, model_state=state)
    want, _ = by_hand(linen_loss(axis_name=None), params, state, [np.arange(ROWS)])
    assert_close((loss, new), want, rtol=3e-6)


def test_a11_evaluation_needs_no_axis_and_normalises_by_the_running_statistics(mesh):
    params, state = variables()

    def metric_fn(params, batch, model_state):
        y = Net(None).apply({"params": params, **model_state}, batch["x"], train=False)
        return jdp.Mean(((y - batch["y"]) ** 2).sum(), len(y))

    metric = jdp.eval_step(metric_fn, mesh, microbatch=2)(params, BATCH, model_state=state)
    assert_close(metric.value, metric_fn(params, BATCH, state).value)


def test_a11_evaluation_without_state_change_works_inside_a_loss_too(mesh):
    params, state = variables()

    def loss_fn(params, batch):  # fine-tuning with frozen statistics
        y = Net(None).apply({"params": params, **state}, batch["x"], train=False)
        return ((y - batch["y"]) ** 2).mean()

    loss, grads = jdp.value_and_grad(loss_fn, mesh)(params, BATCH)
    assert_close((loss, mean_gradient(grads)), jax.value_and_grad(loss_fn)(params, BATCH), 2e-6)


class NnxNet(nnx.Module):
    def __init__(self, axis_name, rngs):
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, axis_name=axis_name, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.norm(self.dense(x))).sum(-1)


@pytest.mark.parametrize("microbatch", [None, 2])
def test_a11_nnx_batchnorm_is_that_of_the_global_batch(mesh, microbatch):
    def build(axis_name):
        graph, params, stats = nnx.split(NnxNet(axis_name, nnx.Rngs(0)), nnx.Param, ...)

        def loss_fn(params, batch, model_state):
            net = nnx.merge(graph, params, model_state)
            net.train()
            loss = ((net(batch["x"]) - batch["y"]) ** 2).mean()
            return loss, None, nnx.state(net, nnx.Not(nnx.Param))

        return loss_fn, params, stats

    loss_fn, params, stats = build("data")
    fn = jdp.value_and_grad(loss_fn, mesh, microbatch=microbatch)
    (loss, _, new), _ = fn(params, BATCH, model_state=stats)
    reference, *_ = build(None)
    want, _ = by_hand(reference, params, stats, rounds(8, microbatch or 4))
    assert_close((loss, new), want, rtol=3e-6)

    fn = jdp.value_and_grad(reference, mesh, microbatch=microbatch)
    with pytest.raises(ValueError, match=r"model_state.*norm.*mean.* differs by replica"):
        jax.eval_shape(lambda p, s: fn(p, BATCH, model_state=s), params, stats)


# --- state that is not BatchNorm's


def plain(params, batch):
    return ((batch["x"] @ params["w"]) ** 2).mean()


def changed(change, state, **options):
    """Traces a loss whose state changes like this; returns the shapes of the new state."""

    def loss_fn(params, batch, model_state):
        return plain(params, batch), None, change(model_state, params, batch)

    fn = jdp.value_and_grad(loss_fn, jdp.make_mesh(), **options)
    return fn, jax.eval_shape(lambda p, s: fn(p, BATCH, model_state=s), W, state)[0][2]


def test_state_passes_through_every_microbatch_in_turn(mesh):
    def loss_fn(params, batch, model_state):
        mean = jax.lax.pmean(batch["x"].mean(), "data")
        new = {
            "calls": model_state["calls"] + 1,
            "last": mean,
            "key": jax.random.split(model_state["key"])[0],
            "small": model_state["small"],
        }
        return jdp.Mean(plain(params, batch), 1), {"calls": model_state["calls"]}, new

    state = {
        "calls": jnp.int32(5),
        "last": jnp.zeros(()),
        "key": jax.random.key(0),
        "small": np.ones(3, np.int8),
    }
    fn = jdp.value_and_grad(loss_fn, mesh, microbatch=1)
    (_, aux, new), _ = fn(W, BATCH, model_state=state)
    assert int(new["calls"]) == 9  # four microbatches on each replica, not thirty-two
    assert float(aux["calls"]) == 6.5  # 5, 6, 7, 8
    assert_close(new["last"], X.reshape(8, 4, 3)[:, -1].mean())
    key = state["key"]
    for _ in range(4):
        key = jax.random.split(key)[0]
    assert (jax.random.key_data(new["key"]) == jax.random.key_data(key)).all()
    assert new["small"].dtype == jnp.int8
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_an_average_of_the_parameters_counts_as_differing_until_it_is_synchronised(mesh):
    state = {"ema": {"w": jnp.zeros(3)}}

    def ema(state, params, batch):
        return {"ema": {"w": 0.9 * state["ema"]["w"] + 0.1 * params["w"]}}

    with pytest.raises(ValueError, match=r"model_state\['ema'\]\['w'\] differs by replica"):
        changed(ema, state)
    fn, _ = changed(lambda *args: jax.lax.pmean(ema(*args), "data"), state)
    (_, _, new), _ = fn(W, BATCH, model_state=state)
    assert_close(new["ema"]["w"], 0.1 * W["w"])


S = {"n": jnp.zeros(2)}
WRONG = {
    "lost": (lambda s, p, b: {}, r"returned PyTreeDef.*same structure"),
    "more": (lambda s, p, b: {**s, "m": s["n"]}, r"returned PyTreeDef.*same structure"),
    "nothing": (lambda s, p, b: None, r"returned PyTreeDef.*same structure"),
    "shape": (lambda s, p, b: {"n": jnp.zeros(3)}, r"model_state\['n'\].*\(2,\).*\(3,\)"),
    "dtype": (
        lambda s, p, b: {"n": s["n"].astype(jnp.bfloat16)},
        r"model_state\['n'\].*float32.*bfloat16",
    ),
    "local": (lambda s, p, b: {"n": s["n"] + b["x"].mean()}, r"model_state\['n'\] differs"),
    "index": (
        lambda s, p, b: {"n": s["n"] + jax.lax.axis_index("data")},
        r"model_state\['n'\] differs",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("microbatch", [None, 2])
def test_state_comes_back_as_it_went_in_or_is_refused(name, microbatch):
    change, match = WRONG[name]
    with pytest.raises(ValueError, match=match):
        changed(change, S, microbatch=microbatch)


@pytest.mark.parametrize("returned", [1, 2])
def test_a_loss_that_is_given_state_returns_it(mesh, returned):
    def loss_fn(params, batch, model_state):
        return (plain(params, batch), model_state)[:returned]

    fn = jdp.value_and_grad(loss_fn, mesh)
    with pytest.raises(ValueError, match=rf"returned {returned} values.*model_state"):
        jax.eval_shape(lambda p: fn(p, BATCH, model_state=S), W)
