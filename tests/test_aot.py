"""The step as the real TPU and GPU compilers make it, for slices and hosts that are not here.

Nothing runs: `topologies` describes the devices, the compilers are those of the extras `tpu` and
`gpu`. Each program is small, compiled once and shared.
"""

import functools
import importlib.util
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp

pytestmark = pytest.mark.aot

MIB = 2**20
WIDTH = 1024
LEAF_BYTES = 4 * WIDTH * WIDTH
ITEMSIZE = {"f32": 4, "bf16": 2, "u16": 2, "f16": 2}

# What the compiler must know of a GPU: properties of an NVIDIA H100 80GB HBM3.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_vendor: "NVIDIA Corporation" device_address_bits: 64
  name: "NVIDIA H100 80GB HBM3" driver_version: "13.0.0" runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
  device_interconnect_info { active_links: 18 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@pytest.fixture(scope="module", params=["tpu", "gpu"])
def mesh(request):
    make = {"tpu": _tpu_devices, "gpu": _gpu_devices}[request.param]
    with pytest.MonkeyPatch.context() as patch:
        yield Mesh(np.array(make(patch)), ("data",))


def _tpu_devices(patch):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (pip install '.[tpu]')")
    patch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-16")
    patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    patch.setenv("TPU_SKIP_MDS_QUERY", "1")
    patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # another test process may compile as well
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices


def _gpu_devices(patch):
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("jax-cuda12-plugin is not installed (pip install '.[gpu]')")
    if importlib.util.find_spec("nvidia.cuda_nvcc") is None:
        pytest.skip("nvidia-cuda-nvcc-cu12 is not installed (pip install '.[gpu]')")
    return topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology="1x1x8"
    ).devices


def loss_fn(params, batch):
    x = batch
    for w in params:
        x = jnp.tanh(x @ w.astype(jnp.bfloat16))
    return jnp.mean(x.astype(jnp.float32) ** 2)


@functools.cache
def compiled_text(mesh, num_layers, *, bucket_bytes=None, wire_dtype=None):
    """The scheduled program of a step; without `bucket_bytes`, compiled with no options at all."""
    options, bucket = {}, {}
    if bucket_bytes is not None:
        bucket = {"bucket_bytes": bucket_bytes}
        options = jdp.xla_options(mesh, bucket_bytes=bucket_bytes)
    tx = optax.chain(jdp.all_reduce(wire_dtype=wire_dtype, **bucket), optax.sgd(0.1))
    step = jdp.train_step(loss_fn, tx, mesh, compiler_options=options)

    def shape(dims, dtype, *spec):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*spec)))

    params = [shape((WIDTH, WIDTH), jnp.float32)] * num_layers
    opt_state = jax.eval_shape(tx.init, params)
    state = jdp.TrainState(shape((), jnp.int32), params, opt_state)
    batch = shape((mesh.size * 512, WIDTH), jnp.bfloat16, "data")
    return step.lower(state, batch).compile().as_text()


class Sent(NamedTuple):
    kind: str
    operands: list[tuple[str, int]]  # dtype and bytes of each
    products: int  # matrix products between its start and its end; 0 if everything waits for it

    @property
    def num_bytes(self):
        return sum(num_bytes for _, num_bytes in self.operands)


def sent(text, at_least=1024):
    """The collectives of the entry computation, in the order they start; scalars left out."""
    multiplies = re.compile(r" (dot|convolution)\(|__cublas").search
    bodies = re.split(r"\n(?=(?:ENTRY )?%\S+ \()", text)
    multiplying = {body.split()[0] for body in bodies if multiplies(body)}
    found, products = {}, 0
    kinds = "all-reduce|all-to-all|all-gather|reduce-scatter"
    for line in text[text.index("\nENTRY ") :].splitlines():
        match = re.match(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)", line)
        if not match:
            continue
        name, result, op, rest = match.groups()
        called = set(re.findall(r"calls=(%[^\s,]+)", line))
        products += bool(multiplies(line) or called & multiplying)
        if name.startswith("async-collective-done"):  # TPU: chained from its start by tuples
            start = name.replace("-done", "-start")
            found[start] = found[start]._replace(products=products - found[start].products)
        elif name.startswith("async-collective-start"):
            # (operand, result, ...): the all-reduce of one leaf, spread over the next fusions
            found[name] = Sent("all-reduce", _operands(result)[:1], products)
        elif kind := re.fullmatch(rf"({kinds})(-start)?", op):
            operands = _operands(result)
            if kind[1] != "all-reduce" and kind[2]:
                operands = operands[len(operands) // 2 :]  # (operands, results)
            found[name] = Sent(kind[1], operands, products if kind[2] else 0)
        elif re.fullmatch(rf"({kinds})-done", op):
            start = re.match(r"%([^\s,)]+)", rest)[1]
            found[start] = found[start]._replace(products=products - found[start].products)
    return [record for record in found.values() if record.num_bytes >= at_least]


def _operands(result):
    shapes = re.findall(r"\b([a-z]+[0-9]+)\[([0-9,]*)\]", result)
    return [
        (dtype, ITEMSIZE.get(dtype, 4) * math.prod(int(d) for d in dims.split(",") if d))
        for dtype, dims in shapes
    ]


def total(records):
    # a scalar loss may ride along in a bucket of gradients
    return sum(n for record in records for _, n in record.operands if n >= 1024) // 1024 * 1024


def test_without_options_everything_waits_for_one_all_reduce(mesh):
    records = sent(compiled_text(mesh, 3))
    assert [record.kind for record in records] == ["all-reduce"]
    assert total(records) == 3 * LEAF_BYTES
    assert records[0].products == 0


def test_buckets_of_one_leaf_run_under_compute(mesh):
    records = sent(compiled_text(mesh, 3, bucket_bytes=LEAF_BYTES))
    assert [record.kind for record in records] == ["all-reduce"] * 3
    assert total(records) == 3 * LEAF_BYTES
    # the last one has the whole backward pass behind it
    assert all(record.products > 0 for record in records[:-1])


@pytest.mark.parametrize("leaves_in_bucket", [2, 4])
def test_number_of_all_reduces_follows_bucket_bytes(mesh, leaves_in_bucket):
    # room for the scalar loss, which the compiler may put into a bucket as well
    text = compiled_text(mesh, 4, bucket_bytes=leaves_in_bucket * LEAF_BYTES + 1024)
    records = sent(text)
    assert [record.kind for record in records] == ["all-reduce"] * (4 // leaves_in_bucket)
    assert total(records) == 4 * LEAF_BYTES
    for record in records:
        assert total([record]) == leaves_in_bucket * LEAF_BYTES


def test_bfloat16_on_the_wire_is_16_bits_wide(mesh):
    records = sent(compiled_text(mesh, 3, bucket_bytes=8 * LEAF_BYTES, wire_dtype=jnp.bfloat16))
    assert {record.kind for record in records} == {"all-to-all", "all-gather"}
    for kind in ("all-to-all", "all-gather"):
        of_kind = [record for record in records if record.kind == kind]
        assert {dtype for record in of_kind for dtype, _ in record.operands} == {"u16"}
        assert total(of_kind) == 3 * LEAF_BYTES // 2


def test_no_option_is_unknown_to_its_compiler(mesh):
    options = jdp.xla_options(mesh)
    assert options
    assert jdp.known_options(options, mesh) == options


def test_unknown_options_are_left_out_where_the_devices_are_not_here(mesh):
    asked = {**jdp.xla_options(mesh), "xla_no_such_thing": 1}
    with pytest.warns(UserWarning, match="does not know xla_no_such_thing"):
        assert jdp.known_options(asked, mesh) == jdp.xla_options(mesh)
