"""Arrays joined into one flat row to travel together, and taken apart again.

    leaves [*shape], ...  --join_leaves-->  row [n]  --take_apart-->  leaves [*shape], ...

Nothing is cast or sent; which leaves go together is decided by `buckets`.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def join_leaves(leaves: Sequence[jax.Array]) -> jax.Array:
    """One row of all entries, leaf by leaf; a single leaf is not copied."""
    rows = [leaf.ravel() for leaf in leaves]
    return jnp.concatenate(rows) if len(rows) > 1 else rows[0]


def take_apart(row: jax.Array, like: Sequence[Any]) -> list[jax.Array]:
    """Arrays of the shapes of `like`, read one after the other; what the row has more is left."""
    found, start = [], 0
    for leaf in like:
        end = start + leaf.size
        found.append(row[start:end].reshape(leaf.shape))
        start = end
    return found


def buckets(
    kinds: Mapping[int, Hashable], sizes: Sequence[int], limit: int | None
) -> list[list[int]]:
    """Groups numbered leaves of one kind, in order, until a group's sizes reach the limit.

    Args:
        kinds: The kind (a dtype) of each leaf that is to be grouped, by its number.
        sizes: The size of every leaf; one larger than the limit is a group of its own.
        limit: The largest sum of sizes; `None` leaves each leaf alone.
    """
    groups: list[list[int]] = []
    last: dict[Hashable, tuple[list[int], int]] = {}  # of each kind, the group still to be filled
    for i, kind in kinds.items():
        group, filled = last.get(kind, ([], 0))
        if not group or filled + sizes[i] > (limit or 0):
            group, filled = [], 0
            groups.append(group)
        group.append(i)
        last[kind] = group, filled + sizes[i]
    return groups
