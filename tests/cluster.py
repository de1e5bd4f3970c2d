"""Runs one Python function in several real JAX processes on this machine, and collects the answers.

    def program():            # self-contained: it is sent as source, so it imports what it uses
        import jax
        return jax.process_index()

    assert [answer.value for answer in run(program)] == [0, 1]

The processes talk over gloo on 127.0.0.1, through a port that was free a moment before. Nothing
outlives `run`: after `seconds`, or soon after one process has failed, all are killed.
"""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
GRACE_SECONDS = 5  # for the others to end by themselves once one has failed

_PRELUDE = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", {num_devices})
if {start}:
    jax.distributed.initialize("{coordinator}", {num_processes}, int(sys.argv[1]))
"""

_EPILOGUE = """
with open(sys.argv[2], "w") as answer:
    json.dump({name}(), answer)
"""


class Answer(NamedTuple):
    """What one process did: the function's return value through JSON, and all it printed."""

    value: Any
    returncode: int
    output: str


def run(
    program: Callable[[], Any],
    *,
    num_processes: int = 2,
    num_devices: int = 1,
    seconds: float = 90,
    start: bool = True,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> list[Answer]:
    """Calls `program` in `num_processes` processes of `num_devices` CPU devices each.

    Args:
        program: Takes nothing, returns something JSON can carry. Its only globals are `json`, `sys`
            and `jax`; the environment has COORDINATOR and PROCESS_ID.
        num_processes: How many to start.
        num_devices: CPU devices in each.
        seconds: After which all are killed.
        start: Whether jax.distributed is initialized before the call.
        check: Raise AssertionError with all output unless every process returned.
        env: Added to the environment.
    """
    coordinator = f"127.0.0.1:{_free_port()}"
    source = _PRELUDE.format(
        num_devices=num_devices, num_processes=num_processes, coordinator=coordinator, start=start
    )
    source += textwrap.dedent(inspect.getsource(program))
    source += _EPILOGUE.format(name=program.__name__)
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder, "program.py")
        script.write_text(source)
        extra = {"COORDINATOR": coordinator} | (env or {})
        children = [_start(script, i, extra) for i in range(num_processes)]
        try:
            _wait(children, seconds)
        finally:
            for child in children:
                _kill(child)
        answers = [_answer(script, i, child) for i, child in enumerate(children)]
    if check and any(answer.returncode for answer in answers):
        raise AssertionError("\n".join(f"--- process {i}: {a}" for i, a in enumerate(answers)))
    return answers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(script: pathlib.Path, index: int, extra: dict[str, str]) -> subprocess.Popen[bytes]:
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    paths = [str(ROOT), str(ROOT / "tests"), env.get("PYTHONPATH", "")]
    env |= {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "PROCESS_ID": str(index)}
    # A file, not a pipe: a process that prints a lot must not wait for a reader.
    with open(script.with_suffix(f".out{index}"), "wb") as output:
        return subprocess.Popen(
            [sys.executable, str(script), str(index), str(script.with_suffix(f".json{index}"))],
            env=env | extra,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def _wait(children: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        if any(child.poll() for child in children):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _answer(script: pathlib.Path, index: int, child: subprocess.Popen[bytes]) -> Answer:
    answer = script.with_suffix(f".json{index}")
    complete = child.returncode == 0 and answer.exists()
    value = json.loads(answer.read_text()) if complete else None
    output = script.with_suffix(f".out{index}").read_text(errors="replace")
    return Answer(value, child.returncode, output)
