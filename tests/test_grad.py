"""value_and_grad against the definition on one device: values, placement, programs, refusals."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives
from reference import assert_close, assert_same_copies, gradient, masked, mean_gradient, mlp, plain

import jdp

pytestmark = pytest.mark.either

PARAMS, LOSS, MASKED, BATCH = mlp()
W = {"w": jnp.arange(1.0, 9.0) / 8}
ROWS = {
    "x": np.random.default_rng(1).normal(size=(32, 8)).astype(np.float32),
    "mask": (np.arange(32) % 4 < np.arange(32) // 8 + 1).astype(np.float32),
}


def agrees(loss_fn, mesh, params=W, reference=None, **options):
    """The gradient of 32 rows is that of one device; returns what the function returned."""
    loss, grads = jdp.value_and_grad(loss_fn, mesh, **options)(params, ROWS)
    assert_close((loss, mean_gradient(grads)), gradient(reference or loss_fn, W, ROWS))
    return loss, grads


def trace(loss_fn, mesh, **options):
    return jax.eval_shape(jdp.value_and_grad(loss_fn, mesh, **options), W, ROWS)


@pytest.fixture(scope="module")
def mesh():
    return jdp.make_mesh()


@functools.cache
def expected(name):
    return gradient({"plain": LOSS, "masked": MASKED}[name], PARAMS, BATCH)


# --- the right value, on any number of devices, however the batch is cut


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
@pytest.mark.parametrize(("name", "microbatch"), [("plain", None), ("plain", 2), ("masked", 4)])
def test_a01_a05_gradient_is_that_of_the_whole_batch(num_devices, axis_type, name, microbatch):
    mesh = jdp.make_mesh(num_devices=num_devices, axis_types=(axis_type,))
    fn = jdp.value_and_grad({"plain": LOSS, "masked": MASKED}[name], mesh, microbatch=microbatch)
    loss, grads = fn(PARAMS, BATCH)
    assert_close((loss, mean_gradient(grads)), expected(name))
    assert loss.is_fully_replicated
    assert_same_copies(loss)
    for key, param in PARAMS.items():
        assert grads[key].shape == (num_devices, *param.shape)
        assert grads[key].dtype == param.dtype
        assert grads[key].axes == ("data",)
        assert {s.data.shape for s in grads[key].value.addressable_shards} == {(1, *param.shape)}
    # against other batches a plain mean counts by its rows
    assert_close(grads["w1"].weight, BATCH["mask"].sum() if name == "masked" else 64)


@pytest.mark.parametrize(("num_devices", "splits"), [(1, 8), (2, 4), (4, 1), (8, 8)])
def test_a05_gradient_does_not_depend_on_the_number_of_microbatches(num_devices, splits):
    mesh = jdp.make_mesh(num_devices=num_devices)
    fn = jdp.value_and_grad(MASKED, mesh, microbatch=64 // num_devices // splits)
    loss, grads = fn(PARAMS, BATCH)
    assert_close((loss, mean_gradient(grads)), expected("masked"))


@pytest.mark.parametrize("microbatch", [None, 2])
def test_each_row_is_its_replicas_part_by_the_documented_formula(mesh, microbatch):
    _, grads = jdp.value_and_grad(masked, mesh, microbatch=microbatch)(W, ROWS)
    total = lambda p, b: masked(p, b).total  # noqa: E731
    for i in range(8):
        mine = jax.tree.map(lambda x: x[4 * i : 4 * i + 4], ROWS)  # noqa: B023
        g = jax.grad(total)(W, mine)["w"] * 8 / ROWS["mask"].sum()
        assert_close(grads["w"].value[i], g)


def test_gradient_comes_in_the_dtype_of_each_parameter(mesh):
    params = {"w": W["w"], "b": jnp.bfloat16(2), "h": jnp.ones(3, jnp.float16), "unused": W["w"]}

    def loss_fn(p, batch):
        return plain(p, batch) * p["b"].astype(jnp.float32) + p["h"].astype(jnp.float32).sum()

    for microbatch in (None, 2):
        _, grads = jdp.value_and_grad(loss_fn, mesh, microbatch=microbatch)(params, ROWS)
        assert jax.tree.map(lambda p: p.dtype, params) == {k: g.dtype for k, g in grads.items()}
        assert_close(mean_gradient(grads)["h"], np.ones(3))
        assert not np.any(grads["unused"].value)


# --- meshes


@pytest.mark.parametrize(
    "types", list(itertools.product([AxisType.Auto, AxisType.Explicit], repeat=2))
)
@pytest.mark.parametrize("microbatch", [None, 2])
def test_a31_a_model_axis_is_left_to_its_user(types, microbatch):
    mesh = jdp.make_mesh(("data", "model"), (4, 2), axis_types=types)
    params = jax.device_put(W, NamedSharding(mesh, P("model")))
    _, grads = agrees(masked, mesh, params, microbatch=microbatch)
    assert grads["w"].shape == (4, 8)
    if types == (AxisType.Auto, AxisType.Explicit) and jax.__version_info__ < (0, 11):
        return  # this pair of types loses the placement there
    # replica i's gradient stays split over the model axis
    assert {s.data.shape for s in grads["w"].value.addressable_shards} == {(1, 4)}


@pytest.mark.parametrize(
    ("axis", "num_replicas"), [(None, 8), ("node", 2), ("device", 4), (("device", "node"), 8)]
)
def test_a31_the_divisor_is_the_size_of_the_axes_used(axis, num_replicas):
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    _, grads = agrees(masked, mesh, axis=axis, microbatch=2)
    assert grads["w"].num_replicas == len(grads["w"].value) == num_replicas


@pytest.mark.parametrize("order", [slice(2, 6), slice(None, None, -1), slice(7, 8)])
def test_a31_part_of_the_devices_in_any_order(order):
    devices = jax.devices()[order]
    loss, grads = agrees(masked, jdp.make_mesh(devices=devices), microbatch=2)
    assert loss.sharding.device_set == set(devices)
    rows = {s.device: s.index[0].start or 0 for s in grads["w"].value.addressable_shards}
    assert [rows[device] for device in devices] == list(range(len(devices)))


def test_inputs_may_be_anything_placed_anywhere_on_the_mesh(mesh):
    fn = jdp.value_and_grad(masked, mesh, microbatch=2)
    want = gradient(masked, W, ROWS)
    split = NamedSharding(mesh, P("data"))
    for params, batch in (
        (jax.tree.map(np.asarray, W), ROWS),
        (jdp.replicate(W, mesh), jax.device_put(ROWS, split)),
        (jax.device_put(W, split), jdp.replicate(ROWS, mesh)),
    ):
        loss, grads = fn(params, batch)
        assert_close((loss, mean_gradient(grads)), want)


def test_an_unknown_axis_is_refused(mesh):
    with pytest.raises(ValueError, match=r"none called 'nodes'"):
        jdp.value_and_grad(plain, mesh, axis="nodes")


# --- inside other transformations


def test_inside_jit_and_scan_and_without_a_second_compilation(mesh):
    fn: Any = jdp.value_and_grad(masked, mesh, microbatch=2)
    tx = optax.chain(jdp.all_reduce(), optax.sgd(0.01))

    def body(params, _):
        loss, grads = fn(params, ROWS)
        return optax.apply_updates(params, tx.update(grads, tx.init(params))[0]), loss

    scanned = jax.jit(lambda params: jax.lax.scan(body, params, length=3))
    params, losses = scanned(W)
    want, reference = W, []
    for _ in range(3):
        loss, grads = gradient(masked, want, ROWS)
        want = jax.tree.map(lambda p, g: p - 0.01 * g, want, grads)
        reference.append(loss)
    assert_close((params, losses), (want, np.stack(reference)), rtol=2e-6)
    assert_same_copies(params)

    for batch in (ROWS, jax.tree.map(lambda x: x + 1, ROWS)):
        fn(W, batch)
    assert fn._cache_size() == 1


def test_differentiating_the_loss_it_returns_gives_the_same_gradient(mesh):
    fn = jdp.value_and_grad(masked, mesh, microbatch=2)
    outer = jax.grad(lambda params: fn(params, ROWS)[0])(W)
    assert_close(outer, gradient(masked, W, ROWS)[1])


def test_differentiating_the_norm_of_the_reduced_gradient(mesh):
    fn: Any = jdp.value_and_grad(masked, mesh)
    update: Any = jdp.all_reduce().update

    def norm(params):
        return (update(fn(params, ROWS)[1], optax.EmptyState())[0]["w"] ** 2).sum()

    reference = jax.grad(lambda p: (gradient(masked, p, ROWS)[1]["w"] ** 2).sum())(W)
    assert_close(jax.grad(norm)(W), reference, rtol=2e-6)


# --- losses that communicate


def pmean(params, batch):
    return jax.lax.pmean(plain(params, batch), "data")


def psum(params, batch):
    return jax.lax.psum(plain(params, batch), "data")


def psum_total(params, batch):
    mean = masked(params, batch)
    return jdp.Mean(jax.lax.psum(mean.total, "data"), mean.weight)


@pytest.mark.parametrize("loss_fn", [pmean, psum, psum_total, lambda p, b: jnp.float32(1)])
@pytest.mark.parametrize("microbatch", [None, 2])
def test_a02_a_loss_that_is_reduced_already_is_refused(mesh, loss_fn, microbatch):
    with pytest.raises(ValueError, match=r"same on every replica.*\('data',\).*psum, pmean"):
        trace(loss_fn, mesh, microbatch=microbatch)


def test_a02_a_loss_reduced_over_one_of_two_data_axes_is_refused():
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    with pytest.raises(ValueError, match=r"same on every replica.*\('node', 'device'\)"):
        trace(lambda p, b: jax.lax.pmean(plain(p, b), "node"), mesh)


WEIGHTS = {
    "psum": lambda w: jax.lax.psum(w, "data"),
    "pmean": lambda w: jax.lax.pmean(w, "data"),
    "all_gather": lambda w: jax.lax.all_gather(w, "data").sum(),
    "made varying again": lambda w: jax.lax.psum(w, "data") + 0 * w,
    "in jit": jax.jit(lambda w: jax.lax.psum(w, "data")),
    "in remat": jax.checkpoint(lambda w: jax.lax.psum(w, "data")),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("options", [{}, {"microbatch": 2}, {"remat": True}])
def test_a03_a_weight_that_is_reduced_already_is_refused(mesh, name, options):
    def loss_fn(params, batch):
        mean = masked(params, batch)
        return jdp.Mean(mean.total, WEIGHTS[name](mean.weight))

    # accepted, loss and gradient would be 1/8 of the right ones
    with pytest.raises(ValueError, match=r"(?i)weight of the loss .*(sum|mesh axis)"):
        trace(loss_fn, mesh, **options)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("microbatch", [None, 4])
def test_a_weight_of_its_own_beside_a_collective_in_the_total_is_accepted(mesh, jit, microbatch):
    def centred(params, batch):  # what a synchronised BatchNorm does
        outputs = batch["x"] @ params["w"]
        outputs = outputs - jax.lax.pmean(outputs.mean(), "data")
        return jdp.Mean((outputs**2).sum(), len(outputs))

    def reference(params, batch):
        outputs = batch["x"] @ params["w"]
        return ((outputs - outputs.mean()) ** 2).mean()

    agrees(jax.jit(centred) if jit else centred, mesh, reference=reference, microbatch=microbatch)


COUNTS = {
    "psum": lambda n: jax.lax.psum(n, "data"),
    "all_gather": lambda n: jax.lax.all_gather(n, "data").sum(),
    "in scan": lambda n: jax.lax.scan(lambda c, _: (c + jax.lax.psum(n, "data"), 0), 0.0, length=1)[
        0
    ],
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("microbatch", [None, 2])
def test_a03_a_plain_loss_divided_by_a_global_count_is_refused(mesh, name, microbatch):
    def loss_fn(params, batch):  # right with a psum of gradients, 1/8 of that with their mean
        return masked(params, batch).total / COUNTS[name](batch["mask"].sum())

    with pytest.raises(
        ValueError, match=r"a number that was combined .*such as a count.*jdp\.Mean\("
    ):
        trace(loss_fn, mesh, microbatch=microbatch)


def test_a03_a_plain_loss_divided_by_the_mean_count_is_right(mesh):
    def loss_fn(params, batch):  # (1/N) sum_i total_i / (W/N)
        return masked(params, batch).total / jax.lax.pmean(batch["mask"].sum(), "data")

    agrees(loss_fn, mesh, reference=lambda p, b: masked(p, b).value)


def test_a_loss_that_exchanges_a_number_says_so_with_a_weight_of_1(mesh):
    def loss_fn(params, batch):  # a mean of its own, in units that all replicas agree about
        scale = jax.lax.pmax(jnp.abs(batch["x"]).max(), "data")
        return jdp.Mean(plain(params, batch) / scale, 1)

    agrees(loss_fn, mesh, reference=lambda p, b: plain(p, b) / jnp.abs(ROWS["x"]).max())


def test_a_collective_over_a_part_of_the_loss_is_differentiated_exactly(mesh):
    def loss_fn(params, batch):
        outputs = batch["x"] @ params["w"]
        return plain(params, batch) + jax.lax.pmean(outputs.mean(), "data") ** 2

    def reference(params, batch):
        return plain(params, batch) + (batch["x"] @ params["w"]).mean() ** 2

    agrees(loss_fn, mesh, reference=reference)


# --- programs


KEPT = jax.checkpoint_policies.save_only_these_names("kept")
ALL = jax.checkpoint_policies.everything_saveable


# how often sin and exp are in the program of exp(kept(sin(x * w))) and its gradient
@pytest.mark.parametrize(
    ("remat", "wanted"), [(False, (1, 1)), (True, (2, 2)), (KEPT, (1, 2)), (ALL, (1, 1))]
)
@pytest.mark.parametrize("microbatch", [None, 2])
def test_remat_is_in_the_program_and_changes_no_value(mesh, remat, wanted, microbatch):
    def loss_fn(params, batch):
        hidden = checkpoint_name(jnp.sin(batch["x"] * params["w"]), "kept")
        return jnp.exp(hidden).mean()

    fn = jdp.value_and_grad(loss_fn, mesh, microbatch=microbatch, remat=remat)
    text = str(jax.make_jaxpr(fn)(W, ROWS))
    assert (text.count(" sin "), text.count(" exp ")) == wanted
    assert ("remat" in text) == bool(remat)
    loss, grads = fn(W, ROWS)
    assert_close((loss, mean_gradient(grads)), gradient(loss_fn, W, ROWS))


def sent(mesh, loss_fn, params, batch, **options):
    """Collectives of a gradient alone, and of a gradient with its reduction."""
    fn = jdp.value_and_grad(loss_fn, mesh, **options)
    reduce = lambda p, b: jdp.all_reduce().update(fn(p, b)[1], optax.EmptyState())[0]  # noqa: E731
    both = (jax.jit(f).lower(params, batch).compile().as_text() for f in (fn, reduce))
    return tuple(collectives(text or "") for text in both)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_d03_no_gradient_is_sent_and_nothing_inside_the_loop(axis_type):
    mesh = jdp.make_mesh(axis_types=(axis_type,))
    alone, reduced = sent(mesh, MASKED, PARAMS, BATCH, microbatch=2)
    assert not any(c.in_loop for c in alone + reduced)
    # loss and weight, two float32 scalars
    assert sum(c.bytes for c in alone) == 8
    gradient_bytes = 4 * sum(p.size for p in PARAMS.values())
    assert gradient_bytes <= sum(c.bytes for c in reduced) <= gradient_bytes + 8


def test_a_tied_embedding_is_summed_locally_and_sent_once(mesh):
    params = {"embedding": jax.random.normal(jax.random.key(0), (40, 8))}
    batch = {"ids": np.arange(32) % 7, "next": np.arange(32) % 5}

    def loss_fn(params, batch):
        logits = params["embedding"][batch["ids"]] @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()

    _, reduced = sent(mesh, loss_fn, params, batch)
    large = [c.bytes for c in reduced if c.bytes > 8]
    assert large == [4 * 40 * 8]
