"""What a machine has for training, and what is missing: versions, devices, memory, links.

    doctor_machine() -> Machine, which prints as tables and goes to JSON and back

Every process of a run calls it together; each says what it has, and what differs is named. Nothing
is installed, changed or kept, and nothing here knows a model.
"""

import glob
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdp.hardware import find_chip
from jdp.holdings import human, table
from jdp.links import SECONDS, Links, measure
from jdp.mesh import make_mesh
from jdp.processes import Channel
from jdp.reporting import as_json

# What a plain installation brings, and what each extra adds.
_NEEDED = ("jax", "jaxlib", "optax", "flax", "numpy")
_EXTRAS = {
    "cli": ("rich", "tyro"),
    "checkpoints": ("orbax-checkpoint",),
    "tpu": ("libtpu",),
    "gpu": ("jax-cuda12-plugin", "jax-cuda12-pjrt"),
}
_OTHERS = ("grain", "jax-cuda13-plugin", "jax-cuda13-pjrt")
# Plugins that are built for one jaxlib each.
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
_NVIDIA, _TPU = "/dev/nvidia[0-9]*", "/dev/accel*"


class Device(NamedTuple):
    """A device of the run.

    Attributes:
        id: Its number.
        process: The process it belongs to.
        kind: What JAX calls it.
        memory: Bytes that programs may use; `None` if it does not tell.
        used: Bytes in use now; `None` likewise.
    """

    id: int
    process: int
    kind: str
    memory: int | None
    used: int | None


class Machine(NamedTuple):
    """What `doctor_machine` found; printing it shows tables.

    Attributes:
        versions: Of Python, JAX and what belongs to them, by distribution; those installed.
        platform: "cpu", "gpu" or "tpu".
        chip: Name of the devices in `jdp.hardware.CHIPS`; `None` if they are not there.
        devices: All devices of the run; memory is known of this process's own.
        processes: Of the run.
        cores: Of this host, for this process.
        host_memory: Bytes of this host; `None` if it does not tell.
        mesh: Axes and sizes along which links were measured.
        links: As measured; `None` if not asked for, or if it failed.
        problems: What is missing or does not fit together, a sentence each.
        missing: Extras that are not installed, and the command that brings each.
        notes: What to know when reading the figures.
    """

    versions: dict[str, str]
    platform: str
    chip: str | None
    devices: tuple[Device, ...]
    processes: int
    cores: int
    host_memory: int | None
    mesh: dict[str, int]
    links: Links | None
    problems: tuple[str, ...]
    missing: dict[str, str]
    notes: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether nothing that is needed is missing or wrong."""
        return not self.problems

    def to_json(self) -> str:
        """As JSON; `from_json` reads it."""
        return json.dumps(as_json(self))

    @classmethod
    def from_json(cls, text: str) -> "Machine":
        """Reads what `to_json` wrote."""
        told = json.loads(text)
        told["devices"] = tuple(Device(**device) for device in told["devices"])
        told["links"] = None if told["links"] is None else Links.of(told["links"])
        told |= {name: tuple(told[name]) for name in ("problems", "notes")}
        return cls(**told)

    def __repr__(self) -> str:
        return str(self)  # in a terminal or a notebook, too

    def __str__(self) -> str:
        told = [(name, version) for name, version in self.versions.items()]
        by_process = [sum(d.process == p for d in self.devices) for p in range(self.processes)]
        kinds = sorted({device.kind for device in self.devices})
        memory = {device.memory for device in self.devices if device.memory}
        layout = " + ".join(map(str, by_process))
        told += [
            ("devices", f"{len(self.devices)} x {', '.join(kinds)} ({self.platform})"),
            ("known as", self.chip or "no chip in jdp's table"),
            ("processes", f"{self.processes}, with {layout} devices"),
            ("memory of a device", human(min(memory)) if memory else "not told"),
            ("this host", f"{self.cores} cores, {human(self.host_memory or 0)} of memory"),
        ]
        parts = [table(told, numbers=())]
        if self.links is not None:
            parts.append(str(self.links))
        parts += [f"Note: {note}" for note in self.notes]
        parts += [f"Not installed: {name} ({how})" for name, how in self.missing.items()]
        parts += [f"PROBLEM: {problem}" for problem in self.problems]
        parts.append("" if self.problems else "Everything that is needed is here.")
        return "\n\n".join(filter(None, parts))


def doctor_machine(
    mesh: Mesh | None = None, *, links: bool = True, seconds: float = SECONDS
) -> Machine:
    """Examines this machine: versions, devices, memory, links, and what is missing.

    Guarantees:
        - What is wrong is an answer, in `problems`; nothing is raised for it.
        - Measuring ends soon after `seconds`.

    Args:
        mesh: The mesh whose axes are measured; `None` takes all devices, those of several
            processes along "node" and "device".
        links: Whether to measure links.
        seconds: When to stop measuring, about.

    Returns:
        What was found.

    Example:
        >>> found = doctor_machine(links=False)
        >>> found.complete, found.platform, len(found.devices)
        (True, 'cpu', 8)
    """
    versions, problems = _versions(), []
    problems += wrong_versions(versions, sys.version_info[:2])
    problems += unseen_hardware(jax.default_backend(), _NVIDIA, _TPU)
    problems += _disagreements(versions)
    mesh = _whole_mesh() if mesh is None else mesh
    measured, notes = None, []
    if links and not problems:
        try:
            problems += _wrong_sums(mesh)
            measured = measure(mesh, seconds=seconds)
        except (RuntimeError, ValueError) as error:
            problems.append(f"Links could not be measured: {error}")
    elif links:
        notes.append("Links were not measured, as there are problems.")
    chip = find_chip(mesh.devices.flat[0].device_kind)
    return Machine(
        versions,
        jax.default_backend(),
        None if chip is None else chip.name,
        tuple(map(_device, jax.devices())),
        jax.process_count(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        _host_memory(),
        {str(name): size for name, size in mesh.shape.items()},
        measured,
        tuple(problems),
        _missing_extras(versions),
        tuple(notes),
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    names = (*_NEEDED, "jdp-train", *_OTHERS, *(x for names in _EXTRAS.values() for x in names))
    for name in dict.fromkeys(names):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def wrong_versions(versions: Mapping[str, str], python: Sequence[int]) -> list[str]:
    """Sentences on what is missing of a plain installation or does not fit together.

    Args:
        versions: By distribution, those that are installed.
        python: Major and minor version of Python.
    """
    problems = []
    if tuple(python) < (3, 11):
        problems.append(
            f"Python {'.'.join(map(str, python))} is too old: jdp needs 3.11 or newer. Make a "
            "virtual environment with a newer one."
        )
    for name in _NEEDED:
        if name not in versions:
            problems.append(f"{name} is not installed, and jdp needs it: pip install {name}.")
    own = versions.get("jax", "")
    for name in ("jaxlib", *_PLUGINS):
        theirs = versions.get(name, own)
        # patch releases of one minor version belong together
        if own and theirs.split(".")[:2] != own.split(".")[:2]:
            problems.append(
                f"{name} {theirs} does not belong to jax {own}: programs may fail to load, or "
                f"compute on the CPU. Install the same version: pip install {name}=={own}."
            )
    return problems


def unseen_hardware(backend: str, nvidia: str = _NVIDIA, tpu: str = _TPU) -> list[str]:
    """Sentences on accelerators that the host has but JAX does not use.

    Args:
        backend: JAX's default backend.
        nvidia: Pattern of the files that show a GPU.
        tpu: Pattern of the files that show a TPU.
    """
    if backend != "cpu":
        return []
    found = {"GPU": (nvidia, "jax[cuda12]"), "TPU": (tpu, "jax[tpu]")}
    return [
        f"This host has a {what} ({', '.join(sorted(glob.glob(pattern)))}), but JAX computes on "
        f"the CPU: its {what} plugin is missing, does not load, or JAX_PLATFORMS forbids it. "
        f"Install it: pip install '{extra}'."
        for what, (pattern, extra) in found.items()
        if glob.glob(pattern)
    ]


def _missing_extras(versions: Mapping[str, str]) -> dict[str, str]:
    return {
        f"{name} ({', '.join(x for x in parts if x not in versions)})": (
            f"pip install 'jdp-train[{name}]'"
        )
        for name, parts in _EXTRAS.items()
        if any(x not in versions for x in parts)
    }


def _disagreements(versions: Mapping[str, str]) -> list[str]:
    """Sentences on what differs between the processes of a run."""
    if jax.process_count() == 1:
        return []
    local = jax.local_devices()
    facts = {
        **versions,
        "devices": f"{len(local)} x {local[0].device_kind}",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    members = range(jax.process_count())
    answers = Channel("jdp.doctor", members).exchange(json.dumps(facts))
    return differences({process: json.loads(text) for process, text in answers.items()})


def differences(facts: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Sentences on what differs between processes, given by process what each has."""
    problems = []
    for name in dict.fromkeys(name for told in facts.values() for name in told):
        values = {process: told.get(name, "nothing") for process, told in facts.items()}
        if len(set(values.values())) > 1:
            said = ", ".join(f"process {p}: {value or 'empty'}" for p, value in values.items())
            problems.append(
                f"{name} differs between processes ({said}). They must compile the same program "
                "for the same kind of mesh, or they wait for each other for ever. Start all "
                "processes in the same environment."
            )
    return problems


def _whole_mesh() -> Mesh:
    """All devices; those of several processes on two axes, since their links differ."""
    processes, local = jax.process_count(), jax.local_device_count()
    if processes > 1 and local > 1 and processes * local == jax.device_count():
        return make_mesh(("node", "device"), (processes, local))
    return make_mesh()


def _wrong_sums(mesh: Mesh) -> list[str]:
    """A sentence if the devices do not add up to what they should."""
    axes = mesh.axis_names
    one_each = lambda: jax.lax.psum(1 + jax.lax.axis_index(axes), axes)  # noqa: E731
    total = jax.jit(jax.shard_map(one_each, mesh=mesh, in_specs=(), out_specs=P()))()
    expected = mesh.size * (mesh.size + 1) // 2
    found = [int(np.asarray(shard.data)) for shard in total.addressable_shards]
    if all(x == expected for x in found):
        return []
    return [
        f"The sum of 1 to {mesh.size} over the devices came out as {found}, not as {expected}: "
        "a device or a link computes wrongly. Take the machine out of the run."
    ]


def _device(device: Any) -> Device:
    stats: Mapping[str, int] = {}
    if device.process_index == jax.process_index():
        stats = device.memory_stats() or {}
    return Device(
        device.id,
        device.process_index,
        device.device_kind,
        stats.get("bytes_limit"),
        stats.get("bytes_in_use"),
    )


def _host_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
