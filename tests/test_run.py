"""The loop: which batches it draws, when it reads, what it logs, and when it ends."""

import itertools
import json
import pathlib
import struct

import cluster
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import jdp
from jdp import watchdog
from jdp.launch import STUCK

pytestmark = pytest.mark.alternate

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


def test_without_rich(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rich.progress", None)
    jdp.run(Fake(), None, range(1))
    with pytest.raises(ImportError, match=r"drawn by rich, .* not installed .*, or rich alone"):
        jdp.run(Fake(), None, range(1), progress=True)


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
            lambda: jdp.run(STEP, state_of(), [], batches_begin=-1),
            "batches_begin=-1, .* at least 0",
        ),
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


def test_numbers_of_numpy_count_steps():
    seen = []
    call = jdp.every(np.int64(2), lambda state: seen.append(1))
    jdp.run(Fake(), None, range(9), steps=np.int32(5), log_every=np.int64(2), callbacks=[call])
    assert len(seen) == 3


# Bad steps, and saving

CHAIN = optax.chain(jdp.all_reduce(), optax.sgd(0.5))
SKIP = jdp.skip_nonfinite(CHAIN)


def squares(params, batch):
    return jdp.Mean.of((batch["x"] - params["w"]) ** 2, batch["weight"])


TRAIN = {tx: jdp.train_step(squares, tx, MESH) for tx in (CHAIN, SKIP)}


def fresh(tx=CHAIN):
    return jdp.init_state({"w": jnp.zeros(())}, tx, MESH)


def data(bad=(), length=96):
    """Of 8 examples a step, in order."""
    x = np.ones(length, np.float32)
    x[list(bad)] = np.nan
    return jdp.Batches(jdp.Columns({"x": x}), MESH, batch=8, seed=0, shuffle=False)


class Failing:
    """Two batches, and then an error; it knows where it stands."""

    def __iter__(self):
        yield from itertools.islice(data(), 2)
        raise OSError("the disk is gone")

    def state(self):
        return {"step": 2}


def test_a_step_is_logged_before_it_is_saved(tmp_path):
    """Else a run that ends right after would neither train nor log it again."""
    told = []
    with jdp.Checkpoints(tmp_path, every_steps=2) as checkpoints:
        with pytest.raises(OSError, match="the disk is gone"):
            jdp.run(
                *(TRAIN[CHAIN], fresh(), Failing()),
                checkpoints=checkpoints,
                log=[lambda step, values: told.append(step)],
                log_every=1,
            )
        checkpoints.wait()
        assert checkpoints.latest() == 2
    assert told == [1, 2]


def test_what_callbacks_of_the_end_return_goes_into_the_line_of_a_saved_step(tmp_path):
    path = tmp_path / "log.jsonl"
    with jdp.Checkpoints(tmp_path / "saved", every_steps=2) as checkpoints:
        jdp.run(
            *(TRAIN[CHAIN], fresh(), data()),
            stop=lambda step: step == 4,
            checkpoints=checkpoints,
            callbacks=[jdp.every(3, lambda state: {"held_out": 5.0})],
            log=[jdp.JsonLines(path)],
            log_every=1,
        )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert ["held_out" in line and "loss" in line for line in lines] == [False, False, True, True]


def test_nans_end_a_run_at_the_last_good_checkpoint_and_name_the_batch(tmp_path):
    match = (
        r"The loss is nan, and has not been finite in 3 steps in a row, from step 6 on .* had "
        r"the examples 40, 41, 42, 43, 44, 45, 46, 47 of epoch 0; batches.at\(5\) gives its batch "
        r"again\. The last good checkpoint is of step 4; nothing has been saved since step 6"
    )
    step = TRAIN[CHAIN]
    with jdp.Checkpoints(tmp_path, every_steps=2, keep=1) as checkpoints:
        with pytest.raises(FloatingPointError, match=match):
            jdp.run(step, fresh(), data([43]), most_nonfinite=3, checkpoints=checkpoints)
        assert checkpoints.steps() == [4]
    with jdp.Checkpoints(tmp_path, every_steps=10) as checkpoints:  # the example was mended
        state = checkpoints.resume(fresh(), batches := data())
        assert (int(state.step), batches.step) == (4, 4)
        state = jdp.run(step, state, batches, steps=8, checkpoints=checkpoints)
    assert checkpoints.steps() == [4, 8]
    assert np.isfinite(state.params["w"])


def test_skipped_steps_are_counted_and_change_nothing(tmp_path):
    logged = {}
    log = lambda step, values: logged.update({step: values})  # noqa: E731
    step, more = TRAIN[SKIP], {"log": [log], "log_every": 1, "most_nonfinite": 3}
    with jdp.Checkpoints(tmp_path, every_steps=2) as checkpoints:
        state = jdp.run(step, fresh(SKIP), data([8, 16]), steps=6, checkpoints=checkpoints, **more)
        checkpoints.wait()
        assert checkpoints.steps() == [4, 6]  # step 2 was bad, and so was 3
    assert [int(logged[i]["skipped"]) for i in range(1, 7)] == [0, 1, 2, 2, 2, 2]
    want = jdp.run(step, fresh(SKIP), data(), steps=4)
    assert float(state.params["w"]) == float(want.params["w"])
    with pytest.raises(
        FloatingPointError, match=r"in 3 steps in a row, from step 2 on .* 8, 9, 10"
    ):
        jdp.run(step, fresh(SKIP), data([8, 16, 24]), **more)


def test_skipped_steps_of_finite_losses_are_bad_steps():
    losses = lambda state, batch: (state, {"loss": 1.5, "skipped": np.int32(batch)})  # noqa: E731
    match = r"The loss is 1.5, and that or a gradient has not been finite in 2 steps .* from step 3"
    with pytest.raises(FloatingPointError, match=match):
        jdp.run(losses, None, [7, 7, 8, 9], most_nonfinite=2)
    jdp.run(losses, None, [7, 8, 8, 9], most_nonfinite=2)


def test_what_is_saved_late_is_saved_once_steps_are_good(tmp_path):
    with jdp.Checkpoints(tmp_path, every_steps=4) as checkpoints:
        jdp.run(TRAIN[SKIP], fresh(SKIP), data([24, 32]), steps=7, checkpoints=checkpoints)
        checkpoints.wait()
        assert checkpoints.steps() == [6, 7]


def test_a_run_that_ends_among_bad_steps_says_so(tmp_path):
    match = r"after step 3 in the midst of bad steps.*began with step 3.*checkpoint is of step 2"
    with (
        jdp.Checkpoints(tmp_path, every_steps=2) as checkpoints,
        pytest.warns(UserWarning, match=match),
    ):
        jdp.run(TRAIN[SKIP], fresh(SKIP), data([16]), steps=3, checkpoints=checkpoints)
    assert checkpoints.steps() == [2]


def test_parameters_that_are_lost_by_a_step_of_a_finite_loss(tmp_path):
    def overflows(state, batch):
        w = np.inf if int(state.step) == 3 else 1.0
        return state._replace(step=state.step + 1, params={"w": jnp.float32(w)}), {"loss": 1.0}

    match = r"After step 4: .*\['w'\] holds NaN or infinity.* examples 24, 25, .* is of step 2;"
    with (
        jdp.Checkpoints(tmp_path, every_steps=2) as checkpoints,
        pytest.raises(FloatingPointError, match=match),
    ):
        jdp.run(overflows, fresh(), data(), checkpoints=checkpoints)
    assert checkpoints.steps() == [2]


def test_the_best_is_chosen_among_what_callbacks_returned(tmp_path):
    held_out = {2: 3.0, 4: 1.0, 6: 2.0}
    look = jdp.every(2, lambda state: {"held_out": held_out[int(state.step)]})
    options = {"every_steps": 1, "keep": 1, "best": ("held_out", "min")}
    with jdp.Checkpoints(tmp_path, **options) as checkpoints:
        state, batches = fresh(), data()
        jdp.run(TRAIN[CHAIN], state, batches, steps=6, checkpoints=checkpoints, callbacks=[look])
        checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.best()) == ([4, 6], 4)
        assert set(checkpoints.manifest(4).metrics) == {"loss", "held_out"}


def test_a_folder_that_is_ahead_or_taken_is_refused_before_the_first_step(tmp_path):
    fake = Fake()
    with jdp.Checkpoints(tmp_path) as checkpoints:
        jdp.run(TRAIN[CHAIN], fresh(), data(), steps=2, checkpoints=checkpoints)
        with pytest.raises(
            ValueError, match=r"to go on from step 0 .* holds step 2 .* with resume"
        ):
            jdp.run(fake, fresh(), data(), checkpoints=checkpoints)
        with pytest.raises(jdp.CheckpointError, match="written to by this process"):
            jdp.run(fake, fresh(), data(), checkpoints=jdp.Checkpoints(tmp_path))
    assert fake.number == 0


def test_e01_batches_that_stand_elsewhere_than_the_state():
    """E01 keras-team/keras#22490, huggingface/accelerate#4071."""
    trained, step = fresh()._replace(step=jnp.int32(4)), TRAIN[CHAIN]
    with pytest.raises(ValueError, match=r"4 steps, and .* at step 0: examples .* trained with ag"):
        jdp.run(step, trained, data())
    moved = data()
    next(iter(moved))
    with pytest.raises(ValueError, match=r"0 steps, and .* at step 1: examples .* be left out"):
        jdp.run(step, fresh(), moved)
    with pytest.raises(ValueError, match=r"to go on with other data, .*: batches_begin=4"):
        jdp.run(step, trained, data(), batches_begin=5)
    other = data([3])
    state = jdp.run(step, trained, other, steps=6, batches_begin=4, most_nonfinite=None)
    assert (int(state.step), other.step) == (6, 2)
    state = fresh()._replace(step=jnp.int32(4))
    with pytest.raises(FloatingPointError, match=r"from step 5 on .* examples 0, 1, 2"):
        jdp.run(step, state, data([3]), batches_begin=4, most_nonfinite=1)


def test_e01_a_position_is_saved_and_comes_back_or_its_lack_is_said(tmp_path):
    with jdp.Checkpoints(tmp_path / "with") as checkpoints:
        jdp.run(TRAIN[CHAIN], fresh(), data(), steps=2, checkpoints=checkpoints)
        with pytest.raises(
            ValueError, match=r"saved at a position in the data .* resume\(state, ba"
        ):
            checkpoints.resume(fresh())
        with pytest.raises(TypeError, match=r"a list as data, which has no restore\(position\)"):
            checkpoints.resume(fresh(), [1])
        with pytest.raises(
            ValueError, match=r"the state has length 96, this length 88\. .* shrunk"
        ):
            checkpoints.resume(fresh(), data(length=88))
    drawn = [{"x": np.ones(8, np.float32), "weight": np.ones(8, np.float32)}] * 3
    with jdp.Checkpoints(tmp_path / "without") as checkpoints:
        with pytest.warns(UserWarning, match=r"no position in the data: a list has no state\(\)"):
            jdp.run(TRAIN[CHAIN], fresh(), drawn, checkpoints=checkpoints)
        with pytest.raises(
            ValueError, match=r"without a position .* is meant, .*: resume\(state\)"
        ):
            checkpoints.resume(fresh(), data())
        assert int(checkpoints.resume(fresh()).step) == 3


def test_b03_each_callback_may_take_as_long_as_a_run_may_stand_still():
    since = []
    look = lambda state: since.append(watchdog._here.since)  # noqa: E731
    jdp.run(Fake(), None, range(1), callbacks=[jdp.every(1, look), jdp.every(1, look)])
    metric = jdp.eval_step(lambda params, x: jdp.Mean(x.sum(), x.size), MESH)
    jdp.evaluate(metric, {}, (look(None) or jnp.ones(8) for _ in range(2)))
    assert sorted(set(since)) == since


def two():
    import os
    import pathlib

    import jax.numpy as jnp
    import numpy as np
    import optax

    import jdp

    me, folder = int(os.environ["PROCESS_ID"]), pathlib.Path(os.environ["FOLDER"])
    jdp.initialize(os.environ["COORDINATOR"], num_processes=2, process_id=me)
    mesh, tx, said = jdp.make_mesh(), optax.chain(jdp.all_reduce(), optax.sgd(0.5)), {}

    def train(factor=1, bad=(), **more):
        def loss_fn(params, batch):
            return jdp.Mean.of((batch["x"] - factor * params["w"]) ** 2, batch["weight"])

        x = np.ones(96, np.float32)
        x[list(bad)] = np.nan
        batches = jdp.Batches(jdp.Columns({"x": x}), mesh, batch=4, seed=0, shuffle=False)
        state = jdp.init_state({"w": jnp.zeros(())}, tx, mesh)
        return jdp.run(jdp.train_step(loss_fn, tx, mesh), state, batches, **more)

    def failure(fn=train, **more):
        try:
            fn(**more)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "none"

    logged = []
    log = lambda number, values: logged.append(number)  # noqa: E731
    wants = lambda number: number >= 4 and me == 1  # noqa: E731
    with jdp.Checkpoints(folder / "whole", every_steps=4) as checkpoints:
        state = train(stop=wants, log=[log], log_every=3, checkpoints=checkpoints)
    said["whole"] = [int(state.step), logged, checkpoints.steps()]

    def fails(state):
        if me == 1:
            raise OSError("no such file")

    said["callback"] = failure(callbacks=[jdp.every(2, fails)])
    said["program"] = failure(factor=1 + me)

    def draw(seed):
        make = lambda: {"w": jax.random.normal(jax.random.key(seed), (3, 5))}  # noqa: E731
        return jdp.init_state(make, jdp.zero3(optax.sgd(1.0), min_size=0), mesh)

    said["drawn"] = np.asarray(jdp.logical(draw(7).params)["w"]).tolist()
    said["drawn apart"] = failure(draw, seed=me)
    print("SAID", json.dumps(said), flush=True)
    with jdp.Checkpoints(folder / "nan", every_steps=2) as checkpoints:
        train(bad=[14], most_nonfinite=3, checkpoints=checkpoints)


@pytest.mark.multiprocess
def test_a30_b01_b06_e18_two_processes_begin_and_end_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "GRACE_SECONDS", 40)
    answers = cluster.run(two, start=False, check=False, env={"FOLDER": str(tmp_path)})
    assert [answer.returncode for answer in answers] == [1, 1], answers  # not 75: start again
    said = [json.loads(a.output.split("SAID ")[1].splitlines()[0]) for a in answers]
    assert [one["whole"] for one in said] == [[6, [3, 6], [4, 6]], [6, [], [4, 6]]]
    assert "no such file (on process 1)" in said[0]["callback"]
    assert said[1]["callback"] == "OSError: no such file"
    assert "the processes run different programs" in said[0]["program"]
    drawn = jax.jit(lambda: jax.random.normal(jax.random.key(7), (3, 5)))()
    for one in said:
        assert one["program"] == said[0]["program"]
        assert one["drawn"] == drawn.tolist()
        assert "['the function that makes params'] on process 1 differs" in one["drawn apart"]
    for answer in answers:
        assert "FloatingPointError: The loss is nan, and has not been finite in 3" in answer.output
        assert "from step 4 on" in answer.output
        assert "examples 12, 13, 14, 15 of epoch 0" in answer.output
        assert "The last good checkpoint is of step 2; nothing" in answer.output
        assert "it ends with exit code 75" not in answer.output


def guarded():
    import os
    import threading

    import jax.numpy as jnp
    import numpy as np
    import optax

    import jdp

    me = int(os.environ["PROCESS_ID"])
    jdp.initialize(os.environ["COORDINATOR"], num_processes=2, process_id=me)
    mesh, tx = jdp.make_mesh(), optax.chain(jdp.all_reduce(), optax.sgd(0.5))
    step = jdp.train_step(lambda w, x: jnp.mean((x - w) ** 2), tx, mesh)
    metric = jdp.eval_step(lambda w, x: jdp.Mean(jnp.sum((x - w) ** 2), x.size), mesh)
    given = [np.full(2, 1.0 + me, np.float32)] * 5
    (sample,) = jdp.feed(given[:1], mesh)
    (watching,) = (thread for thread in threading.enumerate() if thread.name == "jdp watchdog")

    def held_out(state):
        if int(state.step) == 2:  # from here on nothing takes long
            watching._target.__self__._stuck = 2.0
        if int(state.step) < 3 or me == 0:
            print("held out", jdp.evaluate(metric, state.params, [sample]), flush=True)

    def log(number, values):
        print("logged", values["loss"], flush=True)

    state = jdp.init_state(jnp.zeros(()), tx, mesh)
    jdp.run(
        step,
        state,
        jdp.feed(given, mesh),
        callbacks=[jdp.every(1, held_out)],
        log=[log],
        log_every=1,
    )


@pytest.mark.multiprocess
def test_b02_a_collective_in_the_callback_of_one_process_names_it(monkeypatch):
    """B02 jax-ml/jax#22740, pytorch/xla#2311: it would meet one of the next step."""
    monkeypatch.setattr(cluster, "GRACE_SECONDS", 40)
    answers = cluster.run(guarded, start=False, check=False)
    assert [answer.returncode for answer in answers] == [STUCK, STUCK], answers
    for answer in answers:
        assert "jdp: process 0 (" in answer.output
        assert "(held_out)) is stuck; the others wait for it in step 3" in answer.output
        assert answer.output.count("held out 0.25") == 2
    assert "logged" in answers[0].output  # what is replicated needs no collective
    assert "logged" not in answers[1].output
