"""Collectives that are alike, as one: a model of many layers sends many, and few kinds of them.

    Sent, Sent, ...  --alike-->  (their numbers, one Sent with their sums), ...

Alike are those with the same kind, dtypes, bytes, axes, floor and origin. What is summed are runs,
bytes on the wire and times; the name is the first one's.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jdp.sent import Sent


class Alike(NamedTuple):
    """Some collectives that differ in nothing that a reader looks at.

    Attributes:
        numbers: Their places in what was given.
        names: Their names.
        sent: All of them as one.
    """

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    sent: Sent


def alike(collectives: Sequence[Sent]) -> tuple[Alike, ...]:
    """Joins collectives that are alike, in the order in which the first of each starts.

    Args:
        collectives: Those of a report.

    Example:
        >>> one = Sent("a", "all-reduce", ("f32",), 8, 14.0, ("data",), 8, 1, False, False, True,
        ...     (), 2.0, 1.0, "model.py:3", "", 1.0)
        >>> found = alike([one, one._replace(name="b"), one._replace(bytes=16)])
        >>> [(x.numbers, x.sent.times, x.sent.us) for x in found]
        [((0, 1), 2, 4.0), ((2,), 1, 2.0)]
    """
    groups: dict[Sent, list[int]] = {}
    for number, x in enumerate(collectives):
        groups.setdefault(_looks(x), []).append(number)
    return tuple(_joined(numbers, collectives) for numbers in groups.values())


def _looks(x: Sent) -> Sent:
    """It, without what is summed or may differ."""
    floor = float(f"{x.floor:.3g}")
    return x._replace(
        name="", times=0, wire_bytes=0.0, beside=(), us=None, exposed_us=None, floor=floor
    )


def _joined(numbers: Sequence[int], collectives: Sequence[Sent]) -> Alike:
    found = [collectives[number] for number in numbers]
    sent = found[0]._replace(
        times=sum(x.times for x in found),
        wire_bytes=sum(x.wire_bytes for x in found),
        beside=tuple(dict.fromkeys(name for x in found for name in x.beside)),
        us=_sum([x.us for x in found]),
        exposed_us=_sum([x.exposed_us for x in found]),
    )
    return Alike(tuple(numbers), tuple(x.name for x in found), sent)


def _sum(times: Sequence[float | None]) -> float | None:
    known = [x for x in times if x is not None]
    return sum(known) if len(known) == len(times) else None
