"""ZeRO's stages against a plain loop on one device: same numbers, wherever things lie."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sharded
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives
from reference import assert_close
from sharded import BATCH, BATCHES, INNER, KEY, PARAMS, STAGES, mesh_of

import jdp

pytestmark = pytest.mark.either

SPLITS = ["1", "2 step", "2", "3"]
TOLERANCE = 3e-6  # relative to a leaf's largest entry, after three steps in another order


@functools.cache
def wanted(loss_fn, microbatch=None, key=None, steps=3):
    batches = BATCHES[:steps]
    return sharded.train(loss_fn, PARAMS, INNER, batches, microbatch=microbatch, key=key)


def zero(stage, inner=INNER, axis=None, min_size=0):
    """The stage, by default with everything split: the smallest leaf pads."""
    return STAGES[stage](inner, axis=axis, min_size=min_size)


# A35: one test for all stages ------------------------------------------------------------------

# devices, kind of axis, loss, examples per microbatch, min_size
GRID = [
    (8, "auto", "rich", 2, 0),
    (8, "explicit", "plain", 4, 0),
    (4, "auto", "plain", None, 256),
    (2, "explicit", "rich", 8, 0),
    (1, "auto", "plain", 16, 0),
]
LOSSES = {"rich": (sharded.rich, KEY), "plain": (sharded.plain, None)}
CASES = [(s, c) for s in STAGES for c in GRID if c[0] == 8 or s in ("1", "2", "3")]


@pytest.mark.filterwarnings("ignore:jdp.zero. over a single device")
@pytest.mark.parametrize(("stage", "case"), CASES, ids=lambda x: str(x))
def test_a35_every_stage_equals_one_device(stage, case):
    """Masked loss, dropout, metrics, a clip by the global norm and momentum; three steps."""
    count, kind, name, microbatch, min_size = case
    loss_fn, key = LOSSES[name]
    tx = zero(stage, min_size=min_size)
    given = {"microbatch": microbatch, "key": key}
    state, metrics = sharded.run(tx, loss_fn, mesh_of(count, kind), BATCHES, **given)
    params, want = wanted(loss_fn, microbatch or 64 // count, key)
    assert_close(jdp.logical(state.params), params, TOLERANCE)
    assert_close(metrics, want, TOLERANCE)
    sharded.assert_same_shards((state, metrics))


def batchnorm(params, batch, model_state):
    hidden = batch["x"] @ params["up"]["kernel"]
    mean = jax.lax.pmean(hidden.mean(0), "data")
    hidden = jnp.tanh(hidden - mean + params["up"]["bias"])
    loss = jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)
    return loss, {}, {"mean": 0.9 * model_state["mean"] + 0.1 * mean}


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_model_state_is_the_same_under_a_stage(stage):
    params = {k: PARAMS[k] for k in ("up", "down")}
    options = {"params": params, "model_state": {"mean": jnp.zeros(24)}}
    got, want = (
        sharded.run(zero(s), batchnorm, mesh_of(n), BATCHES[:2], **options)[0]
        for s, n in ((stage, 8), ("0", 1))
    )
    assert np.abs(want.model_state["mean"]).max() > 0.01
    assert_close(
        (jdp.logical(got.params), got.model_state), (want.params, want.model_state), TOLERANCE
    )


@pytest.mark.parametrize(
    ("stage", "remat"), [("2", True), ("3", "dots_saveable"), ("3 kept", "nothing_saveable")]
)
def test_rematerialisation_changes_no_number(stage, remat):
    options = {"key": KEY, "microbatch": 16, "remat": remat}
    state, _ = sharded.run(zero(stage), sharded.rich, mesh_of(2), BATCHES, **options)
    assert_close(jdp.logical(state.params), wanted(sharded.rich, 16, KEY)[0], TOLERANCE)


# two data axes ----------------------------------------------------------------------------------

BOTH = ("node", "device")
# names, shape, axes to split over, kind
HYBRID = [
    (BOTH, (2, 4), "device", "auto"),
    (BOTH, (2, 4), "device", "explicit"),
    (BOTH, (4, 2), "node", "auto"),
    (BOTH[::-1], (4, 2), BOTH, "explicit"),
    (BOTH, (2, 4), BOTH[::-1], "auto"),
    (BOTH, (1, 8), "device", "auto"),
    (BOTH, (8, 1), "device", "auto"),
]


@pytest.mark.filterwarnings("ignore:jdp.zero. over a single device")
@pytest.mark.parametrize("case", HYBRID, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_stage_splits_over_one_axis_or_both(stage, case):
    """HSDP: within a node parts, from node to node copies, in any order."""
    names, shape, axis, kind = case
    mesh = mesh_of(kind=kind, names=names, shape=shape)
    state, _ = sharded.run(zero(stage, axis=axis), sharded.masked, mesh, BATCHES, microbatch=4)
    assert_close(jdp.logical(state.params), wanted(sharded.masked, 4)[0], TOLERANCE)
    sharded.assert_same_shards(state)
    moment = state.opt_state.inner_state[1][0].trace["up"]["kernel"]
    parts = jdp.axis_size(mesh, jdp.data_axes(mesh, axis))
    assert moment.size // moment.addressable_shards[0].data.size == parts


@pytest.mark.parametrize("axis", ["device", None])
def test_zero1_splits_over_one_axis_or_both(axis):
    mesh = mesh_of(names=BOTH, shape=(2, 4))
    state, _ = sharded.run(zero("1", axis=axis), sharded.masked, mesh, BATCHES, microbatch=4)
    assert_close(jdp.logical(state.params), wanted(sharded.masked, 4)[0], TOLERANCE)
    sharded.assert_same_shards(state)


def test_a_stage_after_a_reduction_over_the_other_axis():
    """Nodes averaged by all_reduce, in bfloat16 say, and devices by the stage."""
    mesh = mesh_of(names=BOTH, shape=(2, 4))
    tx = optax.chain(jdp.all_reduce("node"), zero("1", axis="device"))
    state, _ = sharded.run(tx, sharded.masked, mesh, BATCHES, microbatch=4)
    assert_close(jdp.logical(state.params), wanted(sharded.masked, 4)[0], TOLERANCE)


@pytest.mark.parametrize("stage", ["1", "2 step"])
def test_gradients_reduced_upstream_are_sliced(stage):
    tx = optax.chain(jdp.all_reduce(), zero(stage))
    step = jdp.train_step(sharded.masked, tx, mesh_of(), microbatch=4)
    state = jdp.init_state(PARAMS, tx, mesh_of())
    step = step.lower(state, BATCH).compile()
    sent = collectives(step.as_text())
    assert "reduce-scatter" not in {c.kind for c in sent}
    for batch in BATCHES:
        state, _ = step(state, batch, None)
    assert_close(jdp.logical(state.params), wanted(sharded.masked, 4)[0], TOLERANCE)


# accumulation across calls, and unequal shares --------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "hybrid", "kind"),
    [
        ("1", False, "auto"),
        ("2", True, "explicit"),
        ("3", False, "auto"),
        ("3", True, "auto"),
    ],
)
def test_a22_windows_around_a_stage(stage, hybrid, kind):
    """Weights of unequal calls are exact; an incomplete window is flushed, or forgotten."""
    mesh = mesh_of(kind=kind, names=BOTH, shape=(2, 4)) if hybrid else mesh_of(kind=kind)
    tx = jdp.multi_steps(zero(stage, axis="device" if hybrid else None), every=2)
    step = jdp.train_step(sharded.masked, tx, mesh, microbatch=4, donate=False)
    state = jdp.init_state(PARAMS, tx, mesh)
    batches = [
        jax.tree.map(lambda a, i=i: a[16 * i : 16 * (i + 1)].repeat(2, 0), BATCH) for i in range(4)
    ]
    joined = jax.tree.map(lambda *a: np.concatenate(a), *batches[1:3])
    assert len({batch["mask"].sum() for batch in batches}) == 4
    for batch in batches[1:3]:
        state, _ = step(state, batch)
    want = sharded.train(sharded.masked, PARAMS, INNER, [joined])[0]
    assert_close(jdp.logical(state.params), want, TOLERANCE)
    incomplete, _ = step(state, batches[3])
    np.testing.assert_array_equal(incomplete.params["scale"], state.params["scale"])
    want = sharded.train(sharded.masked, PARAMS, INNER, [joined, batches[3]])[0]
    assert_close(jdp.logical(jdp.flush(incomplete, tx).params), want, TOLERANCE)
    dropped = jdp.drop_window(incomplete.opt_state)
    for a, b in zip(jax.tree.leaves(dropped), jax.tree.leaves(state.opt_state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert sharded.places(dropped) == sharded.places(state.opt_state)


@pytest.mark.parametrize("stage", ["1", "2 step"])
def test_unequal_shares_with_gradients_reduced_once_a_step(stage):
    tx, shares = zero(stage), np.array([4, 1, 0, 2, 3, 4, 4, 1], np.int32)
    step = jdp.train_step(sharded.masked, tx, mesh_of(), microbatch=2)
    state, _ = step(jdp.init_state(PARAMS, tx, mesh_of()), BATCH, shares=shares)
    kept = np.concatenate([np.arange(8 * i, 8 * i + 2 * k) for i, k in enumerate(shares)])
    batch = jax.tree.map(lambda a: a[kept], BATCH)
    want = sharded.train(sharded.masked, PARAMS, INNER, [batch])[0]
    assert_close(jdp.logical(state.params), want, TOLERANCE)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_unequal_shares_are_refused_where_gradients_meet_at_every_microbatch(stage):
    tx = zero(stage)
    step = jdp.train_step(sharded.masked, tx, mesh_of(), microbatch=2)
    with pytest.raises(ValueError, match=r"shares and jdp.zero[23] exclude each other.*zero1"):
        step(jdp.init_state(PARAMS, tx, mesh_of()), BATCH, shares=np.ones(8, np.int32))


# beside an axis of the user's -------------------------------------------------------------------

TENSOR = {"up": {"kernel": P(None, "model"), "bias": P("model")}, "down": P("model", None)}


def tensor_loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


@pytest.mark.parametrize(
    ("stage", "kind"),
    [("1", "auto"), ("1", "explicit"), ("2", "auto"), ("3", "auto"), ("3", "explicit")],
)
def test_a_model_axis_stays_the_users(stage, kind):
    """Tensor parallelism: state is split over both axes, and nothing is gathered over "model"."""
    types = (sharded.KINDS[kind], AxisType.Auto)
    mesh = jdp.make_mesh(("data", "model"), (4, 2), axis_types=types)
    host = {k: PARAMS[k] for k in ("up", "down")}
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), TENSOR, is_leaf=is_spec)
    params = jax.tree.map(jax.device_put, host, shardings)
    tx = zero(stage)
    step = jdp.train_step(tensor_loss, tx, mesh, microbatch=8)
    state = jdp.init_state(params, tx, mesh)
    before = sharded.places(state)
    moments = state.opt_state.inner_state[1][0].trace
    for tree, parts in ((moments, 8), (state.params, 8 if stage == "3" else 2)):
        for leaf in (tree["up"]["kernel"], tree["down"]):
            assert leaf.size // leaf.addressable_shards[0].data.size == parts
    step = step.lower(state, BATCH).compile()
    sent = collectives(step.as_text())
    for batch in BATCHES:
        state, _ = step(state, batch, None)
    want = sharded.train(tensor_loss, host, INNER, BATCHES)[0]
    assert_close(jdp.logical(state.params), want, TOLERANCE)
    assert sharded.places(state) == before
    # half of the kernel is on the wire, of which each model column of devices has its own half
    half = host["up"]["kernel"].nbytes // 2
    assert max(c.bytes for c in sent if c.kind in ("all-gather", "reduce-scatter")) == half


# steps inside programs, and steps of one's own --------------------------------------------------


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_scan_over_steps(stage):
    tx = zero(stage)
    step = jdp.train_step(sharded.masked, tx, mesh_of(), microbatch=4)
    state = jdp.init_state(PARAMS, tx, mesh_of())
    before, stacked = sharded.places(state), jax.tree.map(lambda *a: np.stack(a), *BATCHES)
    run = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches), donate_argnums=0)
    state, metrics = run(state, stacked)
    assert_close(jdp.logical(state.params), wanted(sharded.masked, 4)[0], TOLERANCE)
    want = [m["loss"] for m in wanted(sharded.masked, 4)[1]]
    assert_close(list(metrics["loss"]), want, TOLERANCE)
    assert sharded.places(state) == before


@pytest.mark.parametrize(
    ("stage", "kind", "placed"),
    [
        ("1", "explicit", True),
        ("2", "auto", True),
        ("2", "auto", False),
        ("3", "explicit", True),
        ("3", "explicit", False),
    ],
)
def test_a_step_of_ones_own(stage, kind, placed):
    """With the stage's placement gradients come split; without, one for each replica."""
    mesh, tx = mesh_of(kind=kind), zero(stage)
    state = jdp.init_state(PARAMS, tx, mesh)
    take = jdp.value_and_grad(sharded.masked, mesh, microbatch=4)

    @jax.jit
    def step(params, opt_state, batch):
        placement = opt_state.placement if placed else None
        _, grads = take(params, batch, placement=placement)
        node = grads["up"]["kernel"]
        assert isinstance(node, jdp.Reduced if placed and stage > "1" else jdp.PerReplica)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = state.params, state.opt_state
    for batch in BATCHES:
        params, opt_state = step(params, opt_state, batch)
    assert_close(jdp.logical(params), wanted(sharded.masked, 4)[0], TOLERANCE)


def test_a_step_without_jit():
    tx = zero("3")
    state = jdp.init_state(PARAMS, tx, mesh_of())
    take = jdp.value_and_grad(sharded.masked, mesh_of(), microbatch=4)
    _, grads = take(state.params, BATCHES[0], placement=state.opt_state.placement)
    updates, _ = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    assert_close(jdp.logical(params), wanted(sharded.masked, 4, steps=1)[0], TOLERANCE)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("min_size", [0, 256])
def test_evaluation_takes_split_parameters(kind, min_size):
    """Also a metric that multiplies two of them, which are stored padded, with each other."""

    def metric(params, batch):
        loss = sharded.masked(params, batch)
        return jdp.Mean(loss.total * (params["odd"] @ params["three"]).sum(), loss.weight)

    mesh = mesh_of(kind=kind)
    params = jdp.init_state(PARAMS, zero("3", min_size=min_size), mesh).params
    step = jdp.eval_step(metric, mesh, microbatch=4)
    want = metric(PARAMS, BATCH)
    assert_close(step(params, BATCH), want)
    assert_close(jdp.evaluate(step, params, [BATCH, BATCH]), want.value)


# where a state comes from -----------------------------------------------------------------------

SOURCES = {
    "function": lambda mesh: lambda: jax.tree.map(jnp.asarray, PARAMS),
    "host": lambda mesh: PARAMS,
    "one device": lambda mesh: jax.tree.map(jnp.asarray, PARAMS),
    "replicated": lambda mesh: jdp.replicate(PARAMS, mesh),
    "split already": lambda mesh: jdp.init_state(PARAMS, zero("3"), mesh).params,
    "of another mesh": lambda mesh: jdp.init_state(PARAMS, zero("3"), mesh_of(4)).params,
    "of another size": lambda mesh: jdp.init_state(PARAMS, zero("3", min_size=256), mesh).params,
}


@pytest.mark.parametrize(
    ("stage", "source"),
    [("1", "function"), ("1", "split already"), *(("3", source) for source in SOURCES)],
)
def test_a_state_is_the_same_wherever_parameters_come_from(stage, source):
    tx, mesh = zero(stage), mesh_of()
    given = SOURCES[source](mesh)
    state, want = (jdp.init_state(x, tx, mesh) for x in (given, PARAMS))
    assert jax.tree.structure(state) == jax.tree.structure(want)
    assert sharded.places(state) == sharded.places(want)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    if not callable(given):  # the arrays are the state's own
        jax.tree.map(lambda x: x.delete(), state)
        assert_close(jdp.logical(given), PARAMS)


@pytest.mark.parametrize(("stage", "kind"), [("1", "auto"), ("2", "explicit"), ("3", "auto")])
def test_shapes_lower_to_the_program_of_arrays(stage, kind):
    tx, mesh = zero(stage), mesh_of(kind=kind)
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, PARAMS))
    abstract, state = jdp.init_state(shapes, tx, mesh), jdp.init_state(PARAMS, tx, mesh)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
    step = jdp.train_step(sharded.masked, tx, mesh)
    assert step.lower(abstract, BATCH).as_text() == step.lower(state, BATCH).as_text()


def test_broadcast_is_the_state_itself_in_one_process():
    state = jdp.init_state(PARAMS, zero("3"), mesh_of(), broadcast=True)
    assert_close(jdp.logical(state.params), PARAMS)


# state that does not mirror the parameters, and one device --------------------------------------


def history():
    """State of shapes of its own: a window of gradients, one flat vector, transposes, a counter."""

    def init(params):
        return {
            "window": jax.tree.map(lambda x: jnp.zeros((10, x.size)), params),
            "flat": jnp.zeros(sum(x.size for x in jax.tree.leaves(params))),
            "turned": jax.tree.map(lambda x: jnp.zeros(x.shape[::-1]), params),
            "count": 0,
            "decay": 0.5,
        }

    def update(updates, state, params=None):
        del params
        push = lambda w, x: jnp.concatenate([w[1:], x.reshape(1, -1)])  # noqa: E731
        window = jax.tree.map(push, state["window"], updates)
        flat = jnp.concatenate([x.ravel() for x in jax.tree.leaves(updates)])
        flat += state["decay"] * state["flat"]
        turned = jax.tree.map(lambda t, x: 0.5 * t + x.T, state["turned"], updates)
        mean = lambda w, t, x: 0.1 * (w.mean(0).reshape(x.shape) + t.T - flat.mean())  # noqa: E731
        new = jax.tree.map(mean, window, turned, updates)
        count, decay = state["count"] + 1, 0.5 * state["decay"]
        return new, {
            "window": window,
            "flat": flat,
            "turned": turned,
            "count": count,
            "decay": decay,
        }

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(("stage", "kind"), [("0", "auto"), ("1", "explicit"), ("3", "auto")])
def test_state_that_mirrors_nothing_lies_by_its_own_shape(stage, kind):
    tx = optax.chain(history(), optax.scale(-1.0))
    state, _ = sharded.run(zero(stage, tx), sharded.masked, mesh_of(kind=kind), BATCHES)
    want = sharded.train(sharded.masked, PARAMS, tx, BATCHES)[0]
    assert_close(jdp.logical(state.params), want, TOLERANCE)
    if stage != "0":
        own = state.opt_state.inner_state[0]
        leaves = [own["window"]["odd"], own["flat"], own["turned"]["up"]["kernel"]]
        shards = [x.sharding.shard_shape(jax.tree.leaves(x)[0].shape) for x in leaves]
        assert shards == [(10, 4), (80,), (24 // 8, 16)]


@pytest.mark.parametrize("stage", SPLITS)
def test_one_device_works_and_says_that_it_saves_nothing(stage):
    with pytest.warns(UserWarning, match=r"jdp.zero\d over a single device .* saves nothing"):
        state, _ = sharded.run(zero(stage), sharded.masked, mesh_of(1), BATCHES)
    assert_close(state.params, wanted(sharded.masked)[0], TOLERANCE)
    is_padded = lambda x: isinstance(x, jdp.Padded)  # noqa: E731
    assert not any(map(is_padded, jax.tree.leaves(state, is_leaf=is_padded)))


def test_one_device_of_eight_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jdp.init_state(PARAMS, zero("1"), mesh_of())
