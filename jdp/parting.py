"""A process that leaves early tells the others, which wait for its answer.

    with parting(channel) as self: self.why = ""; ...; self.why = "closed its iterator"

No device takes part; whoever reads the words decides what follows from them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jdp.processes import CancelledError, Channel


class Parting:
    """Why a process would leave if it left now; "" if all know what follows."""

    why = "closed its iterator"


@contextlib.contextmanager
def parting(channel: Channel, answer: Mapping[str, Any]) -> Iterator[Parting]:
    """Answers the next exchange with why this process left, if it leaves while others wait.

    Args:
        channel: Where they wait.
        answer: What is said besides, as JSON takes it.

    Yields:
        What is said if it leaves; an error says itself.
    """
    told = Parting()
    try:
        yield told
    except Exception as error:
        if told.why and not isinstance(error, CancelledError):
            told.why = f"failed with {type(error).__name__}: {error}"
        raise
    finally:
        if told.why:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the run may be over
                channel.post(json.dumps({**answer, "left": told.why}))
