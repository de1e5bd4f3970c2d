"""`power_sgd`: step by step against the paper's algorithm in NumPy, at its ends, and counted."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives, crosses, lowered_collectives, sent_bytes

import jdp
from jdp.power import _orth

pytestmark = [pytest.mark.either, pytest.mark.alternate]

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
RANK = 2
# two matrices of one shape, a wide one and a convolution's; what is not compressed besides
SHAPES = {
    "first": (12, 8),
    "second": (12, 8),
    "wide": (6, 30),
    "kernel": (2, 3, 2, 10),
    "bias": (7,),
    "scalar": (),
    "small": (3, 2),
}
COMPRESSED = ("first", "kernel", "second", "wide")
GROUPS = (("first", "second"), ("kernel",), ("wide",))
make = functools.partial(jdp.power_sgd, RANK, min_rate=1.2)


@functools.cache
def mesh_of(count=8, kind=AUTO):
    return jdp.make_mesh(num_devices=count, axis_types=kind)


def rows(shape, count=8, key=0):
    return np.random.default_rng(key).normal(size=(count, *shape)).astype(np.float32)


def given(values, mesh=None, axes=("data",), dtype=jnp.float32):
    """Gradients of each replica, from arrays [N, *shape]."""
    mesh = mesh or mesh_of(len(jax.tree.leaves(values)[0]))
    place = NamedSharding(mesh, P(axes))
    return jax.tree.map(
        lambda x: jdp.PerReplica(
            jax.device_put(jnp.asarray(x, dtype), place), axes=axes, mesh=mesh
        ),
        values,
    )


def start(tx, shapes, mesh=None):
    """The optimizer state for parameters of 0."""
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    return jdp.init_state(params, tx, mesh or mesh_of()).opt_state


@functools.cache
def begun(kind=AUTO, **keywords):
    """A transformation for `SHAPES`, its first state, and its update, compiled once."""
    tx = make(**keywords)
    return tx, start(tx, SHAPES, mesh_of(8, kind)), jax.jit(tx.update)


@functools.cache
def begun_alone(shape=(12, 8), **keywords):
    """The same for one matrix "w"."""
    tx = jdp.power_sgd(**keywords)
    return start(tx, {"w": shape}), jax.jit(tx.update)


def values_of(tree):
    """The plain [N, *shape] arrays of a tree of `PerReplica`."""
    is_leaf = lambda x: isinstance(x, jdp.PerReplica)  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(x.value), tree, is_leaf=is_leaf)


# the paper's algorithms 1 and 2 -------------------------------------------------------------------


def gram_schmidt(columns):
    out = np.array(columns, np.float64)
    for k in range(out.shape[1]):
        for j in range(k):
            out[:, k] -= (out[:, j] @ out[:, k]) * out[:, j]
        out[:, k] /= np.linalg.norm(out[:, k])
    return out


def compress_and_aggregate(matrices, q):
    """Algorithm 1: P^, Q, and what each worker's own Q is."""
    left = gram_schmidt(np.mean([m @ q for m in matrices], axis=0))
    rights = [m.T @ left for m in matrices]
    return left, np.mean(rights, axis=0), rights


def papers_step(grads, errors, qs, own):
    """Algorithm 2 without momentum: the update, the errors and the warm starts after a step."""
    updates = {}
    for name, grad in grads.items():
        if name not in qs:
            updates[name] = np.mean(grad, axis=0, dtype=np.float64)
            continue
        matrices = [
            (g.astype(np.float64) + e).reshape(-1, g.shape[-1])
            for g, e in zip(grad, errors[name], strict=True)
        ]
        left, qs[name], rights = compress_and_aggregate(matrices, qs[name])
        update = left @ qs[name].T
        subtracted = [left @ right.T if own else update for right in rights]
        errors[name] = [
            (m - s).reshape(grad.shape[1:]) for m, s in zip(matrices, subtracted, strict=True)
        ]
        updates[name] = update.reshape(grad.shape[1:])
    return updates


def loss_fn(params, batch):
    """Uses every parameter, and pulls in directions that differ by example."""
    x = jnp.tanh(batch @ params["first"]) - jnp.sin(batch @ params["second"])
    y = x[:, :6] @ params["wide"]
    kernel = params["kernel"].reshape(12, 10)
    z = jnp.sum((batch @ kernel) ** 2, -1) + jnp.sum(x[:, :7] * params["bias"], -1)
    small = jnp.sum(x[:, :3] @ params["small"], -1)
    terms = jnp.mean((y - 1) ** 2, -1) + 0.1 * z + params["scalar"] * small
    pull = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
    return 0.1 * jnp.mean(terms) + 0.02 * pull


def initial(key=0):
    random = np.random.default_rng(key)
    return {
        name: (random.normal(size=shape) / 3).astype(np.float32) for name, shape in SHAPES.items()
    }


def batches(steps, count=32):
    return np.random.default_rng(1).normal(size=(steps, count, 12)).astype(np.float32)


def by_leaf(memory):
    """The warm start of each compressed leaf."""
    return {
        name: np.asarray(factor[place])
        for group, factor in zip(GROUPS, memory.factors, strict=True)
        for place, name in enumerate(group)
    }


def assert_same_factor(got, want, rtol):
    """Equal columns, but for signs: the sign of an orthonormal column is anybody's choice."""
    signs = np.sign(np.sum(got * want, axis=0))
    np.testing.assert_allclose(got * signs, want, rtol=0, atol=rtol * np.abs(want).max())


MESHES = [(8, AUTO), (8, EXPLICIT), (4, AUTO), (2, EXPLICIT), (1, AUTO)]


def assert_like_the_paper(state, params, qs, errors, rtol):
    memory, residual = state.opt_state[0].memory, values_of(state.opt_state[0].residual)
    reference.assert_close(state.params, params, rtol=rtol)
    for name, factor in by_leaf(memory).items():
        assert_same_factor(factor, qs[name], rtol=10 * rtol)
        reference.assert_close(residual[name], np.array(errors[name]), rtol=10 * rtol)
    for name in set(SHAPES) - set(qs):
        assert not residual[name].any()
    reference.assert_same_copies((state.params, memory))


@pytest.mark.parametrize(("count", "kind"), MESHES)
def test_a_run_is_the_papers(count, kind):
    """SGD of rate 1: parameters, warm starts and residuals after each of 8 steps.

    With the error as the authors' programs take it everything is the same but single residuals,
    whose mean is. (A run tells on rounding: where two directions are nearly as long, power
    iteration turns 1e-7 into 1e-4 within 25 steps, in NumPy as well.)
    """
    state, step = trained(count, kind)
    params, qs = initial(), by_leaf(state.opt_state[0].memory)
    errors = {name: np.zeros((count, *SHAPES[name])) for name in qs}
    theirs, their_qs, their_errors = dict(params), dict(qs), dict(errors)
    for batch in batches(8):
        updates = papers_step(gradients(params, batch, count), errors, qs, own=True)
        params = {name: np.float32(params[name] - updates[name]) for name in SHAPES}
        updates = papers_step(gradients(theirs, batch, count), their_errors, their_qs, own=False)
        theirs = {name: np.float32(theirs[name] - updates[name]) for name in SHAPES}
        state, _ = step(state, batch)
        assert_like_the_paper(state, params, qs, errors, rtol=1e-5)
        reference.assert_close(theirs, params, rtol=1e-5)
        for name in qs:
            one, other = (np.mean(e[name], axis=0) for e in (errors, their_errors))
            reference.assert_close(one, other, rtol=1e-4)
    if count > 1:
        assert np.abs(np.array(errors["wide"]) - np.array(their_errors["wide"])).max() > 1e-3


@pytest.mark.parametrize(("count", "kind"), MESHES[:1])
def test_every_step_is_the_papers(count, kind):
    """Each of 40 steps, from where the library stands, and so to rounding."""
    state, step = trained(count, kind)
    for batch in batches(40):
        params = jax.tree.map(np.asarray, state.params)
        qs = by_leaf(state.opt_state[0].memory)
        errors = values_of(state.opt_state[0].residual)
        updates = papers_step(gradients(params, batch, count), errors, qs, own=True)
        params = {name: np.float32(params[name] - updates[name]) for name in SHAPES}
        state, _ = step(state, batch)
        assert_like_the_paper(state, params, qs, errors, rtol=2e-6)


def gradients(params, batch, count):
    """Of each replica's rows, by JAX without jdp."""
    grads = _gradients(params, batch.reshape(count, -1, 12))
    return {name: np.asarray(grads[name]) for name in SHAPES}


_gradients = jax.jit(jax.vmap(jax.grad(loss_fn), in_axes=(None, 0)))


@functools.cache
def _step(count, kind, **keywords):
    tx = optax.chain(make(**keywords), optax.sgd(1.0))
    return tx, jdp.train_step(loss_fn, tx, mesh_of(count, kind))


def trained(count=8, kind=AUTO, **keywords):
    tx, step = _step(count, kind, **keywords)
    return jdp.init_state(initial(), tx, mesh_of(count, kind)), step


def test_the_oracle_compresses_what_the_library_does():
    state, _ = trained()
    assert tuple(by_leaf(state.opt_state[0].memory)) == ("first", "second", "kernel", "wide")
    assert sorted(by_leaf(state.opt_state[0].memory)) == list(COMPRESSED)


def test_residuals_of_their_own_do_not_grow():
    """What replicas do not have in common adds up for ever if the mean is subtracted from each."""
    shape = (24, 16)
    state, update = begun_alone(shape, rank=2)
    apart = rows(shape) - rows(shape).mean(0)
    for key in range(200):
        _, state = update(given({"w": apart + 0.1 * rows(shape, key=key)}), state)
    assert np.abs(values_of(state.residual)["w"]).max() < 100
    assert np.abs(200 * apart).max() > 500


# what a mean must be ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (12, 10), (2, 3, 5)])
def test_full_rank_is_the_exact_mean(shape):
    """Also after gradients of 0 and of rank 1, which leave little to start from."""
    state, update = begun_alone(shape, rank=100, min_rate=0)
    assert state.memory.factors[0].shape[-1] == min(math.prod(shape[:-1]), shape[-1])
    flat = np.ones((8, *shape), np.float32)
    for key, values in enumerate([rows(shape), 0 * flat, rows(shape, key=1), flat, flat, None]):
        values = rows(shape, key=key) if values is None else values
        means, state = update(given({"w": values}), state)
        np.testing.assert_allclose(means["w"], values.mean(0), rtol=0, atol=2e-6)
        assert np.abs(values_of(state.residual)["w"].mean(0)).max() < 2e-6


@pytest.mark.parametrize(
    ("single", "wire"), [(False, None), (True, None), (False, jnp.bfloat16), (True, jnp.int8)]
)
def test_means_and_residuals_add_up_to_the_gradients(single, wire):
    _, state, update = begun(single=single, wire_dtype=wire)
    sent = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    whole = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for key in range(12):
        values = {
            name: rows(shape, key=100 * key + i) for i, (name, shape) in enumerate(SHAPES.items())
        }
        means, state = update(given(values), state)
        for name in SHAPES:
            sent[name] += np.asarray(means[name], np.float64)
            whole[name] += values[name].astype(np.float64).mean(0)
        left = {name: x.mean(0) for name, x in values_of(state.residual).items()}
        reference.assert_close({name: sent[name] + left[name] for name in SHAPES}, whole, 5e-6)
    reference.assert_same_copies((means, state.memory))
    for name in set(SHAPES) - set(COMPRESSED):
        if wire is None:
            reference.assert_close(sent[name], whole[name])
        else:  # what rounding took is in the residual, and not lost
            assert 0 < np.abs(left[name]).max() < 0.1


def test_without_error_feedback_a_mean_is_a_projection():
    _, state, update = begun(error_feedback=False)
    assert state.residual == ()
    values = {name: rows(shape) for name, shape in SHAPES.items()}
    for _ in range(30):  # the same gradient: the subspace converges to the best one
        means, state = update(given(values), state)
    for name in COMPRESSED:
        whole = values[name].mean(0).reshape(-1, SHAPES[name][-1])
        best = np.linalg.svd(whole, compute_uv=False)[RANK:]
        lost = np.linalg.norm(np.asarray(means[name]).reshape(whole.shape) - whole)
        np.testing.assert_allclose(lost, np.linalg.norm(best), rtol=1e-2)


# gradients that leave nothing to orthonormalise ---------------------------------------------------

COLUMNS = {
    "zeros": np.zeros((9, 3)),
    "equal": np.ones((9, 3)),
    "one is zero": np.stack([np.arange(9), 0 * np.arange(9), np.ones(9)], -1),
    "nearly equal": np.ones((9, 3)) + 1e-7 * np.random.default_rng(0).normal(size=(9, 3)),
    "tiny": 1e-30 * np.random.default_rng(0).normal(size=(9, 3)),
    "huge": 1e30 * np.random.default_rng(0).normal(size=(9, 3)),
    "of all sizes": np.random.default_rng(0).normal(size=(9, 3)) * [1e25, 1.0, 1e-25],
    "below normal": np.full((9, 3), 1e-42),
    "square": np.random.default_rng(0).normal(size=(3, 3)),
}


@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_columns_become_orthonormal(columns):
    got = np.asarray(jax.jit(_orth)(jnp.asarray(columns, jnp.float32)[None])[0], np.float64)
    np.testing.assert_allclose(got.T @ got, np.eye(3), rtol=0, atol=1e-6)
    sizes = np.abs(columns).max(0)
    if np.linalg.matrix_rank(columns / np.where(sizes, sizes, 1), tol=1e-3) == 3:
        scaled = columns / sizes
        np.testing.assert_allclose(got @ (got.T @ scaled), scaled, rtol=0, atol=1e-5)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    "values",
    [np.zeros((8, 12, 8)), np.ones((8, 12, 8)), 1e-30 * rows((12, 8)), 1e30 * rows((12, 8))],
    ids=["zeros", "rank 1", "tiny", "huge"],
)
def test_odd_gradients_leave_no_nan_and_are_sent_in_the_end(values, single):
    state, update = begun_alone(rank=RANK, single=single)
    total, mean = np.zeros((12, 8)), values.astype(np.float64).mean(0)
    for _ in range(12):
        means, state = update(given({"w": values}), state)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((means, state)))
        total += np.asarray(means["w"], np.float64)
    if np.linalg.matrix_rank(values[0]) < RANK:
        np.testing.assert_allclose(total, 12 * mean, rtol=0, atol=1e-4 * np.abs(mean).max())
    assert np.abs(total).max() >= 0.5 * np.abs(mean).max()


@pytest.mark.parametrize("single", [False, True])
def test_a_layer_that_starts_with_gradients_of_zero_is_compressed_later(single):
    """Q = 0 would give P = 0 and so Q = 0, for ever: nothing of the layer would be sent."""
    state, update = begun_alone(rank=RANK, single=single)
    for _ in range(3):
        _, state = update(given({"w": np.zeros((8, 12, 8))}), state)
    # neither the first rows nor the first columns say anything, as those of an embedding may not
    values = rows((12, 8))
    values[:, :RANK] = 0
    values[:, :, :RANK] = 0
    sent = 0
    for _ in range(30):
        means, state = update(given({"w": values}), state)
        sent += np.asarray(means["w"], np.float64)
    np.testing.assert_allclose(sent / 30, values.mean(0), rtol=0, atol=0.25)
    assert np.abs(sent).max() > 5


@pytest.mark.parametrize("single", [False, True])
def test_nan_spoils_its_matrix_and_not_the_state(single):
    _, state, update = begun(single=single)
    values = {name: rows(shape) for name, shape in SHAPES.items()}
    _, state = update(given(values), state)
    before = values_of(state.residual)
    values["first"] = values["first"].copy()
    values["first"][3, 0, 0] = np.nan
    means, state = update(given(values), state)
    assert np.isnan(means["first"][:, 0]).all()
    assert single or np.isnan(means["first"]).all()
    assert all(np.isfinite(means[name]).all() for name in SHAPES if name != "first")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    assert not single or int(state.memory.turn) == 1  # the NaN came in the second half
    kept = values_of(state.residual)["first"]
    np.testing.assert_array_equal(kept[3, :, 0], before["first"][3, :, 0])
    assert single or (kept == before["first"]).all()
    values["first"] = rows((12, 8), key=5)
    means, state = update(given(values), state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((means, state)))


# counted ------------------------------------------------------------------------------------------


def compiled(tx, loss, params, batch, mesh):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), params)
    state = jdp.init_state(shapes, tx, mesh)
    text = jdp.train_step(loss, tx, mesh).lower(state, batch).compile().as_text()
    return collectives(text)


@pytest.mark.parametrize(("single", "count"), [(False, 2), (True, 1)])
def test_collectives_for_the_whole_tree(single, count):
    """Two, or one, besides that of the loss; none in a loop, and none in a branch."""
    tx = optax.chain(make(single=single), optax.sgd(1.0))
    found = compiled(tx, loss_fn, initial(), batches(1)[0], mesh_of())
    assert all(c.kind == "all-reduce" and not c.in_loop and not c.in_branch for c in found)
    assert all(c.times == 1 and c.dtypes == ("f32",) for c in found)
    matrices = [(math.prod(SHAPES[name][:-1]), SHAPES[name][-1]) for name in COMPRESSED]
    rest = 4 * sum(math.prod(SHAPES[name]) for name in set(SHAPES) - set(COMPRESSED))
    left, right = (4 * RANK * sum(pair[i] for pair in matrices) for i in (0, 1))
    either = 4 * RANK * sum(max(pair) for pair in matrices)
    sizes = [either + rest] if single else [left + rest, right]
    # those of the loss, its total and weight, ride along with one of them or go alone
    assert len(found) in (count, count + 1)
    assert sum(c.bytes for c in found) in (sum(sizes) + 4, sum(sizes) + 8)
    assert all(any(c.bytes - size in (0, 4, 8) for c in found) for size in sizes)
    # nor is it the compiler that makes them so few
    _, state, update = begun(single=single)
    grads = given({name: rows(shape) for name, shape in SHAPES.items()})
    kinds = lowered_collectives(update.lower(grads, state).as_text())
    assert kinds == [("all-reduce", "f32")] * count


@pytest.mark.parametrize(("single", "count"), [(False, 2), (True, 1)])
def test_a_large_leaf_that_is_not_compressed_rides_along(single, count):
    """1.2 MB in one row, which has no rank."""
    shapes = {"w": (64, 64), "row": (300_000,)}
    tx = jdp.power_sgd(2, single=single)
    grads = given({name: rows(shape) for name, shape in shapes.items()})
    text = jax.jit(tx.update).lower(grads, start(tx, shapes)).as_text()
    assert lowered_collectives(text) == [("all-reduce", "f32")] * count


def test_products_are_of_float32_on_every_backend():
    """The default of TPU and GPU would round what goes into a matmul to 8 or 11 bits."""
    for rank in (RANK, 12):
        tx = jdp.power_sgd(rank, min_rate=0)
        grads = given({"w": rows((14, 13))})
        text = jax.jit(tx.update).lower(grads, start(tx, {"w": (14, 13)})).as_text()
        products = [line for line in text.splitlines() if "dot_general" in line]
        assert len(products) >= 2
        assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


@pytest.mark.parametrize(
    ("wire", "bits", "part"), [(jnp.bfloat16, "u16", 0.5), (jnp.int8, "u8", 0.255)]
)
def test_narrow_factors_are_sent_narrow(wire, bits, part):
    shapes = {"w": (1024, 1024), "row": (2048,)}
    grads = given({name: rows(shape) for name, shape in shapes.items()})

    def sent(tx):
        text = jax.jit(tx.update).lower(grads, start(tx, shapes)).compile().as_text()
        return collectives(text)

    found = sent(jdp.power_sgd(RANK, wire_dtype=wire))
    assert {c.dtypes for c in found} == {(bits,)}
    assert [c.kind for c in found].count("all-gather") == 2
    assert sent_bytes(found, 8) <= part * sent_bytes(sent(jdp.power_sgd(RANK)), 8)


def test_nothing_compressed_is_one_all_reduce():
    found = compiled(
        optax.chain(jdp.power_sgd(100), optax.sgd(1.0)),
        loss_fn,
        initial(),
        batches(1)[0],
        mesh_of(),
    )
    assert {c.kind for c in found} == {"all-reduce"}
    assert len([c for c in found if c.bytes > 8]) == 1


@pytest.mark.parametrize("single", [False, True])
def test_rank_4_sends_little_on_the_mlp(single):
    """Goal 6 of the project: at most 1/150 of what an all-reduce of float32 sends."""
    import models  # of the benchmarks, which `programs` has put on the path

    model = models.make("mlp")
    tx = optax.chain(jdp.power_sgd(4, single=single), optax.sgd(1.0))
    whole = optax.chain(jdp.all_reduce(), optax.sgd(1.0))
    sent, all_of_it = (
        sent_bytes(compiled(t, model.loss, model.params, model.batch, mesh_of()), 8)
        for t in (tx, whole)
    )
    assert all_of_it >= 2 * 7 / 8 * 4 * models.num_params(model)
    assert sent <= all_of_it / (250 if single else 150)


# with everything else -----------------------------------------------------------------------------

NODES = ("node", "device")


def run(tx, steps=4, mesh=None, params=None, **keywords):
    """Trains a few steps."""
    mesh = mesh or mesh_of(2)
    state = jdp.init_state(initial() if params is None else params, tx, mesh)
    step = jdp.train_step(loss_fn, tx, mesh, **keywords)
    for batch in batches(steps):
        state, _ = step(state, batch)
    return state


@functools.cache
def plain():
    return run(optax.chain(make(), optax.adam(0.1)))


def test_a_zero_stage_behind_it_takes_the_means():
    state = run(optax.chain(make(), jdp.zero1(optax.adam(0.1), min_size=0)))
    reference.assert_close(state.params, plain().params, rtol=1e-5)
    for name, residual in values_of(plain().opt_state[0].residual).items():
        reference.assert_close(values_of(state.opt_state[0].residual)[name], residual, rtol=1e-4)


def test_microbatches_and_donation_change_nothing():
    tx = optax.chain(make(), optax.adam(0.1))
    reference.assert_close(run(tx, microbatch=2).params, plain().params, rtol=1e-4)
    reference.assert_close(run(tx, donate=False).params, plain().params, rtol=1e-6)


def test_a_clip_sees_the_mean():
    state = run(optax.chain(make(), optax.clip_by_global_norm(1e-3), optax.sgd(1.0)), steps=1)
    moved = jax.tree.map(lambda new, old: np.asarray(new) - old, state.params, initial())
    np.testing.assert_allclose(jdp.global_norm(moved), 1e-3, rtol=1e-3)


def test_accumulation_compresses_once_a_window():
    tx = jdp.multi_steps(optax.chain(make(), optax.sgd(1.0)), every=2)
    mesh = mesh_of(2)
    state, step = jdp.init_state(initial(), tx, mesh), jdp.train_step(loss_fn, tx, mesh)
    born = jax.tree.map(np.asarray, state.opt_state.inner_state)
    parts = batches(4, 16)
    state, _ = step(state, parts[0])
    for old, new in zip(
        jax.tree.leaves(born), jax.tree.leaves(state.opt_state.inner_state), strict=True
    ):
        np.testing.assert_array_equal(old, new)
    for part in parts[1:]:
        state, _ = step(state, part)
    whole, whole_step = trained(2)
    for pair in parts.reshape(2, 2, 2, 8, 12):  # each replica's rows of both calls
        whole, _ = whole_step(whole, np.concatenate(pair, axis=1).reshape(32, 12))
    reference.assert_close(state.params, whole.params, rtol=1e-5)


@pytest.mark.parametrize("single", [False, True])
def test_a_skipped_step_leaves_everything_alone(single):
    tx = jdp.skip_nonfinite(optax.chain(make(single=single), optax.sgd(1.0)))
    mesh = mesh_of(2)
    state = jdp.init_state(initial(), tx, mesh)
    step = jdp.train_step(loss_fn, tx, mesh, donate=False)
    good = batches(2)
    state, _ = step(state, good[0])
    bad = good[1].copy()
    bad[5, 3] = np.inf
    after, _ = step(state, bad)
    assert int(after.opt_state.skipped) == 1
    for old, new in zip(
        jax.tree.leaves((state.params, state.opt_state.inner_state)),
        jax.tree.leaves((after.params, after.opt_state.inner_state)),
        strict=True,
    ):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


@pytest.mark.parametrize("single", [False, True])
def test_saved_and_restored_it_goes_on_to_the_bit(single):
    tx = optax.chain(make(single=single), optax.adam(0.1))
    mesh = mesh_of(2)
    state, step = jdp.init_state(initial(), tx, mesh), jdp.train_step(loss_fn, tx, mesh)
    *first, last = batches(4)
    for batch in first:
        state, _ = step(state, batch)
    saved = jax.tree.map(np.asarray, state)
    like = jdp.init_state(initial(), tx, mesh)
    restored = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), saved, like)
    ends = [step(x, last)[0] for x in (state, restored)]
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert np.abs(values_of(ends[0].opt_state[0].residual)["wide"]).max() > 0


@functools.cache
def _on_four():
    return run(optax.chain(make(), optax.sgd(0.5)), mesh=mesh_of(4))


@pytest.mark.parametrize("count", [2, 8])
def test_other_device_counts_keep_the_mean_of_the_residuals(count):
    """And go on as they would have: the mean is all that enters the steps to come."""
    tx, state = optax.chain(make(), optax.sgd(0.5)), _on_four()
    mesh = mesh_of(count)
    moved = jdp.restage(state, jdp.init_state(initial(), tx, mesh))
    olds, news = (values_of(s.opt_state[0].residual) for s in (state, moved))
    for name in COMPRESSED:
        assert news[name].shape == (count, *SHAPES[name])
        reference.assert_close(news[name].mean(0), olds[name].mean(0))
        assert np.abs(olds[name].mean(0)).max() > 1e-3
    for old, new in zip(
        state.opt_state[0].memory.factors, moved.opt_state[0].memory.factors, strict=True
    ):
        np.testing.assert_array_equal(old, new)
    batch = batches(1)[0]
    old, _ = jdp.train_step(loss_fn, tx, mesh_of(4), donate=False)(state, batch)
    new, _ = jdp.train_step(loss_fn, tx, mesh)(moved, batch)
    reference.assert_close(new.params, old.params, rtol=1e-5)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_only_what_crosses_nodes_is_compressed(kind):
    mesh = jdp.make_mesh(NODES, (2, 4), axis_types=(kind,) * 2)
    tx = optax.chain(jdp.all_reduce("device"), make("node"), optax.adam(0.1))
    state = run(tx, mesh=mesh)
    two = run(optax.chain(make(), optax.adam(0.1)), mesh=mesh_of(2))
    reference.assert_close(state.params, two.params, rtol=1e-4)
    reference.assert_same_copies((state.params, state.opt_state[1].memory))
    residual = state.opt_state[1].residual["wide"]
    assert residual.axes == ("node",)
    assert residual.shape == (2, *SHAPES["wide"])
    found = compiled(tx, loss_fn, initial(), batches(1)[0], mesh)
    crossing = [c for c in found if crosses(c, 4)]
    whole = 4 * sum(math.prod(shape) for shape in SHAPES.values())
    assert 8 < sum(c.bytes for c in crossing) < 0.6 * whole
    assert sum(c.bytes for c in found) >= whole + sum(c.bytes for c in crossing)


def test_narrow_parameters_are_compressed_in_float32():
    narrow = {name: jnp.asarray(value, jnp.bfloat16) for name, value in initial().items()}
    tx, _, update = begun()
    with jax.set_mesh(mesh_of()):
        state = tx.init(narrow)
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"float32"}
    values = {
        name: np.asarray(jnp.asarray(rows(shape), jnp.bfloat16), np.float32)
        for name, shape in SHAPES.items()
    }
    means, after = update(given(values, dtype=jnp.bfloat16), state)
    want, wide = update(given(values), state)
    for name in SHAPES:
        assert means[name].dtype == jnp.float32
        np.testing.assert_array_equal(means[name], want[name])
    for one, other in zip(
        *(jax.tree.leaves(values_of(x.residual)) for x in (after, wide)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("single", [False, True])
def test_update_keeps_the_form_of_the_state(single, kind):
    """The second call compiles nothing, and steps in a loop are steps one by one."""
    tx, born, _ = begun(kind, single=single)
    grads = given({name: rows(shape) for name, shape in SHAPES.items()}, mesh_of(8, kind))
    update, state = jax.jit(tx.update), born
    for _ in range(3):
        means, state = update(grads, state)
    assert update._cache_size() == 1
    for old, new in zip(jax.tree.leaves(born), jax.tree.leaves(state), strict=True):
        assert (old.shape, old.dtype, old.aval.weak_type) == (new.shape, new.dtype, False)
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)

    def body(state, _):
        means, state = tx.update(grads, state)
        return state, means

    looped, all_means = jax.jit(lambda s: jax.lax.scan(body, s, length=3))(born)
    reference.assert_close({k: v[-1] for k, v in all_means.items()}, means, rtol=1e-5)
    assert jax.tree.structure(looped) == jax.tree.structure(state)


@pytest.mark.parametrize("single", [False, True])
def test_init_takes_shapes(single):
    tx, real, _ = begun(single=single)
    structs = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    with jax.set_mesh(mesh_of()):
        abstract = jax.eval_shape(tx.init, structs)
    kinds = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]  # noqa: E731
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    assert kinds(abstract) == kinds(real)


def test_the_seed_draws_another_first_q():
    one, same, other = (start(make(seed=s), SHAPES).memory.factors for s in (0, 0, 1))
    for a, b, c in zip(one, same, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (np.asarray(a) != np.asarray(c)).mean() > 0.99
    # matrices of one shape start apart, too
    assert (np.asarray(one[0][0]) != np.asarray(one[0][1])).mean() > 0.99


# how well it trains -------------------------------------------------------------------------------


def test_it_trains_nearly_as_well_and_with_one_all_reduce_of_twice_the_rank_too():
    """Loss of a small network after 100 steps of momentum; at 0.69 without compression.

    `single` at rank 2r sends as many bytes as the two halves at rank r. At the same rank it is
    behind, and without error feedback all are.
    """
    params, loss, _, batch = reference.mlp()
    mesh, ends = mesh_of(2), {}
    for name, link in {
        "whole": jdp.all_reduce(),
        "both": jdp.power_sgd(2, min_rate=1),
        "single": jdp.power_sgd(4, min_rate=1, single=True),
        "forgetful": jdp.power_sgd(2, min_rate=1, error_feedback=False),
    }.items():
        tx = optax.chain(link, optax.sgd(0.05, momentum=0.9))
        state, step = jdp.init_state(params, tx, mesh), jdp.train_step(loss, tx, mesh)
        for _ in range(100):
            state, metrics = step(state, batch)
        ends[name] = float(metrics["loss"])
    assert ends["whole"] < ends["both"] < 1.06 * ends["whole"], ends
    assert ends["whole"] < ends["single"] < 1.06 * ends["whole"], ends
    assert ends["forgetful"] > 1.2 * ends["both"], ends


# misuse -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, -1, 2.0, 1.5, "4", True, None, jnp.ones(())])
def test_ranks_that_cannot_be(rank):
    with pytest.raises(ValueError, match=r"jdp\.power_sgd got rank=.*whole number, at least 1"):
        jdp.power_sgd(rank)


@pytest.mark.parametrize("min_rate", [-1, float("nan"), "2", True, None])
def test_rates_that_cannot_be(min_rate):
    with pytest.raises(ValueError, match=r"jdp\.power_sgd got min_rate=.*a number, at least 0"):
        jdp.power_sgd(2, min_rate=min_rate)


def test_wire_dtypes_that_cannot_be():
    with pytest.raises(ValueError, match="wire_dtype=int32 cannot carry a mean"):
        jdp.power_sgd(2, wire_dtype=jnp.int32)


def test_gradients_that_are_already_reduced():
    tx = make()
    state = start(tx, SHAPES)
    with pytest.raises(ValueError, match=r"jdp\.power_sgd received gradient \['bias'\].*already"):
        tx.update({name: jnp.ones(shape) for name, shape in SHAPES.items()}, state)


def test_axes_that_are_not_the_gradients():
    with pytest.raises(ValueError, match=r"would average over nothing"):
        jdp.power_sgd(2, axis=())
    mesh = jdp.make_mesh(NODES, (2, 4))
    tx = make("node")
    state = start(tx, {"w": (12, 8)}, mesh)
    grads = given({"w": rows((12, 8))}, mesh, NODES)
    with pytest.raises(ValueError, match=r"jdp\.power_sgd works along the mesh axes \('node',\)"):
        tx.update(grads, state)


def test_an_empty_tree_and_empty_leaves():
    tx = make()
    assert tx.update({}, start(tx, {}))[0] == {}
    state = start(tx, {"none": (0, 5), "w": (12, 8)})
    means, _ = jax.jit(tx.update)(
        given({"none": np.zeros((8, 0, 5)), "w": rows((12, 8))}, mesh_of()), state
    )
    assert means["none"].shape == (0, 5)
