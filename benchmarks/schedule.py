"""How much of its communication a compiled program hides, for devices along one axis.

See `jdp.schedule`, which walks the program. Collectives whose time the compiler does not tell are
taken to be rings over the links of the chip (`jdp.hardware`), within one node.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jdp.costs import collective_seconds
from jdp.groups import Groups
from jdp.hardware import find_chip
from jdp.schedule import COST_MODEL, walk

__all__ = ["COST_MODEL", "Sent", "Times", "read"]


class Sent(NamedTuple):
    """A collective: its kind, the bytes of the whole arrays, microseconds, and those exposed."""

    kind: str
    bytes: int
    us: float
    exposed_us: float


class Times(NamedTuple):
    """Microseconds of a program's compute, and its collectives."""

    compute_us: float
    sent: list[Sent]

    @property
    def sent_us(self) -> float:
        """Microseconds that something is on the wire."""
        return sum(one.us for one in self.sent)

    @property
    def exposed_us(self) -> float:
        """Microseconds that compute waits for the wire."""
        return sum(one.exposed_us for one in self.sent)

    @property
    def hidden(self) -> float:
        """Share of the time of communication that is under compute."""
        return (self.sent_us - self.exposed_us) / self.sent_us


def read(text: str | None, devices: Sequence[Any]) -> Times:
    """Walks a compiled program.

    Args:
        text: `compiled.as_text()`, compiled with the options `COST_MODEL` of its platform.
        devices: Those it was compiled for.

    Returns:
        Its times.
    """
    chip = find_chip(devices[0].device_kind)

    def seconds(kind: str, size: int, group: int, _: Groups) -> float | None:
        return collective_seconds(kind, size, group, chip.inner) if chip else None

    walked = walk(text or "", Mesh(np.array(devices), ("data",)), seconds=seconds)
    sent = [Sent(x.kind, x.bytes, x.us or 0.0, x.exposed_us or 0.0) for x in walked.collectives]
    return Times(walked.compute_us or 0.0, sent)
