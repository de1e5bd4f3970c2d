"""What every transformation of per-replica gradients keeps, as one table."""

import dataclasses
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import AxisType

import jdp
from jdp.split import find_placement

pytestmark = pytest.mark.either

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@dataclasses.dataclass(frozen=True)
class Case:
    """A transformation, the mesh it runs on, and its relative error of rounding."""

    tx: Any
    names: tuple[str, ...] = ("data",)
    shape: tuple[int, ...] = (8,)
    axis_types: AxisType = AUTO
    every: int = 1
    rounding: float = 2.0**-22
    split: bool = False  # gradients come reduced, for a ZeRO stage that splits them

    @functools.cached_property
    def mesh(self):
        types = (self.axis_types,) * len(self.names)
        return jdp.make_mesh(self.names, self.shape, axis_types=types)

    @functools.cached_property
    def born(self):
        return jdp.init_state(PARAMS, self.tx, self.mesh)

    @property
    def params(self):
        return self.born.params

    @property
    def state(self):
        return self.born.opt_state

    def grads_of(self, params):
        placement = find_placement(self.state) if self.split else None
        return jdp.value_and_grad(loss_fn, self.mesh)(params, BATCH, placement=placement)[1]

    @functools.cached_property
    def grads(self):
        return self.grads_of(self.params)

    @functools.cached_property
    def per_replica(self):
        return jdp.value_and_grad(loss_fn, self.mesh)(self.params, BATCH)[1]

    @functools.cached_property
    def update(self):
        return jax.jit(self.tx.update)


def with_momentum(*before):
    # the narrow parameter keeps its dtype, on purpose
    return optax.chain(*before, jdp.master_weights(optax.trace(0.9), dtype=None))


NODES = {"names": ("node", "device"), "shape": (2, 4)}
CASES = {
    "all_reduce": Case(with_momentum(jdp.all_reduce())),
    "explicit": Case(with_momentum(jdp.all_reduce()), axis_types=EXPLICIT),
    "bfloat16": Case(with_momentum(jdp.all_reduce(wire_dtype=jnp.bfloat16)), rounding=2.0**-8),
    "float16": Case(
        with_momentum(jdp.all_reduce(wire_dtype=jnp.float16)),
        axis_types=EXPLICIT,
        rounding=2.0**-11,
    ),
    "float32": Case(with_momentum(jdp.all_reduce(wire_dtype=jnp.float32, bucket_bytes=100))),
    "two_axes": Case(with_momentum(jdp.all_reduce()), **NODES),
    "one_by_one": Case(with_momentum(jdp.all_reduce("device"), jdp.all_reduce("node")), **NODES),
    "multi_steps": Case(jdp.multi_steps(with_momentum(jdp.all_reduce()), 2), every=2),
    "multi_steps_explicit": Case(
        jdp.multi_steps(with_momentum(jdp.all_reduce()), 2), every=2, axis_types=EXPLICIT
    ),
    "multi_steps_1": Case(jdp.multi_steps(with_momentum(jdp.all_reduce()), 1)),
    "multi_steps_two_axes": Case(
        jdp.multi_steps(with_momentum(jdp.all_reduce("node"), jdp.all_reduce()), 2),
        every=2,
        **NODES,
    ),
    "zero1": Case(jdp.zero1(with_momentum(), min_size=0)),
    "zero1_bfloat16": Case(
        jdp.zero1(with_momentum(), min_size=0, wire_dtype=jnp.bfloat16), rounding=2.0**-8
    ),
    "zero2": Case(jdp.zero2(with_momentum(), reduce="microbatch", min_size=0), split=True),
    "zero2_step": Case(jdp.zero2(with_momentum(), reduce="step", min_size=0), axis_types=EXPLICIT),
    "zero3": Case(jdp.zero3(with_momentum(), min_size=0), split=True),
    "zero3_explicit": Case(jdp.zero3(with_momentum(), min_size=0), axis_types=EXPLICIT, split=True),
    "zero3_per_replica": Case(jdp.zero3(with_momentum(), min_size=0)),
    "zero3_two_axes": Case(jdp.zero3(with_momentum(), "device", min_size=0), split=True, **NODES),
    "hierarchical": Case(with_momentum(jdp.hierarchical()), **NODES),
    "hierarchical_feedback": Case(
        with_momentum(jdp.hierarchical(across_wire_dtype=jnp.bfloat16, error_feedback=True)),
        axis_types=EXPLICIT,
        rounding=2.0**-8,
        **NODES,
    ),
    "power_sgd": Case(with_momentum(jdp.power_sgd(8, min_rate=0)), rounding=2.0**-18),
    "begin_with": Case(
        with_momentum(
            jdp.begin_with(
                jdp.all_reduce(wire_dtype=jnp.bfloat16, error_feedback=True),
                2,
                jdp.power_sgd(8, min_rate=0),
            )
        ),
        rounding=2.0**-8,
    ),
    "in_backward": Case(with_momentum(jdp.all_reduce_in_backward(min_size=0)), split=True),
    "in_order": Case(with_momentum(jdp.all_reduce_in_order()), axis_types=EXPLICIT, split=True),
    "noise_scale": Case(with_momentum(jdp.gradient_noise_scale(jdp.all_reduce()))),
    "multi_steps_zero3": Case(
        jdp.multi_steps(jdp.zero3(with_momentum(), min_size=0), 2), every=2, split=True
    ),
}
PARAMS = {
    "layer": {"kernel": np.linspace(-1, 1, 40, dtype=np.float32).reshape(8, 5)},
    "half": np.linspace(1, 2, 5).astype(jnp.bfloat16),
    "scalar": np.float32(0.5),
    "frozen": None,
}
BATCH = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)


def loss_fn(params, batch):
    y = jnp.tanh(batch @ params["layer"]["kernel"] + params["half"].astype(jnp.float32))
    return jnp.mean((y - params["scalar"]) ** 2)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def kinds(tree):
    return [(x.shape, x.dtype.name, x.aval.weak_type) for x in jax.tree.leaves(tree)]


def test_update_is_the_mean_of_a_whole_window(case):
    state = case.state
    for _ in range(case.every):
        updates, state = case.update(case.grads, state, case.params)
    updates = jdp.logical(updates)
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)
    is_leaf = lambda x: isinstance(x, jdp.PerReplica)  # noqa: E731
    grads = jax.tree.leaves(case.per_replica, is_leaf=is_leaf)
    for update, grad, param in zip(
        jax.tree.leaves(updates), grads, jax.tree.leaves(PARAMS), strict=True
    ):
        values = np.asarray(grad.value, np.float64)
        want = values.mean(0)
        # the values are rounded on their way there and their mean on its way back
        rounding = max(case.rounding, 2.0**-8 if grad.dtype == jnp.bfloat16 else 0)
        bound = 1.01 * rounding * (np.abs(values).mean(0) + np.abs(want))
        if find_placement(case.state) and grad.dtype == jnp.bfloat16:
            # what is sent is the new parameter, in its own dtype
            bound += 2.0**-8 * np.abs(np.asarray(param, np.float64))
        assert (np.abs(np.asarray(update, np.float64) - want) <= bound).all()


def test_update_keeps_shapes_dtypes_and_placement(case):
    updates, state = case.update(case.grads, case.state, case.params)
    assert jax.tree.structure(state) == jax.tree.structure(case.state)
    assert kinds(state) == kinds(case.state)
    for old, new in zip(jax.tree.leaves(case.state), jax.tree.leaves(state), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
    assert jax.tree.structure(updates) == jax.tree.structure(case.params)
    for param, update in zip(jax.tree.leaves(case.params), jax.tree.leaves(updates), strict=True):
        assert update.shape == param.shape
        # ZeRO hands on the difference of narrow parameters in float32, which holds it exactly
        wide = jnp.promote_types(param.dtype, jnp.float32)
        placement = find_placement(case.state)
        assert update.dtype == (wide if placement and placement.stage else param.dtype)
        assert update.sharding.is_equivalent_to(param.sharding, update.ndim)


def test_init_takes_shapes(case):
    """Abstract parameters give the same state, abstractly: what a checkpoint is restored into."""
    structs = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), case.params
    )
    with jax.set_mesh(case.mesh):
        abstract = jax.eval_shape(case.tx.init, structs)
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]  # noqa: E731
    assert shapes(abstract) == shapes(case.state)
    assert jax.tree.structure(abstract) == jax.tree.structure(case.state)


def test_the_second_call_does_not_recompile(case):
    update = jax.jit(case.tx.update)
    state = case.state
    for _ in range(3):
        _, state = update(case.grads, state, case.params)
    assert update._cache_size() == 1


def test_replicas_hold_the_same_bits(case):
    state = case.state
    for _ in range(case.every):
        updates, state = case.update(case.grads, state, case.params)
    assert any(np.any(np.asarray(u)) for u in jax.tree.leaves(updates))
    reference.assert_same_copies((updates, state))


def test_survives_scan_and_donation(case):
    """Several steps as one loop, its state given away; equal to the steps one by one."""

    def step(carry, _):
        params, state = carry
        grads = case.grads_of(params)
        updates, state = case.tx.update(grads, state, params)
        return (optax.apply_updates(params, jax.tree.map(lambda u: -0.1 * u, updates)), state), None

    @functools.partial(jax.jit, donate_argnums=0)
    def run(carry):
        return jax.lax.scan(step, carry, length=2 * case.every)[0]

    copy = functools.partial(jax.tree.map, jnp.copy)
    looped, state = run(copy((case.params, case.state)))
    carry = (case.params, case.state)
    one = jax.jit(lambda carry: step(carry, None)[0])
    for _ in range(2 * case.every):
        carry = one(carry)
    reference.assert_close(looped, carry[0])
    assert kinds(state) == kinds(carry[1])


def test_the_state_survives_the_host(case):
    """To NumPy, through pickle, and back to its place; the next update is the same to the bit."""
    _, state = case.update(case.grads, case.state, case.params)
    host = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, state)))
    restored = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), host, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    want = case.update(case.grads, state, case.params)
    got = case.update(case.grads, restored, case.params)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_gradient_of_zero_is_an_update_of_zero(case):
    zeros = jax.tree.map(jnp.zeros_like, case.grads)
    updates, _ = case.update(zeros, case.state, case.params)
    assert not any(np.any(np.asarray(u)) for u in jax.tree.leaves(updates))


def test_extra_arguments_are_accepted(case):
    """As optax passes them to every transformation of a chain."""
    optax.with_extra_args_support(case.tx).update(case.grads, case.state, case.params, value=1.0)
