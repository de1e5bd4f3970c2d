"""Measured links: the fit gives back what made the times, and every collective is measured."""

import numpy as np
import pytest

import jdp
from jdp.costs import collective_seconds
from jdp.hardware import Link
from jdp.links import KINDS, Links, fit, measure

pytestmark = pytest.mark.alternate

SIZES = (2**12, 2**16, 2**20, 2**23)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_finds_the_link_behind_exact_times(kind):
    true = Link(3e9, 7e-6, "")
    points = [(kind, s, 8, collective_seconds(kind, s, 8, true)) for s in SIZES]
    link, off = fit(points, "made up")
    assert link.bytes_per_s == pytest.approx(3e9, rel=1e-6)
    assert link.latency_s == pytest.approx(7e-6, rel=1e-6)
    assert link.source == "made up"
    assert off < 1e-9


def test_one_fit_explains_different_collectives():
    true = Link(3e9, 7e-6, "")
    points = [(k, s, 4, collective_seconds(k, s, 4, true)) for k in KINDS for s in SIZES]
    link, off = fit(points, "")
    assert (link.bytes_per_s, link.latency_s) == pytest.approx((3e9, 7e-6), rel=1e-6)
    assert off < 1e-9


def test_a_fit_of_noisy_times_is_as_near_as_the_noise():
    rng, true = np.random.default_rng(0), Link(1e10, 2e-6, "")
    points = [
        ("all-reduce", s, 8, collective_seconds("all-reduce", s, 8, true) * rng.uniform(0.95, 1.05))
        for s in SIZES
        for _ in range(20)
    ]
    link, off = fit(points, "")
    assert link.bytes_per_s == pytest.approx(1e10, rel=0.03)
    assert link.latency_s == pytest.approx(2e-6, rel=0.03)
    assert off < 0.11  # 1.05 / 0.95


def test_neither_part_of_a_link_is_ever_negative():
    falling = [("all-reduce", 2**12, 8, 2e-3), ("all-reduce", 2**20, 8, 1e-3)]
    link, _ = fit(falling, "")
    assert link.latency_s > 0
    assert 0 < link.bytes_per_s < float("inf")
    # what grows faster than the sizes has no latency
    rising = [("all-gather", 2**12, 8, 1e-6), ("all-gather", 2**20, 8, 1e-1)]
    assert fit(rising, "")[0].latency_s == 0


def test_each_axis_and_collective_is_measured_and_read_back():
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    found = measure(mesh, sizes=(2**10, 2**16))
    assert [(row.axis, row.kind) for row in found.rows] == [
        (axis, kind) for axis in ("node", "device") for kind in KINDS
    ]
    for row in found.rows:
        assert row.sizes == (2**10, 2**16)
        for size, seconds in zip(row.sizes, row.seconds, strict=True):
            model = collective_seconds(row.kind, size, mesh.shape[row.axis], row.link)
            assert model == pytest.approx(seconds, rel=row.off + 1e-9)
    assert set(found.axes) == {"node", "device"}
    assert Links.from_json(found.to_json()) == found
    assert "reduce-scatter" in str(found)
    assert any("emulated devices share" in note for note in found.notes)


def test_no_larger_size_is_begun_once_time_is_up():
    found = measure(jdp.make_mesh(), kinds=["all-reduce"], sizes=(64, 128, 2**20), seconds=0)
    assert found.rows[0].sizes == (64, 128)


def test_one_device_has_a_host_but_no_links():
    found = measure(jdp.make_mesh(num_devices=1), sizes=(64, 2**16))
    assert found.rows == ()
    assert found.axes == {}
    assert found.to_device.bytes_per_s > 0
    assert "no link between devices" in found.notes[0]


@pytest.mark.parametrize(
    "wrong", [{"kinds": ["gossip"]}, {"sizes": (64,)}, {"sizes": (64, 64)}, {"sizes": (0, 64)}]
)
def test_what_cannot_be_measured_is_refused(wrong):
    with pytest.raises(ValueError, match="a latency and a rate need two sizes"):
        measure(jdp.make_mesh(), **wrong)


def test_times_that_no_link_explains_are_called_into_question(monkeypatch):
    from jdp import links

    spent = iter([1e-3, 1e-6, 1e-3, 1e-3, 1e-6, 1e-6])  # the larger size takes less time
    monkeypatch.setattr(links, "_median", lambda run: next(spent))
    found = measure(jdp.make_mesh(), kinds=["all-reduce"], sizes=(2**10, 2**23))
    (note,) = (note for note in found.notes if "do not follow a latency and a rate" in note)
    for what in ("all-reduce along 'data'", "host to device", "device to host"):
        assert what in note
    quiet = iter([1e-6, 1e-3, 1e-6, 1e-6, 1e-3, 1e-3])
    monkeypatch.setattr(links, "_median", lambda run: next(quiet))
    found = measure(jdp.make_mesh(), kinds=["all-reduce"], sizes=(2**10, 2**23))
    assert not any("do not follow" in note for note in found.notes)
    assert repr(found) == str(found)
