"""What processes must do alike: one decides and all follow, or each does its part; errors too.

    first(fn)   process 0 calls it; every process gets its result, or its error
    each(fn)    every process calls it; every process gets all results, or the first error

A file is there for one process and not yet for another, a disk is full on one host: whoever acts
on what it sees alone leaves the others waiting. Results are what JSON takes. Between processes go
words alone, so a thread may ask while a step runs; one process asks nobody.
"""

import json
from collections.abc import Callable
from typing import Any

import jax

from jdp.processes import Channel

_KINDS = (FileNotFoundError, OSError, TypeError, ValueError, RuntimeError)


class Decisions:
    """Decisions of all processes, in the order in which each asks for them.

    Args:
        name: What is decided on; it appears in errors.
        kinds: Exceptions that others are to see as they are, beside those of Python.
    """

    def __init__(self, name: str, *kinds: type[Exception]) -> None:
        self._kinds = {kind.__name__: kind for kind in (*_KINDS, *kinds)}
        self._channel = (
            Channel(name, range(jax.process_count())) if jax.process_count() > 1 else None
        )

    def first(self, fn: Callable[[], Any]) -> Any:
        """What `fn` returns or raises on process 0, on every process."""
        if self._channel is None:
            return fn()
        said: dict[str, Any] = {}
        own = None
        if jax.process_index() == 0:
            said, own = self._call(fn)
        answers = self._channel.exchange(json.dumps(said))
        return self._heard(json.loads(answers[0]), 0, own)

    def each(self, fn: Callable[[], Any]) -> list[Any]:
        """What `fn` returns on the processes, in their order; or what it raised on the first."""
        if self._channel is None:
            return [fn()]
        said, own = self._call(fn)
        answers = self._channel.exchange(json.dumps(said))
        heard = {process: json.loads(text) for process, text in answers.items()}
        # errors first: no process goes on that others do not
        for process, what in sorted(heard.items(), key=lambda item: "error" not in item[1]):
            self._heard(what, process, own if process == jax.process_index() else None)
        return [heard[process]["value"] for process in sorted(heard)]

    def _call(self, fn: Callable[[], Any]) -> tuple[dict[str, Any], Exception | None]:
        try:
            return {"value": fn()}, None
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            return {"error": names, "text": str(error)}, error

    def _heard(self, said: dict[str, Any], process: int, own: Exception | None) -> Any:
        if own is not None:
            raise own
        if "error" in said:
            kind = next((self._kinds[n] for n in said["error"] if n in self._kinds), RuntimeError)
            raise kind(f"{said['text']} (on process {process})")
        return said["value"]
