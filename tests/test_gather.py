"""`gather_params`: a layer at a time in a scan, and never another number than without it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sharded
from programs import collectives
from reference import assert_close
from sharded import STAGES, mesh_of

import jdp

pytestmark = pytest.mark.alternate

LAYERS, WIDTH, ROWS = 12, 16, 24  # eight devices divide the width, not the layers
_random = np.random.default_rng(1)
_normal = lambda *shape: (_random.normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)  # noqa: E731
PARAMS = {
    "embedding": _normal(ROWS, WIDTH),
    "layers": {
        "kernel": _normal(LAYERS, WIDTH, WIDTH),
        "odd": _normal(LAYERS, 7, 13),  # padded, to 16 columns
        "bias": _normal(LAYERS, WIDTH) / 9,
    },
}
BATCH = _normal(32, ROWS) * ROWS**0.5
BIAS, ODD, KERNEL = 4 * WIDTH, 4 * 7 * 16, 4 * WIDTH * WIDTH  # bytes of a layer on the wire
LAYER = [BIAS, ODD, KERNEL]
INNER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def layer_of(gather, x, layer):
    layer = gather(layer)
    x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x.at[:, :13].add(jnp.tanh(x[:, :13] @ layer["odd"].T) @ layer["odd"]), None


def scanned(wrap=lambda body: body, **options):
    """Layers scanned over, the body wrapped; the embedding is used at both ends."""

    def make(gather):
        def loss_fn(params, batch):
            body = wrap(functools.partial(layer_of, gather))
            x, _ = jax.lax.scan(body, batch @ params["embedding"], params["layers"], **options)
            return jnp.mean((x @ params["embedding"].T - batch) ** 2)

        return loss_fn

    return make


def with_layers(run):
    """A loss that hands (body, x, layers) to `run`."""

    def make(gather):
        def loss_fn(params, batch):
            body, x = functools.partial(layer_of, gather), batch @ params["embedding"]
            x = run(body, x, params["layers"], gather)
            return jnp.mean((x @ params["embedding"].T - batch) ** 2)

        return loss_fn

    return make


def scan(body, x, layers):
    return jax.lax.scan(body, x, layers)[0]


def twice(body, x, layers, gather):
    return scan(body, scan(body, x, layers), layers)


def also_elsewhere(body, x, layers, gather):
    return scan(body, x, layers) + 0.01 * jnp.sum(layers["kernel"])


def indexed(body, x, layers, gather):
    """The layers are closed over, and the body takes out its own."""

    def own(x, i):
        take = lambda a: jax.lax.dynamic_index_in_dim(a, i, 0, keepdims=False)  # noqa: E731
        return body(x, jax.tree.map(take, layers))

    return jax.lax.scan(own, x, jnp.arange(LAYERS))[0]


def one_by_one(body, x, layers, gather):
    for i in range(LAYERS):
        x, _ = body(x, jax.tree.map(lambda a, i=i: a[i], layers))
    return x


def before_the_scan(body, x, layers, gather):
    return scan(functools.partial(layer_of, lambda layer: layer), x, gather(layers))


def half_of_them(body, x, layers, gather):
    return scan(body, x, jax.tree.map(lambda a: a[: LAYERS // 2], layers))


def shapes_looked_at(body, x, layers, gather):
    kernel = layers["kernel"]
    assert (kernel.shape, kernel.ndim, kernel.dtype) == ((LAYERS, WIDTH, WIDTH), 3, jnp.float32)
    assert (kernel.size, len(kernel)) == (LAYERS * WIDTH**2, LAYERS)
    assert layers["odd"].shape == (LAYERS, 7, 13)
    return scan(body, x, layers)


INSIDE = {  # gathered a layer at a time
    "plain": scanned(),
    "checkpoint": scanned(jax.checkpoint),
    "jit": scanned(jax.jit),
    "reversed": scanned(reverse=True),
    "layerwise": scanned(jdp.layerwise),
    "scan in a jit": with_layers(
        lambda body, x, layers, _: jax.jit(scan, static_argnums=0)(body, x, layers)
    ),
    "scan in a checkpoint": with_layers(
        lambda body, x, layers, _: jax.checkpoint(functools.partial(scan, body))(x, layers)
    ),
    "two scans over the same": with_layers(twice),
    "shapes looked at": with_layers(shapes_looked_at),
}
WHOLE = {  # used otherwise as well: gathered before the loss, as without the line
    "used elsewhere": with_layers(also_elsewhere),
    "closed over": with_layers(indexed),
    "unrolled": with_layers(one_by_one),
    "before the scan": with_layers(before_the_scan),
    "sliced": with_layers(half_of_them),
}


@functools.cache
def wanted(name, steps=2):
    loss_fn = (INSIDE | WHOLE)[name](lambda layer: layer)
    return sharded.train(loss_fn, PARAMS, INNER, [BATCH] * steps)[0]


def run(stage, name, count=8, kind="auto"):
    """The state after two steps, and the collectives of the compiled step."""
    tx, mesh = STAGES[stage](INNER, min_size=0), mesh_of(count, kind)
    loss_fn = (INSIDE | WHOLE)[name](jdp.gather_params)
    step = jdp.train_step(loss_fn, tx, mesh)
    state = jdp.init_state(PARAMS, tx, mesh)
    step = step.lower(state, BATCH).compile()
    for _ in range(2):
        state, _ = step(state, BATCH, None)
    assert_close(jdp.logical(state.params), wanted(name), 1e-5)
    sharded.assert_same_shards(state)
    return state, [c for c in collectives(step.as_text()) if c.bytes > 16]


def in_loops(sent, kind):
    return sorted(c.bytes for c in sent if c.kind == kind and c.in_loop)


@pytest.mark.parametrize("name", INSIDE)
def test_zero3_gathers_a_layer_at_a_time(name):
    """Forward and, again, backward; and each layer's gradient is scattered in its own turn."""
    _, sent = run("3", name)
    scans = 2 if "two" in name else 1
    # a bias is not needed in the backward pass, unless the layer is computed anew
    anew = "checkpoint" in name or name == "layerwise"
    again = LAYER if anew else [ODD, KERNEL]
    ways = [again, [ODD, KERNEL]] if name == "layerwise" else [again]  # jax 0.10 sees it is unused
    assert in_loops(sent, "all-gather") in [sorted((LAYER + way) * scans) for way in ways]
    assert in_loops(sent, "reduce-scatter") == sorted(LAYER * scans)
    outside = [c.bytes for c in sent if not c.in_loop and c.kind != "all-reduce"]
    assert max(outside) == PARAMS["embedding"].nbytes


def test_a_layer_is_kept_if_it_shall_not_be_gathered_again():
    _, sent = run("3 kept", "plain")
    assert in_loops(sent, "all-gather") == LAYER
    assert in_loops(sent, "reduce-scatter") == LAYER


def test_zero2_scatters_a_layer_at_a_time():
    _, sent = run("2", "plain")
    assert in_loops(sent, "all-gather") == []
    assert in_loops(sent, "reduce-scatter") == LAYER


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_used_otherwise_is_gathered_before(name):
    """Right, if not a layer at a time; the leaf that is used otherwise decides for itself."""
    _, sent = run("3", name)
    alone = name == "used elsewhere"
    assert in_loops(sent, "reduce-scatter") == ([BIAS, ODD] if alone else [])
    assert in_loops(sent, "all-gather") == ([BIAS, ODD, ODD] if alone else [])


def test_explicit_axes():
    _, sent = run("3", "checkpoint", kind="explicit")
    assert in_loops(sent, "all-gather") == sorted(LAYER * 2)


def test_a_leaf_split_in_its_layers_is_gathered_before():
    """Two devices divide the twelve layers and not 7 or 13: "odd" cannot come layer by layer."""
    _, sent = run("3", "plain", 2)
    assert ODD not in in_loops(sent, "all-gather")
    assert KERNEL in in_loops(sent, "all-gather")


@pytest.mark.filterwarnings("ignore:jdp.zero. over a single device")
@pytest.mark.parametrize(("stage", "count"), [("0", 8), ("1", 8), ("3", 1)])
def test_elsewhere_it_changes_nothing(stage, count):
    """Under stages that keep parameters whole, and on one device: not a collective more."""
    _, sent = run(stage, "plain", count)
    assert not any(c.in_loop for c in sent)
    assert count > 1 or {c.kind for c in sent} <= {"all-reduce"}  # of one device


def test_outside_of_a_step_it_is_the_identity():
    tree = {"a": jnp.ones(3), "b": np.ones(2)}
    same = jdp.gather_params(tree)
    assert same["a"] is tree["a"]
    assert same["b"] is tree["b"]
    want = jax.grad(INSIDE["plain"](lambda layer: layer))(PARAMS, BATCH)
    got = jax.jit(jax.grad(INSIDE["plain"](jdp.gather_params)))(PARAMS, BATCH)
    assert_close(got, want, 1e-5)


def test_microbatches_gather_again_for_each():
    tx, mesh = STAGES["3"](INNER, min_size=0), mesh_of()
    loss_fn = INSIDE["plain"](jdp.gather_params)
    state, _ = sharded.run(tx, loss_fn, mesh, [BATCH] * 2, params=PARAMS, microbatch=2)
    assert_close(jdp.logical(state.params), wanted("plain"), 1e-5)


def test_evaluation_of_a_loss_that_gathers():
    tx = STAGES["3"](INNER, min_size=0)
    params = jdp.init_state(PARAMS, tx, mesh_of()).params
    got = jdp.eval_step(INSIDE["plain"](jdp.gather_params), mesh_of())(params, BATCH)
    want = INSIDE["plain"](lambda layer: layer)(PARAMS, BATCH)
    assert_close(got.value if isinstance(got, jdp.Mean) else got, want)


def counting(count):
    """A loss divided by a number read off its parameters while they are not gathered yet."""

    def make(gather):
        plain = INSIDE["plain"](gather)
        return lambda params, batch: plain(params, batch) / count(params["layers"])

    return make


@pytest.mark.parametrize(
    "count",
    [
        lambda layers: sum(leaf.size for leaf in jax.tree.leaves(layers)),
        lambda layers: len(jax.tree.leaves(layers)),
        lambda layers: jnp.float32(jax.tree.leaves(layers)[0].shape[-1]),
    ],
)
def test_numbers_counted_from_the_leaves_of_layers_that_are_not_gathered_are_refused(count):
    with pytest.raises(ValueError, match="it counts the leaves of params, or their sizes"):
        sharded.run(
            STAGES["3"](INNER, min_size=0),
            counting(count)(jdp.gather_params),
            mesh_of(),
            [BATCH],
            params=PARAMS,
        )


def test_the_size_of_a_layer_is_its_logical_one():
    count = lambda layers: sum(x.size for x in layers.values())  # noqa: E731
    loss_fn, tx = counting(count)(jdp.gather_params), STAGES["3"](INNER, min_size=0)
    state, _ = sharded.run(tx, loss_fn, mesh_of(), [BATCH], params=PARAMS)
    want, _ = sharded.run(
        optax.chain(jdp.all_reduce(), INNER),
        counting(count)(lambda x: x),
        mesh_of(),
        [BATCH],
        params=PARAMS,
    )
    assert_close(jdp.logical(state.params), want.params, 1e-5)
