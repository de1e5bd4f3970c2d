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
from jdp import page, page_sections, page_timeline, tables
from jdp.holdings import Holding, Holdings
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
    body = re.sub(r"<(style|title|script).*?</\1>", "", dom, flags=re.DOTALL)
    return html_format.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body)))


def acting(text, script):
    """The page with something that a reader does in it, after its own script."""
    return text.replace("</body>", f"<script>{script}</script></body>")


def test_the_page_says_what_the_report_says(tmp_path):
    found = report()
    dom = see(page.html(found), tmp_path, "--dump-dom")
    seen = words(dom)
    for text in ("v5e:2x4", found.verdict, found.floor.words, "31%", "120 µs", "all-reduce"):
        assert text in seen
    assert "42% of the step" in seen  # 50 of 120 µs are exposed
    assert dom.count('role="listitem"') == len(found.spans)
    assert "parameters: 65.5 kB" in dom
    for row in found.holdings.rows:
        assert row.path in dom


def test_what_is_exposed_is_told_apart(tmp_path):
    """Of 40 to 120 µs, 40 to 60 are under compute: a third to a half of the step is pale only."""
    lane = see(page.html(report()), tmp_path, "--dump-dom").split('class="lane communication"')[1]
    places = re.findall(r'<i class="c-(\w+)" style="left:\s?([\d.]+)%;\s?width:\s?([\d.]+)%', lane)
    assert [(x, round(float(left), 2), round(float(width), 2)) for x, left, width in places] == [
        ("hidden", 33.33, 66.67),
        ("sent", 50.0, 50.0),
    ]


@pytest.mark.parametrize(
    ("stretches", "of", "left"),
    [
        ([(0.0, 10.0)], [(2.0, 3.0), (5.0, 12.0)], [(0.0, 2.0), (3.0, 5.0)]),
        ([(0.0, 1.0), (2.0, 3.0)], [(0.0, 3.0)], []),
        ([(4.0, 5.0)], [(0.0, 1.0), (9.0, 9.5)], [(4.0, 5.0)]),
    ],
)
def test_what_of_some_stretches_is_outside_of_others(stretches, of, left):
    assert page_timeline.outside(stretches, of) == left


def test_the_picture_of_who_holds_what_shows_parts(tmp_path):
    dom = see(page.html(report("zero1")), tmp_path, "--dump-dom")
    row = next(x for x in dom.split("<tr>") if ".mu['w']" in x)
    places = re.findall(r"M(\d+) ([\d.]+)h[\d.]+v([\d.]+)", row)
    eighth = 100 / 8
    assert [tuple(map(float, x)) for x in places] == [(k, k * eighth, eighth) for k in range(8)]


def test_parts_lie_where_the_mesh_says():
    row = Holding("w", (8, 8), "float32", "split: dim 0 over device (4)", 64, None)
    held = page_sections.held(Holdings((row,), {"w": 64}, 64), {"node": 2, "device": 4})
    assert [float(x) for x in re.findall(r"M\d+ ([\d.]+)h", held)] == [0, 25, 50, 75, 0, 25, 50, 75]


def test_a_row_lights_up_its_stretches_and_tells_more(tmp_path):
    act = """
      const row = document.querySelector('tr[data-row="0"]');
      row.focus();
      document.querySelector('[data-zoom="1.6"]').click();
    """
    dom = see(acting(page.html(report()), act), tmp_path, "--dump-dom")
    assert re.search(r'<a role="listitem" class="[^"]*lit[^"]*"[^>]* data-row="0"', dom)
    assert re.search(r'<div class="tip" style=[^>]*>[^<]*50 µs of it waited for', dom)
    assert re.search(r'class="track"[^>]*width:\s?160%', dom)


def test_it_reads_on_without_scripts(tmp_path):
    text = page.html(report())
    bare = re.sub(r"<script>.*</script>", "", text, flags=re.DOTALL)
    assert len(bare) < len(text)
    assert words(see(bare, tmp_path, "--dump-dom")) == words(see(text, tmp_path, "--dump-dom"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_drawn_in_light_and_dark(tmp_path, scheme):
    picture = tmp_path / "page.png"
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    size = ["--hide-scrollbars", "--window-size=1280,900"]
    see(page.html(report()), tmp_path, *dark, *size, f"--screenshot={picture}")
    image = pytest.importorskip("matplotlib.image").imread(picture)[..., :3]
    light = float(image[:20].mean())  # the margin above the title
    assert light > 0.9 if scheme == "light" else light < 0.2
    assert len({tuple(x) for x in image[::7, ::7].reshape(-1, 3).round(2)}) > 10  # not empty


def test_nothing_is_loaded_from_elsewhere(tmp_path):
    """The browser is told to refuse everything but what is on the page, and refuses nothing."""
    text = page.html(report())
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    refusing = text.replace(
        "<head>", f'<head><meta http-equiv="Content-Security-Policy" content="{policy}">'
    )
    assert "data-live" in see(refusing, tmp_path, "--dump-dom")
    assert not re.search(r"https?://|@import|url\(|<link|<img|fetch|import\(|src=", text)


def test_names_are_text_and_never_markup(tmp_path):
    name = "<script>alert(1)</script>"
    text = page.html(report(leaf=name))
    assert text.count("<script") == 1  # the page's own
    assert name in words(see(text, tmp_path, "--dump-dom"))


def test_a_report_without_times_or_collectives_or_memory_is_drawn(tmp_path):
    bare = report()._replace(
        collectives=(), spans=(), step_us=None, exposed_us=None, sent_us=None, mfu=None,
        memory=None, memory_limit=None, fits=False, notes=("a note",),
    )  # fmt: skip
    seen = words(see(page.html(bare), tmp_path, "--dump-dom"))
    for text in ("Nothing is sent", "models no times", "gave up", "does not fit", "a note"):
        assert text in seen


def test_one_cpu_device_is_drawn(tmp_path):
    mesh, tx = jdp.make_mesh(num_devices=1), optax.chain(jdp.all_reduce(), optax.sgd(0.1))
    step = jdp.train_step(lambda p, x: jnp.mean((x @ p) ** 2), tx, mesh)
    state = jdp.init_state(jax.ShapeDtypeStruct((8, 8), jnp.float32), tx, mesh)
    found = jdp.explain(step, state, jax.ShapeDtypeStruct((4, 8), jnp.float32), cache=False)
    seen = words(see(page.html(found), tmp_path, "--dump-dom"))
    assert "1 CPU devices" in seen
    assert "models no times" in seen


def test_what_does_not_fit_runs_over_the_mark(tmp_path):
    found = report()
    half = found._replace(memory_limit=found.memory.total // 2, fits=False)
    dom = see(page.html(half), tmp_path, "--dump-dom")
    left = float(re.search(r'class="limit" style="left:\s?([\d.]+)%', dom).group(1))
    assert left == pytest.approx(50, abs=0.1)
    assert "does not fit" in words(dom)


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
