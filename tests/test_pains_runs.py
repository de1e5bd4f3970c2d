"""What goes wrong between programs and machines: states of pmap, generators of random numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp

pytestmark = pytest.mark.alternate


@pytest.fixture(scope="module")
def stacked():
    """What a pmap step returns: a copy of each leaf for each device."""
    tree = {"w": np.arange(3.0, dtype=np.float32), "b": [np.float32(np.nan)]}
    return jax.pmap(lambda x: x)(jax.tree.map(lambda x: np.stack([x] * 8), tree))


def test_e16_what_pmap_made_is_one_value(stacked):
    """E16 google/flax#5374: the leading axis of pmap, in states and checkpoints."""
    one = jdp.from_replicated(stacked)
    assert one["w"].tolist() == [0, 1, 2]
    assert one["b"][0].shape == ()
    key = jdp.from_replicated(jnp.stack([jax.random.key(3)] * 8))
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(3)))


def test_e16_copies_that_differ_are_named(stacked):
    apart = np.array(stacked["w"])
    apart[5, 1] = np.nextafter(apart[5, 1], 2)
    with pytest.raises(ValueError, match=r"copy 5 of \['w'\] differs from copy 0"):
        jdp.from_replicated(stacked | {"w": apart})
    with pytest.raises(ValueError, match=r"copy 1 of the array differs .* make new ones"):
        jdp.from_replicated(jax.random.split(jax.random.key(0), 8))
    for step in (np.zeros(()), np.zeros(4)):
        with pytest.raises(ValueError, match=r"first axis, but .* \"\['step'\]\": \((4,)?\)"):
            jdp.from_replicated(stacked | {"step": step})


def drawn(impl):
    return lambda: {"w": jax.random.normal(jax.random.key(0, impl=impl), (16, 8))}


def test_e18_initial_values_do_not_depend_on_the_devices():
    """E18 jax-ml/jax#40232, #21232."""
    make = drawn(None)
    for count in (2, 8):
        mesh = jdp.make_mesh(num_devices=count)
        state = jdp.init_state(make, jdp.zero3(optax.sgd(1.0), min_size=0), mesh)
        np.testing.assert_array_equal(state.params["w"], jax.jit(make)()["w"])


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_e18_a_generator_whose_values_depend_on_them_is_named(impl):
    tx, mesh = jdp.zero3(optax.sgd(1.0), min_size=0), jdp.make_mesh()
    with pytest.warns(UserWarning, match=rf"'{impl}' where jdp.zero3 splits .*threefry2x32"):
        jdp.init_state(drawn(impl), tx, mesh)
    with jax.default_prng_impl(impl), pytest.warns(UserWarning, match=f"'{impl}' where jdp.zero3"):
        jdp.init_state(drawn(None), tx, mesh)
    jdp.init_state(drawn(impl)(), tx, mesh)  # drawn whole
    jdp.init_state(drawn(impl), jdp.zero1(optax.sgd(1.0)), mesh)
