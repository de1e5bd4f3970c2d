"""Gradient noise scale and per-replica norms: the formulas, their expectation, what they cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives

import jdp
from jdp.noise import find_noise_scale, gradient_noise_scale, per_replica_norms

pytestmark = pytest.mark.alternate


@functools.cache
def mesh_of(count=8, kind="auto"):
    return jdp.make_mesh(num_devices=count, axis_types=(sharded.KINDS[kind],))


def split(values, mesh, weight=None):
    """Per-replica gradients from host arrays [N, *shape]."""
    place = NamedSharding(mesh, P("data"))
    return {
        name: jdp.PerReplica(jax.device_put(x, place), weight, axes=("data",), mesh=mesh)
        for name, x in values.items()
    }


def definition(rows, weight):
    """Appendix A.1, with B_small = W / N and B_big = W."""
    flat = np.concatenate([np.asarray(x, np.float64).reshape(len(x), -1) for x in rows], axis=1)
    count = len(flat)
    small, big = (flat**2).sum(1).mean(), (flat.mean(0) ** 2).sum()
    b_small, b_big = weight / count, weight
    square = (b_big * big - b_small * small) / (b_big - b_small)
    trace = (small - big) / (1 / b_small - 1 / b_big)
    return square, trace


@pytest.mark.parametrize("kind", sharded.KINDS)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_running_averages_of_the_two_estimates(count, kind):
    mesh, random = mesh_of(count, kind), np.random.default_rng(0)
    tx = gradient_noise_scale(jdp.all_reduce(), decay=0.75)
    state, update = tx.init(None), jax.jit(tx.update)
    want = np.zeros(2)
    for step in range(3):
        values = {"w": random.normal(size=(count, 5, 3)) + 1, "b": random.normal(size=(count,))}
        values = {name: x.astype(np.float32) for name, x in values.items()}
        means, state = update(split(values, mesh, jnp.float32(64 + step)), state)
        want = 0.75 * want + 0.25 * np.array(definition(values.values(), 64 + step))
        plain = jdp.all_reduce().update(split(values, mesh), None)[0]
        for name in values:
            np.testing.assert_array_equal(means[name], plain[name])
        np.testing.assert_allclose([state.square, state.trace], want, rtol=2e-5)
        np.testing.assert_allclose(find_noise_scale(state), want[1] / want[0], rtol=4e-5)
    assert int(state.steps) == 3


@pytest.mark.parametrize("count", [2, 8])
def test_expectation_is_that_of_known_noise(count):
    """Examples x with gradient x - w, of known mean and covariance; any number of replicas."""
    deviations = np.array([1.0, 2.0, 0.5], np.float32)
    center = np.array([1.0, -0.5, 0.25], np.float32)
    want = (deviations**2).sum(), (center**2).sum()

    def loss_fn(params, batch):
        return jnp.mean(jnp.sum((params["w"] - batch) ** 2, axis=-1)) / 2

    tx = gradient_noise_scale(jdp.all_reduce(), decay=0.999)
    grad_fn = jdp.value_and_grad(loss_fn, mesh_of(count), microbatch=2)

    @jax.jit
    def run(key):
        def step(state, key):
            batch = center + deviations * jax.random.normal(key, (32, 3))
            grads = grad_fn({"w": jnp.zeros(3)}, batch)[1]
            _, state = tx.update(grads, state)
            return state, None

        return jax.lax.scan(step, tx.init(None), jax.random.split(key, 2000))[0]

    state = run(jax.random.key(0))
    lost = 1 - 0.999**2000  # of an average that starts from 0
    # about 1000 steps are averaged: standard errors of 1 % for two replicas, and of 2 %
    np.testing.assert_allclose(state.trace / lost, want[0], rtol=0.06 if count == 2 else 0.03)
    np.testing.assert_allclose(state.square / lost, want[1], rtol=0.08)
    np.testing.assert_allclose(state.noise_scale, want[0] / want[1], rtol=0.12)


def test_unit_is_what_the_loss_weighs_by():
    """Examples for a mean; the weight for a `Mean`; a replica's batch where nobody weighed."""
    mesh = mesh_of()
    tx = gradient_noise_scale(jdp.all_reduce())
    found = []
    for loss_fn in (
        lambda p, b: jnp.mean(jnp.sum(p * b, axis=-1)),
        lambda p, b: jdp.Mean(10 * jnp.sum(p * b), jnp.float32(10 * len(b))),  # ten tokens each
    ):
        grads = jdp.value_and_grad(loss_fn, mesh)(jnp.ones(3), sharded.BATCH["x"][:, :3] + 0.5)[1]
        found.append(float(tx.update(grads, tx.init(None))[1].noise_scale))
    np.testing.assert_allclose(found[1], 10 * found[0], rtol=1e-4)
    unweighed = jdp.PerReplica(grads.value, axes=grads.axes, mesh=mesh)
    alone = tx.update(unweighed, tx.init(None))[1].noise_scale
    np.testing.assert_allclose(alone * 64 / 8, found[0], rtol=1e-4)


def test_replicas_of_unequal_weight_add_what_the_docstring_says():
    """Without any noise, trace is c * W / (N - 1) * |G|^2."""
    weights = np.arange(1, 9, dtype=np.float32)

    def loss_fn(params, batch):
        return jdp.Mean(jnp.sum(3 * params * batch), jnp.sum(batch))

    grads = jdp.value_and_grad(loss_fn, mesh_of())(jnp.ones(()), weights)[1]
    tx = gradient_noise_scale(jdp.all_reduce(), decay=0)
    state = tx.update(grads, tx.init(None))[1]
    variation = weights.var() / weights.mean() ** 2
    np.testing.assert_allclose(state.trace, variation * 36 / 7 * 9, rtol=1e-5)


CHAINS = {
    "clip": lambda link: optax.chain(link, sharded.INNER),
    "zero1": lambda link: optax.chain(link, jdp.zero1(sharded.INNER)),
    "skip": lambda link: jdp.skip_nonfinite(optax.chain(link, sharded.INNER)),
    "hierarchical": lambda _: optax.chain(gradient_noise_scale(jdp.hierarchical()), sharded.INNER),
    "int8": lambda _: optax.chain(
        gradient_noise_scale(jdp.all_reduce(wire_dtype=jnp.int8, error_feedback=True)),
        sharded.INNER,
    ),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_in_a_chain(chain):
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    results = []
    for link in (jdp.all_reduce(), gradient_noise_scale(jdp.all_reduce())):
        tx = CHAINS[chain](link)
        step = jdp.train_step(sharded.plain, tx, mesh, microbatch=4)
        state = jdp.init_state(sharded.PARAMS, tx, mesh)
        for batch in sharded.BATCHES:
            state, _ = step(state, batch)
        results.append(state)
    scale = find_noise_scale(results[1].opt_state)
    assert 0 < float(scale) < 1000
    if chain in ("clip", "zero1", "skip"):
        assert find_noise_scale(results[0].opt_state) is None
        reference.assert_close(results[1].params, results[0].params, rtol=1e-7)


def test_a_window_of_multi_steps_counts_as_one_batch():
    found, mesh = [], mesh_of()
    batch = (
        jax.tree.map(lambda x: x[:32], sharded.BATCH),
        jax.tree.map(lambda x: x[32:], sharded.BATCH),
    )
    # replica i of the joined batch has the rows that it had in the two calls
    joined = jax.tree.map(
        lambda a, b: np.concatenate(
            [a.reshape(8, 4, *a.shape[1:]), b.reshape(8, 4, *b.shape[1:])], 1
        ).reshape(64, *a.shape[1:]),
        *batch,
    )
    for every, batches in ((1, [joined]), (2, batch)):
        tx = optax.chain(gradient_noise_scale(jdp.all_reduce()), optax.sgd(1.0))
        tx = jdp.multi_steps(tx, every=every)
        step = jdp.train_step(sharded.masked, tx, mesh)
        state = jdp.init_state(sharded.PARAMS, tx, mesh)
        for part in batches:
            state, _ = step(state, part)
        found.append(find_noise_scale(state.opt_state))
    np.testing.assert_allclose(*found, rtol=1e-4)


def test_one_scalar_is_sent():
    mesh = mesh_of()
    grads = split({"w": np.ones((8, 300), np.float32), "b": np.ones((8, 5), np.float32)}, mesh)
    bytes_of = {}
    for name, tx in (
        ("without", jdp.all_reduce()),
        ("with", gradient_noise_scale(jdp.all_reduce())),
    ):
        text = jax.jit(tx.update).lower(grads, tx.init(None)).compile().as_text()
        bytes_of[name] = sum(c.bytes for c in collectives(text))
    assert bytes_of["with"] - bytes_of["without"] == 4


def test_a_bad_step_leaves_the_averages_alone():
    mesh, tx = mesh_of(), gradient_noise_scale(jdp.all_reduce())
    values = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    _, state = tx.update(split({"w": values}, mesh), tx.init(None))
    for bad in (np.nan, np.inf):
        worse = np.where(np.eye(8, 4) > 0, np.float32(bad), values)
        _, after = tx.update(split({"w": worse}, mesh), state)
        for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(new, old)


def test_nothing_can_be_told():
    tx = gradient_noise_scale(jdp.all_reduce())
    assert np.isnan(find_noise_scale(tx.init(None)))
    values = np.ones((1, 4), np.float32)
    means, state = tx.update(split({"w": values}, mesh_of(1)), tx.init(None))
    np.testing.assert_array_equal(means["w"], values[0])
    assert np.isnan(find_noise_scale(state))
    # noise alone: the estimate of |G|^2 is below 0
    values = np.array([1, -1, 1, -1, 1, -1, 1, -1], np.float32)
    _, state = tx.update(split({"w": values}, mesh_of()), tx.init(None))
    assert np.isinf(find_noise_scale(state))
    assert tx.update({"none": None}, tx.init(None))[0] == {"none": None}


@pytest.mark.parametrize("decay", [1, -0.1, float("nan")])
def test_a_decay_that_cannot_be_meant(decay):
    with pytest.raises(ValueError, match=r"decay=.* at least 0 and less than 1"):
        gradient_noise_scale(jdp.all_reduce(), decay=decay)


@pytest.mark.parametrize(
    "inner", [optax.chain(jdp.all_reduce(), optax.adam(1.0)), jdp.zero1(optax.sgd(1.0))]
)
def test_more_than_a_reduction(inner):
    params = jdp.replicate({"w": np.ones(512)}, mesh_of())
    with pytest.raises(ValueError, match="is given the reduction alone"):
        gradient_noise_scale(inner).init(params)


def test_less_than_a_reduction():
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    grads = jdp.PerReplica(jnp.ones((8, 3)), axes=("node", "device"), mesh=mesh)
    tx = gradient_noise_scale(jdp.all_reduce("device"))
    with pytest.raises(ValueError, match="still differ by replica"):
        tx.update({"w": grads}, tx.init(None))


def test_gradients_already_reduced():
    tx = gradient_noise_scale(jdp.all_reduce())
    with pytest.raises(ValueError, match=r"jdp.gradient_noise_scale received gradient \['w'\]"):
        tx.update({"w": jnp.ones(3)}, tx.init(None))


@pytest.mark.parametrize("kind", sharded.KINDS)
def test_per_replica_norms(kind):
    mesh, random = mesh_of(8, kind), np.random.default_rng(0)
    values = {"w": random.normal(size=(8, 6, 2)), "b": random.normal(size=(8,))}
    grads = split({name: x.astype(np.float32) for name, x in values.items()}, mesh)
    flat = np.concatenate([x.reshape(8, -1) for x in values.values()], axis=1)
    norms = per_replica_norms(grads)
    np.testing.assert_allclose(norms, np.linalg.norm(flat, axis=1), rtol=1e-6)
    assert norms.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)
    assert collectives(jax.jit(per_replica_norms).lower(grads).compile().as_text()) == []


def test_norms_beside_the_reduction_in_a_step_of_ones_own():
    mesh, tx = mesh_of(), optax.chain(jdp.all_reduce(), optax.sgd(1.0))
    grad_fn = jdp.value_and_grad(sharded.plain, mesh)

    def step(params, batch):
        grads = grad_fn(params, batch)[1]
        return tx.update(grads, tx.init(params))[0], per_replica_norms(grads)

    jdp.check_order(step, sharded.PARAMS, sharded.BATCH)
    assert jax.jit(step)(sharded.PARAMS, sharded.BATCH)[1].shape == (8,)


def test_norms_of_nothing_and_of_reduced_gradients():
    with pytest.raises(ValueError, match="no gradients at all"):
        per_replica_norms({})
    with pytest.raises(ValueError, match=r"jdp.per_replica_norms received gradient \['w'\]"):
        per_replica_norms({"w": jnp.ones(3)})
