"""Compressors: against NumPy step by step, counted, through everything a run does, and misused."""

import functools
import itertools
import pickle

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

# isort: split
import reductions  # of benchmarks, which `programs` has made known

from jdp.compress import entries, one_of_each_strip
from jdp.feedback import compressed
from jdp.quantize import sign_codec

pytestmark = [pytest.mark.either, pytest.mark.alternate]

SHAPES = {"w": (12, 5), "b": (7,), "s": ()}


@functools.cache
def mesh_of(count=8, kind=AxisType.Auto):
    return jdp.make_mesh(num_devices=count, axis_types=kind)


def per_replica(mesh, tree):
    axes = jdp.data_axes(mesh)
    place = NamedSharding(mesh, P(axes))
    return {
        name: jdp.PerReplica(jax.device_put(x, place), axes=axes, mesh=mesh)
        for name, x in tree.items()
    }


def values_of(count, key):
    random = np.random.default_rng(key)
    return {
        name: random.normal(size=(count, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def initial(tx, mesh, shapes=SHAPES):
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    with jax.set_mesh(mesh):
        return jax.jit(tx.init)(jdp.replicate(params, mesh))


# definitions --------------------------------------------------------------------------------------


def largest(values, ratio, step):
    """Means and what each replica sent: its own largest entries."""
    del step
    sent = {}
    for name, x in values.items():
        flat = x.reshape(len(x), -1)
        out, k = np.zeros_like(flat), entries(flat.shape[1], ratio)
        for i, row in enumerate(flat):
            place = np.argsort(-np.abs(row), kind="stable")[:k]
            out[i, place] = row[place]
        sent[name] = out.reshape(x.shape)
    return {name: x.mean(0, np.float64) for name, x in sent.items()}, sent


def drawn(values, ratio, step):
    """Means and what each replica sent: the same random entries."""
    sent = {}
    key = jax.random.fold_in(jax.random.key(0), step)
    for number, name in enumerate(sorted(values)):
        flat = values[name].reshape(len(values[name]), -1)
        size = flat.shape[1]
        places, _ = one_of_each_strip(jax.random.fold_in(key, number), size, entries(size, ratio))
        out = np.zeros_like(flat)
        out[:, places] = flat[:, places]
        sent[name] = out.reshape(values[name].shape)
    return {name: x.mean(0, np.float64) for name, x in sent.items()}, sent


def signs(values, block, step):
    """Means and what each replica sent: signs, of its own values and of the mean of its part."""
    del step
    names = sorted(values)
    flat = np.concatenate([values[name].reshape(len(values[name]), -1) for name in names], 1)
    count, size = flat.shape
    part = -(-size // count)
    rows = np.pad(flat, ((0, 0), (0, part * count - size))).astype(np.float64)
    mean, sent = np.zeros(part * count), rows.copy()
    for owner in range(count):
        for start in range(owner * part, (owner + 1) * part, block):
            piece = slice(start, min(start + block, (owner + 1) * part))
            signed = lambda x: np.abs(x).mean() * np.where(x < 0, -1, 1)  # noqa: E731
            for i in range(count):
                sent[i, piece] = rows[i, piece] if i == owner else signed(rows[i, piece])
            exact = sent[:, piece].mean(0)
            mean[piece] = signed(exact)
            sent[owner, piece] += count * (mean[piece] - exact)
    ends = np.cumsum([values[name][0].size for name in names])[:-1]
    means, parts = (np.split(x[..., :size], ends, axis=-1) for x in (mean, sent))
    return (
        {n: x.reshape(values[n].shape[1:]) for n, x in zip(names, means, strict=True)},
        {n: x.reshape(values[n].shape) for n, x in zip(names, parts, strict=True)},
    )


DEFINED = {
    "top_k": (jdp.top_k, 0.1, largest),
    "random_k": (jdp.random_k, 0.1, drawn),
    "sign": (lambda block, **rest: jdp.sign(block=block, **rest), 8, signs),
}


@pytest.mark.parametrize(
    ("count", "kind"), [(1, AxisType.Auto), (3, AxisType.Auto), (8, AxisType.Explicit)]
)
@pytest.mark.parametrize("name", DEFINED)
def test_five_steps_of_the_definition(name, count, kind):
    make, argument, definition = DEFINED[name]
    tx, mesh = make(argument), mesh_of(count, kind)
    state, update = initial(tx, mesh), jax.jit(tx.update)
    residual = {name: np.zeros((count, *shape), np.float32) for name, shape in SHAPES.items()}
    for step in range(5):
        values = values_of(count, step)
        means, state = update(per_replica(mesh, values), state)
        values = {name: values[name] + residual[name] for name in values}
        want, sent = definition(values, argument, step)
        reference.assert_close(means, want, 3e-6)
        reference.assert_same_copies(means)
        residual = {n: (values[n] - sent[n]).astype(np.float32) for n in values}
        for leaf, x in residual.items():
            kept = np.asarray(state.residual[leaf].value)
            if name == "sign":
                # float32 sums; its owner's rounding counts N times
                np.testing.assert_allclose(kept, x, rtol=0, atol=1e-5 * count)
                residual[leaf] = kept  # so that a bit does not decide a later sign
            else:
                np.testing.assert_array_equal(kept, x)
    spec = state.residual["w"].value.sharding
    assert spec.shard_shape((count, 12, 5)) == (1, 12, 5)  # each device its own row
    assert update._cache_size() == 1 or count == 1  # P("data") over one device is P() afterwards


def test_the_strips_of_random_k():
    """One of each strip, every entry with the same chance, and another draw for each key."""
    for size, count in ((10, 3), (64, 64), (7, 1), (100, 33)):
        ends = np.concatenate([[0], np.cumsum(np.asarray(one_of_each_strip(KEY, size, count)[1]))])
        assert ends[-1] == size
        assert np.ptp(np.diff(ends)) <= 1
        draw = jax.vmap(lambda key, n=size, k=count: one_of_each_strip(key, n, k)[0])
        draws = np.asarray(draw(jax.random.split(KEY, 2000)))
        assert (draws >= ends[:-1]).all()
        assert (draws < ends[1:]).all()
        chance = np.bincount(draws.ravel(), minlength=size) / 2000
        assert (np.abs(chance - np.repeat(1 / np.diff(ends), np.diff(ends))) < 0.06).all()


KEY = jax.random.key(0)


def test_random_k_without_feedback_is_right_on_average():
    tx, mesh = jdp.random_k(0.2, error_feedback=False), mesh_of()
    state, update, values = initial(tx, mesh), jax.jit(tx.update), values_of(8, 0)
    total, grads = dict.fromkeys(SHAPES, 0.0), per_replica(mesh, values)
    for _ in range(400):
        means, state = update(grads, state)
        total = {name: total[name] + np.asarray(means[name]) for name in total}
    assert state.residual == ()
    for name, x in total.items():
        want = values[name].mean(0)
        length = 60 / entries(60, 0.2) if name == "w" else 7
        # five standard deviations of an entry that is there with chance 1/length
        bound = 5 * np.abs(want) * (length / 400) ** 0.5 + 1e-6
        assert (np.abs(x / 400 - want) <= bound).all(), name


def test_without_feedback_top_k_and_sign_keep_nothing():
    mesh = mesh_of()
    for name, argument in (("top_k", 0.1), ("sign", 8)):
        make, _, definition = DEFINED[name]
        tx = make(argument, error_feedback=False)
        state = tx.init(None)  # needs no mesh
        for step in range(2):
            values = values_of(8, step)
            means, state = jax.jit(tx.update)(per_replica(mesh, values), state)
            reference.assert_close(means, definition(values, argument, step)[0], 3e-6)
        assert jax.tree.leaves(state) == []


# the sum property, and what the shell does with it ------------------------------------------------

INT8 = functools.partial(jdp.all_reduce, wire_dtype=jnp.int8, block=16, error_feedback=True)
COMPRESSORS = {
    "top_k": jdp.top_k(0.05),
    "random_k": jdp.random_k(0.05),
    "sign": jdp.sign(block=16),
    "int8": INT8(),
    "stochastic": INT8(stochastic=True),
}
all_compressors = pytest.mark.parametrize("name", COMPRESSORS)
PARAMS = {"w": jnp.zeros((20, 3)), "b": jnp.zeros(3)}


def linear(params, batch):
    """A loss whose gradient is the mean of the batch's rows, whatever the parameters."""
    return jnp.mean(jnp.sum(batch["w"] * params["w"], (1, 2)) + batch["b"] @ params["b"])


def batch_of(key):
    random = np.random.default_rng(key)
    return {
        "w": random.normal(size=(24, 20, 3)).astype(np.float32),
        "b": random.normal(size=(24, 3)).astype(np.float32),
    }


def tx_of(name, wrap=lambda tx: tx, inner=None):
    return wrap(optax.chain(COMPRESSORS[name], inner or optax.sgd(1.0)))


def start(tx, count=8, kind=AxisType.Auto):
    mesh = mesh_of(count, kind)
    return jdp.train_step(linear, tx, mesh), jdp.init_state(PARAMS, tx, mesh)


def compressor_state(state):
    is_state = lambda x: isinstance(x, jdp.CompressedState)  # noqa: E731
    return next(filter(is_state, jax.tree.leaves(state.opt_state, is_leaf=is_state)))


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def applied_and_waiting(state):
    """Minus the sum of the mean gradients so far, by what is applied and what still waits."""
    waiting = reference.mean_gradient(compressor_state(state).residual)
    return {name: np.asarray(state.params[name], np.float64) - waiting[name] for name in PARAMS}


def sum_of_gradients(keys):
    return {name: -sum(batch_of(k)[name].mean(0, np.float64) for k in keys) for name in PARAMS}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@all_compressors
def test_applied_and_residual_add_up_to_the_gradients(name, kind):
    step, state = start(tx_of(name), kind=kind)
    for key in range(6):
        state, _ = step(state, batch_of(key))
    reference.assert_close(applied_and_waiting(state), sum_of_gradients(range(6)), 1e-5)
    reference.assert_same_copies(state)
    # something is left over, or nothing would be tested
    residual = compressor_state(state).residual
    assert all(np.abs(np.asarray(x.value)).max() > 1e-4 for x in residual.values())
    assert step._compiled._cache_size() == 1


@all_compressors
def test_under_multi_steps_one_call_in_two_sends(name):
    step, state = start(tx_of(name, lambda tx: jdp.multi_steps(tx, 2)))
    mean = [{n: (batch_of(k)[n] + batch_of(k + 1)[n]) / 2 for n in PARAMS} for k in (0, 2)]
    for key in range(3):
        before = bits(compressor_state(state))
        state, _ = step(state, batch_of(key))
        assert (bits(compressor_state(state)) == before) == (key != 1)
    state, _ = step(state, batch_of(3))
    alone, other = start(tx_of(name))
    for batch in mean:
        other, _ = alone(other, batch)
    reference.assert_close(state.params, other.params, 1e-4)


@all_compressors
def test_a_skipped_step_leaves_residual_and_memory_alone(name):
    step, state = start(tx_of(name, jdp.skip_nonfinite))
    bad = batch_of(9)
    bad["w"][10, 3, 1] = np.inf  # in the rows of replica 3
    state, _ = step(state, batch_of(0))
    before = bits((state.params, compressor_state(state)))
    state, _ = step(state, bad)
    assert bits((state.params, compressor_state(state))) == before
    assert int(state.opt_state.skipped) == 1
    state, _ = step(state, batch_of(1))
    reference.assert_close(applied_and_waiting(state), sum_of_gradients(range(2)), 1e-5)


@all_compressors
def test_a_bad_gradient_does_not_poison_the_residual(name):
    """Without a guard: its own update shows it, and later ones are finite again."""
    tx, mesh = COMPRESSORS[name], mesh_of()
    state, update = initial(tx, mesh), jax.jit(tx.update)
    for step in range(3):
        values = values_of(8, step)
        if step == 1:
            values["w"][3, 2, 2], values["w"][4, 3, 3] = np.nan, np.inf
        means, state = update(per_replica(mesh, values), state)
        finite = all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(means))
        # random_k may not have drawn these entries yet
        assert finite or step == 1 or name == "random_k"
        assert not finite or step != 1 or name == "random_k"
        assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state.residual))


@all_compressors
def test_before_a_zero_stage(name):
    """The stage slices what is reduced: the same parameters, its state split."""
    adam = optax.adam(0.1)
    step, state = start(tx_of(name, inner=jdp.zero1(adam, min_size=0)))
    plain, other = start(tx_of(name, inner=adam))
    for key in range(3):
        state, _ = step(state, batch_of(key))
        other, _ = plain(other, batch_of(key))
    reference.assert_close(state.params, other.params, 1e-5)
    assert bits(compressor_state(state)) == bits(compressor_state(other))


@all_compressors
def test_saved_and_restored_to_the_bit(name):
    step, state = start(tx_of(name))
    for key in range(2):
        state, _ = step(state, batch_of(key))
    saved = pickle.dumps([np.asarray(x) for x in jax.tree.leaves(state)])
    structure = jax.tree.structure(state)
    want, _ = step(state, batch_of(2))  # which consumes the state
    back = jax.tree.unflatten(structure, pickle.loads(saved))
    again, fresh = start(tx_of(name))
    moved = jdp.restage(back, fresh)
    got, _ = again(moved, batch_of(2))
    assert bits(got) == bits(want)


@pytest.mark.parametrize("count", [1, 3, 4])
@all_compressors
def test_another_number_of_devices_keeps_the_mean_residual(name, count):
    step, state = start(tx_of(name))
    for key in range(3):
        state, _ = step(state, batch_of(key))
    step, fresh = start(tx_of(name), count)
    state = jdp.restage(state, fresh)
    assert compressor_state(state).residual["w"].shape == (count, 20, 3)
    reference.assert_close(applied_and_waiting(state), sum_of_gradients(range(3)), 1e-5)
    for key in range(3, 5):
        state, _ = step(state, batch_of(key))
    reference.assert_close(applied_and_waiting(state), sum_of_gradients(range(5)), 1e-5)


@all_compressors
def test_narrow_gradients_empty_leaves_and_a_model_axis(name):
    mesh = jdp.make_mesh(("data", "model"), (4, 2))
    shapes = {"w": (6, 4), "none": (0, 2)}
    params = {n: jnp.zeros(shape) for n, shape in shapes.items()}
    params["w"] = jax.device_put(params["w"], NamedSharding(mesh, P(None, "model")))
    tx = COMPRESSORS[name]
    state = jdp.init_state(params, tx, mesh).opt_state
    assert state.residual["w"].value.sharding.spec == P(("data",), None, "model")
    value = np.random.default_rng(0).normal(size=(4, 6, 4)).astype(jnp.bfloat16)
    grads = {
        "w": jax.device_put(value, NamedSharding(mesh, P("data", None, "model"))),
        "none": jnp.zeros((4, 0, 2), jnp.bfloat16),
    }
    grads = {n: jdp.PerReplica(x, axes=("data",), mesh=mesh) for n, x in grads.items()}
    means, state = jax.jit(tx.update)(grads, state)
    assert {n: (x.dtype, x.shape) for n, x in means.items()} == {
        n: (jnp.float32, shape) for n, shape in shapes.items()
    }
    assert state.residual["w"].dtype == jnp.float32
    left = np.asarray(state.residual["w"].value).mean(0)
    reference.assert_close(left + np.asarray(means["w"]), value.astype(np.float32).mean(0), 1e-5)


def test_two_axes():
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    for name, (make, argument, definition) in DEFINED.items():
        tx, values = make(argument), values_of(8, 0)
        means, _ = jax.jit(tx.update)(per_replica(mesh, values), initial(tx, mesh))
        reference.assert_close(means, definition(values, argument, 0)[0], 3e-6), name


def test_an_empty_tree():
    for tx in COMPRESSORS.values():
        state = jdp.CompressedState({}, jnp.zeros((), jnp.int32))
        assert tx.update({"none": None}, state)[0] == {"none": None}


# counted ------------------------------------------------------------------------------------------


@functools.cache
def sent_for_the_mlp(name):
    """What a device sends for the gradients of the benchmarks' MLP: 10,020,874 parameters."""
    sizes, mesh = (784, 2048, 2048, 2048, 10), mesh_of()
    shapes = [s for m, n in itertools.pairwise(sizes) for s in ((m, n), (n,))]
    place = NamedSharding(mesh, P("data"))
    grads = [jax.ShapeDtypeStruct((8, *dims), jnp.float32, sharding=place) for dims in shapes]
    grads = [jdp.PerReplica(x, axes=("data",), mesh=mesh) for x in grads]
    tx = {
        "float32": jdp.all_reduce(),
        "top_k": jdp.top_k(0.01),
        "random_k": jdp.random_k(0.01),
        "sign": jdp.sign(),
    }[name]
    with jax.set_mesh(mesh):
        state = jax.eval_shape(lambda: tx.init([jnp.zeros(dims) for dims in shapes]))
    found = programs.collectives(jax.jit(tx.update).lower(grads, state).compile().as_text())
    numbers = sum(entries(int(np.prod(dims)), 0.01) for dims in shapes)
    return found, numbers, programs.sent_bytes(found, 8)


def test_top_k_sends_values_and_indices():
    found, numbers, _ = sent_for_the_mlp("top_k")
    assert numbers == 100_208
    assert [(c.kind, c.dtypes, c.bytes) for c in found] == [
        ("all-gather", ("s32",), 8 * 8 * numbers)
    ]


def test_random_k_sends_values_only():
    found, numbers, sent = sent_for_the_mlp("random_k")
    assert [(c.kind, c.dtypes, c.bytes) for c in found] == [("all-reduce", ("f32",), 4 * numbers)]
    assert sent <= 0.01001 * sent_for_the_mlp("float32")[2]


@pytest.mark.parametrize("size", [1e-34, 1e36, 1e38])
def test_a_block_of_signs_whose_sum_is_no_float32(size):
    codec = sign_codec(1024)
    x = np.random.default_rng(0).uniform(-3, 3, 2500).astype(np.float32) * np.float32(size)
    got = np.asarray(codec.decode(codec.encode(jnp.asarray(x), None), x.size), np.float64)
    for start in range(0, x.size, 1024):
        block = slice(start, start + 1024)
        np.testing.assert_allclose(
            np.abs(got[block]), np.abs(x[block], dtype=np.float64).mean(), 1e-5
        )
        np.testing.assert_array_equal(np.sign(got[block]), np.sign(x[block]))


def test_sign_sends_bits_and_scales():
    found, _, sent = sent_for_the_mlp("sign")
    part = -(-10_020_874 // 8)
    row = -(-part // 8) + 4 * -(-part // 1024)
    assert sorted((c.kind, c.dtypes, c.bytes) for c in found) == [
        ("all-gather", ("u8",), 8 * -(-row // 128) * 128),
        ("all-to-all", ("u8",), 8 * row),
    ]
    assert sent <= 0.0323 * sent_for_the_mlp("float32")[2]


def test_the_benchmark_of_reductions_compares_what_it_says():
    """In small: every arm, what it sends, and how far its mean is off."""
    rows = reductions.compare(reductions.Config(quick=True, rounds=1), "small")
    sent = {row["arm"]: (row["sent"], row["error"]) for row in rows}
    assert [*sent][:2] == ["pmean", "jdp"]
    assert set(sent) == {"pmean", *reductions.reductions()}
    bounds = {
        "pmean": (1, 1e-6),
        "jdp": (1, 1e-6),
        "bfloat16": (0.501, 0.01),
        "float16": (0.503, 0.001),
        "float8_e4m3fn": (0.255, 0.08),
        "int8": (0.255, 0.03),
        "int8 feedback": (0.255, 0.03),
        "top_k 1 %": (0.081, 1),
        "random_k 1 %": (0.011, 1),
        "sign": (0.034, 1),
    }
    for arm, (most, off) in bounds.items():
        assert sent[arm][0] <= most, arm
        assert 0 < sent[arm][1] < off, arm
    assert sent["bfloat16"][1] > 1e-4


# misuse -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0, 0.0, -0.1, 1.5, np.nan, np.inf, True, "1%", None])
@pytest.mark.parametrize("make", [jdp.top_k, jdp.random_k])
def test_ratios_that_are_no_part(make, ratio):
    with pytest.raises(ValueError, match=rf"{make.__name__} got ratio={ratio!r}, the part of"):
        make(ratio)


@pytest.mark.parametrize("block", [0, -1, 2.5, True])
def test_blocks_that_hold_nothing(block):
    with pytest.raises(ValueError, match=f"block={block!r} must be a positive whole number"):
        jdp.sign(block=block)


@all_compressors
def test_already_reduced_gradients(name):
    tx = optax.chain(jdp.all_reduce(), COMPRESSORS[name])
    state = tx.init(jdp.replicate({"w": jnp.zeros(3)}, mesh_of()))
    grads = per_replica(mesh_of(), {"w": np.ones((8, 3), np.float32)})
    with pytest.raises(ValueError, match=r"gradient \['w'\] of shape \(3,\).*already reduced"):
        tx.update(grads, state)


def test_before_a_stage_that_reduces_in_the_backward_pass():
    step, state = start(optax.chain(jdp.top_k(0.1), jdp.zero2(optax.sgd(1.0), min_size=0)))
    with pytest.raises(ValueError, match=r"jdp.top_k received gradients that were reduced where"):
        step(state, batch_of(0))
    step, state = start(optax.chain(jdp.top_k(0.1), jdp.zero2(optax.sgd(1.0), reduce="step")))
    state, _ = step(state, batch_of(0))
    reference.assert_close(applied_and_waiting(state), sum_of_gradients(range(1)), 1e-5)


def test_names_of_axes():
    with pytest.raises(ValueError, match=r"jdp.sign\(axis=\(\)\) would average over nothing"):
        jdp.sign(axis=())
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    tx = jdp.top_k(0.5, axis="node")
    grads = per_replica(mesh, {"w": np.ones((8, 3), np.float32)})
    match = r"jdp.top_k works along the mesh axes \('node',\), but the gradients differ along"
    with pytest.raises(ValueError, match=match):
        tx.update(grads, initial(tx, mesh, {"w": (3,)}))


def test_a_state_of_something_else():
    grads = per_replica(mesh_of(), {"w": np.ones((8, 3), np.float32)})
    with pytest.raises(ValueError, match=r"jdp.top_k was given a state that it did not make"):
        jdp.top_k(0.5).update(grads, optax.EmptyState())


def test_no_mesh():
    with pytest.raises(ValueError, match=r"jdp.sign keeps a value for each replica"):
        jdp.sign().init({"w": jnp.zeros(3)})


def test_a_gradient_computed_with_before_it_is_compressed():
    """The order check sees through the shell."""
    tx = optax.chain(jdp.top_k(0.1), optax.sgd(1.0))
    mesh = mesh_of()

    def clipped_first(updates, state, params=None):
        return tx.update(jax.tree.map(lambda g: g * 0.5, updates), state, params)

    wrong = optax.GradientTransformation(tx.init, clipped_first)
    with pytest.raises(ValueError, match="before they are reduced"):
        jdp.train_step(linear, wrong, mesh)(jdp.init_state(PARAMS, wrong, mesh), batch_of(0))


def test_memory_that_would_not_be_finite_stays():
    """A warm start that a NaN has reached is not kept; others are."""

    def exchange(values, memory, axes):
        means = [jax.lax.pmean(value, axes) for value in values]
        new = {"warm": memory["warm"] + means[0].sum(), "count": memory["count"] + 1}
        return means, values, new

    tx = compressed("mine", exchange, lambda _: {"warm": jnp.ones(2), "count": jnp.zeros((), int)})
    mesh, values = mesh_of(), {"w": np.ones((8, 3), np.float32)}
    state = initial(tx, mesh, {"w": (3,)})
    _, state = tx.update(per_replica(mesh, values), state)
    values["w"][5] = np.nan
    _, state = tx.update(per_replica(mesh, values), state)
    np.testing.assert_array_equal(state.memory["warm"], 4)
    assert int(state.memory["count"]) == 2


def test_a_loss_scale_behind_error_feedback_is_refused():
    """Residuals would be in units of a scale that changes."""
    tx = optax.chain(jdp.top_k(0.1), jdp.dynamic_loss_scale(optax.sgd(1.0)))
    with pytest.raises(ValueError, match=r"behind a compressor with error feedback.*Put it around"):
        jdp.init_state(PARAMS, tx, mesh_of())
    around = jdp.dynamic_loss_scale(optax.chain(jdp.top_k(0.1), optax.sgd(1.0)))
    assert jdp.init_state(PARAMS, around, mesh_of()).opt_state is not None


def test_rows_of_another_number_of_devices_are_refused():
    """Arrays of eight replicas in the structure of a state of four: a device would take one row."""
    tx, mesh = optax.chain(jdp.top_k(0.1), optax.sgd(1.0)), mesh_of(4)
    saved = jax.tree.map(np.asarray, jdp.init_state(PARAMS, tx, mesh_of()))
    like = jdp.init_state(PARAMS, tx, mesh)
    mixed = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(saved))
    with pytest.raises(ValueError, match=r"holds values of 8 replicas, but there are 4.*restage"):
        jdp.train_step(linear, tx, mesh)(mixed, batch_of(0))
    grads = {"w": jdp.PerReplica(jnp.ones((8, 3)), axes=("data",), mesh=mesh)}
    with pytest.raises(ValueError, match=r"gradient \['w'\] holds values of 8 replicas"):
        jdp.all_reduce().update(grads, optax.EmptyState())


@pytest.mark.parametrize("make", [jdp.all_reduce, jdp.top_k])
def test_an_axis_named_twice_is_refused(make):
    with pytest.raises(ValueError, match="names one axis twice"):
        make(axis=("data", "data"))
