"""How long a collective takes: latency, and bytes over bandwidth.

    kind, bytes, devices, link(s)  -->  seconds, bytes that a device sends

The alpha-beta model of ring algorithms, and of two rings, one within the nodes and one between
them. Sizes are those of the whole array on one device: what is reduced, gathered or exchanged, so
the same number describes an all-gather and the reduce-scatter that undoes it. Pure arithmetic:
nothing of JAX is imported, nothing is measured.

With N devices, S bytes, alpha seconds for a message and beta bytes a second:

    all-reduce                               2 (N-1) alpha + 2 (N-1)/N S / beta
    all-gather, reduce-scatter, all-to-all     (N-1) alpha +   (N-1)/N S / beta
    collective-permute                               alpha +           S / beta
    collective-broadcast                       (N-1) alpha +           S / beta

References:
    Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.
    Patarasuk, Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009.
"""

from jdp.hardware import Link

# times that (N-1)/N of the array is sent, and messages in terms of N-1
_PASSES = {
    "all-reduce": 2,
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-to-all": 1,
    "ragged-all-to-all": 1,
}
_WHOLE = ("collective-permute", "collective-broadcast")


def floor_bytes(kind: str, size_bytes: float, count: int) -> float:
    """The least bytes that each of `count` devices sends.

    Args:
        kind: As XLA calls it, such as "all-reduce".
        size_bytes: Bytes of the whole array: what is reduced, gathered or exchanged.
        count: Devices that take part.

    Returns:
        Bytes; 0 for a single device.

    Raises:
        ValueError: If there is no such kind, or no device.

    Example:
        >>> floor_bytes("all-reduce", 800, 8), floor_bytes("all-gather", 800, 8)
        (1400.0, 700.0)
    """
    _validate(kind, size_bytes, count)
    if count == 1:
        return 0.0
    if kind in _WHOLE:
        return float(size_bytes)
    return _PASSES[kind] * size_bytes * (count - 1) / count


def collective_seconds(
    kind: str,
    size_bytes: float,
    count: int,
    link: Link,
    *,
    outer: Link | None = None,
    nodes: int = 1,
    calls: int = 1,
) -> float:
    """Seconds that a collective takes.

    Among `nodes` nodes that `outer` joins, an all-reduce is a reduce-scatter within each node, an
    all-reduce of the part between nodes, and an all-gather within; others, likewise, do one part of
    their way on each link, one after the other.

    Args:
        kind: As XLA calls it, such as "all-reduce".
        size_bytes: Bytes of the whole array: what is reduced, gathered or exchanged.
        count: Devices that take part, on all nodes.
        link: How they reach each other, within a node.
        outer: How each device reaches other nodes.
        nodes: Nodes the devices are on.
        calls: Operations that the bytes are sent in, one after the other.

    Returns:
        Seconds; 0 for a single device.

    Raises:
        ValueError: If there is no such kind, or no device; or if the devices are not spread evenly
            over nodes that a link joins.

    Example:
        >>> fast = Link(100e9, 1e-6, "")
        >>> f"{1e6 * collective_seconds('all-reduce', 1e9, 8, fast):.0f} us"
        '17514 us'
    """
    _validate(kind, size_bytes, count)
    if nodes < 1 or count % nodes or (nodes > 1 and outer is None):
        raise ValueError(
            f"{count} devices on {nodes} nodes, with outer={outer}: a node must hold as many "
            "devices as any other, and several need a link between them. Give outer, and a number "
            "of nodes that divides the devices."
        )
    if nodes == 1:
        return _ring(kind, size_bytes, count, link, calls)
    assert outer is not None
    per_node = count // nodes
    if kind in _WHOLE or kind.endswith("all-to-all"):  # what leaves a node is not joined up
        crossing = size_bytes * (1.0 if kind in _WHOLE else (nodes - 1) / nodes)
        return _ring(kind, size_bytes, per_node, link, calls) + _ring(
            "collective-permute", crossing, nodes, outer, calls
        )
    within = _ring(kind, size_bytes, per_node, link, calls)
    return within + _ring(kind, size_bytes / per_node, nodes, outer, calls)


def _ring(kind: str, size_bytes: float, count: int, link: Link, calls: int) -> float:
    if count == 1:
        return 0.0
    hops = 1 if kind == "collective-permute" else _PASSES.get(kind, 1) * (count - 1)
    sent = floor_bytes(kind, size_bytes, count)
    return calls * hops * link.latency_s + sent / link.bytes_per_s


def _validate(kind: str, size_bytes: float, count: int) -> None:
    if kind not in _PASSES and kind not in _WHOLE:
        raise ValueError(
            f"There is no collective {kind!r}. Those that are known: "
            f"{', '.join((*_PASSES, *_WHOLE))}."
        )
    if count < 1 or size_bytes < 0:
        raise ValueError(
            f"{size_bytes} bytes among {count} devices cannot be sent. Give at least one device "
            "and no fewer than 0 bytes."
        )
