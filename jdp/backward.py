"""The plain reduction, in the backward pass: each gradient is sent as soon as it exists.

    gradient of layer L  --all-reduce-->  mean      while the gradient of layer L-1 is computed

`jdp.all_reduce` sends what `jdp.value_and_grad` returns, which for a scan over layers, or over
microbatches, is there only when the loop has ended. This transformation asks for the reduction to
be done inside instead; what it is given is reduced already. It knows no optimizer.
"""

from typing import Any

import jax
import optax

from jdp import collectives
from jdp.mesh import AxisNames, data_axes, found_mesh
from jdp.replica import is_gradient, is_reduced, take_reduced, widen
from jdp.split import (
    MIN_SIZE,
    Part,
    Placement,
    ZeroState,
    abstract,
    check_min_size,
    spec_of_user,
)


def all_reduce_in_backward(
    axis: AxisNames | None = None, *, wire_dtype: Any = None, min_size: int = MIN_SIZE
) -> optax.GradientTransformation:
    """Averages gradients over the replicas inside the backward pass of the last microbatch.

    The result is that of `jdp.all_reduce`. Where `jax.lax.scan(jdp.layerwise(body), x, layers)`
    scans over layers, a layer's gradient is sent inside the backward loop, while that of the layer
    below is computed; every other gradient is sent as soon as it is there.

    | gradients arise in | sent by `all_reduce` | sent here |
    | --- | --- | --- |
    | unrolled layers | under the rest of the backward pass | the same |
    | a scan over layers, `jdp.layerwise` | after the loop, under nothing | layer by layer, in it |
    | k microbatches | after the last, under nothing | in the backward pass of the last |

    Guarantees:
        - Each gradient is sent once a step, summed over the replica's microbatches before, in
          float32: 2(N-1)/N of its bytes.
        - The same values as of `all_reduce` but for the order of the last addition.
        - Parameters that a loss gathers more than once (layers scanned over twice, layers in a
          loop) are reduced after the last use, not layer by layer.
        - With more than one microbatch the program holds the loss function twice, and scanned
          layers their gradients twice: the sums before, and what is reduced of them.

    Args:
        axis: The data axes to average over, all that the gradients differ along; `None` finds
            them, see `jdp.data_axes`.
        wire_dtype: float32, bfloat16 or float16, see `jdp.all_reduce`.
        min_size: Gradients of fewer elements are sent together at the end.

    Returns:
        A transformation whose init needs a mesh (see `jdp.init_state`). `jdp.train_step` sees it;
        in a step of one's own pass `placement=opt_state[0].placement` to `jdp.value_and_grad`'s
        function.

    Raises:
        ValueError: If there is no mesh, or the gradients were not reduced in the backward pass.

    Example:
        >>> tx, mesh = optax.chain(jdp.all_reduce_in_backward(), optax.sgd(1.0)), jdp.make_mesh()
        >>> step = jdp.train_step(lambda p, batch: jnp.mean(batch @ p["w"]), tx, mesh, microbatch=1)
        >>> state, _ = step(jdp.init_state({"w": jnp.ones(512)}, tx, mesh), jnp.ones((16, 512)))
        >>> float(state.params["w"][0])
        0.0

    References:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, 2020.
    """
    wire_dtype = collectives.check_wire_dtype(wire_dtype)
    return _asks_for(axis, min_size, once=True, wire_dtype=wire_dtype)


def all_reduce_in_order(axis: AxisNames | None = None) -> optax.GradientTransformation:
    """Averages gradients over microbatches and replicas in an order that no device count changes.

    The gradients of M microbatches are added up in a binary tree over their numbers, first on each
    device, then between devices:

        ((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7))

    (Where M is an odd number times a power of two, so many neighbours are first added up one by
    one.) It is for finding out whether two runs differ, and for resuming on another number of
    devices to the bit.

    Guarantees:
        - The sum has the same bits on 1, 2, 4, 8 ... devices if the gradients of the microbatches
          have: give `microbatch` to `jdp.train_step`, the same on each.
        - Whether they have is up to the compiler. On CPU (jax 0.10 and 0.12) they had for MLPs on
          1, 2, 4 and 8 devices, and for attention on 2, 4 and 8.
        - In programs for one device XLA makes x * (1 / y) of x / y where y is broadcast, as in the
          gradient of `jax.nn.softmax`, and rounds once more. A softmax that is written
          `e * (1 / jnp.sum(e, -1, keepdims=True))` had the same bits on one device as well. The
          optimizer is compiled there with other fused multiply-adds, too: plain SGD had the same
          bits, Adam had not.
        - Each of N devices sends 2(N-1)/N of the gradient's bytes, after the last microbatch, in
          log2(N) + 1 collectives, none of them combined or hidden.

    It costs an accumulator of the gradient's size in float32 for each doubling of a device's
    microbatches, and two buffers of that size while it sends. Weights of the loss must add up
    without rounding to be as reproducible (counts do).

    Args:
        axis: The data axes to average over, all that the gradients differ along; `None` finds
            them, see `jdp.data_axes`.

    Returns:
        A transformation as of `all_reduce_in_backward`. Under `jdp.zero2(..., reduce="in order")`
        gradients are summed in the same order and split.

    Raises:
        ValueError: As of `all_reduce_in_backward`, and if the number of devices is not a power of
            two.

    Example:
        >>> params, batch = {"w": jnp.ones(3)}, jnp.linspace(0, 1, 48).reshape(16, 3)
        >>> tx = optax.chain(jdp.all_reduce_in_order(), optax.sgd(1.0))
        >>> loss_fn = lambda p, batch: jnp.mean((batch @ p["w"]) ** 2)
        >>> def step(n):
        ...     mesh = jdp.make_mesh(num_devices=n)
        ...     step = jdp.train_step(loss_fn, tx, mesh, microbatch=1)
        ...     return step(jdp.init_state(params, tx, mesh), batch)[0].params["w"].tobytes()
        >>> step(2) == step(4)
        True

    References:
        Demmel and Nguyen, Fast Reproducible Floating-Point Summation, 2013 (which removes the
        dependence on order altogether, for more).
    """
    return _asks_for(axis, 0, ordered=True)


def _asks_for(axis: AxisNames | None, min_size: int, **how: Any) -> optax.GradientTransformation:
    """A transformation whose state asks `jdp.value_and_grad` for a reduction."""
    check_min_size("jdp.all_reduce_in_backward", min_size)
    name = "jdp.all_reduce_in_" + ("order" if "ordered" in how else "backward")

    def init(params: Any) -> Any:
        mesh = found_mesh(params, f"{name} must know the mesh")
        axes = data_axes(mesh, axis)
        leaves = jax.tree_util.tree_flatten_with_path(params)[0]
        specs = [spec_of_user(path, leaf, axes) for path, leaf in leaves]
        placement = Placement(
            stage=0,
            mesh=abstract(mesh),
            axes=axes,
            paths=tuple(jax.tree_util.keystr(path) for path, _ in leaves),
            shapes=tuple(tuple(leaf.shape) for _, leaf in leaves),
            parts=tuple(Part(None, 0, 0, spec) for spec in specs),
            min_size=min_size,
            in_backward=True,
            **how,
        )
        return ZeroState(optax.EmptyState(), placement)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        leaves = jax.tree.leaves(updates, is_leaf=is_gradient)
        if not all(map(is_reduced, leaves)):
            raise ValueError(
                f"{name} was given gradients that are not reduced yet. In a "
                "step of your own pass placement=state.placement of this transformation's state "
                "to the function that jdp.value_and_grad makes, and put nothing before it; or use "
                "jdp.all_reduce."
            )
        return widen(take_reduced(updates)), state

    return optax.GradientTransformation(init, update)
