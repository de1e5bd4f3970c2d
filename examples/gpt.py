"""A small byte-level GPT in Flax: bytes in, logits of the next byte out.

What comes in: tokens, an integer array `[batch, time]` of bytes (0 to 255).
What goes out: logits, float32 `[batch, time, 256]`; `logits[:, t]` has seen `tokens[:, :t + 1]`.

    tokens -> embedding -> (attention, MLP) x layers -> norm -> logits over 256 bytes

It knows nothing of devices, meshes or jdp. Shapes: B batch, T time, H heads, D width, K = D / H.
"""

import dataclasses
import functools
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 256  # every byte is a token: no tokenizer to download or to train


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The sizes of the model; the defaults have 0.6 million parameters."""

    width: int = 128
    layers: int = 3
    heads: int = 4
    context: int = 96  # the longest text, in bytes, the model is asked to look at
    activations: str = "float32"  # "bfloat16" on GPUs and TPUs; parameters stay float32


def rotate(x: jax.Array) -> jax.Array:
    """Turns pairs of features by an angle that grows with the position (rotary embedding).

    Attention then sees how far apart two bytes are, not where they stand. x: `[B, T, H, K]`.
    """
    time, half = x.shape[1], x.shape[-1] // 2
    frequency = 1000.0 ** -(jnp.arange(half) / half)  # wavelengths of 6 to 6000 bytes
    angle = jnp.arange(time)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    left, right = x[..., :half], x[..., half:]
    rotated = jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)
    return rotated.astype(x.dtype)


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention, `[B, T, H, K]` to `[B, T, H, K]`.

    Written out: on CPUs, `jax.nn.dot_product_attention` takes 1.6 times as long here.
    """
    time, width = query.shape[1], query.shape[-1]
    scores = jnp.einsum("bthk,bshk->bhts", query, key).astype(jnp.float32) / width**0.5
    scores = jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    return jnp.einsum("bhts,bshk->bthk", weights, value)


class Block(nn.Module):
    """Attention over the past, then an MLP; each reads a normalised copy and adds its result."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[B, T, D]` to `[B, T, D]`."""
        config, dtype = self.config, jnp.dtype(self.config.activations)
        dense = functools.partial(nn.Dense, use_bias=False, dtype=dtype)
        # 2 * layers results are added up: they start small, so that the sum does too.
        start = nn.initializers.normal(0.02 / (2 * config.layers) ** 0.5)
        heads = (*x.shape[:2], config.heads, config.width // config.heads)

        y = nn.RMSNorm(dtype=dtype)(x)
        query, key, value = jnp.split(dense(3 * config.width, name="qkv")(y), 3, axis=-1)
        y = attend(rotate(query.reshape(heads)), rotate(key.reshape(heads)), value.reshape(heads))
        x = x + dense(config.width, name="attention_out", kernel_init=start)(y.reshape(x.shape))

        y = nn.RMSNorm(dtype=dtype)(x)
        y = nn.relu(dense(4 * config.width, name="mlp_in")(y)) ** 2
        return x + dense(config.width, name="mlp_out", kernel_init=start)(y)


class GPT(nn.Module):
    """A decoder-only transformer whose output layer is its embedding, transposed."""

    config: GPTConfig = GPTConfig()

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps bytes `[B, T]` to float32 logits `[B, T, 256]` of the byte that follows each."""
        dtype = jnp.dtype(self.config.activations)
        start = nn.initializers.normal(0.02)
        embedding = nn.Embed(VOCABULARY, self.config.width, dtype=dtype, embedding_init=start)
        x = embedding(tokens)
        for layer in range(self.config.layers):
            x = Block(self.config, name=f"block_{layer}")(x)
        return embedding.attend(nn.RMSNorm(dtype=dtype)(x)).astype(jnp.float32)


def logits(model: GPT, params: Any, tokens: jax.Array) -> jax.Array:
    """The model as a function of its parameters."""
    return cast(jax.Array, model.apply({"params": params}, tokens))


def generate(model: GPT, params: Any, prompt: bytes, length: int, key: jax.Array) -> bytes:
    """The prompt and `length` bytes drawn one by one, each from a window of fixed size."""
    context = model.config.context
    window = np.frombuffer(prompt.rjust(context, b"\n")[-context:], np.uint8)

    @jax.jit
    def draw(params: Any, window: jax.Array, keys: jax.Array) -> jax.Array:
        def one(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            scores = logits(model, params, window[None])[0, -1]
            byte = jax.random.categorical(key, scores / 0.7).astype(jnp.uint8)  # below 1: safer
            return jnp.append(window[1:], byte), byte

        return jax.lax.scan(one, window, keys)[1]

    return prompt + np.asarray(draw(params, window, jax.random.split(key, length))).tobytes()
