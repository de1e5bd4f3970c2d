"""Known ways for narrow numbers, inf and NaN to ruin a run silently, and what jdp gives.

As in test_pains_numerics, the wrong numbers are computed beside the right ones, so that a set-up
that could not show the mistake would fail here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jdp

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
PARAMS, LOSS, _, BATCH = reference.mlp()
BATCH = {name: np.asarray(BATCH[name]) for name in ("x", "y")}


@functools.cache
def mesh_of(count=8, kind=AUTO):
    return jdp.make_mesh(num_devices=count, axis_types=(kind,))


def reduced(*links):
    return optax.chain(jdp.all_reduce(), *links)


def moved(before, after):
    return jax.tree.map(lambda a, b: a - b, before, after)


# --- A14: clipping before unscaling (DeepSpeed PR #2695, huggingface/transformers#37566)


def update_norm(tx, grads):
    params = jax.tree.map(jnp.zeros_like, grads)
    return float(jdp.global_norm(tx.update(grads, tx.init(params), params)[0]))


def test_a14_the_set_up_shows_a_clip_of_scaled_gradients():
    grads = {"w": jnp.full(4, 3.827 / 2 * 1024)}
    wrong = optax.chain(optax.clip_by_global_norm(1.0), optax.scale(1 / 1024))
    assert update_norm(wrong, grads) == pytest.approx(1 / 1024)
    right = jdp.dynamic_loss_scale(optax.clip_by_global_norm(1.0), 1024.0)
    assert update_norm(right, grads) == pytest.approx(1.0)


@pytest.mark.parametrize(("count", "kind"), [(1, AUTO), (8, EXPLICIT)])
@pytest.mark.parametrize("limit", [0.05, 50.0])  # one that clips, one that would if scaled
def test_a14_a_loss_scale_of_1024_does_not_change_a_clipped_step(count, kind, limit):
    clipped = optax.chain(optax.clip_by_global_norm(limit), optax.sgd(1.0))
    want, _ = reference.train(LOSS, PARAMS, clipped, [BATCH])
    norm = float(jdp.global_norm(reference.gradient(LOSS, PARAMS, BATCH)[1]))
    assert 0.1 < norm < 50 < 1024 * norm
    tx = reduced(jdp.dynamic_loss_scale(clipped, 1024.0))
    step = jdp.train_step(LOSS, tx, mesh_of(count, kind))
    state, metrics = step(jdp.init_state(PARAMS, tx, mesh_of(count, kind)), BATCH)
    reference.assert_close(state.params, want)
    step_size = float(jdp.global_norm(moved(PARAMS, state.params)))
    assert step_size == pytest.approx(min(norm, limit), rel=1e-4)
    reference.assert_close(metrics["loss"], LOSS(PARAMS, BATCH))


# --- A15: norms in float16 (fairscale PR #263, pytorch PR #90028)


def test_a15_the_norm_of_float16_gradients_is_taken_in_float32():
    grads = {"w": jnp.full(4, 5000, F16)}
    assert float(optax.tree.norm(grads)) == np.inf
    assert float(jdp.global_norm(grads)) == 10000.0


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("dtype", [F32, None])
def test_a15_a_clip_of_float16_gradients_is_a_clip(count, dtype):
    """Gradient [5000] * 4; a norm in float16 is inf, and everything is multiplied by 0."""
    tx = optax.clip_by_global_norm(1.0)
    lost, _ = tx.update({"w": jnp.full(4, 5000, F16)}, tx.init(None))
    assert not np.any(lost["w"])
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    tx = reduced(jdp.master_weights(optimizer, F32))
    if dtype is None:  # no copies, but still a clip of what the reduction hands on
        tx = reduced(optax.clip_by_global_norm(1.0), jdp.master_weights(optax.sgd(1.0), None))
    params, mesh = {"w": jnp.ones(4, F16)}, mesh_of(count)
    step = jdp.train_step(lambda p, batch: jnp.sum(p["w"]) * jnp.mean(batch), tx, mesh)
    state, _ = step(jdp.init_state(params, tx, mesh), np.full((8, 1), 5000, F16))
    np.testing.assert_array_equal(state.params["w"], np.full(4, 0.5))


# --- A20: who sees inf (microsoft/dion PR #79, google-deepmind/optax PR #1746)


def spoilt(batch):
    """Inf in the first row of replica 3."""
    x = batch["x"].copy()
    x[len(x) // 8 * 3] = np.inf
    return {**batch, "x": x}


def linear(params, batch):
    return jnp.mean((batch["x"] @ params["w1"]) @ params["w2"] + jnp.sum(params["b1"]))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("place", ["around", "behind"])
def test_a20_after_a_bad_batch_every_copy_is_what_it_was(kind, place):
    tx = {
        "around": jdp.skip_nonfinite(reduced(optax.adamw(0.1))),
        "behind": reduced(jdp.skip_nonfinite(optax.adamw(0.1))),
    }[place]
    mesh = mesh_of(8, kind)
    step = jdp.train_step(linear, tx, mesh, donate=False)
    good, _ = step(jdp.init_state(PARAMS, tx, mesh), BATCH)
    bad, metrics = step(good, spoilt(BATCH))
    assert not np.isfinite(metrics["loss"])
    reference.assert_same_copies(bad)
    find = lambda state: state.opt_state if place == "around" else state.opt_state[1]  # noqa: E731
    same = [(s.params, find(s).inner_state) for s in (good, bad)]
    for before, after in zip(*map(jax.tree.leaves, same), strict=True):
        for shard in after.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.asarray(before).tobytes()
    for shard in find(bad).skipped.addressable_shards:
        assert int(np.asarray(shard.data)) == 1
    after, _ = step(bad, BATCH)
    again, _ = step(good, BATCH)
    for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a20_the_set_up_shows_two_decisions_where_each_replica_takes_its_own():
    grads = jdp.value_and_grad(linear, mesh_of())(PARAMS, spoilt(BATCH))[1]
    finite = np.isfinite(np.asarray(grads["w1"].value)).all((1, 2))
    assert finite.tolist() == [True] * 3 + [False] + [True] * 4


def test_a20_optax_gives_in_after_so_many_and_jdp_does_not():
    params, bad = {"w": jnp.ones(2)}, {"w": jnp.array([1.0, jnp.nan])}
    theirs, ours = optax.apply_if_finite(optax.sgd(1.0), 5), jdp.skip_nonfinite(optax.sgd(1.0))
    for tx, spoils in ((theirs, True), (ours, False)):
        state = tx.init(params)
        for _ in range(6):
            updates, state = tx.update(bad, state, params)
        assert bool(np.isnan(updates["w"]).any()) == spoils
    assert (int(state.skipped), int(state.consecutive)) == (6, 6)


# --- A21: the index of a schedule (huggingface/accelerate#4242, DeepSpeed PR #8417)


@pytest.mark.parametrize("guard", [jdp.skip_nonfinite, jdp.dynamic_loss_scale])
def test_a21_a_schedule_counts_applied_updates_only(guard):
    """Linear from 1 to 0 in 10: the rates used are 1.0, 0.9, 0.8, whatever is skipped between."""
    tx = reduced(guard(optax.sgd(optax.linear_schedule(1.0, 0.0, 10))))
    mesh = mesh_of()
    step = jdp.train_step(lambda p, batch: jnp.mean(batch * p["w"]), tx, mesh)
    state = jdp.init_state({"w": jnp.zeros(())}, tx, mesh)
    ones = np.ones(8, F32)
    bad = np.where(np.arange(8) == 3, np.nan, ones).astype(F32)
    seen = []
    for batch in (bad, ones, bad, bad, ones, ones):
        before = float(state.params["w"])
        state, _ = step(state, batch)
        seen.append(round(before - float(state.params["w"]), 5))
    assert seen == [0, 1.0, 0, 0, 0.9, 0.8]
    assert (int(state.step), int(state.opt_state[1].skipped)) == (6, 3)


def test_a22_a_decay_does_not_act_in_a_skipped_step():
    tx = reduced(jdp.skip_nonfinite(optax.chain(optax.add_decayed_weights(0.01), optax.sgd(1.0))))
    mesh = mesh_of()
    step = jdp.train_step(lambda p, batch: jnp.mean(batch * p["w"]), tx, mesh)
    state = jdp.init_state({"w": jnp.ones(())}, tx, mesh)
    for value in (np.inf, 0, np.nan):
        state, _ = step(state, np.full(8, value, F32))
    assert float(state.params["w"]) == pytest.approx(0.99)


# --- A33: bfloat16 parameters that do not move (jax#30337, NVIDIA/Megatron-LM#372)


@pytest.mark.parametrize(("count", "kind"), [(1, AUTO), (8, AUTO), (8, EXPLICIT)])
def test_a33_a_hundred_steps_of_a_thousandth(count, kind):
    mesh, ends = mesh_of(count, kind), []
    for dtype in (F32, None):
        tx = reduced(jdp.master_weights(optax.sgd(1e-3), dtype))
        step = jdp.train_step(lambda p, batch: jnp.mean(batch) * p["w"], tx, mesh)
        state = jdp.init_state({"w": jnp.ones((), BF16)}, tx, mesh)
        for _ in range(100):
            state, _ = step(state, np.ones(8, BF16))
        assert state.params["w"].dtype == BF16
        ends.append(float(state.params["w"]))
    # 0.9 lies between 0.8984 and 0.9023, the nearest numbers of bfloat16
    assert ends == [float(BF16(0.9)), 1.0]
    reference.assert_same_copies(state)


def test_a33_bfloat16_parameters_without_a_decision_are_refused():
    params = {"w": jnp.ones(3, BF16)}
    with pytest.raises(ValueError, match=r"\['w'\] has the dtype bfloat16.*jdp.master_weights"):
        jdp.init_state(params, reduced(optax.adam(1e-3)), mesh_of())


# --- A37: flax's DynamicScale with an axis name


def test_a37_one_step_beside_flaxs_own_scaler():
    """Measured: 8 times the gradient where JAX has already summed it; jdp's transform: 1.0."""
    want = reference.gradient(LOSS, PARAMS, BATCH)[1]

    def naive(params, batch):
        scaler = DynamicScale(scale=1024.0)
        return scaler.value_and_grad(lambda p: LOSS(p, batch), axis_name="data")(params)[-1]

    def varying(params, batch):
        return naive(jax.lax.pcast(params, "data", to="varying"), batch)

    specs = {"mesh": mesh_of(), "in_specs": (P(), P("data")), "out_specs": P()}
    run = lambda fn: jax.jit(jax.shard_map(fn, **specs))(PARAMS, BATCH)  # noqa: E731
    reference.assert_close(run(naive), jax.tree.map(lambda g: 8 * g, want), rtol=2e-6)
    reference.assert_close(run(varying), want, rtol=2e-6)
    tx = reduced(jdp.dynamic_loss_scale(optax.sgd(1.0), 1024.0))
    step = jdp.train_step(LOSS, tx, mesh_of())
    state, _ = step(jdp.init_state(PARAMS, tx, mesh_of()), BATCH)
    reference.assert_close(moved(PARAMS, state.params), want, rtol=2e-6)


def test_a37_flaxs_scaler_inside_a_loss_scaled_by_jdp():
    """A user brings it along: gradients of both kinds in one step, each with its own scale."""
    scaler = DynamicScale(scale=64.0)

    def loss_fn(params, batch):
        inner = scaler.value_and_grad(lambda p: LOSS(p, batch), axis_name="data")
        _, finite, loss, grads = inner(params)
        return loss, {"norm": jdp.global_norm(grads), "finite": finite * 1.0}

    tx = reduced(jdp.dynamic_loss_scale(optax.sgd(1.0), 1024.0))
    step = jdp.train_step(loss_fn, tx, mesh_of())
    state, metrics = step(jdp.init_state(PARAMS, tx, mesh_of()), BATCH)
    loss, want = reference.gradient(LOSS, PARAMS, BATCH)
    reference.assert_close(moved(PARAMS, state.params), want, rtol=2e-6)
    assert int(metrics.pop("skipped")) == 0
    reference.assert_close(metrics, {"finite": 1.0, "loss": loss, "norm": jdp.global_norm(want)})
