"""A thread that stays a few items in front of whoever consumes them.

In: a generator, which the thread runs and closes. Out: a generator of the same items, in the same
order, with the same end or exception. Nothing here knows what the items are.

    source --(thread, inside jax.enable_x64 of the consumer)--> queue --> consumer
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import numpy as np

_POLL_SECONDS = 0.05  # how soon a thread with a full queue sees that its consumer has gone
_JOIN_SECONDS = 2.0  # a source stuck for longer keeps its (daemon) thread, but nobody waits for it
_END = object()


class _Failure(NamedTuple):
    error: BaseException


class Stop:
    """A flag without a lock, since a garbage collection, in any thread, may have to set it."""

    stopped = False


_running: weakref.WeakKeyDictionary[threading.Thread, Stop] = weakref.WeakKeyDictionary()


@atexit.register
def _stop_all() -> None:
    # A daemon thread inside XLA while the interpreter is torn down would abort the process.
    running = list(_running.items())
    for _, stop in running:
        stop.stopped = True
    for thread, _ in running:
        thread.join(_JOIN_SECONDS)


def run_ahead(
    source: Generator[Any, None, None], prefetch: int, stop: Stop
) -> Generator[Any, None, None]:
    """Yields what `source` yields, which a thread computes at most `prefetch` + 1 items early.

    **Guarantees**

    - `source` runs, and is closed, in one thread, which starts with the first `next` and ends
      with the source, or soon after this generator is closed or dropped.
    - An exception arrives after the items before it, with its own traceback.
    - An item is not kept after the consumer has let go of it.

    Args:
        source: What to run. It may read `stop` to give up a long wait.
        prefetch: The length of the queue, at least 1.
        stop: Set when the consumer has gone.

    Example:
        >>> list(run_ahead((i * i for i in range(4)), 2, Stop()))
        [0, 1, 4, 9]
    """
    ready: queue.Queue[Any] = queue.Queue(maxsize=prefetch)
    # Read here, for the thread: a `with jax.enable_x64()` holds in the consumer's thread only.
    x64 = jax.dtypes.canonicalize_dtype(np.int64) == np.int64
    # The thread must not know this generator, or dropping it would never close it.
    thread = threading.Thread(
        target=_work, args=(source, ready, stop, x64), name="jdp.feed", daemon=True
    )
    _running[thread] = stop
    thread.start()
    try:
        while (item := [ready.get()])[0] is not _END:
            if isinstance(item[0], _Failure):
                raise item[0].error
            yield item.pop()  # popped: a variable would keep it while the next one is awaited
    finally:
        stop.stopped = True
        if thread is not threading.current_thread():  # a collection may close us from inside it
            thread.join(_JOIN_SECONDS)
            _running.pop(thread, None)  # waited for once


def _work(
    source: Generator[Any, None, None], ready: queue.Queue[Any], stop: Stop, x64: bool
) -> None:
    def send(item: Any) -> bool:
        while not stop.stopped:
            try:
                ready.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    try:
        with jax.enable_x64(x64):
            while _send_next(source, send):
                pass
            source.close()
    except BaseException as error:
        send(_Failure(error))


def _send_next(source: Generator[Any, None, None], send: Callable[[Any], bool]) -> bool:
    """Sends one item or the end; a function, so that no variable keeps the item alive."""
    item = next(source, _END)
    return send(item) and item is not _END
