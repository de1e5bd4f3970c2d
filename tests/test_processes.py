"""Joining a run, comparing processes, and talking between them (jdp/processes.py)."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cluster import ROOT, run

import jdp
from jdp import processes


def test_b09_importing_jdp_starts_no_backend():
    code = (
        "import jdp; from jax._src import xla_bridge as x; assert not x.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_b09_one_process_needs_nothing_even_after_jax_started():
    jax.devices()
    jdp.initialize()
    jdp.initialize(num_processes=1)
    jdp.initialize()
    assert jax.process_count() == 1


@pytest.mark.parametrize(
    ("given", "lacks"),
    [
        ({"coordinator": "h:1"}, "lacks num_processes and process_id"),
        ({"coordinator": "h:1", "num_processes": 2}, "lacks process_id"),
        ({"process_id": 0}, "lacks coordinator and num_processes"),
        ({"num_processes": 2, "process_id": 1}, "lacks coordinator"),
        ({"coordinator": "h:1", "num_processes": 2, "process_id": 2}, "ids run from 0"),
        ({"coordinator": "h:1", "num_processes": 2, "process_id": -1}, "ids run from 0"),
        ({"num_processes": 0}, "ids run from 0"),
        ({"num_processes": 2}, "asked for 2 processes, but JAX detects no cluster, so 1"),
    ],
)
def test_b09_half_given_arguments_are_refused(given, lacks):
    with pytest.raises(ValueError, match=lacks):
        jdp.initialize(**given)


def test_b09_after_jax_has_started_it_is_too_late():
    jax.devices()
    with pytest.raises(RuntimeError, match=r"alone instead of being one of 2\. Call it first"):
        jdp.initialize("127.0.0.1:1", num_processes=2, process_id=0)


def test_b09_a_backend_that_joins_nobody_is_noticed(monkeypatch):
    monkeypatch.setattr(processes.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(processes.joining, "join", lambda *args: None)
    with pytest.raises(RuntimeError, match=r"joined 2 processes, but jax.process_count\(\) is 1"):
        jdp.initialize("127.0.0.1:1", num_processes=2, process_id=0)


def test_b09_an_address_in_the_environment_is_half_a_request(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234")
    with pytest.raises(ValueError, match=r"JAX_COORDINATOR_ADDRESS=10.0.0.1:1234, but no cluster"):
        jdp.initialize()


def _slurm(monkeypatch, num_tasks: str):
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "node1",
        "SLURM_NTASKS": num_tasks,
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }.items():
        monkeypatch.setenv(name, value)


def test_b09_a_cluster_of_one_process_needs_nothing(monkeypatch):
    _slurm(monkeypatch, "1")
    jdp.initialize()
    assert not jax.distributed.is_initialized()


def test_b09_a_detected_cluster_is_compared_with_the_request(monkeypatch):
    _slurm(monkeypatch, "4")
    with pytest.raises(ValueError, match="asked for 2 processes, but JAX detects 4"):
        jdp.initialize(num_processes=2)
    with pytest.raises(RuntimeError, match=r"one of 4\. Call it first"):
        jdp.initialize()


def test_b09_a_cluster_that_cannot_be_asked_is_named(monkeypatch):
    _slurm(monkeypatch, "many")
    with pytest.raises(RuntimeError, match=r"could not ask it for its size \(invalid literal"):
        jdp.initialize()


def test_one_process_compares_and_broadcasts_nothing():
    tree = {"w": jnp.arange(3.0), "key": jax.random.key(1), "n": 2, "none": None}
    processes.same_everywhere(tree, "params")
    out = processes.broadcast(tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert isinstance(out["w"], np.ndarray)
    np.testing.assert_array_equal(out["w"], [0, 1, 2])
    np.testing.assert_array_equal(jax.random.key_data(out["key"]), jax.random.key_data(tree["key"]))


def test_a_channel_needs_a_run():
    with pytest.raises(RuntimeError, match=r"agree over processes \[0, 1\].*initialize first"):
        processes.Channel("jdp.feed", (0, 1))


def _join():
    import os

    import jdp

    mine = {"coordinator": os.environ["COORDINATOR"], "process_id": int(os.environ["PROCESS_ID"])}
    mine["num_processes"] = 2
    jdp.initialize(**mine)
    jdp.initialize(**mine)
    jdp.initialize()
    found: list[object] = [jax.process_count(), jax.device_count()]
    others = {
        "coordinator": "127.0.0.1:2",
        "num_processes": 3,
        "process_id": 1 - mine["process_id"],
    }
    for name, value in others.items():
        try:
            jdp.initialize(**(mine | {name: value}))
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.multiprocess
def test_b09_two_processes_join_once():
    for process, answer in enumerate(run(_join, num_devices=2, start=False, seconds=60)):
        count, devices, address, number, index = answer.value
        assert (count, devices) == (2, 4)
        assert "coordinator='127.0.0.1:2', but this process has already joined a run" in address
        assert "num_processes=3, but this process has already joined" in number
        assert f"process_id={1 - process}, but this process has already joined" in index


def _compare():
    import threading
    import time

    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np

    from jdp import processes

    me = jax.process_index()
    said = {}

    def attempt(name, call):
        try:
            said[name] = call()
        except (ValueError, TimeoutError, processes.CancelledError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    def check(tree, what="params"):
        return lambda: processes.same_everywhere(tree, what)

    same = {"a": np.arange(3), "b": {"w": jnp.ones(2), "key": jax.random.key(3)}}
    attempt("same", check(same))
    attempt("value", check({"a": np.arange(3), "b": {"w": np.full(2, float(me))}}))
    attempt("seed", check({"key": jax.random.key(me)}))
    attempt("dtype", check({"w": np.zeros(2, [np.float32, np.int32][me])}))
    attempt("structure", check({"a": np.zeros(2)} | ({"c": np.zeros(2)} if me else {})))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    attempt("split", check([jax.make_array_from_process_local_data(over, np.zeros(1))]))
    attempt("what", check(same, ["params", "batch"][me]))

    values = {
        "float64": np.array([0.1 + me, -0.0, np.nan]),
        "bfloat16": np.array([[1.5 + me]], ml_dtypes.bfloat16),
        "int64": np.array(2**40 + me),
        "bool": np.array([me == 0, True]),
        "key": jax.random.key(me),
        "empty": np.zeros((0, 3)),
    }
    got = processes.broadcast(values)
    said["broadcast"] = {
        name: [
            str(v.dtype),
            list(v.shape),
            processes._host_leaves(v, "")["(the whole value)"].tobytes().hex(),
        ]
        for name, v in got.items()
    }
    attempt("shapes", lambda: processes.broadcast({"w": np.zeros(2 + me)}))

    channel = processes.Channel("round", (0, 1))
    said["rounds"] = [channel.exchange(f"{me}{i}") for i in range(5)]
    said["kept"] = len(channel._client.key_value_dir_get("jdp/round/"))

    # Process 0 waits for one that does not come; then for one that comes late; then is cancelled.
    if me == 0:
        attempt("late", lambda: processes.Channel("late", (0, 1)).exchange("", seconds=0.2))
        start = time.monotonic()
        waiting = processes.Channel("wait", (0, 1), lambda: time.monotonic() > start + 0.2)
        attempt("cancelled", lambda: waiting.exchange(""))
    late = processes.Channel("thread", (0, 1))
    thread = threading.Thread(target=lambda: attempt("thread", lambda: late.exchange(str(me))))
    thread.start()
    beats = 0
    while thread.is_alive() and me == 0:
        beats += 1
        time.sleep(0.01)
    thread.join()
    said["beats"] = beats
    return said


@pytest.mark.multiprocess
def test_a30_processes_are_compared_and_made_equal():
    answers = run(_compare, seconds=90)
    zero, one = (answer.value for answer in answers)
    for said in (zero, one):
        assert said["same"] is None
        assert "ValueError: params: leaf ['b']['w'] on process 1 differs" in said["value"]
        assert "take process 0's with jdp.init_state(..., broadcast=True)" in said["value"]
        assert "leaf ['key'] on process 1" in said["seed"]
        assert "leaf ['w'] on process 1" in said["dtype"]
        assert "leaf ['c'] on process 1" in said["structure"]
        assert "params: leaf [0] of shape (2,) is split over processes" in said["split"]
        assert "compare different things: process 0 params, process 1 batch" in said["what"]
        assert "broadcast: leaf ['w'] on process 1 differs" in said["shapes"]
        assert "Only values can be sent, not shapes" in said["shapes"]
        assert said["rounds"] == [{"0": f"0{i}", "1": f"1{i}"} for i in range(5)]
        assert said["kept"] <= 8  # of at most two rounds: two texts, a count, the answer
        assert said["thread"] == {"0": "0", "1": "1"}
    assert zero["broadcast"] == one["broadcast"]
    assert zero["broadcast"]["float64"] == [
        "float64",
        [3],
        np.array([0.1, -0.0, np.nan]).tobytes().hex(),
    ]
    assert zero["broadcast"]["int64"] == ["int64", [], np.array(2**40).tobytes().hex()]
    assert zero["broadcast"]["bfloat16"][:2] == ["bfloat16", [1, 1]]
    assert "TimeoutError: late: process 0 waited 0.2 s for process 1, which did" in zero["late"]
    assert zero["cancelled"].startswith("CancelledError")
