"""Kills processes of a run, and times how long the others take to notice, say so, and end.

    python benchmarks/drills.py                    # 20 times kill -9, of each process in turn
    python benchmarks/drills.py --how stop         # freeze it instead (SIGSTOP): only silence tells

The processes are started by hand, each alone, so that no launcher ends the survivors; they train
nothing, but sum over gloo after each step, as a gradient would. A drill counts as passed if every
survivor ended with code 75, one sentence naming the victim, and no trace of Python or C++.
"""

import dataclasses
import json as json_format
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import tyro

PROGRAM = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
import jdp
jdp.initialize()
over = jax.sharding.NamedSharding(jdp.make_mesh(), jax.sharding.PartitionSpec("data"))
x = jax.make_array_from_process_local_data(over, np.ones(1, np.float32))
total = jax.jit(jnp.sum)
for step in range(10**6):
    jdp.note_step()
    float(total(x))
    if step == 20:
        print("trains", flush=True)
    time.sleep(0.02)
"""
LOST = 75


@dataclasses.dataclass(frozen=True)
class Config:
    """Kills processes and times what the others do."""

    drills: int = 20
    processes: int = 2
    how: Literal["kill", "stop"] = "kill"
    vanished_seconds: float = 60.0
    json: Path | None = None  # where to write the results


def main(config: Config) -> None:
    times = []
    for number in range(config.drills):
        victim = number % config.processes
        times.append(drill(config, victim))
        print(f"drill {number + 1}: process {victim}, last survivor ended after {times[-1]:.2f} s")
    print(
        f"{len(times)} drills ({config.how}, {config.processes} processes): median "
        f"{statistics.median(times):.2f} s, maximum {max(times):.2f} s; the bound is "
        f"{config.vanished_seconds:g} s"
    )
    if config.json:
        config.json.write_text(json_format.dumps({"seconds": times, **vars(config)}, default=str))
    if max(times) > config.vanished_seconds:
        sys.exit("The bound was exceeded.")


def drill(config: Config, victim: int) -> float:
    """Seconds from the kill to the end of the last survivor."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "program.py")
        script.write_text(PROGRAM)
        logs = [Path(folder, f"log{i}") for i in range(config.processes)]
        children = start(config, script, logs)
        try:
            wait(lambda: all("trains" in log.read_text(errors="replace") for log in logs), 180)
            time.sleep(1.0)
            begin = time.monotonic()
            children[victim].send_signal(signal.SIGKILL if config.how == "kill" else signal.SIGSTOP)
            survivors = [i for i in range(config.processes) if i != victim]
            wait(lambda: all(children[i].poll() is not None for i in survivors), 300)
            seconds = time.monotonic() - begin
        finally:
            for child in children:
                child.kill()
                child.wait()
        for i in survivors:
            said = logs[i].read_text(errors="replace").partition("trains\n")[2].splitlines()
            good = len(said) == 1 and f"process {victim} (" in said[0]
            if children[i].returncode != LOST or not good:
                sys.exit(f"process {i} ended with {children[i].returncode}:\n" + "\n".join(said))
    return seconds


def start(config: Config, script: Path, logs: list[Path]) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JDP_COORDINATOR": f"127.0.0.1:{port}",
        "JDP_NUM_PROCESSES": str(config.processes),
        "JDP_VANISHED_SECONDS": str(config.vanished_seconds),
    }
    children = []
    for i, log in enumerate(logs):
        with log.open("wb") as out:
            env = shared | {"JDP_PROCESS_ID": str(i)}
            command = [sys.executable, str(script)]
            children.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))
    return children


def wait(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            sys.exit(f"nothing happened for {seconds:g} s")
        time.sleep(0.02)


if __name__ == "__main__":
    main(tyro.cli(Config))
