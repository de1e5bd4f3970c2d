"""What is worth a change: thresholds that people use, applied to where a step's time went.

    Facts, measured  --find-->  Findings, those that gain most first, each with what to write

Pure arithmetic on measured figures. The thresholds: devices used for less than 80 % of the time,
communication for more than 30 %, input for more than 10 %, the host for more than 10 %, a replica
10 % slower than the median; compiling again, or a collective in a loop, at all.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdp.balance import balance
from jdp.holdings import human, table
from jdp.pays import Payoff
from jdp.sent import Sent

USED = 0.80
COMMUNICATION = 0.30
INPUT = 0.10
HOST = 0.10
SLOWEST = 0.10
SLOWEST_ON_SHARED_CORES = 1.0  # whose turn it is on a core differs by a third between devices
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
        _whole_leaves(facts),
        _half(facts),
    ]
    return tuple(sorted(filter(None, found), key=lambda finding: -finding.gain_ms))


def show(findings: Sequence[Finding]) -> str:
    """The findings as numbered lines."""
    if not findings:
        return "Nothing passes its threshold: devices compute, and wait for nothing worth a change."
    lines = [
        (f"{number}.", f"-{finding.gain_ms:.3g} ms" if finding.gain_ms else "", finding.what)
        for number, finding in enumerate(findings, 1)
    ]
    rows = table(lines, numbers=(0, 1)).split("\n")
    indent = " " * (len(rows[0]) - len(findings[0].what))
    pairs = zip(rows, findings, strict=True)
    return "\n".join(f"{row}\n{indent}-> {finding.change}" for row, finding in pairs)


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
        f"{facts.input:.3g} ms, while the rest of a step takes {busy:.3g} ms",
        float(facts.input),
        "Make batches while the devices compute: jdp.feed(loader, mesh, prefetch=2); if that is "
        f"done, the loader itself is too slow: about {workers} of it in parallel, as with grain's "
        f"dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers={workers}))",
    )


def _communication(facts: Facts, payoffs: Sequence[Payoff]) -> Finding | None:
    sending = facts.communication - facts.waiting
    if sending <= COMMUNICATION * facts.step:
        return None
    what = (
        f"communication {_share(sending, facts)} (over 30 %): {sending:.3g} ms in which no device "
        "computes"
    )
    # what leaves the batch as it is comes first
    pays = sorted((row for row in payoffs if row.pays), key=lambda row: row.what == "accumulation")
    best = next(iter(pays), None)
    if best is None:
        return Finding(
            what,
            0.0,
            "Nothing that jdp has would make it shorter by 3 % of the step, as far as the measured "
            "links tell. A larger batch for each device (microbatch=..., or more examples) makes "
            "its share smaller",
        )
    return Finding(what, best.now_ms - best.then_ms, best.argument)


def _host(facts: Facts) -> Finding | None:
    """The host does not keep up, so that devices have nothing to run."""
    used = (facts.compute + facts.communication) / facts.step
    if used >= USED or facts.host <= HOST * facts.step:
        return None
    return Finding(
        f"devices used {100 * used:.0f} % of the time (under 80 %), the host "
        f"{_share(facts.host, facts)} (over 10 %): the devices wait {facts.host:.3g} ms for the "
        "next operation or step",
        float(facts.host),
        "Read metrics a step late, or every tenth step; run several steps in one program: "
        "jax.lax.scan(step, state, batches); or give a step more work: a larger batch, or a larger "
        "microbatch=...",
    )


def _slowest(facts: Facts) -> Finding | None:
    """All wait for the slowest replica."""
    times = np.asarray(facts.replica_ms, float)
    if len(times) < 2 or not times.min() > 0:
        return None
    middle, slowest = float(np.median(times)), float(times.max())
    if len(times) == 2:  # the median would be halfway to the slow one
        middle = float(times.min())
    over = slowest / middle - 1
    most = SLOWEST_ON_SHARED_CORES if facts.shares_cores else SLOWEST
    if slowest <= (1 + most) * middle:
        return None
    who, shares = int(times.argmax()), ""
    gain = slowest - float(times.mean())
    if facts.microbatches >= 2 * len(times):
        dealt = balance(times, facts.microbatches)
        each = facts.microbatches / len(times)
        gain = slowest - float((dealt * times).max()) / each
        shares = f", here shares={[int(k) for k in dealt]}"
    return Finding(
        f"replica {who} computes {slowest:.3g} ms a step, {100 * over:.0f} % over the others' "
        f"{middle:.3g} ms (over {100 * most:.0f} %)",
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
        f"process {process} keeps the others waiting: it spends {late:.3g} ms more of a step on "
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
        f"{facts.compile_ms:.3g} ms of each step",
        float(facts.compile_ms),
        "Keep shapes, dtypes and places of batch and state the same in all steps: "
        "jdp.feed(pad=True) fills up ragged batches; jax.config.update('jax_log_compiles', True) "
        "names what is compiled",
    )


def _in_loops(facts: Facts) -> list[Finding]:
    """Collectives in loops, but for parameters that are gathered layer by layer on purpose."""
    some = [row for row in facts.collectives if row.in_loop and row.times > 1]
    found = []
    for row in some:
        if any(name in row.made_by for name in ("layerwise", "gather", "in_backward")):
            continue
        once = (row.us or 0.0) / 1e3 * (1 - 1 / row.times)
        found.append(
            Finding(
                f"{row.kind} of {human(row.bytes)} in a loop, {row.times} times a step"
                + (f", from {row.where}" if row.where else ""),
                min(once, facts.communication) if once else 0.0,
                "Reduce once, after the loop: take the collective out of the loss (return a "
                "jdp.Mean instead of a jax.lax.pmean), and let jdp accumulate: "
                "jdp.train_step(..., microbatch=...)",
            )
        )
    return found


def _whole_leaves(facts: Facts) -> Finding | None:
    if not facts.large or facts.replicas == 1:
        return None
    path, _ = max(facts.large, key=lambda pair: pair[1])
    total = sum(size for _, size in facts.large)
    spared = total * (1 - 1 / facts.replicas)
    return Finding(
        f"{len(facts.large)} large leaves of optimizer state lie whole on each of "
        f"{facts.replicas} replicas, such as {path}: {human(total)} on each",
        0.0,
        f"jdp.zero1(inner) in place of jdp.all_reduce() frees {human(int(spared))} on each "
        "device; see the rows below for time",
    )


def _half(facts: Facts) -> Finding | None:
    if facts.half_is_faster <= 1.5:
        return None
    return Finding(
        "matrix products are in float32, and this chip multiplies bfloat16 "
        f"{facts.half_is_faster:.1f} times as fast",
        facts.compute * (1 - 1 / facts.half_is_faster) / 2,  # half of compute is not products
        "jdp.compute_in(loss_fn, jnp.bfloat16), parameters and optimizer staying in float32",
    )
