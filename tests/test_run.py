"""The loop: which batches it draws, when it reads, what it logs, and when it ends."""

import json
import pathlib
import struct

import cluster
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import jdp

TX = optax.chain(jdp.all_reduce(), optax.sgd(1.0))
MESH = jdp.make_mesh()
STEP = jdp.train_step(lambda p, x: jnp.mean((p["w"] - x) ** 2), TX, MESH)


def state_of(w=0.0):
    return jdp.init_state({"w": jnp.full(3, w)}, TX, MESH)


def batches(count, seed=0):
    rows = np.random.default_rng(seed).normal(size=(count, 16, 3)).astype(np.float32)
    return list(0.1 * rows)


class Fake:
    """A step of given losses, which are 1 where nothing is given."""

    def __init__(self, losses=None):
        self.losses, self.number, self.seen = losses or {}, 0, []

    def __call__(self, state, batch):
        self.number += 1
        self.seen.append(f"step {self.number}")
        return state, {"loss": np.float32(self.losses.get(self.number, 1.0))}


def test_it_trains_as_one_device_does():
    params, _ = reference.train(
        lambda p, x: jnp.mean((p["w"] - x) ** 2), {"w": jnp.zeros(3)}, optax.sgd(1.0), batches(4)
    )
    state = jdp.run(STEP, state_of(), batches(4))
    reference.assert_close(state.params, params, 1e-6)
    assert int(state.step) == 4


def test_a_loss_is_read_once_the_next_step_is_under_way(monkeypatch):
    fake = Fake({1: 1.0, 2: 2.0, 3: 3.0})
    read = lambda x: fake.seen.append(f"read {x['loss']:.0f}") or x  # noqa: E731
    monkeypatch.setattr("jax.device_get", lambda x: read(x) if x else x)
    jdp.run(fake, None, range(3))
    assert fake.seen == ["step 1", "step 2", "read 1", "step 3", "read 2", "read 3"]


@pytest.mark.parametrize(
    ("more", "left"),
    [
        ({"steps": 3}, [3, 4, 5]),
        ({"stop": lambda step: step == 2}, [2, 3, 4, 5]),
        ({"steps": 6}, []),
        ({}, []),
    ],
)
def test_no_batch_is_drawn_that_is_not_trained_with(more, left):
    drawn = iter(range(6))
    jdp.run(Fake(), None, drawn, **more)
    assert list(drawn) == left


def test_a_run_that_is_taken_up_counts_on_and_ends_where_it_would_have(tmp_path):
    path, given = tmp_path / "logs" / "log.jsonl", batches(6)
    state = jdp.run(STEP, state_of(), given, steps=6, log=[jdp.JsonLines(path)], log_every=1)
    whole = [(x["step"], x["loss"]) for x in map(json.loads, path.read_text().splitlines())]
    assert [step for step, _ in whole] == [1, 2, 3, 4, 5, 6]
    # it died in step 5, while a line was being written, and goes on from the state after step 3
    with path.open("a") as file:
        file.write('{"step": 7, "lo')
    again = jdp.run(STEP, state_of(), given, steps=3)
    again = jdp.run(STEP, again, given[3:], steps=6, log=[jdp.JsonLines(path)], log_every=1)
    assert [(x["step"], x["loss"]) for x in map(json.loads, path.read_text().splitlines())] == whole
    np.testing.assert_array_equal(state.params["w"], again.params["w"])


def test_callbacks_come_after_their_steps_and_at_the_end_once():
    seen, logged = [], {}
    callbacks = [
        jdp.every(2, lambda state: seen.append(("two", int(state.step))) or {"two": state.step}),
        jdp.every(3, lambda state: seen.append(("three", int(state.step)))),
        jdp.every(4, lambda state: seen.append(("never", int(state.step))), at_end=False),
    ]
    log = lambda step, values: logged.update({step: set(values)})  # noqa: E731
    jdp.run(STEP, state_of(), batches(3), callbacks=callbacks, log=[log])
    assert seen == [("two", 2), ("three", 3), ("two", 3)]
    assert logged == {step: {"loss", "steps_per_s", "two"} for step in (2, 3)}


def test_every_so_many_steps_and_the_last_are_logged():
    logged = []
    log = lambda step, values: logged.append(step)  # noqa: E731
    jdp.run(Fake(), None, range(5), log=[log], log_every=2)
    assert logged == [2, 4, 5]


def test_only_numbers_are_logged():
    values = {"a": jnp.ones(()), "b": np.ones(3), "c": "text", "d": 2, "e": None}
    logged = []
    log = lambda step, values: logged.append(dict(values))  # noqa: E731
    jdp.run(Fake(), None, range(2), callbacks=[jdp.every(1, lambda state: values)], log=[log])
    assert [{k: v for k, v in x.items() if k in "abcde"} for x in logged] == [{"a": 1, "d": 2}] * 2


def test_a_loss_that_is_never_finite_ends_the_run():
    fake = Fake(dict.fromkeys((2, 4, 5, 6), np.nan))
    with pytest.raises(FloatingPointError, match="in 3 steps in a row, from step 4 on"):
        jdp.run(fake, None, range(9), most_nonfinite=3)
    assert jdp.run(Fake(fake.losses), None, range(9), most_nonfinite=None) is None


def test_it_ends_when_a_stop_says_so():
    seen = []
    with jdp.Stop() as stop:
        ask = jdp.every(3, lambda state: stop.request("enough"), at_end=False)
        fake = Fake()
        jdp.run(fake, None, range(9), stop=stop, callbacks=[ask, jdp.every(1, seen.append)])
    assert (fake.number, len(seen), stop.reason) == (3, 3, "process 0: enough")


def test_what_a_callback_returns_is_logged_if_it_has_names():
    logged = []
    log = lambda step, values: logged.append(set(values))  # noqa: E731
    jdp.run(Fake(), None, range(1), callbacks=[jdp.every(1, lambda state: True)], log=[log])
    assert logged == [{"loss", "steps_per_s"}]


def test_an_error_says_after_which_step_and_closes_the_logs(tmp_path):
    def broken():
        yield from range(3)
        raise OSError("no such file")

    path = tmp_path / "log.jsonl"
    with pytest.raises(OSError, match="no such file") as caught:
        jdp.run(Fake(), None, broken(), log=[log := jdp.JsonLines(path)], log_every=1)
    assert "after 3 steps" in caught.value.__notes__[0]
    assert log._file is None
    assert [json.loads(x)["step"] for x in path.read_text().splitlines()] == [1, 2]


def test_what_is_not_finite_is_null_in_json(tmp_path):
    log = jdp.JsonLines(tmp_path / "log.jsonl")
    log(1, {"loss": float("nan"), "norm": 2.0})
    log.close()
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 1, "loss": None, "norm": 2}


def records(path):
    """The records of an event file: length, checksum, data, checksum."""
    data = pathlib.Path(path).read_bytes()
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        yield data[12 : 12 + size]
        data = data[16 + size :]


def test_tensorboard_has_each_step(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    jdp.run(STEP, state_of(), batches(3), log=[jdp.TensorBoard(tmp_path)], log_every=1)
    (file,) = tmp_path.iterdir()
    events = [Event.FromString(x) for x in records(file)]
    steps = [e.step for e in events for v in e.summary.value if v.tag == "loss"]
    assert steps == [1, 2, 3]
    assert any(e.session_log.status == 1 for e in events)  # drops what an earlier run has of them


def test_without_tensorboardx(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"pip install 'jdp-train\[run\]'"):
        jdp.TensorBoard(tmp_path)(1, {})


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: jdp.every(0, print), r"every got steps=0.* at least 1"),
        (lambda: jdp.every(2.5, print), r"every got steps=2.5"),
        (lambda: jdp.every(2, "evaluate"), "every got a str to call"),
        (lambda: jdp.run(STEP, state_of(), [], steps=-1), "run got steps=-1"),
        (lambda: jdp.run(STEP, state_of(), [], log_every=0), "run got log_every=0"),
        (lambda: jdp.run(STEP, state_of(), [], most_nonfinite=True), "run got most_nonfinite=True"),
        (
            lambda: jdp.run(STEP, state_of()._replace(step=jnp.int32(7)), [], steps=5),
            "steps=5, but the state has made 7 steps already",
        ),
    ],
)
def test_what_makes_no_sense(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_no_batches_give_the_state_back():
    called = []
    state = state_of()
    assert jdp.run(STEP, state, [], callbacks=[jdp.every(1, called.append)]) is state
    assert not called


def test_a_progress_bar_is_drawn(capsys):
    jdp.run(Fake(), None, range(3), steps=3, progress=True)
    assert "step 3" in capsys.readouterr().err


def two():
    import os

    import numpy as np

    import jdp

    mesh = jdp.make_mesh()
    step = lambda state, batch: (state + 1, {"loss": np.float32(1)})  # noqa: E731
    wants = lambda number: number >= 4 and os.environ["PROCESS_ID"] == "1"  # noqa: E731
    logged = []
    log = lambda number, values: logged.append(number)  # noqa: E731
    del mesh
    return jdp.run(step, 0, range(20), stop=wants, log=[log], log_every=3), logged


@pytest.mark.multiprocess
def test_all_processes_end_after_the_same_step():
    answers = [answer.value for answer in cluster.run(two)]
    assert answers == [[6, [3, 6]], [6, []]]
