"""Keeps emulated devices from deadlock: bounds how many programs are under way on them.

XLA on CPU runs at most 32 computations at a time. With more than that dispatched, one device can
wait in a collective for another whose turn does not come, for ever (seen on jax 0.10.2 with more
than 28 steps under way, never with fewer). Real accelerators, and one device, need no bound.

In: something a program has just returned. Out: nothing, but it may wait for an earlier one.
"""

from collections import deque

import jax
from jax.core import Tracer
from jax.sharding import Mesh

# Of the process, not of one step: the limit is the backend's, whoever dispatches.
_running: deque[jax.Array] = deque()
PROGRAMS_AHEAD = 8


def is_emulated(mesh: Mesh) -> bool:
    """Whether the mesh consists of several CPU devices."""
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def keep_pace(result: jax.Array) -> None:
    """Notes a program that was dispatched; waits for the one dispatched eight programs before."""
    if isinstance(result, Tracer):
        return
    _running.append(result)
    if len(_running) > PROGRAMS_AHEAD:
        _running.popleft().block_until_ready()
