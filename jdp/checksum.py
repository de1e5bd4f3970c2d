"""Programs about the copies of replicated arrays: a checksum of each, and how far they are apart.

In: a mesh, and arrays that lie on it. Out: numbers. JAX takes all copies of a replicated array for
the same; inside `shard_map` each device computes with its own, so that they can be told apart.
What to make of it is decided in `jdp.drift`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdp.mesh import names_in
from jdp.microbatch import vary


@functools.partial(jax.jit, static_argnums=(0, 1))
def sums_on_devices(mesh: Mesh, specs: tuple[P, ...], arrays: list[jax.Array]) -> jax.Array:
    """Checksums of each device's copies; nothing is sent, and nothing is copied.

    Args:
        mesh: The mesh.
        specs: Where each array lies.
        arrays: The arrays.

    Returns:
        uint32 of shape [devices, arrays], each device's row on that device, in the mesh's order.
    """

    def local(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([_checksum(x) for x in vary(arrays, mesh.axis_names)])[None]

    out = P(mesh.axis_names)
    return jax.shard_map(local, mesh=mesh, in_specs=(list(specs),), out_specs=out)(arrays)


def _checksum(x: jax.Array) -> jax.Array:
    """The sum of all words, each mixed with its place by the finaliser of MurmurHash3."""
    words = _words(x).ravel()
    place = jax.lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B9)  # 2^32 / golden ratio
    mixed = words ^ place
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as uint32, without loss."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    bits = jax.dtypes.itemsize_bits(x.dtype)
    if bits == 64:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
    return x.astype(jnp.uint32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def largest_difference(mesh: Any, spec: P, x: jax.Array) -> jax.Array:
    """The largest absolute difference between two copies of an entry, as a replicated scalar.

    It is inf if just one of them is finite. The copies do meet here, in all-reduces of the array.

    Args:
        mesh: The mesh.
        spec: Where the array lies.
        x: The array.

    Returns:
        Scalar, float32 (float64 of a float64 array).
    """
    split = {name for entry in spec for name in names_in(entry)}
    axes = tuple(name for name in mesh.axis_names if name not in split)

    def local(x: jax.Array) -> jax.Array:
        x = vary(x, mesh.axis_names)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            x = jnp.stack([x.real, x.imag])
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
            finite = jnp.isfinite(x)
            kind = jnp.where(finite, 0, jnp.where(jnp.isnan(x), 1, jnp.where(x > 0, 2, 3)))
            x = jnp.where(finite, x, 0)
            gap = jax.lax.pmax(x, axes) - jax.lax.pmin(x, axes)
            gap = jnp.where(jax.lax.pmax(kind, axes) != jax.lax.pmin(kind, axes), jnp.inf, gap)
        else:  # exact where float32 would not be
            unsigned = jnp.uint64 if x.dtype.itemsize == 8 else jnp.uint32
            x = x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
            highest, lowest = jax.lax.pmax(x, axes), jax.lax.pmin(x, axes)
            gap = (highest.astype(unsigned) - lowest.astype(unsigned)).astype(jnp.float32)
        return vary(jnp.max(gap).reshape(1), mesh.axis_names)

    out = P(mesh.axis_names)
    return jnp.max(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=out)(x))
