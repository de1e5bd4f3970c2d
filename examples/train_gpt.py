"""Trains a byte-level GPT, data-parallel, on the source of your own Python standard library.

    python examples/train_gpt.py             # on all GPUs or TPUs, or 8 emulated CPU devices
    python examples/train_gpt.py --help

Two CPU cores take 2 to 3 minutes and end at a held-out loss of 1.1 to 1.35 nats per byte (a
byte picked blindly costs 5.5). Then `out/` holds the loss curve (loss.png, loss.svg), the numbers
(run.json) and what the model takes for Python (sample.txt); Ctrl-C ends early with the same files.

As several processes, each with its part of the emulated devices, or its own GPUs:

    python examples/train_gpt.py --coordinator localhost:9876 --num-processes 2 --process-id 0 &
    python examples/train_gpt.py --coordinator localhost:9876 --num-processes 2 --process-id 1
"""

import dataclasses
import functools
import itertools
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from gpt import GPT, GPTConfig, generate, logits
from report import count, draw_curve, header, progress_bar
from text import Reader, standard_library

import jdp


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run is made of."""

    steps: int = 1400
    batch: int = 16  # windows of text in a step, over all devices
    microbatch: int = 2  # windows a device works on at a time
    learning_rate: float = 3e-3
    warmup: int = 50  # steps
    evaluate_every: int = 200  # steps
    evaluate_on: int = 512  # windows of held-out text
    sample: int = 400  # bytes to generate at the end
    seed: int = 0
    out: Path = Path("out")
    devices: int = 8  # emulated, over all processes, where there is no GPU or TPU
    coordinator: str | None = None  # host:port of process 0
    num_processes: int | None = None
    process_id: int | None = None
    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)


def loss_fn(model: GPT, params: Any, batch: dict[str, jax.Array]) -> jdp.Mean:
    """Cross-entropy in nats per byte. Rows of weight 0 only fill up a short batch."""
    scores = logits(model, params, batch["tokens"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["tokens"][:, 1:])
    return jdp.Mean.of(losses, batch["weight"])


def make_optimizer(config: Config) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup, max(config.steps, config.warmup + 1)
    )
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    return optax.chain(jdp.all_reduce(), optax.clip_by_global_norm(1.0), adamw)


def train(config: Config, interrupted: list[int]) -> tuple[dict[str, Any], Any]:
    """Runs the training; returns what run.json holds, and the parameters."""
    mesh, model, tx = jdp.make_mesh(), GPT(config.model), make_optimizer(config)
    loss = functools.partial(loss_fn, model)
    step = jdp.train_step(loss, tx, mesh, microbatch=config.microbatch)
    evaluation = jdp.eval_step(loss, mesh, microbatch=config.microbatch)
    params = model.init(jax.random.key(config.seed), jnp.zeros((1, 1), int))["params"]
    state = jdp.init_state(params, tx, mesh)

    text, held_out_text = standard_library()
    reader = Reader(config.model.context, config.batch, jax.process_index(), jax.process_count())
    batches = itertools.islice(reader.random(text, config.seed), config.steps)
    # Ctrl-C ends the batches, not the loop, so that all processes end on the same step.
    batches = itertools.takewhile(lambda _: not interrupted, batches)

    losses, held_out, pending, start = [], {}, None, time.perf_counter()
    if jax.process_index() == 0:
        print(header(config, mesh.size, params))
    with progress_bar(hidden=jax.process_index() != 0) as bar:
        task = bar.add_task("", total=config.steps, loss=math.nan, speed=0)
        for number, batch in enumerate(jdp.feed(batches, mesh, microbatch=config.microbatch), 1):
            state, metrics = step(state, batch)
            if pending is not None:  # read one step late: the devices have work meanwhile
                losses.append(float(pending["loss"]))
                tokens = len(losses) * config.batch * config.model.context
                speed = tokens / (time.perf_counter() - start)
                bar.update(task, completed=number, loss=losses[-1], speed=speed)
            pending = metrics
            if number % config.evaluate_every == 0 or number == config.steps:
                windows = reader.even(held_out_text, config.evaluate_on)
                windows = jdp.feed(windows, mesh, microbatch=config.microbatch)
                value = held_out[number] = jdp.evaluate(evaluation, state.params, windows)
                bar.console.print(f"step {number}: held-out loss {value:.3f} nats per byte")
    losses += [float(pending["loss"])] if pending else []
    run = {
        "devices": f"{mesh.size} x {jax.devices()[0].device_kind}",
        "parameters": count(params),
        "seconds": round(time.perf_counter() - start, 1),
        "losses": losses,
        "held_out": held_out,
    }
    return run, jax.device_get(state.params)


def write(config: Config, run: dict[str, Any], params: Any) -> None:
    """Fills the output folder and shows what the model takes for Python."""
    config.out.mkdir(parents=True, exist_ok=True)
    settings = dataclasses.asdict(config) | {"out": str(config.out)}
    (config.out / "run.json").write_text(json.dumps({"config": settings, **run}, indent=1))
    draw_curve(run["losses"], run["held_out"], config.out)
    key = jax.random.key(config.seed)
    sample = generate(GPT(config.model), params, b"def ", config.sample, key)
    text = sample.decode("utf-8", errors="replace")
    (config.out / "sample.txt").write_text(text, encoding="utf-8")
    print(f"\n{text}\n\nloss curve, numbers and sample: {config.out}/")


def main(config: Config) -> int:
    """Trains and writes; returns the exit code."""
    interrupted: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        interrupted.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C ends at once

    signal.signal(signal.SIGINT, interrupt)
    jdp.emulate_devices(config.devices // (config.num_processes or 1))
    jdp.initialize(
        config.coordinator, num_processes=config.num_processes, process_id=config.process_id
    )
    run, params = train(config, interrupted)
    if jax.process_index() == 0:
        write(config, run, params)
    return 128 + signal.SIGINT if interrupted else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config)))
