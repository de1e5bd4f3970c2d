"""Do all processes run the same step, from the same state, equally often? Asked beforehand.

    step, state, batch, num_steps on each process --hashes through the store--> nothing, or an error

Each process compiles its own program. If they differ in anything that the collectives see, the run
hangs, or computes garbage, and tells nobody why. No device communication takes part here, so that
this itself cannot hang: a process that does not come is named after `processes.ANSWER_SECONDS`.
"""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.checksum import sums_on_devices
from jdp.processes import Channel

_BLOCKS = 64  # compared in one exchange; a program of 250,000 lines takes three
_SHOWN = 300  # characters of a line


def check_processes(step: Any, state: Any, batch: Any, *, num_steps: int | None = None) -> None:
    """Raises, on every process, unless all are about to run the same thing.

    Compared are: `num_steps`; dtype, shape and layout of each leaf of state and batch; the values
    of leaves of the state that every device has whole; and the text of the lowered program.

    **Guarantees**

    - Nothing is computed but a checksum of each leaf, on its device; nothing is sent but hashes,
      and of a difference the text.
    - One process returns at once.

    Call it on every process, once before the loop. It traces the step once more.

    Args:
        step: Of `jdp.train_step`, or a jitted function: anything with `lower(state, batch)`.
        state: What it will be given.
        batch: What it will be given.
        num_steps: How many steps this process means to run, if it knows.

    Raises:
        ValueError: Naming the first difference, with the values on process 0 and on another.

    Example:
        >>> step = jax.jit(lambda state, batch: state + batch.sum())
        >>> jdp.check_processes(step, jnp.zeros(()), jnp.ones(4), num_steps=100)
    """
    if jax.process_count() == 1:
        return
    channel = Channel("jdp.check_processes", range(jax.process_count()))
    facts = {"the number of steps": str(num_steps)}
    facts |= {f"state{path}": text for path, text in _described(state).items()}
    facts |= {f"batch{path}": text for path, text in _described(batch).items()}
    lines = [f"{name}: {text}" for name, text in facts.items()]
    if found := _first_difference(channel, lines):
        raise ValueError(
            f"jdp.check_processes: the processes are about to run different things. {found} They "
            f"would hang, or compute garbage, in their first collective. Give every process the "
            f"same shapes, seeds and counts."
        )
    values = [f"state{path} has the checksum {x}" for path, x in _checksums(state).items()]
    if found := _first_difference(channel, values):
        raise ValueError(
            f"jdp.check_processes: the processes start from different values. {found} Each would "
            f"keep its own while the gradients agree. Make them from one seed or checkpoint, or "
            f"take process 0's with jdp.init_state(..., broadcast=True)."
        )
    program = step.lower(state, batch).as_text().splitlines()
    if found := _first_difference(channel, program):
        raise ValueError(
            f"jdp.check_processes: the processes run different programs. {found} They would hang, "
            f"or compute garbage, in their first collective. Something in the loss or optimizer "
            f"depends on the process (jax.process_index(), the time, the order of a set): make it "
            f"the same everywhere, or an input."
        )


def _described(tree: Any) -> dict[str, str]:
    """Dtype, shape and layout of each leaf, by path."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        spec = getattr(getattr(leaf, "sharding", None), "spec", "")
        kind = f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf)
        found[jax.tree_util.keystr(path)] = f"{kind} {spec}".strip()
    return found


def _checksums(state: Any) -> dict[str, str]:
    """Of each leaf that every device has whole, as it is on this process."""
    found, placed = {}, {}
    for path, leaf in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if not isinstance(leaf, jax.Array):
            found[name] = hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()[:16]
        elif isinstance(leaf.sharding, NamedSharding) and leaf.is_fully_replicated:
            placed.setdefault(leaf.sharding.mesh, {})[name] = leaf
        elif leaf.is_fully_addressable:
            found[name] = hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()[:16]
    for mesh, leaves in placed.items():
        sums = sums_on_devices(mesh, (P(),) * len(leaves), list(leaves.values()))
        mine = np.asarray(sums.addressable_data(0))[0]
        found |= {name: f"{value:08x}" for name, value in zip(leaves, mine, strict=True)}
    return dict(sorted(found.items()))


def _first_difference(channel: Channel, lines: list[str]) -> str:
    """The first line that is not the same everywhere, in words; "" if all are."""
    whole = channel.exchange(json.dumps([len(lines), _digest(lines)]))
    if len(set(whole.values())) == 1:
        return ""
    start, stop = 0, max(json.loads(text)[0] for text in whole.values())
    while stop - start > 1:
        size = -(-(stop - start) // _BLOCKS)
        places = range(start, stop, size)
        mine = [_digest(lines[i : min(i + size, stop)]) for i in places]
        blocks = [json.loads(text) for text in channel.exchange(json.dumps(mine)).values()]
        differ = [i for i, block in enumerate(zip(*blocks, strict=True)) if len(set(block)) > 1]
        start = places[differ[0]]
        stop = min(start + size, stop)
    line = lines[start].strip() if start < len(lines) else "(nothing)"
    said = channel.exchange(f"{line[:_SHOWN]}")
    other = next((p for p, text in said.items() if text != said[0]), 1)
    return f"Process 0 has {said[0]!r}, process {other} has {said[other]!r}."


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
