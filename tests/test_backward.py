"""Gradients reduced in the backward pass: the same step, sent once, where layers arise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sharded
from jax.sharding import AxisType
from programs import collectives
from reference import assert_close

import jdp

pytestmark = pytest.mark.alternate

LAYERS, WIDTH = 6, 32
_random = np.random.default_rng(4)
_normal = lambda *shape: (_random.normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)  # noqa: E731
PARAMS = {
    "layers": {"w": _normal(LAYERS, WIDTH, WIDTH), "b": _normal(LAYERS, WIDTH)},
    "out": _normal(WIDTH, WIDTH),
}
# the number of words that count differs much from replica to replica
BATCH = {"x": _normal(32, WIDTH) * 6, "mask": (np.arange(32) % 9 < 1 + np.arange(32) // 8)}
INNER = optax.sgd(0.3, momentum=0.9)
LAYER_BYTES = 4 * WIDTH * WIDTH
ARMS = {
    "all_reduce": optax.chain(jdp.all_reduce(), INNER),
    "in backward": optax.chain(jdp.all_reduce_in_backward(min_size=0), INNER),
    "zero2": jdp.zero2(INNER, reduce="backward", min_size=0),
}


def loss_fn(params, batch, key=None, *, wrap=jdp.layerwise, weighted=False):
    def body(x, layer):
        return jnp.tanh(x @ layer["w"] + layer["b"]), None

    x = batch["x"]
    if key is not None:
        x = x * jax.random.bernoulli(key, 0.5, x.shape)
    x, _ = jax.lax.scan(wrap(body), x, params["layers"])
    errors = jnp.mean((x @ params["out"] - batch["x"]) ** 2, axis=-1)
    if not weighted:
        return jnp.mean(errors)
    mask = batch["mask"].astype(jnp.float32)
    return jdp.Mean(jnp.sum(errors * mask), jnp.sum(mask))


def mesh_of(count=8, kind=AxisType.Auto):
    return jdp.make_mesh(num_devices=count, axis_types=kind)


@functools.cache
def wanted(weighted, microbatch=None, key=None):
    """Two steps on one device, in microbatches of the same size."""
    loss = functools.partial(loss_fn, wrap=lambda body: body, weighted=weighted)
    return sharded.train(loss, PARAMS, INNER, [BATCH] * 2, microbatch=microbatch, key=key)


@functools.cache
def run(arm, count=8, kind=AxisType.Auto, microbatch=None, weighted=False, key=None):
    loss = functools.partial(loss_fn, weighted=weighted)
    return sharded.run(
        ARMS[arm],
        loss,
        mesh_of(count, kind),
        [BATCH] * 2,
        params=PARAMS,
        microbatch=microbatch,
        key=key,
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("arm", "count", "kind", "microbatch"),
    [
        ("in backward", 8, AxisType.Auto, None),
        ("in backward", 8, AxisType.Explicit, 1),
        ("in backward", 4, AxisType.Auto, 2),
        ("in backward", 2, AxisType.Explicit, 2),
        ("in backward", 1, AxisType.Auto, 2),
        ("zero2", 8, AxisType.Auto, 1),
        ("zero2", 2, AxisType.Explicit, 4),
    ],
)
def test_the_steps_are_those_of_one_device(arm, count, kind, microbatch, weighted):
    state, metrics = run(arm, count, kind, microbatch, weighted)
    params, losses = wanted(weighted)
    assert_close(jdp.logical(state.params), params, 1e-5)
    assert_close([m["loss"] for m in metrics], [m["loss"] for m in losses], 1e-5)
    sharded.assert_same_shards(state.params)


@pytest.mark.parametrize("arm", ["in backward", "zero2"])
def test_the_last_microbatch_has_its_own_key(arm):
    state, _ = run(arm, microbatch=2, key=5)
    assert_close(jdp.logical(state.params), wanted(False, 2, 5)[0], 1e-5)


def test_model_state_goes_through_every_microbatch():
    def counting(params, batch, *, model_state):
        total = model_state + jax.lax.pmean(jnp.sum(batch["x"]), "data")
        return loss_fn(params, batch), {}, total

    def end(arm):
        state, _ = sharded.run(
            ARMS[arm],
            counting,
            mesh_of(),
            [BATCH],
            params=PARAMS,
            microbatch=1,
            model_state=jnp.float32(1),
        )
        return state

    got, want = end("in backward"), end("all_reduce")
    assert float(got.model_state) == pytest.approx(float(want.model_state))
    assert float(want.model_state) == pytest.approx(1 + BATCH["x"].sum() / 8, rel=1e-4)
    assert_close(got.params, want.params, 1e-5)


@functools.cache
def sent(arm, microbatch=None, wrap=jdp.layerwise, wire_dtype=None):
    tx = ARMS[arm]
    if wire_dtype is not None:
        tx = optax.chain(jdp.all_reduce_in_backward(wire_dtype=wire_dtype), INNER)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    step = jdp.train_step(
        functools.partial(loss_fn, wrap=wrap), tx, mesh_of(), microbatch=microbatch
    )
    compiled = step.lower(jdp.init_state(shapes, tx, mesh_of()), BATCH).compile()
    return [c for c in collectives(compiled.as_text()) if c.bytes > 64]


@pytest.mark.parametrize("microbatch", [None, 1, 2])
@pytest.mark.parametrize(
    ("arm", "kind"), [("in backward", "all-reduce"), ("zero2", "reduce-scatter")]
)
def test_a_layer_is_reduced_in_the_backward_loop_once_a_step(arm, kind, microbatch):
    """One loop, that over layers: a reduction in the loop over microbatches would lie in two."""
    found = [c for c in sent(arm, microbatch) if c.kind == kind]
    inside = sum(c.bytes for c in found if c.in_loop)
    assert inside == LAYER_BYTES + 4 * WIDTH
    assert sum(c.bytes for c in found if not c.in_loop) == pytest.approx(LAYER_BYTES, abs=64)


def test_the_control_case_reduces_after_the_loop():
    assert not any(c.in_loop for c in sent("all_reduce"))
    assert not any(c.in_loop for c in sent("in backward", 1, wrap=lambda body: body))


def test_a_narrow_wire():
    found = sent("in backward", 1, wire_dtype=jnp.bfloat16)
    assert {d for c in found if c.in_loop for d in c.dtypes} == {"u16"}


def test_it_accumulates_over_calls():
    tx = jdp.multi_steps(ARMS["in backward"], every=2)
    halves = [jax.tree.map(lambda x, i=i: x[i * 16 : i * 16 + 16], BATCH) for i in range(2)]
    state, _ = sharded.run(tx, loss_fn, mesh_of(), halves * 2, params=PARAMS)
    assert_close(state.params, wanted(False)[0], 1e-5)


def test_a_state_moves_to_zero():
    """Nothing of it is an array, so any stage can take over."""
    state, _ = run("in backward")
    like = jdp.init_state(PARAMS, jdp.zero1(INNER), mesh_of())
    moved = jdp.restage(state, like)
    assert_close(moved.params, state.params, 0)


def test_bad_input():
    tx, mesh = ARMS["in backward"], mesh_of()
    state = jdp.init_state(PARAMS, tx, mesh)
    _, grads = jdp.value_and_grad(loss_fn, mesh)(PARAMS, BATCH)
    with pytest.raises(ValueError, match="are not reduced yet"):
        tx.update(grads, state.opt_state, state.params)
    with pytest.raises(ValueError, match="must know the mesh"):
        tx.init(PARAMS)
    with pytest.raises(ValueError, match="wire_dtype=int32"):
        jdp.all_reduce_in_backward(wire_dtype=jnp.int32)
    with pytest.raises(ValueError, match=r"shares and jdp\.all_reduce_in_backward exclude"):
        jdp.train_step(loss_fn, tx, mesh, microbatch=1)(state, BATCH, shares=np.full(8, 4))
    both = optax.chain(jdp.all_reduce_in_backward(), jdp.zero1(INNER))
    with pytest.raises(ValueError, match="and another ZeRO stage"):
        jdp.init_state(PARAMS, both, mesh)


def nested(lw, x, layers):
    """Each layer applied twice, in a loop inside of the scan."""
    twice = lambda x, layer: (jax.lax.scan(lambda x, _: lw(x, layer), x, None, length=2)[0], None)  # noqa: E731
    return jax.lax.scan(twice, x, layers)[0]


def penalised(lw, x, layers):
    return x + 0.1 * jax.grad(lambda x: jnp.sum(jax.lax.scan(lw, x, layers)[0] ** 2))(x)


REPEATED = {
    "two scans": lambda lw, x, layers: jax.lax.scan(lw, jax.lax.scan(lw, x, layers)[0], layers)[0],
    "recurrent depth": lambda lw, x, layers: jax.lax.scan(
        lambda x, _: (jax.lax.scan(lw, x, layers)[0], None), x, None, length=2
    )[0],
    "nested": nested,
    "gradient in the loss": penalised,
}


@pytest.mark.parametrize("name", REPEATED)
def test_what_was_summed_up_before_is_added_once(name):
    """However often a parameter is gathered; by the plain reduction, which knows no gathers."""

    def repeated(params, batch):
        body = lambda x, layer: (x + jnp.tanh(x @ layer["w"] + layer["b"]) / 4, None)  # noqa: E731
        x = REPEATED[name](jdp.layerwise(body), batch["x"], params["layers"])
        return jnp.mean((x @ params["out"] - batch["x"]) ** 2)

    tx = optax.chain(jdp.all_reduce_in_backward(min_size=0), optax.sgd(1.0))
    plain = optax.chain(jdp.all_reduce(), optax.sgd(1.0))
    got, want = (
        sharded.run(each, repeated, mesh_of(), [BATCH], params=PARAMS, microbatch=2)[0].params
        for each in (tx, plain)
    )
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(jdp.all_reduce_in_backward("device", min_size=0), INNER),
        optax.chain(jdp.all_reduce_in_order("device"), INNER),
        jdp.zero2(INNER, "device", reduce="in order", min_size=0),
        jdp.zero2(INNER, "device", reduce="backward", min_size=0),
    ],
)
def test_part_of_the_data_axes(tx):
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    state, _ = sharded.run(tx, loss_fn, mesh, [BATCH] * 2, params=PARAMS, microbatch=2)
    assert_close(jdp.logical(state.params), wanted(False)[0], 1e-5)
