"""What a plan is wanted for: model, optimizer, batch, devices and their figures, checked.

arguments of jdp.plan  --job_of-->  Job        (or a sentence on what is wrong with them)
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from jdp.hardware import CHIPS, Chip, Link, find_chip
from jdp.loss import check_params
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
    shapes, rows = as_shapes(params), jax.tree.leaves(batch)[0].shape[0]
    rows = rows if global_batch is None else global_batch
    _check_plain(tx, shapes)
    there = None if target is None else find_target(target)
    devices = tuple(jax.devices()) if there is None else there.devices
    chip = chip or (there.chip if there else find_chip(devices[0].device_kind))
    if chip is None:
        raise ValueError(
            f"jdp knows no figures of {devices[0].device_kind!r}. Give jdp.plan(chip=...) a "
            f"jdp.hardware.Chip; known are {', '.join(CHIPS)}."
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
        sizes_of(shapes, tx, batch, model_state=model_state),
        rows,
        _with_links(chip, links),
        devices,
        nodes,
        per_node,
        target or f"{len(devices)} x {devices[0].device_kind}",
    )


def _nodes(there: Target | None, devices: Sequence[Any]) -> tuple[int, int]:
    if there is not None:
        return there.nodes, there.per_node
    nodes = len({device.process_index for device in devices})
    return nodes, len(devices) // nodes


def _check_plain(tx: Any, params: Any) -> None:
    """Refuses a transformation that communicates already."""
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise TypeError(
            f"jdp.plan was given a {type(tx).__name__} as tx, where the optimizer belongs, such as "
            "optax.adamw(3e-4)."
        )
    wrong = (
        "jdp.plan was given a tx that communicates already: {}. How gradients are reduced is what "
        "is planned; give the optimizer alone, such as optax.adamw(3e-4)."
    )
    try:
        state = jax.eval_shape(tx.init, params)
        placement = find_placement(state)
    except ValueError as error:
        raise ValueError(wrong.format(str(error).split(".")[0])) from error
    if placement is not None:
        raise ValueError(wrong.format(f"it is a jdp.zero{placement.stage}"))
    try:
        jax.eval_shape(lambda p, s: tx.update(p, s, p), params, state)
    except (TypeError, ValueError) as error:
        if "replica" in str(error):
            raise ValueError(wrong.format("it reduces per-replica gradients")) from error


def _with_links(chip: Chip, links: Any) -> Chip:
    """The chip with links as measured."""
    if links is None:
        return chip
    if isinstance(links, Link):
        return chip._replace(inner=links, outer=links if chip.outer else None)
    if hasattr(links, "axes"):  # what jdp.links.measure gave
        axes = dict(links.axes)
        outer = axes.pop("node", None)
        inner = next(iter(axes.values()), None)
        links = {"inner": inner, "outer": outer, "host": links.to_device}
    if not isinstance(links, Mapping) or not set(links) <= {"inner", "outer", "host"}:
        raise ValueError(
            f"jdp.plan(links={links!r}): give a jdp.hardware.Link, a dictionary of some under "
            '"inner", "outer" and "host", or what jdp.links.measure(mesh) returned.'
        )
    return chip._replace(**{name: link for name, link in links.items() if link is not None})
