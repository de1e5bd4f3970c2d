"""Which example stands where: a permutation of (seed, epoch), for the positions asked for alone.

In: positions of an epoch. Out: ids of examples. Integer arithmetic; no generator, no state.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jdp.mesh import is_whole

_ROUNDS = 16  # 4 are pseudorandom on large sets (Luby and Rackoff); orders of 6 need 16


def shuffled(positions: Any, length: int, *, seed: int, epoch: int) -> np.ndarray:
    """Returns which example stands at each position of an epoch.

    A permutation of 0 ... length - 1 for every (seed, epoch), computed for the positions asked for
    alone: a Feistel network on pairs of residues modulo a and b, where a * b is at least `length`
    and hardly more, walked until it falls below `length`. Integer arithmetic only, so it is the
    same on every machine and NumPy version, and costs no memory however large the dataset.

    Args:
        positions: Integers, 0 to `length - 1`, any shape.
        length: Examples in the dataset, 1 to 2**62.
        seed: 0 to 2**63 - 1.
        epoch: 0 to 2**63 - 1.

    Returns:
        int64 example ids, in the shape of `positions`.

    Raises:
        ValueError: If one of them is outside its bounds.

    Example:
        >>> shuffled(np.arange(6), 6, seed=0, epoch=0)
        array([2, 4, 0, 1, 3, 5])

    References:
        Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002 (both constructions).
    """
    positions = np.asarray(positions)
    _check(positions, length, seed, epoch)
    root = math.isqrt(length - 1) + 1
    a, b = np.uint64(root), np.uint64(-(-length // root))
    keys = _mix(np.arange(_ROUNDS, dtype=np.uint64) ^ _mix(_mix(seed) ^ np.uint64(epoch)))

    def once(x: np.ndarray) -> np.ndarray:
        left, right = x // b, x % b
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            left = (left + _mix(right ^ even) % a) % a
            right = (right + _mix(left ^ odd) % b) % b
        return left * b + right

    ids = once(positions.reshape(-1).astype(np.uint64))
    while (outside := ids >= length).any():
        ids[outside] = once(ids[outside])
    return ids.reshape(positions.shape).astype(np.int64)


def _check(positions: np.ndarray, length: int, seed: int, epoch: int) -> None:
    for name, value, least, most in (
        ("length", length, 1, 2**62),
        ("seed", seed, 0, 2**63 - 1),
        ("epoch", epoch, 0, 2**63 - 1),
        ("positions from", int(positions.min(initial=0)), 0, length - 1),
        ("positions to", int(positions.max(initial=0)), 0, length - 1),
    ):
        if not is_whole(value) or not least <= value <= most:
            raise ValueError(
                f"jdp.shuffled got {name} {value!r}; the order is one of {length!r} examples, and "
                f"this is to be a whole number from {least} to {most}. Give one."
            )


def _mix(x: Any) -> np.ndarray:
    """The finalizer of splitmix64; arrays, since NumPy's scalars warn where these wrap round."""
    x = np.atleast_1d(np.asarray(x, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
