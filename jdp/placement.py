"""Where the rows of a global batch lie: row r on replica r // (B / N), each process with its own.

In: a mesh and its data axes; host arrays with the rows of this process's replicas. Out: global
arrays. What the rows are, and who reads them, is not known here.

    replica 0 | replica 1 | ... | replica N - 1      rows [B / N] each
    process 0 ........... | process 1 .........      each gives those of `mine`
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.mesh import axis_size


class BatchPlacement(NamedTuple):
    """The replicas of a mesh as this process sees them.

    Attributes:
        sharding: Of a global batch: rows split over the data axes, the same on all other axes.
        axes: The data axes.
        num_replicas: Along the data axes.
        mine: Replicas on this process's devices, in mesh order.
        processes: All that have a device in the mesh.
    """

    sharding: NamedSharding
    axes: tuple[str, ...]
    num_replicas: int
    mine: tuple[int, ...]
    processes: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh, axes: tuple[str, ...], who: str = "jdp.feed") -> BatchPlacement:
        """Looks where the replicas lie; `who` asks, for the errors.

        Raises:
            ValueError: If this process has none, or the processes do not hold equally many.
        """
        sharding = NamedSharding(mesh, P(axes))
        number = axis_size(mesh, axes)
        held: dict[int, set[int]] = {}
        for device, index in sharding.devices_indices_map((number,)).items():
            held.setdefault(device.process_index, set()).add(index[0].start or 0)
        here = {device.process_index for device in sharding.addressable_devices}
        if not here:
            raise ValueError(
                f"{who}: no device of the mesh belongs to process {jax.process_index()}, they "
                f"are those of {sorted(held)}, so it has nothing to feed. Make the mesh of all "
                f"devices, or call {who} on those processes only."
            )
        sizes = [len(replicas) for replicas in held.values()]
        if sum(sizes) != number or len(set(sizes)) > 1:
            lie = ", ".join(f"process {p}: {sorted(r)}" for p, r in sorted(held.items()))
            raise ValueError(
                f"{who}: the {number} replicas along {axes} lie unevenly on the processes "
                f"({lie}), so their parts of a batch would overlap or differ in size. Order the "
                f"mesh so that each process holds as many replicas as any other, and no replica "
                f"has devices of two processes."
            )
        return cls(sharding, axes, number, tuple(sorted(held[here.pop()])), tuple(sorted(held)))

    def put(self, host: Any) -> Any:
        """Global arrays; `host` has the rows of this process's replicas."""
        return jax.tree.map(self._put_leaf, host)

    def _put_leaf(self, local: np.ndarray) -> jax.Array:
        rows = len(local) // len(self.mine)

        def on_device(index: Any) -> np.ndarray:
            start = self.mine.index((index[0].start or 0) // rows) * rows
            return local[start : start + rows]

        shape = (rows * self.num_replicas, *local.shape[1:])
        return jax.make_array_from_callback(shape, self.sharding, on_device, dtype=local.dtype)
