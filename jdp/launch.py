"""Several processes of one program on this machine: started, labelled, and ended together.

    script, n --launch--> n processes --exit code of the first that failed-->

Each process gets, in its environment, what `jdp.initialize` reads (`jdp.launched`). What it prints
is passed on line by line behind its number. Nothing here schedules: for several machines there are
SLURM, MPI and Kubernetes. This file needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

# Codes of a process, beside Python's own; jdp.watchdog and jdp.stopping end with them.
PEER_LOST = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong here, try again
STUCK = 76
STOPPED = 85  # HTCondor's example of a code for "checkpoint written, start me again"
WRONG = 2

LINES_KEPT = 20  # of a failed process, shown again at the end
LONGEST_LINE = 2**16  # bytes; longer ones are cut, to bound the memory
_POLL_SECONDS = 0.02
_CAUSE_SECONDS = 3.0  # for the process that failed first to end, once another noticed that

# The kernel ends a process with its launcher, however that ends. Set by the process itself, which
# then becomes the script: no code may run between fork and exec in a process that has threads.
_PRELUDE = """
import os, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
except (ImportError, OSError, AttributeError):
    pass
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class LaunchError(ValueError):
    """What was asked for cannot be started, and why."""


class _Child(NamedTuple):
    """A process, what reads its output, and its last lines."""

    process_id: int
    process: subprocess.Popen[bytes]
    readers: tuple[threading.Thread, ...]
    last: deque[bytes]


def launch(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    num_processes: int,
    devices: int | None = None,
    max_restarts: int = 0,
    grace_seconds: float = 10.0,
) -> int:
    """Runs `python SCRIPT ARGUMENTS` in several processes at once, until all have ended.

    **Guarantees**

    - When this returns or raises, no process that it started is left, nor (but for those that left
      their process group) one that these started. If the launcher itself is killed, Linux kills
      its processes.
    - Once a process has failed, the others get SIGTERM, and SIGKILL `grace_seconds` later.
    - A line of a process is never broken by one of another process.
    - SIGINT is passed on, then treated as a failure. SIGTERM and SIGHUP are passed on and leave the
      processes all the time they need, to save what they have; a second signal ends it.

    Args:
        script: A Python file, or a folder with `__main__.py`.
        arguments: Of the script.
        num_processes: How many.
        devices: CPU devices that each process emulates; None leaves devices to the script.
        max_restarts: How often all of them are started again after a failure, at a new port.
        grace_seconds: Between SIGTERM and SIGKILL.

    Returns:
        0 if all ended with 0. `STOPPED` if some ended with that and none failed. Otherwise the code
        of the process that failed first, 128 + the number of a signal. 2 if the script never joined
        its processes. 130 after Ctrl-C.

    Raises:
        LaunchError: If there is no such script, or a number is out of range.
    """
    _validate(Path(script), num_processes, devices, max_restarts, grace_seconds)
    with _signals() as asked:
        attempt = 0
        while True:
            with tempfile.TemporaryDirectory(prefix="jdp-launch-") as folder:
                run = _Run(asked, grace_seconds, Path(folder))
                code = run.start_and_wait(script, arguments, num_processes, devices, attempt)
            if code in (0, STOPPED) or asked or run.unjoined or attempt == max_restarts:
                return code
            attempt += 1
            _say(f"starting all again ({attempt} of at most {max_restarts} times)")


def _validate(
    script: Path, num_processes: int, devices: int | None, max_restarts: int, grace: float
) -> None:
    if not (script.is_file() or (script / "__main__.py").is_file()):
        raise LaunchError(
            f"There is no script {os.fspath(script)!r} (from {os.getcwd()}), so nothing was "
            f"started. Give the path of a Python file."
        )
    for name, value, least in (
        ("num_processes", num_processes, 1),
        ("devices", 1 if devices is None else devices, 1),
        ("max_restarts", max_restarts, 0),
        ("grace_seconds", grace, 0),
    ):
        if value < least:
            raise LaunchError(
                f"{name} is {value}, so there is nothing that could run. Give at least {least}."
            )


class _Run:
    """One attempt: all processes from start to end."""

    def __init__(self, asked: list[int], grace_seconds: float, folder: Path) -> None:
        self._asked, self._passed_on = asked, 0
        self._grace, self._folder = grace_seconds, folder
        self._writing = threading.Lock()
        self._children: list[_Child] = []
        self.unjoined = False

    def start_and_wait(
        self,
        script: str | os.PathLike[str],
        arguments: Sequence[str],
        num_processes: int,
        devices: int | None,
        attempt: int,
    ) -> int:
        """Returns the exit code of the attempt; nothing is left running."""
        port = _free_port()
        started = time.monotonic()
        try:
            for index in range(num_processes):
                env = _environment(index, num_processes, port, devices, attempt, self._folder)
                self._children.append(self._start(index, [os.fspath(script), *arguments], env))
            failed = self._first_failure()
            seconds = time.monotonic() - started
            if failed is not None:
                self._report(failed, seconds)
                self._end_all()
                return self._code(failed)
        finally:
            self._kill_all()
        return self._code_without_failure(script)

    def _start(self, index: int, command: list[str], env: Mapping[str, str]) -> _Child:
        full = [sys.executable, *command]
        if sys.platform == "linux":
            full = [sys.executable, "-ISc", _PRELUDE, str(os.getpid()), *full]
        process = subprocess.Popen(
            full,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        last: deque[bytes] = deque(maxlen=LINES_KEPT)
        readers = []
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            reader = threading.Thread(
                target=self._pass_on, args=(index, source, target, last), daemon=True
            )
            reader.start()
            readers.append(reader)
        return _Child(index, process, tuple(readers), last)

    def _pass_on(self, index: int, source: IO[bytes], target: IO[str], last: deque[bytes]) -> None:
        """Writes what a process prints, each line whole and behind its number."""
        label = b"[%d] " % index
        with source:
            for line in _lines(source):
                last.append(line)
                try:
                    self._write(target, label + line + b"\n")
                except (OSError, ValueError):  # nobody reads on: go on draining, but end the run
                    self._asked.append(signal.SIGPIPE)

    def _write(self, target: IO[str], line: bytes) -> None:
        with self._writing:
            if out := getattr(target, "buffer", None):
                out.write(line)
            else:  # a notebook's
                target.write(line.decode(errors="replace"))
            target.flush()

    def _first_failure(self) -> _Child | None:
        """Waits until all have ended well, or one has not; passes signals on meanwhile."""
        while True:
            failed = [c for c in self._children if c.process.poll() not in (None, 0, STOPPED)]
            if failed:
                return self._cause(failed[0])
            if all(c.process.poll() is not None for c in self._children):
                return None
            if self._must_end():
                self._end_all()
                return None
            time.sleep(_POLL_SECONDS)

    def _cause(self, noticed: _Child) -> _Child:
        """The process that failed by itself, where the first to end only noticed another's end."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        while noticed.process.returncode == PEER_LOST and time.monotonic() < deadline:
            for child in self._children:
                if child.process.poll() not in (None, 0, STOPPED, PEER_LOST):
                    return child
            time.sleep(_POLL_SECONDS)
        return noticed

    def _must_end(self) -> bool:
        """Passes new signals on; true once waiting for the processes is over."""
        new = self._asked[self._passed_on :]
        self._passed_on += len(new)
        for number in new:
            self._signal_all(signal.SIGTERM if number == signal.SIGPIPE else number)
        return len(self._asked) > 1 or any(
            n in (signal.SIGINT, signal.SIGPIPE) for n in self._asked
        )

    def _end_all(self) -> None:
        """SIGTERM, unless they have just had a signal; SIGKILL after the grace."""
        if not self._asked:
            self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + (self._grace if len(self._asked) < 2 else 0)
        while time.monotonic() < deadline and len(self._asked) < 2:
            if all(c.process.poll() is not None for c in self._children):
                return
            time.sleep(_POLL_SECONDS)

    def _signal_all(self, number: int) -> None:
        for child in self._children:
            if child.process.poll() is None:
                _signal_group(child.process.pid, number)

    def _kill_all(self) -> None:
        """Leaves nobody, also of those whom the processes started; then takes their last words."""
        for child in self._children:
            _signal_group(child.process.pid, signal.SIGKILL)
            child.process.wait()
        deadline = time.monotonic() + 1  # whoever left the group may hold the pipe for ever
        for reader in (r for c in self._children for r in c.readers):
            reader.join(max(0.0, deadline - time.monotonic()))

    def _report(self, failed: _Child, seconds: float) -> None:
        deadline = time.monotonic() + 0.5  # a worker of the process may keep the pipe open
        for reader in failed.readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        others = len(self._children) - 1
        _say(
            f"process {failed.process_id} failed first, {_ending(failed)}, {seconds:.1f} s after "
            f"the start. " + (f"Ending the other {others}." if others else "It was alone.")
        )
        with self._writing:
            for line in failed.last:
                print(f"    {line.decode(errors='replace')}", file=sys.stderr)
            sys.stderr.flush()

    def _code(self, failed: _Child) -> int:
        code = failed.process.returncode
        if any(n == signal.SIGINT for n in self._asked):
            return 128 + signal.SIGINT
        return code if code >= 0 else 128 - code

    def _code_without_failure(self, script: str | os.PathLike[str]) -> int:
        if self._asked and self._asked[0] in (signal.SIGINT, signal.SIGPIPE):
            return 128 + self._asked[0]
        codes = {c.process.returncode for c in self._children}
        if codes - {0, STOPPED}:  # a second signal ended them
            return 128 + self._asked[-1]
        joined = len(list(self._folder.glob("joined.*")))
        if len(self._children) > 1 and joined == 0:
            self.unjoined = True
            _say(
                f"{Path(script).name} ended without joining its {len(self._children)} processes: "
                f"each was a run of its own, on the same data. Call jdp.initialize() first in it."
            )
            return WRONG
        return STOPPED if STOPPED in codes else 0


def _lines(source: IO[bytes]) -> Iterator[bytes]:
    """Lines without their end; a carriage return ends one, too, as of a progress bar."""
    rest = b""
    while piece := os.read(source.fileno(), 2**16):
        rest = (rest + piece).replace(b"\r\n", b"\n")
        # A "\r" at the very end may be the first half of "\r\n".
        held = b"\r" if rest.endswith(b"\r") else b""
        *whole, rest = rest[: len(rest) - len(held)].replace(b"\r", b"\n").split(b"\n")
        yield from (cut for line in whole for cut in _cut(line))
        *cuts, rest = _cut(rest)
        yield from cuts
        rest += held
    if rest.rstrip(b"\r"):
        yield rest.rstrip(b"\r")


def _cut(line: bytes) -> list[bytes]:
    starts = range(0, max(1, len(line)), LONGEST_LINE)
    return [line[start : start + LONGEST_LINE] for start in starts]


def _environment(
    index: int, num_processes: int, port: int, devices: int | None, attempt: int, folder: Path
) -> dict[str, str]:
    """What `jdp.launched` reads, and how many devices JAX emulates."""
    env = os.environ | {
        "JDP_COORDINATOR": f"127.0.0.1:{port}",
        "JDP_NUM_PROCESSES": str(num_processes),
        "JDP_PROCESS_ID": str(index),
        "JDP_RESTARTS": str(attempt),
        "JDP_JOINED": str(folder / f"joined.{index}"),
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",  # of no interest to other machines
        "PYTHONUNBUFFERED": "1",
    }
    if devices is not None:
        flags = env.get("XLA_FLAGS", "").split()
        kept = [f for f in flags if not f.startswith("--xla_force_host_platform_device_count")]
        env |= {"JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": " ".join(kept)}
        env.setdefault("JAX_PLATFORMS", "cpu")
    return env


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that arrive from here on, in order, instead of what they would do."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, lambda number, frame: asked.append(number)) for n in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ending(child: _Child) -> str:
    code = child.process.returncode
    if code >= 0:
        return f"with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _say(text: str) -> None:
    print(f"jdp launch: {text}", file=sys.stderr, flush=True)
