"""What cannot be meant with local steps, each said in a sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import mlp

import jdp

pytestmark = pytest.mark.alternate

PARAMS, LOSS, _, BATCH = mlp()
ADAM = optax.adam(1e-2)
OUTER = optax.sgd(0.7)


@pytest.mark.parametrize("every", [0, -3, 2.0, True, None])
def test_every_is_a_positive_whole_number(every):
    with pytest.raises(ValueError, match=r"jdp.local_sgd got every=.* whole number, at least 1"):
        jdp.local_sgd(ADAM, every)
    with pytest.raises(ValueError, match=r"jdp.diloco got every=.* whole number, at least 1"):
        jdp.diloco(ADAM, OUTER, every)


def test_other_numbers_are_whole_too():
    with pytest.raises(ValueError, match="got start=-1; it must be a whole number, at least 0"):
        jdp.local_sgd(ADAM, 4, start=-1)
    with pytest.raises(ValueError, match="got fragments=0; it must be a whole number, at least 1"):
        jdp.diloco(ADAM, OUTER, 4, fragments=0)
    with pytest.raises(ValueError, match="start=2 and every=1, with which all calls are synchr"):
        jdp.diloco(ADAM, OUTER, 1, start=2)
    with pytest.raises(ValueError, match="fragments=5 and every=4: each fragment has a call"):
        jdp.diloco(ADAM, OUTER, 4, fragments=5)
    with pytest.raises(ValueError, match="fragments=4, but the parameters are 3 leaves"):
        jdp.init_state(PARAMS, jdp.diloco(ADAM, OUTER, 4, fragments=4), jdp.make_mesh())


@pytest.mark.parametrize("what", ["inner", "outer", "reduce"])
def test_transformations_are_transformations(what):
    given = {"inner": ADAM, "outer": OUTER, "every": 4} | {what: 0.1}
    with pytest.raises(TypeError, match=f"given a float as `{what}`, where an optax"):
        jdp.diloco(**given)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (optax.chain(jdp.all_reduce(), ADAM), "a reduction stands in `inner`.*Take it out"),
        (jdp.zero1(ADAM), "jdp.zero1 stands in `inner`.*could be split"),
        (jdp.multi_steps(ADAM, 2), "multi_steps stands in `inner`.*optax.MultiSteps"),
        (jdp.dynamic_loss_scale(ADAM), "dynamic_loss_scale stands in `inner`.*jdp.compute_in"),
        (jdp.local_sgd(ADAM, 2), "local steps stand in `inner`, inside local steps"),
        (optax.contrib.reduce_on_plateau(), "a branch or a loop that gives a constant .*jnp.where"),
    ],
)
def test_what_needs_all_replicas_is_refused_inside(inner, message):
    mesh, tx = jdp.make_mesh(), jdp.local_sgd(inner, 3)
    with pytest.raises((ValueError, TypeError), match=message):
        jdp.train_step(LOSS, tx, mesh)(jdp.init_state(PARAMS, tx, mesh), BATCH)


def test_wide_copies_would_undo_agreements():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    tx = jdp.local_sgd(jdp.master_weights(ADAM), 3)
    with pytest.raises(ValueError, match=r"master_weights stands in `inner`.*undo every agreement"):
        jdp.init_state(params, tx, jdp.make_mesh())


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        (jdp.zero2(OUTER), "jdp.zero2 stands in `outer`.*jdp.zero1"),
        (jdp.multi_steps(OUTER, 2), "multi_steps stands in `outer`"),
    ],
)
def test_what_cannot_be_outside_is_refused(outer, message):
    with pytest.raises(ValueError, match=message):
        jdp.init_state(PARAMS, jdp.diloco(ADAM, outer, 3), jdp.make_mesh())


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.chain(tx, optax.clip(1.0)),
        lambda tx: jdp.multi_steps(tx, 2),
        jdp.skip_nonfinite,
        jdp.dynamic_loss_scale,
        jdp.zero1,
    ],
    ids=["chain", "multi_steps", "skip_nonfinite", "dynamic_loss_scale", "zero1"],
)
def test_local_steps_are_outermost(around):
    with pytest.raises(ValueError, match=r"local_sgd or jdp.diloco stands inside .*outermost"):
        jdp.init_state(PARAMS, around(jdp.local_sgd(ADAM, 3)), jdp.make_mesh())


def test_a_reduction_must_end_the_replica_axis():
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    tx = jdp.diloco(ADAM, OUTER, 3, reduce=jdp.all_reduce("device"))
    with pytest.raises(ValueError, match="`reduce` that leaves one value for each replica"):
        jdp.train_step(LOSS, tx, mesh)(jdp.init_state(PARAMS, tx, mesh), BATCH)


def test_states_and_parameters_of_other_transformations_are_refused():
    mesh, tx = jdp.make_mesh(), jdp.local_sgd(ADAM, 3)
    plain = optax.chain(jdp.all_reduce(), ADAM)
    local, state = (jdp.init_state(PARAMS, t, mesh) for t in (tx, plain))
    with pytest.raises(ValueError, match="was given a state that it did not make"):
        jdp.train_step(LOSS, tx, mesh)(state, BATCH)
    with pytest.raises(ValueError, match=r"made for local steps.*Go on from their mean"):
        jdp.train_step(LOSS, plain, mesh)(local, BATCH)
    with pytest.raises(ValueError, match=r"made for local steps|a state that it did not make"):
        jdp.train_step(LOSS, jdp.zero1(ADAM), mesh)(local, BATCH)
    grads = jdp.value_and_grad(LOSS, mesh)(PARAMS, BATCH)[1]
    with pytest.raises(ValueError, match=r"the parameter \['b1'\], which has no replica axis"):
        tx.update(grads, local.opt_state, PARAMS)
    with pytest.raises(ValueError, match=r"jdp.local_sgd needs the parameters"):
        tx.update(grads, local.opt_state)
    with pytest.raises(ValueError, match="which has no replica axis: it is already reduced"):
        tx.update(PARAMS, local.opt_state, local.params)


def test_gradients_differ_along_the_axes_of_the_steps():
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    tx = jdp.local_sgd(ADAM, 3)
    state = jdp.init_state(PARAMS, tx, mesh)
    with pytest.raises(ValueError, match=r"differ along the mesh axes .* but the batch is split"):
        jdp.train_step(LOSS, tx, mesh, axis="device")(state, BATCH)
    grads = jdp.value_and_grad(LOSS, mesh, axis="device")(PARAMS, BATCH)[1]
    with pytest.raises(ValueError, match=r"along .*'node'.*Give jdp.local_sgd and"):
        tx.update(grads, state.opt_state, state.params)


def test_init_needs_a_mesh():
    with pytest.raises(ValueError, match=r"jdp.diloco keeps parameters for each replica.*the mesh"):
        jdp.diloco(ADAM, OUTER, 3).init(PARAMS)


def test_a_stage_that_splits_all_of_the_outer_state_has_no_fragments():
    outer = jdp.zero1(optax.sgd(0.7))
    tx = jdp.diloco(optax.sgd(0.1), outer, every=4, fragments=2)
    params = {"a": jnp.ones(600), "b": jnp.ones(600)}
    with pytest.raises(ValueError, match=r"fragments=2 with jdp.zero1 in `outer`"):
        jdp.init_state(params, tx, jdp.make_mesh())


@pytest.mark.parametrize("every", [1, 2])
def test_nodes_agree_by_a_reduction_over_their_axis(every):
    """Also with every=1, where gradients are what is reduced."""
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    reduce = jdp.top_k(1.0, axis="node")
    tx = jdp.local_sgd(optax.sgd(1.0), every, axis="node", reduce=reduce)
    step = jdp.train_step(lambda params, x: jnp.mean(x @ params["w"]), tx, mesh)
    state = jdp.init_state({"w": jnp.zeros(3)}, tx, mesh)
    x = np.arange(48, dtype=np.float32).reshape(16, 3) / 8
    for _ in range(every):
        state, _ = step(state, x)
    np.testing.assert_allclose(jdp.agreed(state.params)["w"], -every * x.mean(0), rtol=1e-6)


def test_a_check_of_the_loss_takes_the_agreed_parameters():
    loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)  # noqa: E731
    mesh = jdp.make_mesh()
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    params = {"w": jdp.PerReplica(jnp.asarray(rows), axes=("data",), mesh=mesh)}
    assert jdp.check_against_one_device(loss_fn, params, np.eye(16, 3, dtype="f4"), mesh) < 1e-4
