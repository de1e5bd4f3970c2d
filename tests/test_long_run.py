"""The example that survives: killed, stopped and moved, it ends where an undisturbed run ends."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest

import jdp

pytestmark = pytest.mark.alternate

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "long_run.py"
STEPS = 400
TX = jdp.zero1(optax.adam(3e-3))  # the example's

sys.path.append(str(SCRIPT.parent))
import long_run  # noqa: E402


def start(out, *, launch=(), more=()):
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    given = [f"--steps={STEPS}", "--save-every=20", f"--out={out}", *more]
    command = [*launch, "--", *given] if launch else [str(SCRIPT), *given]
    return subprocess.Popen(
        [sys.executable, *command],
        env=inherited | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process, seconds=120):
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, output


def steps_of(out):
    path = out / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def wait_for_step(process, out, step, seconds=60):
    deadline = time.monotonic() + seconds
    while max(steps_of(out), default=0) < step:
        assert process.poll() is None, ended(process)
        assert time.monotonic() < deadline, steps_of(out)
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    code, output = ended(start(out))
    assert code == 0, output
    return out


def restored(out):
    """What the last checkpoint holds, and its position in the data."""
    like = jdp.init_state(jax.eval_shape(long_run.initial), TX, jdp.make_mesh())
    with jdp.Checkpoints(out / "checkpoints") as checkpoints:
        assert checkpoints.latest() == STEPS
        state, position = checkpoints.restore(like)
    return jax.tree.leaves(jax.device_get(jdp.logical(state))), position


def test_killed_and_stopped_it_ends_with_the_same_bits(tmp_path, undisturbed):
    process = start(tmp_path)
    wait_for_step(process, tmp_path, 40)
    process.send_signal(signal.SIGKILL)
    assert ended(process)[0] == -signal.SIGKILL
    process = start(tmp_path)
    wait_for_step(process, tmp_path, 70)
    process.send_signal(signal.SIGTERM)
    code, output = ended(process)
    assert code == jdp.Stop.code
    assert "got SIGTERM" in output
    code, output = ended(start(tmp_path))
    assert code == 0, output
    steps = steps_of(tmp_path)
    assert steps == sorted(set(steps))
    assert set(steps_of(undisturbed)) <= set(steps)  # the one that it stopped after is there, too
    (got, here), (want, there) = restored(tmp_path), restored(undisturbed)
    assert here == there
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.multiprocess
def test_it_goes_on_as_two_processes(tmp_path, undisturbed):
    process = start(tmp_path)
    wait_for_step(process, tmp_path, 340)
    process.kill()
    ended(process)
    launch = ["-m", "jdp", "launch", "-n", "2", "--devices", "4", str(SCRIPT)]
    code, output = ended(start(tmp_path, launch=launch, more=["--devices=None"]))
    assert code == 0, output
    (got, here), (want, there) = restored(tmp_path), restored(undisturbed)
    assert here == there
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)
