"""Loss of a byte-level GPT against the megabytes that training it has sent.

    python benchmarks/curves.py                     # all arms on eight emulated devices
    python benchmarks/curves.py --arms float32 int8 diloco_32
    python benchmarks/curves.py --json curves.json --plot curves.png

The model and the text are those of `examples/train_gpt.py`, with another reduction or other local
steps in each arm and the same batches and schedule. What a device sends in an exchange is counted
from the exchange's compiled program, by the ring algorithm, and added up over the exchanges of the
whole run; the scalars of loss and weight are left out. Arms with a start average gradients exactly,
or in 8 bits, in the first calls. Expected: 16 and 8 bits end where float32 does; PowerSGD with a
start comes within 2 % in 4000 steps, DiLoCo in the middle of 8000 within 3 % (`--steps 8000
--warmup 74 --fall 0.3 --outer-momentum 0.9`).
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    "power_sgd_4_begun": (1.02, 0.1),
    "diloco_32_middle": (1.03, 0.05),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains one small GPT many times, sending less and less."""

    arms: tuple[str, ...] = ()  # none: all
    steps: int = 640
    start: int = 0  # exact synchronous steps before local ones, where it has no start of its own
    power_start: float = 1 / 3  # share of the steps in int8 before PowerSGD, where it has a start
    local_int8: float = 0.149  # share of the steps in int8 before DiLoCo, where it has a start
    local_start: float = 0.5  # share before local steps; what is not in int8 is PowerSGD
    middle: tuple[float, float] = (0.147, 0.65)  # shares between which DiLoCo is in the middle
    outer_rate: float = 0.7  # of DiLoCo's outer optimizer
    outer_momentum: float = 0.75  # with which 960 steps ended lower than with 0.9
    batch: int = 16
    learning_rate: float = 3e-3
    warmup: int | None = None  # steps; none: a thirteenth of them
    fall: float | None = None  # share of the steps in which the rate falls to 0; none: a cosine
    evaluate_every: int = 80
    evaluate_on: int = 512
    model: GPTConfig = dataclasses.field(
        default_factory=lambda: GPTConfig(width=64, layers=2, context=64)
    )
    seed: int = 0
    quick: bool = False  # a few steps, to see that it runs
    json: Path | None = None  # where to write the results
    plot: Path | None = None  # where to draw the curves


class Arm(NamedTuple):
    """A maker of the transformation, and the reductions that it uses in call 1, 2, ..."""

    make: Callable[[], Any]
    exchanges: Callable[[int], Sequence[Any]]
    then: Callable[[], Any] | None = None  # after `calls` local ones; a chain of a reduction and
    calls: int = 0  # ... the inner optimizer


EXACT = jdp.all_reduce()
INT8 = jdp.all_reduce(wire_dtype=jnp.int8, error_feedback=True)
POWER = jdp.power_sgd(4, wire_dtype=jnp.int8)


def arms(config: Config) -> dict[str, Arm]:
    """The arms by name."""
    inner = optimizer(config)
    outer = optax.sgd(config.outer_rate, momentum=config.outer_momentum, nesterov=True)
    local_sgd = functools.partial(jdp.local_sgd, inner, 8)
    diloco = functools.partial(jdp.diloco, inner, outer, 32)
    calls = [
        round(share * config.steps)
        for share in (config.power_start, config.local_int8, config.local_start)
    ]
    begin = round(config.middle[0] * config.steps)
    end = begin + round((config.middle[1] - config.middle[0]) * config.steps / 32) * 32
    return {
        "float32": sync(inner, EXACT),
        "bfloat16": sync(inner, jdp.all_reduce(wire_dtype=jnp.bfloat16)),
        "int8": sync(inner, INT8),
        "power_sgd_1": sync(inner, jdp.power_sgd(1)),
        "power_sgd_2": sync(inner, jdp.power_sgd(2)),
        "power_sgd_4": sync(inner, jdp.power_sgd(4)),
        "power_sgd_4_begun": sync(inner, POWER, INT8, calls[0]),
        "top_k_1%": sync(inner, jdp.top_k(0.01)),
        "sign": sync(inner, jdp.sign()),
        "local_sgd_8": local(local_sgd, 8, config.start),
        "diloco_32": local(diloco, 32, config.start),
        "diloco_32_begun": local(diloco, 32, calls[2], POWER, INT8, calls[1]),
        "diloco_32_middle": in_the_middle(local(diloco, 32, begin, INT8), end, sync(inner, POWER)),
    }


def optimizer(config: Config) -> optax.GradientTransformation:
    """Of all arms; of each replica in local steps."""
    warmup = config.steps // 13 if config.warmup is None else config.warmup
    peak, steps = config.learning_rate, config.steps + 1
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps)
    if config.fall is not None:
        falls = round(config.fall * steps)
        rises, down = (
            optax.linear_schedule(0.0, peak, warmup),
            optax.linear_schedule(peak, 0, falls),
        )
        schedule = optax.join_schedules([rises, down], [steps - falls])
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def sync(inner: Any, reduce: Any, first: Any = None, calls: int = 0) -> Arm:
    """Gradients averaged in each call, in the first ones by `first`."""
    both = jdp.begin_with(first, calls, reduce) if calls else reduce
    return Arm(lambda: optax.chain(both, inner), lambda n: [first if n <= calls else reduce])


def local(
    make: Any, every: int, start: int, reduce: Any = EXACT, first: Any = None, calls: int = 0
) -> Arm:
    """The same before `start`; afterwards what local steps agree on, of which it counts anew."""
    both = jdp.begin_with(first, calls, reduce) if calls else reduce

    def exchanges(call: int) -> list[Any]:
        if call > start:
            agreements, left = divmod(call - start, every)
            return [] if left else [first if agreements <= calls else reduce]
        found = [first if call <= calls else reduce]
        return [*found, EXACT] if call == start else found  # where replicas set out from

    return Arm(functools.partial(make, start=start, reduce=both), exchanges)


def in_the_middle(steps: Arm, calls: int, after: Arm) -> Arm:
    """Local steps for so many calls, and then gradients averaged in each call."""

    def exchanges(call: int) -> Sequence[Any]:
        if call > calls:
            return after.exchanges(call)
        moves = [EXACT] * 3 if call == calls else []  # parameters, and AdamW's two moments
        return [*steps.exchanges(call), *moves]

    return Arm(steps.make, exchanges, after.make, calls)


def main(config: Config) -> None:
    jdp.emulate_devices(8)
    if config.quick:
        config = dataclasses.replace(
            config,
            steps=8,
            evaluate_every=4,
            evaluate_on=16,
            arms=config.arms or ("float32", "int8"),
        )
    makers = arms(config)
    if unknown := [name for name in config.arms if name not in makers]:
        raise SystemExit(f"There is no arm {unknown[0]!r}; there are {', '.join(makers)}.")
    results = []
    for name in config.arms or makers:
        results.append(train(name, makers[name], config))
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


def train(name: str, arm: Arm, config: Config) -> dict[str, Any]:
    """The held-out losses of one run, and what a device has sent by then."""
    mesh, model, tx = jdp.make_mesh(), GPT(config.model), arm.make()
    loss = functools.partial(loss_fn, model)
    microbatch = config.batch // mesh.size
    step = jdp.train_step(loss, tx, mesh, microbatch=microbatch)
    evaluation = jdp.eval_step(loss, mesh, microbatch=microbatch)
    params = model.init(jax.random.key(config.seed), jnp.zeros((1, 1), int))["params"]
    state = jdp.init_state(params, tx, mesh)
    text, held_out = standard_library()
    reader = Reader(config.model.context, config.batch)
    batches = itertools.islice(reader.random(text, config.seed), config.steps)
    curve, sent = [], 0.0
    for number, batch in enumerate(jdp.feed(batches, mesh, microbatch=microbatch), 1):
        if arm.then and number == arm.calls + 1:
            tx = arm.then()
            state = together(state, tx, mesh)
            step = jdp.train_step(loss, tx, mesh, microbatch=microbatch)
        state, _ = step(state, batch)
        sent += sum(sent_by(reduce, mesh, config) for reduce in arm.exchanges(number))
        if number % config.evaluate_every == 0 or number == config.steps:
            windows = jdp.feed(
                reader.even(held_out, config.evaluate_on), mesh, microbatch=microbatch
            )
            value = jdp.evaluate(evaluation, state.params, windows)
            curve.append({"step": number, "MB": sent / 1e6, "loss": float(value)})
    return {"arm": name, "MB_a_step": sent / 1e6 / config.steps, "curve": curve, **curve[-1]}


def together(state: Any, tx: Any, mesh: Any) -> Any:
    """The state of synchronous training that goes on from local steps, with mean moments."""
    new = jdp.init_state(jdp.agreed(state.params), tx, mesh)
    reduction, inner = new.opt_state
    inner = jdp.restage(state.opt_state.inner_state, inner)
    return new._replace(step=state.step, opt_state=(reduction, inner))


@functools.cache
def sent_by(reduce: Any, mesh: Any, config: Config) -> float:
    """Bytes a device sends when what is like the model's gradients is averaged once."""
    model = GPT(config.model)
    make = functools.partial(model.init, jax.random.key(0), jnp.zeros((1, 1), int))
    params = jax.eval_shape(make)["params"]
    axes = jdp.data_axes(mesh)

    def grad(x: Any) -> jdp.PerReplica:
        place = jax.NamedSharding(mesh, jax.P(axes))
        like = jax.ShapeDtypeStruct((mesh.size, *x.shape), jnp.float32, sharding=place)
        return jdp.PerReplica(like, axes=axes, mesh=mesh)

    state = jdp.init_state(params, reduce, mesh).opt_state
    compiled: Any = jax.jit(reduce.update).lower(jax.tree.map(grad, params), state).compile()
    return sent_bytes(collectives(compiled.as_text()), mesh.size)


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
