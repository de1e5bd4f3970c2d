"""What the loss function is given for parameters, and what becomes of its gradient.

    Whole   a copy that differs by replica; its gradient is the replica's own     [1, *shape]
    Split   ZeRO-2 and 3: the whole parameter, put together from the parts that the replicas hold
            (stage 3) or read from the copy (stage 2); in the backward pass its gradient is
            reduce-scattered at once, and only the replica's part of the sum is kept

For Split, what is differentiated is a slot: float32 zeros of the shape of a part, which stands
for it in the backward pass alone. With a slot beside it, a part can go into a scan over layers
and be put together there by `gather_params`. Nothing here knows an optimizer.
"""

import functools
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jdp import collectives
from jdp.lazy import GATHER, check_numbers, uses
from jdp.microbatch import Layout, vary
from jdp.padded import lengthen
from jdp.remat import READ, checkpoint_policy, refuse_gathers
from jdp.replica import wide
from jdp.split import Part, Placement, on_user_axes

PARAMS = "jdp: parameters"
_LEAF = "jdp: leaf "
_looking: ContextVar[bool] = ContextVar("_looking", default=False)  # see `Split.look_at`


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
            return checkpoint_name(_whole(leaf.slot, leaf.source, leaf.how), PARAMS)
        return checkpoint_name(leaf, GATHER) if _looking.get() else leaf

    return jax.tree.map(one, tree, is_leaf=is_shard)


class _How(NamedTuple):
    """How a part becomes the whole, and a gradient becomes a part; static."""

    split: tuple[str, ...]  # axes that the parameter is split over
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

    __slots__ = ("how", "slot", "source")

    def __init__(self, slot: Any, source: Any, how: _How) -> None:
        self.slot = slot
        self.source = source
        self.how = how

    def tree_flatten(self) -> tuple[Any, Any]:
        """Slot and source; how to put it together is static."""
        return (self.slot, self.source), self.how

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Shard":
        """The inverse of flattening."""
        return cls(*children, how=aux)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        shape = list(self.source.shape)
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _whole(slot: jax.Array, source: jax.Array, how: _How) -> jax.Array:
    """The whole parameter; its gradient is summed over the replicas and goes to the slot."""
    del slot
    source = source.astype(how.compute_dtype or source.dtype)
    if not how.gathers:
        return checkpoint_name(source, READ)
    dim = source.ndim + how.dim
    join = functools.partial(collectives.join, axis_name=how.split, dim=dim, to="varying")
    whole = on_user_axes(join, how.spec(source.ndim))(source)
    return _cut(whole, how.part.size, dim)


def _whole_forward(slot: Any, source: Any, how: _How) -> Any:
    return _whole(slot, source, how), None


def _whole_backward(how: _How, _: Any, grad: jax.Array) -> Any:
    dim = grad.ndim + how.dim
    grad = lengthen(grad, how.part.stored, dim)
    scatter = functools.partial(
        collectives.sum_scatter, axis_name=how.split, dim=dim, wire_dtype=how.wire_dtype
    )
    part = on_user_axes(scatter, how.spec(grad.ndim))(grad)
    return part.astype(how.slot_dtype), None


_whole.defvjp(_whole_forward, _whole_backward)


def layerwise(body: Callable[..., Any], remat: bool | str | Callable[..., Any] = False) -> Any:
    """Makes the body of a scan over layers gather its parameters itself, and again going back.

    `jax.lax.scan(jdp.layerwise(body), x, layers)` is a scan in which a device holds, under
    `jdp.zero3`, one whole layer at a time: it is gathered before the layer is computed, freed
    after, and gathered again in the backward pass, where its gradient is reduced (under
    `jdp.zero2` as well). Under other stages and on one device nothing is changed but by `remat`.

    Guarantees:
        - Neither whole parameters nor whole gradients of more than one layer are kept. (A
          `gather_params` in a body without `jax.checkpoint` would keep all layers for the
          backward pass.)

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


class Whole:
    """Parameters as they are: what is differentiated is the replica's own copy."""

    def __init__(self, params: Any, layout: Layout) -> None:
        self._params = params
        self.slots = vary(params, layout.axes)
        self.policy = None
        self.zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=wide(p)), params)

    def look_at(self, call: Callable[[Any], Any]) -> None:
        """Finds out how the loss function, which `call` calls, uses its parameters: no matter."""

    def give(self, slots: Any, rows: Any) -> Any:
        """The parameters for the loss function of these rows."""
        del rows
        return jax.tree.map(lambda p: checkpoint_name(p, PARAMS), slots)

    def weigh(self, weight: jax.Array) -> jax.Array:
        """What a microbatch's total is divided by while it is differentiated."""
        return _positive(weight)

    def close(self, grads: Any, scale: Any) -> Any:
        """The gradient from the sum over the replica's microbatches, shape [1, *shape]."""
        if not (isinstance(scale, float) and scale == 1):
            grads = jax.tree.map(lambda g: g.astype(wide(g)) * scale, grads)
        return jax.tree.map(lambda g, p: g.astype(p.dtype)[None], grads, self._params)


class Split:
    """Parameters, or their gradients, that the replicas share among them."""

    def __init__(
        self,
        stored: list[jax.Array],
        treedef: Any,
        placement: Placement,
        layout: Layout,
        compute_dtype: Any,
    ) -> None:
        self._treedef, self._placement, self._layout = treedef, placement, layout
        self._lazy: frozenset[int] = frozenset()
        self.policy: Callable[[Any], Any] | None = None
        self._sources = vary(stored, layout.axes)
        self._hows = [
            _How(
                placement.axes,
                (part.dim or 0) - leaf.ndim,
                part,
                placement.stage == 3,
                compute_dtype,
                placement.wire_dtype,
                # one gradient alone is rounded as an all-reduce rounds it; sums are float32
                leaf.dtype if layout.each == 1 else wide(leaf),
            )
            for leaf, part in zip(stored, placement.parts, strict=True)
        ]
        self.slots = [self._slot(i) for i in range(len(stored))]
        self.zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=wide(p)), self.slots)

    def _regather(self, policy: Any) -> Any:
        """A rematerialisation policy that also keeps no gathered parameter."""
        shapes = set()
        for source, part in zip(self._sources, self._placement.parts, strict=True):
            if part.dim is not None:
                before = source.shape[: part.dim], source.shape[part.dim + 1 :]
                # also what is left when scans over layers have taken leading dims away
                shapes |= {
                    (*before[0][i:], length, *before[1])
                    for length in (part.size, part.stored)
                    for i in range(part.dim + 1)
                }
        return refuse_gathers(policy, shapes)

    def _slot(self, i: int) -> jax.Array:
        """Zeros of the shape of a part; a parameter that is not split stands for itself."""
        source, part = self._sources[i], self._placement.parts[i]
        if part.dim is None:
            return source
        shape = list(source.shape)
        shape[part.dim] = part.stored // self._placement.count
        return vary(jnp.zeros(shape, self._hows[i].slot_dtype), self._layout.axes)

    def give(self, slots: list[jax.Array], rows: Any) -> Any:
        """The parameters for the loss function of these rows."""
        sources = self._sources
        if self._placement.stage == 3 and self._layout.each > 1:
            # bound to these rows, or the compiler would gather once, before the loop over
            # microbatches, and keep all of it
            sources, _ = jax.lax.optimization_barrier((sources, rows))
        return self._nodes(slots, sources)

    def _nodes(self, slots: list[jax.Array], sources: list[jax.Array]) -> Any:
        leaves = [
            Shard(slot, source, self._hows[i])
            if i in self._lazy
            else checkpoint_name(self._put_together(i, slot, source), PARAMS)
            for i, (slot, source) in enumerate(zip(slots, sources, strict=True))
        ]
        return self._treedef.unflatten(leaves)

    def _put_together(self, i: int, slot: jax.Array, source: jax.Array) -> jax.Array:
        if self._placement.parts[i].dim is None:
            return slot
        return _whole(slot, source, self._hows[i])

    def look_at(self, call: Callable[[Any], Any]) -> None:
        """Finds those leaves that the loss function, which `call` calls, puts together itself.

        Where it does so only in functions under `jax.checkpoint`, they are gathered again in the
        backward pass anyhow, and what else is kept is left as the user has it.
        """
        program, (gathered, otherwise, bare) = self._uses(call)
        self._lazy = frozenset(gathered - otherwise)
        if self._lazy:
            nodes = functools.partial(self._nodes, sources=self._sources)
            check_numbers(program, jax.make_jaxpr(lambda slots: call(nodes(slots)))(self.slots))
        if self._placement.stage == 3 and self._placement.regather:
            checkpointed = bool(self._lazy) and not self._lazy & bare
            self.policy = None if checkpointed else self._regather

    def _uses(self, call: Callable[[Any], Any]) -> tuple[Any, tuple[set[int], ...]]:
        """The loss function's program with whole parameters, and what it does with them."""
        split = [i for i, part in enumerate(self._placement.parts) if part.dim is not None]

        def marked(slots: list[jax.Array]) -> Any:
            leaves = [
                checkpoint_name(self._put_together(i, slot, source), f"{_LEAF}{i}")
                for i, (slot, source) in enumerate(zip(slots, self._sources, strict=True))
            ]
            return jax.tree.leaves(call(self._treedef.unflatten(leaves)))

        token = _looking.set(True)
        try:
            program = jax.make_jaxpr(marked)(self.slots)
        finally:
            _looking.reset(token)
        starts = {
            eqn.outvars[0]: int(eqn.params["name"].removeprefix(_LEAF))
            for eqn in program.jaxpr.eqns
            if eqn.primitive.name == "name" and eqn.params["name"].startswith(_LEAF)
        }
        starts = {var: i for var, i in starts.items() if i in split}
        front = {i: self._placement.parts[i].dim or 0 for i in split}
        return program, uses(program.jaxpr, starts, front, bare=True)

    def weigh(self, weight: jax.Array) -> jax.Array:
        """One number for all replicas, since what they differentiate is added up at once."""
        axes = self._layout.axes
        return _positive(jax.lax.psum(vary(weight, axes), axes) / self._layout.replicas)

    def close(self, grads: list[jax.Array], scale: Any) -> list[jax.Array]:
        """The mean gradient from the sums over microbatches, as it is stored."""
        axes, parts = self._layout.axes, self._placement.parts
        rest = tuple(name for name in axes if name not in self._placement.axes)
        grads = [g.astype(wide(g)) * scale for g in grads]
        whole = [i for i, part in enumerate(parts) if part.dim is None]
        wire = self._placement.wire_dtype
        means = collectives.mean([grads[i] for i in whole], axes, wire_dtype=wire)
        found = dict(zip(whole, means, strict=True))
        others = [i for i in range(len(grads)) if i not in found]
        sums = (
            jax.lax.psum([grads[i] for i in others], rest) if rest else [grads[i] for i in others]
        )
        found.update({i: x / self._layout.replicas for i, x in zip(others, sums, strict=True)})
        return [found[i] for i in range(len(grads))]


def _positive(weight: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(jnp.where(weight > 0, weight, 1.0))
