"""Shares for unequal devices: optimal against all others, steady, and data to the compiled step."""

import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys

import cluster
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

import jdp
from jdp.balance import balance, exchange_times, rebalance

pytestmark = pytest.mark.alternate

seconds = st.floats(0.01, 100.0)


def makespan(shares, times):
    return max(k * t for k, t in zip(shares, times, strict=True))


@settings(max_examples=150, deadline=None)
@given(
    times=st.lists(seconds, min_size=1, max_size=4),
    extra=st.integers(0, 6),
    minimum=st.integers(0, 2),
    room=st.none() | st.integers(0, 4),
)
def test_no_other_shares_are_done_earlier(times, extra, minimum, room):
    count = len(times)
    microbatches = max(minimum * count + extra, 1)
    maximum = None if room is None else max(minimum, -(-microbatches // count)) + room
    shares = balance(times, microbatches, minimum=minimum, maximum=maximum)
    top = microbatches if maximum is None else maximum
    assert shares.dtype == np.int32
    assert shares.sum() == microbatches
    assert shares.min() >= minimum
    assert shares.max() <= top
    others = itertools.product(range(minimum, min(top, microbatches) + 1), repeat=count)
    best = min(makespan(k, times) for k in others if sum(k) == microbatches)
    assert makespan(shares, times) == best


@settings(deadline=None)
@given(times=st.lists(seconds, min_size=1, max_size=16), microbatches=st.integers(1, 300))
def test_how_close_to_the_harmonic_optimum(times, microbatches):
    optimum = microbatches / sum(1 / t for t in times)
    bound = optimum * (1 + (len(times) - 1) / microbatches)
    assert makespan(balance(times, microbatches, minimum=0), times) <= bound * (1 + 1e-9)


def test_equal_replicas_get_equal_shares_and_the_first_get_more():
    np.testing.assert_array_equal(balance([0.2] * 4, 8), [2, 2, 2, 2])
    np.testing.assert_array_equal(balance([0.2] * 4, 6), [2, 2, 1, 1])
    np.testing.assert_array_equal(balance(np.array([1.0, 100.0]), 4), [3, 1])
    np.testing.assert_array_equal(balance([1.0, 100.0], 4, minimum=0), [4, 0])
    np.testing.assert_array_equal(balance([1.0, 100.0], 4, minimum=2, maximum=2), [2, 2])


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (([1.0, 0.0], 4), {}, r"got 0\.0 seconds for replica 1: .* positive, finite"),
        (([1.0, np.nan], 4), {}, "got nan seconds for replica 1"),
        (([np.inf], 4), {}, "got inf seconds for replica 0"),
        (([], 4), {}, r"a list of one number for each, .* shape \(0,\)"),
        ((1.0, 4), {}, r"array of shape \(\)"),
        ((["fast"], 4), {}, "needs seconds, as numbers"),
        (([1.0] * 8, 4), {}, "cannot deal 4 microbatches out to 8 replicas, at least 1 to each"),
        (([1.0] * 2, 9), {"maximum": 4}, "at least 1 and at most 4 to each"),
        (([1.0] * 2, 8), {"minimum": 5, "maximum": 4}, "at least 5 and at most 4"),
        (([1.0] * 2, 8), {"minimum": -1}, "minimum=-1"),
        (([1.0] * 2, 0), {}, "microbatches=0"),
        (([1.0] * 2, 2.5), {}, r"microbatches=2\.5"),
    ],
)
def test_what_cannot_be_balanced(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        balance(*args, **kwargs)


def test_follows_a_replica_that_slows_down():
    state = rebalance(None, [1.0, 1.0, 1.0], 12)
    np.testing.assert_array_equal(state.shares, [4, 4, 4])
    seen = []
    for _ in range(8):
        state = rebalance(state, [1.0, 4.0, 1.0], 12)
        seen.append(state.shares.tolist())
    assert seen[0] != [4, 4, 4]  # it answers at once, and goes on
    assert seen[-1] == seen[-3] == balance([1.0, 4.0, 1.0], 12).tolist() == [6, 1, 5]
    for _ in range(8):
        state = rebalance(state, [1.0, 1.0, 1.0], 12)
    np.testing.assert_array_equal(state.shares, [4, 4, 4])


def test_flicker_moves_nothing():
    random = np.random.default_rng(0)
    state = rebalance(None, [1.0, 1.0, 2.0, 2.0], 48)
    first = state.shares
    for _ in range(200):
        times = np.array([1.0, 1.0, 2.0, 2.0]) * random.uniform(0.95, 1.05, 4)
        state = rebalance(state, times, 48)
        np.testing.assert_array_equal(state.shares, first)
    # without the tolerance it would have
    moved = rebalance(state._replace(times=first * 0 + 1.0), [1.0, 1.0, 2.0, 2.1], 48, tolerance=0)
    assert moved.shares.tolist() != first.tolist()


def test_a_replica_that_was_not_measured_keeps_its_time():
    state = rebalance(None, [1.0, 3.0], 12)
    after = rebalance(state, [np.nan, np.nan], 12)
    np.testing.assert_array_equal(after.times, state.times)
    np.testing.assert_array_equal(after.shares, state.shares)
    with pytest.raises(ValueError, match="got nan seconds for replica 0"):
        rebalance(None, [np.nan, 1.0], 12)


def test_other_numbers_of_microbatches_and_other_bounds_are_obeyed_at_once():
    state = rebalance(None, [1.0, 3.0], 12)
    assert rebalance(state, [1.0, 3.0], 16).shares.sum() == 16
    assert rebalance(state, [1.0, 3.0], 12, maximum=7).shares.tolist() == [7, 5]
    assert rebalance(state, [1.0, 3.0], 12, minimum=5).shares.tolist() == [7, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decay": 1}, "got decay=1 and tolerance=0.05"),
        ({"tolerance": -0.1}, "tolerance=-0.1"),
        ({"times": [1.0, 1.0, 1.0]}, "got 3 times for 2 replicas"),
        ({"times": [1.0, -1.0]}, "seconds for replica 1"),
    ],
)
def test_what_cannot_be_rebalanced(change, message):
    kwargs = {"times": [1.0, 1.0], "microbatches": 8} | change
    with pytest.raises(ValueError, match=message):
        rebalance(rebalance(None, [1.0, 1.5], 8), **kwargs)


# --- shares are data


PARAMS, LOSS, MASKED, BATCH = reference.mlp()
HOST = jax.device_get(BATCH)


@functools.cache
def mesh_of(count=4):
    return jdp.make_mesh(num_devices=count)


@pytest.mark.parametrize("loss_fn", [LOSS, MASKED], ids=["mean", "masked"])
@pytest.mark.parametrize(
    "make",
    [lambda: optax.chain(jdp.all_reduce(), optax.sgd(1.0)), lambda: jdp.zero1(optax.sgd(1.0))],
    ids=["plain", "zero1"],
)
def test_shares_change_between_steps_of_one_program(make, loss_fn):
    """16 microbatches of 4 rows on 4 replicas with room for 8 each."""
    mesh, tx, microbatch, room = mesh_of(), make(), 4, 8
    step = jdp.train_step(loss_fn, tx, mesh, microbatch=microbatch)
    state = jdp.init_state(PARAMS, tx, mesh)
    want = PARAMS
    for shares in ([4, 4, 4, 4], [8, 1, 3, 4], [0, 8, 8, 0], balance([1, 2, 4, 4], 16, maximum=8)):
        batch = jax.tree.map(lambda x, k=shares: spread(x, k, room, microbatch), HOST)
        state, metrics = step(state, batch, shares=np.asarray(shares, np.int32))
        loss, grads = reference.gradient(loss_fn, want, BATCH)
        want = optax.apply_updates(want, jax.tree.map(jnp.negative, grads))
        np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-6)
    reference.assert_close(state.params, want, rtol=2e-5)
    assert step._compiled._cache_size() == 1


def spread(x, shares, room, microbatch):
    """Each replica's rows first, then NaN up to the room that it has."""
    out = np.full((len(shares), room * microbatch, *x.shape[1:]), np.nan, x.dtype)
    start = 0
    for part, k in zip(out, shares, strict=True):
        part[: k * microbatch] = x[start : start + k * microbatch]
        start += k * microbatch
    return out.reshape(-1, *x.shape[1:])


def test_fed_by_the_same_shares():
    """Other shares with the same largest one make batches of the same shape."""
    mesh, tx = mesh_of(), optax.chain(jdp.all_reduce(), optax.sgd(1.0))
    step = jdp.train_step(MASKED, tx, mesh, microbatch=4)
    state, want = jdp.init_state(PARAMS, tx, mesh), PARAMS
    for shares in ([7, 4, 3, 2], [2, 3, 4, 7]):
        for batch in jdp.feed([HOST], mesh, microbatch=4, shares=shares):
            state, _ = step(state, batch, shares=shares)
        _, grads = reference.gradient(MASKED, want, BATCH)
        want = optax.apply_updates(want, jax.tree.map(jnp.negative, grads))
    reference.assert_close(state.params, want, rtol=2e-5)
    assert step._compiled._cache_size() == 1


def test_times_of_one_process():
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    np.testing.assert_array_equal(exchange_times(0.5, mesh), [0.5] * 8)
    np.testing.assert_array_equal(exchange_times(range(8), mesh), range(8))
    np.testing.assert_array_equal(exchange_times([3, 4], mesh, axis="node"), [3, 4])
    with pytest.raises(ValueError, match=r"got 3 numbers for the 8 replica\(s\) along \('node', "):
        exchange_times([1.0, 2.0, 3.0], mesh)
    with pytest.raises(ValueError, match="needs seconds, as numbers"):
        exchange_times("slow", mesh)


def _together():
    import numpy as np
    import optax
    import reference

    import jdp

    me, mesh = jax.process_index(), jdp.make_mesh()
    params, _, loss_fn, batch = reference.mlp()
    host = jax.device_get(batch)
    said = {"times": [jdp.exchange_times(0.5 + me, mesh).tolist()]}
    said["times"].append(jdp.exchange_times([1 + me, 2 + me], mesh).tolist())
    order = [jax.devices()[i] for i in (0, 2, 1, 3)]
    other = jax.sharding.Mesh(order, ("data",))
    said["times"].append(jdp.exchange_times([1 + 10 * me, 2 + 10 * me], other).tolist())

    tx = optax.chain(jdp.all_reduce(), optax.sgd(1.0))
    step = jdp.train_step(loss_fn, tx, mesh, microbatch=4)
    state = jdp.init_state(params, tx, mesh)
    losses = []
    for shares in ([1, 7, 4, 4], [7, 4, 4, 1]):
        start = 4 * sum(shares[: 2 * me])
        rows = slice(start, start + 4 * sum(shares[2 * me : 2 * me + 2]))
        mine = {name: x[rows] for name, x in host.items()}
        for batch in jdp.feed([mine], mesh, microbatch=4, shares=shares):
            state, metrics = step(state, batch, shares=np.asarray(shares, np.int32))
            losses.append(float(metrics["loss"]))
    said["losses"] = losses
    said["compiled"] = step._compiled._cache_size()
    said["params"] = {name: np.asarray(x).tolist() for name, x in state.params.items()}
    return said


@pytest.mark.multiprocess
def test_two_processes_with_unequal_shares_train_as_one_device_does():
    zero, one = (answer.value for answer in cluster.run(_together, num_devices=2, seconds=120))
    assert zero == one
    times = [[0.5, 0.5, 1.5, 1.5], [1, 2, 2, 3], [1, 11, 2, 12]]
    assert zero["times"] == times
    assert zero["compiled"] == 1
    params, losses = reference.train(MASKED, PARAMS, optax.sgd(1.0), [BATCH] * 2)
    np.testing.assert_allclose(zero["losses"], losses, rtol=2e-6)
    got = {name: np.asarray(x, np.float32) for name, x in zero["params"].items()}
    reference.assert_close(got, params, rtol=5e-6)


@pytest.mark.multiprocess
def test_the_benchmark_runs(tmp_path):
    script = pathlib.Path(__file__).parents[1] / "benchmarks" / "balance.py"
    command = [sys.executable, str(script), "--quick", "--json", str(tmp_path / "out.json")]
    path = os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [row["arm"] for row in rows] == ["equal", "balanced", "swapped", "followed"]
    assert rows[0]["shares"] == "4 + 4"
    assert all(row["step_ms"] > 0 and row["/ optimum"] > 0 for row in rows)
