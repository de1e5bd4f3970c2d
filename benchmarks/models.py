"""The models that the benchmarks train: parameters, a loss and a batch, in plain JAX.

    mlp     784-2048-2048-2048-10, 10,020,874 parameters in 8 leaves, 64 examples
    lm      4-layer GPT with a tied embedding, 5,930,880 parameters in 44 leaves, 16 sequences
    leaves  64 leaves of 16 numbers: no work to speak of, so that a call's own cost shows

Everything is made with NumPy from a fixed seed. `quick` shrinks a model for a trial run. `wrap`
changes the body of a layer, of the form (x, layer) -> (x, None) as `jax.lax.scan` takes it, such
as `jdp.layerwise`.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Body = Callable[[jax.Array, Any], tuple[jax.Array, None]]
Wrap = Callable[[Body], Body]


class Model(NamedTuple):
    """What a step needs: the loss is the mean over the rows of the batch it is given."""

    name: str
    params: Any
    loss: Callable[[Any, Any], jax.Array]
    batch: dict[str, np.ndarray]


def make(
    name: str, *, quick: bool = False, times: int = 1, wrap: Wrap = lambda body: body
) -> Model:
    """Makes a model by name, with a batch of `times` its usual rows."""
    rng = np.random.default_rng(0)
    if name == "leaves":
        return _leaves(rng, quick, times)
    return {"mlp": _mlp, "lm": _lm}[name](rng, quick, times, wrap)


def num_params(model: Model) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(model.params))


def _mlp(rng: np.random.Generator, quick: bool, times: int, wrap: Wrap) -> Model:
    sizes = (32, 32, 10) if quick else (784, 2048, 2048, 2048, 10)
    params = [
        {"w": _normal(rng, m, n, scale=(2 / m) ** 0.5), "b": np.zeros(n, np.float32)}
        for m, n in itertools.pairwise(sizes)
    ]
    rows = 64 * times
    batch = {"x": _normal(rng, rows, sizes[0]), "y": rng.integers(0, 10, rows, np.int32)}

    # smooth: a relu's gradient jumps where rounding decides on which side of 0 it is
    hidden = wrap(lambda x, layer: (jax.nn.silu(x @ layer["w"] + layer["b"]), None))

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for layer in params[:-1]:
            x, _ = hidden(x, layer)
        logits = x @ params[-1]["w"] + params[-1]["b"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))

    return Model("mlp", params, loss, batch)


def _lm(rng: np.random.Generator, quick: bool, times: int, wrap: Wrap) -> Model:
    vocab, width, layers, length = (64, 64, 1, 8) if quick else (3072, 320, 4, 64)
    ones, zeros = lambda n: np.ones(n, np.float32), lambda n: np.zeros(n, np.float32)
    params: dict[str, Any] = {
        "embed": _normal(rng, vocab, width, scale=0.02),
        "position": _normal(rng, length, width, scale=0.02),
        "norm": {"scale": ones(width), "bias": zeros(width)},
        "blocks": [
            {
                "norm1": {"scale": ones(width), "bias": zeros(width)},
                "qkv": _normal(rng, width, 3 * width, scale=0.02),
                "out": _normal(rng, width, width, scale=0.02),
                "norm2": {"scale": ones(width), "bias": zeros(width)},
                "w1": _normal(rng, width, 4 * width, scale=0.02),
                "b1": zeros(4 * width),
                "w2": _normal(rng, 4 * width, width, scale=0.02),
                "b2": zeros(width),
            }
            for _ in range(layers)
        ],
    }
    batch = {"tokens": rng.integers(0, vocab, (16 * times, length + 1), np.int32)}

    body = wrap(lambda x, block: (_block(block, x), None))

    def loss(params: Any, batch: Any) -> jax.Array:
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        x = params["embed"][tokens] + params["position"]
        for block in params["blocks"]:
            x, _ = body(x, block)
        logits = _layer_norm(params["norm"], x) @ params["embed"].T
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    return Model("lm", params, loss, batch)


def _leaves(rng: np.random.Generator, quick: bool, times: int) -> Model:
    params = {f"leaf{i:02}": _normal(rng, 16) for i in range(4 if quick else 64)}
    batch = {"x": _normal(rng, 8 * times, 16)}

    def loss(params: Any, batch: Any) -> jax.Array:
        return sum(jnp.mean((batch["x"] @ leaf) ** 2) for leaf in params.values())  # pyright: ignore

    return Model("leaves", params, loss, batch)


def _block(p: Any, x: jax.Array) -> jax.Array:
    rows, length, width = x.shape
    q, k, v = jnp.split(_layer_norm(p["norm1"], x) @ p["qkv"], 3, axis=-1)
    heads = lambda y: y.reshape(rows, length, -1, 64)  # noqa: E731
    attended = jax.nn.dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)
    x = x + attended.reshape(rows, length, width) @ p["out"]
    hidden = jax.nn.gelu(_layer_norm(p["norm2"], x) @ p["w1"] + p["b1"])
    return x + hidden @ p["w2"] + p["b2"]


def _layer_norm(p: Any, x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x) * p["scale"] + p["bias"]


def _normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(shape)).astype(np.float32)
