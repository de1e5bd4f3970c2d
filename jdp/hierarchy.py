"""The mean over nodes of several devices each, as an optax transformation.

    PerReplica [M * D, *shape]  --hierarchical-->  array [*shape], the same bits on every device

With D devices a node, the slow wires between nodes carry 1/D of what an all-reduce over all
devices sends there, and they alone may carry it narrowed. It stands where `jdp.all_reduce` would,
on a mesh such as `jdp.make_mesh(("node", "device"))`. What a node is, the mesh says; how it is
done, device by device, is in `jdp.nodes`.
"""

from typing import Any

import jax
import optax

from jdp import collectives
from jdp.feedback import compressed
from jdp.mesh import AxisNames
from jdp.nodes import Nodes, means_and_sent, plan
from jdp.quantize import BLOCK, is_narrow
from jdp.reduce import average_over, joins_leaves
from jdp.replica import take_per_replica


def hierarchical(
    within: AxisNames = "device",
    across: AxisNames = "node",
    *,
    wire_dtype: Any = None,
    across_wire_dtype: Any = None,
    block: int = BLOCK,
    error_feedback: bool = False,
    bucket_bytes: int = collectives.BUCKET_BYTES,
) -> optax.GradientTransformation:
    """Averages per-replica gradients over nodes of D devices each, sending little across nodes.

    With M nodes of D devices, device (n, d) holding g_{n,d}, every device ends with

        g = (1/M) * sum_n  a_n,    a_n = (1/D) * sum_d g_{n,d}

    where a_n is made by a reduce-scatter within node n, the parts of it are averaged across the
    nodes, and the means are gathered within the node: what `jdp.all_reduce` computes, its sums
    taken in another order.

    Guarantees:
        - The result is the same bits on every device, in float32 or wider.
        - Of P bytes of gradient a device sends 2(D-1)/D * P within its node and 2(M-1)/M * P/D
          across: together what one all-reduce over M * D devices would send, but for padding of
          less than D elements to each joined buffer.
        - Nothing but the parts of P/D bytes crosses nodes.
        - With `wire_dtype` and `across_wire_dtype` `None` nothing is cast.
        - With `error_feedback` both roundings across nodes are made up for in the next step, by
          the device that made them; see `jdp.feedback.compressed`.

    | mesh | what is done |
    | --- | --- |
    | one node | `jdp.all_reduce(within, wire_dtype=wire_dtype)`: nothing crosses, nor is narrowed |
    | nodes of one device | `jdp.all_reduce(across, wire_dtype=across_wire_dtype)` |
    | more data axes than these | the result is a `PerReplica` along the others |
    | an axis of yours ("model") | right, but parameters split over it may be gathered over it |

    To split the optimizer state as well, put it before a ZeRO stage: `optax.chain(
    jdp.hierarchical(), jdp.zero1(optax.adamw(3e-4)))` splits it over all devices. A stage that
    splits within the node, `jdp.zero1(..., axis="device")`, reduces in these three steps by itself,
    gathering parameters instead of gradients.

    Args:
        within: Axis, or axes, of the devices of a node, which fast wires connect.
        across: Axis, or axes, of the nodes.
        wire_dtype: Dtype sent between devices, see `jdp.all_reduce`; `None` sends each leaf as it
            is.
        across_wire_dtype: Dtype sent across nodes, where that is to be another one.
        block: Values that share a scale, for dtypes of 8 bits; 4 bytes each.
        error_feedback: Keep what is lost across nodes and add it to the next gradient. A float32
            for each parameter on each device, of which 1/D is ever used.
        bucket_bytes: Largest size of a joined buffer, by default 25 MiB. Joined are small leaves
            and those that no dim of which D divides; with narrow dtypes within a node, and between
            CPU processes, all of them.

    Returns:
        A transformation from `PerReplica` gradients, leaves of shape `[M * D, *param.shape]`, to
        gradients of the parameters' shapes; stateless, or with `error_feedback` of state
        `CompressedState`, and then of gradients that differ along these axes alone.

    Raises:
        ValueError: If an axis is named twice or the gradients do not differ along it, a gradient
            is already reduced, or another argument cannot be meant.

    Example:
        >>> mesh = jdp.make_mesh(("node", "device"), (2, 4))
        >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> params, batch = {"w": jnp.ones(3)}, jnp.ones((16, 3))
        >>> _, grads = jdp.value_and_grad(loss_fn, mesh)(params, batch)
        >>> tx = optax.chain(jdp.hierarchical(across_wire_dtype=jnp.bfloat16), optax.sgd(1.0))
        >>> tx.update(grads, tx.init(params))[0]["w"]
        Array([-6., -6., -6.], dtype=float32)

    References:
        Jia et al., Highly Scalable Deep Learning Training System with Mixed-Precision: Training
        ImageNet in Four Minutes, 2018. Cho et al., BlueConnect: Decomposing All-Reduce for Deep
        Learning on Heterogeneous Network Hierarchy, 2019.
    """
    nodes = plan(within, across, wire_dtype, across_wire_dtype, block, bucket_bytes)
    if error_feedback:
        return _with_feedback(nodes)

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        values, axes, mesh = take_per_replica(updates, "jdp.hierarchical")
        if not axes:  # an empty tree
            return updates, state
        _check_found(nodes, axes)
        here = nodes._replace(join_all=joins_leaves(mesh))

        def means_of(leaves: list[jax.Array]) -> list[jax.Array]:
            return means_and_sent(leaves, here)[0]

        return average_over(nodes.axes, means_of, updates, values, axes, mesh), state

    return optax.GradientTransformation(init, update)


def _check_found(nodes: Nodes, axes: tuple[str, ...]) -> None:
    if missing := [name for name in nodes.axes if name not in axes]:
        raise ValueError(
            f"jdp.hierarchical needs gradients that differ along {nodes.axes}, but these differ "
            f"along {axes}, not along {missing[0]!r}: there are no nodes to tell apart. Make the "
            'mesh with jdp.make_mesh(("node", "device")), which groups devices by slice or '
            "process, name its axes as within and across, or use jdp.all_reduce()."
        )


def _with_feedback(nodes: Nodes) -> optax.GradientTransformation:
    """The same with residuals of what is lost across nodes."""
    inside, outside = nodes.inside.wire_dtype, nodes.outside.wire_dtype
    if outside is None or not is_narrow(outside) or (inside is not None and is_narrow(inside)):
        name = lambda dtype: dtype if dtype is None else dtype.name  # noqa: E731
        raise ValueError(
            f"jdp.hierarchical(wire_dtype={name(inside)}, across_wire_dtype={name(outside)}, "
            "error_feedback=True): what is lost across nodes is made up for, and nothing else is. "
            "Give a narrow across_wire_dtype, such as jnp.int8, and leave wire_dtype out."
        )

    def exchange(values: list[jax.Array], memory: Any, axes: tuple[str, ...]) -> Any:
        _check_found(nodes, axes)
        return *means_and_sent(values, nodes._replace(join_all=True)), memory

    return compressed("jdp.hierarchical", exchange, axis=nodes.axes)
