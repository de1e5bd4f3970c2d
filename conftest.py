"""Settings of the whole test run: eight emulated devices, and names for the doctests."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # compile-only plugins for GPUs must not be started

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jdp

jdp.emulate_devices(8)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update(jdp=jdp, jax=jax, jnp=jnp, np=np, optax=optax, P=PartitionSpec)
