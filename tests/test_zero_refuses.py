"""What ZeRO's stages refuse, and in which words."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sharded
from reference import assert_close
from sharded import BATCH, INNER, PARAMS, STAGES, mesh_of

import jdp

pytestmark = pytest.mark.alternate

SPLITS = ["1", "2", "3"]
REDUCED = optax.chain(jdp.all_reduce(), INNER)


def step_with(tx, *, state_of=None, mesh=None, loss_fn=sharded.plain, params=PARAMS, axis=None):
    """One step of a transformation, on the state of another one."""
    mesh = mesh or mesh_of()
    state = jdp.init_state(params, tx if state_of is None else state_of, mesh)
    return jdp.train_step(loss_fn, tx, mesh, axis=axis)(state, BATCH)


@pytest.mark.parametrize(("stage", "other"), [("1", "3"), ("3", "1"), ("2", "1"), ("1", "2")])
def test_the_state_of_another_stage(stage, other):
    match = rf"jdp\.zero{stage} was given a state of jdp\.zero{other}.*jdp\.restage"
    with pytest.raises(ValueError, match=match):
        step_with(STAGES[stage](INNER), state_of=STAGES[other](INNER))


def test_the_state_of_no_stage():
    match = r"jdp\.zero1 was given a state that it did not make, a tuple.*jdp\.restage"
    with pytest.raises(ValueError, match=match):
        step_with(jdp.zero1(INNER), state_of=REDUCED)


@pytest.mark.parametrize("other", SPLITS)
def test_the_state_of_a_stage_for_a_transformation_without_one(other):
    with pytest.raises(ValueError, match=rf"jdp\.zero{other}.*restage"):
        step_with(REDUCED, state_of=STAGES[other](INNER))


@pytest.mark.parametrize("stage", SPLITS)
def test_init_without_a_mesh(stage):
    match = rf"jdp\.zero{stage} splits its state over a mesh, but the parameters lie on none"
    with pytest.raises(ValueError, match=match):
        STAGES[stage](INNER).init(PARAMS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: jdp.zero1(jdp.zero1(INNER)),
        lambda: jdp.zero3(optax.chain(optax.identity(), jdp.zero1(INNER))),
        lambda: optax.chain(jdp.zero1(optax.identity()), jdp.zero2(INNER)),
        lambda: optax.partition(
            {"a": jdp.zero1(INNER), "b": jdp.zero1(optax.sgd(0.1))},
            {name: "a" if name == "up" else "b" for name in PARAMS},
        ),
    ],
)
def test_two_stages(make):
    with pytest.raises(ValueError, match=r"and another ZeRO stage.*put it outermost"):
        step_with(make())


def labels():
    return {name: "a" if name == "up" else "b" for name in PARAMS}


@pytest.mark.parametrize("stage", SPLITS)
@pytest.mark.parametrize("wrapper", ["partition", "masked"])
def test_a_stage_for_some_of_the_parameters(stage, wrapper):
    tx = STAGES[stage](INNER)
    if wrapper == "partition":
        tx = optax.partition({"a": tx, "b": optax.sgd(0.1)}, labels())
    else:
        tx = optax.masked(tx, {name: label == "a" for name, label in labels().items()})
    with pytest.raises(ValueError, match=rf"jdp\.zero{stage}.*optax\.(partition|masked)"):
        step_with(tx)


@pytest.mark.parametrize("stage", SPLITS)
def test_a_clip_before_the_stage(stage):
    """It would see per-replica gradients, or parts: the norm is inside the stage's to take."""
    with pytest.raises(ValueError, match=r"before they are reduced|jdp\.Reduced|inside"):
        step_with(optax.chain(optax.clip_by_global_norm(1.0), STAGES[stage](INNER)))


AROUND = {
    "clip_by_block_rms": optax.clip_by_block_rms(0.01),
    "centralize": optax.centralize(),
    "masked by shape": optax.add_decayed_weights(
        0.1, mask=lambda p: jax.tree.map(lambda x: jnp.shape(x)[-1:] == (3,), p)
    ),
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("stage", ["1", "3"])
def test_what_follows_a_stage_sees_logical_arrays_or_is_refused(stage, name):
    """Behind zero3 updates are stored padded: a mean over them would be silently too small."""
    tx = optax.chain(STAGES[stage](optax.sgd(1.0), min_size=0), AROUND[name])
    try:
        state, _ = step_with(tx)
    except ValueError as error:
        assert stage == "3"
        assert "jdp.zero3" in str(error)  # noqa: PT017
        return
    inner = optax.chain(optax.sgd(1.0), AROUND[name])
    want = sharded.train(sharded.plain, PARAMS, inner, [BATCH])[0]
    assert_close(jdp.logical(state.params), want, 3e-6)


@pytest.mark.parametrize("stage", SPLITS)
def test_a_reduction_inside(stage):
    match = r"jdp\.all_reduce received gradient .* has no replica axis"
    with pytest.raises(ValueError, match=match):
        step_with(STAGES[stage](REDUCED))


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_reduction_before_a_stage_that_reduces_in_the_backward_pass(stage):
    with pytest.raises(ValueError, match=r"jdp\.all_reduce received gradient .* already reduced"):
        step_with(optax.chain(jdp.all_reduce(), STAGES[stage](INNER)))


@pytest.mark.parametrize("stage", SPLITS)
def test_windows_inside(stage):
    tx = STAGES[stage](jdp.multi_steps(INNER, every=2))
    with pytest.raises(ValueError, match=r"multi_steps stands inside another.*outermost"):
        step_with(tx)


def hybrid():
    return mesh_of(names=("node", "device"), shape=(2, 4))


@pytest.mark.parametrize("stage", SPLITS)
def test_gradients_along_other_axes(stage):
    match = rf"jdp\.zero{stage} splits over the axes \('device',\), but .*\('node',\)"
    with pytest.raises(ValueError, match=match):
        step_with(STAGES[stage](INNER, axis="device"), mesh=hybrid(), axis="node")


def test_gradients_that_differ_along_one_of_the_axes():
    match = r"jdp\.zero1 splits over the axes \('node', 'device'\), but .* not along 'node'"
    with pytest.raises(ValueError, match=match):
        step_with(jdp.zero1(INNER), mesh=hybrid(), axis="device")


@pytest.mark.parametrize(
    ("axis", "match"),
    [
        ("foo", r"has the axes \('data',\) and none called 'foo'"),
        (("data", "data"), r"name one axis twice"),
        ((), r"axis=\(\)|no axis|over nothing"),
    ],
)
def test_an_axis_that_cannot_be_meant(axis, match):
    with pytest.raises(ValueError, match=match):
        step_with(jdp.zero1(INNER, axis))


def test_a_moment_to_reduce_that_there_is_not():
    with pytest.raises(ValueError, match=r"zero2\(reduce='foo'\).*\"microbatch\".*\"step\""):
        jdp.zero2(INNER, reduce="foo")


@pytest.mark.parametrize("stage", SPLITS)
def test_a_wire_dtype_that_cannot_carry_a_mean(stage):
    with pytest.raises(ValueError, match=r"wire_dtype=int32 cannot carry a mean"):
        STAGES[stage](INNER, wire_dtype=jnp.int32)


@pytest.mark.parametrize("min_size", [-1, "many", 0.5, True])
def test_a_size_that_is_none(min_size):
    with pytest.raises(ValueError, match=r"min_size=.*whole number"):
        jdp.zero1(INNER, min_size=min_size)


@pytest.mark.parametrize("inner", [None, "adam", 0.1])
def test_an_inner_transformation_that_is_none(inner):
    with pytest.raises(TypeError, match=r"jdp\.zero1.*optax"):
        jdp.zero1(inner)


@pytest.mark.parametrize("stage", SPLITS)
def test_parameters_that_are_not_floating_point(stage):
    with pytest.raises(TypeError, match=r"\['count'\] has the dtype int32"):
        step_with(STAGES[stage](INNER), params=PARAMS | {"count": np.int32(3)})


@pytest.mark.parametrize("stage", ["1", "2 step"])
def test_gradients_of_other_parameters(stage):
    tx = STAGES[stage](INNER)
    opt_state = jdp.init_state(PARAMS, tx, mesh_of()).opt_state
    _, grads = jdp.value_and_grad(sharded.plain, mesh_of())(PARAMS, BATCH)
    del grads["scale"]
    with pytest.raises(ValueError, match=r"made for 6 parameters and has met a tree of 5"):
        tx.update(grads, opt_state, PARAMS)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_placement_of_other_parameters(stage):
    state = jdp.init_state(PARAMS, STAGES[stage](INNER), mesh_of())
    take = jdp.value_and_grad(sharded.plain, mesh_of())
    params = state.params | {"another": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"made for 6 parameters and has met a tree of 7"):
        take(params, BATCH, placement=state.opt_state.placement)


def test_a_state_of_another_mesh():
    tx = jdp.zero1(INNER)
    few, many = (jdp.init_state(PARAMS, tx, mesh_of(n)) for n in (4, 8))
    mixed = few._replace(opt_state=many.opt_state)
    with pytest.raises(ValueError, match=r"state\.opt_state.* lies on 8 device\(s\)"):
        jdp.train_step(sharded.plain, tx, mesh_of(4))(mixed, BATCH)


@pytest.mark.parametrize("stage", SPLITS)
def test_a_reduction_after_the_stage(stage):
    tx = optax.chain(STAGES[stage](INNER), jdp.all_reduce())
    with pytest.raises(ValueError, match=r"jdp\.(all_reduce|zero3)"):
        step_with(tx)


def test_reduced_gradients_are_not_computed_with():
    state = jdp.init_state(PARAMS, jdp.zero3(INNER), mesh_of())
    take = jdp.value_and_grad(sharded.plain, mesh_of())
    _, grads = take(state.params, BATCH, placement=state.opt_state.placement)
    with pytest.raises(TypeError, match=r"jdp\.Reduced: .*jdp\.zero2\(\.\.\.\) or jdp\.zero3"):
        grads["down"] * 2
    with pytest.raises(ValueError, match=r"jdp\.Reduced"):
        INNER.update(grads, INNER.init(PARAMS), PARAMS)
