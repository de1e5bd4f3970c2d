"""Joins this process to JAX's run, with a service that outlives process 0, and with a watchdog.

    address, count, id, limits --join--> jax.distributed, joined; `jdp.watchdog` running

What is asked for is checked by `jdp.initialize`; the limits alone are checked here.
"""

import contextlib
import os
from typing import NamedTuple

import jax
from jax._src import distributed

from jdp import launched, service, watchdog


class Limits(NamedTuple):
    """Seconds after which a run ends, see `jdp.initialize`."""

    vanished: float
    stuck: float


def limits(vanished_seconds: float | None, stuck_seconds: float | None) -> Limits:
    """The limits as given, or else of the environment, or else the defaults.

    Raises:
        ValueError: If one is no time, or less than a second.
    """
    return Limits(
        _seconds("vanished_seconds", vanished_seconds, watchdog.VANISHED_SECONDS),
        _seconds("stuck_seconds", stuck_seconds, watchdog.STUCK_SECONDS),
    )


def _seconds(name: str, given: float | None, default: float) -> float:
    variable = f"JDP_{name.upper()}"
    value = os.environ.get(variable, default) if given is None else given
    with contextlib.suppress(ValueError):
        if float(value) >= 1:
            return float(value)
    source = (
        "jdp.initialize got " + name if given is not None else "The environment has " + variable
    )
    raise ValueError(
        f"{source}={value}, which is no time that processes can be waited for. Give seconds, at "
        f"least 1; inf for no limit."
    )


def join(
    coordinator: str | None, num_processes: int | None, process_id: int | None, limits: Limits
) -> None:
    """Calls `jax.distributed.initialize`, and has the watchdog end with it."""
    # JAX's own limits must not be shorter: it aborts, with a trace of C++ and no name.
    patient = round(min(max(300, 2 * limits.vanished, 2 * limits.stuck), 10**6))
    with service.outliving(min(limits.vanished, 600.0)):
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=patient,
            shutdown_timeout_seconds=patient,
        )
    launched.tell_joined()
    state = distributed.global_state
    watcher = watchdog.Watchdog(state, limits.vanished, limits.stuck)
    watcher.start()
    leave = state.shutdown

    def shutdown() -> None:
        state.shutdown = leave
        watcher.note_end()
        leave()
        watcher.end()

    state.shutdown = shutdown
