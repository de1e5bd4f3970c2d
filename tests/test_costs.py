"""Times and bytes of collectives, against rings that are walked message by message."""

import pytest

from jdp.costs import collective_seconds, floor_bytes
from jdp.hardware import Link

LINK = Link(bytes_per_s=1e9, latency_s=1e-6, source="a round number")
SLOW = Link(bytes_per_s=1e8, latency_s=1e-5, source="a tenth of it")


def ring(kind, size, count):
    """Messages and bytes that a device sends around a ring, one chunk of size / count at a time."""
    rounds = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}[kind]
    sent = [size / count for _ in range(rounds) for _ in range(count - 1)]
    return len(sent), sum(sent)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_ring_walked_message_by_message(kind, count):
    messages, sent = ring(kind, 1200.0, count)
    assert floor_bytes(kind, 1200, count) == pytest.approx(sent)
    expected = messages * LINK.latency_s + sent / LINK.bytes_per_s
    assert collective_seconds(kind, 1200, count, LINK) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["all-reduce", "all-to-all", "collective-permute"])
def test_one_device_sends_nothing(kind):
    assert floor_bytes(kind, 1e9, 1) == 0
    assert collective_seconds(kind, 1e9, 1, LINK) == 0


def test_each_call_pays_the_latency_anew():
    once, thrice = (collective_seconds("all-reduce", 1e6, 4, LINK, calls=k) for k in (1, 3))
    assert thrice - once == pytest.approx(2 * 6 * LINK.latency_s)


def test_across_nodes_only_a_part_is_sent():
    """Scatter within, all-reduce of 1/4 across, gather within."""
    expected = (
        collective_seconds("reduce-scatter", 8e6, 4, LINK)
        + collective_seconds("all-reduce", 2e6, 2, SLOW)
        + collective_seconds("all-gather", 8e6, 4, LINK)
    )
    found = collective_seconds("all-reduce", 8e6, 8, LINK, outer=SLOW, nodes=2)
    assert found == pytest.approx(expected)
    assert found < collective_seconds("all-reduce", 8e6, 8, SLOW)


def test_an_all_to_all_crosses_nodes_whole():
    found = collective_seconds("all-to-all", 8e6, 8, LINK, outer=SLOW, nodes=2)
    assert found > 4e6 / SLOW.bytes_per_s


def test_an_unknown_collective_is_refused():
    with pytest.raises(ValueError, match=r"no collective 'gossip'.*all-reduce"):
        floor_bytes("gossip", 8, 2)


def test_no_devices_are_refused():
    with pytest.raises(ValueError, match="among 0 devices cannot be sent"):
        collective_seconds("all-reduce", 8, 0, LINK)


@pytest.mark.parametrize(("count", "outer"), [(8, None), (9, SLOW)])
def test_nodes_need_a_link_and_equal_sizes(count, outer):
    with pytest.raises(ValueError, match="several need a link between them"):
        collective_seconds("all-reduce", 8, count, LINK, outer=outer, nodes=2)
