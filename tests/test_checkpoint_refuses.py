"""Bad input to checkpoints: each a sentence, at once, and no checkpoint lost."""

import contextlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cluster import ROOT

import jdp

pytestmark = pytest.mark.alternate

PARAMS = {"a": jnp.ones((8, 3)), "b": jnp.zeros(3)}
ADAM = optax.adam(0.1)


def state_of(tx, params=PARAMS, count=8):
    mesh = jdp.make_mesh(num_devices=count)
    return jdp.init_state(params, optax.chain(jdp.all_reduce(), tx), mesh)


def at(state, step):
    return state._replace(step=state.step + step)


@pytest.fixture(scope="module")
def state():
    return state_of(ADAM)


@pytest.fixture
def folder(state, tmp_path):
    with jdp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at(state, 1))
    return tmp_path


def holds(folder, *steps):
    assert jdp.Checkpoints(folder).steps() == list(steps)
    return True


@contextlib.contextmanager
def disk(folder, size):
    """A small disk of its own."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk(state, tmp_path, asynchronous):
    noise = np.random.default_rng(0).normal(size=(200, 1000)).astype(np.float32)  # 0.8 MB
    match = r"could not save step 2 .*the disk is full; the last checkpoint is of step 1\. Free"
    folder = tmp_path / "disk" / "run"
    with disk(tmp_path / "disk", "2m"), jdp.Checkpoints(folder, asynchronous=asynchronous) as big:
        big.save({"x": noise}, step=1)
        big.wait()
        (tmp_path / "disk" / "others").write_bytes(b"x" * 600_000)
        with pytest.raises(jdp.CheckpointError, match=match):  # noqa: PT012  now or then
            big.save({"x": 2 * noise}, step=2)
            big.wait()
        assert holds(folder, 1)
        assert len(list(folder.glob("step_*"))) == 1  # no leftovers
        (tmp_path / "disk" / "others").unlink()
        assert big.save({"x": 2 * noise}, step=2)
        assert big.restore({"x": noise})[0]["x"][3, 4] == 2 * noise[3, 4]


def test_a_folder_that_may_only_be_read(state, tmp_path):
    with disk(tmp_path / "disk", "4m"):
        with jdp.Checkpoints(tmp_path / "disk") as checkpoints:
            checkpoints.save(at(state, 1))
            checkpoints.close()  # a disk with open files is not remounted
            remount = ["mount", "-o", "remount,ro", str(tmp_path / "disk")]
            subprocess.run(remount, check=True)
            with pytest.raises(jdp.CheckpointError, match=r"step 2 .*the file system is read-only"):
                checkpoints.save(at(state, 2))
            assert int(checkpoints.restore(state)[0].step) == 1
        with (
            pytest.raises(jdp.CheckpointError, match=r"step 3 .*the file system is read-only"),
            jdp.Checkpoints(tmp_path / "disk") as checkpoints,
        ):
            checkpoints.save(at(state, 3))


def test_a_folder_that_vanished(state, tmp_path):
    with jdp.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(at(state, 1))
        checkpoints.wait()
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        with pytest.raises(jdp.CheckpointError, match="the folder is gone, and the checkpoints in"):
            checkpoints.save(at(state, 2))
        assert not (tmp_path / "run").exists()  # nothing is begun where a disk is to be
        (tmp_path / "elsewhere").rename(tmp_path / "run")
        assert checkpoints.save(at(state, 2))
    assert holds(tmp_path / "run", 1, 2)


def test_a_folder_that_vanishes_during_a_write(state, tmp_path, monkeypatch):
    from jdp.folder import Folder

    commit = Folder.commit

    def late(self, manifest):
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        commit(self, manifest)

    with jdp.Checkpoints(tmp_path / "run") as checkpoints:
        monkeypatch.setattr(Folder, "commit", late)
        checkpoints.save(at(state, 1))
        with pytest.raises(jdp.CheckpointError, match="the folder is gone"):
            checkpoints.wait()


def test_nothing_to_restore(state, folder, tmp_path):
    missing = jdp.Checkpoints(tmp_path / "typo")
    assert missing.latest() is None
    assert missing.steps() == []
    with pytest.raises(FileNotFoundError, match=r"typo does not exist\. Look whether the path"):
        missing.restore(state)
    assert not (tmp_path / "typo").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty holds no finished checkpoint"):
        jdp.Checkpoints(tmp_path / "empty").restore(state)
    with pytest.raises(FileNotFoundError, match=r"holds no step 7, but 1\."):
        jdp.Checkpoints(folder).restore(state, step=7)


def test_a_path_that_is_a_file(state, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(jdp.CheckpointError, match=r"could not save step 0 .*(exist|Not a dir)"):
            jdp.Checkpoints(path).save(state)


def test_e11_another_optimizer_is_a_readable_difference(state, folder):
    """E11 google/orbax#487, #683: with the paths, and a way out."""
    longer = state_of(optax.chain(ADAM, optax.trace(0.9)))
    checkpoints = jdp.Checkpoints(folder)
    with pytest.raises(ValueError, match="of another model or optimizer") as raised:
        checkpoints.restore(longer)
    assert str(raised.value).splitlines()[1:-1] == [
        "  wanted, but not in the checkpoint:",
        "    .opt_state[1][1].trace['a'] float32 of shape (8, 3)",
        "    .opt_state[1][1].trace['b'] float32 of shape (3,)",
    ]
    assert 'restore(like, parts=("params",))' in str(raised.value)
    with pytest.raises(ValueError, match=r"in the checkpoint, but not wanted:\n(.|\n)*\.nu\['a'\]"):
        checkpoints.restore(state_of(optax.sgd(0.1, momentum=0.9)))
    # a link that keeps nothing changes nothing that is kept
    checkpoints.restore(state_of(optax.chain(optax.clip_by_global_norm(1.0), ADAM)))


def test_another_model(state, folder):
    match = r"\.params\['a'\]: saved float32 of shape \(8, 3\), wanted float32 of shape \(8, 4\)"
    other = state_of(ADAM, {"a": jnp.ones((8, 4)), "b": jnp.zeros(3)})
    with pytest.raises(ValueError, match=match):
        jdp.Checkpoints(folder).restore(other)
    # E07: Orbax casts without a word
    narrow = {"params": jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)}
    with pytest.raises(ValueError, match=r"wanted bfloat16 of shape \(8, 3\)"):
        jdp.Checkpoints(folder).restore(narrow, parts=("params",))
    renamed = state_of(ADAM, {"a": PARAMS["a"], "c": PARAMS["b"]})
    with pytest.raises(ValueError, match=r"not in the checkpoint:\n    .params\['c'\](.|\n)*'b'"):
        jdp.Checkpoints(folder).restore(renamed)
    many = state_of(ADAM, {f"{i}": jnp.zeros(1) for i in range(20)})
    with pytest.raises(ValueError, match="    and 52 more\n"):
        jdp.Checkpoints(folder).restore(many)
    with (
        pytest.raises(ValueError, match="than the state that is to be saved"),
        jdp.Checkpoints(folder) as checkpoints,
    ):
        checkpoints.save(at(other, 2))
    assert holds(folder, 1)
    keyed = state._replace(key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"\.key threefry2x32 random key of shape \(\)"):
        jdp.Checkpoints(folder).restore(keyed)


def test_a_fresh_run_in_the_folder_of_a_longer_one(state, folder):
    with jdp.Checkpoints(folder) as checkpoints:
        for step in (0, 1):
            with pytest.raises(ValueError, match="holds step 1 of another or a longer run"):
                checkpoints.save(at(state, step))
    assert holds(folder, 1)


def test_two_runs_in_one_folder(state, folder):
    with jdp.Checkpoints(folder) as checkpoints:
        checkpoints.save(at(state, 2))
        with pytest.raises(jdp.CheckpointError, match="written to by this process, by another"):
            jdp.Checkpoints(folder).save(at(state, 3))
        assert int(jdp.Checkpoints(folder).restore(state)[0].step) >= 1  # reading is free
        program = (
            "import sys, os, jax, jdp\n"
            "jdp.Checkpoints(sys.argv[1]).save({'x': jax.numpy.zeros(2)}, step=9)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(folder)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1
        assert "is being written to by process" in done.stderr
        assert "end the other" in done.stderr
    with jdp.Checkpoints(folder) as checkpoints:  # it was given up
        checkpoints.restore(state)
        assert checkpoints.save(at(state, 3))


def test_two_runs_where_files_cannot_be_locked(state, folder, monkeypatch):
    """On an object store the run that began last has the folder; the other is told."""
    first, second = jdp.Checkpoints(folder), jdp.Checkpoints(folder)
    first._folder.local = second._folder.local = False
    first.restore(state)
    second.restore(state)
    assert first.save(at(state, 2))
    first.wait()
    assert second.restore(state)[0].step == 2
    assert second.save(at(state, 3))
    second.close()
    first._keeper.own.add(3)
    assert first.save(at(state, 4))
    with pytest.raises(jdp.CheckpointError, match="is being written to by process"):
        first.close()
    assert holds(folder, 1, 2, 3)


def test_replicas_that_went_apart(state, folder):
    copies = [s.data + (s.device.id == 5) for s in state.params["b"].addressable_shards]
    b = jax.make_array_from_single_device_arrays((3,), state.params["b"].sharding, copies)
    apart = at(state, 2)._replace(params=dict(state.params, b=b))
    match = r"\.params\['b'\] on device 5 differs"
    with jdp.Checkpoints(folder) as checkpoints, pytest.raises(jdp.DriftError, match=match):
        checkpoints.save(apart)
    assert holds(folder, 1)
    with jdp.Checkpoints(folder, check=False) as checkpoints:
        assert checkpoints.save(apart)


@pytest.mark.parametrize("value", [jnp.nan, -jnp.inf])
def test_parameters_that_are_not_finite(state, folder, value):
    broken = at(state, 2)._replace(params=dict(state.params, b=state.params["b"].at[1].set(value)))
    match = r"the parameter \['b'\] holds NaN or infinity.*skip_nonfinite"
    with jdp.Checkpoints(folder) as checkpoints, pytest.raises(FloatingPointError, match=match):
        checkpoints.save(broken)
    assert holds(folder, 1)


def test_a_step_that_is_not_the_states(state, folder):
    with jdp.Checkpoints(folder) as checkpoints:
        with pytest.raises(ValueError, match="got step=1, but the state counts 2 steps"):
            checkpoints.save(at(state, 2), step=1)
        for step in (-1, 2.0, True):
            with pytest.raises(ValueError, match="steps are whole numbers from 0 on"):
                checkpoints.save(at(state, 2), step=step)
        with pytest.raises(ValueError, match=r"a dict, which counts no steps. Say which"):
            checkpoints.save({"x": jnp.zeros(2)})


def test_what_is_no_array(tmp_path):
    with pytest.raises(TypeError, match=r"\['name'\] is a str, and a checkpoint holds arrays"):
        jdp.Checkpoints(tmp_path).save({"name": "run 1"}, step=1)


@pytest.mark.parametrize("parts", ["params", ("weights",), ()])
def test_parts_that_are_none(state, folder, parts):
    with pytest.raises(ValueError, match=r"fields that both .* The checkpoint has \['opt_state', "):
        jdp.Checkpoints(folder).restore(state, parts=parts)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"every_steps": 0}, "every_steps=0; it must be a whole number, at least 1"),
        ({"every_steps": 2.5}, "every_steps=2.5"),
        ({"every_minutes": -1}, "every_minutes=-1; it must be more than 0"),
        ({"keep": 0}, "keep=0; it must be a whole number"),
        ({"best": "loss"}, "best='loss'; it is a metric's name and 'min' or 'max'"),
        ({"best": ("loss", "low")}, r"best=\('loss', 'low'\)"),
    ],
)
def test_arguments_that_cannot_be_meant(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        jdp.Checkpoints(tmp_path, **options)


def test_without_orbax(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"Orbax, which is not installed.*checkpoints\]"):
        jdp.Checkpoints(tmp_path)
