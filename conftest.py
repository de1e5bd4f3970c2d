"""Settings of the whole test run: eight emulated devices, and names for the doctests."""

import os
import sys
import zlib

os.environ["JAX_PLATFORMS"] = "cpu"  # compile-only plugins for GPUs must not be started

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jdp

jdp.emulate_devices(8)
LEFT = pytest.StashKey[int]()


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update(jdp=jdp, jax=jax, jnp=jnp, np=np, optax=optax, P=PartitionSpec)


def pytest_collection_modifyitems(config, items):
    """Leaves half of the variants of long families to the other Python that CI tests with.

    Every function of such a family runs on both. Of modules marked "alternate", where the version
    of JAX matters little, half of the functions are left, too. JDP_WHOLE_MATRIX=1 runs everything.
    """
    if os.environ.get("JDP_WHOLE_MATRIX"):
        return
    turn = sys.version_info.minor // 2 % 2  # 3.11 and 3.13 differ
    left, seen = [], set()
    for item in items:
        family = (item.path, getattr(item, "originalname", item.name))
        # the first variant of each function stays, the others take turns
        other = zlib.crc32(item.nodeid.encode()) % 2 != turn
        turns = item.get_closest_marker("either") and family in seen
        if other and (turns or item.get_closest_marker("alternate")):
            left.append(item)
        seen.add(family)
    config.stash[LEFT] = len(left)
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def pytest_terminal_summary(terminalreporter, config):
    """Says what was left to the other Python."""
    if left := config.stash.get(LEFT, 0):
        terminalreporter.write_line(
            f"{left} tests and variants of tests run on the other Python (JDP_WHOLE_MATRIX=1)."
        )
