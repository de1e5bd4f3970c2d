"""A state moves between stages, meshes and the host, and the run goes on as if it had not."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import AxisType

import jdp
from jdp import padded

pytestmark = pytest.mark.alternate

PARAMS, LOSS, _, BATCH = reference.mlp()
# 11 x 5 and 13 are divided by no number of devices tried
PARAMS = PARAMS | {"odd": jnp.arange(55.0).reshape(11, 5) / 55, "bias": jnp.ones(13)}
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01))
STAGES = {
    "dp": optax.chain(jdp.all_reduce(), ADAM),
    "zero1": jdp.zero1(ADAM, min_size=0),
    "zero2": jdp.zero2(ADAM, min_size=0, reduce="microbatch"),
    "zero3": jdp.zero3(ADAM, min_size=0),
}


def loss_fn(params, batch, key=None):
    del key  # a leaf of the state like any other
    extra = jnp.sum(params["odd"] ** 2) + jnp.sum(params["bias"] ** 2)
    return LOSS(params, batch) + 0.01 * extra


@functools.cache
def mesh_of(count, kind=AxisType.Auto):
    return jdp.make_mesh(num_devices=count, axis_types=kind)


@functools.cache
def step_of(stage, count, kind=AxisType.Auto):
    return jdp.train_step(loss_fn, STAGES[stage], mesh_of(count, kind))


def fresh(stage, count, kind=AxisType.Auto):
    return jdp.init_state(PARAMS, STAGES[stage], mesh_of(count, kind), key=jax.random.key(7))


@functools.cache
def trained(stage, count):
    """A state after two steps, as NumPy arrays of logical shapes."""
    state = fresh(stage, count)
    for _ in range(2):
        state, _ = step_of(stage, count)(state, BATCH)
    return jax.tree.map(np.asarray, jdp.logical(state._replace(key=None))), state


def values(state):
    return [np.asarray(x) for x in jax.tree.leaves(jdp.logical(state._replace(key=None)))]


@pytest.mark.parametrize(("old", "new"), list(itertools.product(STAGES, STAGES)))
def test_every_stage_becomes_every_other(old, new):
    """The same bits, placed as the new stage wants them; the next step is the same."""
    _, state = trained(old, 8)
    moved = jdp.restage(state, fresh(new, 8))
    for a, b in zip(values(state), values(moved), strict=True):
        np.testing.assert_array_equal(a, b)
    for x, like in zip(jax.tree.leaves(moved), jax.tree.leaves(fresh(new, 8)), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
        assert x.dtype == like.dtype
    assert (jax.random.key_data(moved.key) == jax.random.key_data(state.key)).all()
    want = jdp.restage(state, fresh("dp", 8))
    want, _ = step_of("dp", 8)(want, BATCH)
    got, _ = step_of(new, 8)(moved, BATCH)
    reference.assert_close(values(got), values(want), rtol=1e-5)


@pytest.mark.parametrize(("new", "count"), [("dp", 3), ("zero1", 2), ("zero3", 4), ("zero2", 1)])
@pytest.mark.filterwarnings("ignore:jdp.zero. over a single device")
def test_another_number_of_devices(new, count):
    """E08, microsoft/DeepSpeed#2898, NVIDIA/Megatron-LM#5077: several leaves that divide badly."""
    host, state = trained("zero3", 8)
    for source in (state, host):  # from devices, and as read back from a file
        moved = jdp.restage(source._replace(key=state.key), fresh(new, count))
        for a, b in zip(values(state), values(moved), strict=True):
            np.testing.assert_array_equal(a, b)
    batch = jax.tree.map(lambda x: x[:48], BATCH)  # 1, 2, 3, 4 and 8 divide 48
    want = jdp.restage(state, fresh("dp", 8))
    for _ in range(3):
        want, _ = step_of("dp", 8)(want, batch)
        moved, _ = step_of(new, count)(moved, batch)
    reference.assert_close(values(moved), values(want), rtol=1e-5)


def test_a_tree_of_padded_arrays_becomes_logical_in_one_program(monkeypatch):
    params = {f"{i:03}": np.full((3 + i % 5, 7), i, np.float32) for i in range(120)}
    state = jdp.init_state(params, jdp.zero3(optax.sgd(1.0), min_size=0), mesh_of(8))
    assert all(isinstance(leaf, jdp.Padded) for leaf in state.params.values())
    seen, view = [], padded.view
    monkeypatch.setattr(padded, "view", lambda leaf: seen.append(leaf.value) or view(leaf))
    whole = jdp.logical(state.params)
    assert len(seen) == 120
    assert all(isinstance(value, jax.core.Tracer) for value in seen)  # none by itself
    for name, array in whole.items():
        np.testing.assert_array_equal(array, params[name])
    assert all(leaf.sharding.is_fully_replicated for leaf in whole.values())


def test_explicit_axes():
    _, state = trained("zero3", 8)
    moved = jdp.restage(state, fresh("zero3", 8, AxisType.Explicit))
    moved, _ = step_of("zero3", 8, AxisType.Explicit)(moved, BATCH)
    want, _ = step_of("zero3", 8)(jdp.restage(state, fresh("zero3", 8)), BATCH)
    reference.assert_close(values(moved), values(want), rtol=1e-5)


def test_like_may_be_shapes():
    """What a checkpoint is restored into, without making a state first."""
    host, state = trained("zero1", 8)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    like = jdp.init_state(shapes, STAGES["zero3"], mesh_of(8))
    moved = jdp.restage(host, like)
    assert moved.params["w1"].sharding.shard_shape((16, 24)) == (2, 24)
    for a, b in zip(values(state), values(moved), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_kept_for_each_replica():
    """Sums of an open window: the mean stays what it was, and flushes to the same."""
    window = lambda inner: jdp.multi_steps(inner, every=4)  # noqa: E731
    sgd = optax.sgd(1.0)
    olds = {"dp": optax.chain(jdp.all_reduce(), sgd), "zero3": jdp.zero3(sgd, min_size=0)}
    for old, new, count in itertools.product(olds, olds, (8, 4)):
        tx, step = window(olds[old]), None
        state = jdp.init_state(PARAMS, tx, mesh_of(8))
        step = jdp.train_step(loss_fn, tx, mesh_of(8))
        for _ in range(2):
            state, _ = step(state, BATCH)
        other = window(olds[new])
        moved = jdp.restage(state, jdp.init_state(PARAMS, other, mesh_of(count)))
        want = jdp.logical(jdp.flush(state, tx).params)
        got = jdp.logical(jdp.flush(moved, other).params)
        reference.assert_close(got, want, rtol=1e-5)
        assert np.any(np.asarray(got["w1"]) != np.asarray(PARAMS["w1"]))


def test_orbax_round_trip(tmp_path):
    """Written with `logical`, read into another stage."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")
    host, state = trained("zero3", 8)
    saved = jdp.logical(state._replace(key=None))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), saved)
    with ocp.StandardCheckpointer() as checkpointer:
        read = checkpointer.restore(tmp_path / "state", jax.tree.map(np.zeros_like, host))
    assert jax.tree.structure(read) == jax.tree.structure(target)
    like = fresh("zero1", 4)._replace(key=None)
    for a, b in zip(values(state), values(jdp.restage(read, like)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_another_optimizer_is_refused():
    _, state = trained("zero3", 8)
    tx = jdp.zero3(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)))
    with pytest.raises(ValueError, match=r"restage: .* belong to different optimizers"):
        jdp.restage(state, jdp.init_state(PARAMS, tx, mesh_of(8), key=jax.random.key(0)))


def test_another_shape_or_dtype_is_named():
    _, state = trained("zero1", 8)
    other = dict(PARAMS, w1=jnp.zeros((16, 25)))
    like = jdp.init_state(other, STAGES["zero1"], mesh_of(8), key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"state.params\['w1'\] is float32 of shape \(16, 24\)"):
        jdp.restage(state, like)
    narrow = state._replace(step=jnp.zeros((), jnp.float32))
    with pytest.raises(ValueError, match=r"state.step is float32 of shape \(\), but like.step"):
        jdp.restage(narrow, fresh("zero1", 8))


def test_a_state_of_another_stage_is_refused_by_name():
    with pytest.raises(ValueError, match=r"zero3 was given a state of jdp.zero1.*restage"):
        step_of("zero3", 4)(fresh("zero1", 4), BATCH)
    with pytest.raises(ValueError, match="restage"):
        step_of("dp", 4)(fresh("zero1", 4), BATCH)
    with pytest.raises(ValueError, match=r"zero1 was given a state that it did not make.*restage"):
        step_of("zero1", 4)(fresh("dp", 4), BATCH)
