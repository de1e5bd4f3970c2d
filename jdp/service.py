"""JAX's coordination service in a process of its own, so that it survives process 0.

    process 0 --starts--> service (gRPC) <-- processes 0 ... N-1

JAX runs the service inside process 0. If that process is killed, each of the others is aborted by
JAX's C++ client the moment its connection breaks, before any of its Python can tell why. A child
that holds nothing but the service stays long enough for the others to find out, and then ends.

In: what `jax.distributed.initialize` gives to its service. Out: the same service, elsewhere. Of
losing the whole machine of process 0, nothing saves the service.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

_PROGRAM = """
import json, os, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)  # meant for process 0, in whose group this is
from jaxlib import _jax
address, nodes, options, linger = json.loads(sys.argv[1])
try:
    service = _jax.get_distributed_runtime_service(address, nodes, **options)
except Exception as error:
    print(json.dumps(str(error)), flush=True)
    os._exit(1)
print("null", flush=True)
os.close(1)
# Process 0 ends in order; or says that all have been told why it does not; or is gone.
time.sleep({"end": 0, "told": 10}.get(sys.stdin.readline().strip(), linger))
service.shutdown()
os._exit(0)
"""
_END_SECONDS = 5.0


class Service:
    """A running service, with the one method that JAX calls: `shutdown`."""

    def __init__(self, address: str, nodes: int, options: dict[str, Any], linger: float) -> None:
        request = json.dumps([address, nodes, options, linger])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, request],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None
        assert answers is not None
        self._orders = orders
        with answers:
            error = json.loads(answers.readline() or '"it ended at once"')
        if error is not None:
            self.shutdown()
            raise RuntimeError(
                f"jdp.initialize could not start the coordination service at {address}: {error}. "
                f"No process can join. If the port is taken, give another."
            )

    def shutdown(self) -> None:
        """Ends it, at once."""
        self._order(b"end\n")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._process.kill()
        self._process.wait()

    def dismiss(self) -> None:
        """Lets it end some seconds later: all have only to read what it holds."""
        self._order(b"told\n")

    def _order(self, text: bytes) -> None:
        with contextlib.suppress(OSError, ValueError), self._orders as orders:
            orders.write(text)


@contextlib.contextmanager
def outliving(linger: float) -> Iterator[None]:
    """Within, `jax.distributed.initialize` starts its service in a process of its own.

    Args:
        linger: Seconds that the service stays after process 0 has gone without ending it.
    """

    def start(address: str, nodes: int, **options: Any) -> Service:
        return Service(address, nodes, options, linger)

    with mock.patch("jaxlib._jax.get_distributed_runtime_service", start):
        yield
