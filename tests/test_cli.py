"""The command: what it says, where it says it, and the code it ends with."""

import json
import subprocess
import sys
import textwrap

import pytest

import jdp
from jdp import cli
from jdp.reporting import Report

pytestmark = pytest.mark.alternate

SCRIPT = """
    import jax.numpy as jnp, numpy as np, optax, sys, jdp

    print("the script says", sys.argv[1:])
    tx = optax.chain(jdp.all_reduce(), optax.sgd(0.01))
    step = jdp.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, jdp.make_mesh())
    state = jdp.init_state({"w": jnp.ones((256, 4))}, tx, jdp.make_mesh())
    for _ in range(20):
        state, _ = step(state, np.ones((8, 256), np.float32))
"""


KEYED = """
    import jax, jax.numpy as jnp, numpy as np, optax, jdp

    def loss_fn(params, batch, key, *, model_state):
        noise = jax.random.normal(key, batch.shape)
        loss = jnp.mean(((batch + noise) @ params["w"]) ** 2)
        return loss, None, {"seen": model_state["seen"] + 1}

    tx, mesh = optax.chain(jdp.all_reduce(), optax.sgd(0.01)), jdp.make_mesh()
    step = jdp.train_step(loss_fn, tx, mesh)
    params, seen = {"w": jnp.ones((256, 4))}, {"seen": jnp.zeros(())}
    state = jdp.init_state(params, tx, mesh, key=jax.random.key(0), model_state=seen)
    step(state, np.ones((8, 256), np.float32))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_explain_shows_tables(script, capsys):
    assert cli.main(["explain", str(script), "--", "--steps", "5"]) == cli.OK
    out = capsys.readouterr().out
    for part in ("the script says ['--steps', '5']", "all-reduce", "jdp.all_reduce", "parameters"):
        assert part in out


def test_with_json_nothing_else_is_on_standard_output(script, capsys):
    assert cli.main(["explain", str(script), "--json"]) == cli.OK
    captured = capsys.readouterr()
    assert [x.kind for x in Report.from_json(captured.out).collectives][-1] == "all-reduce"
    assert "the script says" in captured.err


def test_explain_writes_a_page(script, capsys, tmp_path):
    page = tmp_path / "page.html"
    assert cli.main(["explain", str(script), "--html", str(page)]) == cli.OK
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "page.html" in capsys.readouterr().err


def test_what_does_not_fit_is_an_answer_with_a_code_of_its_own(script, monkeypatch, capsys):
    found = cli.scripts.first_step(script)
    lacking = jdp.explain(found.step, found.state, found.batch, cache=False)._replace(fits=False)
    monkeypatch.setattr("jdp.report.explain", lambda *given, **more: lacking)
    assert cli.main(["explain", str(script)]) == cli.NO
    capsys.readouterr()


def test_plan_ranks_what_the_script_could_do(script, capsys):
    assert cli.main(["plan", str(script), "--compile-best", "1", "--json"]) == cli.OK
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["rows"][0]["source"] == "compiled"
    assert "Taken out of the script's transformation: all_reduce" in captured.err
    assert cli.main(["plan", str(script), "--compile-best", "1"]) == cli.OK
    assert "all_reduce" in capsys.readouterr().out


def test_plan_hands_key_and_model_state_on(script, capsys):
    script.write_text(textwrap.dedent(KEYED))
    assert cli.main(["plan", str(script), "--compile-best", "1"]) == cli.OK
    capsys.readouterr()


def test_a_plan_that_finds_nothing_ends_with_a_code_of_its_own(script, monkeypatch, capsys):
    none = jdp.Plan(**dict.fromkeys(jdp.Plan._fields, ()) | {"best": None})
    monkeypatch.setattr("jdp.planning.plan", lambda *given, **more: none)
    monkeypatch.setattr("jdp.cli._show", lambda *given: None)
    assert cli.main(["plan", str(script)]) == cli.NO
    capsys.readouterr()


def test_doctor_follows_a_script_for_some_steps(script, capsys):
    assert cli.main(["doctor", str(script), "--steps", "3", "--json"]) == cli.OK
    captured = capsys.readouterr()
    assert json.loads(captured.out)["steps"] == 3
    assert "the script says" in captured.err
    assert cli.main(["doctor", str(script), "--steps", "3"]) == cli.OK
    out = capsys.readouterr().out
    assert all(x in out for x in ("a step", "of 3", "compute"))


def test_doctor_alone_examines_the_machine(capsys):
    assert cli.main(["doctor", "--json"]) == cli.OK
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["jax"]
    assert found["links"]["axes"]["data"]["bytes_per_s"] > 0
    assert cli.main(["doctor", "--html", "x.html"]) == cli.WRONG
    assert "--html is for a script's diagnosis" in capsys.readouterr().err


def test_doctor_ends_with_3_where_something_is_missing(monkeypatch, capsys):
    found = jdp.doctor_machine(links=False)._replace(problems=("no GPU is seen",))
    monkeypatch.setattr("jdp.diagnose.doctor_machine", lambda: found)
    assert cli.main(["doctor"]) == cli.NO
    assert "no GPU is seen" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("x = 1", cli.WRONG, "ended without calling a training step"),
        ("raise RuntimeError('no data')", cli.FAILED, "RuntimeError: no data"),
        ("raise KeyboardInterrupt", cli.INTERRUPTED, "interrupted"),
    ],
)
@pytest.mark.parametrize("command", ["explain", "plan", "doctor"])
def test_a_script_that_cannot_be_used(script, command, text, code, message, capsys):
    script.write_text(text)
    assert cli.main([command, str(script)]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "plan"])
def test_a_target_that_does_not_exist_lists_those_that_do(script, command, capsys):
    assert cli.main([command, str(script), "--target", "b300:8"]) == cli.WRONG
    said = capsys.readouterr().err
    assert "b300" in said
    assert all(chip in said for chip in ("v5e", "v5p", "v6e", "h100", "h200", "a100"))


@pytest.mark.parametrize("given", [["nonsense"], ["explain"], ["explain", "x.py", "--stepz", "3"]])
def test_asking_wrongly_ends_with_2(given, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(given)
    assert caught.value.code == cli.WRONG
    assert "help" in capsys.readouterr().err


@pytest.mark.parametrize("given", [[], ["--help"], ["explain", "--help"], ["plan", "--help"]])
def test_help_teaches(given, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(given)
    assert caught.value.code == cli.OK
    said = capsys.readouterr().out
    assert (given or ["explain"])[0].removeprefix("--help") in said
    assert "--target" in said


def test_the_demo_learns_and_agrees_with_one_device(capsys):
    assert cli.main(["demo", "--json", "--steps", "40"]) == cli.OK
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] < found["first_loss"] - 1
    assert found["difference"] < 1e-5


def test_the_demo_runs_on_any_number_of_devices():
    command = [sys.executable, "-m", "jdp", "demo", "--devices", "3", "--steps", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["devices"] == 3


def test_the_module_runs_and_says_what_is_missing(tmp_path):
    (tmp_path / "tyro.py").write_text("raise ModuleNotFoundError('no tyro', name='tyro')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from jdp.__main__ import main; "
    done = subprocess.run(
        [sys.executable, "-c", code + "sys.exit(main())"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == cli.WRONG
    assert "pip install 'jdp-train[cli]'" in done.stderr
