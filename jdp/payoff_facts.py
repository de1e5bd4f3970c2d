"""What predictions start from: a step's time, its links, its bytes, and what a reduction takes.

    step, state, batch, links or target  -->  Facts
    an Optax reduction, a state, a mesh  -->  its lowered program; seconds of it without sending

Facts of the devices at hand are measured or read from the compiled step, those of a target from
`jdp.explain`. What follows from them is said in `jdp.pays`.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.accumulate import multi_steps
from jdp.chain import Parts, parts
from jdp.costs import collective_seconds
from jdp.hardware import Link
from jdp.links import Links, measure
from jdp.mesh import axis_size, data_axes
from jdp.padded import is_padded, logical
from jdp.replica import PerReplica
from jdp.report import explain
from jdp.schedule import walk
from jdp.silent import silence_program
from jdp.split import find_placement
from jdp.state import init_state
from jdp.targets import mesh_for
from jdp.targets import target as find_target
from jdp.train import TrainStep
from jdp.zero import zero1

_ALONE_SECONDS = 3.0  # to measure links for, where none were given
_DOUBT, _DOUBT_ON_SHARED_CORES = 0.1, 1 / 3  # what timings are off by, relative to themselves


class Facts(NamedTuple):
    """What all predictions start from; seconds and bytes."""

    replicas: int
    nodes: int
    step: float
    exposed: float  # of the step
    modelled: float  # all its collectives, by the model
    sent: float  # bytes that a device sends
    optimizer: float  # reading and writing of parameters, gradients and optimizer state
    grads: int  # bytes of the gradients in float32
    params: int  # bytes of the parameters, whole
    opt_state: int  # bytes of the optimizer state, whole
    stage: int
    seconds: Callable[[str, float], float]  # of a collective of a kind and size
    crossing: float  # of what crosses between nodes when float32 gradients are reduced
    # of the step's exchange of gradients run alone, and of another reduction's; `None` if not timed
    now_alone: float | None = None
    alone: Callable[[Any], float] | None = None
    parts: Parts = Parts()
    every: int = 1  # batches for each exchange
    again: int = 1  # exchanges of gradients in a step
    doubt: float = 0.0  # what timings are off by, relative to themselves
    off: float = 0.0  # what exposed communication is off by, likewise
    accumulated: Callable[[int], float] | None = None  # work of a batch, accumulating so many
    idle: float = 0.0  # of a step, devices wait for their host or input


def here(
    step: TrainStep, state: Any, batch: Any, links: Any, step_seconds: float, exposed: float
) -> Facts:
    """Facts of the devices at hand."""
    mesh, asked = step.mesh, parts(step.recipe.tx)
    axes = data_axes(mesh)
    replicas = axis_size(mesh, axes)
    timed = links is None and replicas > 1  # links that were given are to be believed
    if timed:
        links = measure(mesh, sizes=(2**14, 2**22), seconds=_ALONE_SECONDS)
    inner, outer, nodes = two_links(links, mesh, axes)
    seconds = _model(replicas, inner, outer, nodes)
    collectives = walk(step.lower(state, batch).compile().as_text(), mesh).collectives
    sizes, sent = _sizes(state), sum(row.wire_bytes for row in collectives)
    optimizer = off = 0.0
    doubt = _DOUBT_ON_SHARED_CORES if shares_cores(mesh) else _DOUBT
    if asked.every == 1 and not asked.local:  # else no update could be run alone
        optimizer, off = _update_seconds(step.recipe.tx, state, mesh)
    scatters = [row.times for row in collectives if row.kind in ("reduce-scatter", "all-to-all")]
    facts = Facts(
        replicas,
        nodes,
        step_seconds,
        exposed,
        sum(row.times * seconds(row.kind, row.bytes) for row in collectives),
        sent,
        min(optimizer, max(0.0, step_seconds - exposed)),
        *sizes,
        _stage(state),
        seconds,
        _crossing(sizes[0], outer, nodes, replicas),
        parts=asked,
        every=asked.every,
        again=max(scatters, default=1),
        doubt=max(min(off, 1.0), doubt),
        off=doubt,
        accumulated=functools.partial(_accumulated_seconds, step, state)
        if optimizer and not _stage(state)
        else None,
    )
    if not timed or asked.local:
        return facts
    alone = functools.partial(_alone_seconds, state=state, mesh=mesh)
    now = exchange(asked, facts.stage)
    return facts._replace(alone=alone, now_alone=None if now is None else alone(now))


def exchange(asked: Parts, stage: int) -> Any:
    """The step's own exchange of gradients alone; `None` if it is not known."""
    if not stage:
        return asked.reduces
    scatters = scattering(asked, asked.wire_dtype)
    return scatters if asked.reduces is None else optax.chain(asked.reduces, scatters)


def scattering(asked: Parts, wire_dtype: Any) -> Any:
    """The exchange of a ZeRO stage, around the simplest of optimizers."""
    axis = None if asked.zero is None else asked.zero.axis
    return zero1(optax.scale(-1.0), axis, wire_dtype=wire_dtype)


def shares_cores(mesh: Mesh) -> bool:
    """Whether a process has several CPU devices, which wait for each other's cores."""
    return mesh.devices.flat[0].platform == "cpu" and len(mesh.local_devices) > 1


def on_target(
    step: TrainStep, state: Any, batch: Any, name: str, links: Any
) -> tuple[Facts, Mesh, float]:
    """Facts of a target, from the report on the step compiled for it."""
    there = find_target(name)
    mesh, found = mesh_for(there, step.mesh), explain(step, state, batch, name)
    if found.step_us is None or found.exposed_us is None:
        raise ValueError(
            f"The step does not compile for {name} ({found.verdict}), so it has no time there to "
            "gain from. Choose a larger target, or ask jdp.plan what fits."
        )
    replicas = axis_size(mesh, data_axes(mesh))
    link = links if isinstance(links, Link) else there.chip.inner
    asked = parts(step.recipe.tx)
    seconds = _model(replicas, link, there.chip.outer, there.nodes)
    sizes = _sizes(state)
    traffic = _traffic(sizes, find_placement(state.opt_state), replicas)
    facts = Facts(
        replicas,
        there.nodes,
        found.step_us / 1e6,
        found.exposed_us / 1e6,
        sum(row.times * seconds(row.kind, row.bytes) for row in found.collectives),
        sum(row.wire_bytes for row in found.collectives),
        traffic / there.chip.memory_bytes_per_s,
        *sizes,
        _stage(state),
        seconds,
        _crossing(sizes[0], there.chip.outer, there.nodes, replicas),
        parts=asked,
        every=asked.every,
    )
    # reading and writing what is summed up, and the gradients
    batch_s = 3 * sizes[0] / there.chip.memory_bytes_per_s
    facts = facts._replace(accumulated=lambda every: batch_s + facts.optimizer / every)
    return facts, mesh, there.chip.memory_bytes_per_s


def two_links(
    links: Any, mesh: Mesh, axes: tuple[str, ...]
) -> tuple[Link | None, Link | None, int]:
    """The link within a node, that between nodes, and how many nodes there are.

    Raises:
        TypeError: If links are no links.
        ValueError: If they are those of other axes.
    """
    if axis_size(mesh, axes) == 1 or isinstance(links, Link):
        return (links if isinstance(links, Link) else None), None, 1
    by_axis = links.axes if isinstance(links, Links) else links
    if not isinstance(by_axis, Mapping) or not all(isinstance(x, Link) for x in by_axis.values()):
        raise TypeError(
            f"links are a {type(links).__name__}, not what jdp.links.measure(mesh) returns. Give "
            "that, one jdp.hardware.Link, or one for each mesh axis; None measures."
        )
    several = [axis for axis in axes if mesh.shape[axis] > 1]
    if lacking := [axis for axis in several if axis not in by_axis]:
        raise ValueError(
            f"links are of the axes {[*by_axis]}, but the replicas also lie along {lacking}. "
            "Measure on the mesh of the step: jdp.links.measure(step.mesh)."
        )
    if len(several) == 2:  # the outer axis comes first
        return by_axis[several[1]], by_axis[several[0]], mesh.shape[several[0]]
    return by_axis[several[0]], None, 1


def _model(
    replicas: int, inner: Link | None, outer: Link | None, nodes: int
) -> Callable[[str, float], float]:
    def seconds(kind: str, size: float) -> float:
        if replicas == 1 or inner is None:
            return 0.0
        return collective_seconds(kind, size, replicas, inner, outer=outer, nodes=nodes)

    return seconds


def _crossing(grads: int, outer: Link | None, nodes: int, replicas: int) -> float:
    if outer is None or nodes == 1:
        return 0.0
    return collective_seconds("all-reduce", grads * nodes / replicas, nodes, outer)


def _sizes(state: Any) -> tuple[int, int, int]:
    """Bytes of gradients in float32, of parameters, and of optimizer state that could be split.

    The last are those that a device holds whole, or ZeRO's own: what each replica has of its own,
    such as a residual, cannot be shared out.
    """

    def size(tree: Any, each: int | None = None, whole: bool = False) -> int:
        leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype") and hasattr(x, "shape")]
        leaves = [x for x in leaves if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
        if whole:
            places = [getattr(x, "sharding", None) for x in leaves]
            pairs = zip(leaves, places, strict=True)
            leaves = [x for x, place in pairs if place is None or place.is_fully_replicated]
        return sum(math.prod(x.shape) * (each or x.dtype.itemsize) for x in leaves)

    params, staged = logical(state.params), find_placement(state.opt_state) is not None
    return size(params, 4), size(params), size(state.opt_state, whole=not staged)


def _traffic(sizes: tuple[int, int, int], placement: Any, replicas: int) -> float:
    """Bytes that an update reads and writes on a device: gradients, and the rest twice."""
    grads, params, opt_state = sizes
    return (grads + 2 * params + 2 * opt_state) / (replicas if placement else 1)


def _stage(state: Any) -> int:
    """The ZeRO stage of a state; 0 for none."""
    placement = find_placement(state.opt_state)
    return 0 if placement is None else int(placement.stage)


def ring_bytes(found: Sequence[tuple[str, int]], replicas: int) -> float:
    """Bytes that a device sends around a ring."""
    ring = (replicas - 1) / replicas
    return ring * sum(size * (2 if kind == "all-reduce" else 1) for kind, size in found)


def memory_rate_of(mesh: Mesh) -> float:
    """Bytes a second that each device reads and writes while all do, timed on 16 MB of each."""
    count = 2**21
    placed = NamedSharding(mesh, P(mesh.axis_names))
    x = jax.jit(lambda: jnp.zeros(count * mesh.size), out_shardings=placed)()
    return 8 * count / _timed(jax.jit(lambda x: x * 2 + 1), x)[0]


def _timed(run: Callable[..., Any], *arguments: Any) -> tuple[float, float]:
    """Median seconds of a call, and half of what calls differ by, relative to it."""
    found = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        found.append(time.perf_counter() - start)
    middle = statistics.median(found[1:])
    return middle, (max(found[1:]) - min(found[1:])) / 2 / middle


def _update_seconds(
    tx: Any, state: Any, mesh: Mesh, *, calls: int = 1, own: bool = True
) -> tuple[float, float]:
    """Seconds of an update without communication, the mean of some calls, and what they differ by.

    It is the step's own, or that of another transformation.
    """
    placement = find_placement(state.opt_state)
    if placement is not None:
        # ZeRO's gradients may be reduced already, in ways that only its step knows
        traffic = _traffic(_sizes(state), placement, axis_size(mesh, data_axes(mesh)))
        return traffic / memory_rate_of(mesh), 0.0
    lowered, shapes = reduction(tx, state, mesh, applied=True, own=own)
    run, (grads, opt_state, params) = silence_program(lowered).run, _zeros(shapes)
    held = [opt_state, params]  # consumed and made anew, as in the step

    def once() -> Any:
        for _ in range(calls):
            held[1], held[0] = run(grads, *held)
        return held

    seconds, off = _timed(once)
    return seconds / calls, off


def _accumulated_seconds(step: TrainStep, state: Any, every: int) -> float:
    """Seconds for each batch of accumulating and, every few batches, updating."""
    tx = multi_steps(step.recipe.tx, every)
    return _update_seconds(tx, state, step.mesh, calls=every, own=False)[0]


def reduction(
    tx: Any, state: Any, mesh: Mesh, *, applied: bool = False, own: bool = True
) -> tuple[Any, Any]:
    """The program of a reduction alone, lowered, and the shapes that it is given.

    Or of a whole transformation, its updates applied, on the state's own optimizer state or not.
    """
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        logical(state.params),
        is_leaf=is_padded,
    )
    axes = data_axes(mesh)
    count, where = axis_size(mesh, axes), NamedSharding(mesh, P(axes))

    def gradient(x: Any) -> PerReplica:
        value = jax.ShapeDtypeStruct((count, *x.shape), x.dtype, sharding=where)
        return PerReplica(value, axes=axes, mesh=mesh)

    def program(grads: Any, opt_state: Any, params: Any) -> Any:
        extended = optax.with_extra_args_support(tx)
        updates, opt_state = extended.update(grads, opt_state, params, value=jnp.zeros(()))
        return (optax.apply_updates(params, updates) if applied else updates), opt_state

    grads = jax.tree.map(gradient, params)
    source = state if applied and own else init_state(params, tx, mesh)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)  # noqa: E731
    given = jax.tree.map(shape, (grads, source.opt_state, source.params))
    return jax.jit(program, donate_argnums=(1, 2) if applied else ()).lower(*given), given


def silent_seconds(tx: Any, state: Any, mesh: Mesh) -> float:
    """Seconds of a reduction that sends nothing: of its encoding."""
    lowered, shapes = reduction(tx, state, mesh)
    return _timed(silence_program(lowered).run, *_zeros(shapes))[0]


def _alone_seconds(tx: Any, state: Any, mesh: Mesh) -> float:
    """Seconds of a reduction run alone, encoding and all."""
    lowered, shapes = reduction(tx, state, mesh)
    return _timed(lowered.compile(), *_zeros(shapes))[0]


def _zeros(shapes: Any) -> Any:
    """Zeros of shapes, where these lie."""
    places = jax.tree.map(lambda x: x.sharding, shapes)
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
    return jax.jit(zeros, out_shardings=places)()
