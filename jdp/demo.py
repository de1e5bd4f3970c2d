"""`jdp demo`: half a minute that shows what jdp does, on whatever devices there are.

A small network learns which byte follows which in the source of Python's standard library. It is
trained twice with the same microbatches, on one device and on all, and what the compiled step
sends is shown beside the least it could.
"""

import pathlib
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

import jdp

_CONTEXT = 8  # bytes that the network sees
_WIDTH = 64
_MICROBATCH = 8  # examples; a step has one for each device, on one device and on all


def demo(steps: int = 60, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Trains on one device and on all of them, and compares.

    Args:
        steps: Steps of each run.
        say: Is given each line of what is to be told.

    Returns:
        "devices"; "loss", of the last step on all devices, in nats per byte; "first_loss";
        "difference", the largest between the two runs' losses.
    """
    say(f"{jax.device_count()} {jax.devices()[0].platform} devices. Learning Python, byte by byte:")
    one = _train(steps, jdp.make_mesh(devices=jax.devices()[:1]))
    every = _train(steps, jdp.make_mesh())
    for number in range(0, steps, max(1, steps // 6)):
        say(f"  step {number:3}   1 device {one[number]:.6f}   all devices {every[number]:.6f}")
    difference = max(abs(a - b) for a, b in zip(one, every, strict=True))
    say(f"The same curve on one device and on all: largest difference {difference:.1e} nats.")
    say("Next: README.md, and `jdp explain` on a script of yours.")
    return {
        "devices": jax.device_count(),
        "first_loss": every[0],
        "loss": every[-1],
        "difference": difference,
    }


def _train(steps: int, mesh: jax.sharding.Mesh) -> list[float]:
    tx = optax.chain(jdp.all_reduce(), optax.adam(3e-3))
    step = jdp.train_step(_loss, tx, mesh, microbatch=_MICROBATCH)
    state = jdp.init_state(_params(), tx, mesh)
    losses = []
    for batch in _batches(steps):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return [float(loss) for loss in losses]


def _loss(params: Any, batch: Any) -> jax.Array:
    seen = params["embed"][batch[:, :-1]].reshape(len(batch), -1)
    scores = jax.nn.gelu(seen @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch[:, -1]).mean()


def _params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"embed": (256, 16), "hidden": (16 * _CONTEXT, _WIDTH), "out": (_WIDTH, 256)}
    named = zip(shapes.items(), keys, strict=True)
    return {name: jax.random.normal(key, s) / s[0] ** 0.5 for (name, s), key in named}


def _batches(steps: int) -> Iterator[np.ndarray]:
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("a*.py")))
    data = np.frombuffer(text, np.uint8).astype(np.int32)
    draw, rows = np.random.default_rng(0), _MICROBATCH * jax.device_count()
    for _ in range(steps):
        starts = draw.integers(0, len(data) - _CONTEXT, rows)
        yield data[starts[:, None] + np.arange(_CONTEXT + 1)]
