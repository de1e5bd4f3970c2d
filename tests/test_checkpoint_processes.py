"""Checkpoints of several processes: saved together, restored by fewer or more, failing alike."""

import json
import re

import cluster
import jax
import pytest
import test_checkpoint as one

import jdp

pytestmark = pytest.mark.multiprocess


def _run():
    import errno
    import os
    import pathlib
    import time
    import warnings

    import test_checkpoint as one

    import jdp
    from jdp import archive

    me, folder = jax.process_index(), pathlib.Path(os.environ["FOLDER"])
    said = {}

    # saved by one process, restored by two, saved by two
    state, data = jdp.Checkpoints(folder / "one").restore(one.like("zero3", 4))
    whole = jdp.restage(state, one.like("dp", 4))
    said["bits"] = [[list(s), d, b.hex()] for s, d, b in one.bits(whole)]
    said["data"] = data
    with jdp.Checkpoints(folder / "two", every_minutes=0.001) as checkpoints:
        time.sleep(0.1 * (1 - me))
        said["due"] = [checkpoints.save(state, data=data, force=force) for force in (False, True)]
        checkpoints.wait()
        said["own step"] = checkpoints.save(state, data=data, force=True)

    # E10: one process does not see the folder
    seen = folder / "two" if me == 0 else folder / "elsewhere"
    blind = jdp.Checkpoints(seen)
    said["steps"] = blind.steps()
    said["latest"] = blind.latest()

    def failure(fn, *args, **options):
        try:
            fn(*args, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    later = state._replace(step=state.step + 1)
    with jdp.Checkpoints(folder / "two") as checkpoints:
        checkpoints.restore(state)
        said["positions"] = failure(checkpoints.save, later, data={"step": me})
        write = archive.write

        def full(*args):
            done = write(*args)

            def fail():
                done()
                raise OSError(errno.ENOSPC, "No space left on device")

            return fail if me == 1 else done

        archive.write = full
        checkpoints.save(later)
        said["full"] = failure(checkpoints.wait)
        archive.write = write
        said["steps after"] = checkpoints.steps()
        said["saved after"] = checkpoints.save(later)
    said["typo"] = failure(jdp.Checkpoints(folder / "typo").restore, state)

    # one process cannot write, or read: not before Orbax, which has barriers, but within it
    import resource

    import numpy as np
    import orbax.checkpoint as ocp

    mesh = jdp.make_mesh()
    half = np.random.default_rng(me).normal(size=(2, 100_000)).astype(np.float32)
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    big = {"x": jax.make_array_from_process_local_data(over, half)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with jdp.Checkpoints(folder / "big") as checkpoints:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if me == 0 else 50_000, hard))
        checkpoints.save(big, step=1)
        said["large"] = failure(checkpoints.wait)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        said["saved large"] = checkpoints.save(big, step=1)
        checkpoints.wait()
        restore = ocp.PyTreeCheckpointHandler.restore
        if me == 1:
            ocp.PyTreeCheckpointHandler.restore = lambda *args, **options: 1 / 0
        said["unread"] = failure(checkpoints.restore, big)
        ocp.PyTreeCheckpointHandler.restore = restore
        found = checkpoints.restore(big)[0]["x"].addressable_data(1)
        said["read"] = bool((np.asarray(found) == half[1:]).all())

    # a file that only process 1 finds damaged
    check = jdp.Checkpoints(folder / "two")
    if me == 1:
        sound = check._folder.check

        def damaged(step, files):
            sound(step, files)
            if step == 4:
                raise ValueError("its file arrays/d/0 was changed")

        check._folder.check = damaged
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said["went back"] = int(check.restore(state)[0].step)
    said["warned"] = [str(w.message) for w in caught if "jdp.Checkpoints" in str(w.message)]
    return said


def test_e10_two_processes_and_one(tmp_path):
    """E10 google/orbax#3181: the same answer, and the same error, on every process."""
    with jdp.Checkpoints(tmp_path / "one") as checkpoints:
        checkpoints.save(one.state_of("dp", 4), data={"epoch": 0, "step": 3})
    want = one.bits(one.state_of("dp", 4))
    both = cluster.run(_run, num_devices=2, env={"FOLDER": str(tmp_path)})
    printed = "".join(answer.output for answer in both)
    # errors are sentences; tensorstore may still print that a loop of asyncio has been closed
    assert not re.search(r'File ".*(orbax|/jdp/\w+\.py)', printed), printed
    answers = [answer.value for answer in both]
    for said in answers:
        assert [(tuple(s), d, bytes.fromhex(b)) for s, d, b in said["bits"]] == want
        assert said["data"] == {"epoch": 0, "step": 3}
        assert said["own step"] is False
        assert said["steps"] == [3]
        assert said["latest"] == 3
        assert "ValueError" in said["positions"]
        assert "another `data` on one process" in said["positions"]
        assert "the disk is full" in said["full"]
        assert said["full"].startswith("CheckpointError: jdp.Checkpoints could not save step 4")
        assert said["steps after"] == [3]
        assert said["saved after"] is True
        assert "could not save step 1" in said["large"]
        assert "Failed to write" in said["large"]
        assert "File too large" in said["large"]
        assert said["saved large"] is True
        assert "division by zero" in said["unread"]
        assert said["read"] is True
        assert said["typo"].startswith("FileNotFoundError: jdp.Checkpoints has nothing to restore")
        assert said["went back"] == 3
        assert len(said["warned"]) == 1
        assert "step 4 is not whole: its file arrays/d/0 was changed" in said["warned"][0]
    assert "the disk is full (on process 1);" in answers[0]["full"]
    assert answers[0]["due"] == answers[1]["due"]
    assert sum(answers[0]["due"]) == 1
    # and back: saved by two, restored by one
    checkpoints = jdp.Checkpoints(tmp_path / "two")
    assert checkpoints.manifest(3).made_by["processes"] == 2
    state, data = checkpoints.restore(one.like("zero1", 8), step=3)
    assert one.bits(state) == want
    assert data == {"epoch": 0, "step": 3}


def _killed():
    """Ended by the kernel in the middle of its third save."""
    import os
    import signal

    import numpy as np

    import jdp
    from jdp.folder import Folder

    commit = Folder.commit

    def end(self, manifest):
        if manifest.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        commit(self, manifest)

    Folder.commit = end
    with jdp.Checkpoints(os.environ["FOLDER"]) as checkpoints:
        for step in range(1, 4):
            checkpoints.save({"x": np.full(3, step, np.int32)}, step=step, data=step)


def test_a_process_that_is_killed_while_it_writes(tmp_path):
    """The last finished checkpoint is restored, and the folder is free again."""
    env = {"FOLDER": str(tmp_path)}
    (answer,) = cluster.run(_killed, num_processes=1, start=False, check=False, env=env)
    assert answer.returncode == -9, answer.output
    assert len(list(tmp_path.glob("step_*"))) == 3
    with jdp.Checkpoints(tmp_path) as checkpoints:
        state, data = checkpoints.restore({"x": jax.numpy.zeros(3, int)})
        assert (state["x"].tolist(), data) == ([2, 2, 2], 2)
        assert checkpoints.save({"x": 3 * state["x"]}, step=3)
    assert checkpoints.steps() == [1, 2, 3]
    assert json.loads((tmp_path / "writer.json").read_text())["pid"]
