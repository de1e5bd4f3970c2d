"""The unit of work: one function over one microbatch, run over all microbatches of all replicas.

In: a function of one microbatch, and global arrays. Out: what the function returned, summed over
a replica's microbatches, still different on each replica.

    rows of the batch   0 .. m-1 | m .. 2m-1 | ...           M microbatches of m examples
    replica i           takes M/N neighbouring ones, one after the other
    microbatch j        has the same rows, key and shapes on any number of replicas

With `shares`, replica i runs only its first k_i microbatches, and they are numbered through
without gaps. Nothing is sent between devices here; `sum_over` is the one exception, for scalars
after the last microbatch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.dataflow import run_checked, uneven_exchange
from jdp.loss import check_divides, count_rows
from jdp.mesh import axis_size, names_in
from jdp.replica import wide
from jdp.tree import all_sum

Work = Callable[[Any, Any, Any], tuple[Any, Any, Any]]
"""(rows, key, model_state) -> (carried sum, stacked sums, model_state)."""


class Layout(NamedTuple):
    """How a batch is dealt out: N replicas along axes, each with `each` microbatches."""

    mesh: Mesh
    axes: tuple[str, ...]
    replicas: int
    each: int

    @property
    def microbatches(self) -> int:
        """M, the number of microbatches of a global batch."""
        return self.replicas * self.each


def lay_out(batch: Any, mesh: Mesh, axes: tuple[str, ...], microbatch: int | None) -> Layout:
    """Checks that a batch can be dealt out, and says how."""
    replicas = axis_size(mesh, axes)
    each = check_divides(count_rows(batch), replicas, axes, microbatch)
    return Layout(mesh, axes, replicas, each)


def check_shares(shares: Any, layout: Layout) -> Any:
    """Shares as int32 of shape [N], or `None`.

    Raises:
        ValueError: If they are not one whole number for each replica.
    """
    if shares is None:
        return None
    shares = jnp.asarray(shares)
    if shares.shape != (layout.replicas,) or not jnp.issubdtype(shares.dtype, jnp.integer):
        raise ValueError(
            f"shares has the shape {shares.shape} and dtype {shares.dtype}; it must hold one whole "
            f"number of microbatches for each of the {layout.replicas} replicas, int32 of shape "
            f"({layout.replicas},)."
        )
    return shares.astype(jnp.int32)


def on_replicas(
    local: Callable[..., Any],
    layout: Layout,
    out_specs: Any,
    check: Callable[[Any], None] = lambda program: None,
    params_specs: Any = None,
) -> Callable[..., Any]:
    """Runs `local(params, batch, key, model_state, shares)` on each replica.

    Params (unless `params_specs` says otherwise), key and model state are the same for all; batch
    and shares are split by their leading dim. Axes of the mesh other than the data axes stay with
    the compiler. `check` is shown the program before it is used.

    Raises:
        ValueError: If replicas could reach a collective unequally often, which would hang.
    """
    mesh, axes = layout.mesh, layout.axes
    split = NamedSharding(mesh, P(axes))

    def run(params: Any, batch: Any, key: Any, model_state: Any, shares: Any) -> Any:
        shares = check_shares(shares, layout)
        if any(mesh.axis_types[mesh.axis_names.index(a)] == AxisType.Explicit for a in axes):
            batch, shares = jax.tree.map(lambda x: jax.sharding.reshard(x, split), (batch, shares))
            if params_specs is None:
                params = jax.tree.map(lambda x: _gathered(x, mesh, axes), params)
        args = (params, batch, key, model_state, shares)
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P() if params_specs is None else params_specs, P(axes), P(), P(), P(axes)),
            out_specs=out_specs,
            axis_names=set(axes),
        )

        def check_all(program: Any) -> None:
            _check_lockstep(program, axes)
            check(program)

        return run_checked(mapped, check_all, *args)

    return run


def _gathered(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """A parameter whose Explicit type says that data axes split it, gathered from them."""
    spec = jax.typeof(x).sharding.spec
    left = P(*[None if set(names_in(entry)) & set(axes) else entry for entry in spec])
    return x if left == spec else jax.sharding.reshard(x, NamedSharding(mesh, left))


def _check_lockstep(program: Any, axes: tuple[str, ...]) -> None:
    if found := uneven_exchange(program, axes):
        construct, name = found
        raise ValueError(
            f"The function uses {name} over the mesh axis {axes} inside a {construct} that "
            "replicas leave at different times, because its condition differs between them (or "
            "because their shares of microbatches are unequal). Those that get there would wait "
            "for ever for those that do not. Move the collective out, or make the condition the "
            "same on all replicas, with jax.lax.pmax for example."
        )


def over_microbatches(
    work: Work,
    batch: Any,
    key: Any,
    model_state: Any,
    shares: Any,
    layout: Layout,
    zeros: Any,
    last: Callable[[Any, Any], Work] | None = None,
    ordered: bool = False,
) -> tuple[Any, Any, Any]:
    """Runs `work` over one replica's microbatches and adds up what it returns, in float32.

    Args:
        work: The function of one microbatch. Its first result is added to a running sum, its
            second (scalars) is kept for each microbatch and added at the end, its third is handed
            on to the next.
        batch: This replica's rows.
        key: The step's key, or `None`; microbatch j gets fold_in(key, j).
        model_state: Handed to the first microbatch, the same on every replica.
        shares: This replica's number of microbatches, shape [1], or `None` for all it has.
        layout: How the batch is dealt out.
        zeros: What the running sum starts from.
        last: Makes the function of the last microbatch, outside the loop, from the sums over those
            before; what it returns is not added to the running sum but takes its place.
        ordered: Add up in pairs, and pairs of pairs, so that with `jdp.tree` between devices the
            order does not depend on their number.

    Returns:
        The running sum, the summed scalars, and the last model state.
    """
    index = jax.lax.axis_index(layout.axes)
    if shares is None:
        first = index * layout.each
    else:
        everyone = jax.lax.all_gather(shares, layout.axes, tiled=True)
        first = jnp.sum(jnp.where(jnp.arange(layout.replicas) < index, everyone, 0))

    def one(j: Any, rows: Any, state: Any, work: Work = work) -> tuple[Any, Any, Any]:
        return work(rows, None if key is None else jax.random.fold_in(key, first + j), state)

    if shares is None and layout.each == 1:
        return one(0, batch, model_state)
    size = lambda x: x.shape[0] // layout.each  # noqa: E731
    rows = jax.tree.map(lambda x: x.reshape(layout.each, size(x), *x.shape[1:]), batch)
    zeros = vary(zeros, layout.axes)
    if shares is not None:
        return *_up_to(shares[0], one, rows, zeros, layout), None

    steps = (jnp.arange(layout.each), rows)
    if ordered:
        return _in_tree(one, model_state, steps, layout)

    def body(carry: Any, xs: Any) -> tuple[Any, Any]:
        sums, state = carry
        part, scalars, state = one(xs[0], xs[1], state)
        return (_add(sums, part), state), scalars

    looped = steps if last is None else jax.tree.map(lambda x: x[:-1], steps)
    (sums, model_state), scalars = jax.lax.scan(body, (zeros, model_state), looped)
    scalars = jax.tree.map(lambda x: jnp.sum(x, axis=0), scalars)
    if last is None:
        return sums, scalars, model_state
    j, rows = jax.tree.map(lambda x: x[-1], steps)
    sums, more, model_state = one(j, rows, model_state, last(sums, scalars))
    return sums, _add(scalars, more), model_state


def _in_tree(one: Any, state: Any, steps: Any, layout: Layout) -> tuple[Any, Any, Any]:
    """Sums over all microbatches: one after the other while their number is odd, else in halves."""
    levels = (layout.each & -layout.each).bit_length() - 1  # how often it can be halved
    front = (*[2] * levels, layout.each >> levels)
    steps = jax.tree.map(lambda x: x.reshape(*front, *x.shape[1:]), steps)
    first = jax.tree.map(lambda x: x[(0,) * len(front)], steps)
    shapes = jax.eval_shape(lambda: one(*first, state)[:2])
    # -0.0 is what can be added to -0.0 without changing its bits
    zeros = jax.tree.map(lambda s: jnp.full(s.shape, -0.0, wide(s)), shapes)
    zeros = vary(zeros, layout.axes)

    def total(level: int, state: Any, steps: Any) -> tuple[Any, Any]:
        def body(carry: Any, xs: Any) -> tuple[Any, None]:
            if level < levels:
                part, state = total(level + 1, carry[1], xs)
            else:
                *part, state = one(*xs, carry[1])
            return (_add(carry[0], tuple(part)), state), None

        return jax.lax.scan(body, (zeros, state), steps)[0]

    (sums, scalars), state = total(0, state, steps)
    return sums, scalars, state


def _up_to(count: Any, one: Any, rows: Any, zeros: Any, layout: Layout) -> tuple[Any, Any]:
    """Sums over the first `count` microbatches, a number that each replica has for itself."""
    take = lambda j: jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, j, 0, False), rows)  # noqa: E731
    shapes = jax.eval_shape(lambda: one(0, take(0), None)[1])
    start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(j: Any, carry: Any) -> Any:
        part, scalars, _ = one(j, take(j), None)
        return vary((_add(carry[0], part), _add(carry[1], scalars)), layout.axes)

    within = jnp.clip(count, 0, layout.each)
    return jax.lax.fori_loop(0, within, body, vary((zeros, start), layout.axes))


def _add(sums: Any, part: Any) -> Any:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, part)


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes along which a traced value may differ between devices."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(tree: Any, axes: tuple[str, ...]) -> Any:
    """Marks values as differing by replica, so that nothing is summed over replicas unasked.

    JAX would otherwise insert that sum into the gradient, once for each microbatch, and the
    gradient would come out N times too big.
    """

    def one(x: Any) -> jax.Array:
        missing = tuple(axis for axis in axes if axis not in varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, tree)


def sum_over(tree: Any, axes: tuple[str, ...], *, ordered: bool = False) -> Any:
    """Sums small values over the replicas; a value that all share is counted once for each."""
    return (all_sum if ordered else jax.lax.psum)(vary(tree, axes), axes)
