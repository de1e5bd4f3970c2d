"""Any optimizer, exactly: all that Optax exports, in every stage, against one device.

Programs are compiled with little optimisation, which changes no semantics and takes a fifth of
the time. Every transformation meets every stage on both kinds of axes: on 8 devices with one kind,
and with the other on 1, 2, 4 or 8, which changes from group to group, so that each case of the
whole matrix is met by some. All of it by all, in four times the time:
JDP_WHOLE_MATRIX=1 pytest -n 2 --timeout 1800 tests/test_any_optimizer.py
"""

import functools
import itertools
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
import reference
from jax.sharding import AxisType

import jdp

pytestmark = pytest.mark.either

GROUPS = 8
KINDS = (AxisType.Auto, AxisType.Explicit)
CHEAP = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,  # of older versions; the others know nothing else
    # Eight devices wait for one another hundreds of times; on a busy machine not only for 40 s.
    "xla_cpu_collective_call_terminate_timeout_seconds": 600,
    "xla_cpu_collective_timeout_seconds": 600,
}
# Stage and kind of axes.
CASES = list(itertools.product(range(4), KINDS))
COUNTS = (8, 4, 2, 1)
STILL = {"set_to_zero"}  # leaves parameters where they are, as it should
WHOLE = "JDP_WHOLE_MATRIX" in os.environ


def strategy(stage, inner, **options):
    if stage == 0:
        return optax.chain(jdp.all_reduce(), inner)
    if stage == 2:
        options["reduce"] = "microbatch"
    return (jdp.zero1, jdp.zero2, jdp.zero3)[stage - 1](inner, **options)


@functools.cache
def cheap():
    with warnings.catch_warnings(action="ignore"):
        return jdp.known_options(CHEAP, jdp.make_mesh(num_devices=1))


def members(group, shapes):
    txs = optimizers.transformations(shapes)
    return {name: txs[name] for name in list(txs)[group::GROUPS]}


def one_device(txs, shapes, batches=None):
    """The definition: parameters and states after the steps, and where they began."""
    tx, loss_fn = optimizers.each(txs), optimizers.loss_for(shapes)

    @functools.partial(jax.jit, compiler_options=cheap())
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    params = {name: optimizers.initial(name, shapes) for name in txs}
    state = jax.jit(tx.init, compiler_options=cheap())(params)
    for batch in batches or optimizers.batches(len(shapes)):
        params, state = step(params, state, batch)
    return host(params), host(state)


def many_devices(txs, shapes, stage, mesh, batches=None, **options):
    """The same with jdp."""
    tx, loss_fn = strategy(stage, optimizers.each(txs), **options), optimizers.loss_for(shapes)
    params = {name: optimizers.initial(name, shapes) for name in txs}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "jdp.zero. over a single device")
        state = jdp.init_state(params, tx, mesh)
    microbatch = 1 if stage >= 2 else 2  # reduced one by one, or all at once
    step = jdp.train_step(loss_fn, tx, mesh, microbatch=microbatch, compiler_options=cheap())
    for batch in batches or optimizers.batches(len(shapes)):
        state, _ = step(state, batch)
    inner = state.opt_state[1] if stage == 0 else state.opt_state.inner_state
    return host(state.params), host(inner)


def host(tree):
    """Host arrays of logical shapes; of a random key, its data. Nothing is computed on devices."""

    def one(x):
        keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if keys else x)

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, jdp.Padded))


def differences(got, want):
    """One line for each transformation whose parameters or state differ."""
    found = []
    for name in want[0]:
        for kind, ours, theirs in zip(("params", "state"), got, want, strict=True):
            assert jax.tree.structure(ours[name]) == jax.tree.structure(theirs[name])
            try:
                reference.assert_close(ours[name], theirs[name], rtol=1e-5)
            except AssertionError as error:
                found.append(f"{name}: {kind}{error}")
    return found


def configurations(group):
    """Stage, number of devices, kind of axes, which tree, and whether small leaves are split."""
    for stage, kind in CASES:
        explicit = KINDS.index(kind)
        turns = (stage + explicit + group) % 2 == 1
        count = COUNTS[(stage + group // 2 + 1) % len(COUNTS)] if turns else COUNTS[0]
        for n in COUNTS if WHOLE else (count,):
            yield stage, n, kind, (explicit + group // 2) % 2, (stage // 2 + group) % 2 == 1


def check_moves(params, shapes):
    """The steps lead somewhere: else equality would say nothing."""
    for name in params.keys() - STILL:
        pairs = zip(
            jax.tree.leaves(params[name]),
            jax.tree.leaves(optimizers.initial(name, shapes)),
            strict=True,
        )
        moved = max(np.abs(new - old).max() for new, old in pairs)
        assert moved > 1e-3, f"{name} moves by {moved}: give it other arguments in optimizers.py"


@pytest.mark.parametrize("group", range(GROUPS))
def test_five_steps_are_those_of_one_device(group):
    """Parameters and state, to 1e-5 of the largest entry of each array."""
    txs = [members(group, shapes) for shapes in optimizers.TREES]
    want = [one_device(t, shapes) for t, shapes in zip(txs, optimizers.TREES, strict=True)]
    for (params, _), shapes in zip(want, optimizers.TREES, strict=True):
        check_moves(params, shapes)
    found = []
    for stage, n, kind, tree, small in configurations(group):
        mesh = jdp.make_mesh(num_devices=n, axis_types=(kind,))
        options = {"min_size": 0} if small and stage else {}
        got = many_devices(txs[tree], optimizers.TREES[tree], stage, mesh, **options)
        where = f"stage {stage}, {n} devices, {kind}, {options}: "
        found += [where + line for line in differences(got, want[tree])]
    assert not found, "\n".join(found)


def test_groups_hold_everything_and_cases_are_all_met():
    everything = optimizers.transformations(optimizers.TREES[0])
    groups = [members(group, optimizers.TREES[0]) for group in range(GROUPS)]
    assert sorted(name for group in groups for name in group) == sorted(everything)
    met = {(stage, n, kind) for g in range(GROUPS) for stage, n, kind, *_ in configurations(g)}
    assert len(met) == len(CASES) * len(COUNTS)


def test_what_optax_exports_is_found():
    found = optimizers.find()
    assert {"adamw", "sgd", "dog", "monitor", "MultiSteps", "chain", "scale_by_muon"} <= set(found)
    assert not {"apply_updates", "GradientTransformation", "linear_schedule"} & set(found)


def test_a_new_optimizer_is_picked_up_and_one_that_needs_arguments_asks_for_a_row(monkeypatch):
    def easy(learning_rate: float, decay: float = 0.9) -> optax.GradientTransformation:
        return optax.sgd(learning_rate, decay)

    def hard(matrix: jax.Array) -> optax.GradientTransformation:
        return optax.scale(matrix)

    monkeypatch.setattr(optax, "easy", easy, raising=False)
    assert "easy" in optimizers.transformations(optimizers.TREES[0])
    monkeypatch.setattr(optax.contrib, "hard", hard, raising=False)
    with pytest.raises(AssertionError, match=r"exports hard\(matrix: .*Give it a row in tests/opt"):
        optimizers.transformations(optimizers.TREES[0])


SHAPES = optimizers.TREES[1]  # with a scalar
REFUSED = {
    name: (functools.partial(optimizers.construct, name, function, SHAPES), match)
    for name, function in optimizers.find().items()
    if (match := optimizers.REFUSED.get(name))
} | {
    "sam, opaque": (
        lambda: optax.contrib.sam(optax.sgd(1.0), optax.sgd(1.0), opaque_mode=True),
        "^sam, a transformation of the chain, .*grad_fn must be provided",
    ),
    "sm3, scalar": (lambda: optax.sm3(0.1), "^scale_by_sm3, a transformation"),
    "distance, scalar": (
        optax.scale_by_distance_over_gradients,
        r"update of params\['s'\] has the shape \(1,\)",
    ),
    "lookahead, gradients of both": (
        lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5),
        "^lookahead, a transformation",
    ),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_step_cannot_serve_is_refused_by_name(name, stage):
    """Before anything runs: the state is still there."""
    make, match = REFUSED[name]
    mesh, tx = jdp.make_mesh(), strategy(stage, make())
    params = optimizers.initial(name.partition(",")[0], SHAPES)
    state = jdp.init_state(params, tx, mesh)
    loss_fn = optimizers.loss_for(SHAPES)
    step = jdp.train_step(lambda params, batch: loss_fn({"": params}, batch), tx, mesh)
    with pytest.raises((TypeError, ValueError), match=match):
        step(state, optimizers.batches(len(SHAPES))[0])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(("stage", "kind"), CASES)
def test_a_bad_row_skips_the_step_as_on_one_device(stage, kind):
    """One infinite number in the share of one replica: all of them decide alike."""
    shapes = optimizers.TREES[stage % 2]
    batches = [batch.copy() for batch in optimizers.batches(len(shapes))]
    batches[2][9, 0] = np.inf
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optimizers.RATE))
    skips = optax.skip_not_finite
    multi = optax.MultiSteps(optax.adam(optimizers.RATE), 2, should_skip_update_fn=skips)
    txs = {
        "apply_if_finite": optax.apply_if_finite(inner, 3),
        "MultiSteps": multi.gradient_transformation(),
    }
    want = one_device(txs, shapes, batches)
    assert want[1]["apply_if_finite"].total_notfinite == 1
    check_moves(want[0], shapes)
    mesh = jdp.make_mesh(axis_types=(kind,))
    got = many_devices(txs, shapes, stage, mesh, batches, **{"min_size": 0} if stage else {})
    assert not differences(got, want)
