"""Traps of compression that other projects fell into, each shown and avoided."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdp

pytestmark = pytest.mark.alternate

FEEDBACK = {"wire_dtype": jnp.int8, "error_feedback": True}
COMPRESSORS = {
    "top_k": jdp.top_k(0.5),
    "random_k": jdp.random_k(0.5),
    "sign": jdp.sign(),
    "int8": jdp.all_reduce(**FEEDBACK),
}
all_compressors = pytest.mark.parametrize("name", COMPRESSORS)


@functools.cache
def mesh():
    return jdp.make_mesh()


def per_replica(value):
    value = jax.device_put(value, NamedSharding(mesh(), P("data")))
    return {"w": jdp.PerReplica(value, axes=("data",), mesh=mesh())}


# --- A15: norms in float16 (fairscale PR #263, pytorch PR #90028)


@all_compressors
def test_a15_the_norm_of_compressed_float16_gradients_is_finite(name):
    clip = optax.chain(COMPRESSORS[name], optax.clip_by_global_norm(1.0))
    state = clip.init(jdp.replicate({"w": jnp.zeros(4)}, mesh()))
    got, _ = jax.jit(clip.update)(per_replica(np.full((8, 4), 5000, np.float16)), state)
    assert got["w"].dtype == jnp.float32
    np.testing.assert_allclose(np.linalg.norm(got["w"]), 1, rtol=1e-5)


# --- A18: int8 on the wire (sgl-project/sglang#40084, meta-pytorch/torchft PR #194)


def test_a18_replicas_of_very_different_size_on_an_int8_wire():
    """Each is read by its own scale: within the quantiser's bound, and the same everywhere."""
    row = np.random.default_rng(0).uniform(-1, 1, 64)
    value = (row * np.exp2(np.arange(8))[:, None]).astype(np.float32)
    means, _ = jdp.all_reduce(wire_dtype=jnp.int8).update(per_replica(value), None)
    reference.assert_same_copies(means)
    parts = np.abs(value).reshape(8, 8, 8).max(2)  # a part of each device is a block of its own
    exact = value.mean(0, np.float64)
    bound = parts.mean(0) / 254 + np.abs(exact).reshape(8, 8).max(1) / 254
    error = np.abs(np.asarray(means["w"]) - exact).reshape(8, 8).max(1)
    assert (error <= 1.02 * bound).all()
    # decoded with a scale that is not the sender's, the smallest would count as the largest
    assert (np.abs(parts.mean(0) - parts[0]) > 10 * bound).all()


def test_a18_eight_times_the_largest_int8_does_not_wrap():
    value = np.full((8, 5), 127, np.float32)
    means, _ = jdp.all_reduce(wire_dtype=jnp.int8).update(per_replica(value), None)
    np.testing.assert_allclose(means["w"], 127, rtol=1e-6)


def test_a18_small_blocks_beside_large_ones_are_not_attenuated():
    """sgl-project/sglang#40084: 1e-6 beside 1e3 survives, in a block of its own."""
    value = np.concatenate([np.full((8, 2048), 1e3), np.full((8, 2048), 1e-6)], axis=1)
    means, _ = jdp.all_reduce(wire_dtype=jnp.int8).update(per_replica(np.float32(value)), None)
    np.testing.assert_allclose(means["w"], value[0], rtol=1e-5)


# --- A19: compression without error feedback (pytorch PR #48670, #49418)


def small_and_steady(steps, tx):
    """Steps of SGD: large gradients that cancel between replicas, and small ones that do not."""
    value = np.stack([np.array([4.0 * (-1) ** i, 1.0]) for i in range(8)]).astype(np.float32)
    state, update = tx.init(jdp.replicate({"w": jnp.zeros(2)}, mesh())), jax.jit(tx.update)
    w = np.zeros(2)
    for _ in range(steps):
        means, state = update(per_replica(value), state)
        w -= np.asarray(means["w"], np.float64)
    return w, state


def test_a19_what_is_never_largest_arrives_only_with_feedback():
    lost, _ = small_and_steady(20, jdp.top_k(0.5, error_feedback=False))
    np.testing.assert_array_equal(lost, [0, 0])
    kept, state = small_and_steady(20, jdp.top_k(0.5))
    waiting = np.asarray(state.residual["w"].value).mean(0)
    np.testing.assert_allclose(kept - waiting, [0, -20], atol=1e-5)
    assert kept[1] <= -14  # the rest waits until it is larger than 4


@pytest.mark.parametrize("name", ["top_k", "sign"])
def test_a19_a_quadratic_converges_only_with_feedback(name):
    """Pairs of a steep and a flat coordinate; the replicas' own gradients are far from 0.

    In the flat one seven replicas pull one way and the eighth, seven times as hard, the other; the
    steep one is always larger, and gives all of them nearly the same scale.
    """
    curves = np.tile([1.0, 0.05], 8).astype(np.float32)
    steep = 20.0 * (-1) ** np.arange(8)
    flat = np.array([1.0] * 7 + [-7.0])
    shifts = np.tile(np.stack([steep, flat], axis=1), (1, 8)).astype(np.float32)
    np.testing.assert_array_equal(shifts.mean(0), 0)

    def loss_fn(params, batch):
        return 0.5 * jnp.sum(curves * params["w"] ** 2) + jnp.mean(batch @ params["w"])

    def run(feedback):
        make = {"top_k": functools.partial(jdp.top_k, 0.5), "sign": jdp.sign}[name]
        sgd = optax.sgd(optax.linear_schedule(0.2, 0, 800))
        tx = optax.chain(make(error_feedback=feedback), sgd)
        step = jdp.train_step(loss_fn, tx, mesh())
        state = jdp.init_state({"w": jnp.full(16, 3.8)}, tx, mesh())
        many = jax.jit(
            lambda state, batch: jax.lax.fori_loop(0, 800, lambda _, s: step(s, batch)[0], state)
        )
        return np.abs(np.asarray(many(state, shifts).params["w"])).max()

    assert run(True) < 0.25
    assert run(False) > 1


# --- A20: who sees inf (microsoft/dion PR #79, google-deepmind/optax PR #1746)


@all_compressors
def test_a20_an_inf_in_one_replica_skips_on_all(name):
    tx = jdp.skip_nonfinite(optax.chain(COMPRESSORS[name], optax.sgd(1.0)))
    step = jdp.train_step(lambda p, batch: jnp.mean(batch @ p["w"]), tx, mesh())
    state = jdp.init_state({"w": jnp.ones(6)}, tx, mesh())
    batch = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    state, _ = step(state, batch)
    before = [np.asarray(x).tobytes() for x in jax.tree.leaves(state.opt_state.inner_state)]
    bad = batch.copy()
    bad[3, 2] = np.inf
    state, _ = step(state, bad)
    after = [np.asarray(x).tobytes() for x in jax.tree.leaves(state.opt_state.inner_state)]
    assert after == before
    assert int(state.opt_state.skipped) == 1
    reference.assert_same_copies(state)


# --- B07: a collective inside a branch (pytorch/xla#2311, jax#5178)


@pytest.mark.parametrize("wire", [jnp.bfloat16, jnp.int8])
def test_b07_a_narrow_mean_that_only_some_replicas_reach_is_an_error(wire):
    def local(x):
        average = lambda x: jdp.collectives.mean(x, "data", wire_dtype=wire)  # noqa: E731
        return jax.lax.cond(x[0, 0] > 0, average, lambda x: x, x)

    run = jax.shard_map(local, mesh=mesh(), in_specs=P("data"), out_specs=P("data"))
    with pytest.raises((TypeError, ValueError), match=r"branch.* must have equal output types"):
        jax.jit(run).lower(jnp.ones((8, 3)))
