"""Many processes of one training run: starting them, comparing them, talking between them.

In: an address, or a cluster JAX detects. Out: a running `jax.distributed`, and values known to be
the same on every process.

    initialize -> every process sees every device
    Channel    -> short texts, all to all, through the coordination service of jax.distributed
    same_everywhere, broadcast -> host values checked, or made equal, over processes

A `Channel` never touches a device, so a background thread may use it while a step runs; a device
collective there would meet the step's own in another order on another process. Nothing here
launches a process. JAX's private distributed state is read, having no public view.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import clusters, distributed, xla_bridge
from jax.experimental import multihost_utils

from jdp import joining, launched, watchdog

ANSWER_SECONDS = 600.0  # torch.distributed's default for NCCL; a cold loader takes minutes
_SLICE_MILLISECONDS = 500  # of one wait in C++, which neither Ctrl-C nor `cancelled` interrupts

_created: defaultdict[tuple[str, tuple[int, ...]], Iterator[int]] = defaultdict(itertools.count)


class CancelledError(Exception):
    """Raised out of `Channel.exchange` when its `cancelled()` turns true."""


def initialize(
    coordinator: str | None = None,
    *,
    num_processes: int | None = None,
    process_id: int | None = None,
    vanished_seconds: float | None = None,
    stuck_seconds: float | None = None,
) -> None:
    """Joins this process to the run, before anything else uses JAX.

    Without arguments, what JAX detects is used (`jdp launch`, SLURM, Open MPI, TPU pods,
    Kubernetes); where nothing is detected, or the cluster has one process, there is nothing to do.

    **Guarantees**

    - Afterwards `jax.process_count()` is the number of processes asked for. Verifying that starts
      the JAX backend, so `emulate_devices` goes before.
    - A second call that asks for the same does nothing; one that asks for something else raises.
    - One process without a cluster: returns at once, and starts no backend.
    - With several processes a watchdog runs: if one vanishes, fails or is stuck, all the others end
      with a sentence that names it, and with a code of their own: see `jdp.watchdog`.

    Args:
        coordinator: "host:port" of process 0, where it will listen; every process gives the same.
        num_processes: Processes in the run. Alone, it is what the cluster must turn out to have;
            1 means "this process only" and skips detection.
        process_id: This process, 0 to `num_processes - 1`.
        vanished_seconds: Within which the others have ended after one has vanished. None: the
            environment's JDP_VANISHED_SECONDS, or 60.
        stuck_seconds: Without a step of any process, after which all end. None: the environment's
            JDP_STUCK_SECONDS, or 540.

    Raises:
        ValueError: If the arguments are half given, disagree with each other or with the cluster.
        RuntimeError: If JAX has already started, or is joined to another run.

    Example:
        >>> jdp.initialize()  # a laptop: nothing to do
    """
    _validate_request(coordinator, num_processes, process_id)
    limits = joining.limits(vanished_seconds, stuck_seconds)
    if distributed.global_state.client is not None:
        _check_joined(coordinator, num_processes, process_id)
        return
    if coordinator is None and num_processes == 1:
        return
    count = num_processes if coordinator is not None else _detected_processes()
    if num_processes is not None and count != num_processes:
        raise ValueError(
            f"jdp.initialize was asked for {num_processes} processes, but JAX detects "
            f"{count or 'no cluster, so 1'}. They would train apart, each believing to be alone. "
            f"Start this program with the cluster's launcher (srun, mpirun), or give coordinator, "
            f"num_processes and process_id."
        )
    if count is None or (coordinator is None and count == 1):
        launched.tell_joined()
        return
    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            f"jdp.initialize came after JAX had started its devices, so this process would stay "
            f"alone instead of being one of {count}. Call it first, before any jax.devices(), "
            f"array or PRNG key, also in the modules you import."
        )
    joining.join(coordinator, num_processes, process_id, limits)
    if jax.process_count() != count:
        raise RuntimeError(
            f"jdp.initialize joined {count} processes, but jax.process_count() is "
            f"{jax.process_count()}: the backend {jax.default_backend()!r} does not join them. "
            f"For CPUs set jax_cpu_collectives_implementation to 'gloo'."
        )


def _validate_request(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    names = ("coordinator", "num_processes", "process_id")
    values = (coordinator, num_processes, process_id)
    missing = [name for name, value in zip(names, values, strict=True) if value is None]
    if missing and (coordinator is not None or process_id is not None):
        raise ValueError(
            f"jdp.initialize lacks {' and '.join(missing)}: an address, a count and an id only "
            f"make sense together. Give all three, or none and let JAX detect the cluster."
        )
    if num_processes is not None and not 0 <= (process_id or 0) < num_processes:
        raise ValueError(
            f"jdp.initialize got process_id={process_id} of num_processes={num_processes}; ids "
            f"run from 0 to num_processes - 1, one for each process."
        )


def _check_joined(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Raises if a second call asks for another run than the one joined."""
    state = distributed.global_state
    for name, wanted, joined in (
        ("coordinator", coordinator, state.coordinator_address),
        ("num_processes", num_processes, state.num_processes),
        ("process_id", process_id, state.process_id),
    ):
        if wanted is not None and wanted != joined:
            raise RuntimeError(
                f"jdp.initialize was called with {name}={wanted!r}, but this process has already "
                f"joined a run with {name}={joined!r}, and can join only one. Call it once."
            )


def _detected_processes() -> int | None:
    """The size of the cluster JAX would detect; None where it detects none."""
    # jax.distributed.initialize() detects too, but refuses a started backend before it has looked,
    # and a notebook on one machine may well have started one.
    try:
        for env in clusters.ClusterEnv._cluster_types:
            if not env.opt_in_only_method and env.is_env_present():
                return env.get_process_count()
    except Exception as error:
        raise RuntimeError(
            f"jdp.initialize found traces of a cluster in the environment, but could not ask it "
            f"for its size ({error}). If this is the only process, say num_processes=1; otherwise "
            f"give coordinator, num_processes and process_id."
        ) from error
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        raise ValueError(
            f"jdp.initialize found JAX_COORDINATOR_ADDRESS={address}, but no cluster that tells "
            f"how many processes there are. Give coordinator, num_processes and process_id."
        )
    return None


class Channel:
    """All-to-all exchange of short texts between processes, without devices.

    The k-th exchange on one process meets the k-th on every other. Channels of one name are
    matched by the order in which each process creates them. One thread at a time may use it.

    Args:
        name: What is being agreed on; it appears in errors.
        members: Ids of the processes that take part.
        cancelled: Asked twice a second while waiting; true ends the wait.

    Attributes:
        base: Of its keys in the store; the same on every member, and no other channel's.
    """

    def __init__(
        self, name: str, members: Sequence[int], cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        if distributed.global_state.client is None:
            raise RuntimeError(
                f"{name} has to agree over processes {list(members)}, but this process joined no "
                f"run. Call jdp.initialize first."
            )
        self._client = distributed.global_state.client
        self._name, self._members, self._cancelled = name, tuple(members), cancelled
        number = next(_created[name, self._members])
        group = hashlib.sha256(repr(self._members).encode()).hexdigest()[:16]
        self.base = f"jdp/{name}/{group}/{number}"
        self._round = 0

    def post(self, text: str) -> None:
        """Answers the next exchange without waiting for the others: the last thing one does."""
        before, here = f"{self.base}/{self._round - 1}", f"{self.base}/{self._round}"
        self._round += 1
        self._client.key_value_set(f"{here}/text/{distributed.global_state.process_id}", text)
        if self._client.key_value_increment(f"{here}/arrived", 1) == len(self._members):
            # Whoever comes last tells the rest: few and short calls, however many processes.
            self._client.key_value_set(f"{here}/all", json.dumps(self._texts(here)))
            self._client.key_value_delete(f"{before}/")  # all are here, so all have read it

    def exchange(self, text: str, seconds: float | None = None) -> dict[int, str]:
        """Returns the texts of all members by process id, once all have given theirs.

        Raises:
            TimeoutError: If some did not within `seconds` (default `ANSWER_SECONDS`), naming them.
            CancelledError: If `cancelled()` turned true while waiting.
        """
        here = f"{self.base}/{self._round}"
        self.post(text)
        seconds = ANSWER_SECONDS if seconds is None else seconds
        deadline = time.monotonic() + seconds
        with watchdog.waiting(self._name):
            while (texts := self._wait(here)) is None:
                if self._cancelled():
                    raise CancelledError
                if time.monotonic() >= deadline:
                    raise TimeoutError(self._late(here, seconds))
        return texts

    def _wait(self, here: str) -> dict[int, str] | None:
        """The texts of a round, or None if they are not complete after a moment."""
        try:
            answer = self._client.blocking_key_value_get(f"{here}/all", _SLICE_MILLISECONDS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        return {int(process): text for process, text in json.loads(answer).items()}

    def _texts(self, here: str) -> dict[int, str]:
        found = self._client.key_value_dir_get(f"{here}/text/")
        return dict(sorted((int(key.rsplit("/", 1)[1]), text) for key, text in found))

    def _late(self, here: str, seconds: float) -> str:
        missing = [process for process in self._members if process not in self._texts(here)]
        return (
            f"{self._name}: process {distributed.global_state.process_id} waited {seconds:g} s for "
            f"process {_listed(missing)}, which did not answer. Going on without would hang in the "
            f"next collective. It has stopped, is stuck in its loader, or runs another program: "
            f"look at its log, and make every process call {self._name} equally often."
        )


def same_everywhere(tree: Any, what: str) -> None:
    """Raises unless every process holds the same values, bit for bit.

    Hashes of each leaf's dtype, shape and bytes are compared. Every process must call it.

    Args:
        tree: Host arrays, or JAX arrays whole on this process.
        what: What the tree is, for the error: "params".

    Raises:
        ValueError: Naming the first leaf that differs and the processes where it does.

    Example:
        >>> same_everywhere({"w": np.zeros(3)}, "params")
    """
    if jax.process_count() == 1:
        return
    _compare(
        {path: _digest(value) for path, value in _host_leaves(tree, what).items()},
        what,
        "Every process would keep its own values while the gradients agree, so they never come "
        "together. Make them from the same seed or checkpoint on every process, or take process "
        "0's with jdp.init_state(..., broadcast=True).",
    )


def broadcast(tree: Any) -> Any:
    """Returns process 0's values on every process, as host arrays, bit for bit.

    Every process must call it, from its main thread; it runs a device collective. Typed PRNG keys
    stay typed.

    Raises:
        ValueError: If structure, shapes or dtypes differ, naming the first such leaf.

    Example:
        >>> broadcast({"w": np.zeros(3)})["w"].shape
        (3,)
    """
    host = _host_leaves(tree, "broadcast")
    leaves, treedef = jax.tree.flatten(tree)
    if jax.process_count() > 1:
        _compare(
            {path: f"{value.dtype}{value.shape}" for path, value in host.items()},
            "broadcast",
            "Only values can be sent, not shapes or dtypes: build the same tree on every process.",
        )
        # As bytes: a sum over processes with zeros elsewhere keeps integers, not -0.0 or float64.
        flat = {path: np.frombuffer(value.tobytes(), np.uint8) for path, value in host.items()}
        sent = multihost_utils.broadcast_one_to_all(flat)
        host = {p: np.asarray(sent[p]).view(v.dtype).reshape(v.shape) for p, v in host.items()}
    return jax.tree.unflatten(treedef, map(_as_key_like, leaves, host.values()))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_key_like(leaf: Any, value: np.ndarray) -> Any:
    if not _is_key(leaf):
        return value
    return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(leaf))


def _compare(ours: dict[str, str], what: str, advice: str) -> None:
    """Raises on every process, naming the first entry that is not the same on all."""
    channel = Channel("comparing", range(jax.process_count()))
    text = json.dumps([what, list(ours.items())])
    if len(set(channel.exchange(hashlib.sha256(text.encode()).hexdigest()).values())) == 1:
        return
    answers = {process: json.loads(said) for process, said in channel.exchange(text).items()}
    if any(thing != answers[0][0] for thing, _ in answers.values()):
        things = ", ".join(f"process {p} {thing}" for p, (thing, _) in answers.items())
        raise ValueError(
            f"The processes compare different things: {things}. They run different programs, which "
            f"would hang in the next collective. Call jdp in the same order on every process."
        )
    path, differ = _first_difference({p: dict(entries) for p, (_, entries) in answers.items()})
    where = f"leaf {path} on process {_listed(differ)}"
    raise ValueError(f"{what}: {where} differs from process 0. {advice}")


def _host_leaves(tree: Any, what: str) -> dict[str, np.ndarray]:
    """Every leaf as a host array, by its path."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path) or "(the whole value)"
        if not (getattr(leaf, "is_fully_addressable", True) or leaf.is_fully_replicated):
            raise ValueError(
                f"{what}: leaf {name} of shape {leaf.shape} is split over processes, so no process "
                f"has it to compare. Compare or broadcast before placing it on the mesh."
            )
        found[name] = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    return found


def _digest(value: np.ndarray) -> str:
    head = f"{value.dtype.name}{value.shape}".encode()
    return hashlib.sha256(head + value.tobytes()).hexdigest()


def _first_difference(leaves: dict[int, dict[str, str]]) -> tuple[str, list[int]]:
    for path in dict.fromkeys(path for digests in leaves.values() for path in digests):
        differ = [p for p, digests in leaves.items() if digests.get(path) != leaves[0].get(path)]
        if differ:
            return path, differ
    return "(order of the leaves)", [p for p in leaves if list(leaves[p]) != list(leaves[0])]


def _listed(processes: Sequence[int]) -> str:
    return ", ".join(map(str, processes))
