"""Arrays that are stored longer than they are, so that their devices hold equal parts.

    logical [5, 3]  --lengthen-->  stored [8, 3], a `Padded` of shape (5, 3)  --logical-->  [5, 3]

JAX splits an array over N devices only where N divides a dim. Where it divides none, the array is
stored with rows that mean nothing behind the others; whoever looks at it sees its logical shape,
and so does a checkpoint that is written with `logical`. Nothing here decides what is split.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


@jax.tree_util.register_pytree_with_keys_class
class Padded:
    """An array stored longer than it is in one dim, so that its devices hold equal parts.

    It has the shape, and in computations the value, of the logical array; NumPy and JAX functions
    take it as that. `jdp.logical` turns a whole tree into plain arrays.

    Args:
        value: The stored array; what is beyond `length` in dim `dim` means nothing.
        dim: The padded dim.
        length: Its logical length.

    Example:
        >>> jdp.Padded(jnp.arange(8.0), dim=0, length=5).shape
        (5,)
    """

    __slots__ = ("dim", "length", "value")

    def __init__(self, value: Any, *, dim: int, length: int) -> None:
        self.value = value
        self.dim = dim
        self.length = length

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """The stored array under the name value; the logical length is static."""
        return ((jax.tree_util.GetAttrKey("value"), self.value),), (self.dim, self.length)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Padded":
        """The inverse of flattening."""
        return cls(*children, dim=aux[0], length=aux[1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        shape = self.value.shape
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.value.ndim

    @property
    def size(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the array."""
        return self.value.dtype

    @property
    def sharding(self) -> Any:
        """Where the stored array lies."""
        return self.value.sharding

    def __jax_array__(self) -> jax.Array:
        sharding, value = jax.typeof(self.value).sharding, self.value
        spec = tuple(sharding.spec)
        if self.dim < len(spec) and isinstance(spec[self.dim], (str, tuple)):
            # an Explicit type cannot be cut to an uneven length
            place = P(*spec[: self.dim], None, *spec[self.dim + 1 :])
            value = jax.sharding.reshard(value, NamedSharding(sharding.mesh, place))
        return jax.lax.slice_in_dim(value, 0, self.length, axis=self.dim)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        stored = np.asarray(self.value)
        return np.asarray(stored[(slice(None),) * self.dim + (slice(self.length),)], dtype)

    def __repr__(self) -> str:
        return f"Padded({self.value!r}, dim={self.dim}, length={self.length})"


def is_padded(leaf: Any) -> bool:
    """Whether a node of a pytree is a `Padded`; for `is_leaf`."""
    return isinstance(leaf, Padded)


def map_logical(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` that hands over whole `Padded` nodes."""
    return jax.tree.map(fn, tree, *rest, is_leaf=is_padded)


def logical(tree: Any) -> Any:
    """Turns `Padded` leaves into plain arrays of their logical shapes; other leaves stay.

    Args:
        tree: Any pytree, such as a `TrainState`; of arrays, NumPy arrays or shapes.

    Returns:
        The same tree without `Padded` nodes. What was padded lies whole on each device if it is
        turned outside of a `jax.jit`.

    Example:
        >>> jdp.logical({"w": jdp.Padded(jnp.arange(8.0), dim=0, length=3)})["w"]
        Array([0., 1., 2.], dtype=float32)
    """
    return turn_nodes(tree, is_padded, view, _whole, on_host=np.asarray)


def turn_nodes(
    tree: Any,
    is_node: Callable[[Any], bool],
    fn: Callable[[Any], jax.Array],
    place: Callable[[Any], Any],
    on_host: Callable[[Any], Any],
) -> Any:
    """Turns nodes of a tree (shapes, arrays, NumPy arrays) into what `fn` makes of each."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_node)
    waiting = []
    for i, leaf in enumerate(leaves):
        if not is_node(leaf):
            continue
        if isinstance(leaf.value, jax.ShapeDtypeStruct):
            leaves[i] = jax.eval_shape(fn, leaf)
        elif isinstance(leaf.value, jax.Array):
            waiting.append(i)
        else:
            leaves[i] = on_host(leaf)
    nodes = [leaves[i] for i in waiting]
    for i, array in zip(waiting, _in_one_program(fn, nodes, place), strict=True):
        leaves[i] = array
    return treedef.unflatten(leaves)


def _in_one_program(
    fn: Callable[[Any], jax.Array], nodes: list[Any], place: Callable[[Any], Any]
) -> list[jax.Array]:
    """Applies `fn` to each array, in one program for each set of devices that they lie on.

    Each may take a collective, and emulated devices bear few programs with one at a time. What is
    being traced is simply computed.
    """
    results: list[Any] = [None] * len(nodes)
    together: dict[Any, list[int]] = {}
    for i, node in enumerate(nodes):
        if isinstance(node.value, Tracer):
            results[i] = fn(node)
        else:
            together.setdefault(frozenset(node.value.sharding.device_set), []).append(i)
    for indices in together.values():
        some = [nodes[i] for i in indices]
        program = jax.jit(_map, static_argnums=0, out_shardings=[*map(place, some)])
        for i, result in zip(indices, program(fn, some), strict=True):
            results[i] = result
    return results


def _map(fn: Callable[[Any], jax.Array], nodes: list[Any]) -> list[jax.Array]:
    return [*map(fn, nodes)]


def _whole(leaf: Padded) -> NamedSharding | None:
    """Where the logical array of a stored one lies: whole in the dim that was padded."""
    if not isinstance(leaf.value.sharding, NamedSharding):
        return None
    spec = tuple(leaf.value.sharding.spec)
    return NamedSharding(
        leaf.value.sharding.mesh, P(*spec[: leaf.dim], None, *spec[leaf.dim + 1 :])
    )


def view(leaf: Any) -> Any:
    """The logical array of a stored one."""
    return leaf.__jax_array__() if is_padded(leaf) else leaf


def stored_array(leaf: Any) -> Any:
    """The stored array itself."""
    return leaf.value if is_padded(leaf) else leaf


def lengthen(x: Any, length: int, dim: int) -> Any:
    """An array with zeros behind it in one dim, for host arrays a host array."""
    if x.shape[dim] == length:
        return x
    widths = [(0, length - size if d == dim else 0) for d, size in enumerate(x.shape)]
    return np.pad(x, widths) if isinstance(x, np.ndarray) else jnp.pad(x, widths)


def put(x: Any, like: Any) -> Any:
    """A copy of a logical array, of a device or the host, stored and placed as `like` is.

    Host arrays go part by part: no device ever holds a whole one.
    """
    target = stored_array(like)

    def store(x: Any) -> Any:
        x = view(x) if isinstance(x, np.ndarray) else jnp.copy(view(x))
        return lengthen(x, target.shape[like.dim], like.dim) if is_padded(like) else x

    array = stored_array(x)
    if isinstance(array, jax.Array) and array.sharding.device_set == target.sharding.device_set:
        stored = jax.jit(store, out_shardings=target.sharding)(x)
    elif isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended):
        stored = jax.device_put(jnp.copy(x), target.sharding)
    else:
        host = store(np.array(x))  # a copy: a device may keep the caller's memory as its own
        stored = jax.make_array_from_callback(host.shape, target.sharding, lambda i: host[i])
    return Padded(stored, dim=like.dim, length=like.length) if is_padded(like) else stored
