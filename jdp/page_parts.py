"""What all pages are made of: text, bars, tables, notes, and the frame around them.

    sections  --wrapped-->  a part of a notebook  --alone-->  a whole file

All text of users goes through `page_text`. Drawn sizes are shares of a whole, so that no script is
needed to lay them out.
"""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jdp.reporting import Report

_NOTHING = 5e-5  # a share that is shown as none


class Column(NamedTuple):
    """A column of a table: what stands above it, and its CSS classes."""

    name: str
    kind: str = ""


def alone(part: str, title: str) -> str:
    """A whole page of a part of one.

    Args:
        part: What `wrapped` returned.
        title: Of the window.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{page_text(title)}</title></head>"
        f'<body class="jdp-page">\n{part}\n</body></html>\n'
    )


def wrapped(*sections: str) -> str:
    """Sections with the styles and the script that they need."""
    style, script = (_file(name) for name in ("page.css", "page.js"))
    body = "\n".join(filter(None, sections))
    return (
        f'<style>{style}</style>\n<main class="jdp"><div class="sheet">\n{body}\n</div></main>\n'
        f"<script>{script}</script>"
    )


def _file(name: str) -> str:
    return files("jdp").joinpath(name).read_text(encoding="utf-8")


def write(path: Any, text: str) -> None:
    """Writes a page to a file."""
    Path(path).write_text(text, encoding="utf-8")


def page_text(text: str) -> str:
    """Text that is shown as it is, between tags and in attributes."""
    return escape(text, quote=True)


def percent(share: float) -> str:
    """A share in words: 42%, 7.1%, 0.03%."""
    few_digits = share >= 0.0995 or share < _NOTHING
    return f"{share:.0%}" if few_digits else f"{100 * share:.2g}%"


def heading(title: str, note: str, verdict: str, *tiles: str, bad: bool = False) -> str:
    """What a page begins with: of what it is, what it comes to, and the figures that matter.

    Args:
        title: Of the page.
        note: Beside it.
        verdict: A sentence.
        tiles: What `tile` returned.
        bad: Whether the verdict is bad news.
    """
    drawn = "".join(tiles)
    return (
        f"<header><h1>{page_text(title)}<small>{page_text(note)}</small></h1>"
        f'<p class="verdict{" bad" if bad else ""}">{page_text(verdict)}</p></header>'
        + (f'<section class="tiles" aria-label="At a glance">{drawn}</section>' if drawn else "")
    )


def tile(name: str, value: str, note: str, bar: str = "", state: str = "") -> str:
    """A figure with its name, a bar, and a note."""
    return (
        f'<div class="tile"><span>{page_text(name)}</span>'
        f'<b class="{state}">{page_text(value)}</b>{bar}<small>{page_text(note)}</small></div>'
    )


def meter(
    parts: Sequence[tuple[str, float]], whole: float | None, mark: float | None = None
) -> str:
    """A thin bar of coloured parts; nothing if there is no whole.

    Args:
        parts: Colours and sizes, from the left.
        whole: The size of the bar; parts beyond are cut off.
        mark: A size at which a line is drawn.
    """
    if not whole:
        return ""
    drawn = "".join(
        f'<div class="c-{color}" style="width:{min(100.0, 100 * size / whole):.3f}%"></div>'
        for color, size in parts
        if size > 0
    )
    line = f'<i style="left:{100 * mark / whole:.2f}%"></i>' if mark else ""
    return f'<div class="meter" aria-hidden="true">{drawn}{line}</div>'


def table(columns: Sequence[Column], body: str, kind: str = "") -> str:
    """A table that scrolls by itself where it is too wide.

    Args:
        columns: From the left.
        body: Its rows.
        kind: CSS classes of the table.
    """
    head = "".join(
        f'<th scope="col" class="{kind}">{page_text(name)}</th>' for name, kind in columns
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def gave_up(report: Report) -> bool:
    """Whether there is no program to tell of: the compiler gave up for lack of memory."""
    return report.fits is False and not report.spans and not report.collectives


def notes(found: Sequence[str]) -> str:
    """A section of sentences; nothing if there are none."""
    if not found:
        return ""
    items = "".join(f"<li>{page_text(note)}</li>" for note in found)
    return f'<section><h2>Notes</h2><ul class="notes">{items}</ul></section>'
