"""Loss of a byte-level GPT against the megabytes that training it has sent.

    python benchmarks/curves.py                     # all arms on eight emulated devices
    python benchmarks/curves.py --arms float32 int8 diloco_32
    python benchmarks/curves.py --json curves.json --plot curves.png

The model and the text are those of `examples/train_gpt.py`, with another reduction or other local
steps in each arm and the same batches, schedule and start. What a device sends is counted from the
compiled program, by the ring algorithm; what a call sends only now and then counts by how often.
Expected: 16 and 8 bits end where float32 does. Local steps need many agreements to catch up: give
`--steps`, and `--start` for synchronous steps at first.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import measure
import optax
import tyro
from measure import Goal
from payload import collectives, sent_bytes

import jdp

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, GPTConfig
from text import Reader, standard_library
from train_gpt import loss_fn

# Loss at the end over float32's, and bytes over float32's.
LIMITS = {
    "bfloat16": (1.005, 0.501),
    "int8": (1.005, 0.255),
    "power_sgd_4": (1.02, 0.1),
    "diloco_32": (1.03, 0.05),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains one small GPT many times, sending less and less."""

    arms: tuple[str, ...] = ()  # none: all
    steps: int = 640
    start: int = 160  # synchronous steps before local ones
    batch: int = 16
    learning_rate: float = 3e-3
    warmup: int | None = None  # steps; none: a thirteenth of them
    evaluate_every: int = 80
    evaluate_on: int = 512
    model: GPTConfig = dataclasses.field(
        default_factory=lambda: GPTConfig(width=64, layers=2, context=64)
    )
    seed: int = 0
    quick: bool = False  # a few steps, to see that it runs
    json: Path | None = None  # where to write the results
    plot: Path | None = None  # where to draw the curves


def arms(config: Config) -> dict[str, tuple[Callable[[], Any], int]]:
    """Name to a maker of the transformation, and calls from one exchange of its own to the next."""
    warmup = config.steps // 13 if config.warmup is None else config.warmup
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warmup, config.steps + 1
    )
    inner = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )

    def sync(reduce: Any) -> tuple[Callable[[], Any], int]:
        return lambda: optax.chain(reduce, inner), 1

    nesterov = optax.sgd(0.7, momentum=0.9, nesterov=True)
    start = config.start
    return {
        "float32": sync(jdp.all_reduce()),
        "bfloat16": sync(jdp.all_reduce(wire_dtype=jnp.bfloat16)),
        "int8": sync(jdp.all_reduce(wire_dtype=jnp.int8, error_feedback=True)),
        "power_sgd_1": sync(jdp.power_sgd(1)),
        "power_sgd_2": sync(jdp.power_sgd(2)),
        "power_sgd_4": sync(jdp.power_sgd(4)),
        "top_k_1%": sync(jdp.top_k(0.01)),
        "sign": sync(jdp.sign()),
        "local_sgd_8": (lambda: jdp.local_sgd(inner, 8, start=start), 8),
        "diloco_32": (lambda: jdp.diloco(inner, nesterov, 32, start=start), 32),
    }


def main(config: Config) -> None:
    jdp.emulate_devices(8)
    if config.quick:
        config = dataclasses.replace(
            config,
            steps=8,
            start=4,
            evaluate_every=4,
            evaluate_on=16,
            arms=config.arms or ("float32", "int8"),
        )
    makers = arms(config)
    if unknown := [name for name in config.arms if name not in makers]:
        raise SystemExit(f"There is no arm {unknown[0]!r}; there are {', '.join(makers)}.")
    results = []
    for name in config.arms or makers:
        results.append(train(name, *makers[name], config))
        last = results[-1]
        print(f"{name}: {last['loss']:.4f} nats, {last['MB']:.2f} MB", flush=True)
    columns = ("arm", "loss", "loss_ratio", "MB", "bytes_ratio", "MB_a_step")
    measure.report(
        "curves",
        dataclasses.asdict(config),
        results,
        judge(results),
        config.json,
        tables=[columns],
    )
    if config.plot:
        draw(results, config.plot)


def train(name: str, make: Callable[[], Any], every: int, config: Config) -> dict[str, Any]:
    """The held-out losses of one run, and what a device has sent by then."""
    mesh, model, tx = jdp.make_mesh(), GPT(config.model), make()
    loss = functools.partial(loss_fn, model)
    microbatch = config.batch // mesh.size
    step = jdp.train_step(loss, tx, mesh, microbatch=microbatch)
    evaluation = jdp.eval_step(loss, mesh, microbatch=microbatch)
    params = model.init(jax.random.key(config.seed), jnp.zeros((1, 1), int))["params"]
    state = jdp.init_state(params, tx, mesh)
    text, held_out = standard_library()
    reader = Reader(config.model.context, config.batch)
    batches = itertools.islice(reader.random(text, config.seed), config.steps)
    curve, sent, always, apart = [], 0.0, 0.0, 0.0
    for number, batch in enumerate(jdp.feed(batches, mesh, microbatch=microbatch), 1):
        if number == 1:
            always, apart = sent_by(step.lower(state, batch).compile(), mesh.size)
        state, _ = step(state, batch)
        synchronous = every == 1 or number <= config.start
        sent += always + (apart if synchronous else apart / every)
        if number % config.evaluate_every == 0:
            windows = jdp.feed(
                reader.even(held_out, config.evaluate_on), mesh, microbatch=microbatch
            )
            value = jdp.evaluate(evaluation, state.params, windows)
            curve.append({"step": number, "MB": sent / 1e6, "loss": float(value)})
    return {"arm": name, "MB_a_step": sent / 1e6 / config.steps, "curve": curve, **curve[-1]}


def sent_by(compiled: Any, count: int) -> tuple[float, float]:
    """Bytes a device sends in every call, and besides in one that reduces gradients or parameters.

    Local steps hold a branch for each kind of call, which send the same, all in one.
    """
    found = collectives(compiled.as_text())
    always = sent_bytes([c for c in found if not c.in_branch], count)
    branches = [sent_bytes([c], count) for c in found if c.in_branch]
    return always, max(branches, default=0.0)


def judge(results: list[dict[str, Any]]) -> list[Goal]:
    """Ratios to float32, and the goals that they are held against."""
    bases, goals = [row for row in results if row["arm"] == "float32"], []
    for base, row in itertools.product(bases, results):
        row["loss_ratio"] = row["loss"] / base["loss"]
        row["bytes_ratio"] = row["MB_a_step"] / base["MB_a_step"]
        if row["arm"] in LIMITS:
            loss, sent = LIMITS[row["arm"]]
            goals += [
                Goal(f"{row['arm']}: loss / float32's", row["loss_ratio"], loss),
                Goal(f"{row['arm']}: bytes / float32's", row["bytes_ratio"], sent),
            ]
    return goals


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Loss against steps, and against megabytes sent."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for row in results:
        losses = [point["loss"] for point in row["curve"]]
        axes[0].plot([point["step"] for point in row["curve"]], losses, label=row["arm"])
        axes[1].plot([point["MB"] for point in row["curve"]], losses, label=row["arm"])
    axes[0].set(xlabel="step", ylabel="held-out loss, nats per byte")
    axes[1].set(xlabel="megabytes sent by each device", xscale="log")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
