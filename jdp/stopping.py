"""Stopping all processes of a run after the same step, when one of them is asked to.

    SIGTERM, a time limit, or stop.request() on one process --> all agree on a step --> True there

A scheduler tells one process, or each at another moment, that the time is up. If each stopped where
it is, some would wait in a collective for others that have left. The agreement goes through the
key-value store of JAX's coordination service, in a thread of its own: no device takes part.
What is done at that step (saving, and ending with `Stop.code`) is the caller's.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

import jax
from jax._src import distributed

from jdp.launch import STOPPED
from jdp.processes import CancelledError, Channel

_LOOK_SECONDS = 0.5  # between looks at what others ask; the wait of one look is in C++


class Stop:
    """Whether to stop after this step: the same answer on every process.

    **Guarantees**

    - `after(step)` turns true on every process at the same step, at most one step after the
      furthest process is at the time of the agreement, and stays true.
    - Until somebody asks, it costs well under a microsecond and talks to nobody. While the
      agreement is made (once, some milliseconds; until then the slowest thread has answered) it
      waits.
    - One process needs nobody: it stops after the step it is in.

    Every process must make one, in the same order as others, and call `after` once after each step,
    with the same numbers. The signals' handlers are put back by `close`, or on leaving `with`;
    outside the main thread no handler is set.

    Args:
        seconds: A time limit, from now, on this process.
        signals: Those that ask to stop. A second one has its usual effect again.

    Attributes:
        code: The exit code for "stopped when asked to, start again", 85.
        reason: Who asked and why, once `after` has been true: "process 1 got SIGTERM".

    Example:
        >>> with jdp.Stop(seconds=3600) as stop:
        ...     for step in range(1, 3):
        ...         if step == 2: stop.request("enough")  # from anywhere, on any process
        ...         if stop.after(step):
        ...             print(step, stop.reason)  # save, then sys.exit(stop.code)
        2 process 0: enough
    """

    code = STOPPED

    def __init__(
        self,
        *,
        seconds: float | None = None,
        signals: Sequence[int] = (signal.SIGTERM,),
    ) -> None:
        if seconds is not None and not seconds > 0:
            raise ValueError(
                f"jdp.Stop got seconds={seconds}: the run would stop before its first step. Give "
                f"the seconds that it may take, or None for no limit."
            )
        self.reason = ""
        self._asked = ""  # on this process, not yet told
        self._step, self._agreed = 0, float("inf")
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._limit = None if seconds is None else (time.monotonic() + seconds, seconds)
        self._thread: threading.Thread | None = None
        self._before: dict[int, Any] = {}
        self._me = distributed.global_state.process_id
        if jax.distributed.is_initialized() and distributed.global_state.num_processes > 1:
            self._channel = Channel(
                "jdp.Stop", range(distributed.global_state.num_processes), self._closed.is_set
            )
            self._thread = threading.Thread(target=self._listen, name="jdp stop", daemon=True)
            self._thread.start()
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._on_signal) for n in signals}

    def after(self, step: int) -> bool:
        """Whether to stop after this step, which this process has just begun or finished."""
        if self._thread is None:
            if why := self._asked or self._late():
                self.reason, self._agreed = f"process {self._me}: {why}", min(self._agreed, step)
        else:
            with self._lock:  # held while an agreement is made: no step may be begun meanwhile
                self._step = step
        return step >= self._agreed

    def request(self, why: str) -> None:
        """Asks all processes to stop, from any thread of any of them."""
        self._asked = self._asked or why or "asked to stop"

    def close(self) -> None:
        """Puts the handlers of the signals back, and ends the thread."""
        self._closed.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Stop:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._asked = self._asked or f"got {signal.Signals(number).name}"
        signal.signal(number, self._before.get(number) or signal.SIG_DFL)

    def _late(self) -> str:
        if self._limit is not None and time.monotonic() >= self._limit[0]:
            return f"its limit of {self._limit[1]:g} s is over"
        return ""

    def _listen(self) -> None:
        """Waits until somebody asks, here or elsewhere, and then agrees on a step."""
        client: Any = distributed.global_state.client
        key = f"{self._channel.base}/asked"
        told = False
        while not self._closed.is_set():
            why = self._asked or self._late()
            try:
                if why and not told:
                    with _Ignored("ALREADY_EXISTS"):
                        client.key_value_set(key, f"process {self._me}: {why}")
                    told = True
                with _Ignored("DEADLINE_EXCEEDED"):
                    self._agree(client.blocking_key_value_get(key, round(1000 * _LOOK_SECONDS)))
                    return
            except (jax.errors.JaxRuntimeError, CancelledError, TimeoutError):
                return  # the run is ending otherwise; the watchdog tells why

    def _agree(self, reason: str) -> None:
        """The step after the furthest that any process has announced."""
        with self._lock:
            steps = self._channel.exchange(json.dumps(self._step))
            self.reason = reason
            self._agreed = max(map(int, steps.values())) + 1


class _Ignored(contextlib.AbstractContextManager[None]):
    """Suppresses the one error of the store that means nothing here."""

    def __init__(self, status: str) -> None:
        self._status = status

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return isinstance(error, jax.errors.JaxRuntimeError) and self._status in str(error)
