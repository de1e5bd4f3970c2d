"""Known ways to train the wrong model silently: each set-up as it was measured, and what jdp gives.

The wrong numbers are computed beside the right ones, so that a set-up that could not show the
mistake would fail here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from reference import assert_close, assert_same_copies, gradient, mean_gradient

import jdp

pytestmark = pytest.mark.either

PARAMS = {"w": jnp.arange(1.0, 5.0) / 4}
X = np.random.default_rng(4).normal(size=(64, 4)).astype(np.float32)
Y = np.random.default_rng(5).normal(size=64).astype(np.float32) * np.linspace(0, 4, 64)
BATCH = {"x": X, "y": Y.astype(np.float32)}


def losses(params, batch):
    return (jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2


def plain(params, batch):
    return losses(params, batch).mean()


def masked(params, batch):
    return jdp.Mean((losses(params, batch) * batch["mask"]).sum(), batch["mask"].sum())


@pytest.fixture(scope="module")
def mesh():
    return jdp.make_mesh()


@functools.cache
def reduced(loss_fn, mesh, **options):
    """Loss and gradient as a user gets them: taken, reduced, the same on every device."""
    fn, tx = jdp.value_and_grad(loss_fn, mesh, **options), jdp.all_reduce()

    @jax.jit
    def run(params, batch):
        loss, grads = fn(params, batch)
        return loss, tx.update(grads, tx.init(params))[0]

    return run


def relative(actual, expected):
    gap = np.asarray(actual["w"], np.float64) - np.asarray(expected["w"], np.float64)
    return np.linalg.norm(gap) / np.linalg.norm(expected["w"])


# --- scale


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_a01_a23_one_sgd_step_of_size_1_moves_by_the_gradient(num_devices, axis_type):
    mesh = jdp.make_mesh(num_devices=num_devices, axis_types=(axis_type,))
    tx = optax.chain(jdp.all_reduce(), optax.sgd(1.0))
    state = jdp.init_state(PARAMS, tx, mesh)
    state, _ = jdp.train_step(plain, tx, mesh)(state, BATCH)
    moved = jax.tree.map(lambda a, b: a - b, PARAMS, state.params)
    assert_close(moved, gradient(plain, PARAMS, BATCH)[1], rtol=2e-6)
    assert_same_copies(state)


def test_a01_the_set_up_shows_8_times_the_gradient_where_it_is_taken_naively(mesh):
    def naive(params, batch):
        return jax.lax.pmean(jax.grad(plain)(params, batch), "data")

    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P()}
    wrong = jax.shard_map(naive, **specs)(PARAMS, BATCH)
    right = reduced(plain, mesh)(PARAMS, BATCH)[1]
    assert_close(wrong, jax.tree.map(lambda g: 8 * g, right), rtol=2e-6)


def test_a02_every_copy_on_every_device_is_the_reference(mesh):
    loss, grads = reduced(plain, mesh)(PARAMS, BATCH)
    assert_same_copies((loss, grads))
    want = gradient(plain, PARAMS, BATCH)
    for shard in grads["w"].addressable_shards:
        assert_close(np.asarray(shard.data), want[1]["w"])
    # each replica's own gradient is another one
    local = jdp.value_and_grad(plain, mesh)(PARAMS, BATCH)[1]["w"].value
    assert min(relative({"w": g}, want[1]) for g in np.asarray(local)) > 0.1


# --- weights


def ragged(*counts):
    """Rows of which the first so many in each equal part count."""
    size = 64 // len(counts)
    mask = np.concatenate([np.arange(size) < count for count in counts])
    return {**BATCH, "mask": mask.astype(np.float32)}


def mean_of_means(batch, parts):
    """What averaging each part's own mean gives."""
    cut = jax.tree.map(lambda x: np.split(x, parts), batch)
    pieces = [gradient(masked, PARAMS, {k: v[i] for k, v in cut.items()}) for i in range(parts)]
    return jax.tree.map(lambda *xs: sum(xs) / parts, *pieces)


def test_a03_token_mean_over_replicas_with_8_to_1_valid_tokens(mesh):
    batch = ragged(8, 7, 6, 5, 4, 3, 2, 1)
    want = gradient(masked, PARAMS, batch)
    assert_close(reduced(masked, mesh)(PARAMS, batch), want)
    wrong = mean_of_means(batch, 8)
    assert relative(wrong[1], want[1]) > 0.1
    assert abs(wrong[0] / want[0] - 1) > 0.1


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a04_microbatches_with_16_8_4_1_valid_tokens(num_devices):
    batch = ragged(16, 8, 4, 1)
    mesh = jdp.make_mesh(num_devices=num_devices)
    want = gradient(masked, PARAMS, batch)
    assert_close(reduced(masked, mesh, microbatch=16)(PARAMS, batch), want)
    assert relative(mean_of_means(batch, 4)[1], want[1]) > 0.3


@pytest.mark.parametrize("microbatch", [None, 4])
def test_a24_a_loss_that_is_a_sum_is_a_total(mesh, microbatch):
    def total(params, batch):  # the gradient of the sum, as declared: one unit of weight in all
        share = len(batch["x"]) / 64
        return jdp.Mean(losses(params, batch).sum(), share)

    def normalised(params, batch):
        return jdp.Mean(losses(params, batch).sum(), len(batch["x"]))

    summed = gradient(lambda p, b: losses(p, b).sum(), PARAMS, BATCH)
    assert_close(reduced(total, mesh, microbatch=microbatch)(PARAMS, BATCH), summed, rtol=2e-6)
    want = gradient(plain, PARAMS, BATCH)
    assert_close(reduced(normalised, mesh, microbatch=microbatch)(PARAMS, BATCH), want, rtol=2e-6)


def test_a24_a_plain_sum_is_the_mean_over_replicas_as_documented(mesh):
    loss, _ = reduced(lambda p, b: losses(p, b).sum(), mesh)(PARAMS, BATCH)
    assert_close(loss, losses(PARAMS, BATCH).sum() / 8)


# L2 in the loss


def penalty(params):
    return 0.1 * (params["w"] ** 2).sum()


def penalised(params, batch):
    mean = masked(params, batch)
    return jdp.Mean(mean.total + penalty(params) * mean.weight, mean.weight)


@pytest.mark.parametrize("microbatch", [None, 2])
def test_a25_a_term_without_data_times_the_weight_counts_once(mesh, microbatch):
    batch = ragged(8, 7, 6, 5, 4, 3, 2, 0)
    want = gradient(penalised, PARAMS, batch)
    assert_close(reduced(penalised, mesh, microbatch=microbatch)(PARAMS, batch), want)
    plainly = lambda p, b: plain(p, b) + penalty(p)  # noqa: E731
    want = gradient(plainly, PARAMS, BATCH)
    assert_close(reduced(plainly, mesh, microbatch=microbatch)(PARAMS, BATCH), want)


def test_a25_a_term_added_to_a_total_counts_once_for_each_microbatch_as_documented(mesh):
    def added(params, batch):
        mean = masked(params, batch)
        return jdp.Mean(mean.total + penalty(params), mean.weight)

    batch = ragged(8, 7, 6, 5, 4, 3, 2, 0)
    base, extra = gradient(masked, PARAMS, batch), jax.grad(penalty)(PARAMS)
    for microbatch, count in ((None, 8), (2, 32)):
        got = reduced(added, mesh, microbatch=microbatch)(PARAMS, batch)[1]
        scale = count / batch["mask"].sum()
        assert_close(got, {"w": base[1]["w"] + scale * extra["w"]}, rtol=2e-6)


# --- losses that couple examples


def contrast(embeddings, positives, first):
    """In-batch negatives: row i's positive is row `first + i` of all."""
    logits = embeddings @ positives.T
    labels = first + jnp.arange(len(embeddings))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def embed(params, batch):
    embeddings = jnp.tanh(batch["x"] * params["w"])
    return embeddings, embeddings + batch["y"][:, None] / 4


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_a26_in_batch_negatives_of_the_global_batch(shape):
    names = ("data",) if len(shape) == 1 else ("node", "device")
    mesh = jdp.make_mesh(names, shape)

    def loss_fn(params, batch):
        embeddings, positives = embed(params, batch)
        first = jax.lax.axis_index(names) * len(embeddings)
        return contrast(embeddings, jdp.all_gather(positives, names), first)

    def reference(params, batch):
        return contrast(*embed(params, batch), 0)

    batch = jax.tree.map(lambda x: x[:32], BATCH)
    want = gradient(reference, PARAMS, batch)
    assert_close(reduced(loss_fn, mesh)(PARAMS, batch), want, rtol=2e-6)
    # without the gather each replica sees an eighth of the negatives
    assert reduced(reference, mesh)(PARAMS, batch)[0] < 0.7 * want[0]


# --- loss scaling


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a37_flax_dynamic_scale_around_the_loss_is_exact(mesh, scale):
    fn = jdp.value_and_grad(plain, mesh, microbatch=4)
    scaler = DynamicScale(scale=scale)
    _, finite, loss, grads = scaler.value_and_grad(lambda p: fn(p, BATCH)[0])(PARAMS)
    assert bool(finite)
    assert_close((loss, grads), gradient(plain, PARAMS, BATCH))
    # over the data axis there is nothing left to average, and JAX says so
    with pytest.raises(NameError, match="data"):
        scaler.value_and_grad(lambda p: fn(p, BATCH)[0], axis_name="data")(PARAMS)


def test_a37_flax_dynamic_scale_inside_a_loss_is_exact(mesh):
    scaler = DynamicScale(scale=1024.0)

    def loss_fn(params, batch):  # gradient penalty, say: a gradient inside the loss
        inner = scaler.value_and_grad(lambda p: plain(p, batch), axis_name="data")
        _, _, loss, grads = inner(params)
        return loss, {"norm": jnp.linalg.norm(grads["w"])}

    (loss, aux), grads = jdp.value_and_grad(loss_fn, mesh)(PARAMS, BATCH)
    want = gradient(plain, PARAMS, BATCH)
    assert_close((loss, mean_gradient(grads)), want)
    assert_close(aux["norm"], jnp.linalg.norm(want[1]["w"]))


def test_a37_a_loss_scale_as_links_of_the_chain_is_exact(mesh):
    tx = optax.chain(jdp.all_reduce(), optax.scale(1 / 1024), optax.sgd(1.0))
    step = jdp.train_step(lambda p, b: 1024 * plain(p, b), tx, mesh, microbatch=4)
    state, _ = step(jdp.init_state(PARAMS, tx, mesh), BATCH)
    moved = jax.tree.map(lambda a, b: a - b, PARAMS, state.params)
    assert_close(moved, gradient(plain, PARAMS, BATCH)[1], rtol=2e-6)


# --- control flow


def average(x):
    return jax.lax.pmean(x, "data")


def cond_reduced(loss, flag):
    return jax.lax.cond(flag, average, lambda x: x, loss)


def cond_varying(loss, flag):  # both branches vary, so JAX's types do not help
    return jax.lax.cond(flag, lambda x: x + average(x), lambda x: x, loss)


def cond_in_scan(loss, flag):
    body = lambda c, _: (cond_varying(c, flag), None)  # noqa: E731
    return jax.lax.scan(body, loss, length=2)[0]


def switch(loss, flag):
    branches = [lambda x: x, lambda x: x + average(x)]
    return jax.lax.switch(flag.astype(int), branches, loss)


@jax.jit
def scan_in_cond(loss, flag):
    body = lambda c, _: (c + average(c), None)  # noqa: E731
    return jax.lax.cond(flag, lambda x: jax.lax.scan(body, x, length=2)[0], lambda x: x, loss)


def while_loop(loss, flag):
    body = lambda c: (c[0] + 1, c[1] + average(c[1]))  # noqa: E731
    start = (0 * flag, jax.lax.stop_gradient(loss))
    return loss + jax.lax.while_loop(lambda c: c[0] < flag, body, start)[1]


BRANCHES = {
    cond_reduced: "branches must have equal output types",
    cond_varying: "psum.*differs between them",
    cond_in_scan: "psum.*differs between them",
    switch: "psum.*differs between them",
    scan_in_cond: "psum.*differs between them",
    while_loop: "psum.*differs between them",
}


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("microbatch", [None, 4])
def test_b07_a_collective_that_only_some_replicas_reach_is_an_error(mesh, branch, microbatch):
    def loss_fn(params, batch):
        flag = batch["y"][0] > 0
        flag = flag.astype(jnp.int32) if branch is while_loop else flag
        return branch(plain(params, batch), flag)

    fn = jdp.value_and_grad(loss_fn, mesh, microbatch=microbatch)
    with pytest.raises((TypeError, ValueError), match=BRANCHES[branch]):
        jax.eval_shape(fn, PARAMS, BATCH)  # traced only: run, it would hang


def test_b07_a_branch_that_all_replicas_take_alike_may_communicate(mesh):
    def loss_fn(params, batch):
        total = jax.lax.psum(jax.lax.stop_gradient(batch["x"] @ params["w"]).sum(), "data")
        return cond_varying(plain(params, batch), total > 0)

    def reference(params, batch):
        loss = plain(params, batch)
        return jnp.where((batch["x"] @ params["w"]).sum() > 0, 2 * loss, loss)

    got = reduced(loss_fn, mesh)(PARAMS, BATCH)
    assert_close(got, gradient(reference, PARAMS, BATCH))


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.mean(nn.RNN(nn.SimpleCell(3))(x))  # pyright: ignore[reportArgumentType]


def scan_zeros(params, batch):
    step = lambda h, x: (jnp.tanh(h + x @ params["w"]), None)  # noqa: E731
    return jax.lax.scan(step, jnp.zeros(()), batch["x"])[0]


def scan_from_the_batch(params, batch):
    step = lambda h, x: (jnp.tanh(h + x @ params["w"]), None)  # noqa: E731
    return jax.lax.scan(step, 0 * batch["y"][0], batch["x"])[0]


def while_zeros(params, batch):
    size = jax.lax.while_loop(lambda c: c < 3, lambda c: c + 1 + 0 * batch["y"][0], 0.0)
    return plain(params, batch) * jax.lax.stop_gradient(size)


def recurrent(params, batch):
    return Recurrent().apply(params["rnn"], batch["x"].reshape(-1, 2, 4))


def test_b12_loops_with_a_fresh_carry_run_or_the_error_says_pcast(mesh):
    rnn = Recurrent().init(jax.random.key(0), X.reshape(-1, 2, 4))
    params = {**PARAMS, "rnn": rnn}
    for loss_fn in (scan_zeros, while_zeros, recurrent):
        with pytest.raises(TypeError, match=r"pcast\(..., \('data',\), to='varying'\)"):
            jax.eval_shape(jdp.value_and_grad(loss_fn, mesh, microbatch=4), params, BATCH)


def test_b12_a_carry_made_from_the_batch_runs_and_is_exact(mesh):
    parts = [jax.tree.map(lambda x: x[4 * j : 4 * j + 4], BATCH) for j in range(16)]  # noqa: B023
    reference = lambda p: sum(scan_from_the_batch(p, part) for part in parts) / 16  # noqa: E731
    got = reduced(scan_from_the_batch, mesh, microbatch=4)(PARAMS, BATCH)
    assert_close(got, jax.jit(jax.value_and_grad(reference))(PARAMS))


SAMPLERS = {
    "normal": lambda key, batch: jax.random.normal(key, batch["y"].shape),
    "choice": lambda key, batch: jax.random.choice(key, jnp.arange(3.0), batch["y"].shape),
    "truncated": lambda key, batch: jax.random.truncated_normal(key, -(batch["y"] ** 2), 1.0),
    "permutation": lambda key, batch: jax.random.permutation(key, batch["y"]),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_b12_samplers_that_loop_inside_run(mesh, name):
    def loss_fn(params, batch, key):
        return (losses(params, batch) * SAMPLERS[name](key, batch)).mean()

    key = jax.random.key(0)
    loss, grads = jdp.value_and_grad(loss_fn, mesh, microbatch=8)(PARAMS, BATCH, key)

    def reference(params):
        parts = [jax.tree.map(lambda x: x[8 * j : 8 * j + 8], BATCH) for j in range(8)]  # noqa: B023
        keys = [jax.random.fold_in(key, j) for j in range(8)]
        return sum(loss_fn(params, part, k) for part, k in zip(parts, keys, strict=True)) / 8

    want = jax.jit(jax.value_and_grad(reference))(PARAMS)
    assert_close((loss, mean_gradient(grads)), want, rtol=3e-6)


def test_a18_integers_do_not_carry_a_mean(mesh):
    """A18, sgl-project/sglang#40084: eight int8 100s add up to 32, and their mean to 4."""
    wrapped = jnp.full((8, 4), 100, jnp.int8).sum(0, dtype=jnp.int8)
    assert int(wrapped[0]) == 32
    for make in (
        jdp.all_reduce,
        lambda wire_dtype: jdp.zero1(optax.sgd(1.0), wire_dtype=wire_dtype),
    ):
        with pytest.raises(ValueError, match="wire_dtype=int16 cannot carry a mean"):
            make(wire_dtype=jnp.int16)
    # magnitudes that differ by 128 between replicas: within the wire's rounding, and the same
    values = jnp.ones((8, 64)) * 2.0 ** jnp.arange(8)[:, None] * jnp.linspace(0.1, 1, 64)
    mean = functools.partial(jdp.collectives.mean, axis_name="data", wire_dtype=jnp.bfloat16)
    on_all = jax.shard_map(lambda v: mean(v[0]), mesh=mesh, in_specs=P("data"), out_specs=P())
    got = on_all(values)
    assert_same_copies(got)
    want = np.asarray(values, np.float64).mean(0)
    assert np.abs(np.asarray(got) - want).max() <= 2**-7 * want.max()


@pytest.mark.parametrize("stage", [None, jdp.zero1, jdp.zero3])
def test_a19_a_narrow_wire_loses_no_component(mesh, stage):
    """A19, pytorch/pytorch#48670: dropping the smaller coordinate stalls it at 3.516 of 3.351."""
    start, steps = jnp.array([3.0, 3.8]), 400

    def loss_fn(params, batch):
        curves = jnp.array([1.0, 1e-3]) * params["w"] ** 2
        return jnp.mean(jnp.sum(curves) + 0 * batch)

    def run(tx):
        step = jdp.train_step(loss_fn, tx, mesh)
        many = jax.jit(
            lambda state, batch: jax.lax.fori_loop(0, steps, lambda _, s: step(s, batch)[0], state)
        )
        return np.asarray(many(jdp.init_state({"w": start}, tx, mesh), np.ones(8)).params["w"])

    def top_1(updates, state, params=None):  # what a compressor without a memory does
        return jax.tree.map(
            lambda g: jnp.where(jnp.abs(g) == jnp.abs(g).max(), g, 0), updates
        ), state

    sgd = optax.sgd(0.1)
    forgets = optax.GradientTransformation(lambda p: optax.EmptyState(), top_1)
    exact = run(optax.chain(jdp.all_reduce(), sgd))
    stalled = run(optax.chain(jdp.all_reduce(), forgets, sgd))
    assert abs(stalled[1] - exact[1]) > 0.01
    wire = {"wire_dtype": jnp.bfloat16}
    tx = (
        optax.chain(jdp.all_reduce(**wire), sgd)
        if stage is None
        else stage(sgd, min_size=0, **wire)
    )
    np.testing.assert_allclose(run(tx), exact, rtol=2**-8, atol=1e-6)
