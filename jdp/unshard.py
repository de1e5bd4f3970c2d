"""Parameters put together where they are used, and gradients reduced where they arise.

    source, slot  --whole-->  the parameter    (gathered from its parts, or the copy there is)
            slot  <---------  its gradient     (reduce-scattered or averaged in the backward pass)

What is differentiated is the slot: zeros of the shape that the reduced gradient will have, which
stand for it in the backward pass alone. With its slot beside it, a `Shard`, a parameter can go into
a scan over layers and be put together there by `gather_params`. Nothing here knows an optimizer.
"""

import functools
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from jdp import collectives
from jdp.lazy import GATHER
from jdp.padded import lengthen
from jdp.remat import READ, checkpoint_policy, refuse_gathers
from jdp.split import Part, on_user_axes

PARAMS = "jdp: parameters"
looking: ContextVar[bool] = ContextVar("looking", default=False)  # see `jdp.given.Split.look_at`


def gather_params(tree: Any) -> Any:
    """Puts the parameters of a layer together where they are used, in the loss function.

    Under `jdp.zero3` (and 2) the loss function is given whole parameters, gathered before it
    begins. With this line first in the body of a scan over layers, that layer's are gathered
    there instead, are freed after it, and their gradient is reduced in the backward pass of that
    layer. Anywhere else, and under any other stage or on one device, it changes nothing.

    Until then a parameter that is gathered so, and used in no other way, is no array but a node of
    the tree; it has a shape, and arithmetic with it is an error. Sizes that a loss needs must
    be counted outside of it, not by walking the leaves of `params`, which is refused.

    Args:
        tree: Parameters that came in with the `params` of the loss function, or a slice of them
            that `jax.lax.scan` has made.

    Returns:
        The same tree of whole arrays.

    Example:
        >>> def loss_fn(params, x):
        ...     def body(x, layer):
        ...         layer = jdp.gather_params(layer)
        ...         return jnp.tanh(x @ layer["w"]), None
        ...     return jnp.mean(jax.lax.scan(body, x, params["layers"])[0] ** 2)
        >>> params = {"layers": {"w": jnp.ones((4, 16, 16))}}
        >>> loss, _ = jdp.value_and_grad(loss_fn, jdp.make_mesh())(params, jnp.ones((8, 16)))
        >>> float(loss)
        1.0
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Shard):
            return checkpoint_name(whole(leaf.slot, leaf.source, leaf.before, leaf.how), PARAMS)
        return checkpoint_name(leaf, GATHER) if looking.get() else leaf

    return jax.tree.map(one, tree, is_leaf=is_shard)


class How(NamedTuple):
    """How a part becomes the whole, and a gradient is reduced; static."""

    axes: tuple[str, ...]  # that the parameter or its gradient is split over, or averaged over
    scatters: bool  # or is the gradient to be whole on every device
    dim: int  # counted from the end, so that a scan may take leading dims away
    part: Part
    gathers: bool
    compute_dtype: Any
    wire_dtype: Any
    slot_dtype: Any

    def spec(self, ndim: int) -> tuple[Any, ...]:
        """What the user's axes split, of the `ndim` dims that are left."""
        return self.part.spec[len(self.part.spec) - ndim :]


@jax.tree_util.register_pytree_node_class
class Shard:
    """A parameter that has not been put together yet; `gather_params` does it."""

    __slots__ = ("before", "how", "slot", "source")

    def __init__(self, slot: Any, source: Any, before: Any, how: How) -> None:
        self.slot = slot
        self.source = source
        self.before = before
        self.how = how

    def tree_flatten(self) -> tuple[Any, Any]:
        """Slot, source and what was added up before; how to put it together is static."""
        return (self.slot, self.source, self.before), self.how

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Shard":
        """The inverse of flattening."""
        return cls(*children, how=aux)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        shape = list(self.source.shape)
        if self.how.part.dim is not None:
            shape[self.how.dim] = self.how.part.size
        return tuple(shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the parameter."""
        return self.source.dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.source.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(
            f"This parameter of shape {self.shape} is split over the devices and not gathered yet. "
            "Put it together where it is used: layer = jdp.gather_params(layer)."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = (
        _refuse
    )
    __truediv__ = __rtruediv__ = __pow__ = __neg__ = __getitem__ = __jax_array__ = _refuse


def is_shard(leaf: Any) -> bool:
    """Whether a node of a pytree is a `Shard`; for `is_leaf`."""
    return isinstance(leaf, Shard)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def whole(slot: jax.Array, source: jax.Array, before: Any, how: How) -> jax.Array:
    """The whole parameter; its gradient and `before`, reduced over the replicas, go to the slot.

    Args:
        slot: Zeros of the shape and dtype that the reduced gradient shall have.
        source: The replica's part of the parameter, or its copy of the whole.
        before: The replica's gradients of earlier microbatches, whole; `None` if there are none.
        how: How all this is done.

    Returns:
        The parameter in the compute dtype. Scattered gradients are sums over the replicas, whole
        ones their mean.
    """
    del slot, before
    source = source.astype(how.compute_dtype or source.dtype)
    if not how.gathers:
        return checkpoint_name(source, READ)
    dim = source.ndim + how.dim
    if dim < 0 or source.shape[dim] * jax.lax.axis_size(how.axes) != how.part.stored:
        raise ValueError(
            f"jdp.gather_params was given a part of shape {source.shape} whose split dim, of "
            f"{how.part.size}, is gone or is another: only jax.lax.scan over leading dims may take "
            "a parameter apart before it is gathered. Under jax.vmap, gather it outside."
        )
    join = functools.partial(collectives.join, axis_name=how.axes, dim=dim, to="varying")
    return _cut(on_user_axes(join, how.spec(source.ndim))(source), how.part.size, dim)


def _forward(slot: Any, source: Any, before: Any, how: How) -> Any:
    return whole(slot, source, before, how), before


def _backward(how: How, before: Any, grad: jax.Array) -> Any:
    grad = grad if before is None else before + grad.astype(before.dtype)
    if not how.scatters:
        grad = grad.astype(how.slot_dtype)
        return collectives.mean(grad, how.axes, wire_dtype=how.wire_dtype), None, None
    dim = grad.ndim + how.dim
    grad = lengthen(grad, how.part.stored, dim)
    scatter = functools.partial(
        collectives.sum_scatter, axis_name=how.axes, dim=dim, wire_dtype=how.wire_dtype
    )
    part = on_user_axes(scatter, how.spec(grad.ndim))(grad)
    return part.astype(how.slot_dtype), None, None


whole.defvjp(_forward, _backward)


def layerwise(body: Callable[..., Any], remat: bool | str | Callable[..., Any] = False) -> Any:
    """Makes the body of a scan over layers gather its parameters and reduce their gradient itself.

    `jax.lax.scan(jdp.layerwise(body), x, layers)` is a scan in which a device holds, under
    `jdp.zero3`, one whole layer at a time: it is gathered before the layer is computed, freed
    after, and gathered again in the backward pass. There the layer's gradient is reduced, under
    the computation of the next, with `jdp.zero3`, `jdp.zero2` and `jdp.all_reduce_in_backward`.
    With other transformations and on one device nothing is changed but by `remat`.

    Guarantees:
        - Under `jdp.zero3` neither whole parameters nor whole gradients of more than one layer
          are kept. (A `gather_params` in a body without `jax.checkpoint` would keep all layers for
          the backward pass.)

    Args:
        body: `body(carry, layer)`, as `jax.lax.scan` takes it; parameters are gathered wherever
            they stand in `layer`.
        remat: What else to compute again in the backward pass, see `jdp.value_and_grad`.

    Returns:
        The body to be scanned.

    Example:
        >>> def loss_fn(params, x):
        ...     body = lambda x, layer: (jnp.tanh(x @ layer["w"]), None)
        ...     return jnp.mean(jax.lax.scan(jdp.layerwise(body), x, params["layers"])[0] ** 2)
        >>> params = {"layers": {"w": jnp.ones((4, 16, 16))}}
        >>> loss, _ = jdp.value_and_grad(loss_fn, jdp.make_mesh())(params, jnp.ones((8, 16)))
        >>> float(loss)
        1.0

    References:
        Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, 2023.
    """

    @functools.wraps(body)
    def gathering(carry: Any, layer: Any) -> Any:
        return body(carry, gather_params(layer))

    policy = refuse_gathers(checkpoint_policy(remat))
    return jax.checkpoint(gathering, policy=policy)


def _cut(x: jax.Array, length: int, dim: int) -> jax.Array:
    return x if x.shape[dim] == length else jax.lax.slice_in_dim(x, 0, length, axis=dim)
