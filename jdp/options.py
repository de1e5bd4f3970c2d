"""How a step is compiled, so that gradients are sent in buckets and under compute.

A mesh and a bucket size come in; a dictionary for `jax.jit(compiler_options=...)` goes out:

    mesh, bucket_bytes -> xla_options -> known_options -> jax.jit(step, compiler_options=...)

On TPU and GPU a bucket is a threshold of the compiler's own combiner, so nothing is copied into
flat buffers; on CPU there is nothing to set. This file does not decide what is sent, and reads no
environment variable: `XLA_FLAGS` still applies below these options.
"""

import operator
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.mesh import AxisNames, axis_size, data_axes

Option = bool | int | float | str

# What lets an all-reduce run beside compute, by `device_kind`. On v5e a part of it is put into each
# fusion that follows, of matrix products and, by the third option, of elementwise updates. Other
# compilers refuse that or, before libtpu 0.0.50, warn of nothing and may make programs that hang or
# are wrong. On v6e it is left to the SparseCores.
_BESIDE_COMPUTE: dict[str, dict[str, Option]] = {
    "TPU v5 lite": {
        "xla_enable_async_all_reduce": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
        "xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions": True,
    },
    "TPU v6 lite": {"xla_tpu_enable_sparse_core_collective_offload_all_reduce": True},
}

# XLA:GPU of jax 0.12 no longer knows this option.
_EARLY_ALL_GATHER: dict[str, Option] = (
    {"xla_gpu_enable_pipelined_all_gather": True} if jax.__version_info__ < (0, 12) else {}
)

# Whether a platform's compiler knows an option: a fact of the installed jaxlib, found out once.
_known: dict[tuple[str, str], bool] = {}


def xla_options(
    mesh: Mesh,
    *,
    axis: AxisNames | None = None,
    bucket_bytes: int | None = None,
) -> dict[str, Option]:
    """Compiler options that bucket gradient communication and run it under compute.

    The devices of the mesh decide:

        cpu      nothing: XLA:CPU combines everything and runs nothing asynchronously
        tpu v5e  combine all-reduces up to `bucket_bytes`, run them inside the fusions of the
                 backward pass and of the optimizer
        tpu v6e  combine all-reduces up to `bucket_bytes`, run them on the SparseCores
        tpu      combine all-reduces up to `bucket_bytes`, if given: none runs under compute
        gpu      combine all-reduces up to `bucket_bytes`, reduce-scatters up to `bucket_bytes` of
                 input; before jax 0.12, fetch the next layer's all-gather early in scans

    **Guarantees:**
        - The options change when bytes are sent and in how many pieces, never which bytes.
        - A platform not listed above gets no options.

    On TPU v5e, as compiled, only an all-reduce of a single leaf runs under compute; a bucket of
    several leaves stops it. Its default bucket is therefore small: it joins what is too small to
    be worth a start of its own. On a square slice (4x4, 8x8, 16x16) the compiler makes an
    all-reduce of a reduce-scatter, so this goes for `jdp.zero1` to `jdp.zero3` as well. Parameters
    are gathered under compute there without any option. The option for elementwise updates
    (its name ends in `fuse_kloop_fusions`) is seldom used: should libtpu crash while it compiles a
    step (reported by others, on v6e with Pallas kernels), pass `compiler_options` without it.

    Args:
        mesh: The mesh the step runs on; its devices may be those of an ahead-of-time topology.
        axis: Mesh axis, or axes, the replicas lie along; `None` finds them by name.
        bucket_bytes: Bytes of gradient sent together, per replica. Smaller buckets start earlier,
            larger ones use the wire better. A single larger leaf is a bucket of its own. `None`
            takes 4 MiB on TPU v5e and v6e, 25 MiB on GPU, and the compiler's choice on other TPUs.

    Returns:
        A new dictionary from option to value, to be passed as `jax.jit(compiler_options=...)`,
        best through `known_options`.

    Raises:
        TypeError: If `bucket_bytes` is not a whole number.
        ValueError: If `bucket_bytes` is not positive.

    Example:
        >>> jdp.xla_options(jdp.make_mesh(), bucket_bytes=4 * 2**20)  # on CPU
        {}
    """
    device = mesh.devices.flat[0]
    platform, beside = device.platform, _BESIDE_COMPUTE.get(device.device_kind, {})
    if bucket_bytes is not None:
        bucket_bytes = _validate_bucket_bytes(bucket_bytes)
    elif platform == "tpu" and not beside:
        return {}
    else:
        bucket_bytes = 4 * 2**20 if platform == "tpu" else 25 * 2**20
    if platform == "tpu":
        return {"xla_jf_crs_combiner_threshold_in_bytes": bucket_bytes, **beside}
    if platform in ("gpu", "cuda"):
        num_replicas = axis_size(mesh, data_axes(mesh, axis))
        return {
            "xla_gpu_all_reduce_combine_threshold_bytes": bucket_bytes,
            # This threshold counts the scattered output, 1/N of what goes in.
            "xla_gpu_reduce_scatter_combine_threshold_bytes": max(1, bucket_bytes // num_replicas),
            **_EARLY_ALL_GATHER,
        }
    return {}


def known_options(options: Mapping[str, Option], mesh: Mesh) -> dict[str, Option]:
    """Leaves out the options that the installed compiler does not know.

    Options come and go with XLA, and `jax.jit` refuses a program because of one it has not heard
    of. They only make a step faster, so a missing one is worth a warning and no more.

    A trivial program is compiled with all the options at once, and with each alone only if that
    fails; what was found is remembered for the life of the process.

    **Guarantees:**
        - An option the compiler knows is passed on unchanged; a bad *value* is an error still.
        - Works where the mesh's devices are not on this machine.

    Args:
        options: From option to value, for example of `xla_options`.
        mesh: The mesh whose compiler is asked.

    Returns:
        A new dictionary, in the same order.

    Raises:
        jax.errors.JaxRuntimeError: If the value of a known option cannot be used.

    Example:
        >>> from jdp.options import known_options
        >>> known_options(jdp.xla_options(jdp.make_mesh()), jdp.make_mesh())
        {}
    """
    platform = _platform(mesh)
    unseen = {name: value for name, value in options.items() if (platform, name) not in _known}
    if unseen and _accepts(unseen, mesh):
        _known.update({(platform, name): True for name in unseen})
    else:
        for name, value in unseen.items():
            _known[platform, name] = _accepts({name: value}, mesh)
    unknown = [name for name in options if not _known[platform, name]]
    if unknown:
        warnings.warn(
            f"The {platform} compiler of jax {jax.__version__} does not know {', '.join(unknown)}. "
            "The step is compiled without, so communication may be less well hidden; the results "
            "are the same. Pass compiler_options without them to silence this.",
            stacklevel=2,
        )
    return {name: value for name, value in options.items() if _known[platform, name]}


def _accepts(options: Mapping[str, Any], mesh: Mesh) -> bool:
    """Whether a trivial program compiles with `options`, all of them being known."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    lowered = jax.jit(lambda x: x + 1).lower(scalar)
    try:
        lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND: Cannot find key" in str(error):
            return True  # the option is known, and asks for a model that this chip has none of
        if "No such compile option" not in str(error):
            raise
        return False
    return True


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


def _validate_bucket_bytes(bucket_bytes: Any) -> int:
    if isinstance(bucket_bytes, bool) or not hasattr(bucket_bytes, "__index__"):
        raise TypeError(
            f"bucket_bytes={bucket_bytes!r} is a {type(bucket_bytes).__name__}, but a bucket is a "
            "whole number of bytes. Pass an int, for example 25 * 2**20 for 25 MiB."
        )
    value = operator.index(bucket_bytes)
    if value <= 0:
        raise ValueError(
            f"bucket_bytes={value} leaves no room for a gradient in a bucket. Pass the bytes to "
            "send together, for example 25 * 2**20; 1 sends every leaf alone."
        )
    return value
