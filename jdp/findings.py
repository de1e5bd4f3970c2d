"""What is worth a change: thresholds that people use, applied to where a step's time went.

    Facts, measured  --find-->  Findings, those that gain most first, each with what to write

Pure arithmetic on measured figures. The thresholds: devices used for less than 80 % of the time,
communication for more than 30 %, input for more than 10 %, the host for more than 10 %, a replica
10 % slower than the median; compiling again, or a collective of the loss in a loop, at all. Of
emulated devices, which take turns on the cores of one host, none is called slow: it is a question
of whose turn it was.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdp.balance import balance
from jdp.holdings import human
from jdp.payoff import Payoff, fill, ms
from jdp.sent import Sent

USED = 0.80
COMMUNICATION = 0.30
INPUT = 0.10
HOST = 0.10
SLOWEST = 0.10
LARGE_LEAF = 2**20  # bytes that a leaf of optimizer state takes on each device


class Finding(NamedTuple):
    """Something that costs time or memory.

    Attributes:
        what: What was measured, against its threshold.
        gain_ms: Milliseconds of a step that the change would gain, as predicted; 0 if it gains
            memory, or what it gains is not known.
        change: What to write.
    """

    what: str
    gain_ms: float
    change: str


class Facts(NamedTuple):
    """What findings are made of; milliseconds of a step.

    Attributes:
        step: A step.
        compute: Devices compute.
        communication: They are in collectives and do not compute.
        input: They wait for the next batch.
        host: The rest.
        waiting: Of communication, waiting for slower devices; no business of what is sent.
        replica_ms: Compute of each replica, in the order of the mesh.
        shares_cores: Whether the replicas wait for each other's cores.
        microbatches: Microbatches of a global batch; 0 if not known.
        microbatch: Examples of one; `None` for a replica's whole share.
        reduction: Code of what averages gradients; "" if it is not known.
        stage: ZeRO stage; 0 for none.
        recompiled: Compilations while steps were measured.
        compile_ms: Milliseconds that these took.
        collectives: Of the compiled program.
        large: Path, and bytes on each device, of optimizer state that every device holds whole.
        replicas: Their number.
        half_is_faster: How much faster the chip multiplies bfloat16 than what the step multiplies
            in; 1 if nothing is known.
        waits_on_others: Another process, and the milliseconds in which it feeds or drives its
            devices while this one waits in collectives; `None` if there is none.
    """

    step: float
    compute: float
    communication: float
    input: float
    host: float
    waiting: float = 0.0
    replica_ms: tuple[float, ...] = ()
    shares_cores: bool = False
    microbatches: int = 0
    microbatch: int | None = None
    reduction: str = ""
    stage: int = 0
    recompiled: int = 0
    compile_ms: float = 0.0
    collectives: tuple[Sent, ...] = ()
    large: tuple[tuple[str, int], ...] = ()
    replicas: int = 1
    half_is_faster: float = 1.0
    waits_on_others: tuple[int, float] | None = None


def find(facts: Facts, payoffs: Sequence[Payoff] = ()) -> tuple[Finding, ...]:
    """The findings, those that gain most first.

    Args:
        facts: What was measured.
        payoffs: What `jdp.pays` says; the best of them is the change for communication.

    Returns:
        None at all if nothing passes its threshold.

    Example:
        >>> found = find(Facts(step=100, compute=60, communication=0, input=35, host=5))
        >>> [(finding.what.split(":")[0], finding.gain_ms) for finding in found]
        [('input 35 % of the step (over 10 %)', 35.0)]
    """
    found = [
        _input(facts),
        _communication(facts, payoffs),
        _host(facts),
        _slowest(facts),
        _others(facts),
        _recompiled(facts),
        *_in_loops(facts),
        _own_loops(facts),
        _whole_leaves(facts),
        _half(facts),
    ]
    return tuple(sorted(filter(None, found), key=lambda finding: -finding.gain_ms))


def show(findings: Sequence[Finding]) -> str:
    """The findings as numbered paragraphs.

    Example:
        >>> print(show([Finding("slow", 2.0, "Be quick"), Finding("large", 0.0, "Be small")]))
        1. slow
           -> Be quick (-2 ms)
        2. large
           -> Be small
    """
    if not findings:
        return fill(
            "Nothing passes its threshold: devices used for less than 80 % of the time, "
            "communication over 30 %, input or the host over 10 %, a replica 10 % slower than the "
            "others.",
        )
    lines = []
    for number, finding in enumerate(findings, 1):
        head, gain = f"{number}. ", f" (-{ms(finding.gain_ms)})" if finding.gain_ms else ""
        lines.append(fill(head + finding.what, more=len(head)))
        lines.append(fill(f"-> {finding.change}{gain}", indent=len(head), more=3))
    return "\n".join(lines)


def _share(part: float, facts: Facts) -> str:
    return f"{100 * part / facts.step:.0f} % of the step"


def _input(facts: Facts) -> Finding | None:
    """Waiting for input. A loader that is slower than the step cannot be hidden, only sped up."""
    if facts.input <= INPUT * facts.step:
        return None
    busy = facts.step - facts.input
    workers = math.ceil(facts.step / busy) + 1 if busy > 0 else 4
    return Finding(
        f"input {_share(facts.input, facts)} (over 10 %): a batch is waited for "
        f"{ms(facts.input)}, while the rest of a step takes {ms(busy)}",
        float(facts.input),
        "Make batches while the devices compute: jdp.feed(loader, mesh, prefetch=2); if that is "
        f"done, the loader itself is too slow: about {workers} of it in parallel, as with grain's "
        f"dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers={workers})). What a loop "
        "does between two steps counts as input, too: read metrics a step late, "
        "and evaluate, save and print rarely",
    )


def _communication(facts: Facts, payoffs: Sequence[Payoff]) -> Finding | None:
    sending = facts.communication - facts.waiting
    if sending <= COMMUNICATION * facts.step:
        return None
    what = (
        f"communication {_share(sending, facts)} (over 30 %): {ms(sending)} in which no device "
        "computes"
    )
    # what leaves the batch as it is comes first
    rows = sorted(payoffs, key=lambda row: row.what == "accumulation")
    best = next((row for row in rows if row.pays), None)
    if best is not None:
        return Finding(what, best.now_ms - best.then_ms, _in_place(best))
    larger = f"A larger batch for each device makes its share smaller{_larger(facts, payoffs)}"
    unsure = [row for row in rows if row.pays is None and row.what != "accumulation"]
    if unsure:
        ways = " or ".join(row.argument for row in unsure[:2])
        change = (
            f"From here it cannot be told whether {ways} pays: build the step both ways and time"
        )
        return Finding(what, 0.0, f"{change} it. {larger}")
    return Finding(
        what,
        0.0,
        "Nothing that jdp has would make it shorter by 3 % of the step, as far as can be told. "
        + larger,
    )


def _in_place(row: Payoff) -> str:
    """What to write, and in place of what."""
    if row.what == "accumulation":  # sums batches up, which somebody must want
        return f"{row.argument} in place of {row.instead}, if fewer updates will do"
    return row.argument + (f" in place of {row.instead}" if row.instead else "")


def _larger(facts: Facts, payoffs: Sequence[Payoff]) -> str:
    """What to write for more examples in a microbatch, or in an update."""
    if facts.microbatch is not None:
        twice = 2 * facts.microbatch
        return f", as does microbatch={twice} (now {facts.microbatch}) if memory allows"
    fewer = [row for row in payoffs if row.what == "accumulation"]
    return f", as does an update for several batches: {fewer[0].argument}" if fewer else ""


def _host(facts: Facts) -> Finding | None:
    """The host does not keep up, so that devices have nothing to run."""
    used = (facts.compute + facts.communication) / facts.step
    if used >= USED or facts.host <= HOST * facts.step:
        return None
    return Finding(
        f"devices used {100 * used:.3g} % of the time (under 80 %), the host "
        f"{_share(facts.host, facts)} (over 10 %): the devices wait {ms(facts.host)} for the "
        "next operation or step",
        float(facts.host),
        "Read metrics a step late, or every tenth step; run several steps in one program: "
        "jax.lax.scan(step, state, batches); or give a step more work: a larger batch"
        + (
            ""
            if facts.microbatch is None
            else f", or microbatch={2 * facts.microbatch} (now {facts.microbatch})"
        ),
    )


def _slowest(facts: Facts) -> Finding | None:
    """All wait for the slowest replica."""
    times = np.asarray(facts.replica_ms, float)
    if facts.shares_cores or len(times) < 2 or not times.min() > 0:
        return None
    middle, slowest = float(np.median(times)), float(times.max())
    if len(times) == 2:  # the median would be halfway to the slow one
        middle = float(times.min())
    over = slowest / middle - 1
    if slowest <= (1 + SLOWEST) * middle:
        return None
    who, shares = int(times.argmax()), ""
    gain = slowest - float(times.mean())
    if facts.microbatches >= 2 * len(times):
        dealt = balance(times, facts.microbatches)
        each = facts.microbatches / len(times)
        gain = slowest - float((dealt * times).max()) / each
        shares = f", here shares={[int(k) for k in dealt]}"
    return Finding(
        f"replica {who} computes {ms(slowest)} a step, {100 * over:.0f} % over the others' "
        f"{ms(middle)} (over {100 * SLOWEST:.0f} %)",
        max(0.0, gain),
        "Look at that device and its host first (clock, temperature, other programs). If it stays "
        "so, give it fewer microbatches: jdp.balance(times, microbatches) for "
        f"jdp.feed(shares=...) and step(..., shares=...){shares}",
    )


def _others(facts: Facts) -> Finding | None:
    """Another process keeps its devices waiting, and with them everybody's."""
    if facts.waits_on_others is None or facts.waits_on_others[1] <= INPUT * facts.step:
        return None
    process, late = facts.waits_on_others
    return Finding(
        f"process {process} keeps the others waiting: it spends {ms(late)} more of a step on "
        "input and its host than the process that spends least",
        float(late),
        f"Look at the loader and the loop of process {process}: jdp.feed(loader, mesh, prefetch=2) "
        "there, and nothing that only this process does between steps",
    )


def _recompiled(facts: Facts) -> Finding | None:
    if not facts.recompiled:
        return None
    return Finding(
        f"{facts.recompiled} programs were compiled while steps were measured, "
        f"{ms(facts.compile_ms)} of each step",
        float(facts.compile_ms),
        "Keep shapes, dtypes and places of batch and state the same in all steps: "
        "jdp.feed(pad=True) fills up ragged batches; jax.config.update('jax_log_compiles', True) "
        "names what is compiled",
    )


_OWN = ("layerwise", "gather", "in_backward", "value_and_grad", "jdp.zero")


def _in_loops(facts: Facts) -> list[Finding]:
    """Collectives of the loss in loops, those of a line of code together."""
    found: dict[tuple[str, str], list[Sent]] = {}
    for row in facts.collectives:
        if row.in_loop and row.times > 1 and not _is_own(row):
            found.setdefault((row.kind, row.where), []).append(row)
    return [_in_loop(facts, *key, rows) for key, rows in found.items()]


def _is_own(row: Sent) -> bool:
    """Whether jdp put it there: parameters gathered and gradients scattered for each microbatch."""
    return not row.source and any(name in row.made_by for name in _OWN)


def _in_loop(facts: Facts, kind: str, where: str, rows: Sequence[Sent]) -> Finding:
    once = sum((row.us or 0.0) / 1e3 * (1 - 1 / row.times) for row in rows)
    several = f"{len(rows)} {kind}s" if len(rows) > 1 else kind
    return Finding(
        f"{several} of {human(sum(row.bytes for row in rows))} in a loop, {rows[0].times} times a "
        "step" + (f", from {where}" if where else ""),
        min(once, facts.communication) if once else 0.0,
        "Reduce once, after the loop: take the collective out of the loss (return a jdp.Mean "
        "instead of a jax.lax.pmean), and let jdp accumulate: jdp.train_step(..., microbatch=...)",
    )


def _own_loops(facts: Facts) -> Finding | None:
    """What ZeRO 2 and 3 send for each microbatch, where communication is too much."""
    rows = [row for row in facts.collectives if row.in_loop and row.times > 1 and _is_own(row)]
    rows = [row for row in rows if row.bytes > 1024]  # not the loss and weights
    if not rows or facts.communication - facts.waiting <= COMMUNICATION * facts.step:
        return None
    times, size = max(row.times for row in rows), human(sum(row.bytes for row in rows))
    what = f"jdp.zero{facts.stage} sends {size} for each microbatch, {times} times a step"
    change = "Fewer, larger microbatches: jdp.train_step(..., microbatch=...)"
    if facts.microbatch is not None:
        change = (
            f"Fewer, larger microbatches, if memory allows: microbatch={2 * facts.microbatch} in "
            f"place of {facts.microbatch}, for jdp.train_step and jdp.feed"
        )
    if facts.stage == 2:
        change += '; or jdp.zero2(inner, reduce="step"), which holds whole gradients and sends once'
    return Finding(what, 0.0, change)


def _whole_leaves(facts: Facts) -> Finding | None:
    if not facts.large or facts.replicas == 1:
        return None
    path, _ = max(facts.large, key=lambda pair: pair[1])
    total = sum(size for _, size in facts.large)
    spared = total * (1 - 1 / facts.replicas)
    return Finding(
        f"{human(total)} of optimizer state lie whole on each of {facts.replicas} replicas, in "
        f"large leaves such as {path}",
        0.0,
        f"{_zero1(facts)} frees {human(int(spared))} on each device; what it does to the step's "
        "time is said below, where that was asked for",
    )


def _zero1(facts: Facts) -> str:
    """What to write for ZeRO 1, and in place of what."""
    if facts.reduction.startswith(("jdp.all_reduce(w", "jdp.all_reduce()")):
        arguments = facts.reduction.removeprefix("jdp.all_reduce(").removesuffix(")")
        ours = ", ".join(filter(None, ("inner", arguments)))
        return f"jdp.zero1({ours}) in place of optax.chain({facts.reduction}, inner)"
    if facts.reduction:
        return f"optax.chain({facts.reduction}, jdp.zero1(inner)), inner being what follows it now,"
    return "jdp.zero1(inner) in place of what averages, inner being what follows it now,"


def _half(facts: Facts) -> Finding | None:
    if facts.half_is_faster <= 1.5:
        return None
    return Finding(
        "matrix products are in float32, and this chip multiplies bfloat16 "
        f"{facts.half_is_faster:.1f} times as fast",
        facts.compute * (1 - 1 / facts.half_is_faster) / 2,  # half of compute is not products
        "jdp.compute_in(loss_fn, jnp.bfloat16), parameters and optimizer staying in float32",
    )
