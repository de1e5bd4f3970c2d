"""The table of chips: complete, plausible, and found by what JAX calls a device."""

import jax
import pytest

from jdp.hardware import CHIPS, find_chip


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_is_complete(name):
    chip = CHIPS[name]
    assert chip.name == name
    assert chip.platform in ("gpu", "tpu", "cpu")
    assert chip.flops["bf16"] > 0
    assert chip.flops["f32"] > 0
    for link in filter(None, (chip.inner, chip.outer, chip.host)):
        assert link.bytes_per_s > 0
        assert link.latency_s > 0
        assert link.source
    assert chip.sources


@pytest.mark.parametrize("name", [name for name in CHIPS if name != "cpu"])
def test_links_are_slower_the_further_they_go(name):
    chip = CHIPS[name]
    assert chip.memory_bytes_per_s > chip.inner.bytes_per_s > chip.outer.bytes_per_s


def test_the_kinds_that_compilers_know_are_found():
    names = {
        "TPU v5 lite": "v5e",
        "TPU v5": "v5p",
        "TPU v6 lite": "v6e",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA A100-SXM4-80GB": "a100",
        jax.devices("cpu")[0].device_kind: "cpu",
    }
    assert {kind: find_chip(kind).name for kind in names} == names
    assert find_chip("h100") is CHIPS["h100"]
    assert find_chip("abacus") is None


def test_no_kind_belongs_to_two_chips():
    kinds = [kind for chip in CHIPS.values() for kind in chip.kinds]
    assert len(kinds) == len(set(kinds))
