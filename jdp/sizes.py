"""The arrays of a training state, by shape: who holds how many bytes of them.

    params, tx, batch  --sizes_of-->  Sizes        arrays, devices, stage  --held-->  bytes

Arithmetic on shapes; nothing is compiled and no array is made.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdp.split import MIN_SIZE, choose_part


class Array(NamedTuple):
    """An array by its shape, and bytes of an element."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.itemsize


class Sizes(NamedTuple):
    """The arrays of a training state.

    Attributes:
        params: Parameters.
        opt_state: State of the optimizer.
        batch: A row of the batch: bytes.
        extra: Bytes of what every device holds besides: model state, key, counter.
    """

    params: tuple[Array, ...]
    opt_state: tuple[Array, ...]
    batch: int
    extra: int

    @property
    def param_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(x.bytes for x in self.params)

    @property
    def numbers(self) -> int:
        """Numbers that are trained."""
        return sum(math.prod(x.shape) for x in self.params)

    def grads(self, microbatches: int) -> tuple[Array, ...]:
        """Gradients: of the parameters' dtypes, or added up over microbatches in float32."""
        if microbatches == 1:
            return self.params
        return tuple(Array(x.shape, max(4, x.itemsize)) for x in self.params)


def sizes_of(
    params: Any,
    tx: optax.GradientTransformation,
    batch: Any,
    *,
    model_state: Any = None,
    key: Any = None,
) -> Sizes:
    """Measures a state by its shapes.

    Args:
        params: Parameters, or shapes.
        tx: The optimizer, without communication.
        batch: A batch, or shapes; the first dim counts rows.
        model_state: What the model keeps besides.
        key: A random key.
    """
    opt_state = jax.eval_shape(tx.init, params)
    rows = jax.tree.leaves(batch)[0].shape[0]
    row = sum(bytes_of(x) for x in jax.tree.leaves(batch)) // rows
    extra = sum(bytes_of(x) for x in jax.tree.leaves((model_state, key))) + 4
    return Sizes(_arrays(params), _arrays(opt_state), row, extra)


def _arrays(tree: Any) -> tuple[Array, ...]:
    return tuple(Array(tuple(x.shape), _itemsize(x)) for x in jax.tree.leaves(tree))


def bytes_of(x: Any) -> int:
    """Bytes of an array or a shape."""
    return math.prod(jnp.shape(x)) * _itemsize(x)


def _itemsize(x: Any) -> int:
    dtype = getattr(x, "dtype", None) or np.result_type(x)
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else np.dtype(dtype).itemsize


def held(arrays: Sequence[Array], count: int, *, stage: int = 1) -> int:
    """Bytes that each of `count` devices holds of arrays that are split as a ZeRO stage does.

    Example:
        >>> held([Array((64, 8), 4), Array((8,), 4)], 8)  # the small one stays whole
        288
    """
    total = 0
    for x in arrays:
        part = choose_part(x.shape, (), count, stage=stage, min_size=MIN_SIZE)
        if part.dim is None:
            total += x.bytes
        else:
            total += x.bytes // max(part.size, 1) * part.stored // count
    return total


def as_shapes(tree: Any) -> Any:
    """The same tree of shapes and dtypes, on no device."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
        if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct(jnp.shape(x), dtype)

    return jax.tree.map(one, tree)


def with_rows(batch: Any, rows: int) -> Any:
    """The shapes of a batch of another number of rows."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), as_shapes(batch)
    )
