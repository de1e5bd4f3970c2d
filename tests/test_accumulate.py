"""Accumulation over calls: k calls are one call with joined batches, and silent until the k-th."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp

pytestmark = pytest.mark.either

PARAMS, LOSS, MASKED, BATCH = reference.mlp()
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
CASES = [(1, "auto"), (2, "explicit"), (4, "auto"), (8, "auto"), (8, "explicit")]


@functools.cache
def mesh_of(count=8, kind="auto"):
    return jdp.make_mesh(num_devices=count, axis_types=(KINDS[kind],))


def part(batch, start, stop):
    return jax.tree.map(lambda x: np.asarray(x)[start:stop], batch)


def accumulating(inner, every):
    return jdp.multi_steps(optax.chain(jdp.all_reduce(), inner), every)


def run(tx, batches, *, loss=LOSS, mesh=None, params=PARAMS, state=None, **keywords):
    """States after each call."""
    mesh = mesh or mesh_of()
    step = jdp.train_step(loss, tx, mesh, donate=False, **keywords)
    states = [state or jdp.init_state(params, tx, mesh)]
    for batch in batches:
        states.append(step(states[-1], batch)[0])
    assert step._compiled._cache_size() == 1
    return states


PARTS = [part(BATCH, i, i + 16) for i in (0, 16, 32, 48)]
WEIGHTS = [float(p["mask"].sum()) for p in PARTS]  # from no row at all to nearly all 16


@functools.cache
def window(count, kind):
    return run(accumulating(optax.sgd(1.0), 4), PARTS, loss=MASKED, mesh=mesh_of(count, kind))


@pytest.mark.parametrize(("count", "kind"), CASES)
def test_equals_one_joined_batch_for_very_unequal_weights(count, kind):
    """A04, A05: huggingface/transformers#34191. The mask is nearly empty in the first quarter."""
    want, _ = reference.train(MASKED, PARAMS, optax.sgd(1.0), [BATCH])
    reference.assert_close(window(count, kind)[-1].params, want)


def test_a_mean_of_means_would_be_another_number():
    """So that the tests here can tell."""
    want, _ = reference.train(MASKED, PARAMS, optax.sgd(1.0), [BATCH])
    means = [reference.gradient(MASKED, PARAMS, p)[1]["w2"] for p in PARTS]
    wrong = np.asarray(PARAMS["w2"]) - np.sum(np.nan_to_num(means), axis=0) / 4
    assert np.abs(wrong - want["w2"]).max() > 0.05 * np.abs(want["w2"]).max()


@pytest.mark.parametrize(("count", "kind"), CASES)
def test_nothing_moves_before_the_last_call(count, kind):
    states = window(count, kind)
    for calls, state in enumerate(states[:-1]):
        assert int(state.opt_state.calls) == calls == int(state.step)
        assert int(state.opt_state.num_updates) == 0
        for name in PARAMS:
            np.testing.assert_array_equal(state.params[name], PARAMS[name])
    last = states[-1].opt_state
    assert (int(last.calls), int(last.num_updates), float(last.weight)) == (0, 1, 0.0)
    assert not any(np.any(x) for x in jax.tree.leaves(last.accumulated))
    assert float(states[2].opt_state.weight) == sum(WEIGHTS[:2])


@pytest.mark.parametrize(("count", "kind"), CASES)
def test_each_replica_holds_its_own_row_only(count, kind):
    """C01, C03: on the mesh, N rows of which a device keeps one, before and after."""
    for state in (window(count, kind)[0], window(count, kind)[3], window(count, kind)[-1]):
        for name, sums in state.opt_state.accumulated.items():
            assert isinstance(sums, jdp.PerReplica)
            assert sums.shape == (count, *PARAMS[name].shape)
            assert sums.dtype == jnp.float32
            assert sums.value.sharding.is_equivalent_to(
                NamedSharding(mesh_of(count, kind), P("data")), sums.value.ndim
            )
            for shard in sums.value.addressable_shards:
                assert shard.data.shape == (1, *PARAMS[name].shape)
        for leaf in (state.step, *state.opt_state[:3], *jax.tree.leaves(state.params)):
            assert leaf.sharding.is_fully_replicated
    rows = np.asarray(window(count, kind)[3].opt_state.accumulated["w2"].value)
    assert len(np.unique(rows.sum((1, 2)))) == count  # each has its own
    reference.assert_same_copies(window(count, kind)[-1])


def test_with_microbatches_inside_each_call():
    states = run(accumulating(optax.sgd(1.0), 2), PARTS[:2], loss=MASKED, microbatch=1)
    want, _ = reference.train(MASKED, PARAMS, optax.sgd(1.0), [part(BATCH, 0, 32)])
    reference.assert_close(states[-1].params, want)


def test_plain_losses_of_unequal_batches_equal_the_joined_batch():
    """Microbatches of 2 rows count equally, so 16 rows weigh a third of 48."""
    batches = [part(BATCH, 0, 16), part(BATCH, 16, 64)]
    tx = accumulating(optax.sgd(1.0), 2)
    step = jdp.train_step(LOSS, tx, mesh_of(), microbatch=2)
    state = jdp.init_state(PARAMS, tx, mesh_of())
    for batch in batches:
        state, _ = step(state, batch)
    want, _ = reference.train(LOSS, PARAMS, optax.sgd(1.0), [BATCH])
    reference.assert_close(state.params, want)


def test_whole_shares_of_unequal_batches_equal_the_joined_batch():
    """The same without microbatches: a call's weight is its rows, not its replicas."""
    batches = [part(BATCH, 0, 16), part(BATCH, 16, 64)]
    tx = accumulating(optax.sgd(1.0), 2)
    step = jdp.train_step(LOSS, tx, mesh_of())
    state = jdp.init_state(PARAMS, tx, mesh_of())
    for batch in batches:
        state, _ = step(state, batch)
    want, _ = reference.train(LOSS, PARAMS, optax.sgd(1.0), [BATCH])
    reference.assert_close(state.params, want)


def test_schedules_count_applied_updates():
    """A21, huggingface/accelerate#2926: linear 1 -> 0 over 10, k = 4, three updates."""
    tx = accumulating(optax.sgd(optax.linear_schedule(1.0, 0.0, 10)), 4)
    loss = lambda params, batch: jnp.mean(batch * params["w"])  # noqa: E731
    states = run(tx, [np.ones(8, np.float32)] * 12, loss=loss, params={"w": jnp.zeros(())})
    moved = -np.diff([float(state.params["w"]) for state in states[::4]])
    np.testing.assert_allclose(moved, [1.0, 0.9, 0.8], rtol=1e-6)
    assert int(states[-1].opt_state.num_updates) == 3
    assert int(states[-1].step) == 12


def test_weight_decay_acts_once_for_each_update():
    """A22, AI-Hypercomputer/maxtext#812: 0.99, where once for each call gives 0.960596."""
    tx = accumulating(optax.chain(optax.add_decayed_weights(0.01), optax.sgd(1.0)), 4)
    loss = lambda params, batch: 0.0 * jnp.mean(batch * params["w"])  # noqa: E731
    states = run(tx, [np.ones(8, np.float32)] * 4, loss=loss, params={"w": jnp.ones(())})
    assert float(states[-1].params["w"]) == np.float32(0.99)


def test_clipping_sees_the_average_of_the_window():
    """Gradients 10 and -9.9 average to 0.05: a clip at 1 must not touch them."""
    tx = accumulating(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), 2)
    loss = lambda params, batch: jnp.mean(batch) * params["w"]  # noqa: E731
    batches = [np.full(8, v, np.float32) for v in (10.0, -9.9)]
    states = run(tx, batches, loss=loss, params={"w": jnp.zeros(())})
    np.testing.assert_allclose(states[-1].params["w"], -0.05, rtol=1e-5)


def test_bf16_parameters_keep_float32_sums():
    """A16, pytorch/pytorch#106395: 256 + 1 + 1 ... is 256 in bfloat16."""
    values = [256.0] + [1.0] * 15
    loss = lambda params, batch: jnp.mean(batch).astype(jnp.bfloat16) * params["w"]  # noqa: E731
    tx = accumulating(jdp.master_weights(optax.sgd(1.0)), 16)
    batches = [np.full(8, v, np.float32) for v in values]
    states = run(tx, batches, loss=loss, params={"w": jnp.zeros((), jnp.bfloat16)})
    assert states[-1].params["w"].dtype == jnp.bfloat16
    assert float(states[-1].params["w"]) == -np.float32(sum(values) / 16).astype(jnp.bfloat16)
    sums = states[-2].opt_state.accumulated["w"]
    assert sums.dtype == jnp.float32
    assert float(sums.value[0]) == sum(values[:-1]) * 8  # the weight of a call: eight replicas


def test_calls_without_any_weight():
    """All padding: counted as a call, weighs nothing, and a window of nothing moves nothing."""
    empty = {**PARTS[0], "mask": np.zeros(16, np.float32)}
    tx = accumulating(optax.sgd(1.0, momentum=0.9), 2)
    states = run(tx, [PARTS[3], empty, empty, empty], loss=MASKED)
    want, _ = reference.train(MASKED, PARAMS, optax.sgd(1.0), [PARTS[3]])
    reference.assert_close(states[2].params, want)
    assert int(states[4].opt_state.num_updates) == 2
    # the gradient of nothing is 0: momentum goes on by itself
    step = jax.tree.map(lambda p, q: p + 0.9 * (p - q), want, PARAMS)
    reference.assert_close(states[4].params, step, 2e-6)


def test_every_1_is_the_inner_transformation():
    states = run(accumulating(optax.adamw(0.1), 1), [BATCH, BATCH])
    want, _ = reference.train(LOSS, PARAMS, optax.adamw(0.1), [BATCH, BATCH])
    reference.assert_close(states[-1].params, want, 2e-5)
    assert int(states[-1].opt_state.num_updates) == 2


def test_nothing_is_sent_before_the_last_call():
    """The large collectives stand inside the branch of the compiled program, and only there."""
    tx = accumulating(optax.adamw(0.1), 4)
    step = jdp.train_step(MASKED, tx, mesh_of())
    found = programs.collectives(
        step.lower(jdp.init_state(PARAMS, tx, mesh_of()), PARTS[0]).compile().as_text()
    )
    size = 4 * sum(p.size for p in PARAMS.values())
    assert sum(c.bytes for c in found if c.in_branch) == size
    outside = [c for c in found if not c.in_branch]
    assert sum(c.bytes for c in outside) <= 16  # loss and weight
    assert {c.kind for c in found} == {"all-reduce"}
    assert not any(c.in_loop for c in found)


@pytest.mark.parametrize("kind", KINDS)
def test_flush_applies_what_was_gathered(kind):
    states = window(8, kind)
    tx = accumulating(optax.sgd(1.0), 4)
    flushed = jdp.flush(states[3], tx)
    want, _ = reference.train(MASKED, PARAMS, optax.sgd(1.0), [part(BATCH, 0, 48)])
    reference.assert_close(flushed.params, want)
    assert (int(flushed.opt_state.calls), int(flushed.opt_state.num_updates)) == (0, 1)
    assert not np.any(flushed.opt_state.accumulated["w1"].value)
    reference.assert_same_copies(flushed)
    # the old state is still there, and an empty window moves nothing
    again = jdp.flush(flushed, tx)
    for name in PARAMS:
        np.testing.assert_array_equal(states[3].params[name], PARAMS[name])
        np.testing.assert_array_equal(again.params[name], flushed.params[name])
    assert int(again.opt_state.num_updates) == 1


@pytest.mark.parametrize("end", ["flush", "drop"])
def test_training_goes_on_after_the_window_was_ended_early(end):
    """Same placement as before, so the step is not compiled anew (D02)."""
    tx = accumulating(optax.sgd(1.0), 4)
    step = jdp.train_step(MASKED, tx, mesh_of(), donate=False)
    state = step(jdp.init_state(PARAMS, tx, mesh_of()), PARTS[0])[0]
    if end == "flush":
        ended = jdp.flush(state, tx)
    else:
        ended = state._replace(opt_state=jdp.drop_window(state.opt_state))
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(ended), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        assert new.sharding.is_equivalent_to(old.sharding, old.ndim)
    step(ended, PARTS[1])
    assert step._compiled._cache_size() == 1


def test_drop_window_forgets_the_gathered_calls():
    tx = accumulating(optax.sgd(1.0), 4)
    state = window(8, "auto")[3]
    dropped = state._replace(opt_state=jdp.drop_window(state.opt_state))
    assert float(dropped.opt_state.weight) == int(dropped.opt_state.calls) == 0
    states = run(tx, PARTS, loss=MASKED, state=dropped)
    want, _ = reference.train(MASKED, PARAMS, optax.sgd(1.0), [BATCH])
    reference.assert_close(states[-1].params, want)


def test_flush_of_a_state_without_a_window():
    tx = optax.chain(jdp.all_reduce(), optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"without an accumulation window.*Leave the call out"):
        jdp.flush(jdp.init_state({"w": jnp.ones(3)}, tx, mesh_of()), tx)


def test_flush_needs_the_parameters():
    tx = accumulating(optax.sgd(1.0), 4)
    with pytest.raises(ValueError, match="params"):
        tx.update(None, window(8, "auto")[3].opt_state)


def test_init_from_shapes():
    """Nothing is allocated: for a checkpoint that is to be restored."""
    tx = accumulating(optax.adam(1.0), 4)
    mesh = mesh_of()
    everywhere = NamedSharding(mesh, P())
    structs = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=everywhere), PARAMS
    )
    with jax.set_mesh(mesh):
        got = jax.eval_shape(tx.init, structs)
    assert got.accumulated["w1"].shape == (8, 16, 24)
    assert got.inner_state[1][0].mu["w1"].shape == (16, 24)
    made = tx.init(structs)  # the structs name the mesh; only zeros are made
    assert made.accumulated["w1"].value.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 3)


def test_init_without_a_mesh():
    tx = accumulating(optax.sgd(1.0), 4)
    with pytest.raises(
        ValueError, match=r"must know the mesh.*jdp.init_state.*jdp.replicate.*jax.set_mesh"
    ):
        tx.init({"w": jnp.ones(3)})
    placed = jdp.replicate({"w": jnp.ones(3)}, mesh_of())
    assert tx.init(placed).accumulated["w"].shape == (8, 3)


def test_two_data_axes_and_a_model_axis():
    mesh = jdp.make_mesh(("node", "device", "model"), (2, 2, 2))
    params = jdp.replicate(PARAMS, mesh)
    columns = NamedSharding(mesh, P(None, "model"))
    params["w1"] = jax.device_put(params["w1"], columns)
    tx = accumulating(optax.sgd(1.0), 4)
    states = run(tx, PARTS, loss=MASKED, mesh=mesh, params=params)
    want, _ = reference.train(MASKED, PARAMS, optax.sgd(1.0), [BATCH])
    reference.assert_close(states[-1].params, want)
    rows = states[3].opt_state.accumulated["w1"].value
    assert rows.addressable_shards[0].data.shape == (1, 16, 12)  # its replica's, its columns
    assert states[-1].params["w1"].sharding.is_equivalent_to(columns, 2)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "4", None])
def test_window_lengths_that_are_refused(every):
    with pytest.raises(ValueError, match=f"every={every!r}; it must be a whole number of calls"):
        jdp.multi_steps(optax.sgd(1.0), every)


INNER = accumulating(optax.sgd(1.0), 2)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(INNER, optax.add_decayed_weights(0.1)),
        optax.chain(INNER),
        jdp.multi_steps(INNER, 2),
        optax.apply_if_finite(INNER, 3),
        optax.inject_hyperparams(lambda lr: accumulating(optax.sgd(lr), 2))(lr=0.1),
    ],
    ids=["chain", "chain_of_one", "multi_steps", "apply_if_finite", "inject"],
)
def test_anything_around_it_is_refused(tx):
    with pytest.raises(
        ValueError, match=r"stands inside another transformation.*Make it the outer"
    ):
        jdp.init_state({"w": jnp.ones(3)}, tx, mesh_of())


def test_reduced_gradients_are_refused():
    state = window(8, "auto")[0].opt_state
    with pytest.raises(ValueError, match=r"jdp.multi_steps received gradient \['b1'\].*reduced"):
        INNER.update(PARAMS, state, PARAMS)


def test_a_state_of_another_axis_is_refused():
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    grads = jdp.value_and_grad(LOSS, mesh)(PARAMS, BATCH)[1]
    with pytest.raises(
        ValueError, match=r"sums along the mesh axes \('data',\).*\('node', 'device'\)"
    ):
        INNER.update(grads, window(8, "auto")[0].opt_state, PARAMS)


def test_nan_in_a_window_is_visible():
    """It is not averaged away, nor forgotten by a later call."""
    bad = {**PARTS[1], "x": PARTS[1]["x"].copy()}
    bad["x"][3, 2] = np.nan
    states = run(accumulating(optax.sgd(1.0), 2), [bad, PARTS[2], PARTS[3]], loss=MASKED)
    assert np.isnan(states[2].params["w2"]).all()
    assert not np.any(states[2].opt_state.accumulated["w2"].value)


def test_non_finite_windows_are_skipped_and_the_next_begins_clean():
    tx = jdp.multi_steps(
        optax.chain(jdp.all_reduce(), optax.apply_if_finite(optax.sgd(1.0), 3)), every=2
    )
    bad = {**PARTS[2], "x": np.full_like(PARTS[2]["x"], np.inf)}
    states = run(tx, [bad, PARTS[2], *PARTS[2:]], loss=MASKED)
    for name in PARAMS:
        np.testing.assert_array_equal(states[2].params[name], PARAMS[name])
    want, _ = reference.train(MASKED, PARAMS, optax.sgd(1.0), [part(BATCH, 32, 64)])
    reference.assert_close(states[4].params, want)
    assert int(states[4].opt_state.inner_state[1].total_notfinite) == 1


def test_the_state_survives_numpy_and_pickle():
    state = window(8, "auto")[2]
    host = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, state)))
    places = jax.tree.map(lambda x: x.sharding, state)
    restored = jax.device_put(host, places)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    states = run(accumulating(optax.sgd(1.0), 4), PARTS[2:], loss=MASKED, state=restored)
    for name in PARAMS:
        np.testing.assert_array_equal(states[-1].params[name], window(8, "auto")[-1].params[name])
