"""Known pains of sharded training, each a test under its number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sharded
from cluster import run as run_cluster
from flax import nnx
from jax.sharding import PartitionSpec as P
from reference import assert_close
from sharded import STAGES, mesh_of, nbytes

import jdp

pytestmark = pytest.mark.either

SPLITS = ["1", "2", "3"]
_random = np.random.default_rng(3)
_normal = lambda *shape: _random.normal(size=shape).astype(np.float32)  # noqa: E731


def linear(params, batch):
    """A loss with the gradient `batch`, whatever the parameters are."""
    rows = jax.tree.map(lambda p, g: jnp.sum(p * g, axis=range(1, g.ndim)), params, batch)
    return jnp.mean(sum(jax.tree.leaves(rows)))


def one_step(stage, inner, params, batch, min_size=0):
    tx = STAGES[stage](inner, min_size=min_size)
    state, _ = sharded.run(tx, linear, mesh_of(), [batch], params=params)
    return jdp.logical(state.params)


def spread(grads):
    """Rows of a batch, very different from each other, whose mean is the gradient."""
    scale = np.linspace(0, 2, 16, dtype=np.float32)
    return jax.tree.map(lambda g: np.stack([g * s for s in scale]), grads)


@pytest.mark.parametrize("stage", STAGES)
def test_a06_a_clip_sees_the_norm_of_the_whole_gradient(stage):
    """64 elements of norm 7.6: clipped on shards the norm would come out as sqrt(8)."""
    grads = {"w": np.linspace(0.5, 1.3, 64, dtype=np.float32)}
    norm = np.linalg.norm(grads["w"])
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    params = one_step(stage, clip, {"w": np.zeros(64, np.float32)}, spread(grads))
    assert_close(params, {"w": -grads["w"] / norm}, 1e-6)


A07 = {
    "lamb": optax.lamb(0.1, weight_decay=0.1),
    "lars": optax.lars(0.1, weight_decay=0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
}


@pytest.mark.parametrize("name", A07)
@pytest.mark.parametrize("stage", ["1", "3"])
def test_a07_layerwise_optimizers_see_whole_layers(stage, name):
    """An 8 x 32 weight whose rows differ in scale by a factor of a thousand, a row a device."""
    scale = np.geomspace(0.01, 10, 8, dtype=np.float32)[:, None]
    params = {"w": _normal(8, 32) * scale, "odd": _normal(5, 7) * scale[:5]}
    grads = {"w": _normal(8, 32) * scale, "odd": _normal(5, 7) / scale[:5]}
    got = one_step(stage, A07[name], params, spread(grads))
    want = sharded.train(linear, params, A07[name], [spread(grads)])[0]
    updates = lambda new: jax.tree.map(lambda a, b: np.asarray(a) - b, new, params)  # noqa: E731
    assert_close(updates(got), updates(want), 1e-5)


@pytest.mark.parametrize("stage", SPLITS)
def test_a08_masks_see_the_tree_of_the_user(stage):
    """Gradients are 0: matrices decay, vectors keep every bit, be they padded or stacked."""
    params = {
        "w": _normal(16, 3),
        "b": _normal(11),
        "layers": _normal(3, 5, 7),
        "norms": _normal(24),
    }
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    tx = optax.adamw(0.1, weight_decay=0.5, mask=matrices)
    zeros = jax.tree.map(lambda x: np.zeros((8, *x.shape), np.float32), params)
    new = one_step(stage, tx, params, zeros)
    for name, old in params.items():
        want = old if old.ndim == 1 else old * np.float32(1 - 0.1 * 0.5)
        np.testing.assert_allclose(new[name], want, rtol=0 if old.ndim == 1 else 1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a09_split_and_whole_leaves_move_alike(stage):
    """Under SGD, which does not hide a factor of eight: leaves split, padded and whole."""
    grads = {"split": np.ones(512, np.float32), "padded": np.ones((10, 30), np.float32)}
    grads |= {"whole": np.ones(5, np.float32), "scalar": np.float32(1)}
    params = jax.tree.map(np.zeros_like, grads)
    new = one_step(stage, optax.sgd(1.0), params, spread(grads), min_size=256)
    assert_close(new, jax.tree.map(np.negative, grads), 1e-6)


@pytest.mark.parametrize("stage", SPLITS)
def test_a22_decay_inside_the_window_acts_once_a_window(stage):
    inner = optax.chain(optax.sgd(1.0), optax.add_decayed_weights(-0.01))
    tx = jdp.multi_steps(STAGES[stage](inner, min_size=0), every=4)
    params = {"w": np.ones((16, 3), np.float32)}
    batch = {"w": np.zeros((8, 16, 3), np.float32)}
    state, _ = sharded.run(tx, linear, mesh_of(), [batch] * 4, params=params)
    np.testing.assert_allclose(jdp.logical(state.params)["w"], 0.99, rtol=1e-6)


# A36: a canary for the collective that everything here rests on ---------------------------------


@pytest.mark.parametrize("count", [2, 8])
def test_a36_reduce_scatter_of_4_mib_chunks_is_right(count):
    """Wrong in most runs of a pre-release of jaxlib 0.12 on CPU; integers, so exact."""
    x = _random.integers(-1000, 1000, size=(count, count * 2**20)).astype(np.float32)
    local = lambda x: jdp.collectives.sum_scatter(x[0], "data")  # noqa: E731
    mapped = jax.shard_map(local, mesh=mesh_of(count), in_specs=P("data"), out_specs=P("data"))
    run = jax.jit(mapped)
    for _ in range(3):
        np.testing.assert_array_equal(run(x), x.sum(0))


def _train():
    import jax
    import numpy as np
    import sharded

    import jdp

    me, batches, spec = jax.process_index(), sharded.BATCHES, jax.P("data")
    mesh = jdp.make_mesh()
    x = np.random.default_rng(0).integers(-1000, 1000, size=(mesh.size, mesh.size * 2**20))
    x, place = x.astype(np.float32), jax.NamedSharding(mesh, spec)
    given = jax.make_array_from_callback(x.shape, place, lambda index: x[index])
    local = lambda x: jdp.collectives.sum_scatter(x[0], "data")  # noqa: E731
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    wrong, want = 0, x.sum(0)
    for _ in range(3):
        shards = run(given).addressable_shards
        wrong += sum(int((np.asarray(s.data) != want[s.index]).sum()) for s in shards)

    found, shape = [], (2, jax.device_count() // 2)
    mesh = jdp.make_mesh(("node", "device"), shape)
    for stage, axis in (("1", None), ("2", "node"), ("3", None), ("3", "device")):
        if shape[1] == 1 and axis == "device":
            continue
        tx = sharded.STAGES[stage](sharded.INNER, axis=axis, min_size=0)
        step = jdp.train_step(sharded.masked, tx, mesh, microbatch=8)
        state = jdp.init_state(sharded.PARAMS, tx, mesh)
        mine = [jax.tree.map(lambda x: x.reshape(2, 32, -1)[me].squeeze(), b) for b in batches]
        for batch in jdp.feed(mine, mesh, pad=False):
            state, metrics = step(state, batch)
        whole = jax.jit(jdp.logical, out_shardings=jax.NamedSharding(mesh, jax.P()))(state.params)
        leaves = [np.asarray(x).tolist() for x in jax.tree.leaves(whole)]
        found.append([leaves, float(metrics["loss"])])
    return wrong, found


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_devices", [1, 4])
def test_a36_two_processes_train_as_one_does(num_devices):
    """The canary between processes; then stages over both axes and over one, from process to
    process and within one.
    """
    answers = [a.value for a in run_cluster(_train, num_devices=num_devices, seconds=150)]
    params, metrics = sharded.train(
        sharded.masked, sharded.PARAMS, sharded.INNER, sharded.BATCHES, microbatch=8
    )
    for wrong, found in answers:
        assert wrong == 0
        assert len(found) == (4 if num_devices > 1 else 3)
        for leaves, loss in found:
            host = [np.asarray(x, np.float32) for x in leaves]
            assert_close(host, jax.tree.leaves(params), 3e-6)
            assert loss == pytest.approx(metrics[-1]["loss"], rel=1e-5)
    assert answers[0] == answers[1]


# B13: leaves that cannot be split evenly ---------------------------------------------------------

UNEVEN = {"scalar": (), "three": (3,), "tall": (10, 3), "wide": (7, 8), "even": (16, 16)}
WHERE = {  # what a device holds of each, with eight devices
    "scalar": (),
    "three": (1,),
    "tall": (2, 3),
    "wide": (7, 1),
    "even": (2, 16),
}


def statistics():
    """Norm, mean and RMS of the gradient, each of which padding would change."""

    def init(params):
        return jax.tree.map(lambda _: jnp.zeros(3), params)

    def update(updates, state, params=None):
        del state
        both = jax.tree.map(lambda g, p: g + 0 * p, updates, params)
        of = lambda g: jnp.stack([jnp.linalg.norm(g), jnp.mean(g), jnp.sqrt(jnp.mean(g**2))])  # noqa: E731
        return jax.tree.map(lambda g: -g, updates), jax.tree.map(lambda g: of(jnp.ravel(g)), both)

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    ("stage", "kind"), [*((s, "auto") for s in STAGES), ("1", "explicit"), ("3", "explicit")]
)
def test_b13_leaves_that_cannot_be_split_evenly(stage, kind):
    params = {name: np.asarray(_normal(*shape)) + 1 for name, shape in UNEVEN.items()}
    grads = {name: np.asarray(_normal(*shape)) + 1 for name, shape in UNEVEN.items()}
    tx = STAGES[stage](optax.chain(statistics(), optax.trace(0.9)), min_size=0)
    state, _ = sharded.run(tx, linear, mesh_of(kind=kind), [spread(grads)] * 2, params=params)
    want = jax.tree.map(lambda p, g: p - 2.9 * g, params, grads)
    assert_close(jdp.logical(state.params), want, 3e-6)
    chain = state.opt_state if stage == "0" else state.opt_state.inner_state
    found = jdp.logical(chain[1][0] if stage == "0" else chain[0])
    for name, grad in grads.items():
        rms = np.sqrt(np.mean(grad**2))
        np.testing.assert_allclose(found[name], [rms * grad.size**0.5, grad.mean(), rms], rtol=2e-6)
    if stage != "0":
        moments = chain[1].trace
        parts = {
            k: jax.tree.leaves(v)[0].addressable_shards[0].data.shape for k, v in moments.items()
        }
        assert parts == WHERE


# memory -----------------------------------------------------------------------------------------

BIG = {"w": (256, 192), "v": (192, 130), "b": (130,), "odd": (1001, 33)}
TOTAL = 4 * sum(np.prod(shape) for shape in BIG.values())
LARGEST = 4 * 256 * 192


def make_big():
    keys = jax.random.split(jax.random.key(0), len(BIG))
    return {n: jax.random.normal(k, s) / 16 for k, (n, s) in zip(keys, BIG.items(), strict=True)}


def big_loss(params, batch):
    hidden = jnp.tanh(batch @ params["w"]) @ params["v"] + params["b"]
    return jnp.mean(hidden**2) + jnp.mean(params["odd"] ** 2)


@pytest.mark.parametrize(("stage", "kind"), [("1", "auto"), ("2", "explicit"), ("3", "auto")])
def test_c01_state_is_born_split(stage, kind):
    """Moments take an eighth on each device, and their making takes no more than they do."""
    tx, mesh = STAGES[stage](optax.adam(1e-3)), mesh_of(kind=kind)
    state = jdp.init_state(make_big, tx, mesh)
    small = 4 * 130
    moments = state.opt_state.inner_state[0]
    for tree in (moments.mu, moments.nu):
        assert (TOTAL - small) / 8 <= sharded.device_bytes(tree) <= 1.02 * TOTAL / 8 + small
    with jax.set_mesh(mesh):
        program = jax.jit(tx.init).lower(state.params).compile()
    memory = program.memory_analysis()
    assert memory.output_size_in_bytes <= 1.02 * 2 * TOTAL / 8 + 2 * small + 1024
    assert memory.temp_size_in_bytes <= 4096
    if stage == "3":
        assert sharded.device_bytes(state.params) <= 1.02 * TOTAL / 8 + small


@pytest.mark.parametrize("source", ["function", "host"])
@pytest.mark.parametrize("stage", SPLITS)
def test_c01_no_program_of_init_state_makes_more(stage, source, monkeypatch):
    """Of all that init_state compiles, none takes or gives more than the state of a device."""
    params = make_big if source == "function" else jax.tree.map(np.asarray, make_big())
    tx, mesh, real, seen = STAGES[stage](optax.adam(1e-3)), mesh_of(), jax.jit, []

    def spy(fun, **options):
        jitted = real(fun, **options)

        def call(*args, **kwargs):
            seen.append(jitted.lower(*args, **kwargs).compile().memory_analysis())
            return jitted(*args, **kwargs)

        call.trace = jitted.trace  # compiles nothing
        return call

    monkeypatch.setattr(jax, "jit", spy)
    state = jdp.init_state(params, tx, mesh)
    monkeypatch.undo()
    assert seen
    for memory in seen:
        assert memory.output_size_in_bytes <= sharded.device_bytes(state) + 1024
        # random bits, and what they become, of what a device keeps
        assert memory.temp_size_in_bytes <= 4 * sharded.device_bytes(state.params)


@pytest.mark.parametrize(("stage", "kind"), [*((s, "auto") for s in STAGES), ("3", "explicit")])
def test_c02_the_whole_state_is_donated(stage, kind):
    """Warnings are errors here, that of an unused donation included."""
    tx = STAGES[stage](optax.adam(1e-3), min_size=0)
    step = jdp.train_step(big_loss, tx, mesh_of(kind=kind))
    state, batch = jdp.init_state(make_big, tx, mesh_of(kind=kind)), np.ones((16, 256), np.float32)
    step = step.lower(state, batch).compile()
    memory = step.memory_analysis()
    assert memory.alias_size_in_bytes == sharded.device_bytes(state)
    new, _ = step(state, batch, None)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert sharded.device_bytes(new) == memory.alias_size_in_bytes


@functools.cache
def temporary(stage, microbatch, rows=64):
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in BIG.items()}
    batch = np.ones((rows, 256), np.float32)
    tx = STAGES[stage](optax.adam(1e-3), min_size=0)
    program, _ = sharded.compiled(
        tx, big_loss, mesh_of(), batch, params=params, microbatch=microbatch
    )
    return program.memory_analysis().temp_size_in_bytes


PARTS = TOTAL / 8


OLD = jax.__version_info__ < (0, 11)


@pytest.mark.parametrize(
    ("stage", "more"), [("1", TOTAL), ("2 step", TOTAL), ("2", 0), ("3", 3.5 * PARTS * OLD)]
)
def test_c03_an_accumulator_costs_what_the_table_says(stage, more):
    """Eight microbatches against one of the same size, in temporary memory of a device.

    A split accumulator is less than the whole gradient that one microbatch leaves behind. Under
    jax 0.10 zero3's loop copies the parts of the parameters and holds zeros for their gradients,
    beside the sums: three parts, none of them whole.
    """
    assert temporary(stage, 1) - temporary(stage, 1, rows=8) <= more + 12 * 1024


def test_c03_a_split_accumulator_saves_most_of_a_gradient():
    assert temporary("2 step", 1) - temporary("2", 1) > 0.5 * TOTAL


@pytest.mark.parametrize("stage", ["2", "3"])
def test_c04_temporary_memory_does_not_grow_by_whole_layers(stage):
    """4 against 16 equal layers, gathered in the scan: only what is split may grow."""
    width = 128

    def loss_fn(params, batch):
        def body(x, layer):
            return jnp.tanh(x @ jdp.gather_params(layer)["w"]), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(body), batch, params["layers"])[0] ** 2)

    def bytes_of(layers):
        params = {"layers": {"w": jax.ShapeDtypeStruct((layers, width, width), jnp.float32)}}
        batch = np.ones((8, width), np.float32)
        tx = STAGES[stage](optax.sgd(1e-3))
        program, _ = sharded.compiled(tx, loss_fn, mesh_of(), batch, params=params)
        return program.memory_analysis().temp_size_in_bytes

    layer, activation = 4 * width**2, 4 * width
    # zero2's updates are gathered whole at the end; zero3 holds a part of each gradient
    each = (1 if stage == "2" else 0) * layer + 2 * layer / 8 + 4 * activation
    assert bytes_of(16) - bytes_of(4) <= 12 * each


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(64, 128, rngs=rngs)
        self.second = nnx.Linear(128, 30, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


@pytest.mark.parametrize("stage", ["1", "3"])
def test_c05_an_nnx_model_costs_no_more_than_its_arrays(stage):
    """Split once, outside; the state is donated whole and equals the functional run."""
    graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
    batch = {"x": _normal(32, 64), "y": _normal(32, 30)}

    def loss_fn(params, batch):
        return jnp.mean((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2)

    inner = optax.adam(1e-2, eps=1e-3)
    tx = STAGES[stage](inner, min_size=0)
    step = jdp.train_step(loss_fn, tx, mesh_of())
    state = jdp.init_state(params, tx, mesh_of())
    step = step.lower(state, batch).compile()
    assert step.memory_analysis().alias_size_in_bytes == sharded.device_bytes(state)
    if stage == "3":
        assert sharded.device_bytes(state) <= 3 * 1.1 * nbytes(params) / 8 + 64
    for _ in range(2):
        state, _ = step(state, batch, None)
    want = sharded.train(loss_fn, params, inner, [batch] * 2)[0]
    assert_close(jdp.logical(state.params), want, 1e-5)
