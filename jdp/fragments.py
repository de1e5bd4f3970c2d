"""Fragments: the leaves of a tree dealt out, so that each part can be treated at its own time.

    tree  --deal_out-->  the fragment of each leaf  --choose-->  the tree of one fragment, the
                         others masked as Optax masks them  --merge-->  back in its place

Only trees are taken apart here; leaves stay as they are.
"""

from typing import Any

import jax
import optax


def deal_out(tree: Any, fragments: int, caller: str) -> list[int]:
    """The fragment of each leaf: the largest leaf first, each to the fragment of fewest elements.

    No fragment is larger than the mean of all by more than the largest leaf.

    Raises:
        ValueError: If there are more fragments than leaves.
    """
    sizes = [leaf.size for leaf in jax.tree.leaves(tree)]
    if fragments > max(len(sizes), 1):
        raise ValueError(
            f"{caller} got fragments={fragments}, but the parameters are {len(sizes)} leaves, "
            "which are not cut: some fragments would be empty. Use at most as many fragments as "
            "leaves; layers stacked for a scan are one leaf."
        )
    filled, owners = [0] * fragments, {}
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = min(range(fragments), key=lambda p: filled[p])
        filled[owners[i]] += sizes[i]
    return [owners[i] for i in range(len(sizes))]


def choose(tree: Any, owners: list[int], p: int) -> Any:
    """The tree with one fragment's leaves; others are masked, as Optax masks them."""
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, owners, strict=True)
    return treedef.unflatten([x if owner == p else optax.MaskedNode() for x, owner in pairs])


def merge(tree: Any, part: Any, owners: list[int], p: int) -> Any:
    """The tree with one fragment's leaves replaced."""
    leaves, treedef = jax.tree.flatten(tree)
    new = iter(jax.tree.leaves(part))
    pairs = zip(leaves, owners, strict=True)
    return treedef.unflatten([next(new) if owner == p else x for x, owner in pairs])


def put_state(states: tuple[Any, ...], p: int, state: Any) -> tuple[Any, ...]:
    """The states of all fragments with that of one replaced."""
    return (*states[:p], state, *states[p + 1 :])
