"""The code in the documentation runs, and says what it claims."""

import json
import os
import re
import signal

import jax
import numpy as np
import pytest
from cluster import ROOT

import jdp

pytestmark = pytest.mark.alternate


def _run(name):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.S)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, name, "exec"), names)
    return names


def test_readme_example_learns():
    names = _run("README.md")
    np.testing.assert_allclose(names["state"].params["w"], [1, 2, 3], atol=1e-3)


def test_every_pitfall_is_as_described():
    assert "refuses" in _run("PITFALLS.md")


def test_the_guide_to_memory(capsys):
    """Its code runs, every stage says what it holds, and the last ones hold less."""
    names = _run("docs/memory.md")
    printed = capsys.readouterr().out
    assert printed.count("temporaries:") == 4
    held = [names["jdp"].holdings(names[name]).total for name in ("state", "moved")]
    assert 0 < held[1] < held[0]


def test_the_guide_to_sending_less():
    """Its code runs, and everything that sends less still learns."""
    names = _run("docs/sending.md")
    assert len(names["losses"]) == 12
    start = float(names["loss_fn"](names["params"], names["batch"]))
    assert all(loss < 0.8 * start for loss in names["losses"].values()), names["losses"]


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_readme_commands_exist(command):
    target = command.split()[1]
    assert f"    {command} " in (ROOT / "README.md").read_text()
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()


def test_the_guide_to_explaining(tmp_path, monkeypatch):
    """Its code runs: a page is written, and the contract finds the careless line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = _run("docs/explain.md")
    assert "Who holds what" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.search(r"all-gather .*explain\.md:11\) is inside a loop", names["broken"])


def test_the_guide_to_data(tmp_path, monkeypatch):
    """Its code runs: the run goes on elsewhere, and every example is seen once an epoch."""
    monkeypatch.chdir(tmp_path)
    names = _run("docs/data.md")
    assert names["again"].step == 30
    assert float(names["metrics"]["loss"]) < np.log(64)


def test_the_guide_to_checkpoints(tmp_path, monkeypatch, capsys):
    """Its code runs, resumes to the bit, and prints the difference that it shows."""
    monkeypatch.chdir(tmp_path)
    _run("docs/checkpoints.md")
    said = " ".join(capsys.readouterr().out.replace(str(tmp_path) + "/", "").split())
    text = (ROOT / "docs/checkpoints.md").read_text()
    shown = text[text.index("    jdp.Checkpoints: step 6") : text.index("| a file was cut")]
    assert " ".join(shown.split("\n\n")[0].split()) == said


@pytest.fixture
def twenty_lines():
    """The program of the guide to long runs."""
    (block,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/long_runs.md").read_text(), flags=re.S
    )
    return block


def _ended(program, folder, monkeypatch, at=0, happens=None):
    """Its exit code (`None` after an error) and names, if something happens at a step."""
    log = jdp.JsonLines.__call__

    def disturbed(self, step, values):
        log(self, step, values)
        if step == at:
            happens()

    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(jdp.JsonLines, "__call__", disturbed)
    names = {}
    try:
        exec(compile(program, "long_runs.md", "exec"), names)
    except SystemExit as end:
        return end.code, names
    except ZeroDivisionError:
        return None, names
    finally:
        monkeypatch.undo()
    raise AssertionError("it did not end with a code")


def test_twenty_lines_train_resume_and_survive(tmp_path, monkeypatch, twenty_lines):
    assert sum(bool(line.strip()) for line in twenty_lines.splitlines()) <= 20
    ended = lambda *more: _ended(twenty_lines, *more)  # noqa: E731
    code, want = ended(tmp_path / "undisturbed", monkeypatch)
    assert code == 0
    folder = tmp_path / "disturbed"
    asked = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    assert ended(folder, monkeypatch, 130, lambda: 1 / 0)[0] is None
    assert ended(folder, monkeypatch, 210, asked)[0] == jdp.Stop.code
    code, got = ended(folder, monkeypatch)
    assert code == 0
    for ours, theirs in zip(*(jax.tree.leaves(x["state"]) for x in (got, want)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert got["batches"].state() == want["batches"].state()
    np.testing.assert_allclose(got["state"].params["w"], [1, 2, 3], atol=0.01)
    lines = (folder / "run/log.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert set(range(10, 301, 10)) <= set(steps)
