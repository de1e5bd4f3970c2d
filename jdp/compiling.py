"""Compiles a training step to look at it, for the devices at hand or for a target.

    step, state, batch, target  --on_target-->  the same step, state and batch as shapes, there
    lowered, options  --compile_for_report-->  compiled program, or why there is none

A compiler that refuses an option is asked again without; a program that does not fit into memory
is an answer. Nothing runs.
"""

import re
import warnings
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.mesh import DATA_AXES, axis_size, data_axes, names_in
from jdp.padded import logical
from jdp.replica import is_stored
from jdp.schedule import COST_MODEL
from jdp.state import init_state
from jdp.targets import Target, mesh_for
from jdp.train import TrainStep

# What makes compiling for GPUs cheaper and leaves schedule, times and memory as they are. Seen with
# jax 0.12 (a transformer of 4 layers, zero1, 16 H100s): 4.7 s of a CPU instead of 6.8 s, the same
# 14,707 us of compute, 965 us exposed and 1,210,835,736 bytes of temporaries. More parallel
# compiling saved nothing; without Triton's products compute is modelled as 18,162 us.
_CHEAP_GPU = {
    "xla_llvm_disable_expensive_passes": True,
    "xla_gpu_autotune_level": 0,
    "xla_backend_optimization_level": 0,
}
CHEAP: dict[str, dict[str, Any]] = {
    "gpu": _CHEAP_GPU,
    "cuda": _CHEAP_GPU,
}


class Job(NamedTuple):
    """A step with what it is compiled for; `lack` is what keeps even its state from being made."""

    step: TrainStep
    state: Any
    batch: Any
    mesh: Mesh
    notes: tuple[str, ...] = ()
    lack: str = ""


class Outcome(NamedTuple):
    """A compiled program, or `None` and the compiler's account of the memory that it lacks."""

    compiled: Any
    lack: str
    notes: tuple[str, ...]


def on_target(step: TrainStep, state: Any, batch: Any, target: Target | None) -> Job:
    """The step with options that make the compiler tell times, on the mesh of a target.

    Args:
        step: A step of `jdp.train_step`.
        state: Its state, or shapes.
        batch: Its batch, or shapes.
        target: `None` leaves it where it is.

    Returns:
        The step and, for a target, shapes instead of arrays.

    Raises:
        ValueError: If the batch does not divide among the devices of the target.
    """
    if target is None:
        told, notes = _telling(step, step.mesh)
        return Job(told, state, batch, step.mesh, notes)
    mesh = mesh_for(target, step.mesh)
    _check_rows(batch, mesh, target.name)
    moved, notes = _telling(step, mesh)
    shapes = jax.eval_shape(lambda: logical(state.params))
    given = jax.tree.map(_placed(mesh), shapes, _specs(state.params, shapes))
    key, model_state = jax.tree.map(_shape, (state.key, state.model_state))
    try:
        there = init_state(given, moved.recipe.tx, mesh, key=key, model_state=model_state)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        where = "Who holds what is shown for the mesh that the state was made for."
        return Job(moved, state, batch, mesh, (*notes, where), str(error))
    return Job(moved, there, jax.tree.map(_shape, batch), mesh, notes)


def _telling(step: TrainStep, mesh: Mesh) -> tuple[TrainStep, tuple[str, ...]]:
    """The step with the options of a mesh and those that make compiling tell and cheap.

    Options that the compiler does not know are left out; the notes say which.
    """
    platform = mesh.devices.flat[0].platform
    extra = COST_MODEL.get(platform, {}) | CHEAP.get(platform, {})
    if mesh is step.mesh and not extra:
        return step, ()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        told = step.recipe.on(mesh)
        if extra:
            told = told.recipe.on(mesh, compiler_options={**told.options, **extra})
    return told, tuple(dict.fromkeys(str(x.message) for x in seen))


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.dtypes.canonicalize_dtype(x.dtype))


def _specs(params: Any, shapes: Any) -> Any:
    """Of each parameter, how it lies along axes that are no data axes."""
    whole = jax.tree.leaves(params, is_leaf=is_stored)

    def spec(leaf: Any) -> P:
        sharding = getattr(getattr(leaf, "value", leaf), "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return P()
        kept = [tuple(x for x in names_in(e) if x not in DATA_AXES) for e in sharding.spec]
        return P(*(x or None for x in kept))

    return jax.tree.unflatten(jax.tree.structure(shapes), [spec(leaf) for leaf in whole])


def _placed(mesh: Mesh) -> Any:
    def place(shape: Any, spec: P) -> jax.ShapeDtypeStruct:
        if not any(spec):
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    return place


def _check_rows(batch: Any, mesh: Mesh, name: str) -> None:
    replicas = axis_size(mesh, data_axes(mesh))
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        rows = leaf.shape[0] if leaf.ndim else 0
        if rows % replicas or not rows:
            raise ValueError(
                f"The batch leaf {jax.tree_util.keystr(path) or 'batch'} has {rows} rows, which do "
                f"not divide among the {replicas} replicas of {name}. Give jdp.explain the batch "
                "that would be trained with there; a shape is enough: "
                f"jax.ShapeDtypeStruct({(max(1, rows // replicas + 1) * replicas, *leaf.shape[1:])}"
                f", {str(leaf.dtype)!r})."
            )


def compile_for_report(lowered: Any, platform: str) -> Outcome:
    """Compiles; a lack of memory is an answer, times that cannot be modelled are left out.

    Args:
        lowered: `step.lower(state, batch)`.
        platform: Of the devices that it is for.

    Returns:
        The outcome.

    Raises:
        jax.errors.JaxRuntimeError: If the compiler fails for another reason.
    """
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            compiled, untold = _compiled(lowered, platform)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return Outcome(None, str(error), ())
    notes = tuple(str(x.message) for x in seen if "donat" in str(x.message))
    return Outcome(compiled, "", (*notes, *untold))


def _compiled(lowered: Any, platform: str) -> tuple[Any, tuple[str, ...]]:
    """The program; without modelled times, and a note that says so, if only those are in the way.

    XLA:GPU has no figures of some chips for its cost model (an A100, jax 0.10 and 0.12) and ends.
    """
    try:
        return lowered.compile(), ()
    except jax.errors.JaxRuntimeError as error:
        untold = dict.fromkeys(COST_MODEL.get(platform, {}), False)
        if not untold or "NOT_FOUND" not in str(error):
            raise
        note = f"The compiler has no model of times for this chip: {str(error).splitlines()[0]}."
        return lowered.compile(compiler_options=untold), (note,)


_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def asked_and_limit(lack: str) -> tuple[int | None, int | None]:
    """Bytes that a program asks for and that there are, from what the compiler says of it.

    Example:
        >>> asked_and_limit("Ran out of memory in memory space hbm. Used 32.0G of 16.0G hbm.")
        (34359738368, 17179869184)
    """
    size = r"([\d.]+)([BKMGT]?)"
    found = re.search(rf"Used {size} of {size} hbm", lack) or re.search(
        rf"\({size}\) exceeds available HBM \({size}\)", lack
    )
    if found is None:
        return None, None
    used, unit, limit, unit_of_limit = found.groups()
    return (
        int(float(used) * _UNITS[unit or "B"]),
        int(float(limit) * _UNITS[unit_of_limit or "B"]),
    )
