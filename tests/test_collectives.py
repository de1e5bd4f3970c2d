"""Per-device functions in anybody's `shard_map` and `pmap`: numbers, bits on the wire, buckets."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jdp
from jdp.flat import buckets

MESH = jdp.make_mesh()
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # relative, to nearest


def rows(*shape, dtype=jnp.float32, key=0):
    """One value for each of the eight devices."""
    return np.random.default_rng(key).normal(size=(8, *shape)).astype(dtype)


def per_device(fn, mesh=MESH, axis="data", out=None):
    """A jitted shard_map in which each device sees its own row."""
    out = P() if out is None else out
    local = lambda tree: fn(jax.tree.map(lambda x: x[0], tree))  # noqa: E731
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(axis), out_specs=out))


def definition(x, wire):
    """Mean in float64 of what is cast to the wire dtype."""
    cast = np.asarray(x) if wire is None else np.asarray(x).astype(wire)
    return cast.astype(np.float64).mean(0)


TREE = {
    "matrix": rows(5, 7),
    "vector": rows(13, key=1),
    "scalar": rows(key=2),
    "bf16": rows(3, 3, dtype=jnp.bfloat16, key=3),
    "f16": rows(11, dtype=jnp.float16, key=4),
}


@pytest.mark.parametrize("bucket_bytes", [None, 64])
@pytest.mark.parametrize("wire", [None, "float32", "bfloat16", "float16"])
def test_mean_is_the_mean(wire, bucket_bytes):
    wire_dtype = wire and jnp.dtype(wire)
    mean = functools.partial(
        jdp.collectives.mean, axis_name="data", wire_dtype=wire_dtype, bucket_bytes=bucket_bytes
    )
    means = per_device(mean)(TREE)
    for name, x in TREE.items():
        got, want = means[name], definition(x, wire_dtype)
        assert got.shape == x.shape[1:]
        assert got.dtype == x.dtype
        # one rounding to the wire dtype, one to the leaf's, and a float32 sum of eight values
        rounds = ROUNDING[wire or x.dtype.name] + ROUNDING[x.dtype.name]
        bound = 1.01 * rounds * np.abs(want)
        bound += 8 * ROUNDING["float32"] * np.abs(np.asarray(x, np.float64)).mean(0)
        assert (np.abs(np.asarray(got, np.float64) - want) <= bound).all(), name


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_mean_in_pmap(wire):
    tree = {name: TREE[name] for name in ("matrix", "bf16", "scalar")}
    mean = functools.partial(
        jdp.collectives.mean, axis_name="i", wire_dtype=wire and jnp.dtype(wire)
    )
    in_pmap = jax.pmap(mean, axis_name="i")(tree)
    mean = functools.partial(mean, axis_name="data")
    in_shard_map = per_device(mean)(tree)
    for name, copies in in_pmap.items():
        for copy in np.asarray(copies):
            np.testing.assert_array_equal(copy, in_shard_map[name])


def test_all_gather_in_shard_map_and_pmap():
    x = np.arange(48.0, dtype=np.float32).reshape(16, 3)
    gather = lambda x: jdp.all_gather(x, "data")[None]  # noqa: E731
    copies = jax.shard_map(gather, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(x)
    assert copies.shape == (8, 16, 3)
    for copy in np.asarray(copies):
        np.testing.assert_array_equal(copy, x)
    copies = jax.pmap(lambda x: jdp.all_gather(x, "i"), axis_name="i")(x.reshape(8, 2, 3))
    for copy in np.asarray(copies):
        np.testing.assert_array_equal(copy, x)
    flags = jax.pmap(lambda x: jdp.all_gather(x, "i"), axis_name="i")(np.eye(8, dtype=bool))
    np.testing.assert_array_equal(np.asarray(flags)[3].reshape(8, 8), np.eye(8, dtype=bool))


def test_gradient_of_all_gather_is_that_of_the_whole_batch():
    """Every replica's loss looks at every row; each row hears from all of them."""
    x, weights = rows(2, 3)[:, 0], rows(16)

    def loss(x, weights):
        everyone = jdp.all_gather(x, "data")
        return jnp.sum(weights[0, :8] @ jnp.sin(everyone))[None]

    def total(x):
        split = P("data")
        return jax.shard_map(loss, mesh=MESH, in_specs=(split, split), out_specs=split)(
            x, weights
        ).sum()

    got = jax.jit(jax.grad(total))(x)
    want = jax.grad(lambda x: jnp.sum(weights[:, :8] @ jnp.sin(x)))(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_mean_of_large_float16_values_does_not_overflow():
    """Their sum, 160000, is beyond float16; the mean is not."""
    x = jnp.full((8, 9), 20000.0)
    for leaf, wire in ((x, jnp.float16), (x.astype(jnp.float16), None)):
        mean = functools.partial(jdp.collectives.mean, axis_name="data", wire_dtype=wire)
        np.testing.assert_array_equal(per_device(mean)(leaf), np.full(9, 20000.0))


def test_bf16_sum_keeps_what_bf16_additions_would_lose():
    """256 + 1 is 256 in bfloat16; the float32 sum 263 over eight devices is exact."""
    x = jnp.asarray([256.0] + [1.0] * 7, jnp.bfloat16)[:, None]
    got = per_device(functools.partial(jdp.collectives.mean, axis_name="data"))(x)
    np.testing.assert_array_equal(np.asarray(got), np.asarray([263 / 8], ml_dtypes.bfloat16))


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_special_values_survive_the_wire(wire):
    x = np.ones((8, 6), np.float32)
    x[3, 0], x[4, 1], x[5, 2], x[0, 3], x[7, 3] = np.nan, np.inf, -np.inf, np.inf, -np.inf
    x[:, 4] = -0.0
    x[:, 5] = 65504.0  # the largest float16, whose sum is not one
    got = per_device(
        functools.partial(jdp.collectives.mean, axis_name="data", wire_dtype=jnp.dtype(wire))
    )(x)
    want = [np.nan, np.inf, -np.inf, np.nan, -0.0, 65504.0]
    np.testing.assert_array_equal(got, np.asarray(want).astype(wire).astype(np.float32))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("wire", [None, jnp.bfloat16])
def test_sizes_that_do_not_divide(count, wire):
    mesh = jdp.make_mesh(num_devices=count)
    tree = {"a": jnp.arange(count * 7.0).reshape(count, 7), "b": jnp.ones((count, 1, 5))}
    mean = functools.partial(jdp.collectives.mean, axis_name="data", wire_dtype=wire)
    got = per_device(mean, mesh)(tree)
    np.testing.assert_array_equal(got["a"], tree["a"].mean(0))
    np.testing.assert_array_equal(got["b"], np.ones((1, 5)))


@pytest.mark.parametrize("wire", [None, jnp.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [None, 100])
def test_empty_trees_and_empty_leaves(wire, bucket_bytes):
    mean = functools.partial(
        jdp.collectives.mean, axis_name="data", wire_dtype=wire, bucket_bytes=bucket_bytes
    )
    assert per_device(lambda x: mean({"none": None, "nothing": ()}))(rows(1)) == {
        "none": None,
        "nothing": (),
    }
    got = per_device(mean)({"empty": rows(0, 3)})
    assert got["empty"].shape == (0, 3)
    got = per_device(mean)({"empty": rows(0), "full": jnp.ones((8, 2))})
    np.testing.assert_array_equal(got["full"], [1.0, 1.0])


@pytest.mark.parametrize("wire", [None, jnp.float16])
@pytest.mark.parametrize("axes", [("node", "device"), ("device", "node"), "node"])
def test_two_axes(axes, wire):
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    x = jnp.arange(24.0).reshape(8, 3)
    mean = functools.partial(jdp.collectives.mean, axis_name=axes, wire_dtype=wire)
    if axes == "node":
        got = per_device(mean, mesh, ("node", "device"), P("device"))(x)
        np.testing.assert_array_equal(got, np.asarray(x).reshape(2, 4, 3).mean(0).ravel())
    else:
        got = per_device(mean, mesh, ("node", "device"))(x)
        np.testing.assert_array_equal(got, np.asarray(x).mean(0))


def test_values_that_do_not_differ_stay_what_they_are():
    def fn(x):
        return jdp.collectives.mean(
            {"x": x, "same": jnp.full(3, 5.0)}, "data", wire_dtype=jnp.bfloat16
        )

    np.testing.assert_array_equal(per_device(fn)(rows())["same"], [5.0] * 3)


def compiled(tree, **keywords):
    mean = functools.partial(jdp.collectives.mean, axis_name="data", **keywords)
    return programs.collectives(per_device(mean).lower(tree).compile().as_text())


def test_narrow_bits_travel_as_they_are():
    """XLA on CPU widens bf16 collectives to float32; the bits of a narrow dtype must not be."""
    x = {"a": rows(64, 330), "b": rows(7)}
    plain = programs.sent_bytes(compiled(x), 8)
    for wire in (jnp.bfloat16, jnp.float16):
        found = compiled(x, wire_dtype=wire)
        assert sorted(c.kind for c in found) == ["all-gather", "all-to-all"]
        assert {c.dtypes for c in found} == {("u16",)}
        assert programs.sent_bytes(found, 8) <= 0.501 * plain


def test_bf16_leaves_are_sent_as_bf16_without_asking():
    found = compiled(rows(64, dtype=jnp.bfloat16))
    assert {c.dtypes for c in found} == {("u16",)}
    found = compiled(rows(64, dtype=jnp.bfloat16), wire_dtype=jnp.float32)
    assert [(c.kind, c.dtypes, c.bytes) for c in found] == [("all-reduce", ("f32",), 4 * 64)]


def sent_before_any_pass(tree, **keywords):
    mean = functools.partial(jdp.collectives.mean, axis_name="data", **keywords)
    return programs.lowered_collectives(per_device(mean).lower(tree).as_text())


def test_number_of_flat_buffers():
    """Seven leaves of 40 bytes at the wire: buckets hold what fits, a larger leaf is alone."""
    tree = [rows(10) for _ in range(7)]
    for bucket_bytes, buffers in (
        (40, 7),
        (79, 7),
        (80, 4),
        (120, 3),
        (280, 1),
        (10**9, 1),
        (1, 7),
    ):
        sent = sent_before_any_pass(tree, bucket_bytes=bucket_bytes)
        assert sent == [("all-reduce", "f32")] * buffers, bucket_bytes
    # 20 bytes each at bfloat16
    sent = sent_before_any_pass(tree, bucket_bytes=80, wire_dtype=jnp.bfloat16)
    assert sorted(sent) == [("all-gather", "ui16")] * 2 + [("all-to-all", "ui16")] * 2
    # without a size: as they are, and narrow ones joined up to the default
    assert sent_before_any_pass(tree) == [("all-reduce", "f32")] * 7
    sent = sent_before_any_pass(tree, wire_dtype=jnp.bfloat16)
    assert sorted(sent) == [("all-gather", "ui16"), ("all-to-all", "ui16")]


def test_dtypes_are_not_mixed_in_a_buffer():
    tree = [rows(4), rows(4, dtype=jnp.bfloat16), rows(4), rows(4, dtype=jnp.float16)]
    sent = sent_before_any_pass(tree, bucket_bytes=10**6)
    assert (
        sorted(sent)
        == [("all-gather", "ui16")] * 2 + [("all-reduce", "f32")] + [("all-to-all", "ui16")] * 2
    )


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), max_size=20),
    wires=st.lists(st.sampled_from(["float32", "bfloat16"]), min_size=20, max_size=20),
    limit=st.integers(1, 200),
)
def test_buckets_are_a_partition_within_the_limit(sizes, wires, limit):
    dtypes = [jnp.dtype(wire) for wire in wires[: len(sizes)]]
    num_bytes = [size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
    chosen = buckets(dict(enumerate(dtypes)), num_bytes, limit)
    assert sorted(i for bucket in chosen for i in bucket) == list(range(len(sizes)))
    for bucket in chosen:
        assert bucket == sorted(bucket)
        assert len({dtypes[i] for i in bucket}) == 1
        assert len(bucket) == 1 or sum(num_bytes[i] for i in bucket) <= limit


@settings(max_examples=10, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=5),
    bucket_bytes=st.integers(1, 200),
    wire=st.sampled_from([None, jnp.bfloat16]),
)
def test_packing_brings_every_entry_back_to_its_place(shapes, bucket_bytes, wire):
    """The mean of equal values is that value: small whole numbers, exact in bfloat16."""
    tree = [
        np.arange(int(np.prod(s)), dtype=np.float32).reshape(s) + i for i, s in enumerate(shapes)
    ]
    mean = functools.partial(
        jdp.collectives.mean, axis_name="data", wire_dtype=wire, bucket_bytes=bucket_bytes
    )
    got = per_device(mean)([np.stack([x] * 8) for x in tree])
    for x, y in zip(tree, got, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("wire", "match"),
    [
        (jnp.int32, "wire_dtype=int32 cannot carry a mean.*float32, bfloat16, float16"),
        (jnp.uint8, "wire_dtype=uint8 cannot carry a mean"),
        (jnp.float64, "wire_dtype=float64 cannot"),
        (float, "wire_dtype=float64 cannot"),
        (jnp.float8_e4m3fnuz, "wire_dtype=float8_e4m3fnuz cannot"),
        (jnp.complex64, "wire_dtype=complex64 cannot"),
        (bool, "wire_dtype=bool cannot"),
        ("bf16", "wire_dtype='bf16'"),
    ],
)
def test_wire_dtypes_that_are_refused(wire, match):
    with pytest.raises((ValueError, TypeError), match=match):
        per_device(lambda x: jdp.collectives.mean(x, "data", wire_dtype=wire))(rows(3))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.uint8, bool, jnp.complex64])
def test_leaves_without_a_floating_mean_are_refused(dtype):
    """The mean of the integers 0..7 is 3.5 and has no place in an integer."""
    tree = {"ok": rows(3), "count": jnp.arange(8).astype(dtype)}
    with pytest.raises((TypeError, ValueError), match=r"count"):
        per_device(functools.partial(jdp.collectives.mean, axis_name="data"))(tree)


@pytest.mark.parametrize("bucket_bytes", [0, -1, 1.5, True])
def test_bucket_sizes_that_are_refused(bucket_bytes):
    mean = functools.partial(jdp.collectives.mean, axis_name="data", bucket_bytes=bucket_bytes)
    with pytest.raises(ValueError, match=f"bucket_bytes={bucket_bytes}"):
        per_device(mean)(rows(3))
