"""Reads what a program sends: from StableHLO (`lowered.as_text()`) or from compiled HLO."""

import pathlib
import re
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))

from payload import Collective, collectives, live_bytes, sent_bytes

__all__ = [
    "Collective",
    "collectives",
    "crosses",
    "live_bytes",
    "lowered_collectives",
    "sent_bytes",
]


def lowered_collectives(stablehlo_text: str) -> list[tuple[str, str]]:
    """(kind, element type) of each collective before any backend pass."""
    found = []
    pattern = r'"?stablehlo\.(all_reduce|reduce_scatter|all_gather|all_to_all|collective_permute)"?'
    for match in re.finditer(pattern, stablehlo_text):
        rest = stablehlo_text[match.end() :]
        # the type of an all_reduce follows the region that adds
        types = re.search(r"(?:\}\) |\}> )?: \(tensor<(?:[0-9x]*x)?([a-z0-9]+)>", rest)
        found.append((match.group(1).replace("_", "-"), types.group(1) if types else "?"))
    return found


def crosses(collective, per_node):
    """Whether a group of a collective has devices of two nodes."""
    assert all(collective.groups), collective.line
    return any(len({x // per_node for x in group}) > 1 for group in collective.groups)
