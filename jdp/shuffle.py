"""Which example stands where: a permutation of (seed, epoch), for the positions asked for alone.

In: positions of an epoch. Out: ids of examples. Integer arithmetic; no generator, no state.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_ROUNDS = 8  # of the Feistel network; 4 are pseudorandom (Luby and Rackoff), small sets need more


def shuffled(positions: Any, length: int, *, seed: int, epoch: int) -> np.ndarray:
    """Returns which example stands at each position of an epoch.

    A permutation of 0 ... length - 1 for every (seed, epoch), computed for the positions asked for
    alone: a Feistel network over the next even number of bits, walked until it falls below
    `length`. Integer arithmetic only, so it is the same on every machine and NumPy version, and
    costs no memory however large the dataset.

    Args:
        positions: Integers, 0 to `length - 1`, any shape.
        length: Examples in the dataset.
        seed: 0 to 2**63 - 1.
        epoch: 0 or more.

    Returns:
        int64 example ids, in the shape of `positions`.

    Example:
        >>> shuffled(np.arange(6), 6, seed=0, epoch=0)
        array([2, 5, 1, 4, 3, 0])

    References:
        Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002 (cycle walking).
    """
    half = np.uint64((max(length - 1, 1).bit_length() + 1) // 2)
    keys = _mix(np.arange(_ROUNDS, dtype=np.uint64) ^ _mix(_mix(seed) ^ np.uint64(epoch)))

    def once(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & ((np.uint64(1) << half) - np.uint64(1))
        for key in keys:
            mixed = _mix(right ^ key) >> (np.uint64(64) - half)
            left, right = right, left ^ mixed
        return (left << half) | right

    ids = once(np.asarray(positions, np.uint64))
    while (outside := ids >= length).any():
        ids = np.where(outside, once(ids), ids)
    return ids.reshape(np.shape(positions)).astype(np.int64)


def _mix(x: Any) -> np.ndarray:
    """The finalizer of splitmix64; arrays, since NumPy's scalars warn where these wrap round."""
    x = np.atleast_1d(np.asarray(x, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
