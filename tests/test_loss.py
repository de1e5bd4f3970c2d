"""The loss contract: what a loss function may return, what it means, and what is refused."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_close, gradient, masked, mean_gradient, plain, squares

import jdp

ROWS, MICROBATCH = 32, 2
PARAMS = {"w": jnp.arange(1.0, 4.0) / 3}
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
# microbatch 0 counts in full, microbatch 15 not at all
MASK = (np.arange(ROWS) % 2 + 16 > np.arange(ROWS)).astype(np.float32)
BATCH = {"x": X, "mask": MASK}


@pytest.fixture(scope="module")
def mesh():
    return jdp.make_mesh()


@pytest.fixture(scope="module")
def masked_grad(mesh):
    """One compiled function for all tests that only change the weights."""
    return jdp.value_and_grad(masked, mesh, microbatch=MICROBATCH)


def shapes(loss_fn, mesh, batch=None, **options):
    """Traces without compiling: enough for everything that is refused."""
    fn = jdp.value_and_grad(loss_fn, mesh, **options)
    return jax.eval_shape(fn, PARAMS, BATCH if batch is None else batch)


# --- Mean by itself


@given(
    rows=st.lists(st.floats(-100, 100), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
)
@settings(max_examples=50, deadline=None)
def test_a27_means_add_up_to_the_mean_of_everything_however_it_is_cut(rows, cuts):
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    parts = [rows[a:b] for a, b in itertools.pairwise(edges)]
    whole: Any = sum(jdp.Mean(math.fsum(part), len(part)) for part in parts)
    assert whole.value == pytest.approx(np.mean(rows), rel=1e-9, abs=1e-9)


def test_mean_plus_something_else_is_a_type_error():
    mean: Any = jdp.Mean(1.0, 1)
    with pytest.raises(TypeError):
        _ = mean + 1.0
    with pytest.raises(TypeError):
        _ = 1.0 + mean


@pytest.mark.parametrize("number", [float, np.float32, jnp.float32])
@pytest.mark.parametrize("total", [0.0, 1.0])
def test_value_of_zero_weight_is_nan_whatever_the_total(number, total):
    assert math.isnan(jdp.Mean(number(total), number(0)).value)


@pytest.mark.parametrize("weight", [-1, -0.5, math.nan, -math.inf, np.float32(-2), np.nan])
def test_mean_refuses_a_number_that_cannot_be_a_weight(weight):
    with pytest.raises(ValueError, match=r"got the weight .*must be 0 or more"):
        jdp.Mean(1.0, weight)


# --- what a loss may return


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("microbatch", [None, MICROBATCH])
def test_aux_is_averaged_as_the_loss_is_and_means_by_their_own_weight(num_devices, microbatch):
    def loss_fn(params, batch):
        mask = batch["mask"]
        aux = {
            "plain": batch["x"][:, 0].mean(),
            "count": [jnp.int32(3), jnp.bool_(True)],
            "own": jdp.Mean(batch["x"][:, 1].sum(), len(mask)),
            "array": jdp.Mean(batch["x"].sum(0), len(mask)),
            "arrays": jdp.Mean((batch["x"] * mask[:, None]).sum(0), mask.sum() * jnp.ones(3)),
            "nothing": None,
        }
        return masked(params, batch), aux

    mesh = jdp.make_mesh(num_devices=num_devices)
    (loss, aux), grads = jdp.value_and_grad(loss_fn, mesh, microbatch=microbatch)(PARAMS, BATCH)
    assert_close((loss, mean_gradient(grads)), gradient(masked, PARAMS, BATCH))
    size = microbatch or ROWS // num_devices
    weights = MASK.reshape(-1, size).sum(1)
    expected = {
        "plain": np.average(X[:, 0].reshape(-1, size).mean(1), weights=weights),
        "count": [3.0, 1.0],
        "own": X[:, 1].mean(),
        "array": X.mean(0),
        "arrays": np.average(X, axis=0, weights=MASK),
        "nothing": None,
    }
    assert jax.tree.structure(aux) == jax.tree.structure(expected)
    assert_close(aux, expected)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((loss, aux)))


def test_a16_metrics_and_loss_of_bfloat16_are_added_up_in_float32():
    def loss_fn(params, batch):
        one = jnp.bfloat16(1) + 0 * batch["x"][0, 0].astype(jnp.bfloat16)
        loss = jdp.Mean(plain(params, batch).astype(jnp.bfloat16) * 0 + one, 1)
        return loss, {"tokens": jdp.Mean(one, jnp.bfloat16(1 / 1024))}

    batch = {"x": np.ones((1024, 3), np.float32)}
    mesh = jdp.make_mesh(num_devices=2)
    (loss, aux), _ = jdp.value_and_grad(loss_fn, mesh, microbatch=1)(PARAMS, batch)
    # in bfloat16 both would stop at 256 of 512 on each device
    assert float(loss) == 1
    assert float(aux["tokens"]) == 1024
    assert loss.dtype == aux["tokens"].dtype == jnp.float32


# jnp.float32 values, so that what is traced is an array as in a real loss
REFUSED = {
    "vector": (squares, ValueError, r"loss has the shape \(4,\); it must be a scalar"),
    "integer": (
        lambda p, b: squares(p, b).sum().astype(int),
        TypeError,
        "loss has the dtype int32",
    ),
    "boolean": (lambda p, b: plain(p, b) > 0, TypeError, "loss has the dtype bool"),
    "complex": (
        lambda p, b: plain(p, b) * 1j,
        (TypeError, ValueError),
        r"loss (is|has).*complex64.*(must be a|need a) real",
    ),
    "integer total": (lambda p, b: jdp.Mean(3, 1), TypeError, "loss has the dtype int32"),
    "nothing": (lambda p, b: None, (TypeError, ValueError), "loss function returned.*None"),
    "dict": (lambda p, b: {"l": plain(p, b)}, (TypeError, ValueError), "function returned.*dict"),
    "list": (lambda p, b: [plain(p, b), {}], (TypeError, ValueError), "function returned.*list"),
    "four": (lambda p, b: (plain(p, b), 1.0, 2.0, 3.0), ValueError, "returned 4 values"),
    "state": (lambda p, b: (plain(p, b), None, {}), ValueError, "returned 3 values"),
    "empty": (lambda p, b: (), ValueError, "function returned"),
    "weight of each row": (
        lambda p, b: jdp.Mean((squares(p, b) * b["mask"]).sum(), b["mask"]),
        ValueError,
        r"weight of the loss has the shape \(4,\); it must be a scalar",
    ),
    "no weight": (lambda p, b: jdp.Mean(plain(p, b), None), (TypeError, ValueError), "weight"),
    "complex weight": (
        lambda p, b: jdp.Mean(plain(p, b), b["mask"].sum() * 1j),
        (TypeError, ValueError),
        "weight.*complex64",
    ),
    "aux of each row": (
        lambda p, b: (plain(p, b), {"hits": {"each": b["mask"]}}),
        ValueError,
        r"\['hits'\]\['each'\] has the shape \(4,\)",
    ),
    "aux array in a tuple": (
        lambda p, b: (plain(p, b), (1.0, jdp.Mean(1.0, 1), jnp.ones((2, 3)))),
        ValueError,
        r"metric \[2\] has the shape \(2, 3\)",
    ),
    "aux string": (lambda p, b: (plain(p, b), {"a": "x"}), (TypeError, ValueError), r"\['a'\]"),
    "aux key": (
        lambda p, b: (plain(p, b), {"a": jax.random.key(0)}),
        (TypeError, ValueError),
        r"\['a'\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_breaks_the_contract_is_refused(name, mesh):
    loss_fn, error, match = REFUSED[name]
    with pytest.raises(error, match=f"(?s){match}"):
        shapes(loss_fn, mesh)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.complex64])
def test_parameters_that_have_no_gradient_are_refused_by_path(dtype, mesh):
    params = {"w": PARAMS["w"], "sub": [jnp.zeros(2, dtype)]}
    with pytest.raises(TypeError, match=r"\['sub'\]\[0\] has the dtype " + jnp.dtype(dtype).name):
        jax.eval_shape(jdp.value_and_grad(plain, mesh), params, BATCH)


# --- weights


@given(
    weights=st.lists(
        st.one_of(st.just(0.0), st.floats(0.125, 1000, width=32), st.integers(0, 5)),
        min_size=ROWS,
        max_size=ROWS,
    )
)
@settings(max_examples=30, deadline=None)
def test_a03_a04_any_ragged_weights_give_the_mean_over_all_rows(masked_grad, weights):
    mask = np.asarray(weights, np.float32)
    loss, grads = masked_grad(PARAMS, {"x": X, "mask": mask})
    if mask.sum() == 0:
        assert math.isnan(loss)
        assert not np.any(mean_gradient(grads)["w"])
        return
    z, w = X.astype(np.float64) @ np.asarray(PARAMS["w"], np.float64), mask.astype(np.float64)
    assert_close(loss, (w * z**2).sum() / w.sum(), rtol=2e-6)
    # terms of either sign may cancel: compare with the size of what is added
    bound = 2e-6 * (np.abs(2 * w * z)[:, None] * np.abs(X)).sum(0).max() / w.sum()
    expected = (2 * w * z) @ X / w.sum()
    np.testing.assert_allclose(mean_gradient(grads)["w"], expected, rtol=0, atol=bound)


@pytest.mark.parametrize("factor", [2.0**-60, 0.25, 2.0**60])
def test_only_the_proportions_of_the_weights_matter(masked_grad, factor):
    expected = masked_grad(PARAMS, BATCH)
    actual = masked_grad(PARAMS, {"x": X, "mask": MASK * np.float32(factor)})
    assert_close(actual[0], expected[0])
    assert_close(mean_gradient(actual[1]), mean_gradient(expected[1]))


@pytest.mark.parametrize("zero", ["microbatch", "replica", "half"])
def test_what_has_no_weight_does_not_count(masked_grad, zero):
    rows = {"microbatch": slice(6, 8), "replica": slice(8, 12), "half": slice(0, 16)}[zero]
    mask = np.ones(ROWS, np.float32)
    mask[rows] = 0
    loss, grads = masked_grad(PARAMS, {"x": X, "mask": mask})
    kept = np.delete(X, rows, axis=0)
    assert_close((loss, mean_gradient(grads)), gradient(plain, PARAMS, {"x": kept}))


def test_a_batch_without_any_weight_has_a_nan_loss_and_no_gradient(masked_grad):
    loss, grads = masked_grad(PARAMS, {"x": X, "mask": 0 * MASK})
    assert math.isnan(loss)
    assert not np.any(grads["w"].value)
    assert float(grads["w"].weight) == 0


@pytest.mark.parametrize("bad", [math.nan, -1.0, -100.0, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, ROWS - 1])
def test_a_bad_weight_poisons_loss_and_every_gradient(masked_grad, bad, place):
    weights = np.ones(ROWS, np.float32)
    weights[place - place % 2 : place - place % 2 + 2] = 0
    weights[place] = bad
    loss, grads = masked_grad(PARAMS, {"x": X, "mask": weights})
    assert math.isnan(loss)
    # of every replica, also of those that did not see it
    assert np.isnan(grads["w"].value).all()


def test_weights_whose_sum_overflows_poison_the_gradient(masked_grad):
    loss, grads = masked_grad(PARAMS, {"x": X, "mask": np.full(ROWS, 1e38, np.float32)})
    assert not math.isfinite(loss)
    assert np.isnan(grads["w"].value).all()  # divided by infinity they would all be 0


def test_aux_that_is_0_over_0_in_a_microbatch_without_weight_stays_out(mesh):
    def loss_fn(params, batch):
        loss = masked(params, batch)
        return loss, {"mean": loss.total / loss.weight}

    (loss, aux), _ = jdp.value_and_grad(loss_fn, mesh, microbatch=MICROBATCH)(PARAMS, BATCH)
    assert_close(aux["mean"], loss)


def depending(params, batch):
    return jdp.Mean(squares(params, batch).sum(), batch["mask"].sum() + (params["w"] ** 2).sum())


@pytest.mark.parametrize("options", [{}, {"microbatch": 2}, {"remat": True}])
@pytest.mark.parametrize("wrap", ["plain", "jit", "cond", "scan"])
def test_a_weight_that_depends_on_the_parameters_is_refused(mesh, options, wrap):
    def loss_fn(params, batch):
        if wrap == "jit":
            return jax.jit(depending)(params, batch)
        if wrap == "cond":
            return jax.lax.cond(batch["mask"][0] > 0, depending, depending, params, batch)
        if wrap == "scan":
            body = lambda c, _: (c, depending(params, batch))  # noqa: E731
            return jax.tree.map(lambda x: x[-1], jax.lax.scan(body, 0, length=2)[1])
        return depending(params, batch)

    with pytest.raises(ValueError, match=r"weight of the loss depends on the parameters"):
        shapes(loss_fn, mesh, **options)


def test_a_weight_that_is_declared_constant_is_accepted(mesh):
    def loss_fn(params, batch):
        mean = depending(params, batch)
        return jdp.Mean(mean.total, jax.lax.stop_gradient(mean.weight))

    loss, grads = jdp.value_and_grad(loss_fn, mesh)(PARAMS, BATCH)
    weight = MASK.sum() + 8 * (np.asarray(PARAMS["w"]) ** 2).sum()
    expected = jax.value_and_grad(lambda p: squares(p, BATCH).sum() / weight)(PARAMS)
    assert_close((loss, mean_gradient(grads)), expected)


def test_a_weight_counted_through_integers_of_the_parameters_is_a_constant(mesh):
    def loss_fn(params, batch):  # a hard count has no gradient, so nothing is lost
        chosen = (batch["x"] @ params["w"] > 0).astype(jnp.float32)
        return jdp.Mean((squares(params, batch) * chosen).sum(), chosen.sum())

    loss, grads = jdp.value_and_grad(loss_fn, mesh, microbatch=2)(PARAMS, BATCH)
    assert_close((loss, mean_gradient(grads)), gradient(loss_fn, PARAMS, BATCH))


# --- batches that carry weights


WEIGHTED = {"x": X, "weight": MASK}


def test_a28_a_plain_loss_of_a_batch_with_weights_is_refused(mesh):
    with pytest.raises(ValueError, match=r"carries 'weight'.*count padding as data.*jdp\.Mean"):
        shapes(plain, mesh, batch=WEIGHTED)


def test_a28_a_plain_metric_of_a_batch_with_weights_is_refused(mesh):
    def loss_fn(params, batch):
        loss = jdp.Mean((squares(params, batch) * batch["weight"]).sum(), batch["weight"].sum())
        return loss, {"accuracy": (squares(params, batch) > 1).mean()}

    with pytest.raises(ValueError, match=r"carries 'weight'.*count padding as data"):
        shapes(loss_fn, mesh, batch=WEIGHTED)


def test_a28_36_rows_padded_to_40_train_on_exactly_36(mesh):
    def loss_fn(params, batch):
        losses = (params["w"] - batch["x"]) ** 2
        return jdp.Mean((losses * batch["weight"]).sum(), batch["weight"].sum())

    batch = {"x": np.zeros(40, np.float32), "weight": np.zeros(40, np.float32)}
    batch["x"][:36], batch["weight"][:36] = np.arange(36), 1
    fn = jdp.value_and_grad(loss_fn, mesh, microbatch=1)
    _, grads = fn({"w": jnp.zeros(())}, batch)
    assert_close(mean_gradient(grads)["w"], -2 * 17.5)  # zero-padded: -2 * 15.75
