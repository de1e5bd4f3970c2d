"""Values that differ by replica: `PerReplica`, one pytree node around each such array.

With N replicas and a parameter of shape S, the value is one global array of shape [N, *S],
split over the data axes so that device i holds row i:

    device 0: value[0]    device 1: value[1]    ...    device N-1: value[N-1]

It costs each device what its own part would cost. Gradients that have not been reduced yet are
of this type, and so is anything a transformation keeps for each replica. Because the type is
not an array, forgetting to reduce is an error and never a broadcast.

This module only represents such values; `jdp.all_reduce` and its kin end the replica axis.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.mesh import AnyMesh, AxisNames, axis_size, data_axes, found_mesh
from jdp.padded import Padded

UNREDUCED = "jdp: gradient that differs by replica"
TAKEN = "jdp: gradient taken by a reduction"

_REMEDY = (
    "one value for each replica, not reduced yet. Put jdp.all_reduce() before what uses it: "
    "optax.chain(jdp.all_reduce(), ...)"
)


_SPLIT_REMEDY = (
    "a gradient that was reduced in the backward pass and lies split over the devices. Give it to "
    "the transformation that asked for it: jdp.zero2(...) or jdp.zero3(...), outermost but for "
    "jdp.multi_steps, with clips and norms inside"
)


class _Described(type):
    """Makes JAX's own message about mismatched trees, which prints the type, say what to do."""

    remedy: str

    def __repr__(cls) -> str:
        return f"jdp.{cls.__name__} ({cls.remedy})"


def _refuse(self: Any, *_: Any, **__: Any) -> Any:
    raise TypeError(
        f"This value of shape {self.shape} is a jdp.{type(self).__name__}: {type(self).remedy}. "
        "Computing with it as if it were the plain gradient would be wrong somewhere, silently. "
        "The plain array, as it is stored, is `.value`."
    )


class _Value(metaclass=_Described):
    """What both kinds of gradients have in common: no arithmetic."""

    remedy = ""
    __slots__ = ()
    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.value.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the value."""
        return self.value.dtype

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __matmul__ = __rmatmul__ = __neg__ = _refuse
    __floordiv__ = __abs__ = __bool__ = __len__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __array__ = __jax_array__ = __float__ = __getitem__ = __iter__ = _refuse


@jax.tree_util.register_pytree_with_keys_class
class PerReplica(_Value):
    """One value for each replica, as a global array with a leading replica axis.

    The plain mean over the leading dim is the value that is meant: weights, unequal shares and
    microbatches are settled when the value is made.

    Args:
        value: Array of shape [N, *shape], split over `axes` in its leading dim.
        weight: What this mean weighs against those of other steps, a scalar: the sum of the
            weights of its microbatches. `None` where that has no meaning.
        axes: The data axes that the N replicas lie along.
        mesh: The mesh of these axes.

    Example:
        >>> mesh = jdp.make_mesh()
        >>> per_replica = jdp.PerReplica(jnp.ones((8, 3)), axes=("data",), mesh=mesh)
        >>> per_replica.shape, per_replica.num_replicas
        ((8, 3), 8)
    """

    remedy = _REMEDY
    __slots__ = ("axes", "mesh", "value", "weight")

    def __init__(self, value: Any, weight: Any = None, *, axes: tuple[str, ...], mesh: AnyMesh):
        self.value = value
        self.weight = weight
        self.axes = axes
        self.mesh = mesh

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Children under the names value and weight; the placement is static."""
        key = jax.tree_util.GetAttrKey
        return ((key("value"), self.value), (key("weight"), self.weight)), (self.axes, self.mesh)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "PerReplica":
        """The inverse of flattening."""
        return cls(*children, axes=aux[0], mesh=aux[1])

    @property
    def num_replicas(self) -> int:
        """N, the number of replicas."""
        return axis_size(self.mesh, self.axes)

    def __repr__(self) -> str:
        return f"PerReplica({self.value!r}, axes={self.axes})"


@jax.tree_util.register_pytree_with_keys_class
class Reduced(_Value):
    """A gradient reduced where it arose, on its way to the ZeRO stage that it was split for.

    Args:
        value: The mean gradient as the stage stores it, a global array or a `Padded` one.
        weight: As of a `PerReplica`.
    """

    remedy = _SPLIT_REMEDY
    __slots__ = ("value", "weight")

    def __init__(self, value: Any, weight: Any = None) -> None:
        self.value = value
        self.weight = weight

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Children under the names value and weight."""
        key = jax.tree_util.GetAttrKey
        return ((key("value"), self.value), (key("weight"), self.weight)), None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Reduced":
        """The inverse of flattening."""
        return cls(*children)

    def __repr__(self) -> str:
        return f"Reduced({self.value!r})"


def is_reduced(leaf: Any) -> bool:
    """Whether a node of a pytree is a `Reduced`; for `is_leaf`."""
    return isinstance(leaf, Reduced)


def is_gradient(leaf: Any) -> bool:
    """Whether a node of a pytree is one that `jdp.value_and_grad` makes; for `is_leaf`."""
    return isinstance(leaf, (PerReplica, Reduced))


def give_reduced(values: list[Any], weight: Any, treedef: Any) -> Any:
    """Wraps stored gradients, marked as not taken yet."""
    marked = jax.tree.map(lambda value: checkpoint_name(value, UNREDUCED), values)
    return treedef.unflatten([Reduced(value, weight) for value in marked])


def take_reduced(updates: Any) -> Any:
    """The stored gradients of a tree of `Reduced`, marked as taken."""
    return jax.tree.map(
        lambda leaf: jax.tree.map(lambda x: checkpoint_name(x, TAKEN), leaf.value),
        updates,
        is_leaf=is_reduced,
    )


def is_per_replica(leaf: Any) -> bool:
    """Whether a node of a pytree is a `PerReplica`; for `is_leaf`."""
    return isinstance(leaf, PerReplica)


def is_stored(leaf: Any) -> bool:
    """Whether a node is an array stored in a way of its own, `PerReplica` or `Padded`."""
    return isinstance(leaf, (PerReplica, Padded))


def map_per_replica(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` that hands over whole `PerReplica` nodes."""
    return jax.tree.map(fn, tree, *rest, is_leaf=is_per_replica)


def take_per_replica(updates: Any, caller: str) -> tuple[Any, tuple[str, ...], AnyMesh]:
    """What a reduction needs of its input: plain values, their axes and mesh.

    Args:
        updates: A pytree whose every leaf must be a `PerReplica`.
        caller: The public name of the transformation, for the message.

    Returns:
        The tree of plain [N, *shape] arrays, the axes, and the mesh.

    Raises:
        ValueError: If a leaf has no replica axis, or leaves lie along different axes.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_per_replica)
    for path, leaf in leaves:
        where = f"gradient {jax.tree_util.keystr(path)}" if path else "a gradient"
        if not is_per_replica(leaf):
            raise ValueError(
                f"{caller} received {where} of shape {jnp.shape(leaf)}, which has no replica axis: "
                "it is already reduced, and reducing it again would change nothing but cost "
                "communication. Remove this transform, or take the gradient with "
                "jdp.value_and_grad. (If something stands around it that rebuilds the gradients, "
                "as optax.flatten and optax.MultiSteps do, take that away: jdp.multi_steps "
                "accumulates.)"
            )
        if leaf.axes != leaves[0][1].axes:
            raise ValueError(
                f"{caller} received {where}, which differs along {leaf.axes}, beside "
                f"others that differ along {leaves[0][1].axes}: one reduction serves one set of "
                "axes. Take all gradients with one jdp.value_and_grad."
            )
        check_rows(leaf, where)
    if not leaves:
        return updates, (), None  # type: ignore[return-value]
    first = leaves[0][1]
    # the name lets the step builder see that nothing touched the value on its way here
    values = map_per_replica(lambda leaf: checkpoint_name(leaf.value, TAKEN), updates)
    return values, first.axes, first.mesh


def check_rows(leaf: PerReplica, where: str, count: int | None = None) -> None:
    """Refuses a value that has not one row for each replica: `shard_map` would drop the others."""
    count = leaf.num_replicas if count is None else count
    if (rows := jnp.shape(leaf.value)[0]) != count:
        raise ValueError(
            f"{where} holds values of {rows} replicas, but there are {count} along {leaf.axes}: "
            "rows would be dropped or counted twice, silently. A state that was saved on another "
            "number of devices is taken over by jdp.restage(saved, jdp.init_state(params, tx, "
            "mesh))."
        )


def wide(x: Any) -> Any:
    """The dtype in which values like x are added up: float32, or wider."""
    return jnp.promote_types(jnp.result_type(x), jnp.float32)


def widen(tree: Any) -> Any:
    """To float32 what is narrower: norms and moments of gradients are taken in it."""
    return jax.tree.map(lambda x: jnp.asarray(x, wide(x)), tree)


def find_nodes(tree: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    """The outermost nodes of these types in a pytree, such as an optimizer state."""
    is_kind = lambda node: isinstance(node, kinds)  # noqa: E731
    return list(filter(is_kind, jax.tree.leaves(tree, is_leaf=is_kind)))


def weight_of(updates: Any) -> Any:
    """The weight that all leaves of a gradient share; `None` if they have none."""
    weights = jax.tree.leaves(jax.tree.map(lambda g: g.weight, updates, is_leaf=is_gradient))
    return weights[0] if weights else None


def give_per_replica(values: Any, weight: Any, axes: tuple[str, ...], mesh: AnyMesh) -> Any:
    """Wraps a tree of [N, *shape] arrays, marked as not reduced yet."""
    return jax.tree.map(
        lambda value: PerReplica(checkpoint_name(value, UNREDUCED), weight, axes=axes, mesh=mesh),
        values,
    )


def zeros_per_replica(params: Any, caller: str, axis: AxisNames | None = None) -> Any:
    """Float32 zeros of shape [N, *shape] for each parameter, each replica holding its own row.

    The mesh is that of the parameters, or the one set by `jax.set_mesh`.

    Raises:
        ValueError: If there is no mesh to be found.
    """
    does = f"{caller} keeps a value for each replica, so its init must know the mesh"
    mesh = found_mesh(params, does)
    axes = data_axes(mesh, axis)
    count = axis_size(mesh, axes)
    explicit = any(
        mesh.axis_types[mesh.axis_names.index(name)] == AxisType.Explicit for name in axes
    )

    def zeros(param: Any) -> PerReplica:
        shape = (count, *param.shape)
        if explicit:
            spec = getattr(getattr(param, "sharding", None), "spec", None) or ()
            value = jnp.zeros(shape, jnp.float32, device=NamedSharding(mesh, P(axes, *spec)))
        else:
            spec = P(axes, *[P.UNCONSTRAINED] * len(param.shape))
            value = jax.lax.with_sharding_constraint(
                jnp.zeros(shape, jnp.float32), NamedSharding(mesh, spec)
            )
        return PerReplica(value, axes=axes, mesh=mesh)

    return jax.tree.map(zeros, params)
