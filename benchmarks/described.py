"""Devices that are not here, described for their real compilers.

In: "tpu" or "gpu", and a topology. Out: devices that programs can be compiled for, not run on.
The compilers are those of the extras `tpu` and `gpu`; no hardware is needed.
"""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from jax.experimental import topologies

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

# libtpu asks for these where there is no TPU; several processes may compile at a time
TPU_ENVIRONMENT = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

_NEEDS = {"tpu": (["libtpu"], "tpu"), "gpu": (["jax_cuda12_plugin", "nvidia.cuda_nvcc"], "gpu")}


def missing(platform: str) -> str | None:
    """Which package a compiler lacks, in words; `None` if it is installed."""
    packages, extra = _NEEDS[platform]
    for package in packages:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # not even the package around it
            found = None
        if found is None:
            return f"{package} is not installed (pip install '.[{extra}]')"
    return None


def devices(platform: str, topology: str) -> Sequence[Any]:
    """Describes the devices of a topology.

    Args:
        platform: "tpu", or "gpu" for NVIDIA H100s.
        topology: Such as "v5e:4x4", or "1x2x8" for two hosts of eight GPUs.

    Returns:
        Devices for a `jax.sharding.Mesh`.
    """
    if platform == "tpu":
        for name, value in TPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology=topology
    ).devices
