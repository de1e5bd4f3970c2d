"""How long a step will take: compute, update and communication, by formula.

    sizes, guess, setting  --step_seconds-->  Seconds, and what bounds them

Compute is the larger of FLOPs over the chip's peak and bytes over its memory's bandwidth, and as
much longer as probes say. The update reads and writes parameters, gradients and state once. What
is sent follows from the stage; times of it are those of `jdp.costs`. Of gradients, part travels
under the backward pass, except on CPUs. All are least times: they serve to compare strategies.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from jdp.costs import collective_seconds
from jdp.hardware import Chip
from jdp.power import MIN_RATE
from jdp.probe import Guess, Probe
from jdp.reporting import microseconds
from jdp.sizes import Array, Sizes, held

# The backward pass is two thirds of compute, and what is sent in its last part is not hidden.
_HIDES = 0.5

# Of what a traced program writes and reads, about this much is left when elementwise operations are
# fused; probes correct it.
_UNFUSED = 0.3

# How often a gradient is read or written to make it narrow and wide again: scales, codes, what is
# lost; for PowerSGD two products with thin matrices, and the residual.
_ROUNDING_PASSES = {"exact": 0, "bfloat16": 4, "int8": 10, "power_sgd": 8}


# Of `jdp.power_sgd` as plans try it.
POWER_RANK = 4


class Setting(NamedTuple):
    """What the time of a step depends on, besides the model: see `jdp.planning.Strategy`."""

    stage: int
    devices: int
    nodes: int
    split_over: int
    microbatches: int
    wire: str
    hierarchical: bool
    offload: bool
    chip: Chip
    compute_dtype: Any = None


class Seconds(NamedTuple):
    """Seconds of a step by what they are spent on; `sent` may be partly hidden.

    Attributes:
        products: FLOPs at the chip's peak.
        traffic: Bytes of forward and backward pass at the memory's bandwidth.
        update: The optimizer.
        sent: On the wire.
        exposed: Of these, what nothing hides.
        latency: Of `sent`, what does not depend on bytes.
        host: Fetching and storing an offloaded state.
        compute: Forward and backward pass.
    """

    products: float
    traffic: float
    update: float
    sent: float
    exposed: float
    latency: float
    host: float
    compute: float

    @property
    def total(self) -> float:
        """Of a step."""
        return self.compute + self.update + self.exposed + self.host

    def times(self, factor: float) -> "Seconds":
        """All of them, longer by a factor."""
        return Seconds(*(factor * seconds for seconds in self))

    def bound(self) -> tuple[str, str]:
        """What takes longest, and all of it in words."""
        parts = {
            "communication": self.exposed,
            "update": self.update,
            "offload": self.host,
            "compute" if self.products >= self.traffic else "memory bandwidth": self.compute,
        }
        what = max(parts, key=lambda name: parts[name])
        if what == "communication" and self.latency > 0.5 * self.sent:
            what = "latency"
        said = [f"compute {_words(self.compute)}", f"update {_words(self.update)}"]
        if self.sent:
            hidden = self.sent - self.exposed
            under = f" ({_words(hidden)} of it hidden)" if hidden > 0.01 * self.sent else ""
            said.append(f"wire {_words(self.sent)}{under}")
        if self.host:
            said.append(f"host memory {_words(self.host)}")
        return what, ", ".join(said)


def _words(seconds: float) -> str:
    """A time with its unit."""
    return microseconds(1e6 * seconds)


def step_seconds(sizes: Sizes, base: Guess, s: Setting, scale: float = 1.0) -> Seconds:
    """Seconds of a step.

    Args:
        sizes: The arrays.
        base: A guess of one microbatch.
        s: The setting.
        scale: How much longer compute takes than at the chip's peak, if compilers told.
    """
    products, traffic = (s.microbatches * x for x in _compute(base, s.chip))
    both = scale * _together(products, traffic, s.chip)
    split = s.split_over if s.stage else 1
    update = _update_bytes(sizes, split, s) / s.chip.memory_bytes_per_s
    sent, latency, early = _sent(sizes, s)
    hidden = 0.0
    if s.chip.platform != "cpu":
        hidden = min(early, _HIDES * both / (1 if s.stage == 3 else s.microbatches))
    host = 0.0
    if s.offload:
        host = 2 * held(sizes.opt_state, split) / s.chip.host.bytes_per_s
    return Seconds(products, traffic, update, sent, sent - hidden, latency, host, both)


def scale_of(sizes: Sizes, base: Guess, found: Probe, chip: Chip) -> float | None:
    """How much longer the compute of a probe takes than a guess says; `None` if it has no time."""
    if found.compute_us is None:
        return None
    state = held(sizes.opt_state, found.devices if found.stage else 1)
    update = (3.0 * sizes.param_bytes + 2.0 * state) / chip.memory_bytes_per_s
    each = max(0.0, 1e-6 * found.compute_us - update) / found.microbatches
    return each / max(_together(*_compute(base, chip), chip), 1e-12)


def _compute(base: Guess, chip: Chip) -> tuple[float, float]:
    """Seconds of a microbatch's products at the chip's peaks, and of its traffic."""
    wide = base.flops - base.narrow
    products = wide / chip.flops["f32"] + base.narrow / chip.flops["bf16"]
    return products, base.bytes_moved / chip.memory_bytes_per_s


def _together(products: float, traffic: float, chip: Chip) -> float:
    """Compute: on an accelerator products run beside traffic, most of which fusions avoid."""
    return products + traffic if chip.platform == "cpu" else max(products, _UNFUSED * traffic)


def _update_bytes(sizes: Sizes, split: int, s: Setting) -> float:
    """Parameters, gradients and state, each read, and all but gradients written."""
    params, state = held(sizes.params, split), held(sizes.opt_state, split)
    adds = 0 if s.microbatches == 1 else 3.0 * sum(x.bytes for x in sizes.grads(2))
    rounds = _ROUNDING_PASSES[s.wire] * 4.0 * sizes.numbers
    return 3.0 * params + 2.0 * state + adds * s.microbatches + rounds


def _sent(sizes: Sizes, s: Setting) -> tuple[float, float, float]:
    """Seconds on the wire, those of latency, and those that can travel under the backward pass."""
    if s.devices == 1:
        return 0.0, 0.0, 0.0
    grads = float(sizes.param_bytes)  # sent in the dtype of the parameter, also when accumulated
    wire = sum(_on_wire(x, s.wire) for x in sizes.params)
    params = sizes.param_bytes
    if s.compute_dtype is not None:
        params = sizes.numbers * np.dtype(s.compute_dtype).itemsize
    leaves = len(sizes.params)
    each = leaves if s.stage else max(1, round(wire / (25 * 2**20)))
    k = s.microbatches

    def time(kind: str, size: float, times: int) -> tuple[float, float]:
        spent, idle = _seconds(kind, size, s, each), _seconds(kind, 0.0, s, each)
        return times * spent, times * idle

    if s.stage == 0 and s.hierarchical and s.chip.outer is not None and s.nodes > 1:
        total, idle = (_two_level(x, y, s) for x, y in ((grads, wire), (0.0, 0.0)))
        return total, idle, total
    if s.stage == 0:
        total, idle = time("all-reduce", wire, 1)
        return total, idle, total
    scatter = time("reduce-scatter", wire, 1 if s.stage == 1 or k == 1 else k)
    gather = time("all-gather", params, 2 * k if s.stage == 3 else 1)
    early = scatter[0] + (gather[0] if s.stage == 3 else 0.0)
    return scatter[0] + gather[0], scatter[1] + gather[1], early


def _on_wire(x: Array, wire: str) -> float:
    """Bytes sent of a gradient: narrow with its scales, or factors of rank 4 where those pay."""
    size = math.prod(x.shape)
    if wire == "power_sgd":
        rows, columns = size // max(1, x.shape[-1] if x.shape else 1), x.shape[-1] if x.shape else 1
        factors = min(POWER_RANK, rows, columns) * (rows + columns)
        small = len(x.shape) >= 2 and size >= MIN_RATE * factors
        return 4.0 * factors if small else float(x.bytes)
    return size * min(x.itemsize, {"exact": 8.0, "bfloat16": 2.0, "int8": 1.02}[wire])


def _two_level(grads: float, wire: float, s: Setting) -> float:
    """Seconds of a mean within nodes, as it is, and between them, narrow."""
    assert s.chip.outer is not None
    within, calls = s.devices // s.nodes, max(1, round(grads / (25 * 2**20)))
    return collective_seconds(
        "all-reduce", grads, within, s.chip.inner, calls=calls
    ) + collective_seconds("all-reduce", wire / within, s.nodes, s.chip.outer, calls=calls)


def _seconds(kind: str, size: float, s: Setting, calls: int) -> float:
    chip = s.chip
    if s.nodes == 1 or chip.outer is None:
        return collective_seconds(kind, size, s.devices, chip.inner, calls=calls)
    if s.split_over == s.devices:
        return collective_seconds(
            kind, size, s.devices, chip.inner, outer=chip.outer, nodes=s.nodes, calls=calls
        )
    within = collective_seconds(kind, size, s.split_over, chip.inner, calls=calls)
    if kind == "all-gather":  # each node has all parts
        return within
    part = size / s.split_over
    return within + collective_seconds("all-reduce", part, s.nodes, chip.outer, calls=calls)
