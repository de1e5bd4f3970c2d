"""The `jdp` command: explain, plan, doctor and launch for a script, or for the machine.

    jdp doctor                                  what this machine has; its links, measured
    jdp doctor train.py -- --steps 50           where the time of a run goes
    jdp explain train.py --target h100:2x8      what the compiler makes of the step
    jdp plan train.py --target v5e:4x4          which strategy, and what it would take
    jdp launch -n 2 train.py -- --steps 50      several processes of a script on this machine
    jdp demo                                    half a minute that shows what jdp does

The script is any that calls a step of `jdp.train_step`; what follows `--` is given to it. Results
go to standard output, as tables or, with --json, as one JSON document; everything that is said on
the way goes to standard error. The command ends with one of these codes:

    0  done        1  failed: the script, or the compiler        2  asked for something wrong
    3  done, and the answer is no: it does not fit, or something that is needed is missing
    130  interrupted
"""

import contextlib
import dataclasses
import glob
import json as json_format
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import jax
import tyro

import jdp
from jdp import script as scripts

OK, FAILED, WRONG, NO, INTERRUPTED = 0, 1, 2, 3, 130

_Script: TypeAlias = Annotated[Path, tyro.conf.Positional]
_Target: TypeAlias = Annotated[str | None, tyro.conf.arg(metavar="TARGET")]


@dataclasses.dataclass(frozen=True)
class Explain:
    """Compile a script's step and tell what it sends, keeps and hides.

    The script runs up to its first step and is stopped there. The step is compiled, for its own
    devices or for a target, and the compiled program is read: each collective with its bytes, how
    often it runs and how much of it is exposed; memory by kind; time, if the compiler models it.
    """

    script: _Script
    """The training script; give it arguments after `--`."""
    target: _Target = None
    """Devices that need not be here, such as "v5e:4x4" or "h100:2x8" (2 hosts of 8); without it,
    those that the script uses."""
    shapes: bool = False
    """Let jdp.init_state make shapes instead of arrays, for a model too large for this machine.
    The script gives it the parameters as a function."""
    html: Path | None = None
    """Write the report to this file, too, as a page that needs nothing else."""
    cache: bool = True
    """Use what was found out before about the same program."""
    json: bool = False
    """Write one JSON document instead of tables."""

    def run(self, arguments: Sequence[str]) -> int:
        """Does it; returns the exit code."""
        from jdp import report as reports

        with _only_results(self.json):
            job = scripts.first_step(self.script, arguments, shapes=self.shapes)
            report = reports.explain(job.step, job.state, job.batch, self.target, cache=self.cache)
        _show(report, self.json, self.html)
        return NO if report.fits is False else OK


@dataclasses.dataclass(frozen=True)
class Plan:
    """Find the strategy for a script's loss, parameters and optimizer.

    The script runs up to its first step. What its transformation sends or places is taken out; the
    ways to do so are enumerated, the hopeless ones left out by formula, and the best compiled.
    """

    script: _Script
    """The training script; give it arguments after `--`."""
    target: _Target = None
    """Devices to plan for, such as "v5e:4x4" or "h100:2x8" (2 hosts of 8); without it, those that
    the script uses."""
    global_batch: int | None = None
    """Examples of a step, over all devices; without it, as many as the script's."""
    compile_best: int = 3
    """How many of the ways to compile."""
    shapes: bool = False
    """Let jdp.init_state make shapes instead of arrays, for a model too large for this machine.
    The script gives it the parameters as a function."""
    html: Path | None = None
    """Write the plan to this file, too, as a page that needs nothing else."""
    json: bool = False
    """Write one JSON document instead of tables."""

    def run(self, arguments: Sequence[str]) -> int:
        """Does it; returns the exit code."""
        from jdp import planning

        with _only_results(self.json):
            job = scripts.first_step(self.script, arguments, shapes=self.shapes, plain=True)
            if job.removed:
                _say(f"Taken out of the script's transformation: {', '.join(job.removed)}.")
            recipe = job.step.recipe
            found = planning.plan(
                recipe.loss_fn,
                job.state.params,
                job.batch,
                recipe.tx,
                target=self.target,
                global_batch=self.global_batch,
                compile_best=self.compile_best,
                key=job.state.key,
                model_state=job.state.model_state,
            )
        _show(found, self.json, self.html)
        return NO if found.best is None else OK


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Examine this machine or, given a script, where the time of its run goes.

    Without a script: versions, devices, memory, links as measured, and whether what is needed is
    there. With one: the script runs for some steps, is traced, and is stopped; findings are
    ranked by what they would gain, each with the argument to change.
    """

    script: Annotated[Path | None, tyro.conf.Positional] = None
    """The training script, none for the machine; give it arguments after `--`."""
    steps: int = 20
    """Steps to measure."""
    devices: int = 8
    """CPU devices to emulate for the machine's links where there is no GPU or TPU."""
    html: Path | None = None
    """Write the diagnosis of a script to this file, too, as a page that needs nothing else."""
    json: bool = False
    """Write one JSON document instead of tables."""

    def run(self, arguments: Sequence[str]) -> int:
        """Does it; returns the exit code."""
        from jdp import diagnose

        def examine(step: Any, state: Any, batches: Any) -> Any:
            return diagnose.doctor(step, state, batches, steps=self.steps)

        if self.html is not None and self.script is None:
            raise ValueError("--html is for a script's diagnosis: jdp doctor train.py --html FILE.")
        with _only_results(self.json):
            if self.script is None:
                jdp.emulate_devices(self.devices)
                found = diagnose.doctor_machine()
            else:
                found = scripts.follow(self.script, arguments, examine)
        _show(found, self.json, self.html)
        return NO if getattr(found, "complete", True) is False else OK


@dataclasses.dataclass(frozen=True)
class Demo:
    """Train a small model on one device and on all of them, and compare."""

    steps: int = 60
    """Steps of each run."""
    devices: int = 8
    """CPU devices to emulate where there is no GPU or TPU."""
    json: bool = False
    """Write one JSON document instead of tables."""

    def run(self, arguments: Sequence[str]) -> int:
        """Does it; returns the exit code."""
        from jdp.demo import demo

        del arguments
        jdp.emulate_devices(self.devices)
        with _only_results(self.json):
            found = demo(self.steps)
        if self.json:
            print(json_format.dumps(found))
        return OK


@dataclasses.dataclass(frozen=True)
class Launch:
    """Run a script in several processes on this machine, until all have ended.

    Each line they print is labelled with its process. Once one has failed, the others are ended,
    and the command ends with the code of the first: 128 + the number of a signal, 75 if a process
    only lost another, 76 if one was stuck, 85 if all stopped when asked to.
    """

    script: _Script
    """The training script, which calls jdp.initialize(); give it arguments after `--`."""
    num_processes: Annotated[int, tyro.conf.arg(aliases=["-n"])]
    """How many."""
    devices: int | None = None
    """CPU devices that each process emulates."""
    max_restarts: int = 0
    """How often all of them are started again after a failure."""
    grace: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""

    def run(self, arguments: Sequence[str]) -> int:
        """Does it; returns the exit code."""
        from jdp.launch import launch

        return launch(
            self.script,
            arguments,
            num_processes=self.num_processes,
            devices=self.devices,
            max_restarts=self.max_restarts,
            grace_seconds=self.grace,
        )


COMMANDS = {
    "doctor": Doctor,
    "explain": Explain,
    "plan": Plan,
    "launch": Launch,
    "demo": Demo,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with the arguments of the process, or those given.

    Returns:
        The exit code, see the module.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    place = given.index("--") if "--" in given else len(given)
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="jdp",
        description=__doc__,
        args=given[:place] or ["--help"],
        config=(tyro.conf.OmitArgPrefixes,),
    )
    _leave_absent_hardware()
    try:
        return command.run(given[place + 1 :])
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except scripts.ScriptError as error:
        _say(str(error))
        return FAILED if error.__cause__ else WRONG
    except (ValueError, TypeError, ImportError) as error:
        _say(str(error))
        return WRONG
    except Exception as error:
        _say(f"{type(error).__name__}: {error}")
        return FAILED


def _leave_absent_hardware() -> None:
    """Keeps JAX to the CPU where compilers for a GPU or TPU are installed, but no such device is.

    JAX would look for the devices, complain at length, and have no compiler left for a target.
    """
    hardware = ("/dev/nvidia*", "/dev/dxg", "/dev/kfd", "/dev/accel*", "/dev/vfio/*")
    if not os.environ.get("JAX_PLATFORMS") and not any(glob.glob(pattern) for pattern in hardware):
        jax.config.update("jax_platforms", "cpu")


def _only_results(json: bool) -> contextlib.AbstractContextManager[Any]:
    """Keeps standard output for the JSON: what a script prints goes to standard error."""
    return contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()


def _show(found: Any, json: bool, html: Path | None) -> None:
    """Writes a result: as JSON or as tables, and as a page if one is wanted."""
    if html is not None:
        found.save_html(html)
        _say(f"Written: {html}")
    if json:
        print(found.to_json())
        return
    try:
        import rich
    except ImportError:
        print(found)
    else:
        print(found) if not hasattr(found, "__rich__") else rich.print(found)


def _say(text: str) -> None:
    print(f"jdp: {text}", file=sys.stderr)
