"""What a training step needs of a device's memory, by kind, read from the compiled program.

    step, state, batch  --lower, compile-->  program
        arguments and results     from their shardings: exact
        temporaries               the compiler's total, and what is alive at the fullest moment,
                                  found by walking the scheduled program (`jdp.live`)

Nothing runs and nothing is allocated, so arrays may be replaced by their shapes, and the devices
by the description of devices that are not here. Sizes are those of one device; all have the same.
"""

from collections import defaultdict
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jdp.hlo import HOST_SPACE, Program, leaves, parse
from jdp.holdings import device_bytes, human, table
from jdp.live import Buffer, main_memory, peak
from jdp.split import is_padded
from jdp.train import TrainStep

TEMPORARIES = ("gradients", "activations", "collectives", "other")
METHOD = "buffers alive at the peak of the scheduled program"


class Memory(NamedTuple):
    """Bytes of one device while a step runs, by kind; printing it shows a table.

    The kinds from `parameters` to `unexplained` add up to `total`.

    Attributes:
        parameters: Parameters, as they lie between steps.
        optimizer_state: State of the transformation.
        other_state: Step counter, random key, model state.
        batch: The device's part of the batch.
        outputs: Results that do not take the place of an argument: metrics, and the whole new
            state of a step that does not donate.
        gradients: Temporaries of the shape of a parameter, or of the part of one that a device
            holds, made by the backward pass, accumulation or reduction.
        activations: All other temporaries of loss function and backward pass.
        collectives: Temporaries that a collective made or that were packed for one: gathered
            parameters, buckets, reduced parts.
        other: All other temporaries, such as the update.
        padding: What the arguments take more than their elements; less if the program does not use
            some.
        unexplained: What the compiler sets aside for temporaries beyond those found: alignment,
            gaps; negative where it reuses memory in ways that are not seen.
        total: Arguments and results, each once, and temporaries, by the compiler's account.
        host: Bytes in the host's memory, for each device.
        largest: The most bytes that each kind of temporary takes at any time, be it not at the
            peak. For gradients: what they add to parameters and optimizer state.
        method: How temporaries were told apart.
    """

    parameters: int
    optimizer_state: int
    other_state: int
    batch: int
    outputs: int
    gradients: int
    activations: int
    collectives: int
    other: int
    padding: int
    unexplained: int
    total: int
    host: int
    largest: dict[str, int]
    method: str = METHOD

    @property
    def kinds(self) -> dict[str, int]:
        """What adds up to `total`, by name in words; kinds of no bytes are left out."""
        names = self._fields[: self._fields.index("total")]
        return {name.replace("_", " "): size for name in names if (size := getattr(self, name))}

    @property
    def arguments(self) -> int:
        """State and batch, as the compiler counts them."""
        return self.parameters + self.optimizer_state + self.other_state + self.batch + self.padding

    @property
    def temporaries(self) -> int:
        """What the compiler sets aside for temporaries."""
        found = self.gradients + self.activations + self.collectives + self.other
        return found + self.unexplained

    def __str__(self) -> str:
        lines = [("bytes per device", "", "")]
        for name, size in self.kinds.items():
            lines.append((name, human(size), f"{size / self.total:.1%}" if self.total else ""))
        lines.append(("total", human(self.total), ""))
        if self.host:
            lines.append(("in host memory", human(self.host), ""))
        return table(lines, numbers=(1, 2)) + f"\ntemporaries: {self.method}"


def memory(step: TrainStep, state: Any, batch: Any, *, shares: Any = None) -> Memory:
    """Compiles a step and tells what it needs of each device's memory, by kind.

    Guarantees:
        - Nothing runs; arrays, shapes with shardings, and devices described by
          `jax.experimental.topologies` will do.
        - The kinds add up to `total`, which is the compiler's own figure.

    Args:
        step: What `jdp.train_step` returned.
        state: A state, or shapes with shardings (`jdp.init_state` with shapes for parameters).
        batch: A batch, or shapes.
        shares: See `jdp.train_step`.

    Returns:
        The sizes, as a `Memory`.

    Example:
        >>> tx, mesh = optax.chain(jdp.all_reduce(), optax.adamw(1e-3)), jdp.make_mesh()
        >>> step = jdp.train_step(lambda p, batch: jnp.mean((batch @ p["w"]) ** 2), tx, mesh)
        >>> state = jdp.init_state({"w": jnp.ones((64, 32))}, tx, mesh)
        >>> report = memory(step, state, jnp.ones((16, 64)))
        >>> report.parameters, report.optimizer_state, report.batch, report.gradients
        (8192, 16388, 512, 8192)
    """
    compiled = step.lower(state, batch, shares=shares).compile()
    return memory_of(compiled, state, batch)


def memory_of(compiled: Any, state: Any, batch: Any) -> Memory:
    """What `jdp.memory` tells, from a program that is already compiled.

    Args:
        compiled: `step.lower(state, batch).compile()`.
        state: The state it was lowered for.
        batch: The batch it was lowered for.
    """
    program = parse(compiled.as_text())
    stats = compiled.memory_analysis()
    places = _places(compiled, (state, batch))
    held, host = _arguments(places, program, state, batch)
    temporaries, largest = _temporaries(places[0], program, state)
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    arguments, temp = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    return Memory(
        parameters=held["params"],
        optimizer_state=held["opt_state"],
        other_state=held["other"],
        batch=held["batch"],
        outputs=outputs,
        gradients=temporaries["gradients"],
        activations=temporaries["activations"],
        collectives=temporaries["collectives"],
        other=temporaries["other"],
        padding=arguments - sum(held.values()),
        unexplained=temp - sum(temporaries.values()),
        total=arguments + outputs + temp,
        host=host,
        largest=largest,
    )


def _places(compiled: Any, given: Any) -> Any:
    """The shardings of the arguments; of those that the program does not use, their own.

    Of an unused argument (Adafactor has such) the compiled program has no sharding, but None.
    """
    treedef = jax.tree.structure(given)
    found = treedef.flatten_up_to(compiled.input_shardings[0][: len(given)])
    used = next(sharding for sharding in found if sharding is not None)
    whole = NamedSharding(used.mesh, PartitionSpec())
    own = [getattr(leaf, "sharding", None) or whole for leaf in jax.tree.leaves(given)]
    return treedef.unflatten([one or other for one, other in zip(found, own, strict=True)])


def _arguments(places: Any, program: Program, state: Any, batch: Any) -> tuple[dict[str, int], int]:
    """Bytes of the arguments by part, from their shardings; and those that rest on the host."""
    entry = program.computations[program.entry].instructions
    parameters = [x for x in entry if x.opcode == "parameter"]
    hosted = {
        x.op_name.replace("\\'", "'").replace('\\"', '"')
        for x in parameters
        if any(leaf.space == HOST_SPACE for leaf in leaves(x.shape))
    }
    held: dict[str, int] = defaultdict(int)
    host = 0
    paths = jax.tree_util.tree_flatten_with_path((state, batch))[0]
    for (path, leaf), sharding in zip(paths, jax.tree.leaves(places), strict=True):
        name = ("state", "batch")[path[0].idx] + jax.tree_util.keystr(path[1:])
        size = device_bytes(leaf, sharding)
        if name in hosted:
            host += size
            continue
        part = "batch" if path[0].idx else getattr(path[1], "name", "")
        held[part if part in ("batch", "params", "opt_state") else "other"] += size
    return held, host


def _temporaries(
    placed: Any, program: Program, state: Any
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of temporaries by kind: those alive at the peak, and each kind's own most."""
    shapes = _parameter_shapes(state, placed)
    platform = next(iter(jax.tree.leaves(placed)[0].device_set)).platform
    counts = main_memory(platform)

    def add_up(buffers: list[Buffer]) -> dict[str, int]:
        sizes: dict[str, int] = dict.fromkeys(TEMPORARIES, 0)
        for buffer in buffers:
            sizes[kind_of(buffer, shapes)] += buffer.bytes
        return sizes

    def most(kind: str) -> int:
        return add_up(peak(program, counts, lambda x: kind_of(x, shapes) == kind))[kind]

    sizes, largest = add_up(peak(program, counts)), {kind: most(kind) for kind in TEMPORARIES}
    return sizes, largest


def _parameter_shapes(state: Any, placed: Any) -> set[tuple[int, ...]]:
    """Shapes that tell a gradient: of whole parameters, and of the parts that devices hold."""
    whole = jax.tree.leaves(state.params, is_leaf=is_padded)
    stored, shardings = jax.tree.leaves(state.params), jax.tree.leaves(placed.params)
    shapes = {_core(leaf.shape) for leaf in (*whole, *stored)}
    shapes |= {_core(s.shard_shape(x.shape)) for x, s in zip(stored, shardings, strict=True)}
    moments = zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(placed.opt_state), strict=True)
    # what ZeRO splits of a gradient, it splits as it does the moments
    shapes |= {_core(s.shard_shape(x.shape)) for x, s in moments if _core(x.shape) in shapes}
    return shapes - {()}  # no scalars


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without order and without dims of 1: gradients are made transposed, too."""
    return tuple(sorted(size for size in shape if size > 1))


def kind_of(buffer: Buffer, parameter_shapes: set[tuple[int, ...]]) -> str:
    """What a temporary is for, by where in the traced program it comes from, and its shape."""
    if buffer.sent:
        return "collectives"
    name = buffer.op_name
    backward = "transpose(" in name and "rematted_computation" not in name
    forward = "jvp(" in name and not backward
    if "shard_map" in name and not forward and _core(buffer.leaf.dims) in parameter_shapes:
        return "gradients"
    return "activations" if forward or backward else "other"
