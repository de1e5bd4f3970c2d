"""Does it pay? What sending less, or holding less, would make of a step's time.

    step, its measured time, links  --pays-->  a row for each technique: now, then, yes, no or ?

The step's exposed communication is scaled by what the alpha-beta model (`jdp.costs`) says of the
bytes that each technique sends against those that the step sends now; their bytes are read from the
technique's own lowered program. What encoding costs is timed here, without communication, or for a
target reckoned from the bytes that pass through memory.

What it does not know: how much of a smaller exchange would hide under compute that the present one
does not, and what a technique does to the loss.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jdp.asked import sends
from jdp.chain import wire_code
from jdp.hardware import Link
from jdp.hierarchy import hierarchical
from jdp.links import Links
from jdp.payoff import LEAST, Change, Payoff, ms, predicted, refused
from jdp.payoff_facts import (
    Facts,
    exchange,
    here,
    on_target,
    reduction,
    ring_bytes,
    scattering,
    silent_seconds,
)
from jdp.power import power_sgd
from jdp.reduce import all_reduce
from jdp.train import TrainStep

EVERY = 4  # batches that `jdp.multi_steps` is tried with

# Each technique of sending less, the argument that asks for it, and how often its encoding reads or
# writes the float32 gradients: bfloat16 casts (1.5), adds up (1) and casts back (1.5); 8 bits look
# for the largest of each block besides; PowerSGD multiplies twice, subtracts and adds the residual.
_LESS = (
    ("bfloat16 wire", "jdp.all_reduce(wire_dtype=jnp.bfloat16)", 4.0),
    ("int8 wire", "jdp.all_reduce(wire_dtype=jnp.int8, error_feedback=True)", 8.0),
    ("PowerSGD, rank 4", "jdp.power_sgd(rank=4)", 7.0),
)
_WIRES = {"bfloat16 wire": jnp.bfloat16, "int8 wire": jnp.int8}
_TRANSFORMS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "bfloat16 wire": lambda: all_reduce(wire_dtype=jnp.bfloat16),
    "int8 wire": lambda: all_reduce(wire_dtype=jnp.int8, error_feedback=True),
    "PowerSGD, rank 4": lambda: power_sgd(rank=4),
    "hierarchical": lambda: hierarchical(across_wire_dtype=jnp.bfloat16),
}


def pays(
    step: TrainStep,
    state: Any,
    batch: Any,
    *,
    target: str | None = None,
    links: Links | Link | None = None,
    step_seconds: float | None = None,
    exposed_seconds: float | None = None,
    off: float = 0.0,
    idle_seconds: float = 0.0,
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
        links: Links to use, such as `jdp.links.measure` returns, or one for each axis. `None` takes
            the target's, or measures for a few seconds.
        step_seconds: Measured seconds of a step, as `jdp.doctor` finds them.
        exposed_seconds: Of these, what communication adds.
        off: What `exposed_seconds` may be off by, relative to itself.
        idle_seconds: Of a step, what devices wait for their host or for input.

    Returns:
        A row for each technique, those that pay first. Of a step that takes local steps, one row.

    Raises:
        ValueError: If only one of the two times is given, or none and no target; or if links are
            not those of the mesh.
        TypeError: If links are no links.

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
    facts = facts._replace(off=max(facts.off, off), idle=idle_seconds)
    if facts.parts.local:
        return (_fewer_rounds(facts),)
    rows = [
        *_sending_less(facts, state, mesh, memory_rate),
        *_stages(facts, state, mesh),
        _accumulating(facts),
        _hierarchical(facts),
    ]
    order = (True, None, False)
    return tuple(sorted(rows, key=lambda row: (order.index(row.pays), row.then_ms - row.now_ms)))


def _exposed(facts: Facts, modelled: float) -> float:
    """Exposed seconds if the collectives took `modelled` seconds, as now in proportion."""
    return facts.exposed * modelled / facts.modelled if facts.modelled else 0.0


def _zero_code(number: int, facts: Facts, wire_dtype: Any) -> str:
    """A stage with the arguments that the step's own has, or that follow from its reduction."""
    asked = facts.parts.zero
    own = [wire_code(wire_dtype)]
    if asked is not None and asked.axis is not None:
        own.insert(0, f"axis={asked.axis!r}")
    if number == 2 and asked is not None and asked.number == 2 and asked.reduce:
        own.append(f'reduce="{asked.reduce}"')
    return f"jdp.zero{number}({', '.join(['inner', *filter(None, own)])})"


def _now_code(facts: Facts) -> str:
    """What the step has now, as far as it is known."""
    if facts.stage:
        return _zero_code(facts.stage, facts, facts.parts.wire_dtype)
    return facts.parts.reduction


def _code(facts: Facts, what: str, argument: str) -> tuple[str, str]:
    """What to write to send less, and in the place of what."""
    if not facts.stage:
        return argument, facts.parts.reduction
    now = _now_code(facts)
    if what in _WIRES:
        return _zero_code(facts.stage, facts, _WIRES[what]), now
    return f"optax.chain({argument}, {now})", now


def _refused(facts: Facts, what: str) -> str:
    """Why a technique of sending less does not apply; "" if it does."""
    parts, narrow = facts.parts, _WIRES.get(what)
    if facts.replicas == 1:
        return "one device sends nothing"
    if narrow is None and facts.stage > 1:
        return f"zero{facts.stage} reduces gradients itself"
    if parts.compresses:
        return f"the step has {parts.reduction} already"
    if narrow is not None and parts.wire_dtype is not None:
        bits = 8 * jnp.dtype(parts.wire_dtype).itemsize
        if bits <= 8 * jnp.dtype(narrow).itemsize:
            return f"the step sends {bits} bits already"
    return ""


def _sending_less(facts: Facts, state: Any, mesh: Mesh, memory_rate: float | None) -> list[Payoff]:
    """The wire dtypes and PowerSGD."""
    rows = []
    for what, argument, passes in _LESS:
        code = _code(facts, what, argument)
        if why := _refused(facts, what):
            rows.append(refused(facts, what, code, why))
            continue
        modelled, sent = _less(facts, what, state, mesh)
        if sent > 0.98 * facts.sent:
            rows.append(refused(facts, what, code, "it sends no less than the step does"))
            continue
        saved = facts.exposed - _exposed(facts, modelled)
        encoding = functools.partial(_encoding, facts, what, passes, state, mesh, memory_rate)
        rows.append(_payoff_of_saving(facts, what, code, saved, encoding, sent))
    return rows


def _less(facts: Facts, what: str, state: Any, mesh: Mesh) -> tuple[float, float]:
    """Seconds of all collectives, by the model, and bytes sent, with a technique."""
    then = sends(reduction(_transform(facts, what), state, mesh)[0])
    seconds = lambda found: sum(facts.seconds(*one) for one in found)  # noqa: E731
    if not facts.stage:
        return seconds(then), ring_bytes(then, facts.replicas)
    # of a stage only what is exchanged of the gradients changes, as often as it is exchanged
    now = sends(reduction(_present(facts), state, mesh)[0])
    spared = facts.again * (seconds(now) - seconds(then))
    less = facts.again * (ring_bytes(now, facts.replicas) - ring_bytes(then, facts.replicas))
    return max(0.0, facts.modelled - spared), facts.sent - less


def _encoding(
    facts: Facts, what: str, passes: float, state: Any, mesh: Mesh, memory_rate: float | None
) -> float:
    """Seconds that a technique computes besides."""
    if memory_rate is not None:
        return passes * facts.grads / memory_rate
    both = (_transform(facts, what), _present(facts))
    times = [silent_seconds(tx, state, mesh) for tx in both]
    return max(0.0, times[0] - times[1])


def _payoff_of_saving(
    facts: Facts,
    what: str,
    code: tuple[str, str],
    saved: float,
    encoding: Callable[[], float],
    sent: float,
) -> Payoff:
    """The row of something that saves communication; what it computes is timed if that matters."""
    if saved * (1 + facts.off) < LEAST * facts.step:
        why = f"no more than {ms(1e3 * max(saved, 0.0))} are to be gained"
        return predicted(facts, what, code, Change(saved), sent, why=why)
    if facts.alone is not None and facts.now_alone is not None:
        alone = facts.alone(_transform(facts, what))
        change = _as_timed(facts, alone)
        why = ""
        if change.gain < LEAST * facts.step:
            why = (
                f"its exchange takes {ms(1e3 * alone)}, the present one {ms(1e3 * facts.now_alone)}"
            )
        return predicted(facts, what, code, change, sent, why=why)
    costs, why = encoding() / facts.every, ""
    if saved - costs < LEAST * facts.step:
        why = f"encoding takes {ms(1e3 * costs)}, sending less saves {ms(1e3 * saved)}"
    return predicted(facts, what, code, Change(saved, added=costs), sent, why=why)


def _as_timed(facts: Facts, alone: float) -> Change:
    """What an exchange that was timed alone changes, against the present one.

    What is saved is so in the part that is exposed now; what is added is added.
    """
    assert facts.now_alone is not None
    saved = (facts.now_alone - alone) / facts.every
    if saved > 0:
        saved *= min(1.0, facts.exposed * facts.every / facts.now_alone)
    return Change(saved)


def _present(facts: Facts) -> optax.GradientTransformation:
    """The exchange of the step, as far as it is known."""
    return exchange(facts.parts, facts.stage) or all_reduce()


def _transform(facts: Facts, what: str) -> optax.GradientTransformation:
    """The technique, as it would be written where the step's stage is kept."""
    if not facts.stage:
        return _TRANSFORMS[what]()
    if what in _WIRES:
        return scattering(facts.parts, _WIRES[what])
    return optax.chain(_TRANSFORMS[what](), scattering(facts.parts, None))


def _stages(facts: Facts, state: Any, mesh: Mesh) -> list[Payoff]:
    """ZeRO 1 to 3: the update is shared out, what is sent is scattered and gathered."""
    wire, now = facts.parts.wire_dtype, _now_code(facts)
    behind = not facts.stage and facts.parts.name not in ("", "all_reduce")
    codes = [(_zero_code(number, facts, wire), now) for number in (1, 2, 3)]
    if behind:
        codes[0] = (f"optax.chain({now}, jdp.zero1(inner))", now)
    elif now and not facts.stage:
        codes = [(code, f"optax.chain({now}, inner)") for code, _ in codes]
    rows, scattered = [], None
    for number, code in enumerate(codes, 1):
        what, why = f"ZeRO {number}", ""
        if facts.replicas == 1:
            why = "one device has nobody to share with"
        elif facts.stage >= number:
            why = f"the step has zero{facts.stage} already"
        elif behind and number > 1:
            why = f"zero{number} reduces gradients itself, not by {now}"
        if why:
            rows.append(refused(facts, what, code, why))
            continue
        scattered = scattered or _scattered(facts, state, mesh, behind)
        rows.append(_stage(facts, number, code, *scattered))
    return rows


def _scattered(
    facts: Facts, state: Any, mesh: Mesh, behind: bool
) -> tuple[Change, float, float, float]:
    """What zero1 changes, bytes it sends, and seconds and bytes of gathering once more."""
    scatters = scattering(facts.parts, facts.parts.wire_dtype)
    if behind and facts.parts.reduces is not None:
        scatters = optax.chain(facts.parts.reduces, scatters)
    found = sends(reduction(scatters, state, mesh)[0])
    gathers = [one for one in found if one[0] == "all-gather"]
    gather = sum(facts.seconds(*one) for one in gathers)
    more = ring_bytes(gathers, facts.replicas)
    if facts.stage:
        return Change(), facts.sent, _exposed(facts, gather), more
    modelled, sent = sum(facts.seconds(*one) for one in found), ring_bytes(found, facts.replicas)
    if behind and facts.parts.reduces is None:  # gradients come averaged: updates are gathered
        modelled, sent = facts.modelled + gather, facts.sent + more
    saved = Change(facts.exposed - _exposed(facts, modelled))
    again = _exposed(facts, gather)
    if facts.alone is not None and facts.now_alone is not None:
        alone = facts.alone(scatters)
        saved, again = _as_timed(facts, alone), alone * gather / modelled if modelled else 0.0
    # parameters are updated whole on each device; what is read and written besides is shared
    besides = facts.grads + 2 * facts.opt_state
    shared = besides / (besides + 2 * facts.params) * (1 - 1 / facts.replicas)
    work = min(facts.optimizer, facts.step - facts.exposed) * shared
    return saved._replace(work=work), sent, again, more


def _stage(
    facts: Facts,
    number: int,
    code: tuple[str, str],
    change: Change,
    sent: float,
    again: float,
    more: float,
) -> Payoff:
    """The row of a stage that the step does not have."""
    share = 1 - 1 / facts.replicas
    held = [0, facts.opt_state, facts.opt_state + facts.grads]
    held.append(held[2] + facts.params)
    saves = int(share * (held[number] - held[facts.stage]))
    if number == 3:  # gathered in the backward pass too
        change, sent = change._replace(sending=change.sending - again), sent + more
    why = "" if change.gain >= LEAST * facts.step else "not for time; for memory, if needed"
    return predicted(facts, f"ZeRO {number}", code, change, sent, saves, why)


def _accumulating(facts: Facts) -> Payoff:
    """An update for every few batches: each batch has its part of what is sent and updated."""
    fewer = EVERY if facts.every == 1 else 2
    every = fewer * facts.every
    code = (f"jdp.multi_steps(tx, every={every})", "tx")
    if facts.every > 1:
        code = (f"jdp.multi_steps(inner, every={every})", f"every={facts.every}")
    share, why = 1 - 1 / fewer, f"a batch, with updates from {every} batches"
    most = share * (facts.exposed + facts.optimizer)
    change = Change(share * facts.exposed, share * facts.optimizer)
    if most * (1 + facts.off) < LEAST * facts.step:
        why = f"no more than {ms(1e3 * most)} a batch are to be gained"
    elif facts.accumulated is not None and facts.every == 1:
        then = facts.accumulated(every)
        change = Change(share * facts.exposed, facts.optimizer, then)
        if change.gain < LEAST * facts.step:
            why = f"summing up and updating take {ms(1e3 * then)}, where updating takes "
            why += ms(1e3 * facts.optimizer)
    row = predicted(facts, "accumulation", code, change, facts.sent / fewer, why=why)
    if row.pays and facts.accumulated is None and facts.every == 1:
        row = row._replace(pays=None, why="cannot tell: what summing up takes was not timed")
    return row


def _fewer_rounds(facts: Facts) -> Payoff:
    """Twice as many local steps between two rounds."""
    name, every = f"jdp.{facts.parts.local}", facts.every
    code = (f"{name}(..., every={2 * every})", f"every={every}")
    return predicted(facts, "fewer rounds", code, Change(facts.exposed / 2), facts.sent / 2)


def _hierarchical(facts: Facts) -> Payoff:
    """Within nodes first: what crosses between them is a part."""
    code = ("jdp.hierarchical(across_wire_dtype=jnp.bfloat16)", facts.parts.reduction)
    why = ""
    if facts.nodes == 1:
        why = "all devices are on one node, or on a mesh with one data axis"
    elif facts.stage:
        why = f"zero{facts.stage} reduces gradients itself"
    elif facts.parts.compresses or facts.parts.wire_dtype is not None:
        why = f"the step has {facts.parts.reduction} already"
    if why:
        return refused(facts, "hierarchical", code, why)
    # the model has plain all-reduces go by node already: a narrower wire between them is the gain
    saved = facts.exposed - _exposed(facts, facts.modelled - facts.crossing / 2)
    sent = facts.sent - facts.grads * facts.nodes / facts.replicas * (1 - 1 / facts.nodes)
    return _payoff_of_saving(facts, "hierarchical", code, saved, lambda: 0.0, sent)
