"""States of programs written for `jax.pmap`: a copy for each device becomes the one value.

    leaves [N, *shape], N equal copies  --from_replicated-->  leaves [*shape]

Copies are compared on the host, bit by bit. Nothing here runs a pmap.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def from_replicated(tree: Any) -> Any:
    """A pmap-era tree without its leading axis, once all its copies have been compared.

    Such programs, and their checkpoints, keep a leaf of shape [*shape] as N copies [N, *shape]. As
    a parameter that would train wherever shapes broadcast, N times as large.

    Guarantees:
        - The bits of each copy; one that differs in a bit is an error, so nothing is averaged or
          dropped unseen.

    Args:
        tree: Pytree of arrays [N, *shape], all of one N: what pmap returned, or NumPy. Of an array
            over several processes each looks at its own copies; `jdp.init_state` compares the rest.

    Returns:
        The tree as NumPy arrays (typed random keys stay such) of shapes [*shape].

    Raises:
        ValueError: If a leaf has no leading axis or one of another length, or copies differ.

    Example:
        >>> from_replicated({"w": jnp.ones((8, 3))})["w"].shape
        (3,)
    """
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    sizes = {jax.tree_util.keystr(path): np.shape(leaf)[:1] for path, leaf in found}
    if (() in sizes.values()) or len(set(sizes.values())) > 1:
        raise ValueError(
            "jdp.from_replicated takes leaves with a copy for each device along their first axis, "
            f"but these have the lengths {sizes}. Give what pmap was given or returned, and leave "
            "out what is not replicated."
        )
    return jax.tree_util.tree_map_with_path(_only, tree)


def _only(path: Any, leaf: Any) -> Any:
    """The one value that all copies are."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impl = jax.random.key_impl(leaf)
        data = _only(path, jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=impl)
    copies, name = _copies(leaf), jax.tree_util.keystr(path) or "the array"
    first = copies[0].tobytes()
    for number, copy in enumerate(copies):
        if copy.tobytes() != first:
            raise ValueError(
                f"jdp.from_replicated: copy {number} of {name} differs from copy 0, so there is no "
                "one value. Devices went apart (gradients or statistics that were not averaged), "
                "or it is meant to differ, as random keys of pmap are: leave those out and make "
                "new ones."
            )
    return copies[0]


def _copies(leaf: Any) -> list[np.ndarray]:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return [copy for shard in leaf.addressable_shards for copy in np.asarray(shard.data)]
    return list(np.asarray(leaf))
