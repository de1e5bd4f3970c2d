"""Each example runs, learns, and agrees with its single-device version."""

import importlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.alternate

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
TINY = [
    "--model.width=16",
    "--model.layers=1",
    "--model.heads=2",
    "--model.context=16",
    "--learning-rate=0.01",
    "--warmup=5",
    "--evaluate-on=20",  # not a multiple of the batch: the last one is padded
    "--sample=20",
]


@pytest.fixture
def example(monkeypatch):
    """Imports an example by name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.fixture
def unused_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start():
    """Starts the main example; whatever it started is gone after the test."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            command(*arguments),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def command(*arguments):
    return [sys.executable, str(EXAMPLES / "train_gpt.py"), *TINY, *map(str, arguments)]


def environment():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return inherited | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}


def run(*arguments):
    result = subprocess.run(
        command(*arguments), env=environment(), capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def read(folder):
    return json.loads((folder / "run.json").read_text())


def check_files(folder):
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "<svg" in (folder / "loss.svg").read_text()
    assert len((folder / "sample.txt").read_text(encoding="utf-8")) > len("def ")


@pytest.mark.parametrize("name", ["flax_train_state", "nnx_model"])
def test_two_changed_lines_give_the_same_parameters(example, name):
    module = example(name)
    result = module.main(module.Config(steps=60))
    assert result["furthest"] < 1e-6
    assert result["first"] > 1
    assert result["last"] < 0.1


def test_a_dict_and_an_equinox_model_train_alike(example):
    module = example("equinox_or_dict")
    losses = module.main(module.Config(steps=40))
    assert losses["dict"][-1] < 0.2 * losses["dict"][0]
    if "equinox" not in losses:
        pytest.skip("Equinox is not installed")
    np.testing.assert_allclose(losses["equinox"], losses["dict"], rtol=1e-5)


def test_equinox_is_optional(example, monkeypatch, capsys):
    module = example("equinox_or_dict")
    monkeypatch.setitem(sys.modules, "equinox", None)  # importing it now fails
    assert [*module.main(module.Config(steps=1))] == ["dict"]
    assert "pip install equinox" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_named(example, monkeypatch, name):
    module = example("trackers")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"{name} is not installed: pip install {name}\."):
        module.main(module.Config(to=name))


def test_gpt_learns_and_reports(tmp_path):
    output = run("--steps=60", "--evaluate-every=40", "--out", tmp_path)
    result = read(tmp_path)
    assert len(result["losses"]) == 60
    assert abs(result["losses"][0] - np.log(256)) < 0.1  # it starts by guessing blindly
    assert [*result["held_out"]] == ["40", "60"]
    assert result["held_out"]["60"] < result["held_out"]["40"] < 4.5
    assert result["held_out"]["60"] < 3.7
    # E14: what the batch means is said, horovod/horovod#384
    assert "A step: 16 windows of 16 bytes = 8 devices x 1 microbatch(es) x 2 windows" in output
    assert "Learning rate up to 0.01" in output
    assert f"{result['held_out']['60']:.3f} nats per byte" in output
    assert (tmp_path / "sample.txt").read_text(encoding="utf-8") in output
    check_files(tmp_path)


@pytest.fixture(scope="module")
def eight_devices(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight")
    run("--steps=5", "--out", folder)
    return read(folder)


def check_same_curve(folder, expected):
    np.testing.assert_allclose(read(folder)["losses"], expected["losses"], rtol=1e-5)
    np.testing.assert_allclose(read(folder)["held_out"]["5"], expected["held_out"]["5"], rtol=1e-5)


def test_gpt_has_the_same_curve_on_one_device(tmp_path, eight_devices):
    run("--steps=5", "--devices=1", "--out", tmp_path)
    check_same_curve(tmp_path, eight_devices)


@pytest.mark.multiprocess
def test_gpt_has_the_same_curve_as_two_processes(tmp_path, eight_devices, unused_port, start):
    join = [f"--coordinator=localhost:{unused_port}", "--num-processes=2", "--devices=4"]
    join.append("--steps=5")
    processes = [start(*join, f"--process-id={i}", "--out", tmp_path / str(i)) for i in range(2)]
    outputs = [process.communicate(timeout=240) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    check_same_curve(tmp_path / "0", eight_devices)
    assert "held-out" in outputs[0][0]
    assert "held-out" not in outputs[1][0]  # only process 0 shows and writes
    assert not (tmp_path / "1").exists()


def test_ctrl_c_ends_gpt_with_what_it_has(tmp_path, start):
    process = start("--steps=100000", "--evaluate-every=10", "--out", tmp_path)
    assert any("held-out loss" in line for line in iter(process.stdout.readline, ""))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert 10 <= len(read(tmp_path)["losses"]) < 100000
    check_files(tmp_path)
