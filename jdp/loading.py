"""What loading costs a loop: its speed, the share of the time waited for it, and when to say so."""

from __future__ import annotations

from typing import NamedTuple

_WAITED_SECONDS, _WAITED_SHARE = 5.0, 0.1  # waiting beyond both is worth a sentence


class Pace(NamedTuple):
    """How fast a `Batches` loads, and how long its consumer has waited for it.

    Attributes:
        loaded: Batches loaded so far, without the first of each loop, which starts the workers.
        load_seconds: Spent on them reading, stacking and placing; with workers, waiting for them.
        wait_seconds: Spent by the consumer waiting for batches, without the first of each loop.
        total_seconds: From the first batch taken to the last.
        batch: Rows of a global batch.
    """

    loaded: int
    load_seconds: float
    wait_seconds: float
    total_seconds: float
    batch: int

    @property
    def examples_per_second(self) -> float:
        """Rows of the global batch that the loader alone would give a second; NaN before any."""
        return self.loaded * self.batch / self.load_seconds if self.load_seconds else float("nan")

    @property
    def waiting(self) -> float:
        """Share of the time that the consumer waited, 0 to 1; 0 before any."""
        return self.wait_seconds / self.total_seconds if self.total_seconds else 0.0

    def complaint(self) -> str | None:
        """A sentence if the loop has waited over 5 s and over a tenth of its time, else None."""
        if self.wait_seconds <= _WAITED_SECONDS or self.waiting <= _WAITED_SHARE:
            return None
        return (
            f"jdp.Batches: training waited {self.wait_seconds:.1f} of {self.total_seconds:.1f} s "
            f"({self.waiting:.0%}) for data. The loader gives {self.examples_per_second:.0f} "
            f"examples a second. Give it workers= or threads=, or a cheaper transform."
        )
