"""Ways to train: what to give `jdp.make_mesh`, `jdp.init_state` and `jdp.train_step`.

    rows, devices, nodes  --strategies-->  Strategy: stage, mesh, microbatch, remat, wire, offload

A `Strategy` is a value; nothing here knows how good it is (`jdp.planning` does).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jdp.hierarchy import hierarchical
from jdp.mesh import is_whole, make_mesh
from jdp.offload import offload as in_host_memory
from jdp.power import power_sgd
from jdp.probe import with_stage
from jdp.reduce import all_reduce
from jdp.remat import checkpoint_policy
from jdp.step_time import POWER_RANK
from jdp.train import TrainStep, train_step

WIRES = ("exact", "bfloat16", "int8", "power_sgd")
REMATS: tuple[bool | str, ...] = (False, "dots_saveable", True)


class Strategy(NamedTuple):
    """A way to train: everything that `jdp.make_mesh` and `jdp.train_step` are to be given.

    Attributes:
        stage: ZeRO stage; 0 is plain data parallelism.
        axis_names: Axes of the mesh.
        shape: Devices along each.
        split_axis: The axis that states are split along; `None`: all.
        microbatch: Rows of a microbatch.
        microbatches: How many each device works through in a step.
        remat: See `jdp.train_step`.
        wire: What gradients are sent as: "exact", "bfloat16", "int8" or "power_sgd".
        offloaded: Whether the optimizer state rests in the host's memory.
        optimizer: The optimizer that it was planned for.
    """

    stage: int
    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    split_axis: str | None
    microbatch: int
    microbatches: int
    remat: bool | str
    wire: str
    offloaded: bool
    optimizer: Any

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.shape)

    @property
    def split_over(self) -> int:
        """Devices that share a state."""
        sizes = dict(zip(self.axis_names, self.shape, strict=True))
        return sizes[self.split_axis] if self.split_axis else self.devices

    @property
    def tx(self) -> optax.GradientTransformation:
        """The transformation: the optimizer with what communicates."""
        inner = self.optimizer
        dtype = {"bfloat16": jnp.bfloat16, "int8": jnp.int8}.get(self.wire)
        if self.wire == "power_sgd":
            before = power_sgd(rank=POWER_RANK)
            inner = with_stage(inner, self.stage, axis=self.split_axis) if self.stage else inner
            tx = optax.chain(before, inner)
        elif self.stage:
            tx = with_stage(inner, self.stage, axis=self.split_axis, wire_dtype=dtype)
        elif len(self.shape) == 2:
            tx = optax.chain(hierarchical(across_wire_dtype=dtype), inner)
        else:
            feedback = self.wire == "int8"
            tx = optax.chain(all_reduce(wire_dtype=dtype, error_feedback=feedback), inner)
        return in_host_memory(tx) if self.offloaded else tx

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh, of the first of all devices or of those given."""
        chosen = None if devices is None else devices[: self.devices]
        if len(self.shape) == 1:
            return make_mesh(self.axis_names, devices=chosen, num_devices=self.devices)
        return make_mesh(self.axis_names, self.shape, devices=chosen, num_devices=self.devices)

    def step(self, loss_fn: Callable[..., Any], mesh: Mesh | None = None) -> TrainStep:
        """The training step of a loss."""
        there = self.mesh() if mesh is None else mesh
        return train_step(loss_fn, self.tx, there, microbatch=self.microbatch, remat=self.remat)

    def code(self) -> str:
        """It, as one would write it, for a `loss_fn` and an `optimizer` of one's own."""
        mesh = f"jdp.make_mesh(num_devices={self.devices})"
        if len(self.shape) > 1:
            mesh = f"jdp.make_mesh({self.axis_names}, {self.shape}, num_devices={self.devices})"
        remat = f", remat={self.remat!r}" if self.remat else ""
        tx = self._code_of_tx()
        needed = {"jnp.": "import jax.numpy as jnp", "optax.": "import optax", "": "import jdp"}
        imports = "\n".join(line for name, line in needed.items() if name in tx)
        return (
            f"{imports}\n\nmesh = {mesh}\ntx = {tx}\n"
            f"step = jdp.train_step(loss_fn, tx, mesh, microbatch={self.microbatch}{remat})"
        )

    def _code_of_tx(self) -> str:
        dtype = {"bfloat16": "jnp.bfloat16", "int8": "jnp.int8"}.get(self.wire)
        given = [f"axis={self.split_axis!r}"] if self.split_axis else []
        given += ['reduce="microbatch"'] if self.stage == 2 else []
        given += [f"wire_dtype={dtype}"] if dtype and self.stage else []
        staged = f"jdp.zero{self.stage}({', '.join(['optimizer', *given])})"
        if self.wire == "power_sgd":
            behind = staged if self.stage else "optimizer"
            code = f"optax.chain(jdp.power_sgd(rank={POWER_RANK}), {behind})"
        elif self.stage:
            code = staged
        else:
            feedback = ", error_feedback=True" if self.wire == "int8" else ""
            how = f"jdp.all_reduce({f'wire_dtype={dtype}{feedback}' if dtype else ''})"
            if len(self.shape) > 1:
                how = f"jdp.hierarchical({f'across_wire_dtype={dtype}' if dtype else ''})"
            code = f"optax.chain({how}, optimizer)"
        return f"jdp.offload({code})" if self.offloaded else code

    def __str__(self) -> str:
        name = f"zero{self.stage}" if self.stage else "all_reduce"
        name += f" within {self.split_axis}" if self.split_axis else ""
        sizes = "x".join(map(str, self.shape))
        remat = f", remat {self.remat}" if isinstance(self.remat, str) else ""
        remat = ", remat" if self.remat is True else remat
        wire = "" if self.wire == "exact" else f", {self.wire}"
        host = ", offload" if self.offloaded else ""
        rows = f"{self.microbatches} x {self.microbatch} row{'s' if self.microbatch > 1 else ''}"
        return f"{name} on {sizes}, {rows}{remat}{wire}{host}"


def strategies(
    optimizer: optax.GradientTransformation,
    *,
    rows: int,
    devices: int,
    nodes: int = 1,
    offloads: Sequence[bool] = (False,),
    microbatches: Sequence[int] | None = None,
    remats: Sequence[bool | str] = REMATS,
    wires: Sequence[str] = WIRES,
) -> Iterator[Strategy]:
    """Enumerates the strategies that divide a batch.

    The most devices that divide the batch are tried every way, fewer only plain: to see whether
    more are worth it.

    Args:
        optimizer: The optimizer, without communication.
        rows: Rows of a step.
        devices: How many there are.
        nodes: On how many nodes.
        offloads: Whether to keep optimizer state in host memory.
        microbatches: Sizes to try, in rows; `None` halves a device's share.
        remats: Rematerialisations to try.
        wires: What to try on the wire.

    Raises:
        ValueError: If no number of devices divides the batch, no microbatch divides a device's
            share, or there is no such wire or rematerialisation.
        TypeError: If microbatches, remats or wires are not sequences of such.

    Example:
        >>> found = strategies(optax.sgd(0.1), rows=4, devices=2, remats=[False], wires=["exact"])
        >>> print(*list(found)[-2:], sep="; ")
        zero2 on 2, 2 x 1 row; zero3 on 2, 2 x 1 row
    """
    _check_ways(microbatches, remats, wires)
    counts = [n for n in range(1, devices + 1) if devices % n == 0 and rows % n == 0]
    if counts[-1] == 1 and devices > 1:
        raise ValueError(
            f"A batch of {rows} row{'s' if rows > 1 else ''} divides among none of 2 to {devices} "
            f"devices. Give global_batch a multiple of {devices}, such as "
            f"{-(-rows // devices) * devices}."
        )
    most = counts[-1]
    if not any(_microbatch_sizes(rows // count, microbatches) for count in counts):
        raise ValueError(
            f"None of microbatches={list(microbatches or ())} divides a device's share of "
            f"{rows} rows, {rows // most} on {most} devices. Give divisors of it, or leave "
            "microbatches out."
        )
    for count in counts:
        share = rows // count
        meshes = _meshes(nodes if most == devices else 1, count, most)
        for microbatch, remat, wire, (names, shape, axis), stage, away in itertools.product(
            _microbatch_sizes(share, microbatches), remats, wires, meshes, range(4), offloads
        ):
            if _sensible(stage, count, most, wire, shape, axis):
                k = share // microbatch
                yield Strategy(
                    stage, names, shape, axis, microbatch, k, remat, wire, away, optimizer
                )


def _check_ways(microbatches: Any, remats: Any, wires: Any) -> None:
    """Refuses what cannot be tried."""
    given = {"microbatches": microbatches, "remats": remats, "wires": wires}
    for name, values in given.items():
        if name == "microbatches" and values is None:
            continue
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise TypeError(
                f"jdp.plan({name}={values!r}): give a sequence of what to try, such as "
                f"{name}={_SUCH_AS[name]}."
            )
    for size in microbatches or ():
        if not is_whole(size) or size < 1:
            raise ValueError(
                f"jdp.plan(microbatches=...) holds {size!r}; a microbatch is a whole number of "
                "rows, at least 1."
            )
    for wire in wires:
        if wire not in WIRES:
            raise ValueError(
                f"jdp.plan(wires=...) holds {wire!r}; what jdp.plan can try is {', '.join(WIRES)}."
            )
    for remat in remats:
        if not isinstance(remat, bool | str):
            raise TypeError(
                f"jdp.plan(remats=...) holds {remat!r}; give True, False, or names of policies of "
                "jax.checkpoint_policies. A policy of your own belongs into the loss, with "
                "jax.checkpoint."
            )
        checkpoint_policy(remat)


_SUCH_AS = {"microbatches": "[1, 4]", "remats": "[False, True]", "wires": '["exact", "bfloat16"]'}


def _microbatch_sizes(share: int, given: Sequence[int] | None) -> list[int]:
    """Rows of a microbatch: the whole share, and halves of it."""
    if given is not None:
        return [m for m in dict.fromkeys(given) if m <= share and share % m == 0]
    sizes = [share]
    while sizes[-1] % 2 == 0 and len(sizes) < 6:
        sizes.append(sizes[-1] // 2)
    if sizes[-1] != 1:
        sizes.append(1)
    return sizes


def _meshes(
    nodes: int, count: int, most: int
) -> list[tuple[tuple[str, ...], tuple[int, ...], str | None]]:
    """Flat; and of several nodes node x device, split over all or within a node."""
    meshes: list[tuple[tuple[str, ...], tuple[int, ...], str | None]] = [
        (("data",), (count,), None)
    ]
    if nodes > 1 and count == most:
        shape = (nodes, count // nodes)
        meshes += [(("node", "device"), shape, axis) for axis in (None, "device")]
    return meshes


def _sensible(
    stage: int, count: int, most: int, wire: str, shape: tuple[int, ...], axis: str | None
) -> bool:
    """Leaves out what is another one under another name, or what jdp does not offer."""
    if count < most and (stage or wire != "exact"):
        return False  # fewer devices only to see whether more are worth it
    if count == 1:
        return stage == 0 and wire == "exact"
    if axis is not None and stage == 0:
        return False  # nothing is split
    if len(shape) == 2 and axis is None and (stage or wire == "power_sgd"):
        return False  # as on a flat mesh
    return not (wire == "power_sgd" and stage >= 2)  # reduced before the stage sees it
