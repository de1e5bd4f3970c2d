"""Narrow parameters with wide copies, steps that are skipped whole, loss scales, compute dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from jdp.finite import find_loss_scale
from jdp.precision import check_master
from jdp.replica import take_per_replica

pytestmark = pytest.mark.either

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
CASES = [(1, "auto"), (2, "explicit"), (4, "auto"), (8, "auto"), (8, "explicit")]
INF, NAN = np.float32("inf"), np.float32("nan")


@functools.cache
def mesh_of(count=8, kind="auto"):
    return jdp.make_mesh(num_devices=count, axis_types=(KINDS[kind],))


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def bits(tree):
    """Every leaf as bytes: equal only if the same to the bit."""
    host = lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x)  # noqa: E731
    return [host(x).tobytes() for x in jax.tree.leaves(tree)]


def reduced(*links):
    return optax.chain(jdp.all_reduce(), *links)


# Whole numbers below 4 in 64 rows: every mean of theirs is exact in bfloat16, so that nothing
# here needs a tolerance.
ROWS = np.random.default_rng(0).integers(0, 4, (64, 24)).astype(np.float32)


def linear(params, batch):
    """A loss whose gradient is the mean row."""
    return jnp.mean(batch @ params["w"].astype(F32)) + 0 * jnp.sum(params["b"])


def fresh(dtype=F32):
    return {"w": jnp.linspace(-2, 2, 24).astype(dtype), "b": jnp.full(3, -0.0, dtype)}


def train(tx, params, batches, mesh, loss=linear, **keywords):
    """States before and after each step."""
    step = jdp.train_step(loss, tx, mesh, donate=False, **keywords)
    states = [jdp.init_state(params, tx, mesh)]
    for batch in batches:
        states.append(step(states[-1], batch)[0])
    # a key in the state costs JAX a second entry, though nothing is compiled anew
    keyed = any(map(is_key, jax.tree.leaves(states[0])))
    assert step._compiled._cache_size() <= 1 + keyed
    return states


def spoilt(row, value=INF):
    batch = ROWS.copy()
    batch[row, 5] = value
    return batch


# --- master weights


@pytest.mark.parametrize(("count", "kind"), CASES)
def test_master_weights_take_the_steps_that_float32_parameters_would(count, kind):
    """Against a plain float32 loop, exactly, with moments."""
    optimizer = optax.adamw(1e-3, weight_decay=0.1)
    tx = reduced(jdp.master_weights(optimizer))
    states = train(tx, fresh(BF16), [ROWS, ROWS[::-1] / 2, ROWS], mesh_of(count, kind))
    reference.assert_same_copies(states[-1])
    master, opt_state = jax.tree.map(lambda p: p.astype(F32), fresh(BF16)), None
    update = jax.jit(optimizer.update)
    opt_state = optimizer.init(master)
    for state, batch in zip(states[1:], [ROWS, ROWS[::-1] / 2, ROWS], strict=True):
        grads = {"w": batch.mean(0), "b": np.zeros(3, np.float32)}
        updates, opt_state = update(grads, opt_state, master)
        master = optax.apply_updates(master, updates)
        kept = state.opt_state[1]
        reference.assert_close(kept.master, master, rtol=2e-7)
        for param, copy in zip(
            jax.tree.leaves(state.params), jax.tree.leaves(kept.master), strict=True
        ):
            assert (param.dtype, copy.dtype) == (BF16, F32)
            np.testing.assert_array_equal(param, copy.astype(BF16))
        assert {x.dtype.name for x in jax.tree.leaves(kept.inner_state)} == {"float32", "int32"}


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("jitted", [True, False])
def test_the_update_leads_exactly_to_the_rounded_copy(dtype, jitted):
    """Also for large steps, changes of sign, and float16's subnormal numbers."""
    tx = jdp.master_weights(optax.sgd(1.0))
    rng = np.random.default_rng(0)
    old = (rng.normal(size=5000) * 10.0 ** rng.uniform(-7, 4, 5000)).astype(np.float32)
    new = old * rng.choice([1.001, 0.5, 1.5, -0.3, 3, 40], 5000).astype(np.float32)
    new[:100] = 0
    run = lambda p, g: one_step(tx, p, g)  # noqa: E731
    params, state = (jax.jit(run) if jitted else run)(
        jnp.asarray(old).astype(dtype), jnp.asarray(old).astype(dtype).astype(F32) - new
    )
    want = state.master.astype(dtype)
    assert len(np.unique(np.asarray(want, np.float32))) > 1000
    np.testing.assert_array_equal(params, want)


def one_step(tx, params, grads):
    updates, state = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_rounding_is_one_that_no_compiler_removes(dtype):
    """XLA removes a cast there and back on GPUs; seen in the program compiled for an H100."""
    program = jax.jit(functools.partial(one_step, jdp.master_weights(optax.sgd(1.0))))
    param = jax.ShapeDtypeStruct((4,), dtype)
    assert "reduce_precision" in program.lower(param, param).as_text()


def test_a_parameter_that_all_but_vanishes_is_off_for_one_step_as_documented():
    """The copy lies below the parameter, 32, and a float32 near 32 cannot lead to -2^-19."""
    tx = jdp.master_weights(optax.sgd(1.0))
    old, param = F32(32 - 2**-19), jnp.full((), 32, BF16)
    state = tx.init(param)._replace(master=old)
    updates, state = tx.update(F32(32), state, param)
    assert state.master == -(2**-19)
    param = optax.apply_updates(param, updates)
    assert 0 < abs(float(param) + 2**-19) <= 32 * 2**-24
    updates, state = tx.update(F32(0), state, param)
    assert optax.apply_updates(param, updates) == -(2**-19)


def test_wide_parameters_have_no_copy_and_absent_ones_stay_absent():
    params = {"half": jnp.ones(3, BF16), "full": jnp.ones(3), "none": None}
    tx = jdp.master_weights(optax.adam(0.1))
    state = tx.init(params)
    assert state.master["full"] is None is state.master["none"]
    assert state.master["half"].dtype == F32
    assert {x.dtype for x in jax.tree.leaves(state.inner_state[0].mu)} == {jnp.dtype(F32)}
    grads = {"half": jnp.ones(3, BF16), "full": jnp.ones(3), "none": None}
    updates, after = jax.jit(tx.update)(grads, state, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    plain = optax.adam(0.1)
    want, _ = jax.jit(plain.update)(
        {"full": jnp.ones(3)}, plain.init({"full": jnp.ones(3)}), {"full": jnp.ones(3)}
    )
    np.testing.assert_array_equal(updates["full"], want["full"])
    reference.assert_close(after.master["half"], 1 + want["full"], rtol=2e-7)


def test_frozen_parameters_stay_to_the_bit_on_either_side():
    params = {"w": jnp.linspace(-1, 1, 24).astype(BF16), "b": jnp.ones(3, BF16) / 3}
    labels = {"w": "train", "b": "frozen"}
    groups = {"train": optax.sgd(0.5), "frozen": optax.set_to_zero()}
    inside = jdp.master_weights(optax.partition(groups, labels))
    groups = {"train": jdp.master_weights(optax.sgd(0.5)), "frozen": optax.set_to_zero()}
    outside = optax.partition(groups, labels)
    ends = []
    for tx in (inside, outside):
        state = train(reduced(tx), params, [ROWS, ROWS], mesh_of())[-1]
        assert bits(state.params["b"]) == bits(params["b"])
        ends.append(bits(state.params["w"]))
    assert ends[0] == ends[1] != bits(params["w"])


def test_without_copies_everything_is_narrow():
    tx = jdp.master_weights(optax.adam(0.1), dtype=None)
    params = {"w": jnp.ones(3, BF16), "full": jnp.ones(3)}
    state = tx.init(params)
    assert jax.tree.leaves(state.master) == []
    # a reduction hands on float32; moments must not become that on the first step
    updates, after = tx.update({"w": jnp.ones(3), "full": jnp.ones(3)}, state, params)
    assert (updates["w"].dtype, updates["full"].dtype) == (BF16, F32)
    kinds = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]  # noqa: E731
    assert kinds(after) == kinds(state)
    assert after.inner_state[0].mu["w"].dtype == BF16


def by_value():
    """Scales by an extra argument."""

    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda u: -u * value, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


WRAPPERS = {
    "master_weights": jdp.master_weights,
    "skip_nonfinite": jdp.skip_nonfinite,
    "dynamic_loss_scale": lambda inner: jdp.dynamic_loss_scale(inner, 1.0),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_extra_arguments_reach_the_inner_transformation(wrap):
    tx, params = wrap(by_value()), {"w": jnp.ones(2)}
    updates, _ = tx.update({"w": jnp.ones(2)}, tx.init(params), params, value=3.0)
    np.testing.assert_array_equal(updates["w"], [-3, -3])


def test_refusals_of_master_weights():
    params = {"w": jnp.ones(2, BF16)}
    tx = jdp.master_weights(optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"needs the parameters.*update\(grads, opt_state, params"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match=r"dtype=float16, which is as narrow.*Use jnp.float32"):
        jdp.master_weights(optax.sgd(1.0), dtype=F16)
    with pytest.raises(ValueError, match=r"stands around the reduction.*Put it behind"):
        train(jdp.master_weights(reduced(optax.sgd(1.0))), fresh(BF16), [ROWS], mesh_of())


def test_narrow_parameters_need_a_decision():
    params = {"layer": {"full": jnp.ones(2), "half": jnp.ones(2, BF16)}}
    for inner in (optax.adam(0.1), reduced(optax.sgd(1.0))):
        with pytest.raises(
            ValueError,
            match=r"\['layer'\]\['half'\] has the dtype bfloat16, whose spacing at 1.0 is 0.0078: "
            r".*jdp.master_weights\(optax.adamw\(3e-4\)\).*dtype=None",
        ):
            check_master(params, inner.init(params))
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, F16), params)
    with pytest.raises(ValueError, match=r"float16, whose spacing at 1.0 is 0.00098"):
        check_master(shapes, ())
    for dtype in (F32, None):
        tx = reduced(optax.clip(1.0), jdp.master_weights(optax.sgd(1.0), dtype))
        check_master(params, tx.init(params))
    check_master({"w": jnp.ones(2), "n": None}, ())


# --- skipping


def noisy():
    """Everything that a skipped step must leave alone: keys, counters, moments, residuals."""

    def init(params):
        return jax.random.key(7), jax.tree.map(jnp.zeros_like, params)

    def update(updates, state, params=None):
        key, sums = state
        return updates, (jax.random.split(key)[0], jax.tree.map(jnp.add, sums, updates))

    return optax.GradientTransformation(init, update)


def remembering():
    """Ends the replica axis and keeps the last gradient of each replica, as a compressor would."""

    def init(params):
        mesh = mesh_of()
        place = NamedSharding(mesh, P("data"))
        zeros = lambda p: jnp.zeros((8, *p.shape), device=place)  # noqa: E731
        return jax.tree.map(lambda p: jdp.PerReplica(zeros(p), axes=("data",), mesh=mesh), params)

    def update(updates, state, params=None):
        reduced, _ = jdp.all_reduce().update(updates, optax.EmptyState())
        values, axes, mesh = take_per_replica(updates, "remembering")
        keep = lambda value: jdp.PerReplica(value, axes=axes, mesh=mesh)  # noqa: E731
        kept = jax.tree.map(keep, values)
        return reduced, kept

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("tx", ["around", "behind"])
def test_a_skipped_step_leaves_everything_as_it_was(tx):
    links = noisy(), optax.adamw(0.1)
    tx = {
        "around": jdp.skip_nonfinite(optax.chain(remembering(), *links)),
        "behind": reduced(jdp.skip_nonfinite(optax.chain(*links))),
    }[tx]
    batches = [ROWS, spoilt(3, INF), spoilt(40, NAN), ROWS, spoilt(0, -INF)]
    states = train(tx, fresh(), batches, mesh_of())
    find = lambda state: next(  # noqa: E731
        x
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, jdp.SkipState))
        if isinstance(x, jdp.SkipState)
    )
    for i in (2, 3, 5):
        before, after = states[i - 1], states[i]
        assert bits(before.params) == bits(after.params)  # -0 included
        same = find(before.opt_state).inner_state, find(after.opt_state).inner_state
        assert bits(same[0]) == bits(same[1])
    for i in (1, 4):
        assert bits(states[i - 1].params) != bits(states[i].params)
    counts = [find(state.opt_state)[:3] for state in states]
    assert [int(c[0]) for c in counts] == [0, 0, 1, 2, 2, 3]
    assert [int(c[1]) for c in counts] == [0, 0, 1, 2, 0, 1]
    assert [bool(c[2]) for c in counts] == [False, False, True, True, False, True]
    # and the steps that were taken are those of a run without the bad batches
    want = train(tx, fresh(), [ROWS, ROWS], mesh_of())[-1]
    assert bits(want.params) == bits(states[-1].params)


def test_minus_zero_is_part_of_the_test():
    assert np.signbit(fresh()["b"]).all()
    assert not np.signbit(fresh()["b"] + 0.0).any()


def test_a_bad_gradient_is_seen_though_the_update_hides_it_and_the_other_way_round():
    params = {"w": jnp.ones(2)}
    tx = jdp.skip_nonfinite(optax.scale_by_sign())
    updates, state = tx.update({"w": jnp.array([1.0, jnp.inf])}, tx.init(params), params)
    assert (np.asarray(updates["w"]) == 0).all()
    assert int(state.skipped) == 1
    tx = jdp.skip_nonfinite(optax.scale(1e30))
    updates, state = tx.update({"w": jnp.array([1.0, 1e30])}, tx.init(params), params)
    assert (np.asarray(updates["w"]) == 0).all()
    assert int(state.skipped) == 1
    updates, state = tx.update({"w": jnp.array([1.0, -2.0])}, state, params)
    np.testing.assert_array_equal(updates["w"], jnp.array([1e30, -2e30]))
    assert (int(state.skipped), int(state.consecutive)) == (1, 0)


def test_one_replicas_bad_gradient_is_seen_though_the_reduced_update_hides_it():
    tx = jdp.skip_nonfinite(reduced(optax.scale_by_sign()))
    states = train(tx, fresh(), [spoilt(3), ROWS], mesh_of())
    assert [int(s.opt_state.skipped) for s in states] == [0, 1, 1]
    assert bits(states[0].params) == bits(states[1].params) != bits(states[2].params)


@pytest.mark.parametrize(("names", "shape"), [(("data",), (8,)), (("node", "device"), (2, 4))])
def test_the_decision_costs_one_small_all_reduce(names, shape):
    mesh = jdp.make_mesh(names, shape)
    sent = []
    for wrap in (lambda tx: tx, jdp.skip_nonfinite):
        tx = wrap(reduced(optax.adam(0.1)))
        step = jdp.train_step(linear, tx, mesh)
        text = step.lower(jdp.init_state(fresh(), tx, mesh), ROWS).compile().as_text()
        sent.append(programs.collectives(text))
    assert sum(c.bytes for c in sent[1]) == sum(c.bytes for c in sent[0]) + 4
    operands = [sum(c.operands for c in found) for found in sent]
    assert operands[1] == operands[0] + 1
    assert not any(c.in_loop or c.in_branch for c in sent[1])


def test_inside_an_accumulation_a_bad_call_costs_its_window():
    inner = optax.sgd(1.0, momentum=0.9)
    tx = jdp.multi_steps(jdp.skip_nonfinite(reduced(inner)), 2)
    states = train(tx, fresh(), [ROWS, spoilt(3), ROWS, ROWS / 2], mesh_of())
    np.testing.assert_array_equal(states[2].params["w"], states[0].params["w"])
    skip = states[2].opt_state.inner_state
    assert (int(skip.skipped), int(states[2].opt_state.num_updates)) == (1, 1)
    assert not any(np.any(x) for x in jax.tree.leaves(skip.inner_state))
    # the next window starts clean
    want, _ = reference.train(linear, fresh(), inner, [ROWS * 0.75])
    reference.assert_close(states[-1].params, want)
    assert int(states[-1].opt_state.inner_state.skipped) == 1


@pytest.mark.parametrize("wrap", [jdp.skip_nonfinite, jdp.dynamic_loss_scale])
def test_around_an_accumulation_it_is_refused(wrap):
    tx = wrap(jdp.multi_steps(reduced(optax.sgd(1.0)), 2))
    with pytest.raises(ValueError, match=r"multi_steps stands inside another transformation"):
        jdp.init_state(fresh(), tx, mesh_of())


def test_around_a_loss_scale_it_is_refused():
    for inner in (optax.sgd(1.0), jdp.master_weights(optax.sgd(1.0))):
        tx = jdp.skip_nonfinite(reduced(jdp.dynamic_loss_scale(inner)))
        with pytest.raises(ValueError, match=r"must halve its scale.*Leave jdp.skip_nonfinite out"):
            tx.init(fresh())


# --- loss scale


def plain_scale(oks, scale, interval, factor, low, high):
    """The rule, as a plain loop."""
    good, scales = 0, []
    for ok in oks:
        good = good + 1 if ok else 0
        if not ok:
            scale = max(scale / factor, low)
        elif good == interval:
            scale, good = min(scale * factor, high), 0
        scales.append(scale)
    return scales


@pytest.mark.parametrize("interval", [1, 3])
def test_the_scale_grows_and_falls(interval):
    oks = [1] * 4 + [0, 1, 1] + [0] * 6 + [1] * 18 + [0]
    limits = {"min_scale": 2.0, "max_scale": 64.0}
    tx = jdp.dynamic_loss_scale(
        optax.sgd(1.0), 16.0, growth_interval=interval, factor=2.0, **limits
    )
    params, update = {"w": jnp.zeros(3)}, jax.jit(tx.update)
    state, scales, moved = tx.init(params), [], 0
    for ok in oks:
        scale = find_loss_scale(state)
        grads = {"w": jnp.full(3, scale if ok else jnp.inf, F32)}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        moved -= ok
        np.testing.assert_array_equal(params["w"], np.full(3, moved))
        scales.append(float(state.scale))
    assert scales == plain_scale(oks, 16.0, interval, 2.0, 2.0, 64.0)
    assert {2.0, 64.0} < set(scales)
    assert int(state.skipped) == oks.count(0)
    assert (int(state.consecutive), bool(state.last_skipped)) == (1, True)
    assert state.scale.dtype == F32
    assert update._cache_size() == 1


@pytest.mark.parametrize(
    ("count", "kind", "place"),
    [
        (1, "auto", "around"),
        (4, "explicit", "behind"),
        (8, "auto", "behind"),
        (8, "auto", "around"),
    ],
)
def test_the_step_is_that_of_the_loss_without_a_scale(count, kind, place):
    links = optax.clip_by_global_norm(1.0), optax.sgd(1.0)
    tx = {
        "behind": reduced(jdp.dynamic_loss_scale(optax.chain(*links), 1024.0)),
        "around": jdp.dynamic_loss_scale(reduced(*links), 1024.0),
    }[place]
    _, good, bad = train(tx, fresh(), [ROWS, spoilt(63)], mesh_of(count, kind))
    want, _ = reference.train(linear, fresh(), optax.chain(*links), [ROWS])
    reference.assert_close(good.params, want)
    assert bits(bad.params) == bits(good.params)
    assert float(find_loss_scale(bad.opt_state)) == 512.0
    reference.assert_same_copies(bad)


def test_float16_gradients_that_would_vanish_arrive():
    """2^-26 is 0 in float16. The scale falls until nothing overflows, and then training works."""

    def loss_fn(params, batch):
        return jnp.sum(params["w"]) * jnp.mean(batch).astype(F16)

    def run(optimizer, batches, loss_fn):
        links = jdp.master_weights(optimizer)
        return train(reduced(wrap(links)), params, batches, mesh_of(), loss=loss_fn)

    params = {"w": jnp.ones(2, F16)}
    small, large = np.full((8, 1), 2.0**-13, F32), np.full((8, 1), 8, F32)
    smaller = lambda p, batch: loss_fn(p, batch) * F16(2**-13)  # noqa: E731
    wrap = lambda tx: tx  # noqa: E731
    assert bits(run(optax.sgd(2.0**16), [small], smaller)[-1].params) == bits(params)
    wrap = jdp.dynamic_loss_scale
    state = run(optax.sgd(2.0**16), [small], smaller)[-1]
    np.testing.assert_array_equal(state.params["w"], np.full(2, 1 - 2.0**-10))
    # 2^3 times 2^15, 2^14 and 2^13 are too large for float16
    states = run(optax.sgd(2.0**-6), [large] * 4, loss_fn)
    scales = [float(find_loss_scale(state.opt_state)) for state in states]
    assert scales == [2.0**15, 2.0**14, 2.0**13, 2.0**12, 2.0**12]
    assert int(states[-1].opt_state[1].skipped) == 3
    assert bits(states[3].params) == bits(params)
    np.testing.assert_array_equal(states[4].params["w"], np.full(2, 1 - 2.0**-3))


def test_gradients_are_divided_in_float32():
    tx, params = jdp.dynamic_loss_scale(optax.identity()), {"w": jnp.ones(2, F16)}
    updates, _ = tx.update({"w": jnp.full(2, 2**-10, F16)}, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], np.full(2, 2.0**-25))


def test_finding_the_scale():
    one = jdp.dynamic_loss_scale(optax.sgd(1.0), 8.0)
    params = fresh()
    assert find_loss_scale(reduced(optax.adam(0.1)).init(params)) is None
    labels = {"w": "a", "b": "b"}
    groups = {"a": one, "b": optax.sgd(1.0)}
    for tx in (one, reduced(jdp.master_weights(one)), reduced(optax.partition(groups, labels))):
        assert float(find_loss_scale(tx.init(params))) == 8.0
    for tx in (
        optax.partition({"a": one, "b": one}, labels),
        jdp.dynamic_loss_scale(jdp.master_weights(one)),
    ):
        with pytest.raises(ValueError, match=r"holds 2 loss scales.*Put one"):
            find_loss_scale(tx.init(params))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"growth_interval": 0}, "growth_interval=0; it must be a whole number of steps"),
        ({"growth_interval": 2.5}, "growth_interval=2.5; it must be a whole number of steps"),
        ({"factor": 1.0}, "factor=1.0; a scale that is to grow"),
        ({"factor": INF}, "factor=.*inf.*; a scale that is to grow"),
        ({"initial": 0.5}, "initial=0.5, min_scale=1.0 and max_scale=16777216.0; they must be"),
        ({"initial": 2.0**30}, "the first must lie between the others"),
        ({"min_scale": 0.0}, "must be positive and finite"),
        ({"initial": NAN}, "must be positive and finite"),
    ],
)
def test_numbers_that_cannot_be_meant(arguments, message):
    with pytest.raises(ValueError, match=message):
        jdp.dynamic_loss_scale(optax.sgd(1.0), **arguments)


# --- under a ZeRO stage


@pytest.mark.parametrize(("count", "kind"), [(2, "auto"), (8, "explicit")])
def test_inside_a_zero_stage_the_copies_are_split_and_the_steps_the_same(count, kind):
    optimizer = jdp.dynamic_loss_scale(
        jdp.master_weights(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))), 1.0
    )
    mesh = mesh_of(count, kind)
    batches = [ROWS, spoilt(5), ROWS / 2]
    want = train(reduced(optimizer), fresh(BF16), batches, mesh)
    got = train(jdp.zero1(optimizer, min_size=8), fresh(BF16), batches, mesh)
    master = got[-1].opt_state.inner_state.inner_state.master["w"]
    assert master.sharding.shard_shape(master.shape) == (24 // count,)
    for a, b in zip(want, got, strict=True):
        inner = b.opt_state.inner_state
        reference.assert_close(inner.inner_state.master, a.opt_state[1].inner_state.master)
        assert int(inner.skipped) == int(a.opt_state[1].skipped)
        for param, copy in zip(
            jax.tree.leaves(b.params), jax.tree.leaves(inner.inner_state.master), strict=True
        ):
            np.testing.assert_array_equal(param, np.asarray(copy).astype(BF16))
    assert int(got[-1].opt_state.inner_state.skipped) == 1
    assert bits(got[1].params) == bits(got[2].params) != bits(got[3].params)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_around_a_zero_stage_a_step_is_skipped_whole(stage):
    zero = getattr(jdp, stage)(optax.adam(0.1), min_size=8)
    tx = jdp.skip_nonfinite(zero)
    states = train(tx, fresh(), [ROWS, spoilt(60), ROWS], mesh_of(), microbatch=4)
    assert [int(s.opt_state.skipped) for s in states] == [0, 0, 1, 1]
    assert bits(states[1].params) == bits(states[2].params) != bits(states[3].params)
    inner = [bits(s.opt_state.inner_state) for s in states]
    assert inner[1] == inner[2] != inner[3]
    want = train(reduced(optax.adam(0.1)), fresh(), [ROWS, ROWS], mesh_of(), microbatch=4)
    reference.assert_close(jdp.logical(states[-1].params), want[-1].params)


# --- norms


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_norms_are_those_of_float64(dtype):
    tree = {"a": jnp.linspace(-300, 300, 77), "b": [jnp.ones((3, 4)) * 7, None]}
    tree = jax.tree.map(lambda x: x.astype(dtype), tree)
    want = np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in jax.tree.leaves(tree)))
    norm = jax.jit(jdp.global_norm)(tree)
    assert norm.dtype == F32
    np.testing.assert_allclose(norm, want, rtol=1e-6)


def test_norms_at_the_edges():
    assert float(jdp.global_norm({})) == 0
    assert float(jdp.global_norm({"n": jnp.arange(3)})) == np.sqrt(np.float32(5))
    assert jnp.isnan(jdp.global_norm([jnp.array([1.0, jnp.nan])]))
    assert float(jdp.global_norm([jnp.array([1.0, 2e19])])) == np.inf
    grads = jdp.value_and_grad(linear, mesh_of())(fresh(), ROWS)[1]
    with pytest.raises(ValueError, match=r"no reduction has taken yet.*Reduce them first"):
        jdp.global_norm(grads)


# --- compute dtype


def test_what_a_loss_is_given_and_gives():
    seen = {}

    def loss_fn(params, batch, key, *, model_state):
        seen.update(params=params, batch=batch, key=key, state=model_state)
        loss = jnp.sum(params["w"] * batch["x"]) * batch["weight"][0]
        aux = {"narrow": loss.astype(BF16), "flag": batch["flag"][0], "count": 3, "empty": None}
        aux["mean"] = jdp.Mean(loss.astype(F16), jnp.sum(batch["label"]))
        return loss.astype(BF16), aux, model_state

    narrow = jdp.compute_in(loss_fn, BF16)
    assert narrow.compute_dtype == BF16
    assert narrow.__name__ == "loss_fn"
    batch = {
        "x": jnp.ones(4),
        "label": jnp.arange(4),
        "flag": jnp.ones(4, bool),
        "weight": jnp.ones(4),
    }
    key, model_state = jax.random.key(0), {"mean": jnp.ones(2), "half": jnp.ones(2, F16)}
    loss, aux, state = narrow({"w": jnp.ones(4), "n": None}, batch, key, model_state=model_state)
    assert seen["params"]["w"].dtype == seen["batch"]["x"].dtype == BF16
    assert (seen["batch"]["label"].dtype, seen["batch"]["flag"].dtype) == (jnp.int32, bool)
    assert seen["batch"]["weight"].dtype == F32
    assert seen["key"] is key
    assert seen["state"] is model_state is state
    assert loss.dtype == aux["narrow"].dtype == aux["mean"].total.dtype == F32
    assert (aux["flag"].dtype, aux["count"], aux["empty"]) == (bool, 3, None)
    assert batch["x"].dtype == F32


@pytest.mark.parametrize(("count", "kind"), [(1, "auto"), (4, "explicit"), (8, "auto")])
def test_computing_narrow_is_what_it_is_on_one_device(count, kind):
    """Microbatches are the same on any number of devices, so bfloat16's roundings are, too."""
    params, narrow, batch, want, exact = narrow_mlp()
    value, grads = jdp.value_and_grad(narrow, mesh_of(count, kind), microbatch=8)(params, batch)
    assert value.dtype == F32
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(F32)}
    reference.assert_close((value, reference.mean_gradient(grads)), want)
    # and it is another number than float32's
    assert abs(float(value) / float(exact) - 1) > 1e-5


@functools.cache
def narrow_mlp():
    """Its loss and gradient, microbatch by microbatch on one device, and the exact loss."""
    params, loss, _, batch = reference.mlp()
    batch = {name: batch[name] for name in ("x", "y")}
    narrow = jdp.compute_in(loss, BF16)
    parts = [jax.tree.map(lambda x: x[8 * j : 8 * j + 8], batch) for j in range(8)]  # noqa: B023
    one = jax.jit(jax.value_and_grad(narrow))
    each = [one(params, part) for part in parts]
    want = jax.tree.map(lambda *xs: sum(np.asarray(x, np.float64) for x in xs) / 8, *each)
    return params, narrow, batch, want, loss(params, batch)


def test_weights_added_up_narrowly_are_refused():
    def mean(dtype):
        return lambda params, batch: jdp.Mean(
            jnp.sum(batch["x"] * params["w"]), jnp.sum(batch["mask"], dtype=dtype)
        )

    batch = {"x": jnp.ones(1001), "mask": jnp.ones(1001)}
    narrow = {name: jdp.compute_in(mean(name), BF16) for name in (None, F32)}
    with pytest.raises(
        ValueError, match=r"added up in bfloat16, where whole numbers are exact only up to 256"
    ):
        narrow[None]({"w": jnp.ones(())}, batch)
    assert narrow[F32]({"w": jnp.ones(())}, batch).weight == 1001
    with pytest.raises(ValueError, match=r"float16, where .* exact only up to 2048"):
        jdp.compute_in(mean(None), F16)({"w": jnp.ones(())}, batch)


@pytest.mark.parametrize("dtype", [jnp.int32, bool, jnp.float8_e4m3fn, "float31", None, complex])
def test_dtypes_that_cannot_be_trained_in(dtype):
    for make in (
        lambda: jdp.compute_in(linear, dtype),
        lambda: jdp.Precision(compute=dtype),
        lambda: jdp.Precision(params=dtype),
    ):
        with pytest.raises(TypeError, match=r"parameters are trained in float16, bfloat16, float3"):
            make()


def test_float64_without_x64_is_refused():
    for make in (
        lambda: jdp.Precision(params=jnp.float64),
        lambda: jdp.master_weights(optax.sgd(1.0), jnp.float64),
    ):
        with pytest.raises(TypeError, match=r"float64, which JAX silently turns into float32"):
            make()


def test_a_policy():
    policy = jdp.Precision(params="bfloat16", compute=F16, wire=BF16)
    assert (policy.params, policy.compute, policy.wire) == (BF16, F16, BF16)
    params = policy.cast_params({"w": jnp.ones(2), "n": jnp.arange(2), "none": None})
    assert (params["w"].dtype, params["n"].dtype, params["none"]) == (BF16, jnp.int32, None)
    state = policy.optimizer(optax.sgd(1.0)).init({"w": params["w"]})
    assert isinstance(state, jdp.MasterWeightsState)
    loss = policy.loss(linear)
    assert (loss.loss_fn, loss.compute_dtype) == (linear, F16)
    full = jdp.Precision()
    assert (full.params, full.compute, full.wire) == (F32, F32, None)
    state = full.optimizer(optax.sgd(1.0)).init({"w": jnp.ones(2)})
    assert not isinstance(state, jdp.MasterWeightsState)
    with pytest.raises(ValueError, match=r"wire_dtype=int32 cannot carry a mean"):
        jdp.Precision(wire=jnp.int32)
