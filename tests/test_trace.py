"""Traces: what a moment counts as, and that the profiler's own trace is read."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.trace import (
    Mark,
    Op,
    Trace,
    _without_containers,
    breakdown,
    busy,
    common,
    length,
    marked,
    read,
    record,
    union,
)


def op(device, start, end, *, sends=False, name=None):
    return Op(device, name or ("all-reduce.1" if sends else "fusion"), sends, start, end)


def test_a_moment_is_compute_before_communication_before_input_before_host():
    ops = (op(0, 0, 4), op(0, 3, 6, sends=True), op(0, 9, 10))
    marks = (Mark("input", 5, 8), Mark("step", 0, 1))
    found = breakdown(Trace(ops, marks, False), 0, 12)
    assert found[:5] == (5, 2, 2, 3, 1)
    assert found.total == 12


def test_only_the_stretch_counts():
    trace = Trace((op(0, 0, 4), op(0, 4, 8, sends=True)), (), False)
    assert breakdown(trace, 3, 5)[:4] == (1, 1, 0, 0)


def test_accelerators_are_averaged_and_who_comes_last_waits_least():
    # device 1 computes longer; device 0 waits for it in the collective
    ops = (op(0, 0, 2), op(0, 2, 6, sends=True), op(1, 0, 5), op(1, 5, 6, sends=True))
    found = breakdown(Trace(ops, (), False), 0, 6)
    assert (found.compute, found.communication, found.least) == (3.5, 2.5, 1)
    assert busy(Trace(ops, (), False), 0, 6) == {0: (2, 4), 1: (5, 1)}


def test_devices_that_share_cores_communicate_only_while_none_computes():
    ops = (op(0, 0, 2), op(0, 2, 6, sends=True), op(1, 0, 5), op(1, 5, 6, sends=True))
    found = breakdown(Trace(ops, (), True), 0, 6)
    assert (found.compute, found.communication, found.hidden) == (5, 1, 3)


def test_loops_are_left_out_where_what_is_in_them_is_there():
    loop, inner = op(0, 0, 9, name="while.3"), op(0, 1, 2)
    assert list(_without_containers([inner, loop])) == [inner]
    empty, later = op(0, 0, 1, name="call.1"), op(0, 2, 3)  # nothing inside was noted
    assert list(_without_containers([empty, later])) == [empty, later]
    long, short = op(0, 0, 9, name="fusion.1"), op(0, 1, 2)  # beside each other, not inside
    assert list(_without_containers([long, short])) == [long, short]


def test_intervals_against_a_ruler():
    rng, ticks = np.random.default_rng(1), np.arange(200) + 0.5
    for _ in range(50):
        some, others = (
            [(a, a + b) for a, b in rng.integers(0, 50, (rng.integers(0, 12), 2))] for _ in range(2)
        )
        inside = [np.zeros(200, bool), np.zeros(200, bool)]
        for mask, intervals in zip(inside, (some, others), strict=True):
            for start, end in intervals:
                mask |= (ticks > start) & (ticks < end)
        assert length(union(some)) == inside[0].sum()
        assert length(common(union(some), union(others))) == (inside[0] & inside[1]).sum()


def test_the_profilers_trace_of_a_step_tells_operations_devices_and_marks(tmp_path):
    mesh, tx = jdp.make_mesh(), optax.chain(jdp.all_reduce(), optax.sgd(0.1))
    step = jdp.train_step(lambda p, x: jnp.mean(jnp.tanh(x @ p["w"])), tx, mesh)
    state = jdp.init_state({"w": jnp.ones((256, 256))}, tx, mesh)
    batch = jdp.replicate(np.ones((64, 256), np.float32), mesh)
    state, _ = jax.block_until_ready(step(state, batch))
    with record(folder=tmp_path) as recording, marked("run"):
        with marked("input"):
            time.sleep(0.05)
        for _ in range(3):
            state, metrics = jax.block_until_ready(step(state, batch))
    trace = recording.trace
    assert trace.shares_cores
    assert {one.device for one in trace.ops} == set(range(8))
    sent = [one for one in trace.ops if one.communicates]
    assert len(sent) == 3 * 8
    assert all(one.name.startswith("all-reduce") for one in sent)
    run = next(mark for mark in trace.marks if mark.name == "run")
    found = breakdown(trace, run.start, run.end)
    assert found.total == pytest.approx(run.end - run.start)
    assert found.input >= 0.05  # nothing ran meanwhile
    assert found.compute > 0
    assert read(tmp_path) == trace  # what was kept is read again
    assert float(metrics["loss"]) <= 1


def test_names_of_ones_own_count_as_collectives(tmp_path):
    with record(folder=tmp_path) as recording:
        jax.block_until_ready(jax.jit(lambda x: jnp.tanh(x) + 1)(jnp.ones(4096)))
    names = {one.name for one in recording.trace.ops}
    assert names
    assert not any(one.communicates for one in recording.trace.ops)
    assert all(one.communicates for one in read(tmp_path, names).ops)


def test_a_second_trace_and_a_folder_without_one_are_refused(tmp_path):
    once = "one trace can be recorded at a time"
    with record(), pytest.raises(RuntimeError, match=once), record():
        pass
    with pytest.raises(FileNotFoundError, match="There is no trace"):
        read(tmp_path)
