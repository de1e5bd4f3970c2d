"""Arrays joined into one flat row to travel together, and taken apart again.

    leaves [*shape], ...  --join_leaves-->  row [n]  --take_apart-->  leaves [*shape], ...

Nothing is cast or sent; which leaves go together is decided by `buckets`.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

_MOST_INDICES = 2**31 - 1  # that an int32 counts


def join_leaves(leaves: Sequence[jax.Array]) -> jax.Array:
    """One row of all entries, leaf by leaf; a single leaf is not copied."""
    rows = [leaf.ravel() for leaf in leaves]
    if len(rows) == 1:
        return rows[0]
    if sum(row.size for row in rows) > _MOST_INDICES or all(leaf.ndim < 2 for leaf in leaves):
        return jnp.concatenate(rows)
    return jax.lax.platform_dependent(*rows, cpu=_one_by_one, default=_at_once)


def _at_once(*rows: jax.Array) -> jax.Array:
    return jnp.concatenate(rows)


def _one_by_one(*rows: jax.Array) -> jax.Array:
    """The same, each row written into its place.

    XLA:CPU makes of a concatenation of matrices a loop that looks for each entry's matrix, row and
    column, and does so again for whoever reads the result: 200 to 350 ms for four matrices of 40 MB
    in all, and 600 where they were then rounded to int8. This way 19 ms, and 68.
    """
    dtype, start = jnp.result_type(*rows), rows[0].size
    whole = jnp.pad(rows[0].astype(dtype), (0, sum(row.size for row in rows[1:])))
    for row in rows[1:]:
        whole = jax.lax.dynamic_update_slice(whole, row.astype(dtype), (start,))
        start += row.size
    return whole


def take_apart(row: jax.Array, like: Sequence[Any]) -> list[jax.Array]:
    """Arrays of the shapes of `like`, read one after the other; what the row has more is left."""
    found, start = [], 0
    for leaf in like:
        end = start + leaf.size
        found.append(row[start:end].reshape(leaf.shape))
        start = end
    return found


def buckets(
    kinds: Mapping[int, Hashable],
    sizes: Sequence[int],
    limit: int | None,
    alone_above: float = math.inf,
) -> list[list[int]]:
    """Groups numbered leaves of one kind, in order, until a group's sizes reach the limit.

    Args:
        kinds: The kind (a dtype) of each leaf that is to be grouped, by its number.
        sizes: The size of every leaf; one larger than the limit is a group of its own.
        limit: The largest sum of sizes; `None` leaves each leaf alone.
        alone_above: A size above which a leaf is a group of its own.
    """
    groups: list[list[int]] = []
    last: dict[Hashable, tuple[list[int], int]] = {}  # of each kind, the group still to be filled
    for i, kind in kinds.items():
        if sizes[i] > alone_above:
            groups.append([i])
            continue
        group, filled = last.get(kind, ([], 0))
        if not group or filled + sizes[i] > (limit or 0):
            group, filled = [], 0
            groups.append(group)
        group.append(i)
        last[kind] = group, filled + sizes[i]
    return groups
