"""Which part of each array a device holds: the rule, its record, and the way there and back.

With N devices along the split axes, a parameter of shape [a, b] and all that mirrors it lie so:

    N divides a        split in dim 0      device i: rows i*a/N ... (i+1)*a/N - 1
    N divides b only   split in dim 1      device i: its columns
    N divides neither  padded              stored as [N*ceil(a/N), b], a `Padded` of shape [a, b]
    small              whole               every device holds all of it

In: shapes. Out: a `Placement`, a static record which ZeRO's state carries as part of its tree
structure, so that whoever holds the state knows where everything lies, also while tracing. This
module knows no optimizer and sends nothing.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.mesh import DATA_AXES, AnyMesh, ambient_mesh, axis_size, is_whole, names_in
from jdp.padded import Padded, is_padded, lengthen, put, stored_array
from jdp.replica import find_nodes

MIN_SIZE = 256  # elements: below, another collective costs more than 3 KB of optimizer state


class Part(NamedTuple):
    """How one array lies.

    Attributes:
        dim: The dim that is split; `None` if every device holds the whole.
        size: Length of that dim.
        stored: The same rounded up to a multiple of the number of parts.
        spec: What the user's own axes ("model") split, one entry for each dim.
    """

    dim: int | None
    size: int
    stored: int
    spec: tuple[Any, ...]

    @property
    def padded(self) -> bool:
        """Whether the stored array is longer than the logical one."""
        return self.stored != self.size

    def over(self, axes: tuple[str, ...]) -> P:
        """The split along `axes` alone, as a shard_map over them wants it."""
        return P() if self.dim is None else P(*[None] * self.dim, axes)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where parameters, gradients and optimizer state lie; static and hashable.

    Attributes:
        stage: 1 splits the optimizer state, 2 gradients as well, 3 parameters as well, 0 nothing.
        mesh: The mesh.
        axes: The axes that arrays are split over.
        paths: The path of each parameter.
        shapes: The logical shape of each parameter.
        parts: How each parameter lies when it is split.
        min_size: Arrays of fewer elements are not split.
        in_backward: Whether gradients are reduced where they arise, in the backward pass.
        once: Whether in that of the last microbatch only.
        ordered: Or after it, added up in an order that does not depend on the number of devices.
        regather: Whether parameters are gathered again in the backward pass (stage 3).
        wire_dtype: Dtype that gradients are sent in; `None` sends them as they are.
    """

    stage: int
    mesh: AbstractMesh
    axes: tuple[str, ...]
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: tuple[Part, ...]
    min_size: int
    in_backward: bool = False
    once: bool = False
    ordered: bool = False
    regather: bool = False
    wire_dtype: Any = None

    @property
    def count(self) -> int:
        """N, the number of parts."""
        return axis_size(self.mesh, self.axes)

    @property
    def name(self) -> str:
        """The public name of the transformation."""
        if self.stage:
            return f"jdp.zero{self.stage}"
        return "jdp.all_reduce_in_order" if self.ordered else "jdp.all_reduce_in_backward"

    @property
    def specs(self) -> list[P]:
        """How parameters that are split lie along `axes`, as a shard_map over them wants it."""
        return [part.over(self.axes) for part in self.parts]

    def part_of(self, path: Any, shape: tuple[int, ...]) -> Part:
        """How a leaf of the optimizer state lies: as the parameter it mirrors, or by its shape."""
        end = jax.tree_util.keystr(path)
        matches = [
            (len(name), part)
            for name, own, part in zip(self.paths, self.shapes, self.parts, strict=True)
            if own == shape and end.endswith(name)
        ]
        if matches:
            return max(matches, key=lambda match: match[0])[1]
        return choose_part(shape, (), self.count, stage=self.stage, min_size=self.min_size)


def choose_part(
    shape: tuple[int, ...],
    spec: tuple[Any, ...],
    count: int,
    *,
    stage: int = 1,
    min_size: int = MIN_SIZE,
) -> Part:
    """The rule: how an array lies on `count` devices.

    The first dim that `count` divides and that no axis of the user's splits; from stage 2 on one
    of the last two dims if possible, since an earlier one may count layers that are scanned over.
    If none divides, the longest is padded.
    """
    spec = (*spec, *[None] * (len(shape) - len(spec)))
    whole = Part(None, 0, 0, spec)
    if count == 1 or math.prod(shape) < max(min_size, 1):
        return whole
    dims = [dim for dim in range(len(shape)) if spec[dim] is None]
    if stage >= 2:
        dims = [d for d in dims if d >= len(shape) - 2] + [d for d in dims if d < len(shape) - 2]
    for dim in dims:
        if shape[dim] % count == 0:
            return Part(dim, shape[dim], shape[dim], spec)
    if not dims:
        return whole
    longest = max(dims, key=lambda dim: shape[dim])
    return Part(longest, shape[longest], -(-shape[longest] // count) * count, spec)


_user_specs: ContextVar[dict[str, tuple[Any, ...]]] = ContextVar("_user_specs")


@contextmanager
def user_specs(params: Any) -> Iterator[None]:
    """Lets transformations that are initialised within know what the user's own axes split.

    A traced array does not say where it lies on Auto axes; whoever has the arrays says it here.
    """
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_padded)[0]:
        if isinstance(sharding := getattr(leaf, "sharding", None), NamedSharding):
            found[jax.tree_util.keystr(path)] = tuple(sharding.spec)
    token = _user_specs.set(found)
    try:
        yield
    finally:
        _user_specs.reset(token)


def spec_of_user(path: Any, leaf: Any, axes: tuple[str, ...]) -> tuple[Any, ...]:
    """What the user's own axes split of a parameter, as far as that can be known."""
    known = _user_specs.get({}).get(jax.tree_util.keystr(path))
    if known is None:
        sharding = getattr(leaf, "sharding", None)
        known = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    return without(known, (*axes, *DATA_AXES))


def without(spec: Any, axes: tuple[str, ...]) -> tuple[Any, ...]:
    """A spec with `axes` taken out."""

    def one(entry: Any) -> Any:
        rest = tuple(name for name in names_in(entry) if name not in axes)
        return (rest[0] if len(rest) == 1 else rest) if rest else None

    return tuple(one(entry) for entry in spec)


def full_spec(part: Part, axes: tuple[str, ...]) -> P:
    """The spec of a stored array: the user's axes and the split."""
    entries = list(part.spec)
    if part.dim is not None:
        entries[part.dim] = axes
    return P(*entries)


def on_user_axes(fn: Callable[[jax.Array], jax.Array], spec: tuple[Any, ...]) -> Any:
    """Applies a function of one array, on one replica, to each of the parts the user's axes make.

    Left to the compiler, a reduce-scatter or all-gather over the data axes would first gather the
    array over the user's.
    """
    names = {name for entry in spec for name in names_in(entry)}
    if not names:
        return fn
    return jax.shard_map(fn, in_specs=P(*spec), out_specs=P(*spec), axis_names=names)


def store(x: Any, part: Part) -> Any:
    """A logical array as it is stored: padded if need be, not placed yet."""
    return mark(lengthen(x, part.stored, part.dim or 0), part) if part.padded else x


def mark(stored: Any, part: Part) -> Any:
    """A stored array with its logical length."""
    return Padded(stored, dim=part.dim or 0, length=part.size) if part.padded else stored


def constrain(leaf: Any, part: Part, mesh: AnyMesh, axes: tuple[str, ...]) -> Any:
    """Says where a stored array lies."""
    value = leaf.value if is_padded(leaf) else leaf
    if jnp.ndim(value) == 0 or jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return leaf
    value = lies(value, NamedSharding(mesh, full_spec(part, axes)))
    return Padded(value, dim=leaf.dim, length=leaf.length) if is_padded(leaf) else value


def whole_params(params: Any, placement: Placement) -> Any:
    """Gathers parameters that were split over data axes, as a stage that keeps them whole wants."""

    def one(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return leaf
        spec = P(*without(sharding.spec, (*placement.axes, *DATA_AXES)))
        place = NamedSharding(sharding.mesh, spec)
        return leaf if place.is_equivalent_to(sharding, leaf.ndim) else jax.device_put(leaf, place)

    return jax.tree.map(one, params)


def stored_places(stored: Any, placement: Placement, mesh: AnyMesh) -> Any:
    """The shardings of stored parameters, as a tree of their structure."""
    leaves, treedef = jax.tree.flatten(stored)
    pairs = zip(leaves, placement.parts, strict=True)
    return treedef.unflatten(
        [NamedSharding(mesh, full_spec(part, placement.axes)) for _, part in pairs]
    )


def zeros_split(params: Any, placement: Placement) -> Any:
    """Float32 zeros for each parameter, split over the devices as its gradient will be."""
    mesh = ambient_mesh(params) or placement.mesh
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_padded)

    def one(leaf: Any, part: Part) -> Any:
        zeros = store(jnp.zeros(leaf.shape, jnp.float32), part)
        return constrain(zeros, part, mesh, placement.axes)

    pairs = zip(leaves, placement.parts, strict=True)
    return treedef.unflatten([one(leaf, part) for leaf, part in pairs])


def split_params(params: Any, placement: Placement, mesh: AnyMesh) -> Any:
    """Puts parameters (arrays, host arrays or shapes) where a stage that splits them has them."""
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_padded)

    def one(leaf: Any, part: Part) -> Any:
        shape = list(jnp.shape(leaf))
        if part.dim is not None:
            shape[part.dim] = part.stored
        place = NamedSharding(mesh, full_spec(part, placement.axes))
        like = mark(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=place), part)
        return like if isinstance(leaf, jax.ShapeDtypeStruct) else put(leaf, like)

    pairs = zip(leaves, placement.parts, strict=True)
    return treedef.unflatten([one(leaf, part) for leaf, part in pairs])


def lies(x: Any, sharding: NamedSharding) -> jax.Array:
    """The same array, placed; on Explicit axes the placement is part of its type."""
    if is_explicit(sharding.mesh):
        return jax.sharding.reshard(x, explicit_part(sharding))
    return jax.lax.with_sharding_constraint(x, sharding)


def explicit_part(sharding: NamedSharding) -> NamedSharding:
    """What can be said of it where some axes are Explicit: Auto ones are left to the compiler."""
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))

    def one(entry: Any) -> Any:
        return tuple(n for n in names_in(entry) if types[n] == AxisType.Explicit) or None

    return NamedSharding(sharding.mesh, P(*[one(entry) for entry in sharding.spec]))


def is_explicit(mesh: AnyMesh) -> bool:
    """Whether any axis of the mesh is Explicit."""
    return AxisType.Explicit in mesh.axis_types


@jax.tree_util.register_pytree_with_keys_class
class ZeroState:
    """State of `jdp.zero1`, `jdp.zero2` and `jdp.zero3`.

    Attributes:
        inner_state: State of the inner transformation, split over the devices.
        placement: Where everything lies; part of the tree's structure.
    """

    __slots__ = ("inner_state", "placement")

    def __init__(self, inner_state: Any, placement: Placement) -> None:
        self.inner_state = inner_state
        self.placement = placement

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """The inner state; the placement is static."""
        return ((jax.tree_util.GetAttrKey("inner_state"), self.inner_state),), self.placement

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "ZeroState":
        """The inverse of flattening."""
        return cls(*children, placement=aux)

    def __repr__(self) -> str:
        return f"ZeroState({self.inner_state!r}, stage={self.placement.stage})"


def find_placement(opt_state: Any) -> Placement | None:
    """The placement of the ZeRO stage in an optimizer state; `None` if there is none.

    Raises:
        ValueError: If there are two, one beside or inside the other.
    """
    found = find_nodes(opt_state, ZeroState)
    if not found:
        return None
    if len(found) > 1 or find_placement(found[0].inner_state) is not None:
        raise ValueError(
            f"The chain holds {found[0].placement.name} and another ZeRO stage. One stage places "
            "the whole state: put it outermost, around optax.partition or optax.masked too."
        )
    return found[0].placement


def check_min_size(name: str, min_size: Any) -> None:
    """Refuses what is no number of elements."""
    if not is_whole(min_size) or min_size < 0:
        raise ValueError(
            f"{name}(min_size={min_size!r}) must be a whole number of elements; arrays of fewer "
            "are left alone, and 0 takes all."
        )


def check_count(leaves: Any, placement: Placement) -> None:
    """Refuses a tree that is not one of the parameters that the stage was made for."""
    if len(leaves) != len(placement.parts):
        raise ValueError(
            f"{placement.name} was made for {len(placement.parts)} parameters and has met a tree "
            f"of {len(leaves)}. The state belongs to other parameters, or a transformation changes "
            "the structure of the gradients. Make the state anew with jdp.init_state."
        )


def check_axes(placement: Placement, axes: tuple[str, ...]) -> None:
    """Refuses gradients that do not differ along the axes they are to be split over."""
    if missing := [name for name in placement.axes if name not in axes]:
        raise ValueError(
            f"{placement.name} splits over the axes {placement.axes}, but the gradients differ "
            f"along {axes}, not along {missing[0]!r}. Give jdp.train_step or jdp.value_and_grad "
            "the same axis, or split over one of theirs."
        )


def as_stored(params: Any, placement: Placement) -> tuple[list[jax.Array], Any]:
    """Parameters as plain arrays: as they are stored in stage 3, whole in stage 2."""
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_padded)
    check_count(leaves, placement)
    if placement.stage < 3:
        return leaves, treedef
    stored = [
        leaf if is_padded(leaf) else store(leaf, part)
        for leaf, part in zip(leaves, placement.parts, strict=True)
    ]
    return [stored_array(leaf) for leaf in stored], treedef


@functools.cache
def abstract(mesh: AnyMesh) -> AbstractMesh:
    """The shape and names of a mesh without its devices."""
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
