"""What is saved is restored: the same bits, on any devices, under any stage, position included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import jdp
from jdp.manifest import flatten

# 11 x 5 and 13 are divided by no number of devices tried
SHAPES = {"w": (16, 8), "odd": (11, 5), "bias": (13,), "empty": (0, 3), "scale": ()}
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.constant_schedule(0.01)))
STAGES = {
    "dp": optax.chain(jdp.all_reduce(), ADAM),
    "zero1": jdp.zero1(ADAM, min_size=0),
    "zero3": jdp.zero3(ADAM, min_size=0),
}


@functools.cache
def mesh_of(count):
    return jdp.make_mesh(num_devices=count)


@functools.cache
def like(stage, count, key=True):
    """Shapes of a state, as it lies on so many devices."""
    key = jax.random.key(7) if key else None
    return jdp.init_state(PARAMS, STAGES[stage], mesh_of(count), key=key)


def numbers(tree):
    """A state of these shapes with other numbers in each leaf, some of them not representable."""
    rng = np.random.default_rng(0)

    def fill(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(9), leaf.sharding)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.full(leaf.shape, 3, leaf.dtype)
        x = rng.normal(size=leaf.shape).astype(leaf.dtype)
        return np.where(x > 1.5, np.float32(-0.0), x)

    host = jax.tree.map(fill, jdp.logical(tree), is_leaf=lambda x: isinstance(x, jdp.PerReplica))
    return jdp.restage(host, tree)


@functools.cache
def state_of(stage, count):
    return numbers(like(stage, count))


def bits(tree):
    """Every leaf as bytes, of logical shape."""
    tree = jdp.logical(tree)
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(tree)
    ]
    return [(x.shape, str(x.dtype), np.asarray(x).tobytes()) for x in leaves]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of each stage on eight devices."""
    folder = tmp_path_factory.mktemp("saved")
    for stage in STAGES:
        with jdp.Checkpoints(folder / stage) as checkpoints:
            assert checkpoints.save(state_of(stage, 8), data={"epoch": 1, "step": 3})
    return folder


@pytest.mark.parametrize("new", STAGES)
@pytest.mark.parametrize("old", STAGES)
def test_e08_e07_any_stage_and_number_of_devices(saved, old, new):
    """E08 microsoft/DeepSpeed#2898, NVIDIA/Megatron-LM#5077; E07 google/orbax#648."""
    for count in (8, 3):
        state, data = jdp.Checkpoints(saved / old).restore(like(new, count))
        assert bits(state) == bits(state_of(old, 8))
        assert data == {"epoch": 1, "step": 3}
        for x, wanted in zip(
            jax.tree.leaves(state), jax.tree.leaves(like(new, count)), strict=True
        ):
            assert (x.shape, x.dtype) == (wanted.shape, wanted.dtype)
            assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)
        assert jax.tree.structure(state) == jax.tree.structure(like(new, count))


def test_e12_everything_a_run_consists_of_is_in_the_checkpoint(saved):
    """E12 optax#1036, huggingface/transformers#46628: by enumerating the leaves."""
    leaves = [leaf.path for leaf in jdp.Checkpoints(saved / "dp").manifest().leaves]
    assert leaves[0] == ".step"
    assert ".key" in leaves
    assert sum(path.endswith(".count") for path in leaves) == 2  # of adam and of its schedule
    for field in ("params", "opt_state[1][1][0].mu", "opt_state[1][1][0].nu"):
        assert {f".{field}['{name}']" for name in SHAPES} <= set(leaves)
    assert len(leaves) == len(flatten(like("dp", 8))[0])


def test_what_made_it(saved):
    made = jdp.Checkpoints(saved / "zero3").manifest().made_by
    assert made["jax"] == jax.__version__
    assert (made["mesh"], made["stage"], made["processes"]) == ({"data": 8}, "jdp.zero3", 1)
    prints = {jdp.Checkpoints(saved / stage).manifest().fingerprint for stage in STAGES}
    assert len(prints) == 1  # the stage is no part of what was learned


def loss_fn(params, batch, key):
    keep = jax.random.bernoulli(key, 0.8, batch["x"].shape)
    return jnp.mean((batch["x"] * keep @ params["w"]) ** 2) + jnp.mean(params["odd"] ** 2)


BATCHES = [
    {"x": np.random.default_rng(i).normal(size=(24, 16)).astype(np.float32)} for i in range(5)
]
WEIGHTS = {"w": jnp.ones((16, 8)), "odd": jnp.ones((11, 5))}
RUNS = {
    "zero3": jdp.zero3(ADAM, min_size=0),
    "residuals": optax.chain(jdp.top_k(0.25), ADAM),
    "local": jdp.local_sgd(optax.sgd(0.1, momentum=0.9), every=3),
}


@functools.cache
def run(name):
    """A step, and a fresh state for it."""
    tx, mesh = RUNS[name], mesh_of(8)
    key = jax.random.key(1)
    return jdp.train_step(loss_fn, tx, mesh), lambda: jdp.init_state(WEIGHTS, tx, mesh, key=key)


@pytest.mark.parametrize("name", RUNS)
def test_e01_e12_resuming_is_not_stopping(name, tmp_path):
    """5 steps, and 3 saved while the run goes on, restored, and 2: the same bits, one program.

    E01 huggingface/accelerate#4071, pytorch#36650: the data goes on where it was.
    """
    step, fresh = run(name)
    state = fresh()
    with jdp.Checkpoints(tmp_path, every_steps=3) as checkpoints:
        for number, batch in enumerate(BATCHES, 1):
            state, _ = step(state, batch)  # overwrites what is being written
            assert checkpoints.save(state, step=number, data={"step": number}) == (number == 3)
    with jdp.Checkpoints(tmp_path) as checkpoints:
        again, position = checkpoints.restore(fresh())
    compiled = step._compiled._cache_size()
    for batch in BATCHES[position["step"] :]:
        again, _ = step(again, batch)
    assert bits(again) == bits(state)
    assert int(again.step) == 5
    assert step._compiled._cache_size() == compiled  # D05: arrays lie as those of init_state do


def test_e08_what_replicas_keep_moves_as_their_mean(tmp_path):
    step, fresh = run("residuals")
    state, _ = step(fresh(), BATCHES[0])
    with jdp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        fewer = jdp.init_state(WEIGHTS, RUNS["residuals"], mesh_of(3), key=jax.random.key(1))
        moved, _ = checkpoints.restore(fewer)
    want = jdp.restage(state, fewer)
    assert bits(moved) == bits(want)
    residual = moved.opt_state[0].residual["w"]
    assert residual.num_replicas == 3
    mean = np.mean(np.asarray(state.opt_state[0].residual["w"].value), 0)
    assert np.any(mean)
    for row in np.asarray(residual.value):
        np.testing.assert_allclose(row, mean, rtol=1e-6)


def test_a05_local_parameters_can_be_restored_into_plain_ones(tmp_path):
    step, fresh = run("local")
    state, _ = step(fresh(), BATCHES[0])
    with jdp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        tx = optax.chain(jdp.all_reduce(), optax.sgd(0.1))
        plain, _ = checkpoints.restore(jdp.init_state(WEIGHTS, tx, mesh_of(2)), parts=("params",))
    reference.assert_close(plain.params, jdp.agreed(state.params))
    assert int(plain.step) == 0  # all but params as they were


def test_parts_into_another_optimizer_or_none(saved):
    checkpoints = jdp.Checkpoints(saved / "zero1")
    state, _ = checkpoints.restore(
        jdp.init_state(PARAMS, optax.sgd(1.0), mesh_of(2)), parts=("params", "step")
    )
    assert bits(state.params) == bits(state_of("zero1", 8).params)
    assert int(state.step) == 3
    on_host, _ = checkpoints.restore({"params": PARAMS}, parts=("params",))
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(on_host))
    assert bits(on_host["params"]) == bits(state.params)


def test_any_tree_and_dtype(tmp_path):
    """Names as models have them, numbers of all kinds, no arrays of jax, a single array."""
    tree = {
        "mlp/~/linear.0": [np.float16([1, 2]), jnp.array([True, False])],
        "": (jnp.ones(3, jnp.bfloat16), jnp.complex64(1 + 2j), jnp.int8(-3)),
        "é": {7: jnp.float8_e4m3fn(0.5), 8: jax.random.split(jax.random.key(1), 3)},
        "host": 2.5,
    }
    with jdp.Checkpoints(tmp_path / "tree") as checkpoints:
        checkpoints.save(tree, step=1)
        again, _ = checkpoints.restore(tree)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    tree["host"] = np.float32(2.5)
    again["host"] = np.float32(again["host"])
    assert bits(again) == bits(tree)
    with jdp.Checkpoints(tmp_path / "array") as checkpoints:
        checkpoints.save(jnp.arange(3), step=1)
        assert checkpoints.restore(jnp.zeros(3, int))[0].tolist() == [0, 1, 2]


def test_state_in_host_memory_stays_there(tmp_path):
    tx = optax.chain(jdp.all_reduce(), jdp.offload(optax.adam(0.1)))
    state = jdp.init_state(WEIGHTS, tx, mesh_of(2))
    with jdp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        again, _ = checkpoints.restore(state)
    assert bits(again) == bits(state)
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves(state)]
    assert [x.sharding.memory_kind for x in jax.tree.leaves(again)] == kinds
