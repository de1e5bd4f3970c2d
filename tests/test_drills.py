"""Fault drills: whatever is done to a run, it ends with the bits of a run without faults.

The runs are real: `jdp launch`, gloo, Orbax, files; benchmarks/faulty.py is the program, and does
what goes wrong. Checked is that each fault happened and was told of, that nothing hung, that every
step is logged once, with the loss that it has without faults, that every example was seen once an
epoch, and the parameters' bits.
"""

import pathlib
import sys

import numpy as np
import pytest

import jdp

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import faulty  # noqa: E402
import soak  # noqa: E402
from faulty import Fault, Plan  # noqa: E402

pytestmark = [pytest.mark.alternate, pytest.mark.multiprocess, pytest.mark.timeout(900)]

SAVE_EVERY = 5
TWO = Plan(
    steps=125,
    save_every=SAVE_EVERY,
    faults=(
        Fault("kill", 1, 13),
        Fault("pause", 0, 18),
        Fault("full", 0, 19),
        Fault("readonly", 0, 27),
        Fault("callback", 0, 39),
        Fault("saving", 1, 45),
        Fault("vanished", 1, 48),
        Fault("pause", 0, 57),
        Fault("kill", 0, 68),
        Fault("loader", 1, 74),
        Fault("pause", 1, 77),
        Fault("sigterm", 1, 79),
        Fault("pause", 1, 87),
        Fault("damage", 0, 93),
        Fault("drift", 1, 97),
        Fault("stuck", 1, 109),
        Fault("leave", 0, 118),
    ),
)
FOUR = Plan(
    steps=105,
    save_every=SAVE_EVERY,
    faults=(
        Fault("kill", 2, 13),
        Fault("kill", 3, 13),
        Fault("pause", 3, 17),
        Fault("readonly", 2, 19),
        Fault("pause", 1, 33),
        Fault("exit", 1, 38),
        Fault("saving", 0, 45),
        Fault("vanished", 3, 48),
        Fault("limit", 1, 69),
        Fault("launcher", 2, 78),
        Fault("pause", 0, 82),
        Fault("full", 1, 83),
        Fault("freeze", 3, 99),
    ),
)


def drilled(plan, folder, processes, devices):
    """Runs it with and without the faults that can be put in here, and compares."""
    plan = plan._replace(faults=tuple(x for x in plan.faults if x.kind in soak.available()))
    calm = soak.survive(folder / "calm", plan._replace(faults=()), processes, devices, 200)
    assert calm.codes == [0], calm.output
    with soak.small_disk(folder / "run" / "disk"):
        run = soak.survive(folder / "run", plan, processes, devices, 600)
    assert run.codes[-1] == 0, run.output
    assert soak.missing(plan, run.output) == [], run.output
    assert soak.differences(folder / "run", folder / "calm") == []
    return run


def trained_once(folder, plan):
    """Every example was in one batch of each epoch; skipped were the steps with a NaN."""
    steps = soak.steps_of(folder)
    assert [step["step"] for step in steps] == list(range(1, plan.steps + 1))
    mesh = jdp.make_mesh(num_devices=4)
    rows = jdp.Batches(faulty.Examples(), mesh, batch=faulty.BATCH, seed=0).rows
    for step in steps:
        ids = rows(step["step"] - 1).astype(float)
        assert step["ids"] == pytest.approx(ids.mean(), rel=1e-6)
        assert step["squares"] == pytest.approx((ids**2).mean(), rel=1e-6)
    epochs = plan.steps // 5
    seen = np.concatenate([rows(number) for number in range(plan.steps)])
    assert np.bincount(seen).tolist() == [epochs] * faulty.EXAMPLES
    bad = [step["step"] for step in steps if step["loss"] is None]
    assert [faulty.BROKEN in rows(number - 1) for number in bad] == [True] * epochs
    with np.load(folder / "params.npz") as saved:
        assert saved["skipped"] == epochs
        assert all(np.isfinite(saved[name]).all() for name in saved)


def test_drills_of_two_processes(tmp_path):
    run = drilled(TWO, tmp_path, processes=2, devices=2)
    trained_once(tmp_path / "run", TWO)
    assert run.codes[:-1] == [85]


def test_drills_of_four_processes(tmp_path):
    run = drilled(FOUR, tmp_path, processes=4, devices=1)
    trained_once(tmp_path / "run", FOUR)
    assert run.codes[:-1] == [85, -9]


def test_there_are_thirty_faults_of_ten_kinds():
    faults = [*TWO.faults, *FOUR.faults]
    assert len(faults) >= 30
    assert len({fault.kind for fault in faults}) >= 10
    assert {fault.kind for fault in faults} == set(soak.SAYS)


def test_what_nobody_said_is_missed():
    plan = Plan(10, 5, (Fault("kill", 1, 3), Fault("exit", 0, 7), Fault("drift", 0, 9)))
    output = (
        "[1] fault 0: kill, process 1, step 3\n"
        "jdp launch: process 1 failed first, killed by SIGKILL, 2 s after the start.\n"
        "    fault 0: kill, process 1, step 3\n"
        "[0] fault 1: exit, process 0, step 7\n"
        "[1] jdp: process 1 vanished, last heard of in step 7: it was killed, or crashed."
    )
    first, second, third = soak.missing(plan, output)
    assert first.startswith("kill, process 1, step 3: nobody said 'vanished")
    assert second.startswith("exit, process 0, step 7: nobody said 'process 0 failed first")
    assert third == "drift, process 0, step 9: did not happen"


def test_a_soak_draws_its_faults_from_its_seed():
    config = soak.Config()
    faults = list(soak.drawn(config))
    assert faults == list(soak.drawn(config))
    assert faults != list(soak.drawn(soak.Config(seed=1)))
    assert [fault.step // config.every for fault in faults] == list(range(25))
