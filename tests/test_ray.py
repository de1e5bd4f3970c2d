"""The example on Ray, for real: a worker is killed, and the run ends with the same bits."""

import contextlib
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
from test_long_run import ROOT, STEPS, ended, restored, start, steps_of

NEEDED = ("ray", "pandas", "pyarrow", "pydantic", "fsspec")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(900),  # a minute alone, four beside other tests
    pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}: pip install 'ray[train]'"),
]


@pytest.fixture
def on_ray(tmp_path):
    """Starts the example; ends whatever Ray has started for it."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short: Ray's sockets lie there
        inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        env = {"RAY_TMPDIR": folder, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        env |= {"HOME": folder, "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
        env |= {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0", "RAY_TRAIN_METRICS_ENABLED": "0"}
        command = [sys.executable, str(ROOT / "examples" / "on_ray.py"), "--devices=1"]
        command += [f"--steps={STEPS}", "--save-every=20", f"--out={tmp_path}"]
        process = subprocess.Popen(
            command,
            env=inherited | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process, lambda: started_with(f"RAY_TMPDIR={folder}")
        finally:
            process.kill()
            for pid in started_with(f"RAY_TMPDIR={folder}"):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)
            process.communicate()


def started_with(variable):
    """The processes whose environment has it, and their commands."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in path.read_bytes().split(b"\0"):
                found[int(path.parent.name)] = path.with_name("cmdline").read_bytes()
        except OSError:  # it has ended, or is not ours
            pass
    return found


def test_a_worker_of_ray_is_killed_and_the_run_ends_with_the_same_bits(tmp_path, on_ray):
    process, left = on_ray
    printed = ""
    while not (found := re.search(r"pid=(\d+)\) world_rank=1", printed)):
        line = process.stdout.readline()
        assert line, printed
        printed += line
    while max(steps_of(tmp_path), default=0) < 60:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(int(found[1]), signal.SIGKILL)
    code, output = ended(process, 600)
    assert code == 0, output
    assert output.count("Started training worker group of size 2") == 1  # once more than before
    deadline = time.monotonic() + 20
    while names := left():
        assert time.monotonic() < deadline, names
        time.sleep(0.1)
    undisturbed = tmp_path / "undisturbed"  # one process: a sum of two has the same bits anywhere
    code, output = ended(start(undisturbed, more=["--devices=2"]))
    assert code == 0, output
    (got, here), (want, there) = restored(tmp_path), restored(undisturbed)
    assert here == there
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
