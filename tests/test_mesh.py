"""Meshes and placement: every form of `make_mesh`, and where `replicate` puts things."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from jdp.mesh import ambient_mesh, on_devices

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize(
    ("args", "keywords", "shape"),
    [
        ((), {}, {"data": 8}),
        (("dp",), {}, {"dp": 8}),
        ((["dp"],), {}, {"dp": 8}),
        (("dp", 8), {}, {"dp": 8}),
        ((), {"num_devices": 4}, {"data": 4}),
        ((), {"num_devices": 1}, {"data": 1}),
        ((("data", "model"), (4, 2)), {}, {"data": 4, "model": 2}),
        ((("data", "model"), (-1, 2)), {}, {"data": 4, "model": 2}),
        ((("data", "model"), (8, -1)), {}, {"data": 8, "model": 1}),
        ((("data", "model"), (-1, 2)), {"num_devices": 6}, {"data": 3, "model": 2}),
        ((("node", "device", "model"), [2, 2, 2]), {}, {"node": 2, "device": 2, "model": 2}),
        ((("node", "device"),), {}, {"node": 1, "device": 8}),  # one process: one group
        ((("node", "device"),), {"num_devices": 4}, {"node": 1, "device": 4}),
    ],
)
def test_forms_of_make_mesh(args, keywords, shape):
    mesh = jdp.make_mesh(*args, **keywords)
    assert dict(mesh.shape) == shape
    assert set(mesh.axis_types) == {AUTO}


def test_devices_are_used_in_the_order_given():
    devices = jax.devices()[::-1][:6]
    assert jdp.make_mesh(devices=devices).devices.tolist() == devices
    mesh = jdp.make_mesh(("data", "model"), (3, 2), devices=devices)
    assert mesh.devices.ravel().tolist() == devices
    assert jdp.make_mesh(devices=devices, num_devices=2).devices.tolist() == devices[:2]
    assert jdp.make_mesh(devices=np.array(devices).reshape(2, 3)).devices.tolist() == devices


def test_axis_types_are_handed_on():
    assert jdp.make_mesh(axis_types=(EXPLICIT,)).axis_types == (EXPLICIT,)
    mesh = jdp.make_mesh(("data", "model"), (4, 2), axis_types=(EXPLICIT, AUTO))
    assert mesh.axis_types == (EXPLICIT, AUTO)


class Device:
    """A device of a machine that is not here."""

    platform = "tpu"

    def __init__(self, slice_index, process_index):
        self.slice_index, self.process_index = slice_index, process_index


def test_two_axes_without_shape_group_by_slice_then_by_process():
    by_slice = [Device(i % 2, i) for i in range(6)]  # interleaved on purpose
    by_process = [Device(0, i // 2) for i in range(6)]
    mesh = jdp.make_mesh(("node", "device"), devices=[by_process[i] for i in (0, 1, 2, 3, 4, 5)])
    assert dict(mesh.shape) == {"node": 3, "device": 2}
    assert [d.process_index for d in mesh.devices[1]] == [1, 1]
    mesh = jdp.make_mesh(("node", "device"), devices=[by_slice[i] for i in (0, 2, 4, 1, 3, 5)])
    assert dict(mesh.shape) == {"node": 2, "device": 3}
    assert [d.slice_index for d in mesh.devices[1]] == [1, 1, 1]


def test_interleaved_devices_are_brought_together(monkeypatch):
    interleaved = [Device(i % 2, 0) for i in range(6)]
    monkeypatch.setattr(jax, "devices", lambda *_: interleaved)
    mesh = jdp.make_mesh(("node", "device"))
    assert [[d.slice_index for d in row] for row in mesh.devices] == [[0, 0, 0], [1, 1, 1]]


def test_unequal_groups_are_refused():
    devices = [Device(0, p) for p in (0, 0, 0, 1)]
    with pytest.raises(ValueError, match=r"groups have\s+\[1, 3\] devices.*equally large"):
        jdp.make_mesh(("node", "device"), devices=devices)


@pytest.mark.parametrize(
    ("keywords", "match"),
    [
        ({"num_devices": 9}, r"num_devices=9\).*JAX shows 8 .*emulate_devices"),
        ({"num_devices": 0}, r"num_devices=0"),
        ({"num_devices": -1}, r"num_devices=-1"),
        ({"num_devices": 2.5}, r"num_devices=2\.5"),
        ({"devices": []}, "empty list of devices"),
        ({"devices": [0, 0]}, "same device twice"),
        ({"shape": (4,)}, r"cannot lay 8 device\(s\) out as \(4,\) along \('data',\)"),
        ({"shape": (8, 1)}, "one size for each axis"),
        ({"axis_names": ("data", "model"), "shape": (-1, -1)}, r"as \(-1, -1\)"),
        ({"axis_names": ("data", "model"), "shape": (-1, -1), "num_devices": 1}, r"\(-1, -1\)"),
        ({"axis_names": ("data", "model"), "shape": (-2, -4)}, r"as \(-2, -4\)"),
        ({"axis_names": ("data", "model"), "shape": (0, -1)}, r"as \(0, -1\)"),
        ({"axis_names": ("data", "model"), "shape": (3, -1)}, r"as \(3, -1\)"),
        ({"axis_names": ("a", "b", "c")}, "needs a shape for the 3 axes"),
        ({"axis_names": ()}, "axes"),
        ({"axis_names": ("data", "data"), "shape": (2, 4)}, r"axis names \('data', 'data'\)"),
    ],
)
def test_what_make_mesh_refuses(keywords, match):
    with pytest.raises((ValueError, TypeError), match=match):
        jdp.make_mesh(**keywords)


def test_data_axes():
    names = ("replica", "model", "data", "expert")
    mesh = jdp.make_mesh(names, (2, 2, 2, 1))
    assert jdp.data_axes(mesh) == ("replica", "data")  # the mesh's order, not the table's
    assert jdp.data_axes(mesh, "expert") == ("expert",)
    assert jdp.data_axes(mesh, ["data", "replica"]) == ("data", "replica")
    assert jdp.data_axes(mesh.abstract_mesh) == ("replica", "data")
    assert jdp.axis_size(mesh, "data") == 2
    assert jdp.axis_size(mesh, ("replica", "data")) == 4


@pytest.mark.parametrize(
    ("axis", "match"),
    [
        ("nope", r"axes \('x',\) and none called 'nope'.*axis="),
        (("x", "nope"), "none called 'nope'"),
        ((), "none called"),
        (None, r"none called 'data or node or device or replica'.*\"data\" in jdp.make_mesh"),
        (("x", "x"), "twice|once"),
    ],
)
def test_what_data_axes_refuses(axis, match):
    with pytest.raises(ValueError, match=match):
        jdp.data_axes(jdp.make_mesh("x"), axis)


@pytest.mark.parametrize("num", [0, -1, 1.5, "8", None, float("nan")])
def test_emulate_devices_refuses_what_is_no_count(num):
    with pytest.raises(ValueError, match=r"emulate_devices needs a positive whole number"):
        jdp.emulate_devices(num)


def test_emulate_devices_after_jax_has_started():
    jdp.emulate_devices(8)  # what is there already: nothing to do
    with pytest.raises(RuntimeError, match=r"came too late: .*8 CPU device\(s\).*restart the kern"):
        jdp.emulate_devices(4)


def test_b10_order_of_notebook_cells():
    """B10, google/jax#6887: devices asked for after JAX has started."""
    script = """
import jax
jax.devices()
import jdp
try:
    jdp.make_mesh(num_devices=8)
except ValueError as error:
    print("mesh:", error)
try:
    jdp.emulate_devices(8)
except RuntimeError as error:
    print("emulate:", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    mesh, emulate = done.stdout.strip().splitlines()
    assert mesh.startswith("mesh: jdp.make_mesh(num_devices=8)")
    assert "JAX shows 1 " in mesh
    assert "call jdp.emulate_devices(n) before the first use" in mesh
    assert "emulate_devices(8) came too late: JAX has already started with 1 CPU" in emulate


def test_importing_jdp_starts_no_backend():
    script = "import jdp; jdp.emulate_devices(3); print(jdp.make_mesh().size)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "3"


def test_replicate_puts_a_whole_copy_on_every_device():
    mesh = jdp.make_mesh()
    tree = {"np": np.arange(6.0, dtype=np.float32), "jax": jnp.ones((2, 3)), "scalar": 2.0}
    placed = jdp.replicate(tree | {"key": jax.random.key(0), "none": None}, mesh)
    for name in ("np", "jax", "scalar", "key"):
        assert placed[name].sharding.is_equivalent_to(NamedSharding(mesh, P()), placed[name].ndim)
    for name in tree:
        assert len(placed[name].addressable_shards) == 8
        for shard in placed[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, tree[name])
    assert placed["none"] is None


def test_replicate_keeps_the_placement_of_leaves_on_the_mesh():
    mesh = jdp.make_mesh(("data", "model"), (4, 2))
    column = NamedSharding(mesh, P(None, "model"))
    tree = {"w": jax.device_put(jnp.ones((4, 6)), column), "b": jnp.zeros(6)}
    placed = jdp.replicate(tree, mesh)
    assert placed["w"] is tree["w"]
    assert placed["b"].sharding == NamedSharding(mesh, P())
    # the same devices in another arrangement are another mesh
    other = jdp.make_mesh()
    again = jdp.replicate({"b": placed["b"], "w": placed["w"]}, other)
    for leaf in jax.tree.leaves(again):
        assert leaf.sharding == NamedSharding(other, P())
    np.testing.assert_array_equal(again["w"], np.ones((4, 6)))


@pytest.mark.parametrize("size", [3, 2**20])
def test_replicate_does_not_alias_what_it_was_given(size):
    """CPU devices could use an aligned NumPy buffer in place; it is changed afterwards."""
    buffer = np.zeros(size + 16, np.float32)
    array = buffer[-buffer.ctypes.data // 4 % 16 :][:size]
    assert array.ctypes.data % 64 == 0
    placed = jdp.replicate(array, jdp.make_mesh())
    array[:] = 7
    assert {float(np.max(shard.data)) for shard in placed.addressable_shards} == {0.0}


def test_ambient_mesh():
    mesh = jdp.make_mesh(("data", "model"), (4, 2))
    on_mesh = jdp.replicate(jnp.ones(3), mesh)
    struct = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=NamedSharding(mesh, P()))
    assert ambient_mesh({"a": np.ones(3), "b": on_mesh}) == mesh
    assert ambient_mesh({"a": struct}) == mesh
    assert ambient_mesh({"a": jnp.ones(3)}) is None
    assert ambient_mesh({}) is None
    with jax.set_mesh(mesh):
        assert ambient_mesh({}) == mesh.abstract_mesh
        assert jax.jit(lambda x: ambient_mesh(x).size * x)(jnp.ones(())) == 8
    assert isinstance(ambient_mesh(on_mesh), Mesh)


def test_outside_jit_what_devices_do_is_one_program(caplog):
    """JAX alone would compile each operation by itself, in each call."""
    mesh, x = jdp.make_mesh(), jnp.arange(16.0)

    def make():
        mean = lambda x: jax.lax.pmean(jnp.sin(x) * 2 + jnp.cos(x), "data")  # noqa: E731
        return on_devices(mean, mesh, P("data"), P(), ["data"])

    want = make()(x)  # with whatever else must be compiled
    with jax.log_compiles():
        np.testing.assert_array_equal(make()(x), want)
    assert sum("Finished XLA compilation" in line for line in caplog.messages) == 1
    np.testing.assert_array_equal(jax.jit(make())(x), want)
    rows = np.asarray(x).reshape(8, 2)
    np.testing.assert_allclose(want, (np.sin(rows) * 2 + np.cos(rows)).mean(0), rtol=1e-5)
