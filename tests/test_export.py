"""Parameters leave and enter as safetensors files."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file
from test_checkpoint import mesh_of

import jdp

pytestmark = pytest.mark.alternate

pytest.importorskip("safetensors", reason="safetensors is not installed")

RNG = np.random.default_rng(0)
PARAMS = {
    "layers": [{"w": RNG.normal(size=(11, 5)).astype(np.float32), "b": np.zeros(0, np.float32)}],
    "head": {"half": jnp.asarray(RNG.normal(size=(16, 4)), jnp.bfloat16)},
    "turned": RNG.normal(size=(4, 6)).astype(np.float32).T,  # not contiguous
    "scale": np.float32(3),
}


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype, x.tobytes()) == (y.shape, y.dtype, y.tobytes())
    return True


def test_others_read_what_is_written_under_dotted_names(tmp_path):
    jdp.export_params(PARAMS, tmp_path / "x.safetensors", metadata={"run": "7"})
    found = load_file(tmp_path / "x.safetensors")
    assert sorted(found) == ["head.half", "layers.0.b", "layers.0.w", "scale", "turned"]
    np.testing.assert_array_equal(found["turned"], PARAMS["turned"])
    again = jdp.import_params(tmp_path / "x.safetensors", PARAMS)
    assert same(again, PARAMS)
    assert [x.name for x in tmp_path.iterdir()] == ["x.safetensors"]


def test_split_padded_and_local_parameters(tmp_path):
    params = {"odd": jnp.arange(55.0).reshape(11, 5), "w": jnp.ones((16, 8))}
    tx = jdp.zero3(optax.sgd(1.0), min_size=0)
    state = jdp.init_state(params, tx, mesh_of(8))
    path = tmp_path / "x.safetensors"
    jdp.export_params(state.params, path)
    like = jdp.init_state(jax.eval_shape(lambda: params), tx, mesh_of(3)).params
    again = jdp.import_params(path, like)
    assert same(jdp.logical(again), params)
    assert isinstance(again["odd"], jdp.Padded)
    assert again["odd"].sharding.is_equivalent_to(like["odd"].sharding, 2)
    rows = jdp.PerReplica(jnp.arange(8.0), axes=("data",), mesh=mesh_of(8))
    jdp.export_params({"x": rows}, path)
    assert load_file(path)["x"] == 3.5


def test_other_parameters_are_a_readable_difference(tmp_path):
    path = tmp_path / "x.safetensors"
    jdp.export_params({"a": np.zeros(3), "b": np.zeros(2), "c": np.zeros(1)}, path)
    match = (
        r"wanted, but not in the file:\n    \['d'\] .*\n  in the file, but not wanted:\n    c fl.*"
        r"\n  of another shape or dtype:\n    b: saved float64 of shape \(2,\), wanted float64 of"
    )
    with pytest.raises(ValueError, match=match):
        jdp.import_params(path, {"a": np.zeros(3), "b": np.zeros(4), "d": np.zeros(1)})


def test_what_cannot_be_written(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match=r"\['a.b'\] would be called 'a.b', as another leaf is"):
        jdp.export_params({"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)}, path)
    with pytest.raises(ValueError, match=r"\['a'\] is float8_e5m2, which others could not read"):
        jdp.export_params({"a": jnp.ones(1, jnp.float8_e5m2)}, path)
    with pytest.raises(jdp.CheckpointError, match=r"could not write .*What was there still is"):
        jdp.export_params({"a": jnp.ones(1)}, tmp_path / "no" / "folder")


def test_a_full_disk_leaves_the_old_file(tmp_path):
    from test_checkpoint_refuses import disk

    with disk(tmp_path / "disk", "1m"):
        path = tmp_path / "disk" / "x.safetensors"
        jdp.export_params({"a": np.ones(1000)}, path)
        with pytest.raises(jdp.CheckpointError, match=r"could not write .*What was there still is"):
            jdp.export_params({"a": np.ones(1_000_000)}, path)
        assert load_file(path)["a"].shape == (1000,)
        assert [x.name for x in path.parent.iterdir()] == ["x.safetensors"]


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="typo does not exist"):
        jdp.import_params(tmp_path / "typo", PARAMS)
    path = tmp_path / "x.safetensors"
    jdp.export_params({"a": np.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(jdp.CheckpointError, match="It was cut, or is no safetensors file"):
        jdp.import_params(path, {"a": np.ones(1000)})


def test_without_safetensors(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"safetensors, which is not installed"):
        jdp.export_params(PARAMS, tmp_path / "x")
