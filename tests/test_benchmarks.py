"""The benchmarks run, their arms do the same work, and what they count is right; never a time."""

import importlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jdp

pytestmark = pytest.mark.alternate

BY_HAND = ["hand zero1", "hand zero3", "hand zero3 kept"]
ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.mark.parametrize(
    ("script", "arguments", "arms", "keys"),
    [
        (
            "step",
            ["--models", "mlp", "--devices", "2"],  # the lm takes five times as long to compile
            ["jdp", "shard_map", "jit", "pmap"],
            [
                "model",
                "step_ms",
                "compile_s",
                "payload / params",
                "live_MB",
                "/ jit",
                "/ shard_map",
            ],
        ),
        (
            "accumulate",
            ["--devices", "2", "--every", "4"],
            ["jdp", "shard_map", "jit", "jdp.multi_steps", "optax.MultiSteps"],
            ["update_ms", "payload / k=1", "memory / k=1", "/ jit", "/ optax.MultiSteps"],
        ),
        (
            "overhead",
            ["--devices", "1", "2"],
            ["jdp", "shard_map", "jit", "pmap"] * 2,
            ["devices", "call_ms", "/ jit", "/ shard_map"],
        ),
        (
            "zero",
            ["--models", "mlp"],
            ["dp", "zero1", "zero2", "zero3", "zero3 kept", *BY_HAND],
            ["sent_MB", "sent / dp", "live / dp", "arguments_MB", "state", "AG", "step_ms", "/ dp"],
        ),
        pytest.param(
            "processes",
            [],
            ["leaves", "jdp", "one array"],
            ["exchange_ms", "GB/s", "/ leaves", "/ one array"],
            marks=pytest.mark.multiprocess,
        ),
    ],
    ids=["step", "accumulate", "overhead", "zero", "processes"],
)
def test_runs_and_all_arms_end_at_the_same_gradient(script, arguments, arms, keys, tmp_path):
    path = tmp_path / "out.json"
    printed = _run([f"{script}.py", "--quick", "--json", str(path), *arguments])
    content = _content(path, script)
    assert [row["arm"] for row in content["results"]] == arms
    for row in content["results"]:
        assert 0 <= row["gradient_error"] < 1e-5
        assert set(keys) <= set(row)
        assert all(row[key]["low"] <= row[key]["median"] for key in keys if key.startswith("/ "))
    assert "allocator: " in printed


@pytest.mark.multiprocess
def test_one_process_and_two_have_the_same_loss_and_take_turns(tmp_path):
    path = tmp_path / "out.json"
    _run(["two_processes.py", "--quick", "--model", "mlp", "--json", str(path)])
    rows = _content(path, "two processes")["results"]
    assert [row["arm"] for row in rows] == ["one, step", "one, fed", "two, step", "two, fed"]
    assert all(row["step_ms"] > 0 for row in rows)


def test_the_memory_table_runs(load, tmp_path):
    if what := load("described").missing("gpu"):
        pytest.skip(what)
    path = tmp_path / "out.json"
    _run(["memory_table.py", "--quick", "--json", str(path)])
    rows = _content(path, "memory_table")["results"]
    assert [row["arm"] for row in rows] == ["all_reduce", "zero1", "zero2", "zero3"]
    # next to leaves of this size, scalars and rounding are felt
    assert all(abs(row["/ paper"] - 1) <= 0.02 for row in rows)


def test_zero_counts_stages_and_layers(load):
    """Layers of the lm one by one, in all arms; the numbers are judged in full size elsewhere."""
    zero, models = load("zero"), load("models")
    mesh = jdp.make_mesh(num_devices=4)
    contenders = {arm.name: arm for arm in zero.stages("lm", mesh, True)}
    assert set(contenders) - set(BY_HAND) == {
        *("dp", "zero1", "zero2", "zero3", "zero3 kept"),
        *("zero3 layerwise", "zero3 layerwise remat"),
    }
    size = 4 * models.num_params(models.make("lm", quick=True))
    found = {
        name: zero.counts(contenders[name], 4, 3 * size / 4)
        for name in ("dp", "hand zero1", "hand zero3 kept")
    }
    assert [round(x["state"], 2) for x in found.values()] == [4, 2, 1]
    for cost in found.values():
        # loss and weight of plain data parallelism travel with its gradient
        assert cost["sent_MB"] == pytest.approx(2 * 3 / 4 * size / 1e6, abs=24e-6)
    kinds = {
        name: [bool(x[key]) for key in ("AR", "RS", "AG", "other")] for name, x in found.items()
    }
    assert kinds["dp"] == [True, False, False, False]
    assert kinds["hand zero1"][1:] == kinds["hand zero3 kept"][1:] == [True, True, False]


def test_all_to_all_is_counted_apart_and_every_turn_of_a_loop(load):
    def local(x):
        def body(x, _):
            return jax.lax.all_to_all(x, "data", 0, 0, tiled=True), None

        return jax.lax.scan(body, x, length=5)[0]

    mesh = jdp.make_mesh()
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    payload = load("payload")
    found = payload.collectives(program.lower(jnp.ones((64, 6))).compile().as_text())
    assert [(c.kind, c.in_loop, c.in_branch, c.times) for c in found] == [
        ("all-to-all", True, False, 5)
    ]
    assert found[0].bytes == 8 * 6 * 4
    assert payload.sent_bytes(found, 8) == 7 * 6 * 4


def test_plain_jit_sends_in_each_microbatch_and_jdp_once(load):
    accumulate, models = load("accumulate"), load("models")
    arms = load("arms")
    model, mesh = models.make("mlp", quick=True, times=4), jdp.make_mesh(num_devices=2)
    size = 4 * models.num_params(model)

    def sent(arm):
        cost = accumulate.costs(arm)
        # loss and weight are a few bytes
        return round(cost.payload / size, 1), round(cost.branch_payload / size, 1)

    assert sent(arms.jdp_step(model, mesh, microbatch=32)) == (1, 0)
    assert sent(accumulate.jit_scan(model, mesh, 4)) == (4, 0)
    assert sent(accumulate.jdp_multi_steps(model, mesh, 4)) == (0, 1)
    assert sent(accumulate.optax_multi_steps(model, mesh, 4)) == (1, 0)


def test_payload_counts_loops_inside_loops(load):
    def inner(x, _):
        return jax.lax.pcast(jax.lax.pmean(2 * x, "data"), "data", to="varying"), None

    def outer(x, _):
        return jnp.sin(jax.lax.scan(inner, x, length=5)[0]), None

    def local(x):
        return jax.lax.scan(outer, x, length=3)[0]

    mesh = jdp.make_mesh()
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    text = program.lower(jnp.ones((8, 6))).compile().as_text()
    assert load("payload").payload_bytes(text) == (15 * 6 * 4, 0)


def test_every_exchange_of_a_curve_is_counted(load):
    """A start in 8 bits, then PowerSGD, then an agreement in 32 calls; and each by its bytes."""
    curves = load("curves")
    config = curves.Config(steps=100, local_int8=0.1, local_start=0.3, power_start=0.2)
    arms = curves.arms(config)
    exact, int8, power = curves.EXACT, curves.INT8, curves.POWER
    found = {call: arms["diloco_32_begun"].exchanges(call) for call in range(1, 101)}
    assert all(found[call] == [int8] for call in range(1, 11))
    assert all(found[call] == [power] for call in range(11, 30))
    assert found[30] == [power, exact]
    assert {call for call in range(31, 101) if found[call]} == {62, 94}
    assert found[62] == found[94] == [int8]
    assert [call for call in range(1, 101) if arms["diloco_32"].exchanges(call)] == [32, 64, 96]
    begun = [arms["power_sgd_4_begun"].exchanges(call) for call in range(1, 101)]
    assert begun == [[int8]] * 20 + [[power]] * 80
    config = curves.Config(steps=100, middle=(0.1, 0.75))
    middle = curves.arms(config)["diloco_32_middle"]
    found = {call: middle.exchanges(call) for call in range(1, 101)}
    assert all(found[call] == [int8] for call in range(1, 10))
    assert found[10] == [int8, exact]
    assert {call for call in range(11, 75) if found[call]} == {42, 74}
    assert middle.calls == 74
    assert found[42] == [int8]
    assert found[74] == [int8, exact, exact, exact]
    assert all(found[call] == [power] for call in range(75, 101))
    size = curves.sent_by(exact, jdp.make_mesh(), config)
    assert size == 2 * 7 / 8 * 4 * 115_008  # of the model's parameters


def test_a_wrong_gradient_ends_the_benchmark(load):
    measure = load("measure")
    right = {"w": np.ones(3, np.float32), "b": np.full(2, 1e-3, np.float32)}
    assert measure.gradient_error(jax.tree.map(lambda x: x[None], right), right) == 0
    with pytest.raises(SystemExit, match=r"differ by 1 of .* do not do the same work"):
        measure.gradient_error({**right, "b": 2 * right["b"]}, right)
    with pytest.raises(SystemExit, match="differ by nan"):
        measure.gradient_error({**right, "b": np.nan * right["b"]}, right)


def test_arms_take_turns_and_none_always_follows_the_same(load):
    order = []
    turns = {name: (lambda name=name: order.append(name) or ord(name)) for name in "ABC"}
    found = load("measure").interleave(turns, 40)
    assert found == {"A": [65] * 40, "B": [66] * 40, "C": [67] * 40}
    rounds = ["".join(order[i : i + 3]) for i in range(0, 120, 3)]
    assert {"".join(sorted(once)) for once in rounds} == {"ABC"}
    assert len(set(rounds)) == 6


def test_the_first_step_of_a_turn_is_not_timed(load):
    now, slow = [0.0], [True]

    def step(state):
        now[0] += 100 if slow[0] else 1
        slow[0] = False
        return state + 1, None

    turn = load("measure").stepper(step, 0, calls=4, clock=lambda: now[0])
    slow[0] = True  # whatever ran in between
    assert turn() == 1


def test_ratios_are_those_of_paired_rounds(load):
    # the machine became ten times slower: each pair says 2, the medians say something else
    found = load("measure").ratio([2, 20, 20], [1, 10, 10])
    assert found == {"median": 2, "low": 2, "high": 2}


def _content(path, script):
    """What a benchmark has written, with what every one writes checked."""
    content = json.loads(path.read_text())
    assert list(content) == ["benchmark", "machine", "settings", "results", "goals"]
    assert content["benchmark"] == script
    assert {"jax", "allocator", "load", "cores", "processor"} <= set(content["machine"])
    assert all(set(goal) == {"what", "value", "limit", "met"} for goal in content["goals"])
    return content


def _run(command):
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / command[0]), *command[1:]],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
