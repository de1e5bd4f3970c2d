"""Exactly-once data (jdp/batches.py, shuffle.py, reads.py, together.py, loading.py)."""

import collections
import functools
import itertools
import json
import multiprocessing
import re
import threading
import time

import cluster
import dying
import grain
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import optax
import pytest
from dying import double, noise
from jax.sharding import PartitionSpec as P
from reference import mlp

import jdp
from jdp import loading
from jdp.batches import Batches
from jdp.loading import Pace
from jdp.reads import fingerprint
from jdp.shuffle import shuffled
from jdp.sources import Columns

pytestmark = pytest.mark.alternate


def _mesh(num=8):
    return jdp.make_mesh(devices=jax.devices()[:num])


def _source(length):
    return Columns({"id": np.arange(length), "x": np.arange(length, dtype=np.float32)[:, None]})


def _batches(length=37, num=8, *, batch=16, seed=3, source=None, **options):
    source = _source(length) if source is None else source
    return Batches(source, _mesh(num), batch=batch, seed=seed, **options)


def _ids(batch):
    return np.asarray(batch["id"])[np.asarray(batch["weight"]) == 1].tolist()


def _host(batch):
    return {name: np.asarray(leaf).tolist() for name, leaf in batch.items()}


# The order ----------------------------------------------------------------------------------------


@hypothesis.given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
@hypothesis.settings(deadline=None, max_examples=40)
def test_the_order_is_a_permutation_whose_parts_can_be_asked_for(length, seed, epoch):
    whole = shuffled(np.arange(length), length, seed=seed, epoch=epoch)
    assert sorted(whole) == list(range(length))
    some = np.arange(0, length, 7)
    assert np.array_equal(shuffled(some, length, seed=seed, epoch=epoch), whole[some])


def test_e06_the_order_is_another_in_each_epoch_and_for_each_seed():
    orders = {
        tuple(shuffled(np.arange(50), 50, seed=seed, epoch=epoch))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


@pytest.mark.parametrize("length", [5, 10])
def test_every_example_comes_equally_often_to_every_position(length):
    tries = 500
    orders = [shuffled(np.arange(length), length, seed=1, epoch=e) for e in range(tries)]
    counts = np.zeros((length, length))
    for order in orders:
        counts[np.arange(length), order] += 1
    _looks_uniform(counts, (length - 1) ** 2)


def test_every_order_of_a_small_set_comes_equally_often():
    orders = [tuple(shuffled(np.arange(6), 6, seed=1, epoch=e)) for e in range(2000)]
    counted = collections.Counter(orders)
    counts = np.asarray([counted[order] for order in itertools.permutations(range(6))])
    _looks_uniform(counts, 719)


def _looks_uniform(counts, freedom):
    chi = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    # of chi squared: mean and standard deviation; five of them
    assert chi < freedom + 5 * (2 * freedom) ** 0.5


def test_the_order_of_a_seed_is_for_ever():
    # a changed order would make saved positions repeat and lose examples
    assert shuffled(np.arange(8), 8, seed=0, epoch=0).tolist() == [0, 1, 2, 4, 5, 6, 3, 7]
    assert shuffled(np.asarray(5), 10**12, seed=7, epoch=3).shape == ()
    assert int(shuffled(5, 10**12, seed=7, epoch=3)) == 904726727135


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"length": 0}, "length 0"),
        ({"length": 2**63}, "length 9223372036854775808"),
        ({"positions": [3]}, "positions to 3; the order is one of 3 examples, .* from 0 to 2"),
        ({"positions": [-1]}, "positions from -1"),
        ({"seed": -1}, "seed -1"),
        ({"epoch": 2**63}, "epoch 9223372036854775808"),
    ],
)
def test_what_has_no_order(change, said):
    given = {"positions": [0], "length": 3, "seed": 0, "epoch": 0} | change
    with pytest.raises(ValueError, match=f"jdp.shuffled got {said}"):
        shuffled(given.pop("positions"), given.pop("length"), **given)


# Exactly once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [5, 32, 37])
def test_every_example_once_an_epoch_and_the_same_batches_on_all_devices(num, length):
    batches = _batches(length, num, epochs=2, microbatch=2)
    alone = _batches(length, 1, epochs=2, prefetch=0)
    taken = list(batches)
    assert [_host(b) for b in taken] == [_host(b) for b in alone]
    steps = batches.steps_per_epoch
    assert len(taken) == 2 * steps == batches.num_steps
    for epoch in range(2):
        part = taken[epoch * steps : (epoch + 1) * steps]
        ids = [i for b in part for i in _ids(b)]
        assert sorted(ids) == list(range(length))
        assert ids == shuffled(np.arange(length), length, seed=3, epoch=epoch).tolist()
    ragged = taken[steps - 1]
    assert float(ragged["weight"].sum()) == (length - 1) % 16 + 1
    assert not np.asarray(ragged["x"])[np.asarray(ragged["weight"]) == 0].any()
    assert all(b["x"].sharding.num_devices == num for b in taken)


def test_exactly_once_on_two_data_axes_and_beside_a_model_axis():
    expected = [_host(b) for b in _batches(epochs=1)]
    for names, shape in ((("node", "device"), (2, 4)), (("data", "model"), (4, 2))):
        mesh = jdp.make_mesh(names, shape)
        batches = Batches(_source(37), mesh, batch=16, seed=3, epochs=1)
        assert [_host(b) for b in batches] == expected
        data = jdp.data_axes(mesh)
        assert batches.at(0)["x"].sharding.spec == P(data)


@pytest.mark.parametrize("hosts", [2, 4])
def test_e04_e05_the_shares_of_all_hosts_are_the_dataset(hosts):
    batches = _batches(22, batch=8)
    seen = []
    for host in range(hosts):
        slots = np.arange(8).reshape(hosts, -1)[host]
        reads = batches._reads._replace(slots=slots)
        for step in range(batches.steps_per_epoch):
            read = reads.read(step)
            seen += read["id"][read["weight"] == 1].tolist()
    assert sorted(seen) == list(range(22))


def test_numbers_may_be_large_and_of_numpy():
    batches = _batches(seed=np.int64(2**63 - 1), batch=np.int32(16), source=Far())
    state = json.loads(json.dumps(batches.state()))
    for step in (0, 10**6, 2**52):
        batches.restore(state | {"step": step})
        batch = next(iter(batches))
        ids = batches.rows(step)
        assert np.asarray(batch["x"]).tolist() == (ids % 1000).tolist()
        assert len(set(ids)) == 16
    assert batches.step == 2**52 + 1
    with pytest.raises(
        ValueError, match="no step 9223372036854775808; its steps are 0 to without end"
    ):
        batches.at(2**63)


class Far:
    """As many examples as an index can count, almost."""

    def __len__(self):
        return 2**62

    def __getitem__(self, index):
        assert 0 <= index < 2**62
        return {"x": np.int32(index % 1000)}


def test_a_batch_can_be_asked_for_and_an_epoch_gone_through_without_moving():
    batches = _batches(epochs=2)
    taken = list(batches)
    assert batches.step == 6
    assert batches.epoch == 2
    assert list(batches) == []
    for step, batch in enumerate(taken):
        assert _host(batches.at(step)) == _host(batch)
        assert batches.rows(step).tolist() == _ids(batch)
    for _ in range(2):
        assert [_host(b) for b in batches.one_epoch(1)] == [_host(b) for b in taken[3:]]
    assert batches.step == 6
    plain = _batches(shuffle=False)
    assert [i for b in plain.one_epoch(9) for i in _ids(b)] == list(range(37))


def test_weights_of_the_examples_are_kept_and_padding_does_not_count():
    source = [{"id": i, "weight": np.float32(i / 2)} for i in range(9)]
    (batch,) = _batches(source=source, shuffle=False, epochs=1)
    assert np.asarray(batch["weight"]).tolist() == [i / 2 for i in range(9)] + [0] * 7


def test_grain_datasets_and_nested_examples_are_sources():
    source = grain.MapDataset.range(20).map(lambda i: {"id": i, "in": {"x": np.full(3, i)}})
    batches = _batches(source=source, epochs=1)
    first, second = batches
    assert first["in"]["x"].shape == (16, 3)
    assert sorted(_ids(first) + _ids(second)) == list(range(20))


def test_e03_threads_and_workers_change_nothing():
    options = {"transform": double, "random_transform": noise, "epochs": 2}
    expected = [_host(b) for b in _batches(**options)]
    assert expected[0]["x"] != expected[3]["x"]
    assert [_host(b) for b in _batches(**options, threads=3)] == expected
    batches = _batches(**options | {"epochs": 1000}, workers=2)
    loop = iter(batches)
    assert [_host(next(loop)) for _ in range(4)] == expected[:4]
    assert batches.state()["step"] == 4  # though the workers are further
    assert len(multiprocessing.active_children()) == 2
    del loop  # and by that alone they end
    _wait_until(lambda: not multiprocessing.active_children())
    again = _batches(**options, threads=2)
    again.restore(batches.state())
    assert [_host(b) for b in again] == expected[4:]


def _wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_random_transforms_differ_by_example_and_epoch_and_seed():
    def drawn(seed):
        batches = _batches(random_transform=noise, shuffle=False, seed=seed)
        return [np.asarray(batches.at(step)["x"]).ravel() - np.arange(16) for step in (0, 3)]

    found = np.concatenate([*drawn(3), *drawn(4)])
    assert len(np.unique(found.round(4))) == 4 * 16


# The position -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(8, 8), (8, 4), (2, 8), (1, 2)])
def test_e01_e02_the_position_moves_to_other_devices(before, after):
    expected = [_host(b) for b in _batches(epochs=3)]
    first = _batches(num=before, epochs=3, prefetch=3)
    taken = []
    for batch in first:
        taken.append(_host(batch))
        if len(taken) == 4:
            break
    state = json.loads(json.dumps(first.state()))
    assert (state["step"], state["epoch"]) == (4, 1)
    second = _batches(num=after, epochs=3)
    second.restore(state)
    assert taken + [_host(b) for b in second] == expected
    # and the first loop itself goes on, whatever had been read ahead
    assert [_host(b) for b in first] == expected[4:]


@functools.cache
def _run_on(num):
    """A step with dropout, and a state to start from, on so many devices."""
    mesh = _mesh(num)
    tx = optax.chain(jdp.all_reduce(), optax.sgd(0.1, momentum=0.9))

    def loss_fn(params, batch, key):
        hidden = jax.numpy.tanh(batch["x"] @ params["w1"] + params["b1"])
        hidden *= 2.0 * jax.random.bernoulli(key, 0.5, hidden.shape)
        return jdp.Mean.of(((hidden @ params["w2"] - batch["y"]) ** 2).mean(-1), batch["weight"])

    fresh = jdp.init_state(mlp()[0], tx, mesh, key=jax.random.key(5))
    return jdp.train_step(loss_fn, tx, mesh, microbatch=2, donate=False), fresh


def _losses(num, batches, state=None, steps=9):
    step, fresh = _run_on(num)
    state = fresh if state is None else jdp.restage(state, fresh)
    losses = []
    for _, batch in zip(range(steps), batches, strict=False):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return jax.tree.map(np.asarray, jdp.logical(state).params), jdp.logical(state), losses


def test_e01_e12_e13_a_run_on_8_then_4_then_8_devices_is_the_uninterrupted_one():
    data = {name: np.asarray(rows) for name, rows in mlp()[3].items() if name in ("x", "y")}

    def batches(num):
        return _batches(num=num, source=Columns(data), microbatch=2)

    params, _, expected = _losses(8, batches(8))
    state, position, losses = None, None, []
    for num in (8, 4, 8):
        part = batches(num)
        if position is not None:
            part.restore(position)
        again, state, some = _losses(num, part, state, steps=3)
        losses += some
        position = part.state()
        assert position["step"] == len(losses)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for name in params:
        np.testing.assert_allclose(again[name], params[name], rtol=2e-6, atol=1e-7)


# Several processes --------------------------------------------------------------------------------


class Counted:
    """Says who read what."""

    def __init__(self, length):
        self.length, self.read = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(int(index))
        return {"id": np.int32(index), "x": np.float32([index])}


def _local(array):
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def _mine(batch):
    """Ids of the rows on this process's devices that count."""
    return _local(batch["id"])[_local(batch["weight"]) == 1].tolist()


def _two():
    import time

    import numpy as np
    import test_batches

    import jdp
    from jdp import processes
    from jdp.batches import Batches

    me, mesh = jax.process_index(), jdp.make_mesh()
    source = test_batches.Counted(37)

    def make(**options):
        return Batches(source, mesh, **{"batch": 16, "seed": 3, "epochs": 3} | options)

    said = {"jax": jax.process_count()}
    first = make()
    source.read.clear()
    said["taken"], said["state"] = [], None
    for batch in first:
        said["taken"].append(test_batches._mine(batch))
        if len(said["taken"]) == 4:
            said["state"] = first.state()
            break
    workers = make(threads=2)
    workers.restore(said["state"])
    said["rest"] = [test_batches._mine(batch) for batch in workers]
    said["read"] = sorted(set(source.read))
    said["at"] = test_batches._mine(first.at(5))

    def attempt(name, batches, act=list):
        try:
            act(batches)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    attempt("seed", make(seed=3 + me))
    ahead = make()
    ahead.restore(said["state"] | {"step": 4 + me})
    attempt("position", ahead)
    attempt("shapes", make(transform=lambda e: e | {"x": np.zeros(2 + me, np.float32)}))

    def breaks(example):
        if me == 1 and example["id"] == first.rows(1)[-1]:
            raise OSError("disk on fire")
        return example

    attempt("broken", make(transform=breaks))

    if jax.local_device_count() == 1:
        processes.ANSWER_SECONDS = 1

        def sticks(example):
            time.sleep(2.5 * (me == 1 and example["id"] == first.rows(1)[-1]))
            return example

        attempt("stuck", make(transform=sticks))
    return said


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_devices", [1, 4])
def test_a29_b01_b03_b05_b14_e02_e05_two_processes_read_their_own_rows_and_fail_together(
    num_devices,
):
    answers = [a.value for a in cluster.run(_two, num_devices=num_devices, seconds=120)]
    alone = _batches(source=Counted(37), epochs=3)
    for step in range(9):
        parts = [(said["taken"] + said["rest"])[step] for said in answers]
        assert parts[0] + parts[1] == alone.rows(step).tolist()
        assert len(parts[1]) in (8, 0)  # 37 = 2 * 16 + 5: no row of the ragged end
    fingerprint = {36 * i // 7 for i in range(8)}
    for said in answers:
        own = {i for part in said["taken"] + said["rest"] for i in part}
        assert own <= set(said["read"]) <= own | fingerprint
    assert [said["at"] for said in answers] == [alone.rows(5).tolist(), []]
    assert answers[0]["state"] == answers[1]["state"]
    moved = _batches(source=Counted(37), epochs=3)
    moved.restore(answers[0]["state"])
    assert [_ids(b) for b in moved] == [alone.rows(step).tolist() for step in range(4, 9)]
    # from one process to two: its position is the very same, and they went on from it
    next(loop := iter(alone)), next(loop), next(loop), next(loop)
    assert alone.state() == answers[0]["state"]
    for said in answers:
        assert "disagree about the data: seed is 3 on process 0 but 4 on process 1" in said["seed"]
        assert "data: step is 4 on process 0 but 5 on process 1" in said["position"]
        assert "leaf ['x'] is float32[" in said["shapes"]
    assert "process 1 failed with RuntimeError: jdp.Batches could not" in answers[0]["broken"]
    assert answers[0]["broken"].startswith("RuntimeError: jdp.Batches has no batch 1:")
    assert "disk on fire" in answers[1]["broken"]
    if num_devices == 1:
        said = "jdp.Batches: process 0 waited 1 s for process 1, which did not answer"
        assert answers[0]["stuck"].startswith(f"TimeoutError: {said}")
        assert "process 0 failed with TimeoutError" in answers[1]["stuck"]


def test_e02_a_process_reads_the_rows_of_its_own_replicas_only():
    source = Counted(1000)
    batches = _batches(source=source)
    assert len(source.read) == 8
    reads = batches._reads._replace(slots=np.arange(4, 8))
    source.read.clear()
    reads.read(2)
    assert source.read == batches.rows(2)[4:8].tolist()


# Failures -----------------------------------------------------------------------------------------


def test_a_worker_that_dies_names_itself_after_the_batches_before():
    batches = _batches(source=dying.Source(64), workers=2, shuffle=False, epochs=1)
    said = r"worker process 1 \(pid \d+\), which was to read batch 1, has died with exit code 0"
    with pytest.raises(RuntimeError, match=said):
        list(batches)
    assert batches.step == 1


def test_an_error_names_the_example_and_arrives_after_the_batches_before_it():
    def broken(example):
        if example["id"] == 20:
            raise KeyError("mask")
        return example

    batches = _batches(transform=broken, shuffle=False, epochs=1)
    said = r"could not read example 20 in epoch 0: KeyError: 'mask'.*mend it"
    with pytest.raises(RuntimeError, match=said):
        list(batches)
    assert batches.step == 1
    threaded = _batches(transform=broken, shuffle=False, epochs=1, threads=2)
    with pytest.raises(RuntimeError, match=said):
        list(threaded)


def _leaves(example):
    raise SystemExit(0)


def test_a_library_that_leaves_is_an_error_that_names_the_example():
    with pytest.raises(RuntimeError, match=r"could not read example 0 in epoch 0: SystemExit: 0"):
        _batches(transform=_leaves, shuffle=False).at(0)


def test_a_batch_unlike_the_first_is_named_by_its_step():
    batches = _batches(transform=lambda e: {"x": np.zeros(1 + e["id"] // 16)}, shuffle=False)
    batches.restore(batches.state() | {"step": 1})
    loop = iter(batches)
    next(loop)
    with pytest.raises(
        ValueError, match=r"jdp.Batches: leaf \['x'\] of batch 2 is float32\[16, 3\]"
    ):
        next(loop)
    assert batches.step == 2


class Broken(list):
    def __getitem__(self, index):
        raise OSError("stale file handle")


def test_a_source_that_cannot_be_read_says_so_at_once():
    said = "could not read example 0: OSError: stale file handle"
    with pytest.raises(RuntimeError, match=said):
        _batches(source=Broken([1]))


def test_threads_end_when_the_loop_is_left():
    for _ in _batches(threads=2):
        break
    _wait_until(lambda: not any(t.name == "jdp.feed" for t in threading.enumerate()))


def test_a_loop_that_is_left_does_not_wait_for_a_slow_reader():
    gate = threading.Event()

    def slow(example):
        if example["id"] >= 16:
            gate.wait(30)
        return example

    loop = iter(_batches(transform=slow, shuffle=False, threads=1))
    next(loop)
    del loop
    _wait_until(lambda: not any(t.name == "jdp.feed" for t in threading.enumerate()))
    assert not gate.is_set()
    gate.set()


# The pace -----------------------------------------------------------------------------------------


def test_the_pace_says_when_training_waits():
    quick = Pace(loaded=100, load_seconds=10.0, wait_seconds=4.0, total_seconds=10.0, batch=8)
    assert quick.examples_per_second == 80
    assert quick.waiting == 0.4
    assert quick.complaint() is None  # not yet long enough
    assert quick._replace(wait_seconds=6.0, total_seconds=100.0).complaint() is None
    said = quick._replace(wait_seconds=6.0).complaint()
    assert said is not None
    assert "waited 6.0 of 10.0 s (60%) for data. The loader gives 80 examples a second" in said
    nothing = Pace(0, 0.0, 0.0, 0.0, 8)
    assert np.isnan(nothing.examples_per_second)
    assert nothing.waiting == 0


def test_a_loop_that_waits_is_told_once(monkeypatch):
    monkeypatch.setattr(loading, "_WAITED_SECONDS", 0.02)

    def slow(example):
        time.sleep(0.002)
        return example

    batches = _batches(transform=slow, epochs=4)
    with pytest.warns(
        RuntimeWarning, match="training waited .* for data. The loader gives"
    ) as seen:
        list(batches)
    assert len(seen) == 1
    pace = batches.pace
    assert pace.loaded == 11
    # 4 * 37 examples without the first batch slept 2 ms each, at least
    assert 0 < pace.examples_per_second <= 11 * 16 / (132 * 0.002)


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"source": iter([])}, TypeError, "needs a source with a length .* list_iterator"),
        ({"source": {"x": np.zeros(3)}}, TypeError, r"got a dict.*jdp.Columns\(arrays\)"),
        ({"source": []}, ValueError, "empty source"),
        ({"batch": 12}, ValueError, "batch=12, which is not a multiple of 8.*Take 8 or 16"),
        ({"batch": 0}, ValueError, "batch=0; it is a whole number from 1"),
        ({"microbatch": 0}, ValueError, "microbatch=0"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"seed": 2**63}, ValueError, "seed=9223372036854775808; .* to 9223372036854775807"),
        ({"epochs": 10**30}, ValueError, "epochs=10"),
        ({"epochs": 0}, ValueError, "epochs=0"),
        ({"workers": 1.5}, ValueError, "workers=1.5"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(options, error, said):
    with pytest.raises(error, match=said):
        _batches(**options)


@pytest.mark.parametrize(
    ("examples", "error", "said"),
    [
        ([np.zeros(3)] * 16, TypeError, "example 0 is a ndarray.*must be a dict"),
        ([None] * 16, TypeError, "example 0 is a NoneType"),
        (
            [{"x": np.zeros(2 + i // 9)} for i in range(16)],
            ValueError,
            r"leaf \['x'\] of example 9 is float64\[3\], of example 0 float64\[2\].*Packed",
        ),
        (
            [{"x": 0}] * 15 + [{"y": 0}],
            ValueError,
            r"example 15 has the names \['y'\], example 0 the names \['x'\]",
        ),
        (
            [{"x": {"y": 0}}] * 15 + [{"x": 0}],
            ValueError,
            r"15 has a int in \['x'\], example 0 the",
        ),
        ([{"x": "a"}] * 16, TypeError, r"leaf \['x'\] of example 0 is a str that JAX .*transform="),
        ([{"x": 0}] * 15 + [{"x": b"b"}], TypeError, "of example 15 is a bytes that JAX"),
        ([{"x": [[1], [1, 2]]}] * 16, TypeError, "of example 0 is a list that JAX .*inhomog"),
        ([{"x": jax.random.key(0)}] * 16, TypeError, "leaf .* JAX cannot hold as an array of num"),
        (
            [{"x": 2**40}] * 16,
            ValueError,
            r"jdp.Batches: leaf \['x'\] of batch 0 holds 1099511627776, which does not fit int32",
        ),
        (
            [{"weight": -1.0}] * 16,
            ValueError,
            "jdp.Batches: the weight of batch 0 is -1.0 in row 0",
        ),
    ],
)
def test_examples_that_make_no_batch_are_refused(examples, error, said):
    with pytest.raises(error, match=said):
        _batches(source=examples, shuffle=False).at(0)


def _changed(index):
    ids = np.arange(37)
    ids[index] += 1
    return Columns({"id": ids, "x": np.arange(37, dtype=np.float32)[:, None]})


def test_a_fingerprint_tells_examples_apart_by_names_types_and_values():
    leaves = [
        0,
        1,
        0.0,
        "0",
        "1",
        b"0",
        [0],
        [0, 1],
        [[0], [0, 1]],
        [[0], [0, 2]],
        np.int8(0),
        None,
    ]
    examples = [{"x": leaf} for leaf in leaves] + [{"y": 0}, {"x": {"x": 0}}]
    prints = [fingerprint([example], 1) for example in examples]
    assert len(set(prints)) == len(prints)
    assert prints == [fingerprint([example], 1) for example in examples]


def test_positions_of_other_data_are_refused():
    batches = _batches(epochs=2)
    state = batches.state()
    for change, said in (
        ({"source": _source(36)}, "length 37, this length 36. The dataset has grown or shrunk"),
        ({"source": _changed(36)}, "fingerprint .*Some examples are others"),
        ({"batch": 8}, "batch 16, this batch 8. A step would be another part"),
        ({"seed": 4}, "seed 3, this seed 4. The order would be another"),
        ({"shuffle": False}, "shuffle True, this shuffle False"),
    ):
        with pytest.raises(ValueError, match=said):
            _batches(**{"epochs": 2} | change).restore(state)
    with pytest.raises(ValueError, match=r"lacks \['seed'\]"):
        batches.restore({name: state[name] for name in state if name != "seed"})
    with pytest.raises(ValueError, match="got None, which lacks"):
        batches.restore(None)
    with pytest.raises(ValueError, match="at step 7, but this has steps 0 to 6"):
        batches.restore(state | {"step": 7})
    with pytest.raises(ValueError, match="no step 6; its steps are 0 to 5, 3 an epoch"):
        batches.at(6)
    with pytest.raises(ValueError, match=re.escape("no step -1")):
        batches.rows(-1)


def test_a_loop_whose_position_was_moved_says_so():
    batches = _batches()
    loop = iter(batches)
    next(loop)
    batches.restore(batches.state() | {"step": 0})
    with pytest.raises(RuntimeError, match="moved to step 0 while a loop over it stood at step 1"):
        next(loop)
