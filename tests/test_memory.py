"""Bytes by kind from compiled programs, and who holds which."""

import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from jdp.hlo import Leaf, parse, shape_of
from jdp.holdings import holdings, human
from jdp.live import Buffer, main_memory, peak
from jdp.memory import kind_of, memory, memory_of
from jdp.offload import offload

pytestmark = pytest.mark.either

WIDTH, LAYERS, ROWS = 64, 4, 24  # a replica's 24 rows are no dim of a parameter
PARAMS = 4 * LAYERS * WIDTH * WIDTH

# --- The text of a program.


@pytest.mark.parametrize(
    ("text", "leaf"),
    [
        ("f32[8,128]{1,0}", Leaf("f32", (8, 128), 4096, 0)),
        ("bf16[3]{0}", Leaf("bf16", (3,), 6, 0)),
        ("pred[]", Leaf("pred", (), 1, 0)),
        ("f8e4m3fn[5]{0}", Leaf("f8e4m3fn", (5,), 5, 0)),
        ("s4[6]{0:E(4)}", Leaf("s4", (6,), 3, 0)),
        ("c64[2]{0}", Leaf("c64", (2,), 16, 0)),
        ("token[]", Leaf("token", (), 0, 0)),
        # tiles are filled up, along the minor dims of the layout
        ("f32[3,100]{1,0:T(8,128)S(1)}", Leaf("f32", (3, 100), 8 * 128 * 4, 1)),
        ("f32[3,100]{0,1:T(8,128)}", Leaf("f32", (3, 100), 104 * 128 * 4, 0)),
        ("bf16[2,3,100]{2,1,0:T(8,128)(2,1)S(5)}", Leaf("bf16", (2, 3, 100), 2 * 8 * 128 * 2, 5)),
        ("s32[]{:T(128)}", Leaf("s32", (), 512, 0)),
    ],
)
def test_shapes_have_the_bytes_they_take(text, leaf):
    assert shape_of(text) == leaf


def test_tuples_are_nested():
    got = shape_of("((f32[2]{0}), s8[3]{0}, /*index=2*/(f32[]{:T(128)S(6)}, u32[]))")
    assert [[x.bytes for x in got[0]], got[1].bytes, [x.bytes for x in got[2]]] == [
        [8],
        3,
        [512, 4],
    ]


def hlo(body, *, other="", alias=""):
    return (
        f"HloModule m, is_scheduled=true{alias}, entry_computation_layout={{()->()}}\n"
        f"{other}\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    )


def alive(text):
    return sorted(x.instruction.name for x in peak(parse(text), main_memory("cpu")))


def test_an_array_lives_until_it_is_last_read():
    text = hlo("""
  %p = f32[8]{0} parameter(0)
  %a = f32[8]{0} dot(%p, %p)
  %b = f32[4]{0} dot(%a, %p)
  %c = f32[8]{0} dot(%b, %p)
  %v = f32[2,4]{1,0} bitcast(%a)
  %d = f32[8]{0} dot(%v, %c)
  ROOT %e = f32[8]{0} dot(%d, %p)""")
    assert alive(text) == ["a", "c", "d"]  # the result and the argument are not temporaries


def test_an_elementwise_operation_writes_over_what_nobody_reads_later():
    text = hlo("""
  %p = f32[8]{0} parameter(0)
  %a = f32[8]{0} dot(%p, %p)
  %b = f32[8]{0} tanh(%a)
  %c = f32[8]{0} tanh(%b)
  ROOT %e = f32[8]{0} dot(%c, %p)""")
    assert len(alive(text)) == 1
    read_again = text.replace("dot(%c, %p)", "dot(%c, %a)")
    assert alive(read_again) in (["a", "b"], ["a", "c"])


def test_a_copy_of_a_donated_argument_takes_its_place():
    text = hlo(
        """
  %p = f32[8]{0} parameter(0)
  %a = f32[8]{0} copy(%p)
  %b = f32[8]{0} dot(%a, %a)
  %c = f32[8]{0} dot(%b, %b)
  ROOT %t = (f32[8]{0}) tuple(%c)""",
        alias=", input_output_alias={ {0}: (0, {}, may-alias) }",
    )
    assert alive(text) == ["b"]
    assert alive(text.replace("may-alias", "no")) == ["a", "b"]


LOOP = """
%body (s: (s32[], f32[8], f32[16])) -> (s32[], f32[8], f32[16]) {
  %s = (s32[], f32[8]{0}, f32[16]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %y = f32[16]{0} get-tuple-element(%s), index=2
  %inner = f32[32]{0} dot(%x, %y)
  %next = f32[8]{0} dot(%inner, %x)
  %sum = f32[16]{0} fusion(%y, %next), kind=kLoop, calls=%update
  ROOT %r = (s32[], f32[8]{0}, f32[16]{0}) tuple(%i, %next, %sum)
}

%update (a: f32[16], b: f32[8]) -> f32[16] {
  %a = f32[16]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  ROOT %d = f32[16]{0} dynamic-update-slice(%a, %b)
}

%cond (s: (s32[], f32[8], f32[16])) -> pred[] {
  %s.1 = (s32[], f32[8]{0}, f32[16]{0}) parameter(0)
  ROOT %go = pred[] constant(true)
}
"""


def test_a_loop_works_in_place_beside_the_temporaries_of_its_body():
    text = hlo(
        """
  %p = f32[8]{0} parameter(0)
  %i0 = s32[] constant(0)
  %x0 = f32[8]{0} dot(%p, %p)
  %y0 = f32[16]{0} broadcast(%i0), dimensions={}
  %s0 = (s32[], f32[8]{0}, f32[16]{0}) tuple(%i0, %x0, %y0)
  %w = (s32[], f32[8]{0}, f32[16]{0}) while(%s0), condition=%cond, body=%body
  %out = f32[16]{0} get-tuple-element(%w), index=2
  ROOT %e = f32[8]{0} dot(%out, %p)""",
        other=LOOP,
    )
    assert alive(text) == ["inner", "x0", "y0"]


def test_a_fusion_updates_a_slice_in_place():
    text = hlo(
        """
  %p = f32[8]{0} parameter(0)
  %y = f32[16]{0} dot(%p, %p)
  %z = f32[16]{0} fusion(%y, %p), kind=kCustom, calls=%update
  ROOT %e = f32[8]{0} dot(%z, %p)""",
        other=LOOP,
    )
    assert alive(text) == ["y"]


def test_what_is_being_sent_is_there_once():
    text = hlo("""
  %p = f32[8]{0} parameter(0)
  %a = f32[8]{0} dot(%p, %p)
  %start = (f32[8]{0}, f32[64]{0}) all-gather-start(%a), dimensions={0}
  %done = f32[64]{0} all-gather-done(%start)
  ROOT %e = f32[8]{0} dot(%done, %p)""")
    found = peak(parse(text), main_memory("cpu"))
    assert sorted(x.bytes for x in found) == [32, 256]
    assert [x.sent for x in found if x.bytes == 256] == [True]


FORWARD = "jit(step)/jit(call)/shard_map/jvp()/dot_general"
BACKWARD = "jit(step)/jit(call)/shard_map/transpose(jvp())/dot_general"
AGAIN = "jit(step)/jit(call)/shard_map/transpose(jvp())/checkpoint/rematted_computation/tanh"


@pytest.mark.parametrize(
    ("dims", "op_name", "sent", "kind"),
    [
        ((16, 8), BACKWARD, False, "gradients"),
        ((8, 1, 16), BACKWARD, False, "gradients"),  # transposed, with the replica axis
        ((16, 4), BACKWARD, False, "activations"),
        ((16, 8), FORWARD, False, "activations"),
        ((16, 8), AGAIN, False, "activations"),
        ((16, 8), "jit(step)/jit(call)/shard_map/while", False, "gradients"),  # accumulators
        ((16, 8), "jit(step)/shard_map/div", False, "gradients"),  # their mean
        ((16, 8), "jit(step)/mul", False, "other"),
        ((16, 8), "", False, "other"),
        ((16, 8), BACKWARD, True, "collectives"),
    ],
)
def test_a_temporary_is_told_by_its_origin_and_shape(dims, op_name, sent, kind):
    leaf = Leaf("f32", dims, 4 * int(np.prod(dims)), 0)
    instruction = parse(hlo("  ROOT %a = f32[8]{0} parameter(0)")).computations["main"]
    buffer = Buffer(instruction.instructions[0], leaf, op_name, sent)
    assert kind_of(buffer, {(8, 16)}) == kind


# --- Steps on emulated devices.


def loss_fn(params, x):
    for weight in params.values():
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def make_params():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return {f"w{i}": jax.random.normal(key, (WIDTH, WIDTH)) for i, key in enumerate(keys)}


adamw = optax.adamw(1e-2)
CHAINS = {
    "all_reduce": optax.chain(jdp.all_reduce(), adamw),
    "zero1": jdp.zero1(adamw),
    "zero2": jdp.zero2(adamw),
    "zero3": jdp.zero3(adamw),
}


def report(tx, rows=ROWS, **settings):
    mesh = jdp.make_mesh()
    step = jdp.train_step(loss_fn, tx, mesh, **settings)
    state = jdp.init_state(make_params(), tx, mesh)
    return memory(step, state, np.zeros((8 * rows, WIDTH), np.float32))


@pytest.mark.parametrize("microbatch", [None, 3])
@pytest.mark.parametrize("chain", CHAINS)
def test_kinds_add_up_and_temporaries_are_found(chain, microbatch):
    got = report(CHAINS[chain], microbatch=microbatch)
    fields = got._fields[: got._fields.index("total")]
    assert sum(getattr(got, name) for name in fields) == got.total
    assert got.arguments + got.outputs + got.temporaries == got.total
    assert all(got.largest[name] >= getattr(got, name) for name in got.largest)
    assert list(got.largest) == ["gradients", "activations", "collectives", "other"]
    parts = 1 if chain == "all_reduce" else 8
    assert got.parameters == PARAMS // (8 if chain == "zero3" else 1)
    assert got.optimizer_state == 2 * PARAMS // parts + 4
    assert (got.other_state, got.batch, got.padding) == (4, ROWS * WIDTH * 4, 0)
    assert 0 < got.outputs < 1000
    assert abs(got.unexplained) <= 0.05 * got.temporaries + 1000, got


def test_all_reduced_gradients_are_whole_and_two_of_them_are_alive():
    got = report(CHAINS["all_reduce"])
    assert got.gradients == PARAMS
    assert PARAMS <= got.collectives <= PARAMS + 16  # their sums, with those of the loss


def test_what_a_scan_over_layers_stacks_up_is_told_apart():
    """With as many rows as a layer is wide, both stacks have the shape of the parameter."""

    def loss(params, x):
        body = lambda x, weight: (jnp.tanh(x @ weight), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    mesh, tx = jdp.make_mesh(), CHAINS["all_reduce"]
    state = jdp.init_state(jnp.zeros((LAYERS, WIDTH, WIDTH)), tx, mesh)
    batch = np.zeros((8 * WIDTH, WIDTH), np.float32)
    got = memory(jdp.train_step(loss, tx, mesh), state, batch)
    assert got.largest["gradients"] == PARAMS
    # inputs and tanh of each layer, the derivative of tanh on jax 0.10, and what a layer is at
    assert 2 * PARAMS <= got.largest["activations"] <= 4 * PARAMS + 1000


def test_activations_grow_with_the_batch_and_go_with_remat():
    few, many = report(CHAINS["zero3"], rows=160), report(CHAINS["zero3"], rows=1600)
    assert 7 * few.activations <= many.activations <= 13 * few.activations
    assert abs(many.gradients - few.gradients) <= PARAMS
    kept = memory_without(jdp.train_step, remat=None)
    again = memory_without(jdp.train_step, remat=True)
    assert again.activations <= kept.activations
    assert again.total <= kept.total


def memory_without(builder, remat):
    mesh = jdp.make_mesh()
    step = builder(loss_fn, CHAINS["all_reduce"], mesh, remat=remat)
    state = jdp.init_state(make_params(), CHAINS["all_reduce"], mesh)
    return memory(step, state, np.zeros((8 * 1600, WIDTH), np.float32))


def test_shapes_tell_the_same_as_arrays():
    mesh, tx = jdp.make_mesh(), CHAINS["zero1"]
    step = jdp.train_step(loss_fn, tx, mesh)
    real = memory(step, jdp.init_state(make_params(), tx, mesh), np.zeros((64, WIDTH), np.float32))
    shapes = jdp.init_state(jax.eval_shape(make_params), tx, mesh)
    batch = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    assert memory(step, shapes, batch) == real


def test_without_donation_the_new_state_is_an_output():
    got = report(CHAINS["all_reduce"], donate=False)
    assert got.outputs >= 3 * PARAMS
    assert got.total >= report(CHAINS["all_reduce"]).total


def test_a_key_and_model_state_are_other_state():
    mesh, tx = jdp.make_mesh(), CHAINS["all_reduce"]

    def loss(params, x, key, *, model_state):
        noise = jax.random.normal(key, x.shape)
        return loss_fn(params, x + noise), {}, jax.tree.map(lambda s: s + 1, model_state)

    step = jdp.train_step(loss, tx, mesh)
    key, model_state = jax.random.key(0), {"mean": jnp.zeros(32)}
    state = jdp.init_state(make_params(), tx, mesh, key=key, model_state=model_state)
    got = memory(step, state, np.zeros((64, WIDTH), np.float32))
    assert got.other_state == 4 + 8 + 32 * 4


def test_it_prints_a_table():
    text = str(report(CHAINS["all_reduce"]))
    assert re.search(r"^optimizer state +131 kB +39\.\d%$", text, re.MULTILINE)
    assert text.splitlines()[-1].startswith("temporaries: buffers alive at the peak")
    assert "in host memory" not in text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (12345, "12.3 kB"),
        (999_600, "1.00 MB"),
        (-2_500_000, "-2.50 MB"),
        (31.4e9, "31.4 GB"),
        (5e15, "5000 TB"),
    ],
)
def test_bytes_are_written_with_three_digits(size, text):
    assert human(int(size)) == text


# --- As compiled for devices that are not here.


@pytest.mark.aot
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_memory_of_a_tpu_and_of_a_gpu(platform, monkeypatch):
    mesh = Mesh(np.array(topologies.devices(platform, monkeypatch)), ("data",))
    width, count, rows = 1024, 2, 16384

    def shape(dims, dtype, *spec):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*spec)))

    params = {f"w{i}": shape((width, width), jnp.float32) for i in range(count)}
    bytes_of_params = 4 * count * width * width
    tx = offload(jdp.zero1(adamw))
    state = jdp.init_state(params, tx, mesh)
    batch = shape((mesh.size * rows, width), jnp.float32, "data")
    step = jdp.train_step(loss_fn, tx, mesh)
    compiled = step.lower(state, batch).compile()
    got, stats = memory_of(compiled, state, batch), compiled.memory_analysis()
    assert got.parameters == bytes_of_params
    assert got.host == stats.host_argument_size_in_bytes == 2 * bytes_of_params // mesh.size
    assert got.optimizer_state == 4
    assert got.batch == rows * width * 4
    assert 0 <= got.padding <= 4096  # scalars are padded to a tile
    assert got.activations >= rows * width * 2  # a TPU multiplies bfloat16
    assert got.temporaries == stats.temp_size_in_bytes
    assert abs(got.unexplained) <= 0.25 * got.temporaries, got
    assert "in host memory" in str(got)


@pytest.mark.aot
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_memory_table_of_the_zero_paper(stage, monkeypatch):
    """7.5e9 parameters on 64 H100s: 120, 31.4, 16.6 and 1.9 GB."""
    table = importlib.import_module("memory_table")
    row = table.row(stage, topologies.devices("gpu", monkeypatch, "1x8x8"), table.Config())
    early = 0.0
    if stage == 1 and row["gradients"] < row["parameters"]:
        # XLA of jax 0.12 scatters one of the eight groups before it has computed the last
        assert row["gradients"] == pytest.approx(7 / 8 * row["parameters"])
        early = row["parameters"] / 8
    assert row["/ paper"] + early / row["paper"] == pytest.approx(1, abs=table.SLACK), row


# --- Who holds which bytes.


def rows_of(tree):
    return {row.path: (row.shape, row.lies, row.bytes) for row in holdings(tree).rows}


def test_holdings_of_a_state():
    mesh, tx = jdp.make_mesh(), jdp.zero1(optax.sgd(0.1, momentum=0.9))
    params = {"even": jnp.zeros((16, 32)), "odd": jnp.zeros((3, 321)), "tiny": jnp.zeros(7)}
    state = jdp.init_state(params, tx, mesh, key=jax.random.key(0))
    got = holdings(state)
    rows = rows_of(state)
    assert rows["params['even']"] == ((16, 32), "whole on each of 8", 2048)
    moment = "opt_state.inner_state[0].trace"
    assert rows[f"{moment}['even']"] == ((16, 32), "split: dim 0 over data (8)", 256)
    padded = "padded 321 -> 328, split: dim 1 over data (8)"
    assert rows[f"{moment}['odd']"] == ((3, 321), padded, 3 * 41 * 4)
    assert rows[f"{moment}['tiny']"] == ((7,), "whole on each of 8", 28)
    assert got.parts["params"] == 2048 + 3 * 321 * 4 + 28
    assert got.parts["opt_state"] == 256 + 3 * 41 * 4 + 28
    assert (got.parts["step"], got.parts["key"]) == (4, 8)
    assert got.total == sum(got.parts.values())
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert got.total == held
    lines = str(got).splitlines()
    assert lines[0].split() == ["leaf", "shape", "dtype", "lies", "bytes", "per", "device"]
    assert len({len(line) for line in lines}) == 1
    assert lines[-1].split()[0] == "total"
    assert (
        holdings(jdp.init_state(jax.eval_shape(lambda: params), tx, mesh)).parts["params"]
        == (got.parts["params"])
    )


def test_holdings_on_two_axes():
    mesh = jdp.make_mesh(("node", "device"), (2, 4))

    def placed(*spec):
        return jax.device_put(jnp.zeros((16, 8)), NamedSharding(mesh, P(*spec)))

    tree = {"a": placed("device"), "b": placed(("node", "device")), "c": placed("node", "device")}
    rows = rows_of(tree)
    assert rows["['a']"][1:] == ("split: dim 0 over device (4); a copy for each of node", 128)
    assert rows["['b']"][1:] == ("split: dim 0 over node, device (8)", 64)
    assert rows["['c']"][1:] == ("split: dim 0 over node (2) and dim 1 over device (4)", 64)


def test_holdings_of_one_device_replicas_hosts_and_python():
    mesh = jdp.make_mesh()
    value = jax.device_put(jnp.zeros((8, 6)), NamedSharding(mesh, P("data")))
    away = NamedSharding(mesh, P(), memory_kind="pinned_host")
    tree = {
        "replicas": jdp.PerReplica(value, axes=("data",), mesh=mesh),
        "one": jnp.zeros(3),
        "host": np.zeros(3),
        "number": 1,
        "away": jax.device_put(jnp.zeros(3), away),
    }
    rows = rows_of(tree)
    assert rows["['replicas'].value"] == ((8, 6), "split: dim 0 over data (8)", 24)
    assert rows["['one']"] == ((3,), "whole on one device", 12)
    assert rows["['host']"] == ((3,), "not on a device", 0)
    assert rows["['number']"] == ((), "not on a device", 0)
    assert "whole on each of 8, in pinned_host" in str(holdings(tree))
    assert holdings(()).total == 0
    assert holdings(jnp.zeros(3)).parts == {"": 12}
