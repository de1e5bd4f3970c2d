"""A run of 5,000 steps with a fault every 200: it ends with the bits of a run without any.

    python benchmarks/soak.py                  # two processes of two devices, about ten minutes
    python benchmarks/soak.py --seed 1 --json soak.json

Kind, process and step of each fault are drawn from the seed; `faulty.py` is what runs and what goes
wrong. `jdp launch` starts all processes again after a failure; after SIGTERM, a time limit, or when
it was itself killed, this script does. A fault counts as survived if it was told of as the guide
to many processes says. A start is timed from the start of process 0 to the end of its first step:
importing, joining, restoring, compiling (or loading what was compiled before) and the step.
"""

import contextlib
import dataclasses
import json as json_format
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import measure
import numpy as np
import tyro
from faulty import Fault, Plan, unmount
from measure import Goal

AGAIN = (85, -signal.SIGKILL)  # of the launcher: stopped when asked to; killed itself
KILLED = r"process \d+ failed first, killed by SIGKILL"
VANISHED = r"vanished, last heard of in step \d+: it was killed, or crashed\."
SAYS = {
    "kill": (KILLED, VANISHED),
    "saving": (KILLED, VANISHED, r"checkpoints cut short: \['step_"),
    "damage": (KILLED, r"is not whole: its file \S+ has \d+ of \d+ bytes", "the last good one"),
    "launcher": (),
    "freeze": (r"process {p} \(.*\) vanished, .*nothing has been heard", "exit code 75"),
    "pause": (),
    "exit": (r"process {p} failed first, with exit code 3",),
    "leave": (r"process {p} \(.*\) has ended; the others wait for it in step \d+, since 4 s",),
    "sigterm": (r"stopped after step \d+: process {p}: got SIGTERM",),
    "limit": (r"stopped after step \d+: process {p}: its limit of 3 s is over",),
    "callback": (r"process {p} failed in step {s}: OverflowError: a fault in a callback",),
    "loader": (r"process {p} failed in .*could not read example", "OSError: a fault while reading"),
    "stuck": (r"process {p} \(.*\) is stuck; the others wait", r"time\.sleep\(600\)", "code 76"),
    "drift": (r"DriftError", r"\.params\['w1'\]"),
    "full": ("training goes on: .*the disk is full",),
    "vanished": ("training goes on: .*the folder is gone",),
    "readonly": ("training goes on: .*(read-only|may not write)",),
}
"""What each kind of fault is told with; {p} is its process, {s} its step."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Runs on and on, whatever happens."""

    steps: int = 5000
    every: int = 200  # steps between faults
    save_every: int = 20
    processes: int = 2
    devices: int = 2  # of each process
    seed: int = 0
    quick: bool = False  # few steps and faults, to see that it runs
    json: Path | None = None  # where to write the results


class Survived(NamedTuple):
    """A run that has come to its end: exit codes of the launcher, and all that was printed."""

    codes: list[int]
    output: str
    seconds: float


def main(config: Config) -> None:
    if config.quick:
        config = dataclasses.replace(config, steps=240, every=80)
    plan = Plan(config.steps, config.save_every, tuple(drawn(config)))
    with tempfile.TemporaryDirectory() as folder:
        plain, faulty = Path(folder, "plain"), Path(folder, "faulty")
        with small_disk(faulty / "disk"):
            run = survive(faulty, plan, config.processes, config.devices)
        calm = survive(plain, plan._replace(faults=()), config.processes, config.devices)
        differ = differences(faulty, plain)
    untold = missing(plan, run.output)
    starts = first_steps(run.output)
    rows = [
        {
            "fault": kind,
            "times": sum(fault.kind == kind for fault in plan.faults),
            "not told": sum(text.startswith(kind) for text in untold),
        }
        for kind in sorted({fault.kind for fault in plan.faults})
    ]
    starts_again = starts[1:]
    goals = [
        Goal("what differs from a run without faults", len(differ), 0),
        Goal("faults not told of", len(untold), 0),
    ]
    print(*differ, *untold, sep="\n")
    print(
        f"{plan.steps} steps, {len(plan.faults)} faults, {len(starts)} starts: "
        f"{run.seconds:.0f} s, without faults {calm.seconds:.0f} s. From a start to its first "
        f"step: median {statistics.median(starts_again):.1f} s, at most {max(starts_again):.1f} s; "
        f"the first of all {starts[0]:.1f} s."
    )
    settings = dataclasses.asdict(config) | {"starts": starts, "faults": plan.faults}
    settings |= {"seconds": run.seconds, "seconds without faults": calm.seconds}
    measure.report("soak", settings, rows, goals, config.json)
    if differ or untold:
        sys.exit("The run did not survive.")


def drawn(config: Config) -> Iterator[Fault]:
    """A fault in each part of the run; the disk is well again before the next."""
    draw, kinds = random.Random(config.seed), sorted(available())
    for start in range(0, config.steps, config.every):
        late = config.every - 4 * config.save_every
        step = start + draw.randrange(min(3 * config.save_every, late), late + 1)
        yield Fault(draw.choice(kinds), draw.randrange(config.processes), step)


def available() -> set[str]:
    """The kinds of faults that can be put in here: some need a file system of their own."""
    kinds = set(SAYS)
    if os.getuid():
        return kinds - {"full"}
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder)):
        mounted = folder in Path("/proc/self/mounts").read_text()
    return kinds if mounted else kinds - {"full", "readonly"}


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of a few megabytes at this folder, where root may mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if not os.getuid():
        subprocess.run(mount, check=False, capture_output=True)
    try:
        yield
    finally:
        unmount(folder / "checkpoints")
        unmount(folder)


def survive(
    folder: Path, plan: Plan, processes: int, devices: int, seconds: float = 3600
) -> Survived:
    """Starts a run, and again where `jdp launch` does not, until it ends or fails for good."""
    plan.write(folder)
    program = Path(__file__).with_name("faulty.py")
    command = [sys.executable, "-m", "jdp", "launch", "-n", str(processes)]
    command += ["--devices", str(devices), "--max-restarts", "99", str(program), "--", str(folder)]
    paths = os.pathsep.join([str(program.parents[1]), os.environ.get("PYTHONPATH", "")])
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    env = kept | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    # a start then loads what an earlier one has compiled, which is the larger part of it
    env |= {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache")}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    begin, codes, output = time.monotonic(), [], folder / "output.txt"
    while not codes or codes[-1] in AGAIN:
        with output.open("ab") as out:
            process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
            try:
                codes.append(process.wait(begin + seconds - time.monotonic()))
            except subprocess.TimeoutExpired:
                codes.append(124)
            finally:
                process.kill()  # and with it whatever it started
                process.wait()
    return Survived(codes, output.read_text(errors="replace"), time.monotonic() - begin)


def missing(plan: Plan, output: str) -> list[str]:
    """What was to be told of each fault, and was not, before another one came."""
    found, places = [], {}
    for match in re.finditer(r"(?m)^\[\d+\] fault (\d+): .*\n", output):
        places[int(match[1])] = match.span()
    for index, (kind, process, step) in enumerate(plan.faults):
        if index not in places:
            found.append(f"{kind}, process {process}, step {step}: did not happen")
            continue
        begin = places[index][1]
        later = [a for i, (a, _) in places.items() if a >= begin and plan.faults[i].step > step]
        said = output[begin : min(later, default=len(output))]
        for text in SAYS[kind]:
            pattern = text.replace("{p}", str(process)).replace("{s}", str(step))
            if not re.search(pattern, said):
                found.append(f"{kind}, process {process}, step {step}: nobody said {pattern!r}")
    return found


def first_steps(output: str) -> list[float]:
    """Seconds of each start until its first step was done."""
    told = r"(?m)^\[\d+\] step \d+ is done, ([\d.]+) s after the start"
    return [float(x) for x in re.findall(told, output)]


def differences(ours: Path, theirs: Path) -> list[str]:
    """In what two runs do not end with the same bits, or have not gone the same way."""
    found = []
    with np.load(ours / "params.npz") as a, np.load(theirs / "params.npz") as b:
        found += [f"{name} differs" for name in b if a[name].tobytes() != b[name].tobytes()]
    one, other = steps_of(ours), steps_of(theirs)
    if [x["step"] for x in one] != [x["step"] for x in other]:
        found.append("the log has other steps")
    found += [f"log: {x}, {y}" for x, y in zip(one, other, strict=False) if x != y][:5]
    return found


def steps_of(folder: Path) -> list[dict[str, float]]:
    """The steps that were logged, without what they took."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    steps = [json_format.loads(line) for line in lines]
    return [{k: v for k, v in step.items() if k != "steps_per_s"} for step in steps]


if __name__ == "__main__":
    main(tyro.cli(Config))
