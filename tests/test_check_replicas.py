"""`check_replicas`: finds any bit that differs between copies, names it, and leaves the rest be."""

import functools

import cluster
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sharded
from jax._src.sharding_impls import GSPMDSharding  # what no public function makes
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives

import jdp
from jdp import checksum
from jdp.drift import DriftError, check_replicas

pytestmark = pytest.mark.either


@functools.cache
def mesh_of(shape=(8,), names=("data",), kind="auto"):
    return jdp.make_mesh(names, shape, axis_types=(sharded.KINDS[kind],) * len(names))


def drifted(x, change, devices=(5,)):
    """The same array with the copies on some devices changed, by a function of host values."""
    copies = []
    for shard in x.addressable_shards:
        value = np.asarray(shard.data)
        new = np.asarray(change(value.copy()), value.dtype) if shard.device.id in devices else value
        copies.append(jax.device_put(new, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, copies)


def flip_a_bit(value):
    """The lowest bit of the last byte of the first number."""
    flat = value.view(np.uint8).reshape(-1)
    flat[value.dtype.itemsize - 1] ^= 1
    return value


def found(tree):
    with pytest.raises(DriftError) as caught:
        check_replicas(tree)
    return caught.value


STAGES = [name for name in sharded.STAGES if name != "3 kept"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_as_steps_leave_it_passes(stage):
    mesh = mesh_of((2, 4), ("node", "device"))
    tx = sharded.STAGES[stage](sharded.INNER)
    tx = jdp.multi_steps(tx, every=2)
    step = jdp.train_step(lambda p, b, key: sharded.plain(p, b), tx, mesh, microbatch=4)
    state = jdp.init_state(sharded.PARAMS, tx, mesh, key=jax.random.key(0))
    for batch in sharded.BATCHES:
        state, metrics = step(state, batch)
        check_replicas((state, metrics))


DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint32", "int32", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_of_one_copy(dtype):
    x = jdp.replicate(jnp.arange(33).reshape(3, 11).astype(dtype), mesh_of())
    check_replicas({"w": x})
    error = found({"v": x, "w": drifted(x, flip_a_bit)})
    (drift,) = error.drifts
    assert drift.path == "['w']"
    assert drift.devices == (5,)
    assert drift.agree == (0, 1, 2, 3, 4, 6, 7)
    assert "['w'] on device 5 differs from device 0 and 6 more" in str(error)
    assert "1 of 2 replicated leaves" in str(error)


def test_bools_and_keys_and_scalars():
    mesh = mesh_of()
    flags, number, key = jdp.replicate(
        (np.array([True, False]), np.int32(3), jax.random.key(1)), mesh
    )
    check_replicas((flags, number, key))
    assert found({"f": drifted(flags, lambda x: ~x)}).drifts[0].difference == 1
    assert found({"n": drifted(number, lambda x: x + 2**24 + 1)}).drifts[0].difference == 2**24
    data = drifted(jax.random.key_data(key), lambda x: x + 1)
    assert found({"k": jax.random.wrap_key_data(data)}).drifts[0].path == "['k']"


@pytest.mark.parametrize(
    ("values", "difference"),
    [
        ((0.0, -0.0), 0),
        ((1.0, 1.0 + 2**-23), 2**-23),
        ((3.0, -2.0), 5),
        ((1.0, np.nan), np.inf),
        ((np.inf, 1.0), np.inf),
        ((np.inf, -np.inf), np.inf),
        ((np.inf, np.nan), np.inf),
        (tuple(np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)), 0),
    ],
)
def test_largest_difference(values, difference):
    here, there = values
    x = jdp.replicate(np.array([7, here, 7], np.float32), mesh_of())
    check_replicas(x)
    error = found(drifted(x, lambda _: np.array([7, there, 7], np.float32), devices=(1,)))
    np.testing.assert_equal(error.drifts[0].difference, difference)
    assert error.drifts[0].path == "the array"
    assert ("in bits alone" in str(error)) == (difference == 0)


def test_the_same_words_in_another_order():
    x = jdp.replicate(np.arange(6, dtype=np.float32), mesh_of())
    for change in (np.flip, np.roll):
        assert found(drifted(x, lambda v, f=change: f(v, *[1] * (f is np.roll)))).drifts


def test_differences_that_cancel_in_a_plain_sum():
    x = jdp.replicate(np.zeros(64, np.int32), mesh_of())
    plus_minus = lambda v: v + np.array([1, -1] * 32, np.int32)  # noqa: E731
    assert found(drifted(x, plus_minus)).drifts[0].difference == 1
    signs = jdp.replicate(np.ones(64, np.float32), mesh_of())  # every top bit: a sum of 2^31's
    assert found(drifted(signs, np.negative)).drifts[0].difference == 2


@pytest.mark.parametrize("kind", sharded.KINDS)
@pytest.mark.parametrize(
    ("spec", "device", "agree"),
    [
        (P("node"), 5, (4, 6, 7)),  # rows of a node: copies on its other three devices
        (P(None, "device"), 5, (1,)),  # of two that differ, the first is believed
        (P(None, "device"), 1, (1,)),
        (P(), 3, (0, 1, 2, 4, 5, 6, 7)),
    ],
)
def test_copies_of_parts(spec, device, agree, kind):
    mesh = mesh_of((2, 4), ("node", "device"), kind)
    x = jax.device_put(np.arange(32, dtype=np.float32).reshape(4, 8), NamedSharding(mesh, spec))
    check_replicas(x)
    (drift,) = found(drifted(x, lambda v: v + 1, devices=(device,))).drifts
    assert drift.agree == agree
    assert drift.devices == ((5,) if agree == (1,) else (device,))
    assert drift.difference == 1


def test_what_may_differ_is_left_alone():
    mesh = mesh_of()
    rows = jax.device_put(
        np.arange(16.0, dtype=np.float32).reshape(8, 2), NamedSharding(mesh, P("data"))
    )
    tree = {
        "per replica": jdp.PerReplica(rows, axes=("data",), mesh=mesh),
        "split": rows,
        "one device": jnp.ones(3),
        "host": np.ones(3),
        "number": 1.5,
        "none": None,
        "empty": jdp.replicate(np.zeros((0, 3)), mesh),
    }
    before = checksum.sums_on_devices._cache_size()
    check_replicas(tree)
    check_replicas({})
    assert checksum.sums_on_devices._cache_size() == before  # nothing was even read
    # over nodes, a PerReplica has copies on the devices of each node
    mesh = mesh_of((2, 4), ("node", "device"))
    rows = jax.device_put(
        np.arange(6, dtype=np.float32).reshape(2, 3), NamedSharding(mesh, P("node"))
    )
    check_replicas(jdp.PerReplica(rows, axes=("node",), mesh=mesh))
    bad = jdp.PerReplica(drifted(rows, lambda v: v * 2), axes=("node",), mesh=mesh)
    assert found({"r": bad}).drifts[0].path == "['r'].value"


def test_leaves_on_different_meshes():
    x = jdp.replicate(np.ones(3, np.float32), mesh_of())
    few = jdp.replicate(np.ones(3, np.float32), Mesh(jax.devices()[:2], ("x",)))
    check_replicas([x, few])
    bad = [drifted(few, np.negative, (1,)), x, drifted(x, np.negative)]
    assert [(d.path, d.devices) for d in found(bad).drifts] == [("[0]", (1,)), ("[2]", (5,))]


def test_padded_leaves():
    x = jdp.replicate(np.ones((8, 3), np.float32), mesh_of())
    leaf = jdp.Padded(drifted(x, np.negative), dim=0, length=7)
    assert found({"w": leaf}).drifts[0].path.startswith("['w']")


def test_leaves_kept_on_the_host():
    mesh = mesh_of()
    x = jax.device_put(
        np.ones(300, np.float32), NamedSharding(mesh, P(), memory_kind="pinned_host")
    )
    assert x.sharding.memory_kind != jax.devices()[0].default_memory().kind
    check_replicas(x)


def test_a10_a_reduction_left_out_is_found_after_one_step():
    """As `out_specs=P()` with checking off would: each replica steps by its own gradient."""
    mesh = mesh_of()
    _, grads = jdp.value_and_grad(sharded.plain, mesh)(sharded.PARAMS, sharded.BATCH)
    params = jdp.replicate(sharded.PARAMS, mesh)

    def step(x, g):
        rows = {shard.device: shard.data for shard in g.value.addressable_shards}
        new = [np.asarray(s.data) - np.asarray(rows[s.device])[0] for s in x.addressable_shards]
        placed = [
            jax.device_put(v, s.device) for v, s in zip(new, x.addressable_shards, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)

    is_leaf = lambda leaf: isinstance(leaf, jdp.PerReplica)  # noqa: E731
    params = jax.tree.map(step, params, jax.tree.map(lambda g: g, grads, is_leaf=is_leaf))
    error = found(params)
    assert len(error.drifts) == 6
    assert "and so do 1 more leaves (6 of 6" in str(error)


def test_the_program_sends_nothing_and_is_compiled_once():
    mesh = mesh_of()
    tree = jdp.replicate({"a": np.ones((4, 5)), "b": np.ones(7, np.int32)}, mesh)
    check_replicas(tree)
    before = checksum.sums_on_devices._cache_size()
    check_replicas(jax.tree.map(lambda x: x + 1, tree))
    assert checksum.sums_on_devices._cache_size() == before
    text = checksum.sums_on_devices.lower(mesh, (P(), P()), list(tree.values())).compile().as_text()
    assert collectives(text) == []


def test_every_step_of_many_without_deadlock():
    mesh = mesh_of()
    tx = optax.chain(jdp.all_reduce(), optax.sgd(0.1))
    step = jdp.train_step(sharded.plain, tx, mesh)
    state = jdp.init_state(sharded.PARAMS, tx, mesh)
    for i in range(60):
        state, _ = step(state, sharded.BATCH)
        if i % 2:
            check_replicas(state)


def test_inside_a_program():
    with pytest.raises(ValueError, match=r"given \['w'\] inside a program"):
        jax.jit(lambda x: check_replicas({"w": x}))(jnp.ones(3))


def test_a_state_that_was_consumed():
    x = jdp.replicate(np.ones(3), mesh_of())
    x.delete()
    with pytest.raises(ValueError, match=r"\['w'\] was consumed by a step"):
        check_replicas({"w": x})


def test_a_sharding_without_names():
    parts = [jax.device_put(np.ones(1, np.float32), d) for d in jax.devices()]
    hlo = NamedSharding(mesh_of(), P("data"))._to_xla_hlo_sharding(1)
    split = GSPMDSharding(jax.devices(), hlo)
    x = jax.make_array_from_single_device_arrays((8,), split, parts)
    with pytest.raises(ValueError, match=r"\['w'\] has the sharding .* does not say by name"):
        check_replicas({"w": x})


def _together():
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jdp
    from jdp.drift import DriftError, check_replicas

    me, mesh = jax.process_index(), jdp.make_mesh(("node", "device"))
    ids = [[d.id for d in row] for row in mesh.devices.tolist()]
    said = {"ids": ids}

    def made(spec, value_on):
        place = NamedSharding(mesh, spec)
        shape = place.shard_shape((4, 2))
        copies = [jax.device_put(value_on(d, shape), d) for d in jax.local_devices()]
        return jax.make_array_from_single_device_arrays((4, 2), place, copies)

    def attempt(name, tree):
        try:
            check_replicas(tree)
            said[name] = None
        except (DriftError, ValueError) as error:
            said[name] = [str(error), [list(d) for d in getattr(error, "drifts", ())]]

    same = lambda d, shape: np.ones(shape, np.float32)  # noqa: E731
    one_off = lambda d, shape: np.full(shape, 1 + 0.5 * (d.id == ids[1][1]), np.float32)  # noqa: E731
    by_process = lambda d, shape: np.full(shape, 1 + d.process_index, np.float32)  # noqa: E731
    attempt("good", {"a": made(P(), same), "b": made(P("node"), by_process), "c": np.ones(me + 1)})
    attempt("one device", {"a": made(P(), same), "b": made(P(), one_off)})
    attempt("processes", {"a": made(P(), by_process), "b": made(P("node"), by_process)})
    attempt(
        "parts", {"a": made(P("device"), by_process), "b": made(P(("node", "device")), one_off)}
    )
    attempt("trees", {"a" if me else "b": made(P(), same)})
    attempt("here", {"a": jdp.replicate(np.ones(3), jax.sharding.Mesh(jax.local_devices(), "x"))})
    for _ in range(5):
        check_replicas({"a": made(P(), same)})
    return said


@pytest.mark.multiprocess
def test_two_processes():
    zero, one = (answer.value for answer in cluster.run(_together, num_devices=2, seconds=120))
    assert zero == one  # all come to the same verdict
    (a, b), (c, d) = zero["ids"]
    assert zero["good"] is zero["here"] is None
    assert zero["one device"][1] == [["['b']", [d], [a, b, c], 0.5]]
    assert zero["processes"][1] == [["['a']", [c, d], [a, b], 1.0]]
    assert f"['a'] on device {c}, {d} differ from device {a} and 1 more by" in zero["processes"][0]
    assert zero["parts"][1] == [["['a']", [c, d], [a, b], 1.0]]
    assert "was given another tree on process 1 than on process 0" in zero["trees"][0]
