"""What a hanging run is told (jdp/watchdog.py, service.py, stopping.py, agreement.py).

The drills are real: two processes over gloo, of which one is killed, fails, gets stuck, or is asked
to stop. What each of them must say and end with is checked; how long it takes is not, but that the
other has ended before `run` would have killed it.
"""

import json
import re
import signal
import socket
import sys
import threading
import time
import types

import cluster
import jax
import jax.numpy as jnp
import optax
import pytest

import jdp
from jdp import processes, service, watchdog
from jdp.launch import PEER_LOST, STOPPED, STUCK
from jdp.watchdog import Beat, stalled

pytestmark = pytest.mark.alternate

LIMITS = {"JDP_VANISHED_SECONDS": "12", "JDP_STUCK_SECONDS": "2"}


@pytest.fixture
def drill(monkeypatch):
    """Runs a program that joins by itself, with time for the others to end by themselves."""
    monkeypatch.setattr(cluster, "GRACE_SECONDS", 40)

    def drill(program, **env):
        return cluster.run(program, start=False, check=False, env=LIMITS | env, seconds=90)

    return drill


def _loses():
    import os
    import signal
    import threading
    import time

    import jax.numpy as jnp
    import numpy as np

    import jdp

    me = int(os.environ["PROCESS_ID"])
    jdp.initialize(os.environ["COORDINATOR"], num_processes=2, process_id=me)
    over = jax.sharding.NamedSharding(jdp.make_mesh(), jax.sharding.PartitionSpec("data"))
    x = jax.make_array_from_process_local_data(over, np.ones(1, np.float32))
    mean = jax.jit(jnp.sum)
    for step in range(1, 4):
        jdp.note_step()
        print("begins step", step, flush=True)
        if me == int(os.environ["VICTIM"]) and step == 3:
            time.sleep(1.5)  # a beat tells step 3, and the other waits for this one
            if os.environ["HOW"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if os.environ["HOW"] == "raise":
                late = threading.Timer(0, lambda: mean(x))  # waits on the device for the other
                late.start()
                time.sleep(0.5)
                raise OverflowError("too much")
        if os.environ["HOW"] == "raise" and step == 3:
            time.sleep(60)
        float(mean(x))
        if os.environ["HOW"] == "stuck" and me == int(os.environ["VICTIM"]) and step == 2:
            time.sleep(80)


@pytest.mark.multiprocess
@pytest.mark.parametrize("victim", [0, 1])
def test_b14_a_killed_process_is_named_by_the_other(drill, victim):
    answers = drill(_loses, VICTIM=str(victim), HOW="kill")
    assert answers[victim].returncode == -signal.SIGKILL
    other = answers[1 - victim]
    assert other.returncode == PEER_LOST
    said = other.output.partition("begins step 3\n")[2].splitlines()
    assert len(said) == 1  # no trace, neither of Python nor of C++
    assert f"jdp: process {victim} (" in said[0]
    assert "vanished, last heard of in step 3: it was killed, or crashed." in said[0]
    assert said[0].endswith(f"This is process {1 - victim}, in step 3; it ends with exit code 75.")


@pytest.mark.multiprocess
def test_b14_the_others_are_told_the_error_of_the_first(drill):
    other, failed = drill(_loses, VICTIM="1", HOW="raise", JDP_VANISHED_SECONDS="1000")
    assert failed.returncode == 1
    assert "OverflowError: too much" in failed.output
    assert "jdp: " not in failed.output
    assert other.returncode == PEER_LOST
    assert "jdp: process 1 failed in step 3: OverflowError: too much. This is" in other.output
    assert "Traceback" not in other.output


@pytest.mark.multiprocess
def test_b03_a_stuck_process_is_named_and_shows_its_stack(drill):
    other, stuck = drill(_loses, VICTIM="1", HOW="stuck")
    assert (other.returncode, stuck.returncode) == (STUCK, STUCK)
    for answer in (other, stuck):
        assert "jdp: process 1 (" in answer.output
        assert "(_loses)) is stuck; the others wait for it in step 3, since 2 s." in answer.output
    assert "time.sleep(80)" in stuck.output
    assert "Stack of MainThread" not in other.output


def test_b03_a_sign_of_life_is_no_step():
    jdp.note_step(7)
    since = watchdog._here.since
    time.sleep(0.001)
    jdp.note_alive()
    assert watchdog._here.step == 7
    assert watchdog._here.since > since
    jdp.note_step()
    assert watchdog._here.step == 8


BEAT = Beat(1, 5, 9.0, "", "train.py:3 (load)", "host", "boot", 7, False)


def test_b03_a_run_that_moves_or_compiles_or_has_ended_is_not_stalled():
    moves = BEAT._replace(still=0.5)
    ended = BEAT._replace(ended=True)
    assert stalled({0: BEAT, 1: moves}, 8, 8) is None
    assert stalled({0: BEAT._replace(step=0), 1: BEAT._replace(step=0)}, 8, 8) is None
    assert stalled({0: ended, 1: ended}, 8, 8) is None
    assert stalled({0: BEAT, 1: BEAT}, 9.5, 8) is None


def test_b03_a_program_that_ended_before_the_others_is_not_waited_for_so_long():
    ended = BEAT._replace(ended=True)
    assert stalled({0: BEAT._replace(step=6), 1: ended}, 100, 8).code == STUCK
    assert stalled({0: BEAT._replace(step=6), 1: ended}, 100, 9.5) is None
    assert stalled({0: BEAT._replace(step=6), 1: BEAT}, 100, 8) is None
    assert stalled({0: BEAT, 1: ended}, 100, 8) is None  # at the end of a run


@pytest.mark.parametrize(
    ("beats", "about", "text"),
    [
        ((BEAT, BEAT._replace(step=4), BEAT), [1], "process 1 (host, pid 7, in step 4, at train.p"),
        ((BEAT, BEAT._replace(waits="jdp.feed")), [0], "process 0 (host, pid 7, in step 5, at"),
        (
            (BEAT._replace(step=6), BEAT._replace(ended=True)),
            [],
            "1 (host, after step 5) has ended; the others wait for it in step 6, since 8 s.",
        ),
        ((BEAT, BEAT), [0, 1], "no process has begun a step for 8 s, and none is behind"),
        ((BEAT._replace(waits="x"),) * 2, [0, 1], "none is behind"),
    ],
)
def test_b03_those_with_the_fewest_steps_and_nobody_to_wait_for_are_stuck(beats, about, text):
    verdict = stalled(dict(enumerate(beats)), 8, 8)
    assert (verdict.about, verdict.code) == (about, STUCK)
    assert text in verdict.text


def test_b03_a_channel_that_waits_for_others_says_so():
    channel, seen = object.__new__(processes.Channel), []
    channel._name, channel.base, channel._round = "jdp.feed", "", 0
    channel.post = lambda text: None
    channel._wait = lambda here: seen.append(list(watchdog._here.waits)) or {0: "said"}
    assert channel.exchange("") == {0: "said"}
    assert (seen, watchdog._here.waits) == ([["jdp.feed"]], [])


def test_b03_steps_of_jdp_have_the_numbers_that_their_state_has():
    """Each but the first, which compiles, is noted before it could wait."""
    tx, mesh = optax.chain(jdp.all_reduce(), optax.sgd(1.0)), jdp.make_mesh(num_devices=1)
    step = jdp.train_step(lambda p, x: jnp.mean(p * x), tx, mesh)
    state = jdp.init_state(jnp.ones(2), tx, mesh)
    state = state._replace(step=state.step + 400)
    for number in (401, 402, 403):
        state, _ = step(state, jnp.ones((2, 2)))
        assert watchdog._here.step == number


class Store:
    """What the watchdog needs of JAX's client: a dictionary, waiting for nothing."""

    def __init__(self, **texts):
        self.texts = {key.replace("_", "/"): text for key, text in texts.items()}

    def key_value_try_get(self, key):
        if key in self.texts:
            return self.texts[key]
        raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")

    def key_value_set(self, key, text, allow_overwrite=False):
        if key in self.texts and not allow_overwrite:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
        self.texts[key] = text

    def key_value_dir_get(self, folder):
        return [(key, text) for key, text in self.texts.items() if key.startswith(folder)]


@pytest.fixture
def watch():
    """A watchdog of process 1 of 3, over a dictionary, whose thread does not run."""
    client = Store()
    state = types.SimpleNamespace(client=client, process_id=1, num_processes=3, service=None)
    return watchdog.Watchdog(state, 0.2, 1000.0), client.texts


def test_b14_silence_is_noticed_where_no_pid_tells(watch):
    dog, texts = watch
    for number in (1, 2, 3):
        texts["jdp/beat/2"] = json.dumps(BEAT._replace(number=number))
        dog._listen()
        time.sleep(0.11)
    assert "jdp/verdict" not in texts
    dog._listen()
    text, about, code = json.loads(texts["jdp/verdict"])
    assert text.startswith("process 2 (host, pid 7) vanished, last heard of in step 5: nothing has")
    assert (about, code) == ([2], PEER_LOST)
    dog._judge(watchdog.Verdict("later", [], 1))
    assert json.loads(texts["jdp/verdict"])[0] == text


def test_b14_a_process_that_never_gave_a_sign_is_noticed(watch):
    dog, texts = watch
    dog._listen()
    assert texts == {}
    time.sleep(0.11)
    dog._listen()
    assert "process 2 has joined, but vanished before its first sign" in texts["jdp/verdict"]


def test_b14_errors_that_end_no_program_are_only_shown(watch, monkeypatch):
    dog, texts = watch
    shown = []
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    dog._fail(lambda *given: shown.append(given[1]), ValueError, ValueError("typo"), None)
    assert (str(shown[0]), texts) == ("typo", {})


def test_b14_the_echo_of_an_error_lets_the_error_be_told_first(watch, monkeypatch):
    dog, texts = watch
    slept = []
    nothing = types.SimpleNamespace(unregister=lambda call: None, _run_exitfuncs=lambda: None)
    monkeypatch.setattr(watchdog, "atexit", nothing)
    monkeypatch.setattr(watchdog.time, "sleep", slept.append)
    monkeypatch.setattr(dog, "_leave", lambda code: None)
    for kind, text in (
        (RuntimeError, "jdp.Batches has no batch 3: process 2 failed with OSError: no."),
        (OSError, "No such file: 'x' (on process 2)"),
        (RuntimeError, "no batch 3"),
    ):
        dog._fail(lambda *given: None, kind, kind(text), None)
    assert slept == [0.6 * 0.2] * 2
    assert "process 1 failed in step" in texts["jdp/verdict"]


@pytest.mark.parametrize("value", ["0.5", "soon", "-1", "nan"])
def test_limits_that_are_no_times_are_refused(monkeypatch, value):
    monkeypatch.setenv("JDP_STUCK_SECONDS", value)
    with pytest.raises(
        ValueError, match=rf"environment has JDP_STUCK_SECONDS={value}, which is no"
    ):
        jdp.initialize()
    with pytest.raises(
        ValueError, match=r"jdp\.initialize got vanished_seconds=0, which is no time"
    ):
        jdp.initialize(vanished_seconds=0)


def test_b09_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=rf"could not start .* service at {address}: .*port"):
            service.Service(address, 2, {}, 1.0)


@pytest.mark.parametrize("order", ["shutdown", "dismiss"])
def test_the_service_does_not_stay_longer_than_it_must(order, monkeypatch):
    monkeypatch.setattr(service, "_PROGRAM", service._PROGRAM.replace('"told": 10', '"told": 0'))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    running = service.Service(address, 2, {}, 1000.0)
    getattr(running, order)()
    assert running._process.wait(timeout=30) == 0


def test_one_process_stops_after_the_step_it_is_in():
    with jdp.Stop() as stop:
        assert not stop.after(1)
        signal.raise_signal(signal.SIGTERM)
        assert stop.after(2)
        assert stop.after(3)
        assert stop.reason == "process 0: got SIGTERM"
        assert stop.code == STOPPED
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_signal_has_its_usual_effect(monkeypatch):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    try:
        with jdp.Stop() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert not seen
            signal.raise_signal(signal.SIGTERM)
            assert seen == [1]
            assert stop.after(1)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_time_limit_stops():
    with jdp.Stop(seconds=0.05, signals=()) as stop:
        assert not stop.after(1)
        time.sleep(0.06)
        assert stop.after(2)
        assert stop.reason == "process 0: its limit of 0.05 s is over"
    with pytest.raises(ValueError, match=r"seconds=0: the run would stop before its first step"):
        jdp.Stop(seconds=0)


def test_outside_the_main_thread_no_handler_is_set():
    made = []
    thread = threading.Thread(target=lambda: made.append(jdp.Stop()))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    made[0].close()


def _stops():
    import os
    import signal
    import time

    import numpy as np

    import jdp

    me = int(os.environ["PROCESS_ID"])
    jdp.initialize(os.environ["COORDINATOR"], num_processes=2, process_id=me)
    mesh = jdp.make_mesh()
    both = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def place(value, sharding):
        return jax.make_array_from_process_local_data(sharding, np.asarray(value, np.float32))

    def attempt(step, state, batch, **more):
        try:
            jdp.check_processes(step, state, batch, **more)
        except ValueError as error:
            return str(error)
        return ""

    def depends(state, batch):
        return state * (1 + me) + batch.sum()

    step, x = jax.jit(lambda state, batch: state + batch.sum()), place(np.ones(2), over)
    state, mine = place(1.0, both), place(1.0 + me, both)
    said = {
        "same": attempt(step, state, x, num_steps=3),
        "steps": attempt(step, state, x, num_steps=3 + me),
        "shape": attempt(step, {"w": state}, place(np.ones(2 + me), both)),
        "values": attempt(step, {"b": state, "w": mine}, x),
        "keys": attempt(step, jax.random.key(me), x),
        "program": attempt(jax.jit(depends), state, x),
    }
    with jdp.Stop() as stop:
        for step_number in range(1, 10000):
            time.sleep(0.002 * (1 + 3 * me))
            if me == 1 and step_number == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.after(step_number):
                said |= {"step": step_number, "reason": stop.reason, "code": stop.code}
                break
    return said


@pytest.mark.multiprocess
def test_b01_b05_b06_a30_processes_compare_beforehand_and_stop_together(drill):
    zero, one = (answer.value or answer.output for answer in drill(_stops))
    assert zero == one
    assert zero["same"] == ""
    assert "'the number of steps: 3', process 1 has 'the number of steps: 4'" in zero["steps"]
    assert "'batch: float32[2] P" in zero["shape"]
    assert "process 1 has 'batch: float32[3] P" in zero["shape"]
    assert "state['w'] has the checksum" in zero["values"]
    assert "start from different values" in zero["keys"]
    assert "the processes run different programs. Process 0 has" in zero["program"]
    assert "multiply" in zero["program"] or "constant" in zero["program"]
    assert zero["step"] > 20
    assert zero["reason"] == "process 1: got SIGTERM"
    assert zero["code"] == 85


def test_one_process_has_nobody_to_compare_with():
    jdp.check_processes(None, jnp.zeros(2), None)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_b06_the_first_of_many_lines_that_differs_is_found(first, second):
    """Two threads as two processes, over a channel that is only a dictionary."""
    from jdp import agreement

    meet = threading.Barrier(2, timeout=20)
    said: dict[int, str] = {}

    class Both:
        def __init__(self, me):
            self.me = me

        def exchange(self, text):
            said[self.me] = text
            meet.wait()
            both = dict(sorted(said.items()))
            meet.wait()
            return both

    lines = [f"line {i}" for i in range(10001)]
    programs = (lines, [*lines[:7777], "other", *lines[7778:9000]])
    found = {}

    def compare(me, mine):
        found[me] = agreement._first_difference(Both(me), programs[mine])

    threads = [threading.Thread(target=compare, args=x) for x in ((0, first), (1, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = ["line 7777", "other"]
    assert found[0] == found[1]
    assert found[0] == f"Process 0 has {texts[first]!r}, process 1 has {texts[second]!r}."


def test_the_guide_runs():
    blocks = re.findall(
        r"```python\n(.*?)```",
        (cluster.ROOT / "docs" / "many_processes.md").read_text(),
        flags=re.S,
    )
    names = {}
    exec(compile("\n".join(blocks), "many_processes.md", "exec"), names)
    assert (names["steps"], names["exit_code"]) == (100, 0)
    assert float(names["metrics"]["loss"]) < 1e-3
