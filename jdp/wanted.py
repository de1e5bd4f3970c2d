"""What a plan is wanted for: model, optimizer, batch, devices and their figures, checked.

arguments of jdp.plan  --job_of-->  Job        (or a sentence on what is wrong with them)
"""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from jdp.hardware import CHIPS, Chip, Link, find_chip
from jdp.loss import check_params, count_rows
from jdp.mesh import is_whole
from jdp.precision import check_master
from jdp.sizes import Sizes, as_shapes, sizes_of, with_rows
from jdp.split import find_placement
from jdp.targets import Target
from jdp.targets import target as find_target


class Job(NamedTuple):
    """What is planned for."""

    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    tx: optax.GradientTransformation
    key: Any
    model_state: Any
    sizes: Sizes
    rows: int
    chip: Chip
    devices: tuple[Any, ...]
    nodes: int
    per_node: int
    name: str


def job_of(
    loss_fn: Any,
    params: Any,
    batch: Any,
    tx: Any,
    target: str | None,
    global_batch: int | None,
    links: Any,
    chip: Chip | None,
    key: Any,
    model_state: Any,
) -> Job:
    """Checks what `jdp.plan` was given, and finds the devices and their figures."""
    check_params(params)
    if not jax.tree.leaves(params):
        raise ValueError("jdp.plan was given params without any array: there is nothing to train.")
    check_call(loss_fn, params, batch, key, model_state)
    shapes, rows = as_shapes(params), _rows_of(batch, global_batch)
    _check_plain(tx, shapes)
    there = None if target is None else find_target(str(target))
    devices = tuple(jax.devices()) if there is None else there.devices
    chip = chip or (there.chip if there else find_chip(devices[0].device_kind))
    if not isinstance(chip, Chip):
        raise ValueError(
            f"jdp knows no figures of {chip or devices[0].device_kind!r}. Give jdp.plan(chip=...) "
            f"a jdp.hardware.Chip, such as CHIPS['h100']; known are {', '.join(CHIPS)}."
        )
    if not {"bf16", "f32"} <= set(chip.flops):
        raise ValueError(
            f"jdp.plan(chip=...) is {chip.name} with flops for {sorted(chip.flops)}; give those of "
            "'bf16' and 'f32' too."
        )
    if chip is CHIPS["cpu"]:  # emulated devices share the memory of the machine
        chip = chip._replace(memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        chip = chip._replace(memory=chip.memory // len(devices))
    nodes, per_node = _nodes(there, devices)
    batch = with_rows(batch, rows)
    return Job(
        loss_fn,
        shapes,
        batch,
        tx,
        key,
        model_state,
        sizes_of(shapes, tx, batch, model_state=model_state, key=key),
        rows,
        _with_links(chip, links),
        devices,
        nodes,
        per_node,
        str(target) if target else f"{len(devices)} x {devices[0].device_kind}",
    )


def check_call(loss_fn: Any, params: Any, batch: Any, key: Any, model_state: Any) -> None:
    """Refuses a loss that cannot be called with what there is, and a key that is none."""
    if key is not None and not hasattr(key, "dtype"):
        raise TypeError(f"jdp.plan got key={key!r}, which is no random key. Use jax.random.key(0).")
    given = (params, batch) if key is None else (params, batch, key)
    state = {} if model_state is None else {"model_state": model_state}
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError) as error:
        if callable(loss_fn):  # of some built-in functions nothing is known
            return
        raise TypeError(
            f"jdp.plan was given a {type(loss_fn).__name__} as loss_fn, which is no function."
        ) from error
    try:
        signature.bind(*given, **state)
    except TypeError as error:
        call = ", ".join(("params", "batch", "key")[: len(given)])
        call += ", model_state=..." if state else ""
        raise TypeError(
            f"jdp.plan would call loss_fn({call}), but it takes {signature}: {error}. Give "
            "jdp.plan the key and the model_state that the loss takes, and no others."
        ) from error


def _rows_of(batch: Any, global_batch: Any) -> int:
    """Rows of a step."""
    rows = count_rows(as_shapes(batch))
    if global_batch is None:
        return rows
    if not is_whole(global_batch) or global_batch < 1:
        raise ValueError(
            f"jdp.plan(global_batch={global_batch!r}): it is the rows of a step over all devices, "
            "a whole number of at least 1."
        )
    return int(global_batch)


def _nodes(there: Target | None, devices: Sequence[Any]) -> tuple[int, int]:
    if there is not None:
        return there.nodes, there.per_node
    nodes = len({device.process_index for device in devices})
    return nodes, len(devices) // nodes


def _check_plain(tx: Any, params: Any) -> None:
    """Refuses a transformation that communicates already, or cannot be used with the parameters."""
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise TypeError(
            f"jdp.plan was given a {type(tx).__name__} as tx, where the optimizer belongs, such as "
            "optax.adamw(3e-4)."
        )
    try:
        state = jax.eval_shape(tx.init, params)
        placement = find_placement(state)
        if placement is None:
            jax.eval_shape(lambda p, s: tx.update(p, s, p), params, state)
    except (TypeError, ValueError) as error:
        _refuse(error)
        if "state" not in locals():
            raise type(error)(
                f"The tx that jdp.plan was given cannot be used with these params: {error}"
            ) from error
        return  # its update may ask for more than there is here
    if placement is not None:
        raise ValueError(_COMMUNICATES.format(f"it holds a jdp.zero{placement.stage}"))
    if any(
        x.memory_space is not jax.memory.Space.Device
        for x in jax.make_jaxpr(tx.init)(params).out_avals
    ):
        raise ValueError(
            "jdp.plan was given a tx with jdp.offload. Where the optimizer state rests is part of "
            "what is planned; give the optimizer alone, such as optax.adamw(3e-4)."
        )
    check_master(params, state)


_COMMUNICATES = (
    "jdp.plan was given a tx that communicates already: {}. How gradients are reduced is what is "
    "planned; give the optimizer alone, such as optax.adamw(3e-4)."
)


def _refuse(error: Exception) -> None:
    """Says so if it is a transformation of jdp that misses replicas or a mesh."""
    name = re.match(r"jdp\.(\w+) ", str(error))
    if name is None or not re.search("replica|mesh|reduced", str(error)):
        return
    if name[1] == "multi_steps":
        raise ValueError(
            "jdp.plan was given a tx with jdp.multi_steps, which stands around everything that "
            "reduces gradients. Plan for the optimizer alone, and put it around what was found: "
            "jdp.multi_steps(found.best.tx, every=...)."
        ) from error
    raise ValueError(_COMMUNICATES.format(f"it holds jdp.{name[1]}")) from error


def _with_links(chip: Chip, links: Any) -> Chip:
    """The chip with links as measured; those that were not keep the figures of the table."""
    if links is None:
        return chip
    if isinstance(links, Link):
        links = {"inner": links, "outer": links if chip.outer else None}
    elif hasattr(links, "axes"):  # what jdp.links.measure gave
        axes = dict(links.axes)
        outer = axes.pop("node", None)
        inner = next(iter(axes.values()), None)
        links = {"inner": inner, "outer": outer, "host": links.to_device}
    if not isinstance(links, Mapping) or not set(links) <= {"inner", "outer", "host"}:
        raise ValueError(
            f"jdp.plan(links={links!r}): give a jdp.hardware.Link, a dictionary of some under "
            '"inner", "outer" and "host", or what jdp.links.measure(mesh) returned.'
        )
    links = {name: link for name, link in links.items() if link is not None}
    for name, link in links.items():
        if not isinstance(link, Link) or not link.bytes_per_s > 0 or not link.latency_s >= 0:
            raise ValueError(
                f"jdp.plan(links=...): {name!r} is {link!r}. Give a jdp.hardware.Link of more than "
                "0 bytes a second and no less than 0 seconds of latency."
            )
    return chip._replace(**links)
