"""Does it pay? What sending less, or holding less, would make of a step's time.

    step, its measured time, links  --pays-->  a row for each technique: now, then, yes or no

The step's exposed communication is scaled by what the alpha-beta model (`jdp.costs`) says of the
bytes that each technique sends against those that the step sends now; their bytes are read from the
technique's own lowered program. What encoding costs is timed here, without communication, or for a
target reckoned from the bytes that pass through memory. A gain under 3 % is a no: it is within what
one run differs from the next.

What it does not know: how much of a smaller exchange would hide under compute that the present one
does not, and what a technique does to the loss.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jdp.hardware import Link
from jdp.holdings import human, table
from jdp.links import Links
from jdp.payoff_facts import Facts, here, on_target, reduction, silent_seconds
from jdp.power import power_sgd
from jdp.reduce import all_reduce
from jdp.silent import sends
from jdp.train import TrainStep
from jdp.zero import zero1

LEAST = 0.03  # of the step: less is lost in noise
EVERY = 4  # batches that `jdp.multi_steps` is tried with

# Each technique of sending less, the argument that asks for it, and how often its encoding reads or
# writes the float32 gradients: bfloat16 casts (1.5), adds up (1) and casts back (1.5); 8 bits look
# for the largest of each block besides; PowerSGD multiplies twice, subtracts and adds the residual.
_LESS = (
    ("bfloat16 wire", "jdp.all_reduce(wire_dtype=jnp.bfloat16)", 4.0),
    ("int8 wire", "jdp.all_reduce(wire_dtype=jnp.int8, error_feedback=True)", 8.0),
    ("PowerSGD, rank 4", "jdp.power_sgd(rank=4)", 7.0),
)


class Payoff(NamedTuple):
    """What a technique would do.

    Attributes:
        what: The technique.
        argument: What to write.
        pays: Whether the step gets faster by 3 % or more.
        now_ms: Milliseconds of a step now.
        then_ms: Predicted, with it.
        sent_now: Bytes that a device sends in a step now.
        sent_then: Bytes that it would send.
        saves: Bytes of memory that each device would have free.
        why: In words.
    """

    what: str
    argument: str
    pays: bool
    now_ms: float
    then_ms: float
    sent_now: float
    sent_then: float
    saves: int
    why: str


def pays(
    step: TrainStep,
    state: Any,
    batch: Any,
    *,
    target: str | None = None,
    links: Links | Link | None = None,
    step_seconds: float | None = None,
    exposed_seconds: float | None = None,
) -> tuple[Payoff, ...]:
    """Predicts what bf16, int8, PowerSGD, ZeRO, accumulation and hierarchical sums would gain.

    Guarantees:
        - The step's own state is left as it is.
        - With one device, or nothing exposed, nothing that sends less is said to pay.

    Args:
        step: A step of `jdp.train_step`.
        state: Its state; for a target shapes will do.
        batch: A global batch; for a target shapes will do.
        target: Predict for hardware that need not be here, such as "h100:2x8"; the step's times
            are then those of `jdp.explain`. `None` takes the devices at hand.
        links: Links to use, such as `jdp.links.measure` returns. `None` takes the target's, or
            measures for a few seconds.
        step_seconds: Measured seconds of a step, as `jdp.doctor` finds them.
        exposed_seconds: Of these, what communication adds.

    Returns:
        A row for each technique, those that gain most first.

    Raises:
        ValueError: If only one of the two times is given, or none and no target.

    Example:
        >>> tx, mesh = optax.chain(jdp.all_reduce(), optax.sgd(0.1)), jdp.make_mesh()
        >>> step = jdp.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh)
        >>> state, link = jdp.init_state({"w": jnp.ones((256, 64))}, tx, mesh), Link(1e9, 1e-6, "")
        >>> rows = pays(step, state, jnp.ones((16, 256)), links=link, step_seconds=0.1,
        ...     exposed_seconds=0.0)
        >>> [row.what for row in rows if row.pays]
        []
    """
    if (step_seconds is None) != (exposed_seconds is None) or (
        step_seconds is None and target is None
    ):
        raise ValueError(
            "jdp.pays needs both step_seconds and exposed_seconds, as jdp.doctor measures them, or "
            "a target whose compiler models them: what would be saved is a part of these."
        )
    if target is not None:
        facts, mesh, memory_rate = on_target(step, state, batch, target, links)
        if step_seconds is not None:
            facts = facts._replace(step=step_seconds, exposed=exposed_seconds)
    else:
        mesh, memory_rate = step.mesh, None
        facts = here(step, state, batch, links, step_seconds or 0.0, exposed_seconds or 0.0)
    rows = [
        *_sending_less(facts, state, mesh, memory_rate),
        *_stages(facts, state, mesh),
        _accumulating(facts),
        _hierarchical(facts),
    ]
    return tuple(sorted(rows, key=lambda row: row.then_ms - row.now_ms))


def show(rows: Sequence[Payoff]) -> str:
    """The rows as aligned text."""
    lines = [("does it pay", "", "now", "then", "sent", "then sent", "memory", "why")]
    for row in rows:
        saves = f"-{human(row.saves)}" if row.saves else ""
        times = (f"{row.now_ms:.3g} ms", f"{row.then_ms:.3g} ms")
        sizes = (human(int(row.sent_now)), human(int(row.sent_then)))
        lines.append((row.argument, "yes" if row.pays else "no", *times, *sizes, saves, row.why))
    return table(lines, numbers=(2, 3, 4, 5, 6))


def _payoff(
    facts: Facts, what: str, argument: str, then: float, sent: float, why: str, saves: int = 0
) -> Payoff:
    """The row of a prediction, and its yes or no."""
    gain = 1 - then / facts.step
    pays = gain >= LEAST
    if not pays and not why:
        why = f"{gain:+.1%} of the step: within noise" if gain > 0 else "the step gets slower"
    why = why or f"{gain:.0%} of the step"
    return Payoff(what, argument, pays, 1e3 * facts.step, 1e3 * then, facts.sent, sent, saves, why)


def _exposed(facts: Facts, modelled: float) -> float:
    """Exposed seconds if the collectives took `modelled` seconds, as now in proportion."""
    return facts.exposed * modelled / facts.modelled if facts.modelled else 0.0


def _sending_less(facts: Facts, state: Any, mesh: Mesh, memory_rate: float | None) -> list[Payoff]:
    """The wire dtypes and PowerSGD."""
    rows = []
    for what, argument, passes in _LESS:
        if facts.replicas == 1:
            rows.append(_payoff(facts, what, argument, facts.step, 0.0, "one device sends nothing"))
            continue
        narrow = _SHARE_OF_BYTES.get(what)
        if facts.stage and narrow is None:
            argument = f"{argument} before jdp.zero1"
        elif facts.stage:
            argument = f"jdp.zero{facts.stage}({argument.removeprefix('jdp.all_reduce(')}"
        if facts.stage > 1 and narrow is None:
            why = f"zero{facts.stage} reduces gradients itself"
            rows.append(_payoff(facts, what, argument, facts.step, facts.sent, why))
            continue
        modelled, sent = _less(facts, what, state, mesh)
        saved = facts.exposed - _exposed(facts, modelled)
        encoding = functools.partial(_encoding, facts, what, passes, state, mesh, memory_rate)
        rows.append(_payoff_of_saving(facts, what, argument, saved, encoding, sent))
    return rows


def _less(facts: Facts, what: str, state: Any, mesh: Mesh) -> tuple[float, float]:
    """Seconds of all collectives, by the model, and bytes sent, with a technique."""
    ring = (facts.replicas - 1) / facts.replicas
    if facts.stage and what in _SHARE_OF_BYTES:  # the gradients are scattered, in fewer bytes
        less = facts.grads * _SHARE_OF_BYTES[what]
        spared = facts.seconds("reduce-scatter", facts.grads) - facts.seconds("all-to-all", less)
        return max(0.0, facts.modelled - spared), facts.sent - ring * (facts.grads - less)
    found = sends(reduction(_TRANSFORMS[what](), state, mesh)[0])
    modelled = sum(facts.seconds(kind, size) for kind, size in found)
    sent = ring * sum(size * (2 if kind == "all-reduce" else 1) for kind, size in found)
    if facts.stage:  # zero1 takes what a compressor has reduced, and gathers updates
        modelled += facts.seconds("all-gather", facts.params)
        sent += ring * facts.params
    return modelled, sent


def _encoding(
    facts: Facts, what: str, passes: float, state: Any, mesh: Mesh, memory_rate: float | None
) -> float:
    """Seconds that a technique computes besides."""
    if memory_rate is not None:
        return passes * facts.grads / memory_rate
    times = [silent_seconds(tx, state, mesh) for tx in (_transform(facts, what), all_reduce())]
    return max(0.0, times[0] - times[1])


def _payoff_of_saving(
    facts: Facts,
    what: str,
    argument: str,
    saved: float,
    encoding: Callable[[], float],
    sent: float,
) -> Payoff:
    """The row of something that saves communication; what it computes is timed if that matters."""
    if saved < LEAST * facts.step:
        why = f"no more than {1e3 * max(saved, 0.0):.2g} ms are to be gained"
        return _payoff(facts, what, argument, facts.step - saved, sent, why)
    if facts.alone is not None and facts.now_alone is not None:
        then, why = _as_timed(facts, facts.alone(_transform(facts, what)))
        return _payoff(facts, what, argument, then, sent, why)
    costs = encoding()
    then, why = facts.step - saved + costs, ""
    if then > (1 - LEAST) * facts.step:
        why = f"encoding takes {1e3 * costs:.2g} ms, sending less saves {1e3 * saved:.2g}"
    return _payoff(facts, what, argument, then, sent, why)


def _as_timed(facts: Facts, alone: float) -> tuple[float, str]:
    """A step with an exchange that was timed alone, against the present one.

    What is saved is so in the part that is exposed now; what is added is added.
    """
    assert facts.now_alone is not None
    change = alone - facts.now_alone
    if change < 0:
        change *= min(1.0, facts.exposed / facts.now_alone)
    then, why = facts.step + change, ""
    if then > (1 - LEAST) * facts.step:
        why = (
            f"its exchange takes {1e3 * alone:.2g} ms, the present one {1e3 * facts.now_alone:.2g}"
        )
    return then, why


def _transform(facts: Facts, what: str) -> optax.GradientTransformation:
    """The technique, as it would be written where the step's stage is kept."""
    simplest = optax.scale(-1.0)
    if not facts.stage:
        return _TRANSFORMS[what]()
    if what in _WIRES:
        return zero1(simplest, wire_dtype=_WIRES[what])
    return optax.chain(_TRANSFORMS[what](), zero1(simplest))


_WIRES = {"bfloat16 wire": jnp.bfloat16, "int8 wire": jnp.int8}
_SHARE_OF_BYTES = {"bfloat16 wire": 0.5, "int8 wire": 0.254}  # of float32's, see `jdp.all_reduce`

_TRANSFORMS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "bfloat16 wire": lambda: all_reduce(wire_dtype=jnp.bfloat16),
    "int8 wire": lambda: all_reduce(wire_dtype=jnp.int8, error_feedback=True),
    "PowerSGD, rank 4": lambda: power_sgd(rank=4),
}


def _stages(facts: Facts, state: Any, mesh: Mesh) -> list[Payoff]:
    """ZeRO 1 to 3: the update is shared out, what is sent is scattered and gathered."""
    share = 1 - 1 / facts.replicas
    held = [0, facts.opt_state, facts.opt_state + facts.grads]
    held.append(held[2] + facts.params)
    gathers, modelled, sent = 0.0, facts.modelled, facts.sent
    if facts.replicas > 1:
        # what zero1 sends, in how many pieces, around the simplest of optimizers
        found = sends(reduction(zero1(optax.scale(-1.0)), state, mesh)[0])
        gathers = sum(facts.seconds(*one) for one in found if one[0] == "all-gather")
        if not facts.stage:
            modelled = sum(facts.seconds(*one) for one in found)
            sent = share * (facts.grads + facts.params)
    with_zero1 = facts.step - facts.exposed + _exposed(facts, modelled)
    gather = _exposed(facts, gathers)
    if facts.alone is not None and facts.now_alone is not None:
        alone = facts.now_alone if facts.stage else facts.alone(zero1(optax.scale(-1.0)))
        with_zero1, gather = _as_timed(facts, alone)[0], alone * gathers / modelled
    # parameters are updated whole on each device; what is read and written besides is shared
    besides = facts.grads + 2 * facts.opt_state
    shared = besides / (besides + 2 * facts.params) * share
    work = 0.0 if facts.stage else min(facts.optimizer, facts.step - facts.exposed) * shared
    rows = []
    for stage in (1, 2, 3):
        argument, again = f"jdp.zero{stage}(...)", stage == 3  # gathered in the backward pass too
        then = with_zero1 - work + again * gather
        why = "" if then <= (1 - LEAST) * facts.step else "not for time; for memory, if needed"
        row = (then, sent + again * share * facts.params, why)
        saves = int(share * (held[stage] - held[facts.stage]))
        if facts.replicas == 1:
            row, saves = (facts.step, 0.0, "one device has nobody to share with"), 0
        elif facts.stage >= stage:
            row, saves = (facts.step, facts.sent, f"the step has zero{facts.stage} already"), 0
        rows.append(_payoff(facts, f"ZeRO {stage}", argument, *row, saves))
    return rows


def _accumulating(facts: Facts) -> Payoff:
    """An update for every few batches: each batch has its part of what is sent and updated."""
    argument = f"jdp.multi_steps(tx, every={EVERY})"
    spared = (facts.exposed + facts.optimizer) * (1 - 1 / EVERY)
    then = max(0.0, facts.step - spared)
    why = f"a batch, with updates from {EVERY} times as many examples"
    if spared < LEAST * facts.step:
        why = f"no more than {1e3 * spared:.2g} ms a batch are to be gained"
    return _payoff(facts, "accumulation", argument, then, facts.sent / EVERY, why)


def _hierarchical(facts: Facts) -> Payoff:
    """Within nodes first: what crosses between them is a part."""
    argument = "jdp.hierarchical(across_wire_dtype=jnp.bfloat16)"
    if facts.nodes == 1:
        why = "all devices are on one node, or on a mesh with one data axis"
        return _payoff(facts, "hierarchical", argument, facts.step, facts.sent, why)
    if facts.stage:
        why = f"zero{facts.stage} reduces gradients itself"
        return _payoff(facts, "hierarchical", argument, facts.step, facts.sent, why)
    # the model has plain all-reduces go by node already: a narrower wire between them is the gain
    then = facts.step - facts.exposed + _exposed(facts, facts.modelled - facts.crossing / 2)
    sent = facts.sent - facts.grads * facts.nodes / facts.replicas * (1 - 1 / facts.nodes)
    return _payoff(facts, "hierarchical", argument, then, sent, "")
