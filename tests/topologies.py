"""Devices that are not here, for the real compilers: a TPU v5e:4x4 slice and H100 hosts."""

import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))

import described

TOPOLOGIES = {"tpu": "v5e:4x4", "gpu": "1x1x8"}


def devices(platform, patch, topology=None):
    """Described devices of "tpu" or "gpu"; skips the test where their compiler is missing."""
    if what := described.missing(platform):
        pytest.skip(what)
    for name, value in described.TPU_ENVIRONMENT.items():
        patch.setenv(name, value)
    return described.devices(platform, topology or TOPOLOGIES[platform])
