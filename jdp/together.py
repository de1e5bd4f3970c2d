"""Processes that read their own parts of the same batches: they fail together, before a step.

In: the host batches of this process. Out: the same, or on every process the same exception. They
know the number of steps beforehand, unlike those of `jdp.feed`, which agree on the end.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator
from typing import Any

from jdp.packing import describe, first_difference
from jdp.parting import Parting, parting
from jdp.processes import Channel


def together(
    host: Generator[Any, None, None], channel: Channel, identity: dict[str, Any], start: int
) -> Generator[Any, None, None]:
    """`host`, but a failure of one process is raised by all, before the same step.

    What is asked before each step are words only, so a thread may ask while the devices work.
    """
    step = start
    with parting(channel, {}) as leaving, contextlib.closing(host):
        while True:
            batch = next(host, None)
            note: dict[str, Any] = {}
            if step == start:
                form = {} if batch is None else describe(batch)
                note = {"identity": {n: str(v) for n, v in identity.items()}, "form": form}
            texts = channel.exchange(json.dumps(note))
            leaving.why = ""  # whatever follows from these, all processes do
            _check({p: json.loads(text) for p, text in texts.items()}, step)
            if batch is None:
                return
            leaving.why = Parting.why
            yield batch
            step += 1


def _check(notes: dict[int, dict[str, Any]], step: int) -> None:
    if left := [f"process {p} {note['left']}" for p, note in notes.items() if "left" in note]:
        raise RuntimeError(
            f"jdp.Batches has no batch {step}: {'; '.join(left)}. The step needs a part from every "
            f"process, and going on would hang."
        )
    one, first = next(iter(notes.items()))
    for process, note in notes.items():
        for key, what in (("identity", "the data:"), ("form", "the shapes: leaf")):
            if differs := first_difference(first.get(key, {}), note.get(key, {})):
                name, here, there = differs
                raise ValueError(
                    f"jdp.Batches: the processes disagree about {what} {name} is {here} on process "
                    f"{one} but {there} on process {process}. Examples would be repeated and lost, "
                    f"or the step hang. Make it alike, and restore the same state, everywhere."
                )
