"""Which checkpoints there are: when they are made, which stay, and what happens to damaged ones."""

import json
import shutil
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp import archive, saving
from jdp.folder import Folder

pytestmark = pytest.mark.alternate


def tree(step):
    return {"w": jnp.full((64, 3), step, jnp.float32), "b": jnp.arange(4)}


def save(folder, *steps, **options):
    with jdp.Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            assert checkpoints.save(tree(step), step=step, data={"step": step})
    return checkpoints


def restored(checkpoints, **options):
    state, data = checkpoints.restore(tree(0), **options)
    assert np.all(np.asarray(state["w"]) == data["step"])
    return data["step"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with steps 1 and 2, to be copied."""
    folder = tmp_path_factory.mktemp("two")
    save(folder, 1, 2)
    return folder


@pytest.fixture
def folder(two, tmp_path):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    return tmp_path


def _largest(folder):
    arrays = folder / "step_0000000002" / "arrays"
    return max((x for x in arrays.rglob("*") if x.is_file()), key=lambda x: x.stat().st_size)


def _truncate(folder):
    path = _largest(folder)
    path.write_bytes(path.read_bytes()[:-7])
    return r"file arrays/.* has \d+ of \d+ bytes"


def _flip(folder):
    path = _largest(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    return r"file arrays/.* was changed: the checksum disagrees"


def _delete(folder):
    _largest(folder).unlink()
    return r"file arrays/.* cannot be read"


def _delete_all(folder):
    shutil.rmtree(folder / "step_0000000002" / "arrays")
    return r"file arrays/.* cannot be read"


def _cut_manifest(folder):
    path = folder / "step_0000000002" / "manifest.json"
    path.write_text(path.read_text()[:200])
    return "manifest cannot be read"


def _edit_manifest(folder):
    path = folder / "step_0000000002" / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    return "manifest was changed"


def _other_manifest(folder):
    other = folder / "step_0000000001" / "manifest.json"
    shutil.copy(other, folder / "step_0000000002" / "manifest.json")
    return "manifest is of step 1"


def _later_format(folder):
    path = folder / "step_0000000002" / "manifest.json"
    body = json.loads(path.read_text())
    del body["seal"]
    body["format"] = 99
    path.write_text(json.dumps(body | {"seal": saving_seal(body)}))
    return "of format 99, which this version of jdp does not know"


def saving_seal(body):
    from jdp.manifest import _seal

    return _seal(body)


DAMAGE = [
    _truncate,
    _flip,
    _delete,
    _delete_all,
    _cut_manifest,
    _edit_manifest,
    _other_manifest,
    _later_format,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_noticed_and_the_last_good_one_used(folder, damage):
    match = damage(folder)
    checkpoints = jdp.Checkpoints(folder)
    with pytest.raises(jdp.CheckpointError, match=rf"step 2 .*{match}.* There are also 1;"):
        checkpoints.restore(tree(0), step=2)
    with pytest.warns(UserWarning, match=rf"step 2 .*{match}.* Went back to step 1, the last good"):
        assert restored(checkpoints) == 1
    with checkpoints:  # what is trained again takes the place of what was damaged
        assert checkpoints.save(tree(2), step=2, data={"step": 2})
    assert restored(jdp.Checkpoints(folder)) == 2


def test_where_all_are_damaged_nothing_is_restored(folder):
    _truncate(folder)
    shutil.rmtree(folder / "step_0000000001" / "arrays" / "d")
    with pytest.raises(jdp.CheckpointError, match=r"step 2 .*step 1 .*No other one is left"):
        jdp.Checkpoints(folder).restore(tree(0))


def test_a_beginning_is_no_checkpoint_and_is_removed_later(folder):
    """What a process leaves that is ended while it writes: no manifest, or part of one."""
    begun = folder / "step_0000000003"
    shutil.copytree(folder / "step_0000000002", begun)
    (begun / "manifest.json").rename(begun / "manifest.part")
    checkpoints = jdp.Checkpoints(folder)
    assert checkpoints.steps() == [1, 2]
    assert restored(checkpoints) == 2
    assert begun.exists()  # reading removes nothing
    save(folder, 4)
    assert not begun.exists()
    shutil.copytree(folder / "step_0000000004", folder / "step_0000000005")
    (folder / "step_0000000005" / "manifest.json").unlink()
    save(folder, 5)  # the same step, trained again
    assert restored(checkpoints) == 5


def test_the_newest_and_the_best_stay(tmp_path):
    losses = {1: float("nan"), 2: 5.0, 3: 1.0, 4: 2.0, 5: 3.0, 6: 4.0}
    for direction, stay in (("min", [3, 5, 6]), ("max", [2, 5, 6])):
        with jdp.Checkpoints(tmp_path / direction, keep=2, best=("loss", direction)) as checkpoints:
            for step, loss in losses.items():
                checkpoints.save(tree(step), step=step, metrics={"loss": loss})
            checkpoints.wait()
            assert checkpoints.steps() == stay
            assert checkpoints.best() == stay[0]
            assert checkpoints.manifest(stay[0]).metrics == {"loss": losses[stay[0]]}
        assert len(list((tmp_path / direction).glob("step_*"))) == 3
    assert save(tmp_path / "all", *range(1, 6), keep=None).steps() == [1, 2, 3, 4, 5]


def test_a_checkpoint_without_the_metric_is_not_the_best(tmp_path):
    with jdp.Checkpoints(tmp_path, best=("loss", "min")) as checkpoints:
        checkpoints.save(tree(1), step=1)
        assert checkpoints.best() is None
        with pytest.raises(ValueError, match=r"keeps the best by 'loss', and save was given \['ac"):
            checkpoints.save(tree(2), step=2, metrics={"accuracy": 0.5})


def _when(tmp_path, steps, **options):
    with jdp.Checkpoints(tmp_path, keep=None, **options) as checkpoints:
        return [step for step in steps if checkpoints.save(tree(step), step=step)]


def test_every_so_many_steps(tmp_path):
    assert _when(tmp_path / "1", range(1, 8), every_steps=3) == [3, 6]
    # calls that take four steps each, as scans do: where a multiple was passed
    assert _when(tmp_path / "2", range(4, 25, 4), every_steps=10) == [12, 20]
    assert _when(tmp_path / "3", [5, 5, 6]) == [5, 6]  # a step is saved once
    # a run that goes on counts from where it was
    with jdp.Checkpoints(tmp_path / "1", every_steps=3) as checkpoints:
        checkpoints.restore(tree(0))
        assert not checkpoints.save(tree(8), step=8)
        assert checkpoints.save(tree(8), step=8, force=True)
        assert checkpoints.save(tree(9), step=9)


def test_every_so_many_minutes(tmp_path, monkeypatch):
    """A step takes one second; the clock is asked at ever nearer steps, not at each."""
    now, asked = [0.0], []

    def monotonic():
        asked.append(now[0])
        return now[0]

    monkeypatch.setattr(saving, "time", types.SimpleNamespace(monotonic=monotonic))
    saved = []
    with jdp.Checkpoints(tmp_path, every_minutes=1, keep=None) as checkpoints:
        for step in range(1, 200):
            now[0] = float(step)
            if checkpoints.save(tree(step), step=step):
                saved.append(step)
    assert saved == [60, 120, 180]
    assert len(asked) < 60


def test_e09_latest_means_finished(tmp_path, monkeypatch):
    """E09 google/orbax#605: latest_step() told of what was still being written."""
    go, commit = threading.Event(), Folder.commit

    def slow(self, manifest):
        assert go.wait(30)
        commit(self, manifest)

    with jdp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(tree(1), step=1)
        checkpoints.wait()
        monkeypatch.setattr(Folder, "commit", slow)
        checkpoints.save(tree(2), step=2)
        assert checkpoints.latest() == 1
        go.set()
        checkpoints.wait()
        assert checkpoints.latest() == 2


def test_e09_what_was_saved_may_be_overwritten(tmp_path, monkeypatch):
    """E09 keras-team/keras#23609: weights of a later step in the file. Here all is written late."""
    go, write = threading.Event(), archive.write

    def late(*args):
        done = write(*args)
        return lambda: go.wait(30) and done()

    monkeypatch.setattr(archive, "write", late)
    state = tree(1) | {"host": np.ones(3)}
    overwrite = jax.jit(lambda x: jax.tree.map(jnp.zeros_like, x), donate_argnums=0)
    with jdp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, step=1)
        overwrite({name: state[name] for name in ("w", "b")})
        state["host"][:] = 0
        go.set()
        again, _ = checkpoints.restore(tree(0) | {"host": np.zeros(3)})
    assert np.all(again["w"] == 1)
    assert again["host"].tolist() == [1, 1, 1]


def test_in_the_foreground(tmp_path):
    with jdp.Checkpoints(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(tree(1), step=1)
        assert jdp.Checkpoints(tmp_path).latest() == 1


def _fail(self, manifest):
    raise OSError(5, "Input/output error")


def test_e09_an_error_in_the_background_is_raised(tmp_path, monkeypatch, capsys):
    """E09 google/orbax#392, keras-team/keras#23609: by the next save, by close, and never lost."""
    save(tmp_path, 1)
    monkeypatch.setattr(Folder, "commit", _fail)
    match = r"could not save step 2 in .*Input/output error; the last checkpoint is of step 1\."
    checkpoints = jdp.Checkpoints(tmp_path, every_steps=1)
    assert checkpoints.save(tree(2), step=2)
    with pytest.raises(jdp.CheckpointError, match=match):
        checkpoints.save(tree(3), step=3)
    assert checkpoints.save(tree(2), step=2)  # tries again
    with pytest.raises(jdp.CheckpointError, match=match):
        checkpoints.close()
    with pytest.raises(ZeroDivisionError) as raised, jdp.Checkpoints(tmp_path) as checkpoints:
        1 / (checkpoints.save(tree(2), step=2) - 1)
    assert "could not save step 2" in raised.value.__notes__[0]
    checkpoints = jdp.Checkpoints(tmp_path)
    checkpoints.save(tree(2), step=2)
    checkpoints._thread.join()
    checkpoints._folder.unlock()
    checkpoints._last_words()  # nobody closes it: what happens as the interpreter ends
    assert "could not save step 2" in capsys.readouterr().err
    monkeypatch.undo()
    save(tmp_path, 2)
    assert [x.name for x in sorted(tmp_path.glob("step_*"))] == [
        "step_0000000001",
        "step_0000000002",
    ]


def test_a_save_that_failed_is_tried_again_before_its_period_is_over(tmp_path, monkeypatch):
    with jdp.Checkpoints(tmp_path, every_minutes=1000) as checkpoints:
        assert not checkpoints.save(tree(1), step=1)
        monkeypatch.setattr(Folder, "commit", _fail)
        checkpoints.save(tree(2), step=2, force=True)
        with pytest.raises(jdp.CheckpointError):
            checkpoints.wait()
        monkeypatch.undo()
        assert checkpoints.save(tree(3), step=3)
        assert not checkpoints.due(4)


def test_going_back_on_purpose(tmp_path):
    save(tmp_path, 1, 2, 3)
    with jdp.Checkpoints(tmp_path) as checkpoints:
        assert restored(checkpoints, step=1) == 1
        for _ in range(2):
            with pytest.raises(ValueError, match=r"holds step 3 of .* longer run.*drop\(after=1\)"):
                checkpoints.save(tree(2), step=2)
        checkpoints.drop(after=1)
        assert checkpoints.save(tree(2), step=2, data={"step": 2})
    assert checkpoints.steps() == [1, 2]


def test_e01_the_position_is_part_of_the_checkpoint(tmp_path):
    class Batches:
        def state(self):
            return {"seed": 1, "epoch": 2, "step": 17}

    with jdp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(tree(1), step=1, data=Batches())
        assert checkpoints.restore(tree(0))[1] == {"seed": 1, "epoch": 2, "step": 17}
        with pytest.raises(TypeError, match="`data` that cannot be written as JSON"):
            checkpoints.save(tree(2), step=2, data={"rng": np.zeros(3)})
