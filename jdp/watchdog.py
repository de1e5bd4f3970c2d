"""Notices what a hanging run does not tell: a process that vanished, failed, or is stuck.

    every process --beat: its step, since when--> store --> its neighbour, and process 0
    whoever notices --verdict--> store --> every process says it in one sentence, and ends

The store is the key-value store of JAX's coordination service; no device takes part, and a thread
that only waits does the work. Process i listens for process i + 1: gone from this machine, or
silent for half of `vanished_seconds`. Process 0 compares steps: if no process has begun a step for
`stuck_seconds`, those with the fewest are what the rest waits for. If those have ended, nothing can
come of it, and half of `vanished_seconds` is enough.

Nothing here restarts anything, and nothing is known about the work but what `note_step`,
`note_alive` and `waiting` tell. Processes end with `os._exit`, since what they wait for in C++
cannot be interrupted.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import jax
from jax._src import api

from jdp.launch import PEER_LOST, STUCK
from jdp.service import Service

VANISHED_SECONDS = 60.0
STUCK_SECONDS = 540.0  # a minute less than jdp.feed waits for a loader, so that a stack is seen

_BEATS, _VERDICT = "jdp/beat/", "jdp/verdict"
_SLICE_SECONDS = 0.25  # of one wait in C++: the end of the process is delayed by one at most
_LIBRARIES = (*map(sysconfig.get_path, ("stdlib", "purelib")), str(Path(__file__).parent))
# Of errors of XLA and gloo, which are RuntimeErrors or ValueErrors, and of jdp's loaders.
_ECHO = re.compile(r"gloo|[nr]ccl|connection|socket|UNAVAILABLE|DEADLINE_EX|\d failed with", re.I)
_TOLD = re.compile(r"\(on process \d+\)$")  # by `jdp.decisions`: an error of another process


class Beat(NamedTuple):
    """What one process tells about itself.

    Attributes:
        number: Of this beat; that it grows shows that the process lives.
        step: How many steps it has begun.
        still: Seconds since the last of them.
        waits: What it waits for other processes for, or "".
        place: The line of the user's program its main thread is at.
        host: Its machine, for people.
        machine: Its machine and the namespace of its pid, for comparing.
        pid: Its pid.
        ended: Whether its program has ended.
    """

    number: int
    step: int
    still: float
    waits: str
    place: str
    host: str
    machine: str
    pid: int
    ended: bool


class Verdict(NamedTuple):
    """Why the run ends: a sentence, whom it is about, and the exit code of those who read it."""

    text: str
    about: list[int]
    code: int


class _Here:
    """What this process is doing; written by its other threads, without a lock."""

    def __init__(self) -> None:
        self.step, self.since = 0, time.monotonic()
        self.waits: list[str] = []
        self.ended, self.failing = False, 0.0


_here = _Here()


def note_step(step: int | None = None) -> None:
    """Tells the watchdog that this process has begun a step.

    `jdp.train_step` does so itself. Costs well under a microsecond; without a watchdog it has no
    effect.

    Args:
        step: Its number, from 1; None: the next.
    """
    _here.step = _here.step + 1 if step is None else step
    _here.since = time.monotonic()


def note_alive() -> None:
    """Tells the watchdog that what takes longer than `stuck_seconds` is not stuck; no step."""
    _here.since = time.monotonic()


def note_failing() -> None:
    """Tells the watchdog that this process ends with an error of its own, as all others do."""
    _here.failing = time.monotonic()


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Within, this process waits for others: it is not what the run waits for."""
    _here.waits.append(what)
    try:
        yield
    finally:
        _here.waits.remove(what)


class Watchdog:
    """The thread of one process, see the module.

    Args:
        state: JAX's `distributed.global_state`, joined.
        vanished_seconds: Within which all have ended after one has vanished.
        stuck_seconds: Without a step of anybody, after which the run ends.
    """

    def __init__(self, state: Any, vanished_seconds: float, stuck_seconds: float) -> None:
        self._client, self._me = state.client, state.process_id
        self._count, self._service = state.num_processes, state.service
        self._vanished, self._stuck = vanished_seconds, stuck_seconds
        # Some thousand calls a second are nothing to the service, however many processes.
        self._slice = max(_SLICE_SECONDS, self._count / 1000)
        self._every = max(min(1.0, vanished_seconds / 10), self._count / 500)
        self._beat = 0
        self._heard: tuple[Beat | None, float] = (None, time.monotonic())
        self._stop, self._failed_at = threading.Event(), 0.0
        self._exit_code: int | None = None
        self._identity = (socket.gethostname(), _machine(), os.getpid())
        self._thread = threading.Thread(target=self._run, name="jdp watchdog", daemon=True)

    def start(self) -> None:
        """Starts the thread; from now on failures of this process are told to the others."""
        _here.ended, _here.failing, _here.since = False, 0.0, time.monotonic()
        self._post_beat()
        self._thread.start()
        atexit.register(self.note_end)
        before = sys.excepthook
        sys.excepthook = lambda kind, error, trace: self._fail(before, kind, error, trace)

    def note_end(self) -> None:
        """Tells that the program has ended, or leaves the run; the others may still work."""
        _here.ended, _here.since = True, time.monotonic()

    def end(self) -> None:
        """Ends the thread, once the run is over for all."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        following, beating = time.monotonic(), True
        while not self._stop.is_set() and beating:
            try:
                if time.monotonic() >= following:
                    following = time.monotonic() + self._every
                    self._post_beat()
                    self._listen()
                if verdict := self._verdict(self._slice):
                    self._obey(verdict)
            except jax.errors.JaxRuntimeError as error:
                beating = self._lost(error)

    def _post_beat(self) -> None:
        self._beat += 1
        still = time.monotonic() - _here.since
        waits = _here.waits[0] if _here.waits else ""
        beat = Beat(self._beat, _here.step, still, waits, _place(), *self._identity, _here.ended)
        self._client.key_value_set(f"{_BEATS}{self._me}", json.dumps(beat), allow_overwrite=True)

    def _listen(self) -> None:
        """Hears the neighbour and, on process 0, compares everybody."""
        neighbour = (self._me + 1) % self._count
        if beat := self._beat_of(neighbour):
            before, since = self._heard
            if before is None or before.number != beat.number:
                self._heard = beat, time.monotonic()
            elif why := self._gone(beat, time.monotonic() - since):
                self._judge(Verdict(_vanished(neighbour, beat, why), [neighbour], PEER_LOST))
        elif time.monotonic() - self._heard[1] >= self._vanished / 2:
            text = f"process {neighbour} has joined, but vanished before its first sign of life."
            self._judge(Verdict(text, [neighbour], PEER_LOST))
        limits = self._stuck, min(self._stuck, self._vanished / 2)
        if self._me == 0 and time.monotonic() - _here.since >= limits[1]:
            found = self._client.key_value_dir_get(_BEATS)
            beats = {int(key.rpartition("/")[2]): Beat(*json.loads(x)) for key, x in found}
            if len(beats) == self._count and (verdict := stalled(beats, *limits)):
                self._judge(verdict)

    def _beat_of(self, process: int) -> Beat | None:
        try:
            return Beat(*json.loads(self._client.key_value_try_get(f"{_BEATS}{process}")))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def _gone(self, beat: Beat, silent: float) -> str:
        if beat.machine == self._identity[1] and not _is_running(beat.pid):
            return "it was killed, or crashed"
        if silent >= self._vanished / 2:
            return f"nothing has been heard from it for {silent:.0f} s"
        return ""

    def _judge(self, verdict: Verdict) -> None:
        """Tells everybody; the first verdict counts."""
        try:
            self._client.key_value_set(_VERDICT, json.dumps(verdict))
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def _verdict(self, seconds: float) -> Verdict | None:
        try:
            text = self._client.blocking_key_value_get(_VERDICT, round(1000 * seconds))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        return Verdict(*json.loads(text))

    def _obey(self, verdict: Verdict) -> None:
        """Says why, and ends this process; one that fails itself has time to finish."""
        if self._exit_code is not None or _here.failing:
            self._wait_for_own_end()
        if self._stop.is_set():
            return
        me = f"This is process {self._me}, in step {_here.step}"
        _say(f"jdp: {verdict.text} {me}; it ends with exit code {verdict.code}.")
        if self._me in verdict.about:
            _say(_stacks())
        self._leave(verdict.code)

    def _wait_for_own_end(self) -> None:
        deadline = (self._failed_at or _here.failing) + self._vanished / 2
        while not self._stop.wait(_SLICE_SECONDS):
            if time.monotonic() >= deadline:
                self._leave(self._exit_code or 1)

    def _lost(self, error: Exception) -> bool:
        """Whether to go on after the store did not answer: not if this process is ending."""
        if _here.ended or self._stop.is_set():
            return False
        _say(
            f"jdp: process 0 or its machine has vanished, and with it the coordination service of "
            f"the run ({str(error).splitlines()[0][:200]}). This is process {self._me}, in step "
            f"{_here.step}; it ends with exit code {PEER_LOST}."
        )
        self._leave(PEER_LOST)
        return False

    def _fail(
        self,
        before: Any,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        """The hook for an error that ends this process: shows it, and tells the others."""
        if hasattr(sys, "ps1") or sys.flags.interactive or self._stop.is_set():
            before(kind, error, trace)  # it goes on, or has left the run
            return
        echo = isinstance(error, RuntimeError | ValueError) and _ECHO.search(str(error))
        if echo or (isinstance(error, Exception) and _TOLD.search(str(error))):
            # Probably the echo of another's end. If it is, its verdict ends this process.
            time.sleep(0.6 * self._vanished)
        before(kind, error, trace)
        self._failed_at = time.monotonic()
        self._exit_code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        text = f"process {self._me} failed in step {_here.step}: {kind.__name__}: {error}"
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._judge(Verdict(f"{text[:1000].rstrip('.')}.", [], PEER_LOST))
        # JAX's own end would wait, with the interpreter locked, for what is under way on devices,
        # and that for processes which are about to end.
        atexit.unregister(api.clean_up)
        atexit._run_exitfuncs()
        self._leave(self._exit_code)

    def _leave(self, code: int) -> None:
        """Ends the process, with what it has printed but not what it still holds."""
        if isinstance(self._service, Service):
            self._service.dismiss()
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(1)
        os._exit(code)


def stalled(beats: dict[int, Beat], seconds: float, ended_seconds: float) -> Verdict | None:
    """The verdict on a run, if no process has begun a step for some time.

    Args:
        beats: Of all processes, by id.
        seconds: The time.
        ended_seconds: The time where the rest waits for programs that have ended.
    """
    going = [beat for beat in beats.values() if not beat.ended]
    if not going or max(beat.step for beat in beats.values()) == 0:
        return None  # all done; or still compiling the first step
    fewest = min(beat.step for beat in beats.values())
    behind = [p for p, beat in beats.items() if beat.step == fewest]
    over = len(behind) < len(beats) and all(beats[p].ended for p in behind)
    seconds = ended_seconds if over else seconds
    if min(beat.still for beat in beats.values()) < seconds:
        return None
    if len(behind) == len(beats):
        behind = [p for p in behind if beats[p].ended or not beats[p].waits] or behind
    names = "process " + ", ".join(f"{p} ({_where(beats[p])})" for p in behind)
    if len(behind) == len(beats):
        text = f"no process has begun a step for {seconds:g} s, and none is behind: {names}."
    else:
        others = max(beat.step for p, beat in beats.items() if p not in behind)
        kind = "has ended" if over else "is stuck"
        text = f"{names} {kind}; the others wait for it in step {others}, since {seconds:g} s."
    return Verdict(text, [p for p in behind if not beats[p].ended], STUCK)


def _where(beat: Beat) -> str:
    if beat.ended:
        return f"{beat.host}, after step {beat.step}"
    waits = f", waiting in {beat.waits}" if beat.waits else ""
    return f"{beat.host}, pid {beat.pid}, in step {beat.step}, at {beat.place}{waits}"


def _vanished(process: int, beat: Beat, why: str) -> str:
    who = f"process {process} ({beat.host}, pid {beat.pid})"
    return f"{who} vanished, last heard of in step {beat.step}: {why}."


def _machine() -> str:
    """Where a pid means the same: the boot of a machine, and a namespace in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # alone: only silence tells


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _place() -> str:
    """The innermost line of the user's own files that the main thread is at."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = ""
    while isinstance(frame, FrameType):
        path = Path(frame.f_code.co_filename)
        line = f"{path.name}:{frame.f_lineno} ({frame.f_code.co_name})"
        if path.suffix == ".py" and not str(path).startswith(_LIBRARIES):
            return line
        found = found or line
        frame = frame.f_back
    return found or "an unknown line"


def _stacks() -> str:
    """Where each thread but this one is, the main thread last."""
    threads = {t.ident: t.name for t in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = "".join(traceback.format_stack(frame))
            found.append((ident == threading.main_thread().ident, threads.get(ident, "?"), stack))
    return "\n".join(f"Stack of {name}:\n{stack.rstrip()}" for _, name, stack in sorted(found))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))  # sys.stderr may be locked for ever


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
