"""What may stand before the reduction: nothing that computes. What may stand after it: anything.

A13: horovod/horovod#1346 clipped before the all-reduce in one framework and after it in another.
Everything here is traced and nothing compiled.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from jdp.order import check_order

PARAMS, LOSS, _, BATCH = reference.mlp()
BATCH = {name: BATCH[name] for name in ("x", "y")}
MASK = {"w1": True, "b1": False, "w2": True}
LABELS = {"w1": "matrix", "b1": "vector", "w2": "matrix"}
SGD = optax.sgd(0.1)


@functools.cache
def mesh_of(names=("data",), shape=None):
    return jdp.make_mesh(names, shape)


def lower(tx, mesh=None, loss=LOSS):
    """Traces a step with this transformation, and with it the check."""
    mesh = mesh or mesh_of()
    params = jdp.replicate(PARAMS, mesh)
    step = jdp.train_step(loss, tx, mesh)
    opt_state = jdp.replicate(tx.init(params), mesh)
    return step.lower(jdp.TrainState(np.int32(0), params, opt_state), BATCH)


def reducing(*before):
    return optax.chain(*before, jdp.all_reduce(), SGD)


def by_leaf(fn):
    return optax.stateless(lambda updates, params: jax.tree.map(fn, updates))


def branching(updates, params):
    """Scales if any entry is large, in a branch."""
    large = jnp.max(jnp.abs(updates["b1"].value)) > 1
    halve = lambda tree: jax.tree.map(lambda g: g / 2, tree)  # noqa: E731
    return jax.lax.cond(large, halve, lambda tree: tree, updates)


BEFORE = {
    "clip_by_global_norm": (optax.clip_by_global_norm(1.0), "square|integer_pow|mul"),
    "clip": (optax.clip(1.0), "max|min|clamp"),
    "clip_by_block_rms": (optax.clip_by_block_rms(1.0), "mul|square|div|integer_pow"),
    "scale": (optax.scale(2.0), "mul"),
    "normalise": (optax.normalize_by_update_norm(), "square|integer_pow|mul"),
    "zero_nans": (optax.zero_nans(), "ne|is_nan|select_n"),
    "sign": (optax.scale_by_sign(), "sign"),
    "threshold": (by_leaf(lambda g: jnp.where(g > 0, 1.0, -1.0)), "gt|select_n"),
    "noise": (optax.add_noise(0.1, 0.5, 0), "add"),
    "centralize": (optax.centralize(), "reduce_sum|sub|div"),
    "cast": (by_leaf(lambda g: g.astype(jnp.bfloat16)), "convert_element_type"),
    "jitted": (by_leaf(jax.jit(lambda g: g / 2)), "div"),
    "in_a_branch": (optax.stateless(branching), "abs|div"),
    "in_a_loop": (
        by_leaf(lambda g: jax.lax.fori_loop(0, 3, lambda i, x: x * 0.5, g)),
        "scan|while",
    ),
    "rematerialised": (by_leaf(jax.checkpoint(lambda g: g * 2)), "mul|checkpoint|remat2?"),
    "custom_gradient": (by_leaf(jax.nn.relu), "max|custom_jvp_call"),
}


@pytest.mark.parametrize("name", BEFORE)
def test_computing_before_the_reduction_is_refused(name):
    tx, primitive = BEFORE[name]
    with pytest.raises(
        ValueError,
        match=rf"computes with per-replica gradients \('({primitive})'\) before they are reduced"
        r".*Put the reduction first: optax.chain\(jdp.all_reduce\(\)",
    ):
        lower(reducing(tx))


@pytest.mark.parametrize("name", ["clip_by_global_norm", "scale", "in_a_branch"])
def test_also_inside_an_accumulation(name):
    with pytest.raises(ValueError, match="before they are reduced"):
        lower(jdp.multi_steps(reducing(BEFORE[name][0]), 2))


def test_between_two_reductions():
    mesh = mesh_of(("node", "device"), (2, 4))
    tx = optax.chain(
        jdp.all_reduce("device"), optax.clip_by_global_norm(1.0), jdp.all_reduce("node"), SGD
    )
    with pytest.raises(ValueError, match="before they are reduced"):
        lower(tx, mesh)
    lower(optax.chain(jdp.all_reduce("device"), jdp.all_reduce("node"), SGD), mesh)


@pytest.mark.parametrize(
    "tx",
    [
        optax.add_decayed_weights(0.1),
        optax.adaptive_grad_clip(0.1),
        optax.trace(0.9),
        optax.scale_by_adam(),
    ],
    ids=["decay", "agc", "trace", "adam"],
)
def test_what_needs_the_parameters_cannot_stand_before_it(tx):
    """Their shapes do not fit, and the sentence says why."""
    with pytest.raises(
        ValueError, match=r"one gradient for each replica: .*Put jdp.all_reduce\(\)"
    ):
        lower(reducing(tx))


NOTHING_REDUCES = {
    "sgd": SGD,
    "adamw": optax.adamw(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), SGD),
    "identity": optax.identity(),
    "adafactor": optax.adafactor(0.1),
    "lamb": optax.lamb(0.1),
    "inject": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    "masked": optax.masked(SGD, MASK),
    "partition": optax.partition({"matrix": SGD, "vector": optax.adam(1.0)}, LABELS),
    "reduces_a_part": optax.chain(optax.masked(jdp.all_reduce(), MASK), SGD),
    "optax_multi_steps": optax.MultiSteps(SGD, 2).gradient_transformation(),
    "multi_steps": jdp.multi_steps(SGD, 2),
    "multi_steps_adam": jdp.multi_steps(optax.adam(0.1), 2),
    "apply_if_finite_around": optax.apply_if_finite(reducing(), 3),
}


@pytest.mark.parametrize("name", NOTHING_REDUCES)
def test_forgetting_the_reduction(name):
    with pytest.raises(
        ValueError,
        match=r"received one gradient for each replica: nothing in the chain reduces them",
    ):
        lower(NOTHING_REDUCES[name])


def test_reducing_twice():
    with pytest.raises(ValueError, match=r"received gradient \['b1'\] of shape \(24,\).*already"):
        lower(optax.chain(jdp.all_reduce(), jdp.all_reduce(), SGD))


@pytest.mark.parametrize(
    "tx",
    [
        optax.MultiSteps(reducing(), 2).gradient_transformation(),
        optax.flatten(optax.chain(jdp.all_reduce(), optax.adam(0.1))),
    ],
    ids=["MultiSteps", "flatten"],
)
def test_wrappers_that_lose_the_replica_axis(tx):
    with pytest.raises(ValueError, match=r"jdp.all_reduce received .* no replica axis"):
        lower(tx)


ALLOWED = {
    "clip": optax.chain(jdp.all_reduce(), optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "masked": optax.chain(jdp.all_reduce(), optax.masked(optax.adam(0.1), MASK)),
    "partition": optax.chain(jdp.all_reduce(), NOTHING_REDUCES["partition"]),
    "partition_around": optax.partition({"matrix": reducing(), "vector": reducing()}, LABELS),
    "inject": optax.chain(jdp.all_reduce(), NOTHING_REDUCES["inject"]),
    "inject_around": optax.inject_hyperparams(
        lambda lr: optax.chain(jdp.all_reduce(), optax.sgd(lr))
    )(lr=0.1),
    "inject_schedule": optax.chain(
        jdp.all_reduce(),
        optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1.0, 0.0, 10)),
    ),
    "named_chain": optax.named_chain(("reduce", jdp.all_reduce()), ("sgd", SGD)),
    "apply_if_finite": optax.chain(jdp.all_reduce(), optax.apply_if_finite(optax.adam(0.1), 3)),
    "optax_multi_steps": optax.chain(
        jdp.all_reduce(), optax.MultiSteps(SGD, 2).gradient_transformation()
    ),
    "flatten": optax.chain(jdp.all_reduce(), optax.flatten(optax.adam(0.1))),
    "muon": optax.chain(jdp.all_reduce(), optax.contrib.muon(0.1)),
    "adafactor": optax.chain(jdp.all_reduce(), optax.adafactor(0.1)),
    "narrow": optax.chain(jdp.all_reduce(wire_dtype=jnp.bfloat16), optax.clip(1.0), SGD),
    "multi_steps": jdp.multi_steps(
        optax.chain(jdp.all_reduce(), optax.clip_by_global_norm(1.0), optax.adamw(0.1)), 2
    ),
    "multi_steps_masked": jdp.multi_steps(
        optax.chain(jdp.all_reduce(), optax.masked(optax.adam(0.1), MASK)), 2
    ),
    "looking_is_no_touching": reducing(
        optax.stateless(lambda updates, params: (jax.tree.map(jnp.isfinite, updates), updates)[1])
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_no_false_alarm(name):
    lower(ALLOWED[name])


@pytest.mark.parametrize("microbatch", [1, 4, None])
def test_no_false_alarm_about_the_gradient_itself(microbatch):
    params = jdp.replicate(PARAMS, mesh_of())
    tx = reducing()
    for remat in (False, True):
        step = jdp.train_step(LOSS, tx, mesh_of(), microbatch=microbatch, remat=remat)
        step.lower(jdp.TrainState(np.int32(0), params, tx.init(params)), BATCH)


def test_bf16_parameters_and_a_model_axis():
    mesh = mesh_of(("data", "model"), (4, 2))
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    params = jdp.replicate(params, mesh)
    params["w1"] = jax.device_put(params["w1"], NamedSharding(mesh, P(None, "model")))
    tx = reducing()
    step = jdp.train_step(LOSS, tx, mesh)
    step.lower(jdp.TrainState(np.int32(0), params, tx.init(params)), BATCH)


def test_the_check_alone_on_a_loop_of_ones_own():
    """Without the step builder: a jitted flax-like update."""
    grad_fn = jdp.value_and_grad(LOSS, mesh_of())

    def update(params, batch, *, tx):
        grads = grad_fn(params, batch)[1]
        return tx.update(grads, tx.init(params), params)[0]

    good = jax.jit(functools.partial(update, tx=reducing())).trace(PARAMS, BATCH)
    check_order(good.jaxpr.jaxpr)
    bad = jax.jit(functools.partial(update, tx=reducing(optax.scale(2.0)))).trace(PARAMS, BATCH)
    with pytest.raises(ValueError, match="'mul'"):
        check_order(bad.jaxpr.jaxpr)
