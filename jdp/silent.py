"""The same step without its communication: what it would take if sending were free.

    TrainStep, state, batch  --silence-->  Silent: a compiled step of the same shapes

The step is built anew from its recipe and lowered, and in its StableHLO each collective is replaced
by something a device can do alone, with a result of the same shape and dtype:

    all_reduce, collective_permute, collective_broadcast    what went in
    all_gather                                              the device's own part, repeated
    reduce_scatter                                          the first part of what went in
    all_to_all                                              likewise

The values are wrong, the work is not: what goes into and comes out of each is kept behind an
optimization barrier, so that the compiler can neither leave out what nobody would send, nor see
that a repeated part is repeated. What a collective computes itself (adding up, writing the
result) counts as communication. Collectives that the compiler adds on its own, for layouts that a
user's mesh axes ask for, stay; `left` names their bytes.
"""

from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jdp import hlo
from jdp.asked import collectives_of
from jdp.train import TrainStep


class Silent(NamedTuple):
    """A step that sends nothing.

    Attributes:
        run: `run(state, batch) -> (state, metrics)`, compiled; it consumes the state as the step
            would. The values mean nothing.
        replaced: Collectives of the traced program that were replaced.
        left: Bytes of results of collectives that remain, each counted once.
    """

    run: Any
    replaced: int
    left: int


def silence(step: TrainStep, state: Any, batch: Any) -> Silent:
    """Compiles a step without its communication, see the module.

    Args:
        step: A step of `jdp.train_step`. It is not changed.
        state: Its state, or shapes with shardings.
        batch: Its batch, likewise.

    Returns:
        What runs in its place.

    Example:
        >>> mesh, tx = jdp.make_mesh(), optax.chain(jdp.all_reduce(), optax.sgd(0.5))
        >>> step = jdp.train_step(lambda p, x: jnp.mean((p["w"] - x) ** 2), tx, mesh)
        >>> silent = silence(step, jdp.init_state({"w": jnp.zeros(())}, tx, mesh), jnp.ones(16))
        >>> silent.replaced > 0, silent.left
        (True, 0)
    """
    # A new function is traced: the program of the step itself is kept by JAX, and must stay whole.
    silent = silence_program(step.recipe.on(step.mesh).lower(state, batch))

    def run(state: Any, batch: Any) -> Any:
        return silent.run(state, batch, None)

    return silent._replace(run=run)


def silence_program(lowered: Any) -> Silent:
    """Compiles a lowered program without its communication. The lowered program is changed.

    JAX keeps what it has lowered, so it must be of a function that nobody else runs.
    """
    replaced = _replace_collectives(lowered.compiler_ir("stablehlo"))
    compiled = lowered.compile()
    return Silent(compiled, replaced, _bytes_of_collectives(compiled.as_text()))


def _replace_collectives(module: Any) -> int:
    found = collectives_of(module)
    with module.context:
        for op in found:
            _replace(op)
    return len(found)


def _replace(op: Any) -> None:
    """One collective by local operations of the same result types."""
    with ir.InsertionPoint(op), op.location:
        given = _behind_barrier(list(op.operands))
        shapes = [ir.RankedTensorType(result.type).shape for result in op.results]
        fitted = [_fit(value, list(shape)) for value, shape in zip(given, shapes, strict=True)]
        made = _behind_barrier(fitted)
    for result, value in zip(list(op.results), made, strict=True):
        result.replace_all_uses_with(value)
    op.erase()


def _behind_barrier(values: list[Any]) -> list[Any]:
    return list(
        ir.Operation.create(
            "stablehlo.optimization_barrier", [value.type for value in values], values
        ).results
    )


def _fit(value: Any, shape: list[int]) -> Any:
    """The array cut to its beginning where it is too long, and repeated where it is too short."""
    source = ir.RankedTensorType(value.type)
    cut = [min(have, want) for have, want in zip(source.shape, shape, strict=True)]
    if cut != list(source.shape):
        ends, ones = ir.DenseI64ArrayAttr.get(cut), ir.DenseI64ArrayAttr.get([1] * len(cut))
        value = stablehlo.slice(value, ir.DenseI64ArrayAttr.get([0] * len(cut)), ends, ones)
    if cut == shape:
        return value
    # [a, b] -> [times a, a, times b, b] -> [times a * a, times b * b]
    pairs = [x for have, want in zip(cut, shape, strict=True) for x in (want // have, have)]
    spread = ir.RankedTensorType.get(pairs, source.element_type)
    places = ir.DenseI64ArrayAttr.get([2 * dim + 1 for dim in range(len(shape))])
    repeated = stablehlo.broadcast_in_dim(spread, value, places)
    return stablehlo.reshape(ir.RankedTensorType.get(shape, source.element_type), repeated)


def _bytes_of_collectives(text: str) -> int:
    return sum(
        leaf.bytes
        for computation in hlo.parse(text).computations.values()
        for instruction in computation.instructions
        if instruction.collective and not instruction.opcode.endswith("-done")
        for leaf in hlo.leaves(instruction.shape)
    )
