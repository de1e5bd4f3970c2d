"""Microbatches: the same rows and keys on any number of devices, unequal shares, float32 sums."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from reference import assert_close, gradient, mean_gradient, plain, squares

import jdp

SIZE, ROWS = 4, 64  # 16 microbatches of 4
PARAMS = {"w": jnp.arange(1.0, 4.0) / 3}
BATCH = {
    "x": np.random.default_rng(2).normal(size=(ROWS, 3)).astype(np.float32),
    "row": np.arange(ROWS),
    "mask": (np.arange(ROWS) % 5 < 3).astype(np.float32),
}


def noise(key):
    return jax.random.bernoulli(key, 0.5, (SIZE, 16)).astype(jnp.float32)


def dropped(params, batch, key):
    """A masked loss with dropout; each row's mask comes back as a metric of its own."""
    keep = noise(key)
    losses = squares(params, batch) * keep.mean(-1) * batch["mask"]
    # each row is in one microbatch; the weights of the M microbatches add up to 1
    rows = jnp.zeros((ROWS, 16)).at[batch["row"]].set(keep)
    return jdp.Mean(losses.sum(), batch["mask"].sum()), jdp.Mean(rows, SIZE / ROWS)


def take(rows):
    return jax.tree.map(lambda x: x[rows], BATCH)


def by_hand(microbatches, key):
    """The definition: microbatch j on one device, with the key fold_in(key, j)."""

    def loss(params):
        parts = [
            dropped(params, take(rows), jax.random.fold_in(key, j))
            for j, rows in enumerate(microbatches)
        ]
        return sum(p[0].total for p in parts) / sum(p[0].weight for p in parts)

    return jax.value_and_grad(loss)(PARAMS)


def rows_of(j):
    return np.arange(SIZE * j, SIZE * (j + 1))


@pytest.fixture(scope="module")
def mesh():
    return jdp.make_mesh()


@pytest.fixture(scope="module")
def with_dropout(mesh):
    return jdp.value_and_grad(dropped, mesh, microbatch=SIZE)


@pytest.fixture(scope="module")
def on_one_device():
    key = jax.random.key(7)
    keys = [jax.random.fold_in(key, j) for j in range(ROWS // SIZE)]
    return (
        by_hand([rows_of(j) for j in range(ROWS // SIZE)], key),
        np.concatenate([noise(k) for k in keys]),
    )


# --- keys


@pytest.mark.parametrize(
    ("num_devices", "axis_type"),
    [(1, AxisType.Auto), (2, AxisType.Explicit), (4, AxisType.Auto), (8, AxisType.Auto)],
)
def test_a12_microbatch_j_has_key_j_on_any_number_of_devices(num_devices, axis_type, on_one_device):
    mesh = jdp.make_mesh(num_devices=num_devices, axis_types=(axis_type,))
    fn = jdp.value_and_grad(dropped, mesh, microbatch=SIZE)
    (loss, masks), grads = fn(PARAMS, BATCH, jax.random.key(7))
    want, want_masks = on_one_device
    assert_close((loss, mean_gradient(grads)), want)
    np.testing.assert_array_equal(masks, want_masks)


@pytest.mark.parametrize("axis", [None, ("device", "node")])
def test_a12_key_j_goes_with_rows_j_along_several_axes(axis, on_one_device):
    mesh = jdp.make_mesh(("node", "device"), (4, 2))
    fn = jdp.value_and_grad(dropped, mesh, axis=axis, microbatch=SIZE)
    np.testing.assert_array_equal(fn(PARAMS, BATCH, jax.random.key(7))[0][1], on_one_device[1])


def test_a12_as_many_masks_as_examples_and_others_for_the_next_key(with_dropout):
    masks = [with_dropout(PARAMS, BATCH, jax.random.key(seed))[0][1] for seed in (7, 8)]
    rows = np.concatenate(masks)
    # 16 fair coins a row: a chance of 2^-16 for a pair, and these seeds have no such pair
    assert len(np.unique(rows[:ROWS], axis=0)) >= ROWS - 1
    assert len(np.unique(rows, axis=0)) >= 2 * ROWS - 2


def test_one_microbatch_for_each_replica_is_numbered_too(mesh):
    def loss_fn(params, batch, key):
        return plain(params, batch) * 0 + jax.random.uniform(key)

    key = jax.random.key(3)
    loss, _ = jdp.value_and_grad(loss_fn, mesh)(PARAMS, BATCH, key)
    expected = np.mean([jax.random.uniform(jax.random.fold_in(key, j)) for j in range(8)])
    assert_close(loss, expected)


def test_raw_uint32_keys_work_as_well(with_dropout):
    typed = with_dropout(PARAMS, BATCH, jax.random.key(7))[0][1]
    raw = with_dropout(PARAMS, BATCH, jax.random.PRNGKey(7))[0][1]
    np.testing.assert_array_equal(typed, raw)


# --- rows


def test_a32_distinct_data_in_every_microbatch_of_every_replica(mesh):
    # 3 microbatches on each of 8 replicas: dropping or repeating any one shows
    batch = {"x": 2.0 ** (np.arange(24) % 12) * (1 + np.arange(24) // 12)}
    fn = jdp.value_and_grad(lambda p, b: (p["w"] * b["x"]).mean(), mesh, microbatch=1)
    _, grads = fn({"w": jnp.float32(1)}, batch)
    assert mean_gradient(grads)["w"] * 24 == pytest.approx(batch["x"].sum(), rel=1e-6)
    np.testing.assert_allclose(grads["w"].value * 3, batch["x"].reshape(8, 3).sum(1), rtol=1e-6)


def test_rows_of_any_dtype_and_shape_reach_the_loss_unchanged(mesh):
    keys = jax.random.split(jax.random.key(0), ROWS)
    batch = {
        **BATCH,
        "half": jnp.arange(ROWS, dtype=jnp.bfloat16),
        "flag": np.arange(ROWS) % 3 == 0,
        "image": np.arange(ROWS * 6, dtype=np.int16).reshape(ROWS, 2, 3),
        "key": keys,
        "nothing": np.zeros((ROWS, 0, 2), np.float32),
        "none": None,
    }

    def loss_fn(params, b):
        assert b["nothing"].shape == (SIZE, 0, 2)
        values = (
            b["half"],
            b["flag"],
            b["image"].sum((1, 2)),
            jax.vmap(jax.random.uniform)(b["key"]),
        )
        table = jnp.stack([v.astype(jnp.float32) for v in values], 1)
        rows = jnp.zeros((ROWS, 4)).at[b["row"]].set(table)
        return plain(params, b), jdp.Mean(rows, SIZE / ROWS)

    (_, rows), _ = jdp.value_and_grad(loss_fn, mesh, microbatch=SIZE)(PARAMS, batch)
    image = batch["image"].sum((1, 2))
    uniform = jax.vmap(jax.random.uniform)(keys)
    want = [np.arange(ROWS), batch["flag"], image, uniform]
    np.testing.assert_array_equal(rows, np.stack(want, 1).astype(np.float32))


MISFITS = {
    "36 rows": (36, None, r"batch of 36 .* 8 replicas .*'data': the nearest .* are 32 or 40"),
    "4 rows": (4, None, r"batch of 4 .* the nearest sizes that do are 8\."),
    "64 by 3": (64, 3, r"batch of 64 .* microbatches of 3: the nearest .* are 48 or 72"),
    "64 by 16": (64, 16, r"nearest sizes that do are 128\."),
}


@pytest.mark.parametrize("name", MISFITS)
def test_b04_a_batch_that_does_not_divide_names_the_sizes_that_do(mesh, name):
    rows, microbatch, match = MISFITS[name]
    fn = jdp.value_and_grad(plain, mesh, microbatch=microbatch)
    with pytest.raises(ValueError, match=match):
        fn(PARAMS, {"x": np.ones((rows, 3), np.float32)})


BROKEN = {
    "nothing": ({}, r"no arrays in it"),
    "no rows": ({"x": np.zeros((0, 3))}, r"has 0 rows"),
    "scalar": (
        {"x": np.ones((8, 3)), "t": {"temperature": 2.0}},
        r"\['t'\]\['temperature'\] is a scalar",
    ),
    "first scalar": ({"a": np.float32(1), "x": np.ones((8, 3))}, r"\['a'\] is a scalar"),
    "unequal": (
        {"x": np.ones((16, 3)), "y": np.ones((8, 3))},
        r"\['x'\] and \['y'\] have 16 and 8 rows",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_batch_that_is_not_rows_of_examples_is_refused_by_path(mesh, name):
    batch, match = BROKEN[name]
    with pytest.raises(ValueError, match=match):
        jdp.value_and_grad(plain, mesh, microbatch=1)(PARAMS, batch)


@pytest.mark.parametrize("microbatch", [0, -1, 1.5, 2.0, "2", True])
def test_a_microbatch_is_a_positive_whole_number(mesh, microbatch):
    with pytest.raises(ValueError, match=r"microbatch=.* must be a positive whole number"):
        jdp.value_and_grad(plain, mesh, microbatch=microbatch)(PARAMS, BATCH)


# --- unequal shares


shares_of_8 = st.lists(st.integers(0, 2), min_size=8, max_size=8)


@given(shares=shares_of_8)
@settings(max_examples=15, deadline=None)
def test_shares_count_the_first_microbatches_of_each_replica(with_dropout, shares):
    (loss, _), grads = with_dropout(PARAMS, BATCH, jax.random.key(7), shares=np.int32(shares))
    # replica i holds microbatches 2i and 2i + 1; those taken are numbered without gaps
    taken = [rows_of(2 * i + j) for i, k in enumerate(shares) for j in range(k)]
    if not taken:
        assert math.isnan(loss)
        assert not np.any(grads["w"].value)
        return
    assert_close((loss, mean_gradient(grads)), by_hand(taken, jax.random.key(7)), rtol=3e-6)


def test_shares_of_a_plain_loss_weigh_every_microbatch_alike(mesh):
    shares = np.array([2, 0, 1, 2, 2, 0, 1, 1], np.int32)
    fn = jdp.value_and_grad(plain, mesh, microbatch=SIZE)
    loss, grads = fn(PARAMS, BATCH, shares=shares)
    rows = np.concatenate([rows_of(2 * i + j) for i, k in enumerate(shares) for j in range(k)])
    want = gradient(plain, PARAMS, take(rows))
    assert_close((loss, mean_gradient(grads)), want)


@pytest.mark.parametrize("wrong", [3, -1, 100])
def test_shares_that_no_replica_can_have_do_not_pass_for_a_mean(with_dropout, wrong):
    shares = np.full(8, 2, np.int32)
    shares[5] = wrong
    try:
        (loss, _), grads = with_dropout(PARAMS, BATCH, jax.random.key(7), shares=shares)
    except ValueError as error:
        assert "shares" in str(error)  # noqa: PT017  # either answer is a right one
    else:
        assert math.isnan(loss)
        assert np.isnan(grads["w"].value).all()


@pytest.mark.parametrize(
    "shares",
    [2, np.full(4, 2), np.full(16, 1), np.full((8, 1), 2), np.full(8, 1.5), [2.0] * 8],
    ids=["scalar", "4", "16", "8x1", "halves", "floats"],
)
def test_shares_are_one_whole_number_for_each_replica(with_dropout, shares):
    with pytest.raises((ValueError, TypeError), match=r"shares .*\(8,\)"):
        with_dropout(PARAMS, BATCH, jax.random.key(7), shares=shares)


def test_shares_refuse_a_loss_that_communicates(mesh):
    def loss_fn(params, batch):
        return plain(params, batch) + jax.lax.pmean(squares(params, batch).mean(), "data")

    fn = jdp.value_and_grad(loss_fn, mesh, microbatch=SIZE)
    with pytest.raises(ValueError, match=r"uses psum.* over .*'data'.*unequal"):
        fn(PARAMS, BATCH, shares=np.full(8, 2, np.int32))


def test_shares_refuse_model_state(mesh):
    fn = jdp.value_and_grad(lambda p, b, model_state: plain(p, b), mesh, microbatch=SIZE)
    with pytest.raises(ValueError, match="shares and model_state exclude each other"):
        fn(PARAMS, BATCH, model_state={}, shares=np.full(8, 2, np.int32))


# --- sums


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("num_devices", [1, 8])
def test_a16_1024_microbatches_of_a_narrow_gradient(num_devices, dtype):
    mesh = jdp.make_mesh(num_devices=num_devices)
    params = {"one": jnp.zeros((), dtype), "cent": jnp.zeros((), dtype)}
    cent = jnp.asarray(0.01, dtype)

    def loss_fn(params, batch):
        # a batch-independent gradient, made to vary with the batch
        return (params["one"] + cent * params["cent"] + 0 * batch["x"].sum()).astype(jnp.float32)

    batch = {"x": np.ones(1024, dtype)}
    _, grads = jdp.value_and_grad(loss_fn, mesh, microbatch=1)(params, batch)
    # in bfloat16 each sum would stop at 256, and at 4.0 instead of 10.24
    for name, want in (("one", 1.0), ("cent", float(cent))):
        assert grads[name].dtype == dtype
        np.testing.assert_array_equal(np.asarray(grads[name].value, np.float32), want)


def test_a16_float64_is_kept_for_gradients_losses_and_weights():
    with jax.enable_x64(True):
        batch = {"x": np.array([1.0] + [2.0**-30] * 15), "mask": np.full(16, 0.1)}
        mesh, p = jdp.make_mesh(), jnp.float64(1)
        loss, grads = jdp.value_and_grad(lambda p, b: (p * b["x"]).mean(), mesh, microbatch=1)(
            p, batch
        )
        assert loss.dtype == grads.dtype == jnp.float64
        assert float(loss) == batch["x"].mean() == float(np.asarray(grads.value).mean())

        def loss_fn(p, b):
            return jdp.Mean((p * b["x"] * b["mask"]).sum(), b["mask"].sum())

        loss, grads = jdp.value_and_grad(loss_fn, mesh, microbatch=1)(p, batch)
        assert_close(loss, batch["x"].mean(), rtol=1e-14)
        assert_close(np.asarray(grads.value).mean(), batch["x"].mean(), rtol=1e-14)
