"""Parameters that a "model" axis of the user's splits, on Auto and on Explicit axes: JAX refuses to
flatten or join arrays there, and sums of 16 bits beside Auto axes end the process on CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from jdp.collectives import mean

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
RNG = np.random.default_rng(0)
PARAMS = {"b": np.zeros(3, np.float32), "w": np.zeros((64, 32), np.float32)}
BATCH = {
    "x": RNG.normal(size=(8, 64)).astype(np.float32),
    "y": RNG.normal(size=(8, 32)).astype(np.float32),
}


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2) + jnp.mean(params["b"] - 1) ** 2


TRANSFORMATIONS = {
    "bfloat16": lambda: jdp.all_reduce(wire_dtype=jnp.bfloat16),
    "int8": lambda: jdp.all_reduce(wire_dtype=jnp.int8),
    "int8, feedback": lambda: jdp.all_reduce(wire_dtype=jnp.int8, error_feedback=True),
    "16 bits added up": lambda: jdp.all_reduce(wire_dtype=jnp.bfloat16, exact_sum=False),
    "power_sgd": lambda: jdp.power_sgd(2),
    "top_k": lambda: jdp.top_k(0.1),
    "random_k": lambda: jdp.random_k(0.1),
    "sign": lambda: jdp.sign(),
    "in order": lambda: jdp.all_reduce_in_order(),
}
STAGES = {
    "zero1": lambda inner: jdp.zero1(inner, min_size=0),
    "zero2, bfloat16": lambda inner: jdp.zero2(inner, wire_dtype=jnp.bfloat16, min_size=0),
    "local": lambda inner: jdp.local_sgd(inner, 2, reduce=jdp.all_reduce(wire_dtype=jnp.bfloat16)),
}


def trained(tx, types):
    """Parameters after two steps on four replicas of two devices each."""
    mesh = jdp.make_mesh(("data", "model"), (4, 2), axis_types=types)
    split = NamedSharding(mesh, P(None, "model"))
    params = PARAMS | {"w": jax.device_put(PARAMS["w"], split)}
    step, state = jdp.train_step(loss_fn, tx, mesh), jdp.init_state(params, tx, mesh)
    for _ in range(2):
        state, _ = step(state, BATCH)
    return jdp.agreed(state.params)


@pytest.mark.parametrize("name", [*TRANSFORMATIONS, *STAGES])
def test_parameters_split_by_an_explicit_axis(name):
    inner = optax.sgd(0.1)
    tx = STAGES[name](inner) if name in STAGES else optax.chain(TRANSFORMATIONS[name](), inner)
    want, got = (trained(tx, (kind, kind)) for kind in (AUTO, EXPLICIT))
    assert np.abs(want["w"]).max() > 0.003
    for key in PARAMS:  # the compilers' ways to place what is between differ: so do roundings
        np.testing.assert_allclose(got[key], want[key], rtol=1e-5, atol=1e-6)
    assert {s.data.shape for s in got["w"].addressable_shards} == {(64, 16)}


@pytest.mark.parametrize("name", ["int8, feedback", "zero2, bfloat16", "16 bits added up"])
def test_an_explicit_axis_beside_auto_data_axes(name):
    inner = optax.sgd(0.1)
    tx = STAGES[name](inner) if name in STAGES else optax.chain(TRANSFORMATIONS[name](), inner)
    want, got = (trained(tx, (AUTO, kind)) for kind in (AUTO, EXPLICIT))
    for key in PARAMS:
        np.testing.assert_allclose(got[key], want[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_the_mean_in_a_shard_map_of_ones_own(kind):
    mesh = jdp.make_mesh(("data", "model"), (4, 2), axis_types=(kind, kind))
    x = RNG.normal(size=(4, 16, 8)).astype(np.float32)
    placed = jax.device_put(x, NamedSharding(mesh, P("data", None, "model")))
    run = jax.shard_map(
        lambda x: mean(x[0], "data", wire_dtype=jnp.bfloat16),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
        axis_names={"data"},
    )
    bound = 2.0**-8 * (np.abs(x).mean(0) + np.abs(x.mean(0))) * 1.01  # of each sender, and the mean
    assert (np.abs(np.asarray(jax.jit(run)(placed)) - x.mean(0, np.float64)) <= bound).all()


def test_16_bits_added_up_beside_an_auto_axis():
    mesh = jdp.make_mesh(("data", "model"), (4, 2))
    x = RNG.normal(size=(4, 16, 8)).astype(np.float32)
    run = jax.shard_map(
        lambda x: mean(x[0], "data", wire_dtype=jnp.bfloat16, exact_sum=False),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
        axis_names={"data"},
    )
    got = np.asarray(jax.jit(run)(x), np.float64)
    assert (np.abs(got - x.mean(0, np.float64)) <= 5 * 2.0**-8 * np.abs(x).mean(0)).all()
