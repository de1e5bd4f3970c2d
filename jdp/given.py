"""What the loss function is given for parameters, and what becomes of its gradient.

    Whole   a copy that differs by replica; its gradient is the replica's own     [1, *shape]
    Split   the parameter, put together from the parts that the replicas hold (ZeRO 3) or read
            from the copy; its gradient is reduced where it arises, in the backward pass

For Split, what is differentiated is a slot, which stands for the gradient as it will lie; see
`jdp.unshard`. Both are made anew for each trace of a step, and know no optimizer.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jdp import collectives, tree
from jdp.lazy import check_numbers, gathered_once, uses
from jdp.microbatch import Layout, vary
from jdp.padded import lengthen
from jdp.remat import refuse_gathers
from jdp.replica import wide
from jdp.split import Part, Placement, on_user_axes
from jdp.unshard import PARAMS, How, Shard, looking, whole

_LEAF = "jdp: leaf "


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


class Ordered(Whole):
    """The same, its gradients reduced at the end, in an order that no number of devices changes."""

    def __init__(
        self,
        stored: list[jax.Array],
        treedef: Any,
        placement: Placement,
        layout: Layout,
    ) -> None:
        super().__init__(treedef.unflatten(stored), layout)
        self._placement, self._layout = placement, layout

    def close(self, grads: Any, scale: Any) -> list[jax.Array]:
        """The mean gradient from the sums over microbatches, as it is stored."""
        axes, replicas = self._placement.axes, self._layout.replicas
        rest = tuple(name for name in self._layout.axes if name not in axes)

        def scattered(grad: jax.Array, part: Part) -> jax.Array:
            dim = part.dim or 0
            scatter = functools.partial(tree.scatter_sum, axis_name=axes, dim=dim)
            return on_user_axes(scatter, part.spec)(lengthen(grad, part.stored, dim))

        grads = [grad.astype(wide(grad)) for grad in jax.tree.leaves(grads)]
        pairs = list(zip(grads, self._placement.parts, strict=True))
        split = [scattered(grad, part) for grad, part in pairs if part.dim is not None]
        parts = iter(tree.all_sum(split, rest) if rest else split)
        whole = [grad for grad, part in pairs if part.dim is None]
        whole = iter(tree.all_sum(whole, self._layout.axes))
        sums = [next(whole if part.dim is None else parts) for _, part in pairs]
        return [total * (scale / replicas) for total in sums]  # a power of two: exact


class Split:
    """Parameters or gradients that the replicas share among them, reduced in the backward pass.

    With `once` that happens in the backward pass of the last microbatch alone; the gradients of
    those before it, computed with `Whole`, are handed over to `add`.
    """

    def __init__(
        self,
        stored: list[jax.Array],
        treedef: Any,
        placement: Placement,
        layout: Layout,
        compute_dtype: Any,
    ) -> None:
        self.treedef, self._placement, self._layout = treedef, placement, layout
        self._lazy: frozenset[int] = frozenset()
        self.policy: Callable[[Any], Any] | None = None
        self.once = placement.once and layout.each > 1
        self._sums: list[Any] = []
        self._before: list[Any] = [None] * len(stored)
        self._unit: Any = None
        self._sources = vary(stored, layout.axes)
        self._early = [
            part.dim is not None
            or (placement.stage == 0 and placement.count > 1 and leaf.size >= placement.min_size)
            for leaf, part in zip(stored, placement.parts, strict=True)
        ]
        self._hows = [
            How(
                placement.axes if placement.stage else layout.axes,
                placement.stage > 0,
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
        """Zeros for what is reduced in the backward pass; other parameters stand for themselves."""
        source, part = self._sources[i], self._placement.parts[i]
        if not self._early[i]:
            return source
        shape = list(source.shape)
        if part.dim is not None:
            shape[part.dim] = part.stored // self._placement.count
        zeros = jnp.zeros(shape, self._hows[i].slot_dtype)
        place = jax.typeof(source).sharding
        if any(place.spec):  # by Explicit axes of the user's
            zeros = jax.sharding.reshard(zeros, place)
        # an average is the same on every replica
        return zeros if part.dim is None else vary(zeros, self._layout.axes)

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
            Shard(slot, source, self._before[i], self._hows[i])
            if i in self._lazy
            else checkpoint_name(self._put_together(i, slot, source), PARAMS)
            for i, (slot, source) in enumerate(zip(slots, sources, strict=True))
        ]
        return self.treedef.unflatten(leaves)

    def _put_together(self, i: int, slot: jax.Array, source: jax.Array) -> jax.Array:
        return whole(slot, source, self._before[i], self._hows[i]) if self._early[i] else slot

    def look_at(self, call: Callable[[Any], Any]) -> None:
        """Finds those leaves that the loss function, which `call` calls, puts together itself.

        Where it does so only in functions under `jax.checkpoint`, they are gathered again in the
        backward pass anyhow, and what else is kept is left as the user has it.
        """
        program, (gathered, otherwise, bare, _) = self._uses(call)
        self._lazy = frozenset(gathered - otherwise)
        if self._lazy:
            nodes = functools.partial(self._nodes, sources=self._sources)
            lazy = jax.make_jaxpr(lambda slots: call(nodes(slots)))(self.slots)
            check_numbers(program, lazy)
            if self.once:  # what was summed up before is added by each gather
                self._lazy &= gathered_once(lazy, self._front())
        if self._placement.stage == 3 and self._placement.regather:
            checkpointed = bool(self._lazy) and not self._lazy & bare
            self.policy = None if checkpointed else self._regather

    def _uses(self, call: Callable[[Any], Any]) -> tuple[Any, tuple[set[int], ...]]:
        """The loss function's program with whole parameters, and what it does with them."""
        early = [i for i, is_early in enumerate(self._early) if is_early]

        def marked(slots: list[jax.Array]) -> Any:
            leaves = [
                checkpoint_name(self._put_together(i, slot, source), f"{_LEAF}{i}")
                for i, (slot, source) in enumerate(zip(slots, self._sources, strict=True))
            ]
            return jax.tree.leaves(call(self.treedef.unflatten(leaves)))

        token = looking.set(True)
        try:
            program = jax.make_jaxpr(marked)(self.slots)
        finally:
            looking.reset(token)
        starts = {
            eqn.outvars[0]: int(eqn.params["name"].removeprefix(_LEAF))
            for eqn in program.jaxpr.eqns
            if eqn.primitive.name == "name" and eqn.params["name"].startswith(_LEAF)
        }
        starts = {var: i for var, i in starts.items() if i in early}
        return program, uses(program.jaxpr, starts, self._front(), bare=True)

    def _front(self) -> dict[int, int]:
        """The number of dims before the one that is split, of leaves reduced where they arise."""
        dims = [part.dim for part in self._placement.parts]
        return {
            i: self._sources[i].ndim if (d := dims[i]) is None else d
            for i, is_early in enumerate(self._early)
            if is_early
        }

    def add(self, grads: Any, weight: Any) -> None:
        """Sums over this replica's microbatches so far, to be reduced with the last one's gradient.

        `weight` is their weight, if the loss has one.
        """
        self._sums = self._before = self.treedef.flatten_up_to(grads)
        if weight is not None:
            axes, others = self._layout.axes, self._layout.microbatches - self._layout.replicas
            self._unit = _positive(jax.lax.psum(vary(weight, axes), axes) / others)
            self._before = [total / self._unit for total in self._sums]

    def weigh(self, weight: jax.Array) -> jax.Array:
        """One number for all replicas, since what they differentiate is added up at once."""
        if self._unit is not None:
            return self._unit
        axes = self._layout.axes
        return _positive(jax.lax.psum(vary(weight, axes), axes) / self._layout.replicas)

    def close(self, grads: list[jax.Array], scale: Any) -> list[jax.Array]:
        """The mean gradient from the sums over microbatches, as it is stored."""
        axes = self._layout.axes
        rest = tuple(name for name in axes if name not in self._placement.axes)
        grads = [g.astype(wide(g)) * scale for g in grads]
        late = [i for i, is_early in enumerate(self._early) if not is_early]
        wire = self._placement.wire_dtype
        if self._sums:
            grads = [
                grad if is_early else grad + total * scale
                for grad, total, is_early in zip(grads, self._sums, self._early, strict=True)
            ]
        means = collectives.mean([grads[i] for i in late], axes, wire_dtype=wire)
        found = dict(zip(late, means, strict=True))
        if self._placement.stage == 0:  # means already
            found.update({i: grad for i, grad in enumerate(grads) if i not in found})
        others = [i for i in range(len(grads)) if i not in found]
        sums = (
            jax.lax.psum([grads[i] for i in others], rest) if rest else [grads[i] for i in others]
        )
        found.update({i: x / self._layout.replicas for i, x in zip(others, sums, strict=True)})
        return [found[i] for i in range(len(grads))]


def _positive(weight: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(jnp.where(weight > 0, weight, 1.0))
