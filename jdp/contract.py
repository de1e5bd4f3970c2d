"""A contract on what a step may send, for tests.

    Contract(counts={"all-reduce": 1}, in_loops=False).check(report or compiled program)

A model edit that makes the step send more, elsewhere, or in another dtype fails the test with a
sentence that names the operation and the line it comes from. Nothing is compiled here.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jdp.hlo import COLLECTIVES
from jdp.holdings import human
from jdp.reporting import Report
from jdp.schedule import walk
from jdp.sent import Sent

# Dtypes as users write them, and as XLA does.
_DTYPES = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bfloat16": "bf16",
    "int8": "s8",
    "int16": "s16",
    "int32": "s32",
    "int64": "s64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "bool": "pred",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
}


class ContractError(AssertionError):
    """A step sends what its contract does not allow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contract:
    """What a step may send; what is not said is allowed.

    Args:
        counts: Collectives of each kind, exactly, as operations of the program; those of a kind
            that is not named must not be there. {"all-reduce": 1}.
        at_most: The most collectives of a kind; other kinds are not looked at.
        never: Kinds that must not be there.
        dtypes: Dtypes that may be sent, such as ("bfloat16",).
        most_bytes: The most bytes that a device sends in a step, around rings, with loops.
        most_times_floor: The most that is sent over the least possible (needs a report).
        in_loops: False: nothing may be sent inside a loop.
        hidden: The least share of the time of communication that compute hides, 0 to 1 (needs a
            report for a target).
        ignore_below: Collectives of fewer bytes are not looked at: metrics, norms.

    Raises:
        ValueError: If a kind or dtype does not exist, or `hidden` is no share.

    Example:
        >>> tx, mesh = optax.chain(jdp.all_reduce(), optax.sgd(0.1)), jdp.make_mesh()
        >>> step = jdp.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh)
        >>> state = jdp.init_state({"w": jnp.ones((64, 32))}, tx, mesh)
        >>> compiled = step.lower(state, jnp.ones((16, 64))).compile()
        >>> sent = Contract(counts={"all-reduce": 1}, in_loops=False).check(compiled, mesh)
        >>> Contract(never=["all-reduce"]).check(compiled, mesh)
        Traceback (most recent call last):
        jdp.contract.ContractError: all-reduce of 8.20 kB f32 (all-reduce, from jdp.all_reduce) ...
    """

    counts: Mapping[str, int] | None = None
    at_most: Mapping[str, int] | None = None
    never: Sequence[str] = ()
    dtypes: Sequence[str] | None = None
    most_bytes: float | None = None
    most_times_floor: float | None = None
    in_loops: bool = True
    hidden: float | None = None
    ignore_below: int = 1024

    def __post_init__(self) -> None:
        for kind in (*(self.counts or {}), *(self.at_most or {}), *self.never):
            if kind not in COLLECTIVES:
                raise ValueError(
                    f"A contract names the kind {kind!r}, which is no collective, so it would "
                    f"never be broken. Kinds are {', '.join(COLLECTIVES)}."
                )
        for dtype in self.dtypes or ():
            if dtype not in _DTYPES and dtype not in _DTYPES.values():
                raise ValueError(
                    f"A contract names the dtype {dtype!r}, which XLA does not send. Dtypes are "
                    f"{', '.join(_DTYPES)}."
                )
        if self.hidden is not None and not 0 <= self.hidden <= 1:
            raise ValueError(
                f"A contract asks for hidden={self.hidden}, but that is a share of the time of "
                "communication: between 0 and 1, 0.8 for 80 %."
            )

    def check(self, what: Any, mesh: Mesh | None = None) -> tuple[Sent, ...]:
        """Compares a step with the contract.

        Args:
            what: A `jdp.Report`, a compiled program (`step.lower(state, batch).compile()`), or its
                text.
            mesh: The mesh of a program that is no report.

        Returns:
            The collectives that were looked at.

        Raises:
            ContractError: At the first collective that breaks it, naming it.
            TypeError: If it is neither of these, or a program without its mesh.
            ValueError: If the contract asks for what only a report tells.
        """
        report = what if isinstance(what, Report) else None
        rows = report.collectives if report else _rows(what, mesh)
        looked_at = tuple(x for x in rows if x.bytes >= self.ignore_below)
        for one in looked_at:
            self._one(one)
        self._kinds(looked_at)
        sent = sum(x.wire_bytes for x in looked_at)
        if self.most_bytes is not None and sent > self.most_bytes:
            most = max(looked_at, key=lambda x: x.wire_bytes)
            raise ContractError(
                f"A device sends {human(round(sent))} in a step, and the contract allows "
                f"{human(round(self.most_bytes))}. Most of it is {_name(most)}, {most.times} "
                f"time(s)."
            )
        self._modelled(report)
        return looked_at

    def _one(self, one: Sent) -> None:
        if one.kind in self.never:
            raise ContractError(f"{_name(one)} is sent, and the contract says never {one.kind}.")
        if not self.in_loops and one.in_loop:
            raise ContractError(
                f"{_name(one)} is inside a loop and runs {one.times} times, and the contract says "
                "that nothing is sent inside loops."
            )
        if self.dtypes is None:
            return
        allowed = {_DTYPES.get(dtype, dtype) for dtype in self.dtypes}
        if other := [dtype for dtype in one.dtypes if dtype not in allowed]:
            raise ContractError(
                f"{_name(one)} sends {', '.join(other)}, and the contract allows "
                f"{', '.join(self.dtypes)}."
            )

    def _kinds(self, rows: Sequence[Sent]) -> None:
        found = Counter(x.kind for x in rows)
        exact = {kind: (self.counts or {}).get(kind, 0) for kind in COLLECTIVES}
        for kind, number in exact.items() if self.counts is not None else ():
            if found[kind] != number:
                raise ContractError(_miscount(kind, found[kind], f"exactly {number}", rows))
        for kind, number in (self.at_most or {}).items():
            if found[kind] > number:
                raise ContractError(_miscount(kind, found[kind], f"at most {number}", rows))

    def _modelled(self, report: Report | None) -> None:
        """What only a report tells."""
        if self.most_times_floor is not None:
            floor = _needs(report, "most_times_floor").floor
            if floor.ratio > self.most_times_floor:
                raise ContractError(
                    f"A device sends {floor.ratio:.3g} times the least possible, and the contract "
                    f"allows {self.most_times_floor:g}. {floor.words}"
                )
        if self.hidden is None:
            return
        report = _needs(report, "hidden")
        if report.hidden is None:
            raise ValueError(
                f"The contract asks for hidden={self.hidden}, but no times are known on "
                f'{report.platform}. Give a report for a target: jdp.explain(..., "h100:2x8").'
            )
        if report.hidden < self.hidden:
            worst = max(report.collectives, key=lambda x: x.exposed_us or 0.0)
            raise ContractError(
                f"{report.hidden:.0%} of the time of communication is hidden on "
                f"{report.target or report.platform}, and the contract asks for {self.hidden:.0%}. "
                f"Longest exposed is {_name(worst)}: {worst.exposed_us:.0f} of {worst.us:.0f} µs."
            )


def _rows(what: Any, mesh: Mesh | None) -> tuple[Sent, ...]:
    text = what if isinstance(what, str) else getattr(what, "as_text", lambda: None)()
    if not isinstance(text, str) or "HloModule" not in text or mesh is None:
        raise TypeError(
            f"Contract.check got a {type(what).__name__}{'' if mesh else ' without a mesh'}. Give "
            "what jdp.explain returned, or a compiled program and its mesh: "
            "check(step.lower(state, batch).compile(), mesh)."
        )
    return walk(text, mesh).collectives


def _needs(report: Report | None, what: str) -> Report:
    if report is None:
        raise ValueError(
            f"The contract asks for {what}, which a program alone does not tell. Check what "
            "jdp.explain returned."
        )
    return report


def _name(one: Sent) -> str:
    """The operation with its size and where it comes from."""
    where = one.where or "the compiler"
    return f"{one.kind} of {human(one.bytes)} {'+'.join(one.dtypes)} ({one.name}, from {where})"


def _miscount(kind: str, found: int, allowed: str, rows: Sequence[Sent]) -> str:
    listed = "; ".join(_name(x) for x in rows if x.kind == kind) or "there is none"
    return f"{found} {kind}(s) are sent, and the contract says {allowed}: {listed}."
