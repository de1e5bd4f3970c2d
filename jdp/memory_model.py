"""What a training step will take of a device's memory: a closed form around one probe.

    Sizes, a probe or a guess, a strategy  --predict-->  bytes per device, by kind

What a stage splits is arithmetic: who holds which part of an array is known (`jdp.split`).
Activations are not, for a loss of which nothing is known but its shapes, nor is what a compiler
makes of an update: these come from a probe, compiled once for each stage, size of microbatch and
rematerialisation (`jdp.probe`). Any number of devices, mesh and accumulation follows.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jdp.offload import MIN_SIZE as MIN_OFFLOADED
from jdp.probe import Guess, Probe
from jdp.sizes import Array, Sizes, held


class Predicted(NamedTuple):
    """Bytes of one device by kind, as predicted; they add up to `total`."""

    params: int
    opt_state: int
    batch: int
    temporaries: int
    host: int

    @property
    def total(self) -> int:
        """All on the device."""
        return self.params + self.opt_state + self.batch + self.temporaries


def predict(
    sizes: Sizes,
    found: Probe | Guess,
    *,
    stage: int,
    devices: int,
    split_over: int | None = None,
    rows: int,
    microbatches: int,
    platform: str,
    offload: bool = False,
    wire: str = "exact",
    hierarchical: bool = False,
) -> Predicted:
    """Bytes per device of a strategy.

    With P, O, G the bytes of parameters, optimizer state and gradients, B a device's part of the
    batch, n = `split_over` devices that share a state, and T the temporaries of a probe on p:

        stage 0     P   + O   + B + T
        stage 1     P   + O/n + B + T
        stage 2     P   + O/n + B + T - G/p + G/n    in a loop over microbatches, else T
        stage 3     P/n + O/n + B + T - G/p + G/n    the same

    Where a state has fewer devices than the batch (split within nodes), reducing between nodes
    takes two parts of the largest leaf more. From a guess, T is what the backward pass keeps and
    the gradients, or the update's 2 G. Probes send exactly; what rounds or compresses keeps
    residuals of 4 bytes a number, and codes or factors beside the gradients, see `_WIRE_TAKES`.

    Args:
        sizes: The arrays.
        found: A probe of this stage, microbatch and rematerialisation on a flat mesh of any number
            of devices, with two microbatches if there are several; or a guess.
        stage: ZeRO stage, 0 to 3.
        devices: Devices that the batch is divided among.
        split_over: Devices that share a state; by default all.
        rows: Rows of a device.
        microbatches: Microbatches of a device.
        platform: "cpu", "gpu" or "tpu".
        offload: Whether the optimizer state is in the host's memory.
        wire: What gradients are sent as, see `jdp.strategy`.
        hierarchical: Whether an all-reduce is one within nodes and one between.

    Returns:
        The bytes.
    """
    count = split_over or devices
    params = held(sizes.params, count, stage=3) if stage == 3 else sizes.param_bytes
    state = held(sizes.opt_state, count, stage=stage) if stage else _sum(sizes.opt_state)
    host = 0
    if offload:
        stays = _sum([x for x in sizes.opt_state if math.prod(x.shape) < MIN_OFFLOADED])
        host, state = max(0, state - stays), min(state, stays)
    if isinstance(found, Probe):
        temporaries = _probed(sizes, found, stage, microbatches, count, platform)
        if count < devices and microbatches == 1:
            temporaries += 2 * held([_largest(sizes.params)], count, stage=max(1, stage))
        elements = sizes.param_bytes + _sum(sizes.opt_state)
        padding = round(found.padding * (params + state) / max(elements, 1))
    else:
        temporaries, padding = _guessed(sizes, found, stage, microbatches, count), 0
    temporaries = max(temporaries, host)  # fetched for the update
    if not hierarchical:  # which rounds parts only, and keeps no residuals
        temporaries += round(4 * sizes.numbers * _WIRE_TAKES[wire][min(stage, 1)])
    keeps = wire == "power_sgd" or (wire == "int8" and stage == 0 and not hierarchical)
    held_state = state + padding + (4 * sizes.numbers if keeps else 0)
    return Predicted(params, held_state, rows * sizes.batch + sizes.extra, temporaries, host)


# Temporaries that a wire takes, of the bytes of gradients in float32, by all-reduce and by a stage:
# the most that was seen in programs for 8 emulated devices.
_WIRE_TAKES = {
    "exact": (0.0, 0.0),
    "bfloat16": (0.05, 0.5),
    "int8": (2.3, 1.5),
    "power_sgd": (0.0, 1.0),
}


def _sum(arrays: Sequence[Array]) -> int:
    return sum(x.bytes for x in arrays)


def _largest(arrays: Sequence[Array]) -> Array:
    return max(arrays, key=lambda x: x.bytes, default=Array((), 0))


def _probed(
    sizes: Sizes, found: Probe, stage: int, microbatches: int, count: int, platform: str
) -> int:
    """Temporaries on `count` devices, from those on the probe's.

    Which of them are split is as seen in compiled programs: in loops the accumulator, on GPU and on
    TPU for stage 2 also what is being added to it; for stage 3 the part of the leaf at hand, or of
    all that a scan over layers has stacked, on TPU three times in all; and of an update that is the
    fullest moment, gradient and update of the leaf at hand.
    """
    grads = sizes.grads(microbatches)
    whole, leaf = _sum(grads), _largest(grads)
    step = max(1, stage)
    there, here = (held(grads, n, stage=step) for n in (found.devices, count))
    parts = there - here
    stacked = [x for x in grads if len(x.shape) >= 3]
    at_hand = stacked or [leaf]
    leaf_part = held(at_hand, found.devices, stage=step) - held(at_hand, count, stage=step)
    if stage == 0:
        less = 0
    elif stage == 3 and platform == "tpu" and stacked:
        less = 3 * parts
    elif stage >= 2 and microbatches > 1:
        less = parts * (2 if platform != "cpu" and stage == 2 else 1)
        less += leaf_part if stage == 3 else 0
    elif stage == 3:
        less = leaf_part
    else:
        updates = platform != "tpu" and found.temporaries < 1.02 * (whole + there)
        less = 2 * leaf_part if updates and microbatches == 1 else 0
    return max(0, found.temporaries - less)


def _guessed(sizes: Sizes, found: Guess, stage: int, microbatches: int, count: int) -> int:
    """Temporaries: the fuller of backward pass and update."""
    grads = sizes.grads(microbatches)
    whole, part = _sum(grads), held(grads, count, stage=max(1, stage))
    in_parts = stage >= 2 and microbatches > 1
    gathered = sizes.param_bytes if stage == 3 else 0
    backward = found.kept + (part if in_parts else whole) + gathered
    return max(backward, (2 * whole, whole + part, whole + part, 2 * part)[stage])
