"""Fair times: arms take turns in one process, and only ratios within a round are compared.

In: functions to time. Out: medians, ratios with their quartiles, a table, a JSON file.

    round 0   C D A B      round 1   B D C A      round 2   D A B C     ...

A machine's speed drifts with its load by several times, so a median of one arm says little
beside a median of another taken at another time. A ratio is therefore made in each round, of
neighbours in time, and the median of these ratios is reported. The order is drawn anew for each
round, from a fixed seed: in a cycle each arm would always follow the same one, and inherit what
that one left in caches and in malloc. Nothing here knows what a step is.
"""

import ctypes
import functools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

MAX_GRADIENT_ERROR = 1e-5  # float32 sums in another order; see `gradient_error`

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""Seconds that pass, or seconds of CPU this process uses: other programs disturb those less."""


class Goal(NamedTuple):
    """A number that shall not exceed a limit."""

    what: str
    value: float
    limit: float


def interleave(turns: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs each turn once a round, in an order drawn anew; each returns what it measured."""
    names, draw = list(turns), random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in names}
    bar = functools.partial(track, transient=True, console=Console(stderr=True))
    for _ in bar(range(rounds), ", ".join(names), disable=not sys.stderr.isatty()):
        for name in draw.sample(names, len(names)):
            found[name].append(turns[name]())
    return found


def stepper(
    step: Callable[[Any], tuple[Any, Any]],
    state: Any,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[], float]:
    """A turn: one step that is not timed, then `calls` that are, each waited for.

    The first undoes what the arm before has left in caches and in malloc, which on glibc is worth
    5 percent: in training, too, a step follows its like.

    Args:
        step: From state to (state, result).
        state: Taken over: the step may consume it.
        calls: Steps to time in a turn.
        clock: See `CLOCKS`.

    Returns:
        A function that takes the turn and returns seconds for a step.
    """

    def turn() -> float:
        nonlocal state
        start = 0.0
        for call in range(calls + 1):
            if call == 1:
                start = clock()
            state, loss = step(state)
            jax.block_until_ready((state, loss))
        return (clock() - start) / calls

    turn()  # compiles
    return turn


def median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the ratios of paired measurements."""
    low, middle, high = np.quantile(np.divide(ours, theirs), [0.25, 0.5, 0.75])
    return {"median": float(middle), "low": float(low), "high": float(high)}


def gradient_error(actual: Any, expected: Any) -> float:
    """Largest difference of two gradients, relative to the largest entry of its leaf.

    Leaves of `actual` may have a leading dim of copies (pmap); every copy is compared.
    """

    def error(x: Any, y: Any) -> float:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        return float(np.abs(x - y).max() / np.abs(y).max())

    errors = jax.tree.map(error, actual, expected)
    worst = max(jax.tree.leaves(errors))
    if not worst <= MAX_GRADIENT_ERROR:
        raise SystemExit(
            f"Gradients differ by {worst:.2g} of their largest entry; rounding explains "
            f"{MAX_GRADIENT_ERROR:g}. The arms do not do the same work, so no time is worth a look."
        )
    return worst


def machine() -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    return {
        "jax": jax.__version__,
        "optax": optax.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "devices": f"{len(jax.devices())} x {jax.devices()[0].device_kind}",
        "allocator": allocator(),
        "load": [round(load, 1) for load in os.getloadavg()],
    }


def allocator() -> str:
    """The malloc this process uses: on CPU it moves a step by up to 2.3 times."""
    maps = Path("/proc/self/maps")
    mapped = maps.read_text() if maps.exists() else ""
    for name in ("tcmalloc", "jemalloc", "mimalloc"):
        if f"/lib{name}" in mapped:
            return name
    if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return f"{platform.system()} default"
    tunables = os.environ.get("GLIBC_TUNABLES")
    return "glibc " + platform.libc_ver()[1] + (f" with {tunables}" if tunables else "")


def report(
    benchmark: str,
    settings: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    goals: Sequence[Goal],
    path: Path | None,
    tables: Sequence[Sequence[str]] = (),
) -> None:
    """Prints results and goals, and writes both to a JSON file.

    `tables` lists the columns of each table of results; by default one has them all.
    """
    about = machine()
    console = Console(width=None if Console().is_terminal else 160)
    every = list(dict.fromkeys(key for row in results for key in row))
    for columns in tables or [every]:
        console.print(_table(benchmark, results, columns))
    if settings.get("quick"):
        console.print("A trial run: the numbers mean nothing.")
    elif goals:
        console.print(_goals(goals))
    console.print("  ".join(f"{name}: {value}" for name, value in about.items()), highlight=False)
    if path is not None:
        judged = [goal._asdict() | {"met": goal.value <= goal.limit} for goal in goals]
        content = {
            "benchmark": benchmark,
            "machine": about,
            "settings": dict(settings),
            "results": list(results),
            "goals": judged,
        }
        path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def _table(title: str, results: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    """One row for each result; ratios are shown as median [lower quartile, upper quartile]."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in results:
        table.add_row(*[_cell(row.get(column)) for column in columns])
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return f"{value['median']:.3f} [{value['low']:.2f}, {value['high']:.2f}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _goals(goals: Sequence[Goal]) -> Table:
    table = Table("goal", "measured", "limit", "", title="goals")
    for what, value, limit in goals:
        met = "[green]met" if value <= limit else "[red]missed"
        table.add_row(what, f"{value:.5g}", f"{limit:.5g}", met)
    return table


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
