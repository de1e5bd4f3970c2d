"""Deep models of equal layers as shapes, to be compiled for devices that are not here.

    name, width  -->  shapes of a layer's weights, layer(x, weights) -> x, rows -> shape of x

Parameters are float32, computed with in bfloat16. The layers stand one behind the other (a list of
weights) or are scanned over (stacked weights), through `jdp.layerwise`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdp

SEQUENCE = 512  # tokens of a row of the transformer
_HEAD = 128


class Model(NamedTuple):
    """Weights of a layer, what it computes, and what one row of its input is."""

    weights: dict[str, tuple[int, ...]]
    layer: Callable[[jax.Array, dict[str, jax.Array]], jax.Array]
    row: tuple[int, ...]


def make(name: str, width: int) -> Model:
    """A layer of an MLP, width x width, or of a transformer with 12 width^2 weights."""
    if name == "mlp":
        return Model({"kernel": (width, width)}, _dense, (width,))
    weights = {
        "attention": (width, 3 * width),
        "projection": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    return Model(weights, _block, (SEQUENCE, width))


def _dense(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    return jnp.tanh(x @ weights["kernel"].astype(x.dtype))


def _block(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    w = {name: weight.astype(x.dtype) for name, weight in weights.items()}
    split = lambda y: y.reshape(*y.shape[:-1], -1, _HEAD)  # noqa: E731
    q, k, v = map(split, jnp.split(_normal(x) @ w["attention"], 3, axis=-1))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ w["projection"]
    return x + jax.nn.gelu(_normal(x) @ w["up"]) @ w["down"]


def _normal(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def loss_of(model: Model, *, scanned: bool) -> Callable[[Any, jax.Array], jax.Array]:
    """The loss of layers one behind the other, or scanned over."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        if scanned:
            body = lambda x, weights: (model.layer(x, weights), None)  # noqa: E731
            x, _ = jax.lax.scan(jdp.layerwise(body), x, params)
        else:
            for weights in params:
                x = model.layer(x, weights)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss_fn


def shapes(model: Model, layers: int, rows: int, mesh: Any, *, scanned: bool) -> tuple[Any, Any]:
    """Parameters and a global batch, as shapes with their places; `rows` are those of a device."""

    def shape(dims: tuple[int, ...], dtype: Any, *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*spec)))

    front = (layers,) if scanned else ()
    layer = {name: shape((*front, *dims), jnp.float32) for name, dims in model.weights.items()}
    batch = shape((mesh.size * rows, *model.row), jnp.bfloat16, "data")
    return (layer if scanned else [layer] * layers), batch
