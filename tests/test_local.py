"""Local steps against N runs on one device each, which are averaged now and then."""

import functools
import pickle
import re

import cluster
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives, live_bytes
from reference import assert_close, assert_same_copies, mlp
from topologies import devices

import jdp
from jdp.dataflow import bodies
from jdp.replica import map_per_replica

pytestmark = pytest.mark.alternate

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
PARAMS, LOSS, MASKED, BATCH = mlp()
ADAM = optax.adam(1e-2)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
SIZES = {"w1": 4 * 16 * 24, "b1": 4 * 24, "w2": 4 * 24 * 8}  # bytes


def batches(count):
    """The same examples in another order each time: other ones for each replica."""
    for seed in range(count):
        rows = np.random.default_rng(seed).permutation(64)
        yield {name: np.asarray(x)[rows] for name, x in BATCH.items()}


def mean(trees):
    return jax.tree.map(lambda *xs: sum(xs) / len(xs), *trees)


def shards(batch, n):
    """Each replica's rows, and its part of the weight, times n."""
    parts = [jax.tree.map(lambda x, i=i: np.split(x, n)[i], batch) for i in range(n)]
    weights = [part["mask"].sum() for part in parts]
    return parts, [n * w / max(sum(weights), 1e-30) for w in weights]


@functools.cache
def gradient_of(loss_fn):
    def value(params, batch):
        loss = loss_fn(params, batch)
        # of no weight at all there is no gradient
        return loss.total / jnp.maximum(loss.weight, 1e-30) if isinstance(loss, jdp.Mean) else loss

    return jax.jit(jax.value_and_grad(value))


def apart(loss_fn, params, inner, n, every, given, *, start=0, outer=None, fragments=None):
    """The definition: n plain runs, and what they agree on. Yields losses and parameters."""
    own, states = [params] * n, [inner.init(params)] * n
    fragments = fragments or [list(params)]
    anchor = dict(params)
    outers = [outer.init({k: params[k] for k in names}) if outer else None for names in fragments]
    step = jax.jit(inner.update)
    for call, batch in enumerate(given, 1):
        parts, scales = shards(batch, n)
        scales = scales if loss_fn is MASKED else [1.0] * n
        values = [gradient_of(loss_fn)(p, part) for p, part in zip(own, parts, strict=True)]
        grads = [
            jax.tree.map(lambda g, s=s: s * g, g) for (_, g), s in zip(values, scales, strict=True)
        ]
        grads = [mean(grads)] * n if call <= start else grads
        for i in range(n):
            updates, states[i] = step(grads[i], states[i], own[i])
            own[i] = optax.apply_updates(own[i], updates)
        if call == start:
            anchor = dict(own[0])
        for p, names in enumerate(fragments):
            late = call - start
            if late > 0 and (late + p * every // len(fragments)) % every == 0:
                new = mean([{k: x[k] for k in names} for x in own])
                if outer:
                    old = {k: anchor[k] for k in names}
                    delta = jax.tree.map(lambda a, x: a - x, old, new)
                    updates, outers[p] = outer.update(delta, outers[p], old)
                    new = optax.apply_updates(old, updates)
                anchor |= new
                own = [x | new for x in own]
        yield sum(s * float(v) for (v, _), s in zip(values, scales, strict=True)) / n, list(own)


def rows(params, n):
    """Each replica's own parameters."""
    values = {name: np.asarray(leaf.value) for name, leaf in params.items()}
    return [{name: x[i] for name, x in values.items()} for i in range(n)]


def assert_equal_rows(params):
    for leaf in params.values():
        values = np.asarray(leaf.value)
        np.testing.assert_array_equal(values, np.broadcast_to(values[:1], values.shape))


def compare(tx, expected, n, *, axis_types=AUTO, loss_fn=LOSS, count=7, rtol=2e-5, **options):
    """Runs the step beside the definition; every row of every call is compared."""
    mesh = jdp.make_mesh(num_devices=n, axis_types=(axis_types,))
    step = jdp.train_step(loss_fn, tx, mesh, **options)
    state = jdp.init_state(PARAMS, tx, mesh)
    for batch, (loss, want) in zip(batches(count), expected, strict=True):
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=2e-6)
        for have, one in zip(rows(state.params, n), want, strict=True):
            assert_close(have, one, rtol=rtol)
        assert_same_copies(state)
    return state


@pytest.mark.parametrize(("n", "axis_types"), [(1, AUTO), (2, EXPLICIT), (4, AUTO), (8, EXPLICIT)])
def test_replicas_train_alone_and_average_their_parameters(n, axis_types):
    tx = jdp.local_sgd(ADAM, every=3)
    expected = apart(LOSS, PARAMS, ADAM, n, 3, batches(7))
    state = compare(tx, expected, n, axis_types=axis_types)
    assert int(state.opt_state.calls) == 7
    # the optimizer states are each replica's own
    counts = np.asarray(state.opt_state.inner_state[0].count.value)
    np.testing.assert_array_equal(counts, [7] * n)


@pytest.mark.parametrize(("n", "axis_types"), [(8, AUTO), (2, EXPLICIT)])
def test_post_local_sgd_begins_in_step(n, axis_types):
    expected = apart(LOSS, PARAMS, ADAM, n, 2, batches(7), start=3)
    compare(jdp.local_sgd(ADAM, 2, start=3), expected, n, axis_types=axis_types)


@pytest.mark.parametrize(("n", "axis_types"), [(1, EXPLICIT), (2, AUTO), (4, EXPLICIT), (8, AUTO)])
def test_diloco_is_a_second_optimizer_of_mean_differences(n, axis_types):
    expected = apart(LOSS, PARAMS, ADAM, n, 3, batches(7), outer=NESTEROV)
    compare(jdp.diloco(ADAM, NESTEROV, 3), expected, n, axis_types=axis_types)


@pytest.mark.parametrize(("n", "axis_types"), [(8, AUTO), (2, EXPLICIT)])
def test_diloco_may_begin_in_step(n, axis_types):
    expected = apart(LOSS, PARAMS, ADAM, n, 2, batches(7), start=3, outer=NESTEROV)
    compare(jdp.diloco(ADAM, NESTEROV, 2, start=3), expected, n, axis_types=axis_types)


def test_what_replicas_moved_in_step_is_no_difference():
    state, _ = train(jdp.local_sgd(ADAM, 9, start=3, reduce=jdp.all_reduce()), count=3)
    want, _ = train(optax.chain(jdp.all_reduce(), ADAM), count=3)
    assert_close(state.opt_state.anchor, want.params, rtol=2e-6)
    assert_equal_rows(state.params)


@pytest.mark.parametrize(("n", "axis_types"), [(8, AUTO), (2, EXPLICIT)])
def test_fragments_agree_one_after_the_other(n, axis_types):
    fragments = [["w1"], ["w2", "b1"]]  # 384, 192 + 24 numbers
    expected = apart(LOSS, PARAMS, ADAM, n, 4, batches(9), outer=NESTEROV, fragments=fragments)
    tx = jdp.diloco(ADAM, NESTEROV, 4, fragments=2)
    compare(tx, expected, n, axis_types=axis_types, count=9)


def test_weights_count_as_in_the_global_loss():
    expected = apart(MASKED, PARAMS, optax.sgd(0.3), 8, 3, batches(7))
    compare(jdp.local_sgd(optax.sgd(0.3), 3), expected, 8, loss_fn=MASKED, microbatch=4)


def train(tx, count=4, loss_fn=LOSS, mesh=None, **options):
    mesh = mesh or jdp.make_mesh()
    step, state = jdp.train_step(loss_fn, tx, mesh, **options), jdp.init_state(PARAMS, tx, mesh)
    losses = []
    for batch in batches(count):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize("inner", [optax.sgd(0.1), ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("make", ["local_sgd", "diloco", "start"])
def test_every_1_is_synchronous_training(make, inner):
    tx = {
        "local_sgd": jdp.local_sgd(inner, 1),
        "diloco": jdp.diloco(inner, optax.sgd(1.0), 1),
        "start": jdp.local_sgd(inner, 5, start=4),
    }[make]
    state, losses = train(tx)
    same, expected = train(optax.chain(jdp.all_reduce(), inner))
    assert losses == pytest.approx(expected, rel=1e-6)
    if make == "start":  # another program, which rounds otherwise
        assert_equal_rows(state.params)
        assert_close(rows(state.params, 8)[0], same.params, rtol=2e-6)
    else:
        jax.tree.map(np.testing.assert_array_equal, state.params, same.params)


def test_every_1_with_momentum_outside_is_the_outer_optimizer_of_what_the_inner_one_subtracts():
    tx = jdp.diloco(optax.sgd(0.1), NESTEROV, 1)
    state, _ = train(tx)
    same, _ = train(optax.chain(jdp.all_reduce(), optax.sgd(0.1), optax.scale(-1.0), NESTEROV))
    jax.tree.map(np.testing.assert_array_equal, state.params, same.params)
    expected = apart(LOSS, PARAMS, optax.sgd(0.1), 8, 1, batches(4), outer=NESTEROV)
    assert_close(state.params, list(expected)[-1][1][0], rtol=1e-5)


@pytest.mark.parametrize("wire", [None, jnp.bfloat16, jnp.float16])
def test_what_is_agreed_on_are_the_same_bits(wire):
    reduce = None if wire is None else jdp.all_reduce(wire_dtype=wire)
    state, _ = train(jdp.diloco(ADAM, NESTEROV, 2, reduce=reduce))
    assert_equal_rows(state.params)
    assert_same_copies(state)
    for name, leaf in state.params.items():
        np.testing.assert_array_equal(leaf.value[0], state.opt_state.anchor[name])
    state, _ = train(jdp.local_sgd(ADAM, 2, reduce=reduce))
    assert_equal_rows(state.params)


def test_a_narrow_wire_rounds_differences_and_not_parameters():
    def shifted(params, batch):  # far from 0, where bfloat16 is coarse
        return LOSS(jax.tree.map(lambda p: p - 100.0, params), batch)

    start = jax.tree.map(lambda p: p + 100.0, PARAMS)
    mesh, found = jdp.make_mesh(), []
    for reduce in (None, jdp.all_reduce(wire_dtype=jnp.bfloat16)):
        tx = jdp.local_sgd(optax.sgd(0.1), 2, reduce=reduce)
        step, state = jdp.train_step(shifted, tx, mesh), jdp.init_state(start, tx, mesh)
        for batch in batches(2):
            state, _ = step(state, batch)
        found.append(jdp.agreed(state.params))
    moved = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(*map(jax.tree.leaves, (found[0], start)), strict=True)
    )
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        # bfloat16's rounding of how far they moved, twice, and the spacing of float32 at 100
        assert float(jnp.abs(a - b).max()) <= 2.0**-7 * moved + 2.0**-17


@pytest.mark.parametrize(
    ("reduce", "part"),
    [
        (jdp.all_reduce(wire_dtype=jnp.int8), 0.27),
        (jdp.all_reduce(wire_dtype=jnp.int8, error_feedback=True, stochastic=True), 0.27),
        (jdp.all_reduce(wire_dtype=jnp.float8_e4m3fn), 0.27),
    ],
    ids=["int8", "int8_feedback", "float8"],
)
def test_the_outer_gradient_may_be_quantized(reduce, part):
    tx = jdp.diloco(ADAM, NESTEROV, 2, reduce=reduce, fragments=2)
    state, _ = train(tx, count=5)
    want, _ = train(jdp.diloco(ADAM, NESTEROV, 2, fragments=2), count=5)
    assert_same_copies(state)
    assert_equal_rows({name: state.params[name] for name in ("w2", "b1")})  # in the fifth call
    for name, leaf in want.opt_state.anchor.items():
        moved = float(jnp.abs(leaf - PARAMS[name]).max())
        error = float(jnp.abs(state.opt_state.anchor[name] - leaf).max())
        assert 0 < error < 0.1 * moved  # a rounding of 1/16 or less of some steps, not of weights
    found = [c for c in collectives(compiled(tx)) if c.in_branch]
    each = [c.bytes for c in found if c.kind == "all-gather"]
    assert sum(each) <= part * sum(SIZES.values()) + 64 * len(each)


def test_narrow_parameters_have_a_wide_anchor_and_no_difference_without_a_step():
    mesh = jdp.make_mesh()
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    inner = jdp.master_weights(optax.sgd(0.0), dtype=None)
    tx = jdp.diloco(inner, optax.sgd(1.0, momentum=0.9), 2)
    state = jdp.init_state(params, tx, mesh)
    # an anchor between two numbers of bfloat16
    anchor = jax.tree.map(lambda a: a + 2.0**-12 * a, state.opt_state.anchor)
    state = state._replace(opt_state=jdp.LocalState(**vars(state.opt_state) | {"anchor": anchor}))
    start = [np.asarray(a) for a in jax.tree.leaves(anchor)]
    step = jdp.train_step(LOSS, tx, mesh)
    for batch in batches(2):
        state, _ = step(state, batch)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(state.params))
    for want, have in zip(start, jax.tree.leaves(state.opt_state.anchor), strict=True):
        np.testing.assert_array_equal(have, want)


# -- What is sent.


def compiled(tx, mesh=None):
    mesh = mesh or jdp.make_mesh()
    step = jdp.train_step(LOSS, tx, mesh)
    return step.lower(jdp.init_state(PARAMS, tx, mesh), BATCH).compile().as_text()


@pytest.mark.parametrize("axis_types", [AUTO, EXPLICIT])
@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_only_the_branch_of_an_agreement_sends(axis_types, fragments):
    tx = jdp.diloco(ADAM, NESTEROV, 4, fragments=fragments)
    found = collectives(compiled(tx, jdp.make_mesh(axis_types=(axis_types,))))
    assert [(c.kind, c.bytes) for c in found if not c.in_branch] == [("all-reduce", 8)]
    sent = sorted(c.bytes for c in found if c.in_branch)
    whole = sum(SIZES.values())
    assert (
        sent
        == {
            1: [whole],
            2: [SIZES["w2"] + SIZES["b1"], SIZES["w1"]],
            3: sorted(SIZES.values()),
        }[fragments]
    )
    assert not any(c.in_loop for c in found)


@pytest.mark.parametrize(
    ("reduce", "bytes_sent"), [(jnp.bfloat16, 2), (jnp.float16, 2), (jnp.float32, 4)]
)
def test_differences_travel_as_reduce_sends_them(reduce, bytes_sent):
    tx = jdp.local_sgd(ADAM, 4, reduce=jdp.all_reduce(wire_dtype=reduce))
    found = [c for c in collectives(compiled(tx)) if c.in_branch]
    want = sum(SIZES.values()) * bytes_sent // 4
    # the parts of a narrow buffer may be filled up
    assert all(want <= c.bytes <= 1.03 * want for c in found)


def test_synchronous_calls_send_gradients_in_a_branch_of_their_own():
    found = collectives(compiled(jdp.local_sgd(ADAM, 4, start=3)))
    assert [c.bytes for c in found if not c.in_branch] == [8]
    assert [c.bytes for c in found if c.in_branch] == [sum(SIZES.values())] * 2


def test_b07_the_branch_is_chosen_by_what_all_replicas_share():
    # it does not stand in a shard_map, where each replica could choose for itself
    always, due = exchanges(jdp.diloco(ADAM, NESTEROV, 4, fragments=2), jdp.make_mesh())
    assert (always, due) == (set(), {("data",)})


def exchanges(tx, mesh):
    """The axes along which an update sends in each call, and in a branch of the whole program."""
    state = jdp.init_state(PARAMS, tx, mesh)
    grads = jdp.value_and_grad(LOSS, mesh)(state.params, BATCH)[1]
    program = jax.make_jaxpr(tx.apply)(grads, state.opt_state, state.params)
    branches = [e for e in program.jaxpr.eqns if e.primitive.name == "cond"]
    assert len(branches) == 1
    always = [e for e in program.jaxpr.eqns if e not in branches]
    return sent_along(always), sent_along(branches)


def sent_along(eqns):
    found = set()
    for eqn in eqns:
        if re.match("psum|all_|reduce_scatter|ppermute", eqn.primitive.name):
            found.add(tuple(eqn.params.get("axes") or eqn.params["axis_name"]))
        for body in bodies(eqn):
            found |= sent_along(body.eqns)
    return found


@pytest.mark.aot
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_on_accelerators_too_only_a_branch_sends(platform, monkeypatch):
    mesh = Mesh(np.array(devices(platform, monkeypatch)), ("data",))
    tx = jdp.diloco(ADAM, NESTEROV, 4, fragments=2)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = jax.tree.map(lambda x: shape(x.shape), PARAMS)
    split = NamedSharding(mesh, P("data"))
    batch = {k: shape((64, *x.shape[1:]), sharding=split) for k, x in BATCH.items()}
    step = jdp.train_step(LOSS, tx, mesh)
    found = collectives(step.lower(jdp.init_state(params, tx, mesh), batch).compile().as_text())
    assert all(c.bytes <= 8 for c in found if not c.in_branch)
    assert sum(c.bytes for c in found if c.in_branch) >= sum(SIZES.values())


def test_memory_is_that_of_synchronous_training_and_what_is_kept_besides():
    width, depth = 512, 4
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params, mesh = [shape((width, width))] * depth, jdp.make_mesh()
    size = depth * width * width * 4

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def live(tx):
        step = jdp.train_step(loss_fn, tx, mesh)
        state = jdp.init_state(params, tx, mesh)
        return live_bytes(step.lower(state, shape((64, width))).compile())

    synchronous = live(optax.chain(jdp.all_reduce(), ADAM))
    assert live(jdp.local_sgd(ADAM, 8)) <= synchronous + 0.01 * size
    # the anchor and its momentum
    assert live(jdp.diloco(ADAM, NESTEROV, 8)) <= synchronous + 2.01 * size


# -- What the rest of the library makes of it.


def test_evaluation_takes_the_agreed_mean():
    mesh = jdp.make_mesh()
    state, _ = train(jdp.local_sgd(ADAM, 3), mesh=mesh)  # four calls: one after an agreement
    own = rows(state.params, 8)
    assert any(not np.array_equal(own[0][k], own[1][k]) for k in PARAMS)
    agreed = jdp.agreed(state.params)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(agreed))
    assert_close(agreed, mean(own), rtol=1e-6)
    step = jdp.eval_step(LOSS, mesh, microbatch=4)
    want = float(LOSS(agreed, BATCH))
    assert float(step(state.params, BATCH).value) == pytest.approx(want, rel=1e-6)
    assert jdp.evaluate(step, state.params, [BATCH]) == pytest.approx(want, rel=1e-6)
    given = []
    jdp.evaluate(
        lambda params, batch: given.append(params) or step(params, batch), state.params, [BATCH]
    )
    jax.tree.map(np.testing.assert_array_equal, given[0], agreed)  # reduced once for all batches


def test_another_run_starts_from_the_agreed_mean():
    mesh = jdp.make_mesh()
    state, _ = train(jdp.local_sgd(ADAM, 3), mesh=mesh)
    agreed = jdp.agreed(state.params)
    plain = jdp.init_state(state.params, optax.chain(jdp.all_reduce(), ADAM), mesh)
    jax.tree.map(np.testing.assert_array_equal, plain.params, agreed)
    again = jdp.init_state(state.params, jdp.diloco(ADAM, NESTEROV, 4), mesh)
    assert_equal_rows(again.params)
    jax.tree.map(np.testing.assert_array_equal, again.opt_state.anchor, agreed)


def test_synchronous_training_may_go_on_with_mean_moments():
    """As docs/sending.md shows, against Optax on the means by hand."""
    mesh, tx = jdp.make_mesh(), optax.chain(jdp.all_reduce(), ADAM)
    state, _ = train(jdp.diloco(ADAM, NESTEROV, 3), mesh=mesh)
    new = jdp.init_state(jdp.agreed(state.params), tx, mesh)
    adam = jdp.restage(state.opt_state.inner_state, new.opt_state[1])
    new = new._replace(step=state.step, opt_state=(new.opt_state[0], adam))
    params, held = (
        jax.tree.map(
            lambda x: np.asarray(x).mean(0).astype(x.dtype),
            map_per_replica(lambda leaf: leaf.value, tree),
        )
        for tree in (state.params, state.opt_state.inner_state)
    )
    assert held[0].count == state.step
    _, grads = gradient_of(LOSS)(params, BATCH)
    updates, _ = ADAM.update(grads, held, params)
    new, _ = jdp.train_step(LOSS, tx, mesh)(new, BATCH)
    assert_close(new.params, optax.apply_updates(params, updates), rtol=1e-5)
    assert int(new.step) == 5


def test_init_may_be_given_the_parameters_of_local_steps():
    mesh, tx = jdp.make_mesh(), jdp.diloco(ADAM, NESTEROV, 4)
    state = jdp.init_state(PARAMS, tx, mesh)
    again = tx.init(state.params)
    shapes = [[x.shape for x in jax.tree.leaves(tree)] for tree in (again, state.opt_state)]
    assert shapes[0] == shapes[1]


def test_a_state_of_shapes_lies_as_a_state_of_arrays():
    tx, mesh = jdp.diloco(ADAM, NESTEROV, 4, fragments=2), jdp.make_mesh()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    there, here = (jdp.init_state(params, tx, mesh) for params in (shapes, PARAMS))
    assert jax.tree.structure(there) == jax.tree.structure(here)
    for a, b in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
    assert jdp.agreed(there.params)["w1"].shape == (16, 24)


def test_it_goes_on_to_the_bit_after_saving():
    tx, mesh = jdp.diloco(ADAM, NESTEROV, 3, fragments=3), jdp.make_mesh()
    step, state = jdp.train_step(LOSS, tx, mesh, donate=False), jdp.init_state(PARAMS, tx, mesh)
    given = list(batches(5))
    for batch in given[:2]:
        state, _ = step(state, batch)
    leaves, treedef = jax.tree.flatten(jdp.logical(state))
    saved = pickle.dumps([np.asarray(x) for x in leaves])
    like = jdp.init_state(PARAMS, tx, mesh)
    back = jdp.restage(treedef.unflatten(pickle.loads(saved)), like)
    for batch in given[2:]:
        state, _ = step(state, batch)
        back, _ = step(back, batch)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_fewer_devices_take_over_the_mean():
    tx = jdp.diloco(ADAM, NESTEROV, 3)
    state, _ = train(tx)
    mesh = jdp.make_mesh(num_devices=4)
    moved = jdp.restage(state, jdp.init_state(PARAMS, tx, mesh))
    assert_equal_rows(moved.params)
    assert_close(rows(moved.params, 4)[0], jdp.agreed(state.params), rtol=1e-6)
    count = moved.opt_state.inner_state[0].count.value
    np.testing.assert_array_equal(count, np.full(4, 4, np.int32), strict=True)
    moved, metrics = jdp.train_step(LOSS, tx, mesh)(moved, BATCH)
    assert np.isfinite(float(metrics["loss"]))
    assert int(moved.step) == 5


def test_the_second_call_compiles_nothing_and_memory_is_reused(recwarn):
    tx, mesh = jdp.diloco(ADAM, NESTEROV, 2), jdp.make_mesh()
    step, state = jdp.train_step(LOSS, tx, mesh), jdp.init_state(PARAMS, tx, mesh)
    state, _ = step(state, BATCH)
    with jax.no_tracing():
        new, _ = step(state, BATCH)
    assert not recwarn.list
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))
    assert new.params["w1"].value.addressable_shards[0].data.shape == (1, 16, 24)


def test_it_may_be_part_of_a_scan_over_steps():
    tx, mesh = jdp.local_sgd(ADAM, 2), jdp.make_mesh()
    step, state = jdp.train_step(LOSS, tx, mesh), jdp.init_state(PARAMS, tx, mesh)
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *batches(4))
    new, _ = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(state, stacked)
    want, _ = train(tx, mesh=mesh)
    for name, leaf in want.params.items():
        assert_close(new.params[name].value, leaf.value, rtol=1e-6)


def test_update_is_for_loops_of_ones_own():
    tx, mesh = jdp.diloco(ADAM, NESTEROV, 2), jdp.make_mesh()
    state = jdp.init_state(PARAMS, tx, mesh)
    params, opt_state = state.params, state.opt_state
    grad_fn = jdp.value_and_grad(LOSS, mesh)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for batch in batches(4):
        params, opt_state, _ = step(params, opt_state, batch)
    want, _ = train(tx, mesh=mesh)
    for name, leaf in want.params.items():
        assert_close(params[name].value, leaf.value, rtol=1e-5)
    jdp.check_order(lambda p, s, b: step(p, s, b), params, opt_state, BATCH)


def test_nodes_may_be_the_replicas():
    names, shape = ("node", "device"), (2, 4)
    mesh = jdp.make_mesh(names, shape)
    tx = jdp.diloco(ADAM, NESTEROV, 3, axis="node")
    step, state = jdp.train_step(LOSS, tx, mesh), jdp.init_state(PARAMS, tx, mesh)
    assert state.params["w1"].shape == (2, 16, 24)
    assert state.params["w1"].value.addressable_shards[0].data.shape == (1, 16, 24)
    expected = apart(LOSS, PARAMS, ADAM, 2, 3, batches(7), outer=NESTEROV)
    for batch, (loss, want) in zip(batches(7), expected, strict=True):
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=2e-6)
        for have, one in zip(rows(state.params, 2), want, strict=True):
            assert_close(have, one, rtol=2e-5)
        assert_same_copies(state)
    found = collectives(compiled(tx, mesh))
    always = [c for c in found if not c.in_branch and c.bytes > 8]
    assert [c.bytes for c in always] == [sum(SIZES.values())]
    # in each call gradients within the nodes; then, if it is due, differences across them
    assert exchanges(tx, mesh) == ({("device",)}, {("node",)})


@pytest.mark.parametrize("axis_types", [AUTO, EXPLICIT])
def test_an_axis_of_the_users_stays_split(axis_types):
    mesh = jdp.make_mesh(("data", "model"), (4, 2), axis_types=(axis_types, AUTO))
    specs = {"w1": P(None, "model"), "b1": P(), "w2": P("model")}
    params = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in PARAMS.items()}
    tx = jdp.diloco(ADAM, NESTEROV, 2)
    step, state = jdp.train_step(LOSS, tx, mesh), jdp.init_state(params, tx, mesh)
    for batch in batches(3):
        state, _ = step(state, batch)
    adam, outer = state.opt_state.inner_state[0], state.opt_state.outer_states[0][0]
    for leaf in (state.params["w1"], adam.mu["w1"]):
        assert leaf.value.sharding.shard_shape(leaf.shape) == (1, 16, 12)
    for leaf in (state.opt_state.anchor["w1"], outer.trace["w1"], jdp.agreed(state.params)["w1"]):
        assert leaf.sharding.shard_shape(leaf.shape) == (16, 12)
    *_, (_, want) = apart(LOSS, PARAMS, ADAM, 4, 2, batches(3), outer=NESTEROV)
    for have, one in zip(rows(state.params, 4), want, strict=True):
        assert_close(have, one, rtol=2e-5)


def test_shares_and_keys_are_those_of_the_gradient():
    def noisy(params, batch, key):
        return LOSS(params, batch | {"x": batch["x"] * jax.random.bernoulli(key, 0.5, (4, 1))})

    mesh, tx = jdp.make_mesh(num_devices=2), jdp.local_sgd(optax.sgd(1.0), 2)
    step = jdp.train_step(noisy, tx, mesh, microbatch=4)
    state = jdp.init_state(PARAMS, tx, mesh, key=jax.random.key(3))
    shares, key = jnp.array([8, 3]), jax.random.fold_in(state.key, 0)
    _, grads = jdp.value_and_grad(noisy, mesh, microbatch=4)(PARAMS, BATCH, key, shares=shares)
    want = jax.tree.map(lambda p, g: p - g.value, PARAMS, grads, is_leaf=lambda x: x is None)
    state, _ = step(state, BATCH, shares=shares)
    for name in PARAMS:
        assert_close(state.params[name].value, want[name], rtol=1e-6)


# -- What stands inside.


def test_a_clip_is_of_one_replica_and_a_schedule_counts_local_steps():
    schedule = optax.piecewise_constant_schedule(0.1, {2: 0.1, 4: 5.0})
    inner = optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(schedule))
    expected = apart(LOSS, PARAMS, inner, 4, 3, batches(7))
    compare(jdp.local_sgd(inner, 3), expected, 4)


def test_a_replica_skips_its_own_step_alone():
    mesh, tx = jdp.make_mesh(), jdp.local_sgd(jdp.skip_nonfinite(ADAM), 2)
    step, state = jdp.train_step(LOSS, tx, mesh), jdp.init_state(PARAMS, tx, mesh)
    bad = BATCH | {"x": BATCH["x"].at[3 * 8].set(jnp.nan)}  # an example of replica 3
    state, _ = step(state, bad)
    own = rows(state.params, 8)
    assert_close(own[3], PARAMS, rtol=0)
    assert not np.array_equal(own[2]["w1"], PARAMS["w1"])
    skipped = np.asarray(state.opt_state.inner_state.skipped.value)
    np.testing.assert_array_equal(skipped, np.arange(8) == 3)
    state, _ = step(state, BATCH)
    assert_equal_rows(state.params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jdp.agreed(state.params)))


def test_model_state_of_a_call_that_a_replica_skipped_is_dropped():
    def loss_fn(params, batch, *, model_state):
        seen = jax.lax.pmean(batch["x"].mean(), "data")
        return LOSS(params, batch), {}, {"mean": 0.5 * model_state["mean"] + seen}

    mesh, tx = jdp.make_mesh(), jdp.local_sgd(jdp.skip_nonfinite(optax.sgd(0.1)), 2)
    step = jdp.train_step(loss_fn, tx, mesh)
    state = jdp.init_state(PARAMS, tx, mesh, model_state={"mean": jnp.ones(())})
    state, _ = step(state, BATCH | {"x": BATCH["x"].at[3 * 8].set(jnp.inf)})
    assert float(state.model_state["mean"]) == 1.0
    state, _ = step(state, BATCH)
    assert float(state.model_state["mean"]) == pytest.approx(0.5 + float(BATCH["x"].mean()))


INNER = (
    "lamb",
    "lars",
    "adafactor",
    "muon",
    "novograd",
    "schedule_free",
    "MultiSteps",
    "apply_if_finite",
    "inject_hyperparams",
    "add_noise",
    "multi_transform",
)


def test_any_optimizer_does_what_it_does_on_one_device():
    """Each replica's parameters after local steps are those of one device with its examples."""
    shapes = optimizers.TREES[0]
    found = optimizers.find()
    txs = {name: optimizers.construct(name, found[name], shapes) for name in INNER}
    loss_fn, given = optimizers.loss_for(shapes), optimizers.batches(len(shapes))
    params = {name: optimizers.initial(name, shapes) for name in txs}
    inner = optimizers.each(txs)
    mesh, tx = jdp.make_mesh(num_devices=2), jdp.local_sgd(inner, 100)
    step, state = jdp.train_step(loss_fn, tx, mesh), jdp.init_state(params, tx, mesh)

    @jax.jit
    def alone(params, opt_state, batch, value):
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = inner.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state

    own = [(params, inner.init(params)) for _ in range(2)]
    for batch in given[:3]:
        state, metrics = step(state, batch)
        parts = np.split(batch, 2)
        own = [alone(*one, part, metrics["loss"]) for one, part in zip(own, parts, strict=True)]
    for i, (want, _) in enumerate(own):
        is_leaf = lambda x: isinstance(x, jdp.PerReplica)  # noqa: E731
        have = jax.tree.map(lambda x, i=i: np.asarray(x.value)[i], state.params, is_leaf=is_leaf)
        assert_close(have, want, rtol=2e-5)


def test_the_outer_state_may_be_split():
    tx = jdp.diloco(ADAM, jdp.zero1(NESTEROV, min_size=0), 2)
    state, losses = train(tx)
    want, expected = train(jdp.diloco(ADAM, NESTEROV, 2))
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, leaf in want.params.items():
        assert_close(state.params[name].value, leaf.value, rtol=1e-6)
    trace = state.opt_state.outer_states[0].inner_state[0].trace["w1"]
    assert trace.addressable_shards[0].data.size == 16 * 24 // 8
    # differences are scattered as they are reduced: no more is sent than without
    found = [c for c in collectives(compiled(tx)) if c.in_branch]
    assert {c.kind for c in found} == {"reduce-scatter", "all-gather"}
    assert sum(c.bytes for c in found) == 2 * sum(SIZES.values())


def test_an_agreement_with_nan_may_be_skipped_as_a_whole():
    mesh = jdp.make_mesh()
    tx = jdp.diloco(optax.sgd(0.1), jdp.skip_nonfinite(NESTEROV), 2)
    step, state = jdp.train_step(LOSS, tx, mesh), jdp.init_state(PARAMS, tx, mesh)
    state, _ = step(state, BATCH | {"x": BATCH["x"].at[0].set(jnp.nan)})
    state, _ = step(state, BATCH)
    assert int(state.opt_state.outer_states[0].skipped) == 1
    for have in rows(state.params, 8):  # all begin anew where they agreed last
        jax.tree.map(np.testing.assert_array_equal, have, PARAMS)


def _in_two_processes():
    import jax
    import numpy as np
    from reference import assert_same_copies
    from test_local import ADAM, LOSS, NESTEROV, PARAMS, batches

    import jdp

    me, mesh = jax.process_index(), jdp.make_mesh()
    tx = jdp.diloco(ADAM, NESTEROV, 3, fragments=2)
    step, state = jdp.train_step(LOSS, tx, mesh), jdp.init_state(PARAMS, tx, mesh)
    mine = ({k: x[32 * me :][:32] for k, x in batch.items()} for batch in batches(5))
    losses = []
    for batch in jdp.feed(mine, mesh):
        state, metrics = step(state, {k: x for k, x in batch.items() if k != "weight"})
        losses.append(float(metrics["loss"]))
    assert_same_copies(state)
    agreed = jdp.agreed(state.params)
    return {"losses": losses, "params": {k: np.asarray(x).tolist() for k, x in agreed.items()}}


@pytest.mark.multiprocess
def test_two_processes_do_the_same():
    fragments = [["w1"], ["w2", "b1"]]
    given = apart(LOSS, PARAMS, ADAM, 4, 3, batches(5), outer=NESTEROV, fragments=fragments)
    losses, own = zip(*given, strict=True)
    for answer in cluster.run(_in_two_processes, num_devices=2, seconds=120):
        assert answer.value["losses"] == pytest.approx(losses, rel=2e-6)
        params = {k: np.asarray(x, np.float32) for k, x in answer.value["params"].items()}
        assert_close(params, mean(own[-1]), rtol=2e-5)
