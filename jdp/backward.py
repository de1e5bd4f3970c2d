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
from jdp.mesh import AxisNames, ambient_mesh, axis_size, data_axes
from jdp.replica import is_gradient, is_reduced, take_reduced, widen
from jdp.split import MIN_SIZE, Part, Placement, ZeroState, abstract, spec_of_user

_NAME = "jdp.all_reduce_in_backward"


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

    def init(params: Any) -> Any:
        mesh = ambient_mesh(params)
        if mesh is None:
            raise ValueError(
                f"{_NAME} must know the mesh, but the parameters lie on none. Use jdp.init_state, "
                "place the parameters with jdp.replicate(params, mesh) first, or call init within "
                "`with jax.set_mesh(mesh):`."
            )
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
            min_size=min_size if axis_size(mesh, axes) > 1 else 2**62,
            in_backward=True,
            once=True,
            wire_dtype=wire_dtype,
        )
        return ZeroState(optax.EmptyState(), placement)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        leaves = jax.tree.leaves(updates, is_leaf=is_gradient)
        if not all(map(is_reduced, leaves)):
            raise ValueError(
                f"{_NAME} was given gradients that were not reduced in the backward pass. In a "
                "step of your own pass placement=state.placement of this transformation's state "
                "to the function that jdp.value_and_grad makes, and put nothing before it; or use "
                "jdp.all_reduce."
            )
        return widen(take_reduced(updates)), state

    return optax.GradientTransformation(init, update)
