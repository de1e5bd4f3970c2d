"""The page of a report, in a real browser: it shows what the report says and needs nothing."""

import functools
import html as html_format
import json
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from cluster import ROOT

import jdp
from jdp import page, page_holdings, page_parts, page_timeline
from jdp.holdings import Holding, Holdings
from jdp.sent import Span

pytestmark = pytest.mark.alternate

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
    dom = see(page.html(found), tmp_path, "--dump-dom", "--window-size=1280,900")
    seen = words(dom)
    for text in ("v5e:2x4", found.verdict, found.floor.words, "31%", "120 µs", "all-reduce"):
        assert text in seen
    assert "42% of the step" in seen  # 50 of 120 µs are exposed
    assert dom.count('role="listitem"') == len(found.spans)
    assert "parameters: 65.5 kB" in dom
    for row in found.holdings.rows:
        assert row.path in dom
    ticks = re.search(r'<div class="ticks".*?</div>', dom).group()
    marks = ["0", "20 µs", "40 µs", "60 µs", "80 µs", "100 µs", "120 µs"]
    assert re.findall(r">([^<>]+)</span>", ticks) == marks


def test_what_is_exposed_is_told_apart():
    """Of 40 to 120 µs, 40 to 60 are under compute: a third to a half of the step is pale only."""
    lane = page.html(report()).split('class="lane communication"')[1]
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


def test_the_picture_of_who_holds_what_shows_parts():
    text = html_format.unescape(page.html(report("zero1")))
    row = next(x for x in text.split("<tr") if ".mu['w']" in x)
    places = re.findall(r"M(\d+) ([\d.]+)h[\d.]+v([\d.]+)", row)
    eighth = 100 / 8
    assert [tuple(map(float, x)) for x in places] == [(k, k * eighth, eighth) for k in range(8)]


def test_parts_lie_where_the_mesh_says():
    row = Holding("w", (8, 8), "float32", "split: dim 0 over device (4)", 64, None)
    held = page_holdings.held(Holdings((row,), {"w": 64}, 64), {"node": 2, "device": 4})
    assert [float(x) for x in re.findall(r"M\d+ ([\d.]+)h", held)] == [0, 25, 50, 75, 0, 25, 50, 75]


def test_the_same_leaf_of_several_layers_is_one_row():
    leaf = Holding("", (8, 8), "float32", "whole on each of 8", 256, None)
    paths = ["params[0]['w']", "params[1]['w']", "params[2]['w']", "params[0]['b']"]
    rows = [leaf._replace(path=path) for path in paths]
    rows.append(leaf._replace(path="params[3]['w']", shape=(4, 4)))
    found = page_holdings.layers(rows)
    assert [(name, count) for name, count, _ in found] == [
        ("params[0..2]['w']", 3),
        ("params[0]['b']", 1),
        ("params[3]['w']", 1),
    ]
    held = page_holdings.held(Holdings(tuple(rows), {"params": 1280}, 1280), {"data": 8})
    assert "3 of 8 x 8" in held
    assert "768 B" in held


def test_a_row_lights_up_its_stretches_and_keys_zoom(tmp_path):
    act = """
      document.querySelector('tr[data-row="0"]').focus();
      const time = document.querySelector('.time');
      const press = (key) => time.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      press("+");
      document.querySelector('[data-zoom="1.6"]').click();
    """
    dom = see(acting(page.html(report()), act), tmp_path, "--dump-dom")
    assert re.search(r'<a role="listitem" class="[^"]*lit[^"]*"[^>]* data-row="0"', dom)
    assert re.search(r'<div class="tip" style=[^>]*>[^<]*50 µs of it waited for', dom)
    assert re.search(r'class="track"[^>]*width:\s?256%', dom)
    for within_reach in ('<tr data-row="0" tabindex="0"', '<div class="scroll time" tabindex="0"'):
        assert within_reach in dom


def test_it_reads_on_without_scripts(tmp_path):
    text = page.html(report())
    bare = re.sub(r"<script>.*</script>", "", text, flags=re.DOTALL)
    assert len(bare) < len(text)
    left, whole = (
        re.sub(r'<div class="ticks".*?</div>', "", see(x, tmp_path, "--dump-dom"))
        for x in (bare, text)
    )
    assert words(left) == words(whole)


def pages():
    """Pages that are hard to draw: much, nothing, long names, too large."""
    found = report()
    one, row = found.collectives[0], found.holdings.rows[0]
    long = "state['" + "a_module_of_a_long_name/" * 9 + "']"
    many = tuple(one._replace(bytes=2**k, source=f"{long}:{k}") for k in range(40))
    held = found.holdings._replace(rows=(row._replace(path=long), *found.holdings.rows))
    return {
        "plain": page.html(found),
        "many": page.html(found._replace(collectives=many, holdings=held, notes=(long,))),
        "nothing": page.html(bare()),
        "too large": page.html(found._replace(memory_limit=found.memory.total // 2, fits=False)),
        "untimed": page.html(found._replace(spans=(), step_us=None, exposed_us=None, mfu=None)),
    }


LOOK = """
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, room = page.documentElement.clientWidth;
    const color = frame.contentWindow.getComputedStyle(page.body).backgroundColor;
    const widest = page.documentElement.scrollWidth;
    const live = "live" in page.querySelector(".jdp").dataset;
    found[frame.title] = { room, widest, color, live };
  }
  document.body.innerHTML = `<pre>${JSON.stringify(found)}</pre>`;
"""


def looked_at(pages, tmp_path, *options):
    """How wide and how bright pages are, in a window and on a phone; all in one browser."""
    frames = "".join(
        f'<iframe title="{name} {width}" width="{width}" height="900" style="border:0" '
        f'srcdoc="{html_format.escape(text)}"></iframe>'
        for name, text in pages.items()
        for width in (1280, 420)
    )
    text = f"<!doctype html><body>{frames}<script>onload = () => {{{LOOK}}}</script></body>"
    dom = see(text, tmp_path, "--dump-dom", *options)
    return json.loads(html_format.unescape(re.search(r"<pre>(.*?)</pre>", dom).group(1)))


DARK = "--blink-settings=preferredColorScheme=0"


@pytest.mark.parametrize(
    ("scheme", "color", "options"),
    [("light", "rgb(255, 255, 255)", []), ("dark", "rgb(21, 24, 27)", [DARK])],
)
def test_nothing_runs_over_the_edge_in_light_and_dark(tmp_path, scheme, color, options):
    found = looked_at(pages(), tmp_path, *options)
    assert len(found) == 10
    for name, seen in found.items():
        assert seen["widest"] <= seen["room"], name
        assert seen["color"] == color, (name, scheme)
        assert seen["live"], name


def test_it_is_drawn(tmp_path):
    picture = tmp_path / "page.png"
    size = ["--hide-scrollbars", "--window-size=1280,900"]
    see(page.html(report()), tmp_path, *size, f"--screenshot={picture}")
    image = pytest.importorskip("matplotlib.image").imread(picture)[..., :3]
    assert float(image[:20].mean()) > 0.9  # the margin above the title
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


def bare():
    """A report of a program that the compiler gave up on."""
    return report()._replace(
        collectives=(), spans=(), step_us=None, exposed_us=None, sent_us=None, mfu=None,
        memory=None, memory_limit=None, fits=False, notes=("a note",),
    )  # fmt: skip


def test_a_report_of_no_program_says_so(tmp_path):
    seen = words(see(page.html(bare()), tmp_path, "--dump-dom"))
    for text in ("there is no program", "gave up", "does not fit", "at the least", "a note"):
        assert text in seen
    assert "Nothing is sent" not in seen


def test_one_cpu_device_is_drawn(tmp_path):
    mesh, tx = jdp.make_mesh(num_devices=1), optax.chain(jdp.all_reduce(), optax.sgd(0.1))
    step = jdp.train_step(lambda p, x: jnp.mean((x @ p) ** 2), tx, mesh)
    state = jdp.init_state(jax.ShapeDtypeStruct((8, 8), jnp.float32), tx, mesh)
    found = jdp.explain(step, state, jax.ShapeDtypeStruct((4, 8), jnp.float32), cache=False)
    seen = words(see(page.html(found), tmp_path, "--dump-dom"))
    for text in (found.where, "models no times", "nothing has to be sent"):
        assert text in seen
    assert "Nothing is sent." in page.html(found._replace(collectives=()))


def test_what_does_not_fit_runs_over_the_mark():
    found = report()
    text = page.html(found._replace(memory_limit=found.memory.total // 2, fits=False))
    left = float(re.search(r'class="over" style="left:([\d.]+)%', text).group(1))
    assert left == pytest.approx(50, abs=0.1)
    assert "does not fit in" in words(text)


def test_what_is_alike_stands_in_one_row():
    found = report("zero1")
    one = found.collectives[0]._replace(us=3.0, exposed_us=1.0, times=2)
    rows = (one, one._replace(name="other"), one._replace(bytes=one.bytes + 1))
    spans = tuple(Span("communication", "x", 10.0 * k, 10.0 * k + 9, k) for k in range(3))
    text = page.html(found._replace(collectives=rows, spans=spans))
    table = text.split("<h2>Communication")[1].split("<h2>")[0]
    assert [int(x) for x in re.findall(r'<tr[^>]* data-row="(\d)"', table)] == [0, 1]
    assert '<td class="number">4</td>' in table  # runs of both
    lane = text.split('class="lane communication"')[1].split('class="ticks"')[0]
    assert [int(x) for x in re.findall(r'data-row="(\d)"', lane)] == [0, 0, 1]


def test_saved_and_in_a_notebook_it_is_the_same_page(tmp_path):
    found = report()
    found.save_html(tmp_path / "saved.html")
    assert found._repr_html_() in (tmp_path / "saved.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0%"), (2e-16, "0%"), (0.0041, "0.41%"), (0.0712, "7.1%"), (0.5, "50%"), (1, "100%")],
)
def test_shares_in_words(share, text):
    assert page_parts.percent(share) == text


def test_importing_jdp_imports_nothing_that_draws():
    code = "import sys, jdp; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in ("page", "page_answers", "page_parts", "tables", "planned", "diagnosis", "alike"):
        assert f"jdp.{name}" not in loaded
