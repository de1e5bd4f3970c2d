"""`begin_with`: each reduction in its turn, one residual for both, and only one that sends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives, sent_bytes

import jdp

pytestmark = [pytest.mark.either, pytest.mark.alternate]

SHAPES = {"w": (12, 8), "b": (7,)}
POWER = jdp.power_sgd(2, min_rate=0)
INT8 = jdp.all_reduce(wire_dtype=jnp.int8, error_feedback=True)
EXACT = jdp.all_reduce()


@functools.cache
def mesh_of(count=2, kind=AxisType.Auto):
    return jdp.make_mesh(num_devices=count, axis_types=kind)


def grads(key, count=2, mesh=None, axes=("data",)):
    mesh, random = mesh or mesh_of(count), np.random.default_rng(key)
    place = NamedSharding(mesh, P(axes))
    return {
        name: jdp.PerReplica(
            jax.device_put(random.normal(size=(count, *shape)).astype(np.float32), place),
            axes=axes,
            mesh=mesh,
        )
        for name, shape in SHAPES.items()
    }


def begun(tx, mesh=None):
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    return jdp.init_state(params, tx, mesh or mesh_of()).opt_state


def run(tx, calls, state=None, key=0):
    """Means of each call, and the state after the last one; compiled once."""
    state, update, means = begun(tx) if state is None else state, jax.jit(tx.update), []
    for call in range(calls):
        mean, state = update(grads(key + call), state)
        means.append(mean)
    assert update._cache_size() == 1
    return means, state


def mean_of(tree):
    is_leaf = lambda x: isinstance(x, jdp.PerReplica)  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(x.value, np.float64).mean(0), tree, is_leaf=is_leaf)


def test_each_has_its_turn():
    means, state = run(jdp.begin_with(EXACT, 2, POWER), 5)
    first, _ = run(EXACT, 2)
    then, after = run(POWER, 3, key=2)
    for got, want in zip(means, first + then, strict=True):
        reference.assert_close(got, want, rtol=1e-6)
    reference.assert_close(mean_of(state.residual), mean_of(after.residual), rtol=1e-5)
    for one, other in zip(state.states[1].memory.factors, after.memory.factors, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    assert int(state.calls) == 5
    reference.assert_same_copies(state)


@pytest.mark.parametrize(
    ("first", "then"),
    [(POWER, EXACT), (POWER, INT8), (INT8, POWER), (EXACT, jdp.begin_with(POWER, 1, INT8))],
    ids=["to exact", "to int8", "to power", "three"],
)
def test_what_the_first_has_not_sent_the_other_sends(first, then):
    means, state = run(jdp.begin_with(first, 2, then), 6)
    whole = [mean_of(grads(call)) for call in range(6)]
    total = jax.tree.map(lambda *xs: sum(map(np.float64, xs)), *means)
    left = mean_of(state.residual)
    reference.assert_close(
        jax.tree.map(np.add, total, left), jax.tree.map(lambda *xs: sum(xs), *whole), rtol=1e-5
    )
    if then is EXACT:
        assert all(not x.any() for x in left.values())
        # at once: the third mean has it
        _, before = run(first, 2)
        want = jax.tree.map(np.add, whole[2], mean_of(before.residual))
        reference.assert_close(means[2], want, rtol=1e-5)
        reference.assert_close(means[3], whole[3], rtol=1e-6)


def test_there_is_one_residual():
    """4 bytes a parameter on a device, however many keep one."""
    state = begun(jdp.begin_with(INT8, 2, jdp.begin_with(POWER, 2, INT8)))
    is_leaf = lambda x: isinstance(x, jdp.PerReplica)  # noqa: E731
    kept = [x for x in jax.tree.leaves(state, is_leaf=is_leaf) if is_leaf(x)]
    assert [x.shape for x in kept] == [(2, 7), (2, 12, 8)]
    assert begun(jdp.begin_with(EXACT, 1, jdp.all_reduce(wire_dtype=jnp.int8))).residual == ()


def test_only_the_one_whose_turn_it_is_sends():
    def sent(tx):
        program = jax.jit(tx.update).lower(grads(0), begun(tx)).compile().as_text()
        found = collectives(program)
        names = sorted({c.branch for c in found})
        return {name: sent_bytes([c for c in found if c.branch == name], 2) for name in names}

    alone = [sent(tx)[""] for tx in (EXACT, POWER)]
    branches = sent(jdp.begin_with(EXACT, 2, POWER))
    assert "" not in branches
    assert sorted(branches.values()) == sorted(alone)
    assert alone[1] < alone[0]


def loss_fn(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)


PARAMS = {"w": np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32), "b": np.ones(7)}
BATCH = np.random.default_rng(1).normal(size=(16, 12)).astype(np.float32)


@functools.cache
def trained(kind=AxisType.Auto, steps=4):
    """Three links of training, with a bad batch in the second call."""
    tx = jdp.skip_nonfinite(optax.chain(jdp.begin_with(INT8, 2, POWER), optax.adam(0.1)))
    mesh = mesh_of(2, kind)
    state = jdp.init_state(PARAMS, tx, mesh)
    step = jdp.train_step(loss_fn, tx, mesh, donate=False)
    for number in range(steps):
        batch = BATCH.copy()
        batch[3] = np.nan if number == 1 else batch[3]
        state, _ = step(state, batch)
    return state, step


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_skipped_call_is_no_turn(kind):
    state, _ = trained(kind)
    begun = state.opt_state.inner_state[0]
    assert (int(begun.calls), int(state.opt_state.skipped)) == (3, 1)
    assert np.abs(begun.residual["w"].value).max() > 0


def test_saved_and_restored_it_goes_on_to_the_bit():
    state, step = trained()
    saved = jax.tree.map(np.asarray, state)
    restored = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), saved, state)
    ends = [step(x, BATCH)[0] for x in (state, restored)]
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_another_number_of_devices_keeps_the_mean_of_the_residual():
    state, _ = trained()
    tx = jdp.skip_nonfinite(optax.chain(jdp.begin_with(INT8, 2, POWER), optax.adam(0.1)))
    moved = jdp.restage(state, jdp.init_state(PARAMS, tx, mesh_of(4)))
    old, new = (x.opt_state.inner_state[0] for x in (state, moved))
    reference.assert_close(mean_of(new.residual), mean_of(old.residual))
    assert int(new.calls) == int(old.calls)


def test_before_local_steps_it_counts_gradients_and_agreements_apart():
    both = jdp.begin_with(INT8, 2, POWER)
    tx = jdp.diloco(optax.sgd(0.1), optax.sgd(0.7), every=2, start=4, reduce=both)
    state = jdp.init_state(PARAMS, tx, mesh_of())
    step = jdp.train_step(loss_fn, tx, mesh_of())
    for _ in range(7):
        state, _ = step(state, BATCH)
    gradients, (differences,) = state.opt_state.gradient_state, state.opt_state.reduce_states
    assert (int(gradients.calls), int(differences.calls)) == (4, 1)
    start, first = (values(x.memory.factors) for x in (gradients.states[1], begun(POWER)))
    reference.assert_same_copies(state.opt_state.anchor)
    assert any((a != b).any() for a, b in zip(start, first, strict=True))


def values(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


# misuse -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [-1, 1.5, "3", True, None])
def test_numbers_of_calls_that_cannot_be(calls):
    with pytest.raises(ValueError, match=r"jdp\.begin_with got calls=.*whole number, at least 0"):
        jdp.begin_with(EXACT, calls, POWER)


@pytest.mark.parametrize(("first", "then", "name"), [(1, POWER, "first"), (EXACT, None, "then")])
def test_what_is_no_transformation(first, then, name):
    with pytest.raises(TypeError, match=rf"jdp\.begin_with was given a .* as `{name}`"):
        jdp.begin_with(first, 1, then)


@pytest.mark.parametrize(
    ("then", "match"),
    [
        (jdp.zero1(optax.sgd(1.0)), "was given a ZeRO stage; it says how gradients are averaged"),
        (jdp.multi_steps(optax.sgd(1.0), 2), r"was given jdp\.multi_steps; it says how"),
        (optax.chain(POWER), "keeps values for each replica within others, a chain"),
    ],
    ids=["zero", "multi_steps", "chain"],
)
def test_what_is_more_than_a_reduction(then, match):
    with pytest.raises(ValueError, match=match):
        begun(jdp.begin_with(EXACT, 1, then))


def test_two_that_make_different_things():
    mesh, axes = jdp.make_mesh(("node", "device"), (2, 2), num_devices=4), ("node", "device")
    tx = jdp.begin_with(jdp.all_reduce("device"), 1, jdp.all_reduce())
    with pytest.raises(ValueError, match="make different things of the same gradients"):
        tx.update(grads(0, 4, mesh, axes), begun(tx, mesh))


def test_gradients_that_are_already_reduced():
    tx = jdp.begin_with(EXACT, 1, POWER)
    with pytest.raises(ValueError, match="has no replica axis"):
        tx.update({name: jnp.ones(shape) for name, shape in SHAPES.items()}, begun(tx))
