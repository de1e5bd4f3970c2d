"""Evaluation: means of everything at once, divided once, counted in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType

import jdp

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
PARAMS, LOSS, MASKED, BATCH = reference.mlp()
BATCH = jax.tree.map(np.asarray, BATCH)


def mesh_of(count=8, kind="auto"):
    return jdp.make_mesh(num_devices=count, axis_types=(KINDS[kind],))


def metrics(params, batch):
    return {
        "loss": MASKED(params, batch),
        "squares": jdp.Mean(jnp.sum(batch["x"] ** 2), batch["x"].size),
        "by_column": jdp.Mean(jnp.sum(batch["x"], 0), len(batch["x"])),
        "plain": jnp.max(batch["x"]),
    }


@pytest.mark.parametrize(
    ("count", "kind", "microbatch"),
    [(1, "auto", None), (2, "explicit", 4), (4, "auto", 1), (8, "auto", 2), (8, "explicit", None)],
)
def test_sums_are_those_of_the_whole_batch(count, kind, microbatch):
    step = jdp.eval_step(metrics, mesh_of(count, kind), microbatch=microbatch)
    got = step(PARAMS, BATCH)
    whole = metrics(PARAMS, BATCH)
    for name in ("loss", "squares", "by_column"):
        assert isinstance(got[name], jdp.Mean)
        reference.assert_close(got[name].total, whole[name].total)
        reference.assert_close(got[name].weight, np.float32(whole[name].weight))
    rows = BATCH["x"].reshape(64 // (microbatch or 64 // count), -1)
    reference.assert_close(got["plain"].value, rows.max(1).mean())
    assert float(got["plain"].weight) == 64
    reference.assert_same_copies(got)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(got))


@pytest.mark.parametrize("count", [1, 8])
def test_ragged_end_counts_exactly(count):
    """A27, A28: accuracy over 64 + 4 is 64/68; a mean of batches says one half."""
    right = np.concatenate([np.ones(64), np.zeros(4)]).astype(np.float32)
    loader = [{"right": right[:64]}, {"right": right[64:]}]

    def accuracy(params, batch):
        return jdp.Mean((batch["right"] * batch["weight"]).sum(), batch["weight"].sum())

    step = jdp.eval_step(accuracy, mesh_of(count))
    got = jdp.evaluate(step, {}, jdp.feed(loader, mesh_of(count)))
    assert isinstance(got, float)
    assert got == 64 / 68


def test_perplexity_is_computed_from_the_mean_of_the_loss():
    """A27: exp of the mean, 20.1, where the mean of exps over the batches is 37.9."""
    losses = np.concatenate([np.full(8, 2.0), np.full(8, 4.0)]).astype(np.float32)
    step = jdp.eval_step(lambda params, batch: jdp.Mean(batch.sum(), batch.size), mesh_of())
    mean = jdp.evaluate(step, {}, [losses[:8], losses[8:]])
    np.testing.assert_allclose(np.exp(mean), np.exp(3.0), rtol=1e-6)


def test_counting_beyond_what_float32_can():
    """A34, google-deepmind/optax#596: 2^24 + 1 + 1 is 2^24 in float32."""
    counts = [2.0**24, 1.0, 1.0, 2.0**31, 1.0]
    step = lambda params, batch: jdp.Mean(jnp.float32(batch), jnp.ones((), jnp.float32))  # noqa: E731
    assert jdp.evaluate(step, {}, counts) * 5 == 2**24 + 2**31 + 3
    step = lambda params, batch: {"n": jdp.Mean(jnp.ones(2), jnp.full(2, batch))}  # noqa: E731
    got = jdp.evaluate(step, {}, counts)["n"]
    assert got.dtype == np.float64
    assert (5 / got).tolist() == [2**24 + 2**31 + 3] * 2


def test_the_next_batch_is_dispatched_before_the_last_is_read():
    order = []

    class Total:
        def __init__(self, index):
            self.index = index

        def __array__(self, *args, **kwargs):
            order.append(f"read {self.index}")
            return np.asarray(self.index, np.float64)

    def step(params, batch):
        order.append(f"run {batch}")
        return jdp.Mean(Total(batch), jnp.ones(()))

    assert jdp.evaluate(step, {}, [0, 1, 2]) == 1.0
    assert order == ["run 0", "run 1", "read 0", "run 2", "read 1", "read 2"]


def test_model_state_is_handed_over():
    def metric(params, batch, *, model_state):
        return jdp.Mean(jnp.sum(batch - model_state["mean"]), batch.size)

    step = jdp.eval_step(metric, mesh_of())
    got = jdp.evaluate(step, {}, [np.arange(8.0)], model_state={"mean": jnp.float32(3.5)})
    assert got == 0.0


def test_nothing_at_all():
    step = jdp.eval_step(metrics, mesh_of())
    with pytest.raises(ValueError, match=r"got no batch.*already\s+used up"):
        jdp.evaluate(step, PARAMS, iter([]))


def test_only_padding_is_not_a_number():
    step = jdp.eval_step(MASKED, mesh_of())
    assert np.isnan(jdp.evaluate(step, PARAMS, [{**BATCH, "mask": np.zeros(64, np.float32)}]))


def test_a_plain_scalar_of_a_weighted_batch_is_refused():
    step = jdp.eval_step(lambda params, batch: {"max": batch["x"].max()}, mesh_of())
    with pytest.raises(ValueError, match=r"carries 'weight'.*count\s+padding as data"):
        step({}, {"x": np.ones(8), "weight": np.ones(8)})


def test_something_for_each_example_is_refused():
    step = jdp.eval_step(lambda params, batch: {"all": batch}, mesh_of())
    with pytest.raises(ValueError, match=r"metric \['all'\] has the shape \(1,\)"):
        step({}, np.ones(8))


def test_a_batch_that_does_not_divide_is_refused():
    step = jdp.eval_step(MASKED, mesh_of(), microbatch=4)
    with pytest.raises(
        ValueError, match=r"batch of 60 does not divide over the 8 replicas.*32 or 64"
    ):
        step(PARAMS, jax.tree.map(lambda x: x[:60], BATCH))


def test_a_mesh_without_a_data_axis_is_refused():
    with pytest.raises(ValueError, match="none called"):
        jdp.eval_step(metrics, jdp.make_mesh("x"))
    step = jdp.eval_step(MASKED, jdp.make_mesh("x"), axis="x")
    reference.assert_close(step(PARAMS, BATCH).total, MASKED(PARAMS, BATCH).total)
