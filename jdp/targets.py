"""Hardware that is not here, described for its real compiler.

    "h100:2x8"  --target-->  Target: devices to compile for, and what the chip can do
    Target, mesh  --mesh_for-->  a mesh of those devices with the same axes

Programs can be compiled for the devices of a target, not run on them. The compilers are those of
the extras `tpu` and `gpu`; figures of chips come from `jdp.hardware`.
"""

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jdp.hardware import CHIPS, Chip
from jdp.mesh import DATA_AXES

# libtpu asks for these where there is no TPU; several processes may compile at a time
TPU_ENVIRONMENT = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

_NEEDS = {"tpu": (["libtpu"], "tpu"), "gpu": (["jax_cuda12_plugin", "nvidia.cuda_nvcc"], "gpu")}

# Properties that the CUDA driver tells of each chip (cudaGetDeviceProperties), as XLA takes them.
_GPUS = {
    "a100": {
        "capability": "major: 8 minor: 0",
        "cores": 108,
        "fpus": 64,
        "bandwidth": 2039000000000,
        "l2": 41943040,
        "ghz": 1.41,
        "memory": 84942979072,
        "shared": 167936,
        "optin": 166912,
        "links": 12,
        "name": "NVIDIA A100-SXM4-80GB",
    },
    "h100": {
        "capability": "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES",
        "cores": 132,
        "fpus": 128,
        "bandwidth": 3352320000000,
        "l2": 52428800,
        "ghz": 1.98,
        "memory": 84942979072,
        "shared": 233472,
        "optin": 232448,
        "links": 18,
        "name": "NVIDIA H100 80GB HBM3",
    },
    "h200": {
        "capability": "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES",
        "cores": 132,
        "fpus": 128,
        "bandwidth": 4917120000000,
        "l2": 62914560,
        "ghz": 1.98,
        "memory": 150754820096,
        "shared": 233472,
        "optin": 232448,
        "links": 18,
        "name": "NVIDIA H200",
    },
}
_GPU_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {ghz}
  device_memory_size: {memory}
  cuda_compute_capability {{ {capability} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_vendor: "NVIDIA Corporation" device_address_bits: 64
  name: "{name}" driver_version: "13.0.0" runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{name}"
"""

# Examples for those who ask for what there is not; TPUs lie in grids of two or three sides.
_EXAMPLES = {
    "v5e": "v5e:4x4",
    "v5p": "v5p:2x2x4",
    "v6e": "v6e:8x8",
    "v4": "v4:2x2x4",
    "h100": "h100:2x8",
    "h200": "h200:8",
    "a100": "a100:4x8",
}


class Target(NamedTuple):
    """Devices that need not be here.

    Attributes:
        name: As it was asked for, such as "h100:2x8".
        chip: What each device can do, see `jdp.hardware`.
        devices: Devices for a `jax.sharding.Mesh`, to compile for.
        nodes: Groups of devices that a slower network joins; 1 for a TPU slice.
        per_node: Devices of a group.
    """

    name: str
    chip: Chip
    devices: tuple[Any, ...]
    nodes: int
    per_node: int


def targets() -> dict[str, str]:
    """The chips that a target can have, each with an example of a name.

    Example:
        >>> targets()["h100"]
        'h100:2x8'
    """
    return {name: _EXAMPLES[name] for name in CHIPS if name in _EXAMPLES}


def missing(platform: str) -> str | None:
    """Which package a compiler lacks, in words; `None` if it is installed.

    Args:
        platform: "tpu" or "gpu".
    """
    packages, extra = _NEEDS[platform]
    for package in packages:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # not even the package around it
            found = None
        if found is None:
            return f"{package} is not installed (pip install 'jdp-train[{extra}]')"
    return None


def target(name: str) -> Target:
    """Describes hardware for its compiler.

    Args:
        name: Chip and arrangement: "v5e:4x4" is a TPU slice of 16 chips; "h100:2x8" are 2 hosts of
            8 GPUs; "h200:8" is one.

    Returns:
        The target.

    Raises:
        ValueError: If there is no such chip or arrangement; the message lists those that exist.
        ImportError: If the compiler for it is not installed; the message says how to.

    Example:
        >>> target("h100:2x8").per_node  # doctest: +SKIP
        8
    """
    chip_name, _, arrangement = name.strip().lower().partition(":")
    known = ", ".join(targets().values())
    if chip_name not in targets():
        raise ValueError(
            f"There is no target {name!r}. Chips come with an arrangement, for example: {known}."
        )
    sizes = [int(x) for x in arrangement.split("x") if x.isdigit()]
    chip = CHIPS[chip_name]
    wanted = (1, 2) if chip.platform == "gpu" else (2, 3)
    malformed = not re.fullmatch(r"\d+(x\d+)*", arrangement) or 0 in sizes
    if malformed or not wanted[0] <= len(sizes) <= wanted[1]:
        raise ValueError(
            f"The target {name!r} has no arrangement that jdp can read. {_HOW[chip.platform]}, "
            f"such as {_EXAMPLES[chip_name]!r}."
        )
    if what := missing(chip.platform):
        raise ImportError(f"To compile for {name}, its compiler is needed, and {what}.")
    if chip.platform == "tpu":
        count = math.prod(sizes)
        devices = _tpus(name, f"{chip_name}:{'x'.join(map(str, sizes))}")
        return Target(name, chip, devices, 1, count)
    nodes, per_node = sizes if len(sizes) == 2 else (1, sizes[0])
    return Target(name, chip, tuple(gpus(chip_name, f"1x{nodes}x{per_node}")), nodes, per_node)


_HOW = {
    "gpu": "GPUs are counted as hosts x GPUs of a host, or as GPUs of one host",
    "tpu": "A TPU slice is named by the sides of its grid",
}


def _tpus(name: str, topology: str) -> tuple[Any, ...]:
    try:
        return tuple(tpus(topology))
    except Exception as error:  # of libtpu: a topology that no such machine has
        raise ValueError(
            f"The TPU compiler knows no slice {name!r}: {str(error).splitlines()[0]} Sides are "
            f"powers of two or multiples of 4, such as {_EXAMPLES[topology.split(':')[0]]!r}."
        ) from error


def tpus(topology: str) -> Sequence[Any]:
    """Devices of a TPU slice, such as "v5e:4x4", as libtpu numbers them."""
    for name, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def gpus(chip: str, topology: str) -> Sequence[Any]:
    """Devices of GPU hosts.

    Args:
        chip: "a100", "h100" or "h200".
        topology: Partitions x hosts x GPUs of a host, such as "1x2x8".
    """
    config = _GPU_CONFIG.format(**_GPUS[chip])
    return topologies.get_topology_desc(
        platform="cuda", target_config=config, topology=topology
    ).devices


def mesh_for(target: Target, like: Mesh) -> Mesh:
    """A mesh of a target's devices with the axes of another mesh.

    A single data axis gets all devices that the other axes leave. Of two, such as
    ("node", "device"), the first counts the nodes; on a TPU slice, which has one, as in `like` if
    that divides the slice. Axes that are no data axes ("model") keep their sizes.

    Args:
        target: The target.
        like: The mesh that a step was built for.

    Returns:
        A mesh with the axis names and types of `like`.

    Raises:
        ValueError: If the sizes of the other axes do not divide the target's devices.
    """
    names = like.axis_names
    data = [name for name in names if name in DATA_AXES]
    sizes = {name: size for name, size in like.shape.items() if name not in data}
    others, count = math.prod(sizes.values()), len(target.devices)
    if count % others or not data:
        raise ValueError(
            f"{target.name} has {count} devices, which the mesh axes {sizes} do not divide. Build "
            "the step for a mesh whose other axes fit the target."
        )
    left = count // others
    for name in data[:-1]:
        outer = target.nodes if target.nodes > 1 and name == data[0] else like.shape[name]
        sizes[name] = math.gcd(outer, left)
        left //= sizes[name]
    sizes[data[-1]] = left
    shape = tuple(sizes[name] for name in names)
    if target.chip.platform == "tpu" and len(names) == 1:  # JAX knows the order of a torus
        return jax.make_mesh(shape, names, axis_types=like.axis_types, devices=list(target.devices))
    devices = np.empty(count, dtype=object)
    devices[:] = target.devices
    return Mesh(devices.reshape(shape), names, axis_types=like.axis_types)
