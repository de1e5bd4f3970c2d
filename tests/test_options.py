"""xla_options by platform, known_options against the compiler that is here."""

import types

import jax
import numpy as np
import pytest

import jdp
from jdp import options as options_module
from jdp.options import known_options, xla_options

MIB = 2**20


def fake_mesh(platform, shape=(8,), axis_names=("data",), kind="some kind"):
    """As much of a mesh of another platform as xla_options looks at."""
    devices = np.empty(shape, object)
    devices[...] = types.SimpleNamespace(platform=platform, device_kind=kind)
    return types.SimpleNamespace(
        devices=devices,
        axis_names=axis_names,
        shape=dict(zip(axis_names, shape, strict=True)),
        size=devices.size,
    )


@pytest.fixture
def fresh_cache(monkeypatch):
    monkeypatch.setattr(options_module, "_known", {})


def test_cpu_has_nothing_to_set():
    assert xla_options(jdp.make_mesh()) == {}


def test_unlisted_platform_has_nothing_to_set():
    assert xla_options(fake_mesh("neuron")) == {}


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite"])
def test_tpu_bucket_is_the_combiners_threshold(kind):
    found = xla_options(fake_mesh("tpu", kind=kind), bucket_bytes=3 * MIB)
    assert found.pop("xla_jf_crs_combiner_threshold_in_bytes") == 3 * MIB
    # the compilers for other kinds refuse these, or make programs of them that may be wrong
    assert ("xla_tpu_enable_async_collective_fusion_fuse_all_reduce" in found) == (
        kind == "TPU v5 lite"
    )
    assert bool(found) == kind.endswith("lite")
    assert all(value is True for value in found.values())


def test_what_is_handed_out_is_the_callers():
    mesh = fake_mesh("tpu", kind="TPU v5 lite")
    expected = dict(xla_options(mesh))
    xla_options(mesh).clear()
    assert xla_options(mesh) == expected


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_gpu_reduce_scatter_threshold_counts_its_output(platform):
    mesh = fake_mesh(platform, (2, 4, 2), ("node", "device", "model"))
    found = xla_options(mesh, bucket_bytes=16 * MIB)
    assert found["xla_gpu_all_reduce_combine_threshold_bytes"] == 16 * MIB
    assert found["xla_gpu_reduce_scatter_combine_threshold_bytes"] == 2 * MIB
    other = fake_mesh(platform, (4, 2), ("batch", "model"))
    found = xla_options(other, axis="batch", bucket_bytes=16 * MIB)
    assert found["xla_gpu_reduce_scatter_combine_threshold_bytes"] == 4 * MIB


def test_gpu_threshold_stays_positive():
    found = xla_options(fake_mesh("gpu"), bucket_bytes=1)
    assert found["xla_gpu_reduce_scatter_combine_threshold_bytes"] == 1


def test_default_bucket_is_what_runs_under_compute():
    found = xla_options(fake_mesh("gpu"))
    assert found["xla_gpu_all_reduce_combine_threshold_bytes"] == 25 * MIB
    found = xla_options(fake_mesh("tpu", kind="TPU v5 lite"))
    assert found["xla_jf_crs_combiner_threshold_in_bytes"] == 4 * MIB
    assert xla_options(fake_mesh("tpu", kind="TPU v5")) == {}


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_bucket_bytes_must_be_a_positive_whole_number(platform):
    mesh = fake_mesh(platform)
    with pytest.raises(ValueError, match="bucket_bytes=0 leaves no room for a gradient"):
        xla_options(mesh, bucket_bytes=0)
    with pytest.raises(ValueError, match="bucket_bytes=-5 leaves no room"):
        xla_options(mesh, bucket_bytes=-5)
    with pytest.raises(TypeError, match=r"bucket_bytes=2.5 is a float, but a bucket is a whole"):
        xla_options(mesh, bucket_bytes=2.5)
    with pytest.raises(TypeError, match=r"bucket_bytes=True is a bool"):
        xla_options(mesh, bucket_bytes=True)
    assert xla_options(mesh, bucket_bytes=np.int64(7)) == xla_options(mesh, bucket_bytes=7)


def test_known_options_passes_known_ones_on(fresh_cache):
    asked = {"xla_cpu_enable_fast_math": True, "xla_cpu_enable_fast_min_max": False}
    assert known_options(asked, jdp.make_mesh()) == asked


def test_known_options_names_what_it_leaves_out(fresh_cache):
    asked = {"xla_no_such_thing": 1, "xla_cpu_enable_fast_math": True, "xla_nor_this": "x"}
    with pytest.warns(UserWarning, match="does not know xla_no_such_thing, xla_nor_this"):
        found = known_options(asked, jdp.make_mesh())
    assert found == {"xla_cpu_enable_fast_math": True}


def test_known_options_compiles_once(fresh_cache, monkeypatch):
    asked = {"xla_cpu_enable_fast_math": True, "xla_no_such_thing": 1}
    calls = []
    accepts = options_module._accepts
    monkeypatch.setattr(
        options_module, "_accepts", lambda o, mesh: calls.append(list(o)) or accepts(o, mesh)
    )
    for _ in range(2):
        with pytest.warns(UserWarning, match="xla_no_such_thing"):
            known_options(asked, jdp.make_mesh())
    assert calls == [list(asked), *([name] for name in asked)]
    known_options({"xla_cpu_enable_fast_math": False}, jdp.make_mesh())
    known_options({}, jdp.make_mesh())
    assert len(calls) == 3


def test_a_bad_value_is_an_error_still(fresh_cache):
    asked = {"xla_gpu_all_reduce_combine_threshold_bytes": "abc"}
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid int64 value"):
        known_options(asked, jdp.make_mesh())


def test_unknown_option_is_why_known_options_exists():
    # If JAX stops refusing them, or words it otherwise, known_options must follow.
    compiled = jax.jit(lambda x: x + 1, compiler_options={"xla_no_such_thing": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        compiled(1.0)
