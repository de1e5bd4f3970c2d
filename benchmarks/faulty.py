"""A small training run that faults are put into: what the drills of the tests and soak.py launch.

    jdp launch -n 2 --devices 2 --max-restarts 99 benchmarks/faulty.py -- FOLDER

FOLDER/plan.json, a `Plan`, has the number of steps and the faults: each a kind, the process that it
hits, and the step that it hits it in. A fault happens once, however often the run is started again:
it is announced, and crossed off in FOLDER/happened, before it does its harm. `main` is what a user
writes; everything else is what goes wrong.

Out: FOLDER/log.jsonl with each step, FOLDER/params.npz at the end.
"""

import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp

EXAMPLES, BATCH = 150, 32  # five steps an epoch, the last of 22 examples
BROKEN = 7  # the example whose input is NaN


class Fault(NamedTuple):
    """What goes wrong, in which process, in which step."""

    kind: str
    process: int
    step: int


class Plan(NamedTuple):
    """A run, and what goes wrong in it."""

    steps: int
    save_every: int
    faults: tuple[Fault, ...] = ()

    def write(self, folder: Path) -> None:
        """Puts it where the run looks for it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(json.dumps(self))

    @classmethod
    def read(cls, folder: Path) -> "Plan":
        """The plan of a run."""
        steps, save_every, faults = json.loads((folder / "plan.json").read_text())
        return cls(steps, save_every, tuple(Fault(*fault) for fault in faults))


def main(folder: Path) -> int:
    """Trains, from the last checkpoint on if there is one; returns the exit code."""
    plan = Plan.read(folder)
    faults = Faults(folder, plan)
    vanished, stuck = faults.limits()
    jdp.initialize(vanished_seconds=vanished, stuck_seconds=stuck)
    mesh, tx = jdp.make_mesh(), jdp.skip_nonfinite(jdp.zero1(optax.adam(3e-3)))
    step = jdp.train_step(loss_fn, tx, mesh)
    state = jdp.init_state(initial(), tx, mesh, key=jax.random.key(1))
    source = Examples()
    batches = jdp.Batches(source, mesh, batch=BATCH, seed=0)
    log = jdp.JsonLines(folder / "log.jsonl")
    with (
        jdp.Stop(seconds=faults.time_limit()) as stop,
        jdp.Checkpoints(faults.checkpoints) as checkpoints,
    ):

        def save(state: Any) -> None:
            try:
                if checkpoints.save(state, data=batches):
                    faults.come("saving")
            except jdp.CheckpointError as error:
                print(f"training goes on: {error}", flush=True)
                faults.mend()

        state = checkpoints.resume(state, batches)
        faults.begin(int(state.step), checkpoints, stop)
        source.traps = faults.in_loader(batches)
        state = jdp.run(
            faults.before(step),
            state,
            batches,
            steps=plan.steps,
            callbacks=[
                jdp.every(1, lambda state: faults.come("callback", "damage")),
                jdp.every(plan.save_every, save),
            ],
            log=[log, faults.note_first],
            log_every=1,
            stop=stop,
            progress=False,
        )
    if stop.reason:
        faults.note_stop()
        print(f"stopped after step {int(state.step)}: {stop.reason}", flush=True)
        return stop.code
    if jax.process_index() == 0:
        np.savez(folder / "params.npz", **state.params, skipped=state.opt_state.skipped)
    return 0


# The training


class Examples:
    """A small dataset that can be told what to do when a certain example is read."""

    traps: Mapping[int, Callable[[], None]] = {}

    def __init__(self) -> None:
        self._x = np.random.default_rng(0).normal(size=(EXAMPLES, 8)).astype(np.float32)
        self._x[BROKEN] = np.nan

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.traps:
            self.traps[index]()
        x = self._x[index]
        return {"x": x, "y": np.sin(x[:1]), "id": np.float32(index)}


def initial() -> dict[str, Any]:
    """Parameters to begin with."""
    random = np.random.default_rng(1)
    w1, w2 = random.normal(0, 0.3, (8, 64)), random.normal(0, 0.1, (64, 1))
    return {"w1": np.float32(w1), "b1": np.zeros(64, np.float32), "w2": np.float32(w2)}


def loss_fn(params: Any, batch: Any, key: jax.Array) -> tuple[jdp.Mean, dict[str, jdp.Mean]]:
    """A perceptron with dropout; beside its loss, what tells which examples there were."""
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    hidden *= 1.25 * jax.random.bernoulli(key, 0.8, hidden.shape)
    losses = jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2, axis=-1)
    ids = {"ids": batch["id"], "squares": batch["id"] ** 2}
    return jdp.Mean.of(losses, batch["weight"]), {
        name: jdp.Mean.of(values, batch["weight"]) for name, values in ids.items()
    }


# What goes wrong

GOES_ON = ("pause", "full", "vanished", "readonly")  # all others end the run, to be started again


class Faults:
    """The faults of one process, those that have not happened yet."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._me, self._folder = int(os.environ.get("JDP_PROCESS_ID", 0)), folder
        self._disk, self._happened = folder / "disk", folder / "happened"
        self.checkpoints = self._disk / "checkpoints"
        self._away, self._filler = self._disk / "away", self._disk / "filler"
        self._happened.mkdir(exist_ok=True)
        self.mend()
        left = {i: x for i, x in enumerate(plan.faults) if not (self._happened / str(i)).exists()}
        ends = [item for item in left.items() if item[1].kind not in GOES_ON]
        self._next = min(ends, key=lambda item: item[1].step, default=(0, Fault("", 0, 0)))
        self._mine = {index: fault for index, fault in left.items() if fault.process == self._me}
        self._number, self._told = 0, False

    def limits(self) -> tuple[float, float]:
        """Of the watchdog: short where the fault that ends the run is noticed by the time."""
        kind = self._next[1].kind
        return 8 if kind in ("freeze", "leave") else 60, 4 if kind == "stuck" else 120

    def time_limit(self) -> float | None:
        """Of the run: over soon if that is what ends it."""
        index, fault = self._next
        if fault.kind != "limit" or index not in self._mine:
            return None
        return 3

    def begin(self, number: int, checkpoints: jdp.Checkpoints, stop: jdp.Stop) -> None:
        """Called behind the step that the run goes on from."""
        self._number, self._open, self._stop = number, checkpoints, stop
        if self._me == 0:
            half = [x.name for x in self.checkpoints.glob("step_*") if not _finished(x)]
            print(f"goes on after step {number}; checkpoints cut short: {half}", flush=True)

    def before(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, and before it what is to happen then."""

        def faulty(state: Any, batch: Any) -> Any:
            self._number += 1
            self.come(*_BEFORE)
            if self._due("drift"):
                state = state._replace(params=_drifted(state.params))
            return step(state, batch)

        return faulty

    def in_loader(self, batches: jdp.Batches) -> dict[int, Callable[[], None]]:
        """What is to happen when an example is read: the first that this process has of a batch."""
        found, share = {}, BATCH // jax.process_count()
        mine = slice(self._me * share, (self._me + 1) * share)
        for index, fault in self._mine.items():
            if fault.kind in ("loader", "stuck"):
                example = int(batches.rows(fault.step - 1)[mine][0])
                between = range(batches.step, fault.step)  # it may be read in earlier epochs, too
                times = sum(example in batches.rows(i)[mine] for i in between)
                found[example] = functools.partial(self._read, index, itertools.count(1), times)
        return found

    def _read(self, index: int, count: Iterator[int], times: int) -> None:
        if next(count) == times:
            kind = self._mine[index].kind
            self._announce(index)
            getattr(self, f"_{kind}")()

    def come(self, *kinds: str) -> None:
        """Does what is due."""
        for kind in kinds:
            if self._due(kind):
                getattr(self, f"_{kind}")()

    def _due(self, kind: str) -> bool:
        for index, fault in self._mine.items():
            if fault.kind == kind and fault.step <= self._number:
                self._announce(index)
                return True
        return False

    def _announce(self, index: int) -> None:
        kind, process, step = self._mine.pop(index)
        print(f"fault {index}: {kind}, process {process}, step {step}", flush=True)
        (self._happened / str(index)).touch()

    def note_first(self, number: int, values: Mapping[str, float]) -> None:
        """A log that says when the first step was done."""
        if not self._told:
            self._told = True
            print(f"step {number} is done, {_age():.2f} s after the start", flush=True)

    def note_stop(self) -> None:
        """Called when the run was stopped: on a busy machine the limit is over before its step."""
        index, fault = self._next
        if fault.kind == "limit" and index in self._mine:
            self._announce(index)

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    _saving = _kill  # right after a save has begun in the background

    def _launcher(self) -> None:
        time.sleep(2)  # it has yet to pass on what was announced
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    def _freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _pause(self) -> None:
        """Freezes for less than anybody minds."""
        me = os.getpid()
        subprocess.run(["sh", "-c", f"kill -STOP {me}; sleep 0.5; kill -CONT {me}"], check=False)

    def _exit(self) -> None:
        os._exit(3)

    def _leave(self) -> None:
        sys.exit(3)

    def _sigterm(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        self._limit()

    def _limit(self) -> None:
        while (
            not self._stop.reason
        ):  # all agree before the next fault, a few milliseconds from here
            time.sleep(0.02)

    def _callback(self) -> None:
        raise OverflowError("a fault in a callback")

    def _loader(self) -> None:
        raise OSError("a fault while reading")

    def _stuck(self) -> None:
        time.sleep(600)

    def _damage(self) -> None:
        """Truncates the newest checkpoint, and dies."""
        self._open.wait()
        newest = max(x for x in self.checkpoints.glob("step_*") if _finished(x))
        largest = max((newest / "arrays").rglob("*"), key=lambda x: x.stat().st_size * x.is_file())
        os.truncate(largest, largest.stat().st_size // 2)
        self._kill()

    def _full(self) -> None:
        self._open.wait()  # what it removes at its end would leave room for another
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def _vanished(self) -> None:
        self._open.wait()
        self.checkpoints.rename(self._away)

    def _readonly(self) -> None:
        if os.getuid():  # root may write anywhere
            self.checkpoints.chmod(0o555)
            return
        for options in ("bind", "remount,ro,bind"):
            command = ["mount", "-o", options, str(self.checkpoints), str(self.checkpoints)]
            subprocess.run(command, check=True)

    def mend(self) -> None:
        """Makes the disk as it was."""
        if self._me:
            return
        self._filler.unlink(missing_ok=True)
        if self._away.exists():
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            self._away.rename(self.checkpoints)
        if os.getuid() and self.checkpoints.exists():
            self.checkpoints.chmod(0o755)
        unmount(self.checkpoints)


# Called before the step; the others at their own places
_BEFORE = ("kill", "launcher", "freeze", "pause", "exit", "leave", "sigterm", "limit")
_BEFORE += ("full", "vanished", "readonly")


def unmount(path: Path) -> None:
    """Takes away what is mounted there, if anything is."""
    if str(path) in Path("/proc/self/mounts").read_text():
        subprocess.run(["umount", "-l", str(path)], check=True)


def _finished(checkpoint: Path) -> bool:
    return (checkpoint / "manifest.json").exists()


def _drifted(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The same, but for one entry on one device."""
    w = params["w1"]
    copies = [shard.data for shard in w.addressable_shards]
    copies[0] = copies[0].at[0, 0].add(0.5)
    return {**params, "w1": jax.make_array_from_single_device_arrays(w.shape, w.sharding, copies)}


def _age() -> float:
    """Seconds since this process was started."""
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    now = float(Path("/proc/uptime").read_text().split()[0])
    return now - start / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
