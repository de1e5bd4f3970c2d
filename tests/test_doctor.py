"""The doctor: injected truths are found, the run goes on, and bad input is told in a sentence."""

import io
import time

import cluster
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

import jdp
from jdp import diagnose
from jdp.diagnose import Diagnosis, DiagnosisError, doctor, doctor_machine
from jdp.hardware import Link
from jdp.links import KINDS
from jdp.machine import Machine, differences, unseen_hardware, wrong_versions

pytestmark = pytest.mark.alternate

WIDTH, ROWS = 64, 32
LINK = Link(1e9, 1e-5, "made up")


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return jdp.Mean.of(jnp.mean((hidden @ params["v"]) ** 2, axis=-1), batch["weight"])


def params():
    keys = jax.random.split(jax.random.key(0))
    shape = (WIDTH, WIDTH)
    return {n: jax.random.normal(k, shape) / 8 for n, k in zip("wv", keys, strict=True)}


def rows(count, size=ROWS):
    for number in range(count):
        x = np.random.default_rng(number).normal(size=(size, WIDTH)).astype(np.float32)
        yield {"x": x}


def make(loss_fn=loss, tx=None, **options):
    mesh = jdp.make_mesh()
    tx = optax.chain(jdp.all_reduce(), optax.adam(1e-2)) if tx is None else tx
    step = jdp.train_step(loss_fn, tx, mesh, **options)
    return mesh, step, jdp.init_state(params(), tx, mesh)


def test_the_run_goes_on_as_if_nobody_had_looked(monkeypatch):
    monkeypatch.setattr(diagnose, "pays", lambda *given, **named: ())
    mesh, step, state = make()
    found = doctor(step, state, jdp.feed(rows(40), mesh), steps=10, links=LINK)
    taken = 2 + 4 + 5 + 4 + 5
    assert (int(found.state.step), found.steps) == (taken, 10)
    _, again, plain = make()
    for batch in jdp.feed(rows(taken), mesh):
        plain, _ = again(plain, batch)
    for ours, theirs in zip(*map(jax.tree.leaves, (found.state, plain)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    # and further, in the same program as before
    state, _ = step(found.state, batch)
    assert int(state.step) == taken + 1
    assert "all-reduce" in step.lower(state, batch).compile().as_text()


def test_the_parts_add_up_and_are_told_in_text_and_json():
    mesh, step, state = make()
    found = doctor(step, state, jdp.feed(rows(30), mesh), steps=4, links=LINK)
    parts = found.compute_ms + found.communication_ms + found.input_ms + found.host_ms
    assert parts == pytest.approx(found.step_ms)
    assert [replica.replica for replica in found.replicas] == list(range(8))
    assert found.slowest in found.replicas
    assert (found.check.left, found.check.replaced > 0) == (0, True)
    assert Diagnosis.from_json(found.to_json()) == found._replace(state=None)
    text = str(found)
    for word in ("compute", "input", "Does it pay?", "take turns on the cores"):
        assert word in text
    assert "Slowest replica" not in text  # of replicas that share cores it says nothing
    assert "Slowest replica" in str(found._replace(shares_cores=False))
    assert repr(found) == text  # and no arrays
    console = Console(width=60, file=io.StringIO())
    console.print(found)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert any("does it pay" in line for line in lines)


def test_a_slow_loader_is_what_is_named_first():
    def slow():
        for batch in rows(40):
            time.sleep(0.06)
            yield batch

    mesh, step, state = make()
    found = doctor(step, state, jdp.feed(slow(), mesh), steps=10, check=False)
    assert found.input_ms > 0.5 * found.step_ms
    assert found.findings[0].what.startswith("input ")
    assert "jdp.feed(loader, mesh, prefetch=2)" in found.findings[0].change
    assert found.findings[0].gain_ms == pytest.approx(found.input_ms)


def test_a_collective_in_a_loop_is_found_with_its_line():
    def chatty(params, batch):
        def body(x, _):
            x = jnp.tanh(x @ params["w"])
            return x - jax.lax.pmean(x.mean(), "data"), None

        x = jax.lax.scan(body, batch["x"], length=5)[0]
        return jdp.Mean.of(jnp.mean((x @ params["v"]) ** 2, axis=-1), batch["weight"])

    mesh, step, state = make(chatty)
    found = doctor(step, state, jdp.feed(rows(9), mesh), steps=2, check=False)
    named = [one for one in found.findings if "in a loop, 5 times" in one.what]
    assert named
    assert "test_doctor.py:" in named[0].what
    assert "let jdp accumulate" in named[0].change


def test_compiling_again_is_found():
    mesh, step, state = make()
    batches = [*jdp.feed(rows(4), mesh), *jdp.feed(rows(2, size=48), mesh)]
    found = doctor(step, state, batches, steps=4, check=False)
    named = [one for one in found.findings if "compiled while steps were measured" in one.what]
    assert named
    assert "jdp.feed(pad=True)" in named[0].change
    # and is not where nothing is compiled
    found = doctor(step, found.state, batches[:4], steps=2, check=False)
    assert not [one for one in found.findings if "compiled" in one.what]


def test_batches_that_run_out_are_used_and_noted():
    mesh, step, state = make()
    found = doctor(step, state, jdp.feed(rows(5), mesh), steps=8, check=False)
    assert (found.steps, int(found.state.step)) == (3, 5)
    assert any("ran out after 5" in note for note in found.notes)
    assert any("No step was timed without a trace" in note for note in found.notes)


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_batches_lose_nothing(count):
    mesh, step, state = make()
    with pytest.raises(DiagnosisError, match=f"ran out after {count}, before") as error:
        doctor(step, state, jdp.feed(rows(count), mesh))
    assert int(error.value.state.step) == count
    assert np.isfinite(np.asarray(error.value.state.params["w"])).all()


def test_no_batches_leave_the_state_as_it_was():
    _, step, state = make()
    with pytest.raises(ValueError, match="got no batches, so there is nothing to measure"):
        doctor(step, state, [])
    assert int(state.step) == 0
    assert not state.params["w"].is_deleted()


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_loader_that_fails_loses_nothing(after):
    def breaks():
        yield from rows(after)
        raise OSError("disk gone")

    mesh, step, state = make()
    with pytest.raises(DiagnosisError, match="OSError: disk gone") as error:
        doctor(step, state, jdp.feed(breaks(), mesh), check=False)
    assert isinstance(error.value.__cause__, OSError)
    assert int(error.value.state.step) == after
    assert f"after {after} batches" in str(error.value)
    # no trace is left under way
    found = doctor(step, error.value.state, jdp.feed(rows(4), mesh), steps=1, check=False)
    assert int(found.state.step) == after + 3


def test_a_step_that_fails_gives_the_state_back():
    mesh, step, state = make()
    good = [*jdp.feed(rows(1), mesh)]
    with pytest.raises(DiagnosisError, match=r"Step 2 failed.*is this error's `state`") as error:
        doctor(step, state, [*good, {"x": good[0]["x"]}])  # no weight
    assert int(error.value.state.step) == 1
    step(error.value.state, good[0])
    with pytest.raises(DiagnosisError, match="was consumed, by this step or before"):
        doctor(step, error.value.state, good)


def test_ctrl_c_keeps_the_state():
    def interrupted():
        yield from rows(3)
        raise KeyboardInterrupt

    mesh, step, state = make()
    with pytest.raises(KeyboardInterrupt) as error:
        doctor(step, state, jdp.feed(interrupted(), mesh), check=False)
    assert int(error.value.state.step) == 3
    assert "the state after 3 batches is this error's `state`" in error.value.__notes__[0]


def test_a_trace_that_is_under_way_loses_nothing(tmp_path):
    mesh, step, state = make()
    with (
        jax.profiler.trace(str(tmp_path)),
        pytest.raises(DiagnosisError, match="Only one trace can be recorded at a time") as error,
    ):
        doctor(step, state, jdp.feed(rows(4), mesh), steps=1, check=False)
    assert int(error.value.state.step) == 2


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    mesh, step, state = make()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be kept in folder=.*No step was run"):
        doctor(step, state, jdp.feed(rows(4), mesh), folder=tmp_path / "file")
    assert not state.params["w"].is_deleted()


def test_what_fails_after_the_measurement_is_left_out(monkeypatch):
    def broken(*given, **named):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(diagnose, "silence", broken)
    monkeypatch.setattr(diagnose, "pays", broken)
    mesh, step, state = make()
    found = doctor(step, state, jdp.feed(rows(5), mesh), steps=2)
    assert (found.check, found.payoffs) == (None, ())
    assert int(found.state.step) == 4
    assert any("check without communication was left out: ZeroDiv" in x for x in found.notes)
    assert any("What would pay was left out (ZeroDivisionError: oh)" in x for x in found.notes)


def test_one_device_is_asked_nothing_about_sending():
    mesh = jdp.make_mesh(num_devices=1)
    tx = optax.chain(jdp.all_reduce(), optax.adam(1e-2))
    step, state = jdp.train_step(loss, tx, mesh), jdp.init_state(params(), tx, mesh)
    found = doctor(step, state, jdp.feed(rows(4), mesh), steps=1)
    assert (found.check, found.payoffs) == (None, ())
    assert any("steps=1 leaves none" in note for note in found.notes)
    assert "communication without" not in str(found)


def test_what_is_no_step_and_what_is_one_batch_are_refused():
    _, step, state = make()
    with pytest.raises(
        TypeError, match=r"given a function where a step of jdp\.train_step belongs"
    ):
        doctor(lambda state, batch: state, state, [])
    with pytest.raises(TypeError, match="takes an iterable of batches, but got one dict"):
        doctor(step, state, {"x": np.ones((8, 2))})
    with pytest.raises(TypeError, match="but got one int"):
        doctor(step, state, 3)
    for wrong in (0, 2.0, True):
        with pytest.raises(ValueError, match="it is the number of steps to measure"):
            doctor(step, state, [], steps=wrong)


def test_a_check_for_which_there_is_no_memory_is_left_out(monkeypatch):
    def full(state):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(diagnose, "_copied", full)
    monkeypatch.setattr(diagnose, "pays", lambda *given, **named: ())
    mesh, step, state = make()
    found = doctor(step, state, jdp.feed(rows(5), mesh), steps=2, links=LINK)
    assert found.check is None
    assert any("there is no memory for a second state" in note for note in found.notes)


def test_waiting_for_slower_devices_is_nothing_that_sending_less_could_spare(monkeypatch):
    given = {}
    monkeypatch.setattr(diagnose, "pays", lambda *_, **named: given.update(named) or ())
    mesh, step, state = make()
    found = doctor(step, state, jdp.feed(rows(5), mesh), steps=2)
    late = found._replace(step_ms=100.0, communication_ms=50.0, waiting_ms=30.0, check=None)
    diagnose._with_payoffs(late, diagnose.Run(step, found.state, []), None)
    assert (given["exposed_seconds"], given["off"]) == (pytest.approx(0.020), 0)
    # between two figures the mean, and what it may be off by
    checked = late._replace(check=found.check._replace(added_ms=5.0))
    diagnose._with_payoffs(checked, diagnose.Run(step, found.state, []), None)
    assert given["exposed_seconds"] == pytest.approx(0.0125)
    assert given["off"] == pytest.approx(0.6)  # 5 to 20


def _one_slow_process():
    import time

    import jax.numpy as jnp
    import numpy as np
    import optax

    import jdp
    from jdp import diagnose
    from jdp.links import measure

    diagnose.pays = lambda *given, **named: ()
    me, mesh = jax.process_index(), jdp.make_mesh()

    def wait(x):
        time.sleep(0.05 * me)
        return x

    def loss(params, batch):
        h = jnp.tanh(batch["x"] @ params["w"])
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        late = jax.pure_callback(wait, scalar, jax.lax.stop_gradient(h[0, 0]))
        return jdp.Mean.of(jnp.mean(h**2, axis=-1) + 0 * late, batch["weight"])

    tx = optax.chain(jdp.all_reduce(), optax.adam(1e-2))
    step = jdp.train_step(loss, tx, mesh)
    state = jdp.init_state({"w": np.ones((64, 64), np.float32) / 64}, tx, mesh)
    loader = ({"x": np.full((8, 64), 1.0 + i + 100 * me, np.float32)} for i in range(30))
    found = diagnose.doctor(step, state, jdp.feed(loader, mesh), steps=10)
    links = measure(mesh, sizes=(2**10, 2**16, 2**20), seconds=5)
    machine = diagnose.doctor_machine(links=False)
    return {
        "links": [[row.kind, list(row.sizes), list(row.seconds)] for row in links.rows],
        "machine": [machine.processes, list(machine.problems)],
        "replicas": [list(replica) for replica in found.replicas],
        "waits": [process.waiting_ms for process in found.processes],
        "step": found.step_ms,
        "findings": [finding.what for finding in found.findings],
        "state": int(found.state.step),
    }


@pytest.mark.multiprocess
def test_the_slow_one_of_two_processes_is_found_and_waiting_is_not_called_sending():
    one, other = (answer.value for answer in cluster.run(_one_slow_process, seconds=120))
    assert one["replicas"] == other["replicas"]
    (_, _, _, fast, _), (_, process, _, slow, _) = one["replicas"]
    assert process == 1
    assert slow - fast > 40  # of 50 ms that were injected; a sleep is never shorter
    assert one["waits"][0] > 0.5 * one["step"]
    assert one["waits"][1] == 0
    for said in (one, other):
        assert any(what.startswith("replica 1 computes") for what in said["findings"])
        assert not any(what.startswith("communication") for what in said["findings"])
        assert said["state"] == 20
        assert said["machine"] == [2, []]
    # links are measured together: both give the same times
    assert one["links"] == other["links"]
    assert [row[0] for row in one["links"]] == list(KINDS)


def test_the_machine_is_examined_and_read_back():
    found = doctor_machine(seconds=0)
    assert found.complete
    assert (found.platform, len(found.devices), found.mesh) == ("cpu", 8, {"data": 8})
    assert found.versions["jax"] == jax.__version__
    assert {row.kind for row in found.links.rows} == {
        "all-reduce", "all-gather", "reduce-scatter", "all-to-all"
    }  # fmt: skip
    assert Machine.from_json(found.to_json()) == found
    assert "Everything that is needed is here." in str(found)
    missing = found._replace(problems=("no jaxlib",))
    assert not missing.complete
    assert "PROBLEM: no jaxlib" in str(missing)
    console = Console(width=60, file=io.StringIO())
    console.print(found._replace(notes=("[bold]axis[/bold]",)))
    assert "[bold]axis[/bold]" in console.file.getvalue()
    assert "Everything that is needed is here." in console.file.getvalue()
    assert "Device(" not in console.file.getvalue()


def test_versions_that_do_not_belong_together_are_named():
    fine = dict.fromkeys(("jax", "jaxlib", "optax", "flax", "numpy"), "1.2.3")
    assert wrong_versions(fine, (3, 11)) == []
    assert wrong_versions(fine | {"jax-cuda12-plugin": "1.2.1"}, (3, 11)) == []
    (old,) = wrong_versions(fine, (3, 10))
    assert "Python 3.10 is too old" in old
    (lacks,) = wrong_versions({k: v for k, v in fine.items() if k != "optax"}, (3, 11))
    assert "pip install optax" in lacks
    for name in ("jaxlib", "jax-cuda12-plugin"):
        (differs,) = wrong_versions(fine | {name: "1.3.0"}, (3, 11))
        assert f"{name} 1.3.0 does not belong to jax 1.2.3" in differs


def test_hardware_that_jax_does_not_use_is_named(tmp_path):
    (tmp_path / "nvidia0").touch()
    nothing, there = str(tmp_path / "accel*"), str(tmp_path / "nvidia*")
    (problem,) = unseen_hardware("cpu", there, nothing)
    assert "has a GPU" in problem
    assert "pip install 'jax[cuda12]'" in problem
    assert unseen_hardware("gpu", there, nothing) == []
    assert unseen_hardware("cpu", nothing, nothing) == []


def test_processes_that_differ_are_named():
    same = {"jax": "1", "devices": "4 x cpu"}
    assert differences({0: same, 1: same}) == []
    (problem,) = differences({0: same, 1: same | {"devices": "8 x cpu"}})
    assert "devices differs between processes (process 0: 4 x cpu, process 1: 8 x cpu)" in problem
    (problem,) = differences({0: same, 1: {"devices": "4 x cpu"}})
    assert "process 1: nothing" in problem


def test_wrong_sums_and_links_that_fail_are_problems(monkeypatch):
    from jdp import machine

    monkeypatch.setattr(machine, "_wrong_sums", lambda mesh: ["sums are wrong"])
    assert doctor_machine(seconds=0).problems == ("sums are wrong",)

    def broken(*args, **kwargs):
        raise RuntimeError("link down")

    monkeypatch.undo()
    monkeypatch.setattr(machine, "measure", broken)
    assert doctor_machine().problems == ("Links could not be measured: link down",)
