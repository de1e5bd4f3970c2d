"""Rematerialisation by name, and gathered parameters that are gathered again."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close, gradient, mean_gradient, mlp

import jdp
from jdp.remat import checkpoint_policy, policy_names, refuse_gathers

LAYERS, WIDTH = 6, 128


def test_policies_are_told_from_functions_that_make_them():
    names = policy_names()
    assert {"everything_saveable", "nothing_saveable", "dots_saveable"} <= set(names)
    assert "dots_with_no_batch_dims_saveable" in names
    for name in dir(jax.checkpoint_policies):
        if name.startswith(("save_", "offload_")):
            assert name not in names, name


@pytest.mark.parametrize("remat", [False, None])
def test_without_remat_there_is_no_policy(remat):
    assert checkpoint_policy(remat) is None


def test_true_a_name_and_a_policy_are_policies():
    policies = jax.checkpoint_policies
    assert checkpoint_policy(True) is policies.nothing_saveable
    for name in policy_names():
        assert checkpoint_policy(name) is getattr(policies, name)
    mine = policies.save_only_these_names("x")
    assert checkpoint_policy(mine) is mine


@pytest.mark.parametrize(
    ("remat", "error", "match"),
    [
        ("dots", ValueError, r"'dots' is no rematerialisation policy .*dots_saveable"),
        ("save_only_these_names", ValueError, r"makes a policy from arguments.*\.save_only_these"),
        ("__class__", ValueError, "is no rematerialisation policy"),
        (3, TypeError, "remat=3 is a int"),
    ],
)
def test_what_is_no_policy_is_refused(remat, error, match):
    _, loss, _, _ = mlp()
    with pytest.raises(error, match=match):
        jdp.value_and_grad(loss, jdp.make_mesh(), remat=remat)


@pytest.mark.parametrize("remat", [True, *policy_names()])
def test_remat_changes_no_gradient(remat):
    params, loss, _, batch = mlp()
    want = gradient(loss, params, batch)[1]
    _, grads = jdp.value_and_grad(loss, jdp.make_mesh(), remat=remat)(params, batch)
    assert_close(mean_gradient(grads), want, rtol=2e-6)


def test_remat_keeps_what_its_policy_keeps():
    """The forward dots are in the program once if kept, twice if not."""

    def dots(remat):
        params, loss, _, batch = mlp()
        step = jdp.value_and_grad(loss, jdp.make_mesh(), remat=remat)
        return jax.jit(step).lower(params, batch).as_text().count("stablehlo.dot_general")

    assert dots("dots_saveable") == dots(False)
    assert dots("nothing_saveable") > dots(False)


# A layer gathers its weight, the rows of which lie on the devices, and uses it in another guise.


def layer(x, part, dtype):
    weight = jax.lax.all_gather(part, "data", tiled=True).astype(dtype)
    weight = weight.T.reshape(-1).reshape(weight.shape)
    return jnp.tanh(x @ weight.astype(x.dtype))


def unrolled(parts, x, wrap=lambda f: f, dtype=jnp.bfloat16):
    body = wrap(functools.partial(layer, dtype=dtype))
    for part in parts:
        x = body(x, part)
    return jnp.mean(x**2)


def scanned(parts, x, wrap=lambda f: f, dtype=jnp.bfloat16):
    body = wrap(functools.partial(layer, dtype=dtype))
    return jnp.mean(jax.lax.scan(lambda x, part: (body(x, part), None), x, parts)[0] ** 2)


def program(loss, mesh, kept=None, width=WIDTH):
    """Its gradient on a mesh, for shapes; `kept` receives the shapes kept for the backward pass."""

    def local(parts, x):
        _, pull = jax.vjp(loss, parts, x)
        if kept is not None:
            kept.extend(leaf.shape for leaf in jax.tree.leaves(pull))
        return jax.grad(loss)(parts, x)

    spec = P(None, "data")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec, P("data")), out_specs=spec)
    shape = lambda dims, spec: jax.ShapeDtypeStruct(  # noqa: E731
        dims, jnp.float32, sharding=NamedSharding(mesh, spec)
    )
    parts = shape((LAYERS, width, width), spec)
    return jax.jit(mapped).lower(parts, shape((mesh.size * 8, width), P("data")))


def gathers(text):
    return len(re.findall(r"stablehlo.all_gather|= \S+ all-gather(?:-start)?\(", text))


def is_weight(shape):
    return np.prod(shape) >= WIDTH * WIDTH


@pytest.mark.parametrize("policy", [None, "dots_saveable", "everything_saveable"])
def test_no_gathered_weight_is_kept_in_any_guise(policy):
    mesh, policy = jdp.make_mesh(), policy and checkpoint_policy(policy)
    kept: list = []
    program(unrolled, mesh, kept)
    assert sum(map(is_weight, kept)) >= LAYERS
    kept, policy = [], refuse_gathers(policy)  # shapes are learned from the gathers
    lowered = program(jax.checkpoint(unrolled, policy=policy), mesh, kept)
    assert kept
    assert sum(map(is_weight, kept)) == 0
    # once more for each layer but the first: no gradient is asked for what comes before it
    assert gathers(lowered.as_text()) >= 2 * LAYERS - 1


def test_what_the_given_policy_keeps_is_still_kept():
    """Layer outputs before tanh, [8, WIDTH], are kept by name only if the policy says so."""

    def counted(policy):
        kept: list = []
        program(jax.checkpoint(unrolled, policy=refuse_gathers(policy)), jdp.make_mesh(), kept)
        return kept.count((8, WIDTH))

    policies = jax.checkpoint_policies
    # the batch itself, and with dots each layer's product but the last... none with nothing kept
    assert counted(policies.nothing_saveable) == 1
    assert counted(policies.dots_saveable) >= LAYERS


def test_shapes_that_are_given_are_refused_without_a_gather():
    keeps = refuse_gathers(None, {(4, 8)})
    operand = jax.core.ShapedArray((4, 8), jnp.float32)
    other = jax.core.ShapedArray((4, 9), jnp.float32)
    transpose = jax.make_jaxpr(jnp.transpose)(jnp.ones((4, 8))).eqns[0]
    asked = functools.partial(keeps, transpose.primitive, **transpose.params)
    assert not asked(operand)
    assert asked(other)
    again = jax.core.ShapedArray((8, 4), jnp.float32)
    assert not asked(again)  # the transposed shape, learned from the first


def rematted(loss, *, inside):
    if inside:  # a layer at a time
        wrap = functools.partial(jax.checkpoint, policy=refuse_gathers(), prevent_cse=False)
        return functools.partial(loss, wrap=wrap)
    return jax.checkpoint(loss, policy=refuse_gathers())


def test_a_scan_gathers_again_layer_by_layer_only_if_its_body_is_rematerialised():
    """Around the scan, the layers are all gathered before the backward pass, and lie stacked."""
    mesh = jdp.make_mesh()
    found = {}
    for name, loss in {
        "kept": scanned,
        "around": rematted(scanned, inside=False),
        "inside": rematted(scanned, inside=True),
        "both": jax.checkpoint(rematted(scanned, inside=True), policy=refuse_gathers()),
    }.items():
        compiled = program(loss, mesh).compile()
        found[name] = gathers(compiled.as_text()), compiled.memory_analysis().temp_size_in_bytes
    assert [found[name][0] for name in ("kept", "around", "inside", "both")] == [1, 2, 2, 2]
    stack = (LAYERS - 1) * WIDTH * WIDTH * 2  # at least so much, as bfloat16
    assert found["around"][1] >= found["kept"][1]
    assert found["inside"][1] <= found["kept"][1] - stack
    assert found["both"][1] <= found["kept"][1] - stack


@pytest.mark.parametrize("loss", [unrolled, scanned])
@pytest.mark.parametrize("inside", [True, False])
def test_gathering_again_changes_no_gradient(loss, inside):
    mesh = jdp.make_mesh()
    keys = jax.random.split(jax.random.key(0))
    parts = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 8
    x = jax.random.normal(keys[1], (mesh.size, WIDTH))
    spec = P(None, "data")

    def grads(loss):
        run = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(spec, P("data")), out_specs=spec)
        return jax.jit(run)(parts, x)

    exact = functools.partial(loss, dtype=jnp.float32)  # bfloat16 is rounded where XLA likes
    assert_close(grads(rematted(exact, inside=inside)), grads(exact), rtol=1e-6)


@pytest.mark.aot
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_a_scan_holds_one_layer_at_a_time_on_tpu_and_gpu(platform, monkeypatch):
    mesh = Mesh(np.array(topologies.devices(platform, monkeypatch)), ("data",))
    width, sizes = 4096, {}  # a TPU keeps smaller ones on chip
    for name, loss in (("kept", scanned), ("again", rematted(scanned, inside=True))):
        compiled = program(loss, mesh, width=width).compile()
        sizes[name] = compiled.memory_analysis().temp_size_in_bytes
    assert sizes["again"] <= sizes["kept"] - (LAYERS - 2) * width * width * 2
