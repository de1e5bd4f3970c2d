"""`hierarchical`: against its definition and `all_reduce`, and what crosses nodes, counted."""

import functools
import math

import cluster
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives, crosses, sent_bytes
from topologies import devices

import jdp
from jdp import nodes
from jdp.hierarchy import hierarchical
from jdp.replica import is_per_replica

pytestmark = pytest.mark.alternate

NODES = ("node", "device")
SHAPES = [(2, 4), (4, 2), (1, 8), (8, 1)]
# what four devices divide and are sent alone, what they do not, and small ones
LEAVES = {
    "rows": (256, 96),
    "columns": (3, 8192),
    "odd": (131, 129),
    "bias": (24,),
    "scalar": (),
    "empty": (0, 3),
}


@functools.cache
def mesh_of(shape=(2, 4), kind="auto", names=NODES):
    return jdp.make_mesh(names, shape, axis_types=(sharded.KINDS[kind],) * len(names))


def given(mesh, leaves=LEAVES, dtype=jnp.float32, axes=NODES, weight=None):
    """Per-replica values that are nothing like their mean."""
    random, count = np.random.default_rng(0), jdp.axis_size(mesh, axes)

    def one(shape):
        value = random.normal(size=(count, *shape)) + np.arange(count).reshape(
            -1, *[1] * len(shape)
        )
        value = jax.device_put(value.astype(dtype), NamedSharding(mesh, P(axes)))
        return jdp.PerReplica(value, weight, axes=axes, mesh=mesh)

    return {name: one(shape) for name, shape in leaves.items()}


def reduced(tx, grads):
    return jax.jit(lambda grads: tx.update(grads, tx.init(None))[0])(grads)


def programs_of(tx, grads):
    run = jax.jit(lambda grads: tx.update(grads, tx.init(None))[0])
    return collectives(run.lower(grads).compile().as_text())


@pytest.mark.parametrize("kind", sharded.KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_mean_over_all_devices(shape, kind):
    grads = given(mesh_of(shape, kind))
    means = reduced(hierarchical(), grads)
    reference.assert_close(means, reference.mean_gradient(grads), rtol=5e-7)
    reference.assert_same_copies(means)
    for name, mean in means.items():
        assert mean.shape == LEAVES[name]
        assert mean.dtype == jnp.float32
        assert mean.sharding.is_fully_replicated


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_goal_7_bytes_across_nodes_and_in_all(shape):
    grads = given(mesh_of(shape))
    flat, nodes = (programs_of(tx, grads) for tx in (jdp.all_reduce(), hierarchical()))
    crossing = [sum(c.bytes for c in found if crosses(c, shape[1])) for found in (flat, nodes)]
    size = 4 * sum(math.prod(shape) for shape in LEAVES.values())
    assert crossing[0] == size
    assert 1 / shape[1] <= crossing[1] / crossing[0] <= 1.004 / shape[1]  # 0.251 on 2 x 4
    # what each device sends by the ring algorithm, each collective among its own members
    members = {True: shape[0], False: shape[1]}
    total = sum(sent_bytes([c], members[crosses(c, shape[1])]) for c in nodes)
    assert total / sent_bytes(flat, 8) <= 1.001


def test_few_collectives_each_alone_or_joined():
    found = programs_of(hierarchical(), given(mesh_of()))
    kinds = [c.kind for c in found]
    # rows and columns by themselves, the rest joined
    assert kinds.count("reduce-scatter") == kinds.count("all-gather") == 3
    assert kinds.count("all-reduce") == 1
    joined = min(c.bytes for c in found if c.kind == "reduce-scatter")
    assert joined == 4 * (131 * 129 + 24 + 1 + 0)  # which four divides


@pytest.mark.parametrize("limit", [25 * 2**20, 10_000])
def test_joined_buffers_of_limited_size(limit):
    """Ten leaves of 4 KB: one buffer, or five of two leaves."""
    mesh = mesh_of()
    grads = given(mesh, {f"{i}": (1024,) for i in range(10)})
    found = programs_of(hierarchical(bucket_bytes=limit), grads)
    assert [c.kind for c in found].count("reduce-scatter") == (1 if limit > 40_000 else 5)
    means = reduced(hierarchical(bucket_bytes=limit), grads)
    reference.assert_close(means, reference.mean_gradient(grads), rtol=5e-7)


@pytest.mark.parametrize("kind", sharded.KINDS)
def test_narrow_across_nodes_only(kind):
    grads = given(mesh_of((2, 4), kind))
    tx = hierarchical(across_wire_dtype=jnp.bfloat16)
    for found in programs_of(tx, grads):
        assert found.dtypes == (("u16",) if crosses(found, 4) else ("f32",))
    means = reduced(tx, grads)
    reference.assert_same_copies(means)
    for name, mean in means.items():
        value = np.asarray(grads[name].value, np.float64)
        a = value.reshape(2, 4, *LEAVES[name]).mean(1)
        # one rounding of each node's mean, and one of the mean
        bound = 2.0**-8 * (np.abs(a).mean(0) + np.abs(a.mean(0))) * 1.01 + 1e-6
        error = np.abs(np.asarray(mean, np.float64) - a.mean(0))
        assert (error <= bound).all(), name
        assert name in ("empty", "scalar") or error.max() > 1e-5  # it was narrowed


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("wire", [jnp.bfloat16, jnp.float16])
def test_narrow_everywhere(wire, dtype):
    grads = given(mesh_of(), dtype=dtype)
    tx = hierarchical(wire_dtype=wire)
    assert {c.dtypes for c in programs_of(tx, grads)} == {("u16",)}
    means = reduced(tx, grads)
    reference.assert_same_copies(means)
    # to the node's sum, across, back, and to the other devices; each to nearest
    eps = 2.0**-8 if wire == jnp.bfloat16 else 2.0**-10
    eps = max(eps, 2.0**-8) if dtype == jnp.bfloat16 else eps
    for name, mean in means.items():
        assert mean.dtype == jnp.float32
        value = np.asarray(grads[name].value).astype(np.float64)
        assert (np.abs(np.asarray(mean) - value.mean(0)) <= 2 * eps * np.abs(value).max(0)).all()


def test_a_narrow_gradient_is_sent_as_it_is():
    grads = given(mesh_of(), dtype=jnp.bfloat16)
    assert {c.dtypes for c in programs_of(hierarchical(), grads)} == {("u16",)}
    wide_across = programs_of(hierarchical(across_wire_dtype=jnp.float32), grads)
    assert {c.dtypes for c in wide_across if crosses(c, 4)} == {("f32",)}


def test_large_values_do_not_overflow_a_float16_wire():
    mesh = mesh_of()
    grads = jdp.PerReplica(jnp.full((8, 5), 2e4), axes=NODES, mesh=mesh)
    for tx in (hierarchical(wire_dtype=jnp.float16), hierarchical(across_wire_dtype=jnp.float16)):
        np.testing.assert_array_equal(reduced(tx, grads), np.full(5, 2e4))


@pytest.mark.parametrize("feedback", [False, True])
def test_int8_across_nodes(feedback):
    """Goal 6's bytes of goal 7's: 0.255 of a quarter."""
    grads = given(mesh_of())
    tx = hierarchical(across_wire_dtype=jnp.int8, error_feedback=feedback)
    state = tx.init(jax.tree.map(lambda g: g.value[0], grads, is_leaf=is_per_replica))
    run = jax.jit(tx.update)
    found = collectives(run.lower(grads, state).compile().as_text())
    assert {c.dtypes for c in found if crosses(c, 4)} == {("u8",)}
    assert not any("u8" in c.dtypes for c in found if not crosses(c, 4))
    size = 4 * sum(math.prod(shape) for shape in LEAVES.values())
    # an all-to-all and an all-gather send half of what an all-reduce of as many bytes does
    crossing = sum(c.bytes for c in found if crosses(c, 4)) / 2
    assert crossing / size <= 0.255 / 4
    means, _ = run(grads, state)
    reference.assert_same_copies(means)
    for name, want in reference.mean_gradient(grads).items():
        a = np.asarray(grads[name].value, np.float64).reshape(2, 4, *LEAVES[name]).mean(1)
        error = np.abs(np.asarray(means[name]) - want).max(initial=0)
        assert error <= 2 / 254 * np.abs(a).max(initial=0)
        assert name in ("empty", "scalar") or error > 1e-4


@pytest.mark.parametrize("kind", sharded.KINDS)
def test_what_error_feedback_keeps(kind):
    mesh = mesh_of((2, 4), kind)
    grads = given(mesh)
    tx = hierarchical(across_wire_dtype=jnp.int8, error_feedback=True)
    params = jdp.replicate(
        {name: np.zeros(shape, np.float32) for name, shape in LEAVES.items()}, mesh
    )
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(params)
    run, steps = jax.jit(tx.update), 5
    sums = {name: np.zeros(shape) for name, shape in LEAVES.items()}
    for _ in range(steps):
        means, state = run(grads, state)
        sums = {name: total + np.asarray(means[name], np.float64) for name, total in sums.items()}
    for name, want in reference.mean_gradient(grads).items():
        left = np.asarray(state.residual[name].value, np.float64)
        size = np.abs(want).max(initial=1e-30)
        # what arrived and what is left is what was to arrive
        assert np.abs(sums[name] + left.mean(0) - steps * want).max(initial=0) <= 2e-5 * size
        # and what is left stays as small as one rounding, so that the sum is right to 1/5 of one
        assert np.abs(sums[name] - steps * want).max(initial=0) <= 0.02 * size
    # each device answers for a quarter
    left = np.concatenate([np.asarray(g.value).reshape(8, -1) for g in state.residual.values()], 1)
    assert ((left != 0).mean(1) <= 0.251).all()


def test_error_feedback_with_one_node_or_nodes_of_one_device():
    for shape in ((1, 8), (8, 1)):
        mesh = mesh_of(shape)
        grads = given(mesh)
        tx = hierarchical(across_wire_dtype=jnp.int8, error_feedback=True)
        params = jdp.replicate({n: np.zeros(s, np.float32) for n, s in LEAVES.items()}, mesh)
        means, state = jax.jit(tx.update)(grads, tx.init(params))
        reference.assert_close(
            means, reference.mean_gradient(grads), 5e-7 if shape[0] == 1 else 0.02
        )
        lost = any(np.asarray(g.value).any() for g in state.residual.values())
        assert lost == (shape[0] == 8)


@pytest.mark.parametrize("wire", [jnp.int8, jnp.float8_e4m3fn, jnp.float16])
def test_scales_within_nodes(wire):
    """Codes without their scale would be garbage, or overflow."""
    mesh = mesh_of()
    grads = jdp.PerReplica(jnp.full((8, 5), 2.0**20), axes=NODES, mesh=mesh)
    np.testing.assert_allclose(reduced(hierarchical(wire_dtype=wire), grads), 2.0**20, rtol=1e-6)
    empty = {"e": jdp.PerReplica(jnp.zeros((8, 0, 3)), axes=NODES, mesh=mesh)}
    assert reduced(hierarchical(wire_dtype=wire), empty)["e"].shape == (0, 3)


def test_one_node_narrows_nothing_and_nodes_of_one_device_have_nothing_within():
    grads = given(mesh_of((1, 8)))
    found = programs_of(hierarchical(across_wire_dtype=jnp.bfloat16), grads)
    assert {c.dtypes for c in found} == {("f32",)}
    grads = given(mesh_of((8, 1)))
    narrow = reduced(hierarchical(across_wire_dtype=jnp.bfloat16), grads)
    flat = reduced(jdp.all_reduce(wire_dtype=jnp.bfloat16), grads)
    for name in grads:
        np.testing.assert_array_equal(narrow[name], flat[name])


def test_a_third_axis_keeps_its_replicas():
    mesh = mesh_of((2, 2, 2), names=("replica", *NODES))
    grads = given(mesh, axes=("replica", *NODES), weight=jnp.float32(5))
    partly = reduced(hierarchical(), grads)["odd"]
    assert isinstance(partly, jdp.PerReplica)
    assert partly.axes == ("replica",)
    assert float(partly.weight) == 5
    want = np.asarray(grads["odd"].value).reshape(2, 4, *LEAVES["odd"]).mean(1)
    np.testing.assert_allclose(partly.value, want, rtol=5e-7, atol=5e-7)
    both = reduced(optax.chain(hierarchical(), jdp.all_reduce()), grads)
    reference.assert_close(both, reference.mean_gradient(grads), rtol=5e-7)


def test_axes_of_other_names_and_the_other_way_round():
    mesh = mesh_of((2, 4), names=("rack", "host"))
    grads = given(mesh, axes=("rack", "host"))
    found = programs_of(hierarchical("host", "rack"), grads)
    assert sum(c.kind == "all-reduce" for c in found) == 1
    for tx in (hierarchical("host", "rack"), hierarchical("rack", "host")):
        means = reduced(tx, grads)
        reference.assert_close(means, reference.mean_gradient(grads), rtol=5e-7)
        reference.assert_same_copies(means)


def test_an_empty_tree():
    assert hierarchical().update({"none": None}, optax.EmptyState())[0] == {"none": None}


def trained(make, mesh, loss_fn=sharded.masked, **kwargs):
    tx = make()
    step = jdp.train_step(loss_fn, tx, mesh, **kwargs)
    state = jdp.init_state(sharded.PARAMS, tx, mesh)
    for batch in sharded.BATCHES:
        state, _ = step(state, batch)
    return step, state


INNER = sharded.INNER
FEEDBACK = {"across_wire_dtype": jnp.float16, "error_feedback": True}
CHAINS = {
    "clip": lambda reduce: optax.chain(reduce, INNER),
    "zero1": lambda reduce: optax.chain(reduce, jdp.zero1(INNER)),
    "multi_steps": lambda reduce: jdp.multi_steps(optax.chain(reduce, INNER), every=3),
    "skip": lambda reduce: jdp.skip_nonfinite(optax.chain(reduce, INNER)),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_trains_as_all_reduce_does(chain):
    _, want = trained(lambda: CHAINS[chain](jdp.all_reduce()), mesh_of(), microbatch=4)
    _, got = trained(lambda: CHAINS[chain](hierarchical()), mesh_of(), microbatch=4)
    reference.assert_close(got.params, want.params, rtol=2e-6)
    reference.assert_same_copies(got.params)


@pytest.mark.parametrize("chain", CHAINS)
def test_trains_with_error_feedback(chain):
    _, want = trained(lambda: CHAINS[chain](jdp.all_reduce()), mesh_of(), microbatch=4)
    _, got = trained(lambda: CHAINS[chain](hierarchical(**FEEDBACK)), mesh_of(), microbatch=4)
    reference.assert_close(got.params, want.params, rtol=2e-3)
    reference.assert_same_copies(got.params)


def test_trains_as_one_device_does():
    params, _ = reference.train(sharded.masked, sharded.PARAMS, INNER, sharded.BATCHES)
    _, got = trained(lambda: CHAINS["zero1"](hierarchical()), mesh_of(), microbatch=2)
    reference.assert_close(got.params, params, rtol=2e-5)


def test_nothing_is_sent_inside_the_loop():
    step, state = trained(lambda: CHAINS["clip"](hierarchical()), mesh_of(), microbatch=2)
    found = collectives(step.lower(state, sharded.BATCH).compile().as_text())
    assert found
    assert not any(c.in_loop for c in found)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hierarchical("device", "device"), "none twice"),
        (lambda: hierarchical((), "node"), "at least one axis for each"),
        (lambda: hierarchical(wire_dtype=jnp.int32), "wire_dtype=int32 cannot carry a mean"),
        (lambda: hierarchical(across_wire_dtype=jnp.int32), "int32 cannot carry a mean"),
        (lambda: hierarchical(block=0), "block=0 must be a positive whole number"),
        (
            lambda: hierarchical(error_feedback=True),
            "across_wire_dtype=None, error_feedback=True.*Give a narrow across_wire_dtype",
        ),
        (
            lambda: hierarchical(wire_dtype=jnp.int8, error_feedback=True),
            "wire_dtype=int8, across_wire_dtype=int8, error_feedback=True.*nothing else is",
        ),
        (lambda: hierarchical(bucket_bytes=0), "bucket_bytes=0 must be a positive whole number"),
    ],
)
def test_arguments_that_cannot_be_meant(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_gradients_without_nodes():
    grads = jdp.PerReplica(jnp.ones((8, 3)), axes=("data",), mesh=jdp.make_mesh())
    with pytest.raises(ValueError, match=r"not along 'node'.*make_mesh\(\(\"node\", \"device\"\)"):
        hierarchical().update({"w": grads}, optax.EmptyState())


def test_gradients_already_reduced():
    with pytest.raises(ValueError, match=r"jdp.hierarchical received gradient \['w'\].*already"):
        hierarchical().update({"w": jnp.ones(3)}, optax.EmptyState())


def _two_nodes():
    import hashlib

    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    from programs import collectives
    from reference import assert_same_copies

    import jdp
    from jdp.hierarchy import hierarchical

    mesh = jdp.make_mesh(("node", "device"))
    said = {"nodes": [[d.process_index for d in row] for row in mesh.devices.tolist()]}
    place = NamedSharding(mesh, P(("node", "device")))
    host = np.random.default_rng(0).normal(size=(3, 4, 2**14)).astype(np.float32)
    values = [jax.make_array_from_callback(x.shape, place, lambda i, x=x: x[i]) for x in host]
    grads = [jdp.PerReplica(x, axes=("node", "device"), mesh=mesh) for x in values]
    for name, kwargs in (("f32", {}), ("bf16", {"across_wire_dtype": jnp.bfloat16})):
        tx = hierarchical(**kwargs)
        run = jax.jit(lambda g, tx=tx: tx.update(g, None)[0])
        found = collectives(run.lower(grads).compile().as_text())
        said[name + " kinds"] = sorted(c.kind for c in found)
        means = run(grads)
        assert_same_copies(means)
        got = np.stack([np.asarray(x) for x in means])
        said[name + " bits"] = hashlib.sha256(got.tobytes()).hexdigest()
        said[name] = float(np.abs(got - host.astype(np.float64).mean(1)).max())
    return said


@pytest.mark.multiprocess
def test_two_processes_are_two_nodes():
    zero, one = (answer.value for answer in cluster.run(_two_nodes, num_devices=2, seconds=120))
    assert zero == one  # the same bits on every process
    assert zero["nodes"] == [[0, 0], [1, 1]]
    assert zero["f32"] < 1e-6
    assert 1e-4 < zero["bf16"] < 2.0**-6  # entries of up to 3, rounded twice
    # joined, since gloo sends the leaves of one collective one by one
    assert zero["f32 kinds"] == ["all-gather", "all-reduce", "reduce-scatter"]
    assert zero["bf16 kinds"] == ["all-gather", "all-gather", "all-to-all", "reduce-scatter"]


def test_per_device_function_joins_all_leaves_when_asked():
    mesh = mesh_of()
    grads = given(mesh)
    values = {name: g.value for name, g in grads.items()}

    def local(values):
        values = {name: value[0] for name, value in values.items()}
        return nodes.mean(values, "device", "node", join_all=True)

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(NODES), out_specs=P()))
    kinds = sorted(c.kind for c in collectives(run.lower(values).compile().as_text()))
    assert kinds == ["all-gather", "all-reduce", "reduce-scatter"]
    reference.assert_close(run(values), reference.mean_gradient(grads), rtol=5e-7)


@pytest.mark.aot
@pytest.mark.parametrize(("platform", "topology"), [("tpu", "v5e:4x4"), ("gpu", "1x2x8")])
def test_goal_7_as_the_compilers_for_accelerators_make_it(platform, topology, monkeypatch):
    """Four nodes of four chips, and two hosts of eight GPUs."""
    found = devices(platform, monkeypatch, topology)
    shape = (4, 4) if platform == "tpu" else (2, 8)
    mesh = jax.sharding.Mesh(np.array(found).reshape(shape), NODES)
    place = NamedSharding(mesh, P(NODES))
    leaves = {"a": (512, 512), "b": (512, 512), "odd": (131, 129), "bias": (24,)}
    grads = {
        name: jdp.PerReplica(
            jax.ShapeDtypeStruct((16, *size), jnp.float32, sharding=place), axes=NODES, mesh=mesh
        )
        for name, size in leaves.items()
    }
    flat, nodes = (programs_of(tx, grads) for tx in (jdp.all_reduce(), hierarchical()))
    crossing = [sum(c.bytes for c in each if crosses(c, shape[1])) for each in (flat, nodes)]
    size = 4 * sum(math.prod(size) for size in leaves.values())
    assert crossing[0] >= size
    assert 1 / shape[1] <= crossing[1] / size <= 1.004 / shape[1]
