"""A forecast of a step's time as a row: yes, no, or that it cannot be told.

    Facts, seconds that a technique saves and adds  --predicted-->  Payoff

A gain under 3 % is a no: it is within what one run differs from the next. Where the forecast may be
off by more than what lies between it and the 3 %, the answer is that it cannot be told. Timings are
taken to be within a tenth, those of emulated devices within a third, and exposed communication
within what two ways to find it differ. Where devices wait for their host or for input for more than
20 % of a step, no gain is certain: they might only wait longer.
"""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from jdp.holdings import human
from jdp.payoff_facts import Facts

LEAST = 0.03  # of the step: less is lost in noise
WIDTH = 100  # of lines of text; a terminal's tables have their own
IDLE = 0.20  # of the step: beyond, devices are not what it waits for


class Payoff(NamedTuple):
    """What a technique would do.

    Attributes:
        what: The technique.
        argument: What to write; `inner` is what follows the reduction now.
        instead: What it takes the place of; "" if that is not known.
        pays: Whether the step gets faster by 3 % or more; `None` if it cannot be told.
        now_ms: Milliseconds of a step now.
        then_ms: Predicted, with it.
        off_ms: What the prediction may be off by.
        sent_now: Bytes that a device sends in a step now.
        sent_then: Bytes that it would send.
        saves: Bytes of memory that each device would have free.
        why: In words.
    """

    what: str
    argument: str
    instead: str
    pays: bool | None
    now_ms: float
    then_ms: float
    off_ms: float
    sent_now: float
    sent_then: float
    saves: int
    why: str

    @property
    def answer(self) -> str:
        """Does it pay: "yes", "no", or "?" where it cannot be told."""
        return {True: "yes", None: "?", False: "no"}[self.pays]


def ms(spent: float) -> str:
    """Milliseconds as text.

    Example:
        >>> ms(0.01234), ms(12.34), ms(4321.0)
        ('0.0123 ms', '12.3 ms', '4321 ms')
    """
    return f"{spent:.3g} ms" if abs(spent) < 999.5 else f"{spent:.0f} ms"


def show(rows: Sequence[Payoff]) -> str:
    """The rows as paragraphs, and what they start from."""
    head = (
        f"Does it pay? A step takes {ms(rows[0].now_ms)}, and a device sends "
        f"{human(int(rows[0].sent_now))} in it. Forecasts:"
    )
    return "\n".join([fill(head), *map(_paragraph, rows)])


def _paragraph(row: Payoff) -> str:
    told = [row.why]
    if row.then_ms != row.now_ms or row.sent_then != row.sent_now or row.saves:
        told.append(f"sends {human(int(row.sent_then))}")
        told += [f"frees {human(row.saves)} on each device"] if row.saves > 0 else []
        told = [*([] if row.pays is None else [f"{ms(row.then_ms)} a step"]), *told]
    return f"{row.answer:<5}{row.argument}\n{fill('; '.join(told), indent=5)}"


def fill(text: str, *, indent: int = 0, more: int = 0) -> str:
    """A paragraph, from the second line on indented by `more` spaces besides; code stays whole."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + more),
        break_long_words=False,
        break_on_hyphens=False,
    )


class Change(NamedTuple):
    """What would become of a step: seconds saved in sending, saved in work, added in work."""

    sending: float = 0.0
    work: float = 0.0
    added: float = 0.0

    @property
    def gain(self) -> float:
        """Seconds that the step gets shorter."""
        return self.sending + self.work - self.added


def predicted(
    facts: Facts,
    what: str,
    code: tuple[str, str],
    change: Change,
    sent: float,
    saves: int = 0,
    why: str = "",
) -> Payoff:
    """The row of a prediction, and its yes, no or neither."""
    gain, least = change.gain, LEAST * facts.step
    off = facts.off * abs(change.sending) + facts.doubt * (abs(change.work) + abs(change.added))
    gain = min(gain, facts.step)
    waits = facts.idle > IDLE * facts.step
    pays: bool | None = None
    if gain - off >= least and not waits:
        pays = True
    elif gain + off < least:
        pays = False
    told = f"{ms(1e3 * abs(gain))} {'less' if gain >= 0 else 'more'}"
    if pays is None and waits and gain - off >= least:
        why = f"cannot tell: {told}, if devices were not waiting for their host or input"
    elif pays is None:
        why = f"cannot tell: {told}, give or take {ms(1e3 * off)}"
    elif pays:
        why = why or f"{gain / facts.step:.0%} of the step"
    else:
        why = why or (f"{told}: within noise" if gain > 0 else "the step gets no faster")
    now, then = 1e3 * facts.step, 1e3 * (facts.step - gain)
    sizes = (facts.sent / facts.every, sent / facts.every)
    return Payoff(what, *code, pays, now, then, 1e3 * off, *sizes, saves, why)


def refused(facts: Facts, what: str, code: tuple[str, str], why: str) -> Payoff:
    """The row of what does not apply."""
    return predicted(facts, what, code, Change(), facts.sent, why=why)._replace(pays=False)
