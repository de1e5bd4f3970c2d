"""`all_reduce`: against its definition, over part of the axes, narrow on the wire, and misused."""

import functools

import flax.training.train_state
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
from jdp import reduce

AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
PARAMS, LOSS, _, BATCH = reference.mlp()


@functools.cache
def mesh_of(count, kind="auto"):
    return jdp.make_mesh(num_devices=count, axis_types=(AXIS_TYPES[kind],))


def given(mesh, axes=("data",), dtype=jnp.float32, weight=None):
    """Per-replica values that are nothing like their mean."""
    count = jdp.axis_size(mesh, axes)
    random = np.random.default_rng(0)
    shapes = {"w": (16, 24), "b": (24,), "s": ()}

    def one(shape):
        value = 3 * random.normal(size=(count, *shape))
        value += np.arange(count).reshape((count,) + (1,) * len(shape))
        value = jax.device_put(value.astype(dtype), NamedSharding(mesh, P(axes)))
        return jdp.PerReplica(value, weight, axes=axes, mesh=mesh)

    return {name: one(shape) for name, shape in shapes.items()}


def reduced(tx, grads):
    return jax.jit(lambda grads: tx.update(grads, tx.init(None))[0])(grads)


@pytest.mark.parametrize("kind", AXIS_TYPES)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_mean_over_the_replica_axis(count, kind):
    grads = given(mesh_of(count, kind))
    means = reduced(jdp.all_reduce(), grads)
    reference.assert_close(means, reference.mean_gradient(grads))
    reference.assert_same_copies(means)
    for name, mean in means.items():
        assert mean.shape == grads[name].shape[1:]
        assert mean.dtype == grads[name].dtype
        assert mean.sharding.is_fully_replicated


@pytest.mark.parametrize("kind", AXIS_TYPES)
@pytest.mark.parametrize("wire", [None, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtype_of_gradient_and_of_wire(dtype, wire, kind):
    grads = given(mesh_of(8, kind), dtype=dtype)
    means = reduced(jdp.all_reduce(wire_dtype=wire), grads)
    reference.assert_same_copies(means)
    narrow = wire or dtype
    for name, mean in means.items():
        assert mean.dtype == jnp.float32  # norms and moments are taken in it
        sent = np.asarray(grads[name].value).astype(jnp.dtype(narrow)).astype(np.float64)
        want = sent.mean(0)
        # the sum is float32; the way back rounds once, to nearest, where it is narrow
        eps = 2.0**-8 if narrow == jnp.bfloat16 else 2.0**-22
        bound = eps * np.abs(want) + 2.0**-22 * np.abs(sent).max()
        assert (np.abs(np.asarray(mean, np.float64) - want) <= bound).all(), name


def test_error_of_a_bfloat16_wire():
    """Against the float32 mean: one rounding of each value, and one of their mean."""
    grads = given(mesh_of(8))
    exact = reference.mean_gradient(grads)
    got = reduced(jdp.all_reduce(wire_dtype=jnp.bfloat16), grads)
    for name, mean in got.items():
        values = np.abs(np.asarray(grads[name].value))
        bound = 2.0**-8 * (values.mean(0) + np.abs(exact[name])) * 1.001
        error = np.abs(np.asarray(mean) - exact[name])
        assert (error <= bound).all()
    assert any((np.asarray(got[name]) != exact[name].astype(np.float32)).any() for name in got)


TWO = ("node", "device")


@pytest.mark.parametrize("kind", AXIS_TYPES)
@pytest.mark.parametrize("wire", [None, jnp.float16])
@pytest.mark.parametrize("order", [("node", "device"), ("device", "node"), (TWO,), (TWO[::-1],)])
def test_one_axis_after_the_other(order, wire, kind):
    mesh = jdp.make_mesh(TWO, (2, 4), axis_types=(AXIS_TYPES[kind],) * 2)
    grads = given(mesh, TWO, weight=jnp.float32(5))
    tx = optax.chain(*[jdp.all_reduce(axis, wire_dtype=wire) for axis in order])
    means = reduced(tx, grads)
    # two roundings to float16 on the way there and two on the way back
    reference.assert_close(means, reference.mean_gradient(grads), 2e-6 if wire is None else 2e-3)
    reference.assert_same_copies(means)


def test_over_part_of_the_axes_the_result_differs_along_the_rest():
    mesh = jdp.make_mesh(TWO, (2, 4))
    grads = given(mesh, TWO, weight=jnp.float32(5))
    for axis, rest, dim in (("node", "device", 0), ("device", "node", 1)):
        partly = reduced(jdp.all_reduce(axis), grads)["w"]
        assert isinstance(partly, jdp.PerReplica)
        assert partly.axes == (rest,)
        assert float(partly.weight) == 5
        want = np.asarray(grads["w"].value).reshape(2, 4, 16, 24).mean(dim)
        np.testing.assert_allclose(partly.value, want, rtol=2e-6, atol=2e-6)
        assert partly.value.sharding.is_equivalent_to(NamedSharding(mesh, P(rest)), 3)


def test_a_model_axis_is_left_alone():
    mesh = jdp.make_mesh(("data", "model"), (4, 2))
    value = jax.random.normal(jax.random.key(0), (4, 6, 10))
    value = jax.device_put(value, NamedSharding(mesh, P("data", None, "model")))
    grads = jdp.PerReplica(value, axes=("data",), mesh=mesh)
    run = jax.jit(lambda g: jdp.all_reduce().update(g, optax.EmptyState())[0])
    mean = run(grads)
    np.testing.assert_allclose(mean, np.asarray(value).mean(0), rtol=1e-6, atol=1e-6)
    assert mean.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)
    # each device sends its own columns and no others
    found = programs.collectives(run.lower(grads).compile().as_text())
    assert [(c.kind, c.bytes) for c in found] == [("all-reduce", 4 * 6 * 10 // 2)]


def test_without_jit_and_with_nothing_to_reduce():
    grads = given(mesh_of(8))
    means, _ = jdp.all_reduce().update(grads, optax.EmptyState())
    reference.assert_close(means, reference.mean_gradient(grads))
    assert jdp.all_reduce().update({"none": None}, optax.EmptyState())[0] == {"none": None}


@pytest.mark.parametrize("wire", [None, jnp.bfloat16])
def test_a_parameter_without_entries(wire):
    mesh = mesh_of(8)
    grads = given(mesh)
    grads["empty"] = jdp.PerReplica(jnp.zeros((8, 0, 3)), axes=("data",), mesh=mesh)
    assert reduced(jdp.all_reduce(wire_dtype=wire), grads)["empty"].shape == (0, 3)
    only = {"empty": grads["empty"]}
    assert reduced(jdp.all_reduce(wire_dtype=wire), only)["empty"].shape == (0, 3)


def test_infinities_reach_every_replica():
    grads = given(mesh_of(8))
    value = grads["b"].value.at[3, 5].set(jnp.inf).at[4, 6].set(jnp.nan)
    grads["b"] = jdp.PerReplica(value, axes=("data",), mesh=mesh_of(8))
    for wire in (None, jnp.bfloat16):
        got = reduced(jdp.all_reduce(wire_dtype=wire), grads)
        assert np.flatnonzero(~np.isfinite(got["b"])).tolist() == [5, 6]
        assert np.isfinite(got["w"]).all()
        reference.assert_same_copies(got)


# misuse -------------------------------------------------------------------------------------------


@functools.cache
def real_gradients():
    return jdp.value_and_grad(LOSS, mesh_of(8))(PARAMS, BATCH)[1]


NOT_REDUCED = "one value for each replica, not reduced yet|jdp.PerReplica.*Put jdp.all_reduce"


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.adamw(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    ],
    ids=["sgd", "adamw", "momentum", "clip"],
)
def test_forgotten_in_a_plain_optax_loop(tx):
    """Whatever optax does, the parameters cannot be updated with it."""
    grads = real_gradients()

    def update():
        updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
        return optax.apply_updates(PARAMS, updates)

    with pytest.raises((TypeError, ValueError), match=NOT_REDUCED):
        update()


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adamw(0.1)], ids=["sgd", "adamw"])
def test_forgotten_in_a_flax_train_state(tx):
    state = flax.training.train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    with pytest.raises((TypeError, ValueError), match=NOT_REDUCED):
        state.apply_gradients(grads=real_gradients())


def test_flax_train_state_with_the_reduction():
    tx = optax.chain(jdp.all_reduce(), optax.sgd(0.1))
    state = flax.training.train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    state = state.apply_gradients(grads=real_gradients())
    want, _ = reference.train(LOSS, PARAMS, optax.sgd(0.1), [BATCH])
    reference.assert_close(state.params, want)


@pytest.mark.parametrize(
    "compute",
    [
        lambda g: g + 1,
        lambda g: 1 - g,
        lambda g: -g,
        lambda g: g / 2,
        lambda g: np.ones(3) * g,
        lambda g: jnp.ones(3) * g,
        lambda g: g @ g,
        lambda g: g**2,
        lambda g: g[0],
        lambda g: list(g),
        lambda g: float(g),
        lambda g: jnp.sum(g),
        lambda g: np.asarray(g),
        lambda g: jnp.asarray(g),
    ],
)
def test_computing_with_a_per_replica_value(compute):
    with pytest.raises(TypeError, match=r"\(8, 24\) is a jdp.PerReplica.*`.value`"):
        compute(given(mesh_of(8))["b"])


def test_applied_twice():
    tx = optax.chain(jdp.all_reduce(), jdp.all_reduce())
    with pytest.raises(
        ValueError,
        match=r"jdp.all_reduce received gradient \['b'\] of shape \(24,\).*already reduced",
    ):
        tx.update(given(mesh_of(8)), tx.init(None))


def test_reduced_and_unreduced_leaves_together():
    grads = given(mesh_of(8))
    grads["layer"] = {"kernel": jnp.ones((5, 4))}
    with pytest.raises(ValueError, match=r"gradient \['layer'\]\['kernel'\] of shape \(5, 4\)"):
        jdp.all_reduce().update(grads, optax.EmptyState())


def test_leaves_along_different_axes():
    mesh = jdp.make_mesh(TWO, (2, 4))
    grads = {"a": given(mesh, TWO)["b"], "b": given(mesh, ("node",))["b"]}
    with pytest.raises(
        ValueError, match=r"\['b'\], which differs along \('node',\), beside others"
    ):
        jdp.all_reduce().update(grads, optax.EmptyState())


@pytest.mark.parametrize("axis", ["model", ("data", "model"), "dat"])
def test_an_axis_the_gradients_do_not_have(axis):
    with pytest.raises(ValueError, match=r"differ along \('data',\), not along '(model|dat)'"):
        jdp.all_reduce(axis).update(given(mesh_of(8)), optax.EmptyState())


def test_no_axis_at_all():
    with pytest.raises(ValueError, match=r"axis=\(\)"):
        jdp.all_reduce(()).update(given(mesh_of(8)), optax.EmptyState())


@pytest.mark.parametrize(
    ("wire", "match"),
    [
        (jnp.int32, "wire_dtype=int32 cannot carry a mean"),
        (jnp.uint16, "wire_dtype=uint16 cannot"),
        (jnp.float64, "wire_dtype=float64 cannot.*16 or 32 bits"),
        (jnp.float8_e5m2fnuz, "wire_dtype=float8_e5m2fnuz cannot"),
        ("bf16", "wire_dtype='bf16'"),
    ],
)
def test_wire_dtypes_that_are_refused_when_it_is_built(wire, match):
    with pytest.raises((ValueError, TypeError), match=match):
        jdp.all_reduce(wire_dtype=wire)


@pytest.mark.parametrize("bucket_bytes", [0, -1, 2.5, True, "25MB", None])
def test_bucket_sizes_that_are_refused_when_it_is_built(bucket_bytes):
    with pytest.raises(ValueError, match=f"bucket_bytes={bucket_bytes!r}"):
        jdp.all_reduce(bucket_bytes=bucket_bytes)


def test_between_cpu_processes_leaves_above_1_mib_travel_alone(monkeypatch):
    """Small ones are joined; in a step joining large ones cost far more than it saved."""
    monkeypatch.setattr(reduce, "joins_leaves", lambda mesh: True)
    mesh = mesh_of(8)
    sizes = {"a": 300_000, "b": 10, "c": 20, "d": 300_000}
    grads = {
        name: jdp.PerReplica(jnp.ones((8, size)), axes=("data",), mesh=mesh)
        for name, size in sizes.items()
    }
    run = jax.jit(lambda grads: jdp.all_reduce().update(grads, optax.EmptyState())[0])
    assert programs.lowered_collectives(run.lower(grads).as_text()) == [("all-reduce", "f32")] * 3
