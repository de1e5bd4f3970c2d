"""The page of a report, in a real browser: it shows what the report says and needs nothing."""

import functools
import html as html_format
import io
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import optax
import pytest

import jdp
from jdp import page, tables
from jdp.sent import Sent, Span

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@functools.cache
def report(tx_name="all_reduce", leaf="w"):
    """A report of a small step, with modelled times put in."""
    inner, mesh = optax.adamw(1e-3), jdp.make_mesh()
    tx = jdp.zero1(inner) if tx_name == "zero1" else optax.chain(jdp.all_reduce(), inner)
    step = jdp.train_step(lambda p, x: jnp.mean((x @ p[leaf]) ** 2), tx, mesh)
    state = jdp.init_state({leaf: jax.ShapeDtypeStruct((256, 64), jnp.float32)}, tx, mesh)
    found = jdp.explain(step, state, jax.ShapeDtypeStruct((16, 256), jnp.float32), cache=False)
    timed = tuple(x._replace(us=80.0, exposed_us=50.0) for x in found.collectives)
    spans = (
        Span("compute", "dot_general", 0.0, 60.0, None),
        Span("communication", timed[0].name, 40.0, 120.0, 0),
    )
    return found._replace(
        collectives=timed, spans=spans, compute_us=60.0, sent_us=80.0, exposed_us=50.0,
        step_us=120.0, mfu=0.31, target="v5e:2x4", memory_limit=10**9, fits=True,
    )  # fmt: skip


def see(text, tmp_path, *options):
    """What the browser makes of a page: its DOM, and what it complains about."""
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    path = tmp_path / "page.html"
    path.write_text(text, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run(
        [BROWSER, *flags, "--enable-logging=stderr", *options, path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert complaints == []
    return done.stdout


def words(dom):
    """The text that a reader sees."""
    body = re.sub(r"<style.*?</style>|<title>.*?</title>", "", dom, flags=re.DOTALL)
    return html_format.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body)))


def test_the_page_says_what_the_report_says(tmp_path):
    found = report()
    dom = see(page.html(found), tmp_path, "--dump-dom")
    seen = words(dom)
    for text in ("v5e:2x4", found.verdict, found.floor.words, "31%", "120 µs", "all-reduce"):
        assert text in seen
    assert "42%" in seen  # 50 of 120 µs are exposed
    assert dom.count("<rect") == len(found.spans)
    assert 'title="parameters: 65.5 kB"' in dom
    assert all(row.path in seen for row in found.holdings.rows)


def test_the_picture_of_who_holds_what_shows_parts(tmp_path):
    dom = see(page.html(report("zero1")), tmp_path, "--dump-dom")
    row = next(x for x in dom.split("<tr>") if ".mu['w']" in x)
    left = [float(x) for x in re.findall(r"margin-left:([\d.]+)%", row)]
    assert left == [100 * k / 8 for k in range(8)]  # each device another eighth


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_drawn_in_light_and_dark(tmp_path, scheme):
    picture = tmp_path / "page.png"
    dark = ["--force-dark-mode", "--enable-features=WebUIDarkMode"] if scheme == "dark" else []
    size = ["--hide-scrollbars", "--window-size=1280,900"]
    see(page.html(report()), tmp_path, *dark, *size, f"--screenshot={picture}")
    image = pytest.importorskip("matplotlib.image").imread(picture)[..., :3]
    light = float(image[:50].mean())  # the margin above the title
    assert light > 0.9 if scheme == "light" else light < 0.2
    assert len({tuple(x) for x in image[::7, ::7].reshape(-1, 3).round(2)}) > 10  # not empty


def test_nothing_is_loaded_from_elsewhere():
    text = page.html(report())
    assert not re.search(r"https?://|@import|url\(|<script|<link|<img", text)


def test_names_are_text_and_never_markup(tmp_path):
    name = "<script>alert(1)</script>"
    text = page.html(report(leaf=name))
    assert "<script" not in text
    assert name in words(see(text, tmp_path, "--dump-dom"))


def test_a_report_without_times_or_collectives_or_memory_is_drawn(tmp_path):
    bare = report()._replace(
        collectives=(), spans=(), step_us=None, exposed_us=None, sent_us=None, mfu=None,
        memory=None, memory_limit=None, fits=False, notes=("a note",),
    )  # fmt: skip
    seen = words(see(page.html(bare), tmp_path, "--dump-dom"))
    for text in ("Nothing is sent", "models no times", "gave up", "does not fit", "a note"):
        assert text in seen


def test_saved_and_in_a_notebook_it_is_the_same_page(tmp_path):
    found = report()
    found.save_html(tmp_path / "saved.html")
    assert found._repr_html_() in (tmp_path / "saved.html").read_text(encoding="utf-8")


def test_a_terminal_shows_tables_with_names_taken_literally():
    console = pytest.importorskip("rich.console").Console(width=200, file=io.StringIO())
    named = Sent(**report().collectives[-1]._asdict() | {"source": "[bold]model.py:3"})
    console.print(tables.report(report()._replace(collectives=(named,), notes=("[red]note",))))
    text = console.file.getvalue()
    for part in ("[bold]model.py:3", "[red]note", "all-reduce", "optimizer state", "v5e:2x4"):
        assert part in text
