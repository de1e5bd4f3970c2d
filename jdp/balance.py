"""How many microbatches for whom: shares for replicas of unequal speed, and their upkeep.

    seconds a microbatch, of each replica  --balance-->  shares k_0 ... k_{N-1}, of sum M
            ^                                                |
            +---- measure ---- train_step(..., shares) <-----+  rebalance, now and then

A step takes as long as the slowest replica, max k_i * t_i. In: measured times. Out: NumPy arrays
of whole numbers for `jdp.feed(..., shares=...)` and `step(..., shares=...)`, where they are data:
other shares run in the same compiled program. Nothing here measures anything by itself, and
nothing is sent but the few numbers of `exchange_times`.
"""

import functools
import heapq
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.mesh import AxisNames, axis_size, data_axes, is_whole
from jdp.processes import Channel


def balance(
    times: Any, microbatches: int, *, minimum: int = 1, maximum: int | None = None
) -> np.ndarray:
    """Deals microbatches out so that the slowest replica is done as early as possible.

    With t_i the seconds that replica i takes for one microbatch, of all whole numbers k_i of sum M
    within the bounds, the shares have the least

        makespan = max_i k_i * t_i    >=  M / sum_i (1 / t_i), the harmonic optimum

    Guarantees:
        - No other shares have a lower makespan: each microbatch goes to the replica that would
          have finished it first, which is optimal for pieces of equal size.
        - The same shares on every process that gives the same times; of equally good ones, more to
          the replica of the lower number.
        - The makespan is at most 1 + (N - 1) / M times the optimum where the bounds do not bind:
          the more microbatches a step has, the closer.

    Args:
        times: Seconds a microbatch, one for each of N replicas, positive.
        microbatches: M, the microbatches of a global batch.
        minimum: The least share. 0 lets a replica that is too slow to help go without; it then
            has no time of its own to be measured by.
        maximum: The largest share, which fixes how many rows a replica's part of the batch has;
            `None` sets no bound.

    Returns:
        Shares, int32 of shape [N] and sum M.

    Raises:
        ValueError: If a time is not a positive number, or no shares are within the bounds.

    Example:
        >>> jdp.balance([1.0, 1.0, 1.0, 3.0], 20)
        array([6, 6, 6, 2], dtype=int32)
    """
    seconds = _check_times(times, "jdp.balance")
    _check_bounds(len(seconds), microbatches, minimum, maximum)
    shares = np.full(len(seconds), minimum, np.int32)
    queue = [((minimum + 1) * t, i) for i, t in enumerate(seconds)]
    heapq.heapify(queue)
    for _ in range(microbatches - minimum * len(seconds)):
        _, i = heapq.heappop(queue)
        shares[i] += 1
        if shares[i] != maximum:
            heapq.heappush(queue, ((shares[i] + 1) * seconds[i], i))
    return shares


class Balanced(NamedTuple):
    """What `rebalance` keeps.

    Attributes:
        shares: Microbatches of each replica, int32 of shape [N].
        times: Seconds a microbatch of each replica, averaged over measurements, [N].
    """

    shares: np.ndarray
    times: np.ndarray


def rebalance(
    state: Balanced | None,
    times: Any,
    microbatches: int,
    *,
    decay: float = 0.5,
    tolerance: float = 0.05,
    minimum: int = 1,
    maximum: int | None = None,
) -> Balanced:
    """Follows replicas whose speed changes, without answering to every flicker.

    Times are averaged, `decay * old + (1 - decay) * new`; shares change only if that makes the
    makespan, by the averaged times, smaller by more than `tolerance` of what it is.

    Guarantees:
        - Pure: the same state on every process that gives the same arguments.
        - Times that stay as they are, or flicker by less than the tolerance can see, leave the
          shares as they are.

    Args:
        state: What the last call returned; `None` at first, for `balance(times)`.
        times: Measured seconds a microbatch, one for each replica, the same on every process (see
            `exchange_times`); NaN where nothing was measured, which keeps the old.
        microbatches: M, as for `balance`.
        decay: Weight of the old average, at least 0 and less than 1.
        tolerance: The share of the makespan that a change must save.
        minimum: See `balance`.
        maximum: See `balance`; with it the shape of a batch stays, and nothing compiles anew.

    Returns:
        The new state. Its shares are for the next batches that are fed *and* for their steps.

    Raises:
        ValueError: If an argument cannot be meant.

    Example:
        >>> state = jdp.rebalance(None, [1.0, 1.0], 12)
        >>> for _ in range(4): state = jdp.rebalance(state, [1.0, 3.0], 12)
        >>> state.shares
        array([9, 3], dtype=int32)
    """
    if not 0 <= decay < 1 or not tolerance >= 0:
        raise ValueError(
            f"jdp.rebalance got decay={decay!r} and tolerance={tolerance!r}; the weight of the old "
            "average is at least 0 and less than 1, and the share of the makespan that a change "
            "must save is 0 or more, such as 0.05."
        )
    bounds = {"minimum": minimum, "maximum": maximum}
    measured = _as_floats(times, "jdp.rebalance")
    if state is not None:
        if measured.shape != state.times.shape:
            raise ValueError(
                f"jdp.rebalance got {measured.size} times for {state.times.size} replicas. Give "
                "one for each, or begin with state=None where their number has changed."
            )
        known = _check_times(np.where(np.isnan(measured), state.times, measured), "jdp.rebalance")
        measured = np.where(np.isnan(measured), known, decay * state.times + (1 - decay) * known)
    averaged = _check_times(measured, "jdp.rebalance")
    proposed = balance(averaged, microbatches, **bounds)
    if state is None or state.shares.sum() != microbatches or _outside(state.shares, **bounds):
        return Balanced(proposed, averaged)
    now, then = (float((k * averaged).max()) for k in (state.shares, proposed))
    return Balanced(proposed if then < (1 - tolerance) * now else state.shares, averaged)


def exchange_times(seconds: Any, mesh: Mesh, *, axis: AxisNames | None = None) -> np.ndarray:
    """Brings together what each process has measured of its own replicas.

    A training step ends on all replicas at once, with the exchange of gradients, so its time says
    nothing about one of them. Time something that each process does alone, such as the gradient of
    one microbatch on one of its devices, and give that here.

    Args:
        seconds: Seconds a microbatch on this process's replicas: one number for all of them, or
            one for each, in the order of the mesh.
        mesh: The mesh of the step.
        axis: Its data axes; `None` finds them, see `jdp.data_axes`.

    Returns:
        Seconds of all replicas, float64 of shape [N], the same on every process. Every process
        must call it, on its main thread, equally often; the numbers travel as text through the
        coordination service of `jax.distributed`.

    Raises:
        ValueError: If there are not as many numbers as replicas here.

    Example:
        >>> jdp.exchange_times(0.25, jdp.make_mesh())
        array([0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25])
    """
    axes = data_axes(mesh, axis)
    owners = _owners(mesh, axes)
    here, count = jax.process_index(), owners.count(jax.process_index())
    given = _as_floats(seconds, "jdp.exchange_times")
    if given.size not in (1, count):
        raise ValueError(
            f"jdp.exchange_times got {given.size} numbers for the {count} replica(s) along {axes} "
            "that lie on this process. Give one for each, or a single one for all of them."
        )
    mine = np.broadcast_to(given.ravel(), count).tolist()
    said = {here: mine}
    members = tuple(sorted(set(owners)))
    if members != (here,):
        answers = _channel(members).exchange(json.dumps(mine))
        said = {process: json.loads(text) for process, text in answers.items()}
    left = {process: iter(numbers) for process, numbers in said.items()}
    return np.array([next(left[process]) for process in owners])


@functools.cache
def _channel(members: tuple[int, ...]) -> Channel:
    """One for all calls, so that what was said in the last is cleared away."""
    return Channel("jdp.exchange_times", members)


def _owners(mesh: Mesh, axes: tuple[str, ...]) -> list[int]:
    """The process that each replica lies on."""
    count = axis_size(mesh, axes)
    owners = [-1] * count
    places = NamedSharding(mesh, P(axes)).devices_indices_map((count,))
    for device, index in places.items():
        owners[index[0].start or 0] = device.process_index
    return owners


def _as_floats(times: Any, caller: str) -> np.ndarray:
    try:
        return np.asarray(times, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{caller} needs seconds, as numbers, and got {times!r}.") from None


def _check_times(times: Any, caller: str) -> np.ndarray:
    """Times as float64 [N], or a sentence why they are none."""
    seconds = _as_floats(times, caller)
    if seconds.ndim != 1 or not seconds.size:
        raise ValueError(
            f"{caller} needs the seconds a microbatch of each replica, a list of one number for "
            f"each, and got an array of shape {seconds.shape}."
        )
    bad = [i for i, t in enumerate(seconds) if not 0 < t < np.inf]
    if bad:
        raise ValueError(
            f"{caller} got {seconds[bad[0]]} seconds for replica {bad[0]}: a microbatch takes a "
            "positive, finite time. Leave a replica that is not there out of the mesh."
        )
    return seconds


def _check_bounds(count: int, microbatches: Any, minimum: Any, maximum: Any) -> None:
    numbers = [microbatches, minimum] + ([] if maximum is None else [maximum])
    if not all(map(is_whole, numbers)) or microbatches < 1 or minimum < 0:
        raise ValueError(
            f"jdp.balance got microbatches={microbatches!r}, minimum={minimum!r} and "
            f"maximum={maximum!r}; they are whole numbers of microbatches, 1 or more in all and 0 "
            "or more for each replica."
        )
    most = microbatches if maximum is None else maximum * count
    if not minimum * count <= microbatches <= most or (maximum is not None and maximum < minimum):
        limit = "" if maximum is None else f" and at most {maximum}"
        raise ValueError(
            f"jdp.balance cannot deal {microbatches} microbatches out to {count} replicas, at "
            f"least {minimum}{limit} to each. Use smaller microbatches, so that there are more of "
            "them, or other bounds."
        )


def _outside(shares: Sequence[int] | np.ndarray, minimum: int, maximum: int | None) -> bool:
    """Whether shares that were right once are not within the bounds."""
    return bool(np.min(shares) < minimum or (maximum is not None and np.max(shares) > maximum))
