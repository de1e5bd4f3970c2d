"""A state moved into the place of another: another ZeRO stage, mesh, or number of devices.

    state (as it lies now, or as it was read back)  --restage-->  the same values, as `like` lies

Values have one logical shape, however they are stored; this module matches the leaves of the two
states by that, one by one, and refuses what does not match. It computes nothing and knows no file
format.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jdp.padded import put, view
from jdp.replica import PerReplica, is_per_replica, is_stored
from jdp.rows import agreed


def restage(state: Any, like: Any) -> Any:
    """Gives a state the placement of another one, for another ZeRO stage or other devices.

    Leaf by leaf in their order, with equal logical shapes and dtypes; wrappers without values of
    their own (a ZeRO stage, `jdp.all_reduce`) need not be the same.

    | kept for each replica (`PerReplica`) | becomes |
    | --- | --- |
    | and kept so, for as many replicas | the same |
    | and kept so, for another number of replicas | their mean, for each of the new ones |
    | and kept split by `like` (sums of `jdp.multi_steps`) | their mean |

    The mean is what such values stand for: they are averaged over replicas in the end.

    Guarantees:
        - Values are the same bits, but for means over replicas; the old state stays valid.
        - No device holds more than its part of what `like` splits.

    Args:
        state: A `TrainState` or any pytree: arrays, or NumPy arrays of logical shapes.
        like: What it is to lie like, as of `jdp.init_state(params, tx, mesh)`; arrays, or shapes
            with shardings.

    Returns:
        The values of `state` in the structure of `like`.

    Raises:
        ValueError: If the two do not hold the same leaves, naming the first that differs.

    Example:
        >>> mesh, params = jdp.make_mesh(), {"w": jnp.ones((64, 8))}
        >>> old = jdp.init_state(params, optax.chain(jdp.all_reduce(), optax.adam(0.1)), mesh)
        >>> tx = jdp.zero3(optax.adam(0.1))
        >>> new = jdp.restage(old, jdp.init_state(params, tx, mesh))
        >>> new.params["w"].sharding.shard_shape((64, 8))
        (8, 8)
    """
    olds = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_stored)[0]
    news, _ = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_stored)
    treedef = jax.tree.structure(like, is_leaf=is_stored)
    for (old_path, old), (new_path, new) in zip(olds, news, strict=False):
        _check(old_path, old, new_path, new)
    if len(olds) != len(news):
        longer, name = (olds, "state") if len(olds) > len(news) else (news, "like")
        path = jax.tree_util.keystr(longer[min(len(olds), len(news))][0])
        raise ValueError(
            f"jdp.restage: the state has {len(olds)} leaves and `like` has {len(news)}; "
            f"{name}{path} has no counterpart. They belong to different optimizers or "
            "models: only the same transformation, under another ZeRO stage, can take it over."
        )
    pairs = zip(olds, news, strict=True)
    return treedef.unflatten([_move(old, new) for (_, old), (_, new) in pairs])


def _check(old_path: Any, old: Any, new_path: Any, new: Any) -> None:
    have, want = _kind(old), _kind(new)
    if have != want:
        raise ValueError(
            f"jdp.restage: state{jax.tree_util.keystr(old_path)} is {_say(have)}, but "
            f"like{jax.tree_util.keystr(new_path)}, which stands at its place, is {_say(want)}. "
            "The two belong to different optimizers or models, or a dtype was changed. Take over "
            "what is the same, state.params say, and make the rest anew with jdp.init_state."
        )


def _kind(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Logical shape and dtype; what replicas hold for themselves has that of one of them."""
    if is_per_replica(leaf):
        return tuple(leaf.shape[1:]), leaf.dtype
    return tuple(jnp.shape(leaf)), jnp.result_type(leaf)


def _say(kind: tuple[tuple[int, ...], Any]) -> str:
    return f"{kind[1]} of shape {kind[0]}"


def _move(old: Any, new: Any) -> Any:
    if is_per_replica(old) and not (is_per_replica(new) and old.shape == new.shape):
        mean = agreed(PerReplica(view(old.value), axes=old.axes, mesh=old.mesh))
        if not is_per_replica(new):
            return put(mean, new)
        whole = jnp.broadcast_to(mean, new.shape)
        return PerReplica(put(whole, new.value), axes=new.axes, mesh=new.mesh)
    if is_per_replica(old):
        return PerReplica(put(old.value, new.value), axes=new.axes, mesh=new.mesh)
    if is_per_replica(new):
        whole = jnp.broadcast_to(jnp.asarray(view(old)), new.shape)
        return PerReplica(put(whole, new.value), axes=new.axes, mesh=new.mesh)
    return put(old, new)
