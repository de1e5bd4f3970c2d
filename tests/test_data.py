"""Host batches to global arrays (jdp/data.py, jdp/packing.py, jdp/prefetch.py)."""

import gc
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from typing import Any

import grain
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cluster import ROOT, run
from jax.sharding import AxisType

import jdp
from jdp import prefetch as prefetch_module

pytestmark = pytest.mark.alternate

MESHES = {
    "1": ((1,), ("data",)),
    "8": ((8,), ("data",)),
    "node": ((2, 4), ("node", "device")),
    "model": ((4, 2), ("data", "model")),
    "model_first": ((2, 4), ("model", "data")),
}


def _mesh(name="8", kind=AxisType.Auto):
    shape, axes = MESHES[name]
    num = int(np.prod(shape))
    return jdp.make_mesh(axes, shape, devices=jax.devices()[:num], axis_types=(kind,) * len(axes))


def _rows(*sizes, width=2):
    """Batches of consecutive rows: every entry of row r is r."""
    ends = np.cumsum(sizes)
    return [
        {"x": np.repeat(np.arange(end - size, end, dtype=np.float32)[:, None], width, 1)}
        for size, end in zip(sizes, ends, strict=True)
    ]


def _real(batches):
    """The rows of weight 1, one after the other."""
    parts = [np.asarray(b["x"])[np.asarray(b["weight"]) == 1] for b in batches]
    return np.concatenate(parts)[:, 0]


def _alive():
    return [thread for thread in threading.enumerate() if thread.name == "jdp.feed"]


def _ended():
    deadline = time.monotonic() + 10
    while _alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not _alive()


# Where rows lie -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", MESHES)
def test_rows_lie_in_order_along_the_data_axes(name, kind, prefetch):
    mesh = _mesh(name, kind)
    number = jdp.axis_size(mesh, jdp.data_axes(mesh))
    (batch,) = jdp.feed(_rows(16), mesh, prefetch=prefetch)
    np.testing.assert_array_equal(batch["x"][:, 0], np.arange(16))
    assert batch["x"].sharding.mesh == mesh
    assert len(batch["x"].addressable_shards) == mesh.size
    for shard in batch["x"].addressable_shards:
        replica = shard.index[0].start or 0
        assert shard.data.shape == (16 // number, 2)
        np.testing.assert_array_equal(shard.data[:, 0], replica + np.arange(16 // number))


def test_an_axis_of_any_name_can_be_given():
    mesh = jdp.make_mesh(("rows",))
    (batch,) = jdp.feed(_rows(8), mesh, axis="rows")
    assert batch["x"].sharding.spec == jax.sharding.PartitionSpec("rows")
    with pytest.raises(ValueError, match="none called"):
        jdp.feed(_rows(8), mesh)


def test_d05_a_replicated_array_is_split():
    replicated = jdp.replicate(_rows(16)[0], _mesh())
    (batch,) = jdp.feed([replicated], _mesh())
    assert {shard.data.shape for shard in batch["x"].addressable_shards} == {(2, 2)}


def test_any_pytree_is_fed_and_only_dicts_get_a_weight():
    batches = [(np.ones((8, 2)), [np.arange(8)]), (np.zeros((8, 2)), [np.arange(8)])]
    first, second = jdp.feed(batches, _mesh())
    assert jax.tree.structure(first) == jax.tree.structure(batches[0])
    assert second[0].sum() == 0
    assert set(next(jdp.feed(_rows(8), _mesh(), pad=False))) == {"x"}
    nested = next(jdp.feed([{"in": {"a": np.ones(8)}, "ids": [np.ones(8)]}], _mesh()))
    assert nested["weight"].shape == nested["in"]["a"].shape == nested["ids"][0].shape


def test_grain_loaders_are_iterables():
    rows = grain.MapDataset.source(range(20)).map(lambda i: {"x": np.full(2, i, np.float32)})
    dataset = rows.to_iter_dataset().batch(8, drop_remainder=False)
    loader = grain.DataLoader(
        data_source=rows,
        sampler=grain.samplers.SequentialSampler(20, grain.sharding.NoSharding()),
        operations=[grain.transforms.Batch(8, drop_remainder=False)],
    )
    for batches in (loader, dataset):
        np.testing.assert_array_equal(_real(jdp.feed(batches, _mesh())), np.arange(20))


def test_each_call_is_one_epoch():
    loader = _rows(8, 8)
    assert [len(list(jdp.feed(loader, _mesh()))) for _ in range(2)] == [2, 2]
    assert list(jdp.feed([], _mesh())) == []


# Ragged batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(16, 16, 4), (36,), (3, 3, 3)[:1]])
def test_a28_padding_does_not_count(sizes):
    batches = list(jdp.feed(_rows(*sizes), _mesh()))
    weights = sum(float(b["weight"].sum()) for b in batches)
    total = sum(float((b["x"][:, 0] * b["weight"]).sum()) for b in batches)
    assert weights == sum(sizes)
    assert total / weights == (sum(sizes) - 1) / 2  # 17.5 for 36 rows, not 15.75
    assert all(b["weight"].dtype == jnp.float32 and b["x"].shape[0] % 8 == 0 for b in batches)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    sizes=st.lists(st.integers(1, 16), min_size=0, max_size=5), prefetch=st.integers(0, 3)
)
def test_a28_every_row_comes_once_and_in_order(sizes, prefetch):
    batches = list(jdp.feed(_rows(16, *sizes), _mesh(), prefetch=prefetch))
    np.testing.assert_array_equal(_real(batches), np.arange(16 + sum(sizes)))
    assert all(set(np.unique(b["weight"])) <= {0, 1} for b in batches)
    assert all(not np.asarray(b["x"])[np.asarray(b["weight"]) == 0].any() for b in batches)


def test_d01_a_ragged_epoch_compiles_once():
    step: Any = jax.jit(lambda batch: (batch["x"][:, 0] * batch["weight"]).sum())
    for _ in range(2):
        for batch in jdp.feed(_rows(64, 64, 56, 8, 1), _mesh()):
            step(batch)
    assert step._cache_size() == 1  # a jitted function's own count of programs


@pytest.mark.parametrize(
    ("sizes", "kwargs", "message"),
    [
        ((36, 36), {}, r"B = 36 rows, and 36 is not a multiple of 8, the 8 replicas along "
         r"\('data',\) times microbatch 1.*Make batches of 32 or 40 rows"),
        ((36, 36), {"microbatch": 4}, r"multiple of 32, .*microbatch 4.*of 32 or 64 rows"),
        ((4, 4), {}, r"B = 4 rows.*Make batches of 8 rows"),
        ((36,), {"pad": False}, r"B = 36 rows.*Make batches of 32 or 40 rows"),
        ((0,), {}, r"leaf \['x'\] of batch 0 has 0 rows"),
        ((8, 0), {}, r"leaf \['x'\] of batch 1 has 0 rows.*skip empty"),
        ((16, 8), {"pad": False}, r"batch 1 has 8 rows where the first had 16; without a weight"),
        ((16, 16, 24), {}, r"batch 2 has 24 rows where the first had 16; another shape.*compile"),
        ((8, 8), {"microbatch": 0}, r"microbatch=0"),
        ((8, 8), {"microbatch": 1.5}, r"microbatch=1.5"),
        ((8, 8), {"prefetch": -1}, r"prefetch=-1"),
    ],
)  # fmt: skip
def test_b04_sizes_that_do_not_fit(sizes, kwargs, message):
    with pytest.raises(ValueError, match=message):
        list(jdp.feed(_rows(*sizes), _mesh(), **kwargs))


@pytest.mark.parametrize("size", [64, 8])
def test_b04_sizes_that_fit(size):
    (batch,) = jdp.feed(_rows(size), _mesh(), microbatch=size // 8)
    assert batch["x"].shape == (size, 2)
    assert float(batch["weight"].min()) == 1


def test_a_short_batch_without_a_weight_is_refused():
    batches = [b["x"] for b in _rows(16, 8)]
    with pytest.raises(ValueError, match=r"filled in would count as data.*Yield dict batches"):
        list(jdp.feed(batches, _mesh()))
    with pytest.raises(ValueError, match="if it is a dict"):
        list(jdp.feed(batches[:1], jdp.make_mesh(num_devices=3)))


def test_a_lone_first_batch_survives_a_loader_that_looks_ahead():
    def loader():
        buffer = np.arange(5.0, dtype=np.float32)[:, None]
        yield {"x": buffer}
        buffer[:] = -1  # as a loader does that fills its buffer before it finds the end

    np.testing.assert_array_equal(_real(jdp.feed(loader(), _mesh())), np.arange(5))


# Weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, bool])
def test_a_weight_of_its_own_is_kept(dtype):
    own = [{**b, "weight": (np.arange(len(b["x"])) % 2).astype(dtype)} for b in _rows(16, 4)]
    first, last = jdp.feed(own, _mesh())
    assert first["weight"].dtype == last["weight"].dtype == jnp.float32
    np.testing.assert_array_equal(first["weight"], np.arange(16) % 2)
    np.testing.assert_array_equal(last["weight"], [0, 1, 0, 1, *[0] * 12])
    (kept,) = jdp.feed(own[:1], _mesh(), pad=False)
    np.testing.assert_array_equal(kept["weight"], first["weight"])


@pytest.mark.parametrize("value", [np.nan, -1.0, np.inf])
@pytest.mark.parametrize("pad", [True, False])
def test_a_weight_is_finite_and_not_negative(value, pad):
    weight = np.ones(8, np.float32)
    weight[5] = value
    with pytest.raises(ValueError, match=f"weight of batch 0 is {value} in row 5.*at least 0"):
        list(jdp.feed([{**_rows(8)[0], "weight": weight}], _mesh(), pad=pad))


# Leaves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "kind", "message"),
    [
        ({"x": np.ones(8), "y": np.ones(7)}, ValueError,
         r"leaf \['x'\] of batch 0 has 8 rows but leaf \['y'\] of batch 0 has 7"),
        ({"x": np.ones(8), "n": 3}, ValueError, r"leaf \['n'\] of batch 0 is a scalar, 3"),
        ({"x": [1, 2]}, ValueError, r"leaf \['x'\]\[0\] of batch 0 is a scalar.*in np.asarray"),
        ({"x": np.array([{}] * 8)}, TypeError, r"leaf \['x'\].*cannot hold"),
        ({"x": np.array(["a"] * 8)}, TypeError, r"leaf \['x'\].*Encode it as numbers"),
        ("text", TypeError, r"leaf \(the batch itself\) of batch 0 is a str"),
        (jax.random.split(jax.random.key(0), 8), TypeError, r"cannot hold"),
        ({}, ValueError, r"batch 0 is \{\} and has no arrays"),
        (None, ValueError, r"batch 0 is None and has no arrays"),
        ({"x": np.array([2**31] * 8)}, ValueError, r"leaf \['x'\].*2147483648.*does not fit int32"),
        ({"x": np.array([-(2**31) - 1] * 8)}, ValueError, r"holds -2147483649"),
        ({"x": np.array([2**32] * 8, np.uint64)}, ValueError, r"does not fit uint32.*uint64"),
    ],
)  # fmt: skip
def test_leaves_that_cannot_be_fed(batch, kind, message):
    with pytest.raises(kind, match=message):
        list(jdp.feed([batch], _mesh()))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"x": np.ones((8, 3), np.float32)},
         r"\['x'\] of batch 1 is float32\[8, 3\], but in the first batch it is float32\[8, 2\]"),
        ({"x": np.ones((8, 2), np.int32)}, r"leaf \['x'\] of batch 1 is int32\[8, 2\]"),
        ({"y": np.ones((8, 2))}, r"leaf \['x'\] of batch 1 is missing"),
        ({"x": np.ones((8, 2)), "y": np.ones(8)}, r"leaf \['y'\] .* the first batch it is missing"),
        ((np.ones((8, 2), np.float32),), r"leaf \['x'\] of batch 1 is missing"),
    ],
)  # fmt: skip
def test_d01_a_batch_of_another_form_is_refused(second, message):
    with pytest.raises(ValueError, match=message):
        list(jdp.feed([*_rows(8), second], _mesh()))


@pytest.mark.parametrize("one", [_rows(8)[0], np.ones((8, 2)), "name", jnp.ones((8, 2))])
def test_one_batch_instead_of_many_is_refused(one):
    with pytest.raises(TypeError, match=rf"one {type(one).__name__}, .*feed\(\[batch\], mesh\)"):
        jdp.feed(one, _mesh())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_dtypes_are_those_jax_gives(prefetch):
    host = {
        "f64": np.full(8, 0.1), "big": np.full(8, 1e300), "i64": np.arange(8) - 2**31,
        "u64": np.full(8, 2**32 - 1, np.uint64), "c128": np.full(8, 1j), "u8": np.ones(8, np.uint8),
        "bf16": jnp.ones(8, jnp.bfloat16), "bool": np.ones(8, bool), "f16": np.ones(8, np.float16),
    }  # fmt: skip
    (batch,) = jdp.feed([host], _mesh(), prefetch=prefetch)
    names = {name: str(batch[name].dtype) for name in host}
    assert names == {
        "f64": "float32", "big": "float32", "i64": "int32", "u64": "uint32", "c128": "complex64",
        "u8": "uint8", "bf16": "bfloat16", "bool": "bool", "f16": "float16",
    }  # fmt: skip
    assert float(batch["f64"][0]) == np.float32(0.1)
    assert np.isinf(batch["big"]).all()
    np.testing.assert_array_equal(batch["i64"], host["i64"])
    with jax.enable_x64(True):
        (wide,) = jdp.feed(
            [{"f": np.full(8, 0.1), "i": np.full(8, 2**40)}], _mesh(), prefetch=prefetch
        )
        assert (wide["f"].dtype, wide["i"].dtype) == (np.float64, np.int64)
        assert int(wide["i"][0]) == 2**40


# Shares -------------------------------------------------------------------------------------------


def test_shares_lay_each_replicas_microbatches_first():
    shares = (3, 1, 0, 2)
    mesh = jdp.make_mesh(num_devices=4)
    batches = list(jdp.feed(_rows(12, 5), mesh, microbatch=2, shares=shares))
    full, short = (np.asarray(b["x"])[:, 0].reshape(4, 6) for b in batches)
    expected = np.zeros((4, 6))
    expected[0], expected[1, :2], expected[3, :4] = np.arange(6), [6, 7], np.arange(8, 12)
    np.testing.assert_array_equal(full, expected)
    weights = [np.asarray(b["weight"]).reshape(4, 6).sum(1).tolist() for b in batches]
    assert weights == [[6, 2, 0, 4], [5, 0, 0, 0]]
    np.testing.assert_array_equal(short[0], [12, 13, 14, 15, 16, 0])
    assert {s.data.shape for s in batches[0]["x"].addressable_shards} == {(6, 2)}


def test_room_keeps_the_shape_whatever_the_shares():
    mesh = jdp.make_mesh(num_devices=4)
    for shares in ((3, 1, 0, 2), (1, 2, 2, 1)):
        (batch,) = jdp.feed(_rows(12), mesh, microbatch=2, shares=shares, room=4)
        assert batch["weight"].shape == (4 * 4 * 2,)
        weight = np.asarray(batch["weight"]).reshape(4, 8)
        np.testing.assert_array_equal(weight.sum(1), 2 * np.array(shares))
        assert all((row[: 2 * k] == 1).all() for row, k in zip(weight, shares, strict=True))


@pytest.mark.parametrize("kwargs", [{"room": 4}, {"shares": (2,) * 8, "room": 1}])
def test_room_that_cannot_be_meant(kwargs):
    with pytest.raises(ValueError, match=r"room=\d .* at least the largest share"):
        list(jdp.feed(_rows(16), _mesh(), **kwargs))


def test_equal_shares_change_nothing():
    (plain,) = jdp.feed(_rows(16), _mesh())
    (shared,) = jdp.feed(_rows(16), _mesh(), shares=(2,) * 8, pad=True)
    np.testing.assert_array_equal(plain["x"], shared["x"])
    np.testing.assert_array_equal(plain["weight"], shared["weight"])


@pytest.mark.parametrize(
    ("sizes", "shares", "message"),
    [
        ((16,), (1, 2), r"shares=\(1, 2\) for 8 replicas along \('data',\)"),
        ((16,), (0,) * 8, r"not all 0"),
        ((16,), (-1, 3, *[1] * 6), r"0 or more"),
        ((16,), (1.5, *[1] * 7), r"whole number of microbatches"),
        ((24,), (2,) * 8, r"B = 24 rows, and 24 is not 16, the shares .*Make batches of 16 rows"),
        ((8, 8), (2,) * 8, r"B = 8 rows, and 8 is not 16"),
    ],
)
def test_shares_that_do_not_fit(sizes, shares, message):
    with pytest.raises(ValueError, match=message):
        list(jdp.feed(_rows(*sizes), _mesh(), shares=shares))


# The thread ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_a_loader_may_reuse_its_buffer(prefetch):
    def loader():
        # 64-byte aligned and of the final dtype: what device_put would take without a copy.
        buffer = np.zeros(8 * 16 + 16, np.float32)
        skip = -buffer.ctypes.data % 64 // 4
        buffer = buffer[skip : skip + 8 * 16].reshape(8, 16)
        for value in range(6):
            buffer[:] = value
            yield {"x": buffer}

    batches = list(jdp.feed(loader(), _mesh(), prefetch=prefetch))
    assert [np.unique(b["x"]).tolist() for b in batches] == [[v] for v in range(6)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_exception_of_the_loader_arrives_in_its_place(prefetch):
    def loader_that_breaks():
        yield from _rows(8, 8)
        raise KeyError("shard 7")

    batches = jdp.feed(loader_that_breaks(), _mesh(), prefetch=prefetch)
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(KeyError, match="shard 7") as caught:
        next(batches)
    assert "loader_that_breaks" in [
        f.name for f in traceback.extract_tb(caught.value.__traceback__)
    ]
    with pytest.raises(StopIteration):
        next(batches)
    assert _ended()


def _endless(seen):
    while True:
        seen.append(len(seen))
        yield _rows(8)[0]


def test_the_thread_stays_a_bounded_number_of_batches_ahead():
    seen = []
    batches = jdp.feed(_endless(seen), _mesh(), prefetch=2)
    assert not seen
    assert not _alive()
    for taken in range(1, 4):
        next(batches)
        time.sleep(0.1)
        assert len(seen) <= taken + 3
    deadline = time.monotonic() + 5
    while len(seen) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(seen) == 6  # 3 taken, 2 in the queue, 1 in the thread's hand
    batches.close()
    assert _ended()


@pytest.mark.parametrize("way", ["close", "drop", "break", "interrupt", "cycle", "exhaust"])
def test_leaving_the_iterator_ends_the_thread_and_the_loader(way):
    closed = []

    def loader():
        try:
            yield from _rows(8, 8, 8, 8, 8) if way == "exhaust" else _endless([])
        finally:
            closed.append(True)

    batches = jdp.feed(loader(), _mesh())
    next(batches)
    if way == "close":
        batches.close()
    elif way == "drop":
        del batches
    elif way == "break":
        for _ in batches:
            break
        del batches
    elif way == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            batches.throw(KeyboardInterrupt)
    elif way == "cycle":
        ring: list[object] = [batches]
        ring.append(ring)
        del ring, batches
        gc.collect()
    else:
        list(batches)
    assert _ended()
    assert closed == [True]


def test_prefetch_0_starts_no_thread():
    batches = jdp.feed(_endless([]), _mesh(), prefetch=0)
    next(batches)
    assert not _alive()


def test_a_consumed_batch_is_not_kept():
    class Item:
        pass

    made = []

    def source():
        for _ in range(3):
            item = Item()
            made.append(weakref.ref(item))
            yield item
            del item
        blocked.wait(10)

    blocked = threading.Event()
    items = prefetch_module.run_ahead(source(), 1, prefetch_module.Stop())
    for _ in range(3):
        next(items)
    gc.collect()
    waiting = threading.Thread(target=lambda: list(items))
    waiting.start()
    time.sleep(0.1)
    kept = [ref() for ref in made]
    blocked.set()
    waiting.join(10)
    assert kept == [None] * 3


PROGRAM = """
import sys, time
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
import jdp
def loader():
    yield {"x": np.ones(8)}
    if sys.argv[1] == "stuck":
        print("stuck", flush=True)
        time.sleep(600)
    while True:
        yield {"x": np.ones(8)}
batches = jdp.feed(loader(), jdp.make_mesh(), prefetch=3)
next(batches)
if sys.argv[1] == "stuck":
    next(batches)
print("done", flush=True)
"""


def test_a_program_may_end_in_the_middle_of_an_epoch():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "running"], cwd=ROOT, timeout=60, capture_output=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, b"done")


def test_ctrl_c_ends_a_program_whose_loader_is_stuck():
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "stuck"], cwd=ROOT, stdout=-1, stderr=-1
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"stuck\n"
            time.sleep(0.2)
            child.send_signal(signal.SIGINT)
            _, errors = child.communicate(timeout=30)
        finally:
            child.kill()
    assert b"KeyboardInterrupt" in errors


# Several processes --------------------------------------------------------------------------------


def _feed_together():  # noqa: C901  one launch checks many things
    import time

    import numpy as np
    from jax.sharding import Mesh

    import jdp
    from jdp import processes

    me = jax.process_index()
    mesh = jdp.make_mesh()
    said = {}
    total = jax.jit(lambda b: ((b["x"] * b["weight"]).sum(), b["weight"].sum()))

    def parts(*sizes, base=100):
        return [{"x": np.full(n, base * me + i, np.float32)} for i, n in enumerate(sizes)]

    def attempt(name, batches, mesh=mesh, look=None, **kwargs):
        seen, start = [], time.monotonic()
        try:
            for batch in jdp.feed(batches, mesh, **kwargs):
                seen.append(look(batch) if look else [float(v) for v in total(batch)])
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
        said[name] = seen
        assert time.monotonic() - start < 20, name

    def mine(batch):
        return [batch["x"].shape[0], [s.data.tolist() for s in batch["x"].addressable_shards]]

    def numbers(count):
        return [{"x": np.arange(count, dtype=np.float32) + 10 * me}]

    attempt("order", numbers(4), look=mine)
    order = [jax.devices()[i] for i in (0, 2, 1, 3)]
    attempt("interleaved", numbers(4), mesh=Mesh(order, ("data",)), look=mine)
    attempt("shares", numbers([3, 2][me]), look=mine, shares=(1, 2, 2, 0))
    attempt("lone", numbers([3, 4][me]), look=mine)

    attempt("placed", jdp.feed(numbers(4), mesh), look=mine)

    attempt("a29", [{"x": np.arange(16.0)}])
    attempt("b05 size", parts([8, 4][me]))
    attempt("b05 dtype", [{"x": np.zeros(4, [np.float32, np.int32][me])}])
    attempt("b05 keys", [{"x": np.arange(4.0) + me} | ({"y": np.ones(4)} if me else {})])
    attempt("b04", parts(*[[4, 4], [3, 3]][me]))

    attempt("b01 pad", parts(*[[4, 4, 4, 4, 2], [4, 4, 3]][me]))
    attempt("b01 no thread", parts(*[[4], [4, 4]][me]), prefetch=0)
    attempt("b01 no pad", parts(*[[4, 4, 4, 4, 4], [4, 4, 4]][me]), pad=False, look=lambda b: 1)
    attempt("b01 no dict", [b["x"] for b in parts(*[[4], [4, 4]][me])], look=lambda b: 1)
    attempt("none here", [] if me else parts(4))
    attempt("none anywhere", [])

    def broken():
        yield from parts(4, 4)
        if me:
            raise KeyError("shard 7")
        yield from parts(4, 4)

    attempt("broken", broken(), look=lambda b: 1)

    def leaver(batch):
        if me:
            raise InterruptedError("enough")
        return 1

    attempt("left", parts(4, 4, 4, 4, 4, 4), look=leaver)
    attempt("after", parts(4))

    square = np.array(jax.devices()).reshape(2, 2)
    attempt("overlap", numbers(4), mesh=Mesh(square.T, ("data", "model")))
    attempt("model", numbers(2), mesh=Mesh(square, ("data", "model")), look=mine)
    attempt("local", numbers(4), mesh=Mesh(jax.local_devices(), ("data",)), look=mine)
    if me:
        attempt("absent", numbers(4), mesh=Mesh(jax.devices()[:2], ("data",)))

    def slow():
        yield from parts(4)
        time.sleep(4 * me)
        yield from parts(4)

    processes.ANSWER_SECONDS = 1.0
    attempt("slow", slow(), look=lambda b: 1)
    return said


@pytest.mark.multiprocess
def test_a29_b01_b05_two_processes_feed_their_parts_and_end_together():
    zero, one = (answer.value for answer in run(_feed_together, num_devices=2, seconds=120))
    both = (zero, one)
    assert zero["order"] == [[8, [[0, 1], [2, 3]]]]
    assert one["order"] == [[8, [[10, 11], [12, 13]]]]
    assert zero["interleaved"] == [[8, [[0, 1], [2, 3]]]]
    assert one["interleaved"] == [[8, [[10, 11], [12, 13]]]]
    assert zero["shares"] == [[8, [[0, 0], [1, 2]]]]
    assert one["shares"] == [[8, [[10, 11], [0, 0]]]]
    assert zero["lone"] == [[8, [[0, 1], [2, 0]]]]
    for said in both:
        assert (
            "leaf ['weight'] of batch 0 is a jax.Array spread over processes" in said["placed"][0]
        )
        assert "ValueError: jdp.feed: processes 0, 1 gave the very same first" in said["a29"][0]
        assert "leaf ['x'] of the first batch is float32[8] on process 0" in said["b05 size"][0]
        assert "on process 0 but float32[4] on process 1" in said["b05 size"][0]
        assert "is float32[4] on process 0 but int32[4] on process 1" in said["b05 dtype"][0]
        assert "leaf ['y'] of the first batch is missing on process 0" in said["b05 keys"][0]
        # Batch i of process 0 holds i, of process 1 100 + i; short and missing rows weigh nothing.
        rows = [(4, 4), (4, 4), (4, 3), (4, 0), (2, 0)]
        sums = [[i * (m + n) + 100 * n, m + n] for i, (m, n) in enumerate(rows)]
        assert said["b01 pad"] == sums
        assert said["b01 no thread"] == [[400, 8], [404, 4]]
        assert said["b01 no pad"][:-1] == [1, 1, 1]
        assert "batches: process 0 more than 3, process 1 3. Those" in said["b01 no pad"][-1]
        assert said["b01 no dict"][:-1] == [1]
        assert "batches: process 0 1, process 1 more than 1" in said["b01 no dict"][-1]
        assert "process 1 has no batch at all" in said["none here"][0]
        assert said["none anywhere"] == []
        assert said["after"] == [[400, 8]]
        assert "4 replicas" not in said["overlap"][0]
        assert "the 2 replicas along ('data',) lie unevenly on the processes" in said["overlap"][0]
    assert "process 1 failed with ValueError: jdp.feed: the first batch has B = 3" in zero["b04"][0]
    assert "2 of the 4 replicas along ('data',)" in one["b04"][0]
    assert zero["broken"][:2] == one["broken"][:2] == [1, 1]
    assert "no batch 2: process 1 failed with KeyError: 'shard 7'" in zero["broken"][2]
    assert one["broken"][2] == "KeyError: 'shard 7'"
    assert one["left"] == ["InterruptedError: enough"]
    assert "process 1 closed its iterator" in zero["left"][-1]
    assert (zero["model"], one["model"]) == ([[4, [[0, 1]] * 2]], [[4, [[10, 11]] * 2]])
    assert zero["local"] == [[4, [[0, 1], [2, 3]]]]
    assert "no device of the mesh belongs to process 1, they are those of [0]" in one["absent"][0]
    assert "TimeoutError: jdp.feed: process 0 waited 1 s for process 1" in zero["slow"][-1]
    assert "process 0 failed with TimeoutError" in one["slow"][-1]
