"""Devices that are not here, for the real compilers; see `jdp.targets`, which describes them.

In: "tpu" or "gpu", and a topology. Out: devices that programs can be compiled for, not run on.
"""

from collections.abc import Sequence
from typing import Any

from jdp.targets import TPU_ENVIRONMENT, gpus, missing, tpus

__all__ = ["TPU_ENVIRONMENT", "devices", "missing"]


def devices(platform: str, topology: str) -> Sequence[Any]:
    """Describes the devices of a topology.

    Args:
        platform: "tpu", or "gpu" for NVIDIA H100s.
        topology: Such as "v5e:4x4", or "1x2x8" for two hosts of eight GPUs.

    Returns:
        Devices for a `jax.sharding.Mesh`.
    """
    return tpus(topology) if platform == "tpu" else gpus("h100", topology)
