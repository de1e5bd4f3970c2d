"""The step as the real TPU and GPU compilers make it, for slices and hosts that are not here.

Nothing runs: `topologies` describes the devices, the compilers are those of the extras `tpu` and
`gpu`. Each program is small, compiled once and shared.
"""

import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from topologies import devices

import jdp

# isort: split
import schedule  # of benchmarks, which `topologies` has made known

pytestmark = pytest.mark.aot

MIB = 2**20
WIDTH = 1024
LEAF_BYTES = 4 * WIDTH * WIDTH
ITEMSIZE = {"f32": 4, "bf16": 2, "u16": 2, "f16": 2}

# What else the options must be right for; libtpu of jax 0.12 refuses options of v5e elsewhere.
TPUS = ("v5e:4x4", "v5p:2x2x4", "v6e:4x4")


@pytest.fixture(scope="module", params=["tpu", "gpu"])
def mesh(request):
    with pytest.MonkeyPatch.context() as patch:
        yield Mesh(np.array(devices(request.param, patch)), ("data",))


def loss_fn(params, batch):
    x = batch
    for w in params:
        x = jnp.tanh(x @ w.astype(jnp.bfloat16))
    return jnp.mean(x.astype(jnp.float32) ** 2)


@functools.cache
def compiled_text(mesh, num_layers, *, bucket_bytes=None, wire_dtype=None, zero=None):
    """The scheduled program of a step; without `bucket_bytes`, compiled with no options at all."""
    options, bucket = {}, {}
    if bucket_bytes is not None:
        bucket = {"bucket_bytes": bucket_bytes}
        options = jdp.xla_options(mesh, bucket_bytes=bucket_bytes)
    if zero is None:
        tx = optax.chain(jdp.all_reduce(wire_dtype=wire_dtype, **bucket), optax.sgd(0.1))
    else:
        tx, options = zero(optax.sgd(0.1)), options | schedule.COST_MODEL.get(platform(mesh), {})
    step = jdp.train_step(loss_fn, tx, mesh, compiler_options=options)

    def shape(dims, dtype, *spec):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*spec)))

    state = jdp.init_state([shape((WIDTH, WIDTH), jnp.float32)] * num_layers, tx, mesh)
    rows = 512 if zero is None else 4096  # there, a product takes longer than sending a leaf
    batch = shape((mesh.size * rows, WIDTH), jnp.bfloat16, "data")
    return step.lower(state, batch).compile().as_text()


def platform(mesh):
    return "tpu" if mesh.devices.flat[0].platform == "tpu" else "gpu"


class Sent(NamedTuple):
    kind: str
    operands: list[tuple[str, int]]  # dtype and bytes of each
    products: int  # matrix products between its start and its end; 0 if everything waits for it

    @property
    def num_bytes(self):
        return sum(num_bytes for _, num_bytes in self.operands)


def sent(text, at_least=1024):
    """The collectives of the entry computation, in the order they start; scalars left out."""
    multiplies = re.compile(r" (dot|convolution)\(|__cublas").search
    bodies = re.split(r"\n(?=(?:ENTRY )?%\S+ \()", text)
    multiplying = {body.split()[0] for body in bodies if multiplies(body)}
    found, products = {}, 0
    kinds = "all-reduce|all-to-all|all-gather|reduce-scatter"
    sends = re.compile(rf"\n  ROOT \S+ = \S+ ({kinds})\(").search
    wrapped = {body.split()[0]: match[1] for body in bodies if (match := sends(body))}
    for line in text[text.index("\nENTRY ") :].splitlines():
        match = re.match(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)", line)
        if not match:
            continue
        name, result, op, rest = match.groups()
        called = set(re.findall(r"calls=(%[^\s,]+)", line))
        products += bool(multiplies(line) or called & multiplying)
        if name.startswith("async-collective-done"):  # TPU: chained from its start by tuples
            start = name.replace("-done", "-start")
            found[start] = found[start]._replace(products=products - found[start].products)
        elif name.startswith("async-collective-start"):
            # (operand, result, ...): the all-reduce of one leaf, spread over the next fusions
            found[name] = Sent("all-reduce", _operands(result)[:1], products)
        elif op == "fusion-start" and (inside := called & wrapped.keys()):
            # GPU, jax 0.12: (operands, results) of a fusion that is one collective
            operands = _operands(result)
            operands = operands[len(operands) // 2 :]
            found[name] = Sent(wrapped[inside.pop()], operands, products)
        elif kind := re.fullmatch(rf"({kinds})(-start)?", op):
            operands = _operands(result)
            # an all-reduce's start does so on GPUs from jax 0.12 on
            if kind[2] and (kind[1] != "all-reduce" or result.startswith("((")):
                operands = operands[len(operands) // 2 :]  # (operands, results)
            found[name] = Sent(kind[1], operands, products if kind[2] else 0)
        elif re.fullmatch(rf"({kinds}|fusion)-done", op):
            start = re.match(r"%([^\s,)]+)", rest)[1]
            if start not in found:  # a fusion that only computes
                continue
            found[start] = found[start]._replace(products=products - found[start].products)
    return [record for record in found.values() if record.num_bytes >= at_least]


def _operands(result):
    shapes = re.findall(r"\b([a-z]+[0-9]+)\[([0-9,]*)\]", result)
    return [
        (dtype, ITEMSIZE.get(dtype, 4) * math.prod(int(d) for d in dims.split(",") if d))
        for dtype, dims in shapes
    ]


def total(records):
    # a scalar loss may ride along in a bucket of gradients
    return sum(n for record in records for _, n in record.operands if n >= 1024) // 1024 * 1024


def test_without_options_everything_waits_for_one_all_reduce(mesh):
    records = sent(compiled_text(mesh, 3))
    assert [record.kind for record in records] == ["all-reduce"]
    assert total(records) == 3 * LEAF_BYTES
    assert records[0].products == 0


def test_buckets_of_one_leaf_run_under_compute(mesh):
    records = sent(compiled_text(mesh, 3, bucket_bytes=LEAF_BYTES))
    assert [record.kind for record in records] == ["all-reduce"] * 3
    assert total(records) == 3 * LEAF_BYTES
    # the last one has the whole backward pass behind it
    assert all(record.products > 0 for record in records[:-1])


@pytest.mark.parametrize("leaves_in_bucket", [2, 4])
def test_number_of_all_reduces_follows_bucket_bytes(mesh, leaves_in_bucket):
    # room for the scalar loss, which the compiler may put into a bucket as well
    text = compiled_text(mesh, 4, bucket_bytes=leaves_in_bucket * LEAF_BYTES + 1024)
    records = sent(text)
    assert [record.kind for record in records] == ["all-reduce"] * (4 // leaves_in_bucket)
    assert total(records) == 4 * LEAF_BYTES
    for record in records:
        assert total([record]) == leaves_in_bucket * LEAF_BYTES


def test_bfloat16_on_the_wire_is_16_bits_wide(mesh):
    records = sent(compiled_text(mesh, 3, bucket_bytes=8 * LEAF_BYTES, wire_dtype=jnp.bfloat16))
    assert {record.kind for record in records} == {"all-to-all", "all-gather"}
    for kind in ("all-to-all", "all-gather"):
        of_kind = [record for record in records if record.kind == kind]
        assert {dtype for record in of_kind for dtype, _ in record.operands} == {"u16"}
        assert total(of_kind) == 3 * LEAF_BYTES // 2


def test_no_option_is_unknown_to_its_compiler(mesh):
    options = jdp.xla_options(mesh)
    assert options
    assert jdp.known_options(options, mesh) == options


def test_unknown_options_are_left_out_where_the_devices_are_not_here(mesh):
    asked = {**jdp.xla_options(mesh), "xla_no_such_thing": 1}
    with pytest.warns(UserWarning, match="does not know xla_no_such_thing"):
        assert jdp.known_options(asked, mesh) == jdp.xla_options(mesh)


@pytest.mark.parametrize("topology", TPUS)
def test_options_suit_every_kind_of_tpu(topology, monkeypatch):
    # "Continuation fusion for AllReduce is enabled on platform viperfish, but ..."
    mesh = Mesh(np.array(devices("tpu", monkeypatch, topology)), ("data",))
    options = jdp.xla_options(mesh) | jdp.xla_options(mesh, bucket_bytes=MIB)
    assert options
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    jax.jit(lambda x: x + 1).lower(scalar).compile(compiler_options=options)


@pytest.mark.parametrize(
    ("topology", "kind"), [("v5e:4x4", "all-reduce"), ("v5e:4x8", "reduce-scatter")]
)
def test_what_a_tpu_makes_of_a_reduce_scatter(topology, kind, monkeypatch):
    # why, in `sent_under_zero`, gradients are all-reduced on a square slice
    mesh = Mesh(np.array(devices("tpu", monkeypatch, topology)), ("data",))
    scatter = jax.shard_map(
        lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    sharding = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((mesh.size * WIDTH, WIDTH), jnp.float32, sharding=sharding)
    text = jax.jit(scatter).lower(x).compile().as_text()
    assert [one.kind for one in schedule.read(text, list(mesh.devices.flat)).sent] == [kind]


def sent_under_zero(mesh, zero, bucket_bytes=None):
    """What a step of three layers sends: gradients, what is gathered, and the times of all."""
    text = compiled_text(mesh, 3, bucket_bytes=bucket_bytes, zero=zero)
    times = schedule.read(text, list(mesh.devices.flat))
    arrays = [one for one in times.sent if one.bytes >= MIB]
    gathered = [one for one in arrays if one.kind == "all-gather"]
    grads = [one for one in arrays if one.kind != "all-gather"]
    expected = {"tpu": "all-reduce", "gpu": "reduce-scatter"}[platform(mesh)]
    assert {one.kind for one in grads} == {expected}
    # scalars may ride along, see `total`
    assert sum(one.bytes for one in grads) // LEAF_BYTES == 3
    return grads, gathered, times


def under_compute(records):
    """How many are on the wire mostly while something is computed."""
    return sum(one.exposed_us < one.us / 2 for one in records)


def test_zero1_reduces_each_leaf_under_compute(mesh):
    waiting, _, default = sent_under_zero(mesh, jdp.zero1)
    assert len(waiting) == 1
    assert under_compute(waiting) == 0
    grads, gathered, ours = sent_under_zero(mesh, jdp.zero1, LEAF_BYTES)
    assert len(grads) == 3
    # the last has the whole backward pass behind it; on v5e it runs under the optimizer
    assert under_compute(grads) == {"tpu": 3, "gpu": 2}[platform(mesh)]
    assert sum(one.bytes for one in gathered) == 3 * LEAF_BYTES
    assert ours.hidden > default.hidden


def test_zero3_gathers_and_reduces_each_leaf_under_compute(mesh):
    waiting, _, default = sent_under_zero(mesh, jdp.zero3)
    assert len(waiting) == 1
    assert under_compute(waiting) == 0
    grads, gathered, ours = sent_under_zero(mesh, jdp.zero3, LEAF_BYTES)
    assert len(grads) == 3
    # libtpu 0.0.42 gathers under the product that could hide another; 0.0.50 finds both
    assert under_compute(grads) >= {"tpu": 1, "gpu": 2}[platform(mesh)]
    # in bfloat16, the compute dtype; once more in the backward pass, but for the first layer
    assert sum(one.bytes for one in gathered) == 5 * LEAF_BYTES // 2
    assert under_compute(gathered) >= 1
    assert ours.hidden > default.hidden


def test_a_v6e_leaves_all_reduces_to_its_sparse_cores(monkeypatch):
    mesh = Mesh(np.array(devices("tpu", monkeypatch, "v6e:4x4")), ("data",))
    means = jax.shard_map(
        lambda tree: jax.lax.pmean(tree, "data"), mesh=mesh, in_specs=P(), out_specs=P()
    )
    whole = NamedSharding(mesh, P())
    x = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=whole)] * 2
    compiled = jax.jit(means).lower(x).compile(compiler_options=jdp.xla_options(mesh))
    text = compiled.as_text()
    assert 'async_execution_thread="sparsecore"' in text
    assert len(re.findall(r"%all-reduce\S* = .* call-done\(", text)) == 2
