"""Optimizer state in host memory: the same numbers, and really on the host."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close, assert_same_copies

import jdp
from jdp.offload import offload

pytestmark = pytest.mark.either

WIDTH = 64


def loss_fn(params, x):
    for weight in params.values():
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def make_params(width=WIDTH):
    keys = jax.random.split(jax.random.key(0), 3)
    return {f"w{i}": jax.random.normal(key, (width, width)) / 8 for i, key in enumerate(keys)}


def make_batch():
    return jax.random.normal(jax.random.key(1), (64, WIDTH))


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.size >= 1024}


adamw = functools.partial(optax.adamw, 1e-2)

CHAINS = {
    "all_reduce": lambda tx, off: optax.chain(jdp.all_reduce(), off(tx)),
    "around the chain": lambda tx, off: off(optax.chain(jdp.all_reduce(), tx)),
    "around zero1": lambda tx, off: off(jdp.zero1(tx)),
    "inside zero1": lambda tx, off: jdp.zero1(off(tx)),
    "around zero2": lambda tx, off: off(jdp.zero2(tx)),
    "around zero3": lambda tx, off: off(jdp.zero3(tx)),
    "inside zero3": lambda tx, off: jdp.zero3(off(tx)),
    "apply_if_finite": lambda tx, off: optax.chain(
        jdp.all_reduce(), optax.apply_if_finite(off(tx), 2)
    ),
    "multi_steps": lambda tx, off: jdp.multi_steps(optax.chain(jdp.all_reduce(), off(tx)), every=2),
    "around multi_steps": lambda tx, off: off(
        jdp.multi_steps(optax.chain(jdp.all_reduce(), tx), every=2)
    ),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_offloaded_training_is_the_same_to_the_bit(chain):
    mesh, batch = jdp.make_mesh(), make_batch()
    found = {}
    for name, off in (("plain", lambda tx: tx), ("offload", offload)):
        tx = CHAINS[chain](adamw(), off)
        step = jdp.train_step(loss_fn, tx, mesh)
        state = jdp.init_state(make_params(), tx, mesh)
        for _ in range(4):
            old = state
            state, metrics = step(state, batch)
        found[name] = jax.device_get((jdp.logical(state.params), metrics))
        large = [leaf for leaf in jax.tree.leaves(old) if leaf.size >= 1024]
        assert all(leaf.is_deleted() for leaf in large)  # donated all the same
        assert step._compiled._cache_size() == 1
        assert kinds(state.params) == {"device"}
        moments = kinds(state.opt_state) - ({"device"} if "multi" in chain else set())
        assert moments == ({"pinned_host"} if name == "offload" else {"device"} & moments)
        assert_same_copies(state)
    if chain.startswith("around zero"):
        # by itself the stage adds updates before they are gathered, which XLA may fuse otherwise
        assert_close(found["offload"], found["plain"], 1e-6)
    else:
        jax.tree.map(np.testing.assert_array_equal, found["offload"], found["plain"])


def test_structure_and_small_leaves_stay():
    params = make_params()
    plain, away = adamw().init(params), offload(adamw()).init(params)
    assert jax.tree.structure(plain) == jax.tree.structure(away)
    assert away[0].count.sharding.memory_kind == "device"
    assert kinds(offload(adamw(), min_size=WIDTH * WIDTH).init(params)) == {"pinned_host"}
    assert kinds(offload(adamw(), min_size=WIDTH * WIDTH + 1).init(params)) == {"device"}


def test_device_moves_nothing():
    assert kinds(offload(adamw(), "device").init(make_params())) == {"device"}


def test_init_takes_shapes():
    params = make_params()
    shapes = jax.eval_shape(lambda: params)
    got = jax.eval_shape(offload(adamw()).init, shapes)
    want = jax.eval_shape(adamw().init, shapes)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(
        lambda x: (x.shape, x.dtype), want
    )


@pytest.mark.parametrize("axis_types", [AxisType.Auto, AxisType.Explicit])
def test_a_state_of_shapes_lies_where_a_real_one_does(axis_types):
    mesh = jdp.make_mesh(axis_types=axis_types)
    tx = optax.chain(jdp.all_reduce(), offload(adamw()))
    real = jdp.init_state(make_params(), tx, mesh)
    shapes = jdp.init_state(jax.eval_shape(make_params), tx, mesh)
    place = lambda tree: jax.tree.map(lambda x: (x.sharding.memory_kind, x.shape), tree)  # noqa: E731
    assert place(real) == place(shapes)
    step = jdp.train_step(loss_fn, tx, mesh)
    state, _ = step(real, make_batch())
    assert place(state) == place(shapes)


def test_steps_in_a_scan():
    mesh = jdp.make_mesh()
    tx = optax.chain(jdp.all_reduce(), offload(adamw()))
    step = jdp.train_step(loss_fn, tx, mesh)
    batches = jnp.stack([make_batch()] * 3)
    batches = jax.device_put(batches, NamedSharding(mesh, P(None, "data")))
    run = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))
    state, _ = run(jdp.init_state(make_params(), tx, mesh), batches)
    assert kinds(state.opt_state) == {"pinned_host"}
    alone = jdp.init_state(make_params(), tx, mesh)
    for _ in range(3):
        alone, _ = step(alone, make_batch())
    jax.tree.map(np.testing.assert_array_equal, state.params, alone.params)


def test_extra_arguments_reach_the_inner_transformation():
    tx = offload(optax.contrib.reduce_on_plateau(patience=1), min_size=0)
    params = make_params()
    _, state = tx.update(params, tx.init(params), params, value=jnp.float32(3.0))
    assert float(state.best_value) == 3.0


@pytest.mark.parametrize("kind", ["unpinned_host", "vram"])
def test_a_memory_no_program_can_move_to_is_refused(kind):
    with pytest.raises(ValueError, match=rf"memory_kind='{kind}'.*'pinned_host'.*here have 'dev"):
        offload(adamw(), kind)


def test_devices_without_that_memory_are_refused(monkeypatch):
    module = sys.modules["jdp.offload"]  # jdp.offload itself is the function
    monkeypatch.setattr(module, "_kinds", lambda device: ["device", "slow"])
    with pytest.raises(ValueError, match="cpu devices have no such memory; they have 'device', 's"):
        offload(adamw()).init(make_params())


# As compiled for devices that have two memories.


def compiled(mesh, tx, *, width, host):
    def shape(dims, dtype, *spec, kind=None):
        place = NamedSharding(mesh, P(*spec), memory_kind=kind)
        return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

    params = jax.tree.map(
        lambda x: shape(x.shape, x.dtype), jax.eval_shape(lambda: make_params(width))
    )
    state = jdp.init_state(params, tx, mesh)
    known = mesh.devices.flat[0].platform == "tpu"  # GPU descriptions leave their memories out
    if known:
        assert kinds(state.opt_state) == {"pinned_host" if host else "device"}
    batch = shape((mesh.size * 64, width), jnp.float32, "data")
    program = jdp.train_step(loss_fn, tx, mesh).lower(state, batch).compile()
    return program.memory_analysis()


@pytest.mark.aot
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("chain", ["all_reduce", "around zero1"])
def test_moments_rest_on_the_host_on_tpu_and_gpu(platform, chain, monkeypatch):
    mesh = Mesh(np.array(topologies.devices(platform, monkeypatch)), ("data",))
    width = 1024
    parts = mesh.size if "zero1" in chain else 1
    moments = 2 * 3 * width * width * 4 // parts
    plain, away = (
        compiled(mesh, CHAINS[chain](adamw(), off), width=width, host=off is offload)
        for off in (lambda tx: tx, offload)
    )
    assert plain.host_argument_size_in_bytes == 0
    assert away.host_argument_size_in_bytes == moments
    assert away.host_output_size_in_bytes == away.host_alias_size_in_bytes == moments
    assert plain.argument_size_in_bytes - away.argument_size_in_bytes == moments


@pytest.mark.aot
def test_a_gpu_fetches_leaf_by_leaf(monkeypatch):
    """With twelve leaves, what is fetched never lies on the device all at once."""
    mesh = Mesh(np.array(topologies.devices("gpu", monkeypatch)), ("data",))
    width, count = 2048, 12
    params = {f"w{i}": jax.ShapeDtypeStruct((width, width), jnp.float32) for i in range(count)}
    batch = jax.ShapeDtypeStruct((mesh.size * 8, width), jnp.float32)
    batch = jax.ShapeDtypeStruct(batch.shape, batch.dtype, sharding=NamedSharding(mesh, P("data")))
    live = []
    for off in (lambda tx: tx, offload):
        tx = CHAINS["all_reduce"](adamw(), off)
        state = jdp.init_state(params, tx, mesh)
        stats = jdp.train_step(loss_fn, tx, mesh).lower(state, batch).compile().memory_analysis()
        live.append(stats.argument_size_in_bytes + stats.temp_size_in_bytes)
    moments = 2 * count * width * width * 4
    assert live[1] <= live[0] - moments / 2
