"""Batches read ahead, and in order, by threads or by worker processes.

    batch k --> worker k mod W --> through a pipe of its own --> in order

In: a function of a batch's number. Out: a generator of what it returns. A worker that dies,
however it dies, is the end of its pipe: an error that names it, at the batch it owed. (Grain's
workers would be waited for without end if they leave with exit code 0, as `sys.exit()` in a
library does, or die while they send.)
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import pickle
import signal
import traceback
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from concurrent.futures import Future

_POLL_SECONDS = 0.2  # how soon a wait sees that its consumer has gone
_LEAVE_SECONDS = 2.0  # for a worker that was asked to end, before it is killed


def in_threads(
    read: Callable[[int], Any],
    numbers: range,
    threads: int,
    cancelled: Callable[[], bool] = lambda: False,
) -> Generator[Any, None, None]:
    """Yields `read(k)` for the numbers in order, `threads` of them under way at a time.

    Args:
        read: Called in the threads; with none, in this one.
        numbers: What to read.
        threads: How many; 0: none, and nothing is read ahead.
        cancelled: Asked while waiting; true ends the wait.

    Example:
        >>> list(in_threads(lambda k: k * k, range(4), 2))
        [0, 1, 4, 9]
    """
    if not threads:
        yield from map(read, numbers)
        return
    from concurrent.futures import ThreadPoolExecutor, wait

    pool = ThreadPoolExecutor(threads, thread_name_prefix="jdp.Batches")
    ahead: collections.deque[Future[Any]] = collections.deque()
    left = iter(numbers)
    try:
        while True:
            for number in itertools.islice(left, 2 * threads - len(ahead)):
                ahead.append(pool.submit(read, number))
            if not ahead:
                return
            while not wait([ahead[0]], _POLL_SECONDS).done:
                if cancelled():
                    return
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def in_processes(
    read: Callable[[int], Any],
    numbers: range,
    workers: int,
    threads: int = 0,
    cancelled: Callable[[], bool] = lambda: False,
) -> Generator[Any, None, None]:
    """Yields `read(k)` for the numbers in order; worker i reads `numbers[i::workers]`.

    Each worker has one result ready and waiting to be taken, and with threads 2 * threads more.

    Args:
        read: Sent to every worker, by cloudpickle where it is installed, else by pickle.
        numbers: What to read.
        workers: How many processes are spawned, at least 1.
        threads: In each worker; see `in_threads`.
        cancelled: Asked while waiting; true ends the wait, and with it the workers.

    Raises:
        RuntimeError: If a worker died, naming it, its exit code and the batch it owed.
        TypeError: If `read` cannot be sent.
    """
    with contextlib.closing(_Workers(read, numbers, workers, threads)) as started:
        for k, number in enumerate(numbers):
            worker = started.running[k % workers]
            while not worker.pipe.poll(_POLL_SECONDS):
                if cancelled():
                    return
                if worker.process.exitcode is not None:
                    break  # a child of its own has inherited the pipe, and keeps it open
            yield _received(worker, number)


class _Worker(NamedTuple):
    number: int
    process: Any
    pipe: Any


class _Workers:
    """Processes that were started together and end together."""

    def __init__(self, read: Any, numbers: range, workers: int, threads: int) -> None:
        import multiprocessing  # not what every `import jdp` should pay

        self.running: list[_Worker] = []
        payload = _pickled(read)
        context = multiprocessing.get_context("spawn")  # a fork would copy JAX's locked locks
        try:
            for i in range(min(workers, len(numbers))):
                ours, theirs = context.Pipe(duplex=False)
                given = (payload, numbers[i::workers], threads, theirs)
                process = context.Process(target=_work, args=given, daemon=True)
                process.start()
                theirs.close()  # the worker alone has it now, so its death ends the pipe
                self.running.append(_Worker(i, process, ours))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for worker in self.running:
            worker.pipe.close()
            worker.process.terminate()
        for worker in self.running:
            worker.process.join(_LEAVE_SECONDS)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def _work(payload: bytes, numbers: range, threads: int, pipe: Any) -> None:
    """Runs in the worker: sends (result, None), or (None, why there is none) and ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains
    try:
        for result in in_threads(pickle.loads(payload), numbers, threads):
            pipe.send_bytes(pickle.dumps((result, None), pickle.HIGHEST_PROTOCOL))
    except BrokenPipeError:
        return  # the consumer has gone
    except BaseException as error:
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(_as_failure(error))


def _as_failure(error: BaseException) -> bytes:
    where = "".join(traceback.format_exception(error))
    try:
        pickle.loads(failure := pickle.dumps((None, (error, where))))
    except Exception:  # an exception may take other arguments than its own
        said = RuntimeError(f"{type(error).__name__}: {error}")
        failure = pickle.dumps((None, (said, where)))
    return failure


def _received(worker: _Worker, owed: int) -> Any:
    try:
        if not worker.pipe.poll():
            raise EOFError
        result, failure = pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, OSError) as error:
        worker.process.join(_LEAVE_SECONDS)
        process = worker.process
        raise RuntimeError(
            f"jdp.Batches: worker process {worker.number} (pid {process.pid}), which was to read "
            f"batch {owed}, has died with exit code {process.exitcode}. Without it examples "
            f"would be lost. Its own output says more; -9 is mostly the kernel short of memory "
            f"(use fewer workers), 1 before the first batch mostly a script without "
            f'`if __name__ == "__main__":`. Then go on from the last checkpoint.'
        ) from error
    if failure is None:
        return result
    error, where = failure
    error.add_note(f"In worker process {worker.number} of jdp.Batches:\n{where}")
    raise error


def _pickled(read: Any) -> bytes:
    """By cloudpickle if there is one, which takes the functions of notebooks and lambdas along."""
    try:
        import cloudpickle as pickler
    except ImportError:
        pickler = pickle
    try:
        return pickler.dumps(read)
    except Exception as error:
        hint = "pip install cloudpickle, which sends lambdas too, or " if pickler is pickle else ""
        raise TypeError(
            f"jdp.Batches cannot send its source and transforms to worker processes: "
            f"{type(error).__name__}: {error}. For those with workers=, {hint}let the source open "
            f"files where it reads them, or use threads=."
        ) from error
