"""Meshes and placement: which devices take part, along which axes, and what lies on them.

In: device lists, axis names, pytrees of arrays. Out: a plain `jax.sharding.Mesh` and pytrees
placed on it. A *data axis* is a mesh axis along which replicas lie; an axis of any other name
("model", say) belongs to the user and is left alone.

    devices --make_mesh--> Mesh --data_axes--> ("data",) --replicate--> arrays on every device

This module starts no backend when it is imported and sends nothing between devices.
"""

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AxisNames: TypeAlias = str | Sequence[str]
AnyMesh: TypeAlias = Mesh | AbstractMesh

DATA_AXES = ("data", "node", "device", "replica")
"""Names taken for data axes when none are given."""


def emulate_devices(num_devices: int) -> None:
    """Makes the CPU appear as `num_devices` devices, for trying parallel code on one machine.

    Call it before anything asks JAX for a device. It changes nothing on machines whose default
    backend is a GPU or a TPU.

    Args:
        num_devices: How many CPU devices JAX shall show, at least 1.

    Raises:
        RuntimeError: If JAX has already started with another number of CPU devices.
        ValueError: If `num_devices` is not a positive integer.

    Example:
        >>> jdp.emulate_devices(8)
        >>> len(jax.devices("cpu"))
        8
    """
    if not is_whole(num_devices) or num_devices < 1:
        raise ValueError(f"jdp.emulate_devices needs a positive whole number, got {num_devices!r}.")
    try:
        jax.config.update("jax_num_cpu_devices", int(num_devices))
    except RuntimeError as error:
        present = len(jax.devices("cpu"))
        if present != num_devices:
            raise RuntimeError(
                f"jdp.emulate_devices({num_devices}) came too late: JAX has already started with "
                f"{present} CPU device(s), and the number is read only once. Call it before the "
                "first use of jax.devices() or any array; in a notebook, restart the kernel and "
                "run it in the first cell."
            ) from error


def is_whole(x: Any) -> bool:
    """Whether x is an integer, of Python or NumPy; True and 2.0 are not."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def names_of(axis: AxisNames) -> tuple[str, ...]:
    """The axes that an `axis` argument names, one or several."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def names_in(entry: Any) -> tuple[str, ...]:
    """The axes in one entry of a PartitionSpec; none of `None` and UNCONSTRAINED."""
    names = entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in names if isinstance(name, str))


def make_mesh(
    axis_names: AxisNames = ("data",),
    shape: Sequence[int] | None = None,
    *,
    devices: Sequence[Any] | None = None,
    num_devices: int | None = None,
    axis_types: AxisType | Sequence[AxisType] | None = None,
) -> Mesh:
    """Arranges devices along named axes; by default all of them along one axis, "data".

    Args:
        axis_names: One name, or several. For two names without a shape, the devices are grouped
            by slice, or else by process: `("node", "device")` is (groups, devices per group).
        shape: Devices along each axis; one entry may be -1. May be left out for one axis or two.
        devices: The devices to use, in this order; `None` takes all, in the order that suits the
            machine's interconnect.
        num_devices: Use only the first so many.
        axis_types: `jax.sharding.AxisType` of each axis, or of all; Auto unless given. jdp works
            with Explicit data axes as well.

    Returns:
        A `jax.sharding.Mesh`.

    Raises:
        ValueError: If fewer devices are there than asked for, or the shape does not fit them.

    Example:
        >>> dict(jdp.make_mesh().shape)
        {'data': 8}
        >>> jdp.make_mesh(("data", "model"), (4, 2)).axis_names
        ('data', 'model')
    """
    names = names_of(axis_names)
    if len(set(names)) != len(names):
        raise ValueError(f"jdp.make_mesh got the axis names {names}; each must be another one.")
    chosen = _choose_devices(devices, num_devices)
    sizes = _fit_shape(names, shape, chosen)
    if isinstance(axis_types, AxisType):
        axis_types = (axis_types,) * len(names)
    types = tuple(axis_types) if axis_types is not None else (AxisType.Auto,) * len(names)
    if devices is None and len(names) == 1:  # JAX knows the order that suits a torus
        return jax.make_mesh(sizes, names, axis_types=types, devices=chosen)
    if devices is None and shape is None:
        chosen = [device for group in _groups(chosen) for device in group]
    array = np.empty(len(chosen), dtype=object)
    array[:] = chosen
    return Mesh(array.reshape(sizes), names, axis_types=types)


def _choose_devices(devices: Sequence[Any] | None, num_devices: int | None) -> list[Any]:
    """The devices asked for, or a sentence why they cannot be had."""
    chosen = list(jax.devices() if devices is None else np.asarray(devices, dtype=object).ravel())
    if not chosen:
        raise ValueError("jdp.make_mesh was given an empty list of devices; a mesh needs one.")
    if len(set(chosen)) != len(chosen):
        raise ValueError("jdp.make_mesh was given the same device twice; list each device once.")
    if num_devices is None:
        return chosen
    if not is_whole(num_devices) or not 1 <= num_devices <= len(chosen):
        raise ValueError(
            f"jdp.make_mesh(num_devices={num_devices}) cannot be had: JAX shows {len(chosen)} "
            f"{chosen[0].platform} device(s). The number of emulated CPU devices is read once, "
            "when JAX starts: call jdp.emulate_devices(n) before the first use of jax.devices() "
            "or any array; in a notebook, restart the kernel and run it first."
        )
    return chosen[:num_devices]


def _groups(devices: Sequence[Any]) -> list[list[Any]]:
    """Devices that share a slice or, within one slice, a process."""
    for attribute in ("slice_index", "process_index"):
        groups = collections.defaultdict(list)
        for device in devices:
            groups[getattr(device, attribute, 0)].append(device)
        if len(groups) > 1:
            return [groups[index] for index in sorted(groups)]
    return [list(devices)]


def _fit_shape(
    names: tuple[str, ...], shape: Sequence[int] | None, devices: Sequence[Any]
) -> tuple[int, ...]:
    """The size of each axis."""
    count = len(devices)
    if shape is None and len(names) == 1:
        return (count,)
    if shape is None and len(names) == 2:
        groups = _groups(devices)
        lengths = {len(group) for group in groups}
        if len(lengths) > 1:
            raise ValueError(
                f"jdp.make_mesh cannot group {count} devices along {names}: the groups have "
                f"{sorted(lengths)} devices. Give a shape, or devices of equally large groups."
            )
        return len(groups), lengths.pop()
    if shape is None:
        raise ValueError(f"jdp.make_mesh needs a shape for the {len(names)} axes {names}.")
    sizes: list[Any] = list(shape) if isinstance(shape, Sequence) else [shape]
    known = math.prod(s for s in sizes if s != -1)
    if sizes.count(-1) == 1 and known > 0 and count % known == 0:
        sizes[sizes.index(-1)] = count // known
    fits = len(sizes) == len(names) and all(is_whole(s) and s > 0 for s in sizes)
    if not fits or math.prod(sizes) != count:
        raise ValueError(
            f"jdp.make_mesh cannot lay {count} device(s) out as {shape} along {names}: the "
            "shape needs one size for each axis, and their product must be the number of devices. "
            "Use num_devices or devices to take part of them."
        )
    return tuple(sizes)


def data_axes(mesh: AnyMesh, axis: AxisNames | None = None) -> tuple[str, ...]:
    """Names the axes that replicas lie along.

    Args:
        mesh: The mesh.
        axis: One axis name, or several; `None` takes those of the mesh's axes that are called
            "data", "node", "device" or "replica", in the mesh's order.

    Returns:
        A tuple of axis names.

    Raises:
        ValueError: If the mesh has no such axis.

    Example:
        >>> jdp.data_axes(jdp.make_mesh(("data", "model"), (4, 2)))
        ('data',)
    """
    if axis is None:
        axes = tuple(name for name in mesh.axis_names if name in DATA_AXES)
    else:
        axes = names_of(axis)
    if len(set(axes)) != len(axes):
        raise ValueError(f"The axes {axes} name one axis twice; name each data axis once.")
    missing = [name for name in axes if name not in mesh.axis_names]
    if missing or not axes:
        raise ValueError(
            f"The mesh has the axes {tuple(mesh.axis_names)} and none called "
            f"{missing[0] if missing else ' or '.join(DATA_AXES)!r}: there is nothing for the "
            "replicas to lie along. Pass axis=... with the name of the data axis, or name it "
            '"data" in jdp.make_mesh.'
        )
    return axes


def axis_size(mesh: AnyMesh, axes: AxisNames) -> int:
    """Counts the replicas: the product of the sizes of the axes.

    Args:
        mesh: The mesh.
        axes: One axis name, or several.

    Returns:
        The number of devices along the axes.

    Example:
        >>> jdp.axis_size(jdp.make_mesh(("node", "device"), (2, 4)), ("node", "device"))
        8
    """
    return math.prod(mesh.shape[name] for name in data_axes(mesh, axes))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Places a pytree on every device of a mesh.

    A leaf that already lies on this mesh keeps its placement (a "model" axis written by the user,
    say); every other leaf is copied whole to each device.

    Args:
        tree: A pytree of arrays. With several processes all must hold the same values, see
            `jdp.init_state`, which checks that.
        mesh: The mesh.

    Returns:
        The same tree of global `jax.Array`s. A leaf that was already in place is not copied; host
        arrays always are.

    Example:
        >>> w = jdp.replicate({"w": np.ones(3)}, jdp.make_mesh())["w"]
        >>> w.sharding.is_fully_replicated, len(w.addressable_shards)
        (True, 8)
    """
    everywhere = NamedSharding(mesh, P())

    def place(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array):
            if isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh == mesh:
                return leaf
            if leaf.sharding.device_set == everywhere.device_set and leaf.is_fully_replicated:
                return jax.device_put(leaf, everywhere)
        if not isinstance(leaf, jax.Array):
            leaf = np.array(leaf)  # a copy: on CPU a device may keep the caller's memory as its own
        if jax.process_count() == 1:
            return jax.device_put(leaf, everywhere)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                place(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf)
            )
        # device_put would compare the values over all processes, leaf by leaf
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, everywhere, lambda index: host[index])

    return jax.tree.map(place, tree)


def ambient_mesh(tree: Any) -> AnyMesh | None:
    """The mesh the leaves lie on, or else the one set by `jax.set_mesh`; `None` if neither."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            return sharding.mesh
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh is None or mesh.empty else mesh


def found_mesh(params: Any, does: str) -> AnyMesh:
    """The mesh of the parameters, or the one set; `does` says who needs it, and for what.

    Raises:
        ValueError: If there is no mesh to be found.
    """
    mesh = ambient_mesh(params)
    if mesh is None:
        raise ValueError(
            f"{does}, but the parameters lie on none. Use jdp.init_state, place the parameters "
            "with jdp.replicate(params, mesh) first, or call init within "
            "`with jax.set_mesh(mesh):`."
        )
    return mesh


def on_devices(
    fn: Callable[..., Any], mesh: AnyMesh, in_specs: Any, out_specs: Any, axes: Sequence[str]
) -> Callable[..., Any]:
    """`jax.shard_map` over some axes of a mesh, as one program also outside `jax.jit`."""
    return as_one_program(
        jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes))
    )


def as_one_program(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, compiled as a whole where it is called with arrays and nothing traces it.

    JAX would compile each operation of a `shard_map` alone, in each call anew: 11 s for the signs
    of 16 numbers on eight devices, where one program takes half a second.
    """

    def call(*args: Any) -> Any:
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args))
        return (fn if traced else jax.jit(fn))(*args)

    return call


def on_auto_axes(compute: Callable[..., Any], like: Any) -> Callable[..., Any]:
    """A per-device function whose inside sees no Explicit axis of the user's: they are Auto there.

    On Explicit axes JAX refuses to flatten or to join arrays that they split, and says so without
    naming anything of the user's. The compiler finds a placement for what is between.

    Args:
        compute: Any function, called within a `shard_map`.
        like: Arrays of the structure of its results, each placed where the result is to lie.
    """
    mesh = jax.sharding.get_abstract_mesh()
    names = tuple(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    )
    if not names:
        return compute
    places = jax.tree.map(lambda x: jax.typeof(x).sharding, like)
    return jax.sharding.auto_axes(compute, axes=names, out_sharding=places)


def memory_of_a_device(mesh: AnyMesh) -> int | None:
    """Bytes of memory, if a device tells."""
    # while the state is made the mesh is abstract; its devices are then those of this process
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else jax.local_devices()[0]
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (RuntimeError, AttributeError, NotImplementedError):
        return None  # a device that is not there, of a topology compiled for
