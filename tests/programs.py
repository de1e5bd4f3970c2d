"""Reads what a program sends: from StableHLO (`lowered.as_text()`) or from compiled HLO."""

import math
import pathlib
import re
import sys

import numpy as np

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
    """Whether a group of a collective has devices of two nodes; all ways XLA writes groups."""
    text = re.search(r"replica_groups=(\S+( \{[^}]*\})?)", collective.line).group(1)
    if text.startswith("mesh"):
        return "'node'" in text.split("]")[1]
    if "<=" in text:
        sizes, whole, order = re.match(
            r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text
        ).groups()
        numbers = lambda digits: [int(d) for d in digits.split(",")]  # noqa: E731
        ids = np.arange(math.prod(numbers(whole))).reshape(numbers(whole))
        groups = (ids.transpose(numbers(order)) if order else ids).reshape(numbers(sizes)).tolist()
    else:
        groups = [list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text)]
    assert groups, text
    return any(len({device // per_node for device in group}) > 1 for group in groups)
