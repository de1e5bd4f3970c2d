"""Numbers as the bits that travel: narrow dtypes, with a scale for each block of values.

    float32 [n]  --encode-->  unsigned integers [n + scales]  --decode-->  float32 [n]

| wire dtype | a value is sent as | scale |
| --- | --- | --- |
| bfloat16 | 16 bits | none: it has float32's range |
| float16 | 16 bits | a power of two for each 4096 values |
| float8_e4m3fn, float8_e5m2 | 8 bits | a power of two for each block |
| int8 | a whole number from -127 to 127 | max / 127 for each block |
| (one bit) | its sign | the mean magnitude of each block |

A scale is a float32 and travels behind the values it belongs to, in the same buffer, so that
whoever has the buffer can read it: no device ever decodes with a scale of its own. Nothing here
sends anything.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp.mesh import is_whole

BLOCK = 256  # 4 bytes of scale on 256 of values: 1.0156 bytes a value, 0.254 of float32
_BLOCK_16 = 4096  # 0.05 % more than the values; the range of float16 spans most of it anyway
_SMALLEST = float(np.finfo(np.float32).tiny)  # of normal numbers; devices may flush others to 0
_BITS = {2: jnp.uint16, 1: jnp.uint8}
_EIGHT = ("int8", "float8_e4m3fn", "float8_e5m2")
_WIRES = ("float32", "bfloat16", "float16", *_EIGHT)


def check_wire_dtype(wire_dtype: Any) -> Any:
    """The dtype, or a sentence why it cannot be sent."""
    if wire_dtype is None:
        return None
    try:
        dtype = jnp.dtype(wire_dtype)
    except TypeError:
        raise ValueError(
            f"wire_dtype={wire_dtype!r} is no dtype; use jnp.bfloat16, jnp.float16, jnp.int8, "
            "jnp.float32, or None to send each leaf as it is."
        ) from None
    if dtype.name not in _WIRES:
        raise ValueError(
            f"wire_dtype={dtype.name} cannot carry a mean: it must be a floating-point type of 16 "
            "or 32 bits (float32, bfloat16, float16), or one of 8 bits, which is sent with scales "
            f"({', '.join(_EIGHT)}); None sends each leaf as it is."
        )
    return dtype


def check_block(block: Any) -> int:
    """The number, or a sentence why it is not one of values."""
    if not is_whole(block) or block < 1:
        raise ValueError(
            f"block={block!r} must be a positive whole number of values that share a scale, such "
            f"as {BLOCK}."
        )
    return int(block)


def is_narrow(dtype: Any) -> bool:
    """Whether values of this dtype travel as bits and are added up in float32."""
    return jnp.dtype(dtype).itemsize < 4


class Codec(NamedTuple):
    """How float32 rows become bits and bits rows.

    Attributes:
        encode: (x [..., n], key) to unsigned integers [..., n + scales].
        decode: (those, n) to float32 [..., n].
        keeps_own: Whether a device adds what it has itself as it is, since that does not travel.
            With few bits it is worth it: the owner's error is then made up for exactly.
    """

    encode: Callable[[jax.Array, Any], jax.Array]
    decode: Callable[[jax.Array, int], jax.Array]
    keeps_own: bool


def codec_of(wire_dtype: Any, block: int = BLOCK) -> Codec:
    """The codec of a narrow dtype."""
    dtype = jnp.dtype(wire_dtype)
    return Codec(
        functools.partial(encode, wire_dtype=dtype, block=block),
        functools.partial(decode, wire_dtype=dtype, block=block),
        keeps_own=dtype.itemsize == 1,
    )


def sign_codec(block: int) -> Codec:
    """One bit a value, eight to a byte: what arrives is + or - the mean magnitude of its block."""

    def encode(x: jax.Array, key: Any = None) -> jax.Array:
        del key  # nothing is left to chance
        size, count = x.shape[-1], -(-x.shape[-1] // block)
        sizes = np.minimum(block, size - block * np.arange(count)).astype(np.float32)
        magnitudes = jnp.abs(_in_blocks(x, block))
        # in units of a power of two, which rounds nothing: a block's sum may be beyond float32
        unit = _power_below(jnp.max(magnitudes, axis=-1))
        # and one whose inverse is a normal number, too
        unit = jnp.where(unit < _SMALLEST, 1, jnp.minimum(unit, 2.0**126))
        scales = jnp.sum(magnitudes / unit[..., None], axis=-1) / sizes * unit
        behind = jax.lax.bitcast_convert_type(scales, jnp.uint8)
        return jnp.concatenate([_pack(x >= 0), behind.reshape(*x.shape[:-1], -1)], axis=-1)

    def decode(codes: jax.Array, size: int) -> jax.Array:
        length = -(-size // 8)
        positive = _unpack(codes[..., :length], size)
        behind = codes[..., length:].reshape(*codes.shape[:-1], -1, 4)
        scales = _spread(jax.lax.bitcast_convert_type(behind, jnp.float32), block, size)
        return jnp.where(positive, scales, -scales)

    return Codec(encode, decode, keeps_own=True)


def _pack(flags: jax.Array) -> jax.Array:
    """Bits [..., n] as bytes [..., n / 8]; bit j of a byte comes from the j-th eighth of the row.

    Slices of whole rows: a reshape of bytes keeps a TPU's compiler busy for half a minute.
    """
    padding = [(0, 0)] * (flags.ndim - 1) + [(0, -flags.shape[-1] % 8)]
    eighths = jnp.split(jnp.pad(flags, padding).astype(jnp.int32), 8, axis=-1)
    packed = eighths[0]
    for j in range(1, 8):
        packed |= eighths[j] << j
    return packed.astype(jnp.uint8)


def _unpack(packed: jax.Array, size: int) -> jax.Array:
    """The inverse of `_pack`."""
    wide = packed.astype(jnp.int32)
    return jnp.concatenate([(wide >> j) & 1 for j in range(8)], axis=-1)[..., :size] == 1


def encode(x: jax.Array, key: Any = None, *, wire_dtype: Any, block: int = BLOCK) -> jax.Array:
    """The bits of an array, and of its scales, as they are sent.

    With s the scale of a block and y = x / s, the value that arrives is s * round(y), to nearest,
    or with a key up or down at random so that it is y on average.

    | value | arrives as |
    | --- | --- |
    | largest of its block | within one rounding, whatever its size |
    | block of zeros | zeros |
    | block below 1.2e-38 | to a precision of 1.2e-38 for int8 |
    | inf, NaN | itself (in e4m3fn, which has no inf, NaN); with int8 NaN, all of its block |

    Args:
        x: Float32 array [..., n].
        key: Random key, for stochastic rounding; `None` rounds to nearest.
        wire_dtype: A narrow dtype, see `check_wire_dtype`.
        block: Values that share a scale, for dtypes of 8 bits.

    Returns:
        Unsigned integers of the dtype's width, [..., n + scales].
    """
    dtype, size = jnp.dtype(wire_dtype), x.shape[-1]
    bits = _BITS[dtype.itemsize]
    length = _block_of(dtype, block)
    if length is None:
        return jax.lax.bitcast_convert_type(_round(x, dtype, key).astype(dtype), bits)
    scales = _scales(_in_blocks(x, length), dtype)
    y = _round(x / _spread(scales, length, size), dtype, key)
    codes = jax.lax.bitcast_convert_type(y.astype(dtype), bits)
    sent = jax.lax.bitcast_convert_type(scales, bits)
    return jnp.concatenate([codes, sent.reshape(*x.shape[:-1], -1)], axis=-1)


def decode(codes: jax.Array, size: int, *, wire_dtype: Any, block: int = BLOCK) -> jax.Array:
    """The values that bits from `encode` stand for.

    Args:
        codes: What `encode` gave, [..., n + scales].
        size: n.
        wire_dtype: As it was encoded.
        block: As it was encoded.

    Returns:
        Float32 array [..., n].
    """
    dtype = jnp.dtype(wire_dtype)
    length = _block_of(dtype, block)
    values = jax.lax.bitcast_convert_type(codes[..., :size], dtype).astype(jnp.float32)
    if length is None:
        return values
    behind = codes[..., size:].reshape(*codes.shape[:-1], -1, 4 // dtype.itemsize)
    scales = jax.lax.bitcast_convert_type(behind, jnp.float32)
    return values * _spread(scales, length, size)


def _block_of(dtype: Any, block: int) -> int | None:
    """How many values share a scale; `None` if there are no scales."""
    return {"bfloat16": None, "float16": _BLOCK_16}.get(dtype.name, block)


def _in_blocks(x: jax.Array, length: int) -> jax.Array:
    """[..., n] as [..., blocks, length], the last block filled up with zeros."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % length)]
    return jnp.pad(x, padding).reshape(*x.shape[:-1], -1, length)


def _spread(scales: jax.Array, length: int, size: int) -> jax.Array:
    """The scale of each value."""
    shape = (*scales.shape, length)
    repeated = jnp.broadcast_to(scales[..., None], shape)
    return repeated.reshape(*scales.shape[:-1], -1)[..., :size]


def _scales(blocks: jax.Array, dtype: Any) -> jax.Array:
    """One scale for each block [..., blocks, length]."""
    if dtype == jnp.int8:
        # the maximum is inf or NaN if any value is, and so then is all of the block
        scale = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1) * (1 / 127), _SMALLEST)
        return jnp.where(jnp.isfinite(scale), scale, jnp.nan)
    largest = jnp.max(jnp.where(jnp.isfinite(blocks), jnp.abs(blocks), 0), axis=-1)
    # up to one power of two below the dtype's largest, so that nothing rounds to inf
    top = 2.0 ** (int(jnp.finfo(dtype).maxexp) - 2)
    return jnp.maximum(_power_below(largest) / top, _SMALLEST)


def _power_below(x: jax.Array) -> jax.Array:
    """The largest power of two that is not above x >= 0; 0 below the normal numbers."""
    exponent = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    return jax.lax.bitcast_convert_type(exponent, jnp.float32)


def _round(y: jax.Array, dtype: Any, key: Any) -> jax.Array:
    """To numbers of the dtype; by its cast, if it is of floating point and to nearest."""
    finite = jnp.isfinite(y)
    if dtype == jnp.int8:
        y = jnp.where(finite, y, 0)
        y = jnp.round(y) if key is None else jnp.floor(y + jax.random.uniform(key, y.shape))
        return jnp.clip(y, -127, 127)
    if key is None:
        return y
    info = jnp.finfo(dtype)
    apart = jnp.maximum(_power_below(jnp.abs(y)), 2.0**info.minexp) * 2.0**-info.nmant
    apart = jnp.maximum(apart, _SMALLEST)
    rounded = jnp.floor(y / apart + jax.random.uniform(key, y.shape)) * apart
    limit = float(info.max)
    return jnp.where(finite, jnp.clip(rounded, -limit, limit), y)
