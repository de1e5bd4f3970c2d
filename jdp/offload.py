"""Optimizer state in the host's memory, fetched for the update.

    between updates   host     state               device   params
    in an update      host     state  --fetch-->   device   state -> inner.update -> state
                      host     state  <--store--

In: any optax transformation. Out: the same one, its large state leaves placed in pinned host
memory. The values do not change by a bit, and the state is a pytree of the same structure: what
looks into it (ZeRO, checkpoints, `jdp.flush`) finds what it would without. Activations are not
touched here; the policies of `jax.checkpoint_policies` that offload do that.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

MIN_SIZE = 1024  # elements: a copy over PCIe costs about 10 us, in which 200 KB would go over it

_SPACES = {"pinned_host": jax.memory.Space.Host, "device": jax.memory.Space.Device}


def offload(
    inner: optax.GradientTransformation,
    memory_kind: str = "pinned_host",
    *,
    min_size: int = MIN_SIZE,
) -> optax.GradientTransformationExtraArgs:
    """Keeps a transformation's state in host memory between updates.

    With ZeRO write `offload(zero1(adamw(...)))`: then each device fetches and stores its own part
    only. (`zero1(offload(...))` gives the same program.) With an all-reduce, either place in the
    chain will do; the reduction keeps no state.

    Guarantees:
        - The same values, to the bit, as `inner` alone.
        - State that the step does not use rests in no device's memory; donated, it is stored where
          it was fetched from.
        - Nothing is compiled anew when the state comes back.

    | devices | the compiled step |
    | --- | --- |
    | GPU | fetches and stores leaf by leaf, during the update |
    | TPU | may fetch as early as there is room: what is saved lies between the steps |
    | CPU | has the host's memory only: placed and moved as elsewhere, but it saves nothing |

    Args:
        inner: Any transformation, `jdp.zero1(...)` and its like included.
        memory_kind: "pinned_host", or "device" to leave everything where it is.
        min_size: Leaves of fewer elements (counters, scales) stay on the device.

    Returns:
        The transformation; its state has the structure of the inner one's.

    Raises:
        ValueError: If a program cannot move arrays to that memory, or the devices have none of
            that kind, listing those they have.

    Example:
        >>> tx = optax.chain(jdp.all_reduce(), offload(optax.adam(1e-3)))
        >>> state = jdp.init_state({"w": jnp.ones((64, 64))}, tx, jdp.make_mesh())
        >>> state.opt_state[1][0].mu["w"].sharding.memory_kind
        'pinned_host'

    References:
        Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, 2021.
    """
    if memory_kind not in _SPACES:
        raise ValueError(
            f"jdp.offload(memory_kind={memory_kind!r}): a program can move arrays to "
            f"{' or '.join(map(repr, _SPACES))} only; the devices here have "
            f"{_listed(_kinds(jax.local_devices()[0]))}. Leave memory_kind out for pinned host "
            "memory."
        )
    tx = optax.with_extra_args_support(inner)
    away, here = _SPACES[memory_kind], _SPACES["device"]

    def init(params: optax.Params) -> Any:
        _check_kind(memory_kind, params)
        return _move(tx.init(params), away, min_size)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        updates, state = tx.update(updates, _move(state, here, min_size), params, **extra)
        return updates, _move(state, away, min_size)

    return optax.GradientTransformationExtraArgs(init, update)


def _move(tree: Any, space: Any, min_size: int) -> Any:
    """Arrays of at least `min_size` elements in another memory of the devices they lie on."""

    def one(leaf: Any) -> Any:
        return jax.device_put(leaf, space) if jnp.size(leaf) >= min_size else leaf

    return jax.tree.map(one, tree)


def _check_kind(memory_kind: str, params: Any) -> None:
    """Refuses a memory that the devices of the parameters, or else this process's, do not have."""
    meshes = [getattr(getattr(p, "sharding", None), "mesh", None) for p in jax.tree.leaves(params)]
    mesh = next((mesh for mesh in meshes if isinstance(mesh, Mesh) and not mesh.empty), None)
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    kinds = _kinds(device)
    if kinds and memory_kind not in kinds:  # none at all: a description that leaves them out
        raise ValueError(
            f"jdp.offload(memory_kind={memory_kind!r}): {device.device_kind} devices have no such "
            f"memory; they have {_listed(kinds)}. Leave jdp.offload out on these devices, or split "
            "the state with jdp.zero1."
        )


def _kinds(device: Any) -> list[str]:
    """The kinds of memory a device can address."""
    return [memory.kind for memory in device.addressable_memories()]


def _listed(kinds: list[str]) -> str:
    return ", ".join(repr(kind) for kind in kinds) or "no memories that JAX lists"
