"""What a person sees of a run: what it is made of, a progress bar, a picture of the loss."""

from pathlib import Path
from typing import Any

import jax
import matplotlib

matplotlib.use("Agg")  # writes files; needs no screen

from matplotlib import pyplot
from rich import progress
from rich.console import Console


def count(params: Any) -> int:
    """The number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def header(config: Any, devices: int, params: Any) -> str:
    """What a step is made of, so that nobody takes the batch for one device's part of it."""
    each = config.batch // (devices * config.microbatch)
    return (
        f"{count(params) / 1e6:.2f} M parameters. A step: {config.batch} windows of "
        f"{config.model.context} bytes = {devices} devices x {each} microbatch(es) x "
        f"{config.microbatch} windows. Learning rate up to {config.learning_rate:g}."
    )


def progress_bar(*, hidden: bool) -> progress.Progress:
    """A bar whose task has the fields loss and speed. Hidden, its console prints nothing either."""
    return progress.Progress(
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TextColumn("loss {task.fields[loss]:.3f} · {task.fields[speed]:,.0f} tokens/s ·"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
        console=Console(quiet=hidden),
        expand=True,
    )


def draw_curve(losses: list[float], held_out: dict[int, float], out: Path) -> None:
    """Writes loss.png and loss.svg: the loss of each step, and that on held-out text."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.7, label="train, each step")
    axes.plot([*held_out], [*held_out.values()], "o-", label="held-out files")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A byte-level GPT reads Python")
    axes.grid(alpha=0.3)
    axes.legend()
    for suffix in ("png", "svg"):
        figure.savefig(out / f"loss.{suffix}", dpi=150)
    pyplot.close(figure)
