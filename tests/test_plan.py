"""The planner: memory as compiled, the right choice where it is plain, sentences, bad input."""

import functools
import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import jdp
from jdp import confirmed, targets, wanted
from jdp.hardware import CHIPS, Link
from jdp.memory import memory_of
from jdp.memory_model import predict
from jdp.planned import Row, advice_on, ranked
from jdp.planning import plan
from jdp.probe import FEW, Guess, few_of, guess, probe, with_stage
from jdp.sizes import Array, as_shapes, held, sizes_of, with_rows
from jdp.split_advice import Transformer, describe, memory_of_split, splits
from jdp.step_time import Setting, step_seconds
from jdp.strategy import Strategy, strategies

pytestmark = pytest.mark.alternate

WIDTH = 64
TX = optax.adam(1e-3)


def mlp(width=WIDTH, layers=3):
    params = [{"w": jnp.ones((width, width)), "b": jnp.ones(width)} for _ in range(layers)]
    return params, jnp.ones((32, width))


def loss_fn(params, batch):
    for layer in params:
        batch = jnp.tanh(batch @ layer["w"] + layer["b"])
    return jnp.mean(batch**2)


def planned(**changes):
    params, batch = mlp()
    given = {"compile_best": 0, "probes": 0, "remats": (False,), "wires": ("exact",)} | changes
    return plan(loss_fn, given.pop("params", params), given.pop("batch", batch), TX, **given)


# --- memory ---


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [2, 8])
def test_what_is_held_is_what_init_state_places(stage, count):
    params = {"w": jnp.ones((64, 24)), "odd": jnp.ones((1000, 3)), "b": jnp.ones(8)}
    sizes = sizes_of(params, TX, jnp.ones((8, 4)))
    mesh = jdp.make_mesh(num_devices=count)
    state = jdp.init_state(as_shapes(params), with_stage(TX, stage), mesh)
    parts = jdp.holdings(state).parts
    split = held(sizes.params, count, stage=3) if stage == 3 else sizes.param_bytes
    assert parts["params"] == split
    whole = sum(x.bytes for x in sizes.opt_state)
    assert parts["opt_state"] == (held(sizes.opt_state, count, stage=stage) if stage else whole)


@pytest.mark.parametrize(("stage", "microbatches"), [(0, 4), (1, 1), (2, 4), (3, 1), (3, 4)])
def test_memory_is_predicted_within_5_percent(stage, microbatches):
    """From a probe on four devices, for eight and more microbatches."""
    params, batch = mlp(layers=6)
    given = {"stage": stage, "microbatch": 2, "microbatches": min(2, microbatches)}
    found = probe(loss_fn, params, TX, batch, devices=few_of(jax.devices()), **given)
    rows = 2 * microbatches
    predicted = predict(
        sizes_of(params, TX, batch),
        found,
        stage=stage,
        devices=8,
        rows=rows,
        microbatches=microbatches,
        platform="cpu",
    )
    assert found.devices == FEW
    mesh, tx = jdp.make_mesh(), with_stage(TX, stage)
    state, batch = jdp.init_state(as_shapes(params), tx, mesh), with_rows(batch, 8 * rows)
    step = jdp.train_step(loss_fn, tx, mesh, microbatch=2)
    total = memory_of(step.lower(state, batch).compile(), state, batch).total
    assert predicted.total == pytest.approx(total, rel=0.05)


def test_offload_moves_the_state_to_the_host():
    params, batch = mlp()
    sizes = sizes_of(params, TX, batch)
    base = guess(loss_fn, params, batch, microbatch=4)
    given = {"stage": 1, "devices": 8, "rows": 4, "microbatches": 1, "platform": "gpu"}
    away, here = (predict(sizes, base, offload=offload, **given) for offload in (True, False))
    assert away.host + away.opt_state == here.opt_state
    assert away.opt_state < 0.2 * here.opt_state  # biases stay, they are small


def test_the_memory_of_rounding_wires_is_not_less_than_what_is_compiled():
    params, batch = mlp(layers=4)
    s = next(s for s in ways(microbatches=[4], wires=["power_sgd"]) if s.stage == 1)
    sizes, base = sizes_of(params, TX, batch), guess(loss_fn, params, batch, microbatch=4)
    given = {"stage": 1, "devices": 8, "rows": 4, "microbatches": 1, "platform": "cpu"}
    exact, predicted = (predict(sizes, base, wire=w, **given) for w in ("exact", "power_sgd"))
    assert predicted.opt_state - exact.opt_state == 4 * sizes.numbers  # what is not sent yet
    s, mesh = s._replace(optimizer=TX), s.mesh()
    state, rows = jdp.init_state(as_shapes(params), s.tx, mesh), with_rows(batch, 32)
    total = memory_of(s.step(loss_fn, mesh).lower(state, rows).compile(), state, rows).total
    assert exact.total < total <= predicted.total < 1.3 * total


def test_a_guess_counts_products_and_what_is_kept():
    params, batch = mlp(layers=3)
    found = guess(loss_fn, params, batch, microbatch=32)
    # forward, gradient of weights, gradient of inputs but for the first layer
    assert found.flops == 2 * 32 * WIDTH**2 * (3 + 3 + 2)
    assert found.kept >= 3 * 32 * WIDTH * 4
    row = guess(loss_fn, params, batch, microbatch=1)
    assert row.kept < WIDTH**2 * 4  # parameters are not kept anew
    assert guess(loss_fn, params, batch, microbatch=32, remat=True).kept < found.kept


def test_products_of_16_bits_take_the_time_of_16_bits():
    params, batch = mlp()
    half = jdp.compute_in(loss_fn, jnp.bfloat16)

    def within(params, batch):
        return loss_fn(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), batch)

    wide, narrow = (guess(f, params, batch, microbatch=32) for f in (loss_fn, half))
    assert (wide.narrow, narrow.narrow) == (0, wide.flops)
    assert guess(within, params, batch.astype(jnp.bfloat16), microbatch=32).narrow == wide.flops
    chip = CHIPS["h100"]._replace(flops={"f32": 1e6, "bf16": 1e8})
    given = {"compile_best": 0, "probes": 0, "chip": chip, "microbatches": [32]}
    slow, quick = (plan(f, params, batch, TX, **given).rows[0] for f in (loss_fn, half))
    assert slow.step_us == pytest.approx(100 * quick.step_us, rel=0.01)


def test_losses_with_keys_state_and_means_are_guessed():
    params, batch = mlp()

    def full(params, batch, key, model_state):
        noise = jax.random.normal(key, batch.shape)
        mean = jdp.Mean(jnp.sum(loss_fn(params, batch + noise)), jnp.float32(1.0))
        return mean, {"norm": jnp.mean(jdp.all_gather(batch, "data"))}, model_state

    key, state = jax.random.key(0), {"seen": jnp.zeros(())}
    found = guess(full, params, batch, microbatch=4, key=key, model_state=state)
    assert found.flops == guess(loss_fn, params, batch, microbatch=4).flops


# --- strategies ---


NAMES = {"optimizer": optax.sgd(1.0)}


def ways(**given):
    given = {"nodes": 2, "microbatches": [2], "remats": [False]} | given
    return [
        s for s in strategies(NAMES["optimizer"], rows=32, devices=8, **given) if s.devices == 8
    ]


def trained(s, loss_fn, params, batch):
    mesh = s.mesh()
    state = jdp.init_state(params, s.tx, mesh)
    return jdp.logical(s.step(loss_fn, mesh)(state, batch)[0].params)


def some_ways():
    """Each stage on each mesh; one computes again, one has a single microbatch."""
    plain, one, two, three, nodes, within, _, three_within = ways(wires=["exact"])
    one = one._replace(microbatch=4, microbatches=1)
    return [plain, one, two._replace(remat=True), three, nodes, within, three_within]


@functools.cache
def one_device():
    """Parameters, loss and batch, and what one device makes of the parameters with rate 1."""
    params, _, masked, batch = reference.mlp()
    batch = {name: rows[32:] for name, rows in batch.items()}
    gradient = jax.jit(jax.grad(lambda p: reference.loss_value(masked, p, batch)))(params)
    return params, masked, batch, jax.tree.map(jnp.subtract, params, gradient)


@pytest.mark.parametrize("s", some_ways(), ids=str)
def test_a_strategy_trains_as_one_device_does(s):
    """The gradient itself, of unequal weights, is what parameters lose."""
    params, masked, batch, expected = one_device()
    reference.assert_close(trained(s, masked, params, batch), expected, rtol=2e-6)


@pytest.mark.parametrize(("wire", "error"), [("bfloat16", 8 * 2**-9), ("int8", 8 / 127)])
def test_a_rounding_strategy_trains_nearly_so(wire, error):
    """Half a step of a replica's own gradient, which weights make up to 8 times the mean."""
    params, masked, batch, expected = one_device()
    made = trained(ways(wires=[wire])[0], masked, params, batch)
    found, change = (jax.tree.map(jnp.subtract, x, params) for x in (made, expected))
    reference.assert_close(found, change, rtol=error)
    with pytest.raises(AssertionError, match="off by"):
        reference.assert_close(found, change, rtol=1e-5)


def test_the_code_of_a_strategy_makes_the_same_step():
    params, batch = mlp(width=16, layers=1)[0], with_rows(jnp.ones((1, 16)), 32)
    every = ways()
    for number, s in enumerate(every):
        made = dict(NAMES, loss_fn=loss_fn)
        exec(s.code(), made)
        mesh, step = s.mesh(), s.step(loss_fn)
        assert made["mesh"] == mesh
        with jax.set_mesh(mesh):
            state, same = (jax.eval_shape(tx.init, params) for tx in (made["tx"], s.tx))
        assert jax.tree.structure(state) == jax.tree.structure(same)
        if number % 13 == 2:  # lowering takes a second
            state = jdp.init_state(as_shapes(params), s.tx, mesh)
            assert made["step"].lower(state, batch).as_text() == step.lower(state, batch).as_text()
    made = ways(wires=["exact"], remats=["dots_saveable"], microbatches=[4])[0]
    assert "(loss_fn, tx, mesh, microbatch=4, remat='dots_saveable')" in made.code()


def test_an_offloading_strategy_is_code_too():
    s = ways(offloads=[True])[1]
    made = dict(NAMES, loss_fn=loss_fn)
    exec(s.code(), made)
    assert "jdp.offload(jdp.zero1(optimizer))" in s.code()
    assert callable(made["step"])


def test_every_kind_is_enumerated():
    every = list(strategies(TX, rows=64, devices=16, nodes=2, offloads=(False, True)))
    assert {s.stage for s in every} == {0, 1, 2, 3}
    assert {s.remat for s in every} == {False, "dots_saveable", True}
    assert {s.wire for s in every} == {"exact", "bfloat16", "int8", "power_sgd"}
    assert {s.axis_names for s in every} == {("data",), ("node", "device")}
    assert {s.split_axis for s in every} == {None, "device"}
    assert {s.offloaded for s in every} == {False, True}
    fewer = [s for s in every if s.devices < 16]
    assert {s.devices for s in fewer} == {1, 2, 4, 8}
    assert {(s.stage, s.wire) for s in fewer} == {(0, "exact")}
    assert all(s.microbatch * s.microbatches * s.devices == 64 for s in every)


def sent(wire="exact", dtype=jnp.float32, microbatches=1, **changes):
    """Seconds on a wire that has no latency, of 16 devices on 2 nodes."""
    link = Link(1e9, 0.0, "")
    chip = CHIPS["h100"]._replace(inner=link, outer=link._replace(bytes_per_s=1e8))
    given = {"stage": 0, "nodes": 2, "split_over": 16, "hierarchical": False} | changes
    setting = Setting(
        devices=16, microbatches=microbatches, wire=wire, offload=False, chip=chip, **given
    )
    params = {
        "w": jax.ShapeDtypeStruct((1000, 1000), dtype),
        "b": jax.ShapeDtypeStruct((8,), dtype),
    }
    sizes = sizes_of(params, TX, jnp.ones((8, 4)))
    return step_seconds(sizes, Guess(0, 0.0, 0.0), setting).sent


def test_what_is_sent_follows_from_dtype_and_wire():
    assert sent("bfloat16") == pytest.approx(0.5 * sent())
    assert sent(dtype=jnp.bfloat16) == pytest.approx(0.5 * sent())
    assert sent("bfloat16", dtype=jnp.bfloat16) == pytest.approx(sent(dtype=jnp.bfloat16))
    assert sent(microbatches=4, dtype=jnp.bfloat16) == sent(dtype=jnp.bfloat16)
    assert sent("power_sgd") == pytest.approx(sent() * (4 * 2000 + 8) / (1e6 + 8))
    # within nodes it is exact: 2 x 7/8 of 4 MB at 1 GB/s; between them half of an eighth
    within, between = 1.75 * 4.000032e6 / 1e9, 4.000032e6 / 8 / 1e8
    assert sent(hierarchical=True) == pytest.approx(within + between)
    assert sent("bfloat16", hierarchical=True) == pytest.approx(within + between / 2)


def test_the_most_devices_that_divide_the_batch_are_tried_every_way():
    every = list(strategies(TX, rows=12, devices=8))
    assert {s.stage for s in every if s.devices == 4} == {0, 1, 2, 3}
    assert {s.devices for s in every} == {1, 2, 4}


# --- the choice ---


def test_a_small_model_is_told_that_more_devices_are_slower():
    found = planned()
    assert found.best.devices < 8
    said = " ".join(found.advice)
    assert f"8 devices will be slower than {found.best.devices}, because" in said


def test_plain_data_parallelism_is_named_best():
    """Long compute, a quick wire and no optimizer state: nothing to split."""
    chip = CHIPS["h100"]._replace(flops={"bf16": 1e9, "f32": 1e9})
    params, batch = mlp(width=256)
    found = plan(loss_fn, params, batch, optax.sgd(0.1), chip=chip, compile_best=0, probes=0)
    assert (found.best.stage, found.best.devices) == (0, 8)
    assert any("Plain data parallelism is best" in said for said in found.advice)


def test_measured_links_override_the_table():
    slow = Link(1e6, 1e-3, "measured")
    chip = CHIPS["h100"]._replace(flops={"bf16": 1e10, "f32": 1e10})
    quick, slowed = (planned(chip=chip, links=links) for links in (None, slow))
    assert quick.best.devices == 8
    assert slowed.best.devices == 1
    assert planned(chip=chip, links={"inner": slow}).best == slowed.best


def row_of(step_us, memory=1, fits=True, timed="compiled", exposed_us=0.0, **changes):
    """A row of a plan, of plain data parallelism but for what is changed."""
    plain = Strategy(0, ("data",), (8,), None, 4, 1, False, "exact", False, None)
    s = plain._replace(**changes)
    return Row(s, memory, fits, step_us, exposed_us, "compute", "why", timed, timed)


@pytest.mark.parametrize(
    "complication",
    [
        {"remat": True},
        {"remat": "dots_saveable"},
        {"stage": 1},
        {"wire": "bfloat16"},
        {"offloaded": True},
        {"microbatch": 2, "microbatches": 2},
        {"axis_names": ("node", "device"), "shape": (2, 4)},
    ],
    ids=str,
)
@pytest.mark.parametrize("step_us", [20.0, 20_000.0])
def test_of_times_that_are_alike_the_plainest_is_first(complication, step_us):
    less = {20.0: 4.0, 20_000.0: 900.0}[step_us]  # under 5 us, under 5 %
    plain, other = row_of(step_us), row_of(step_us - less, **complication)
    assert ranked([other, plain]) == ranked([plain, other]) == [plain, other]
    clearly = other._replace(step_us=step_us - 2 * less)
    assert ranked([plain, clearly]) == [clearly, plain]


def test_rows_are_alike_with_the_quickest_not_with_a_neighbour():
    rows = [row_of(1000.0 + us, remat=us < 80) for us in (0, 40, 80, 120)]
    assert [row.step_us for row in ranked(rows)] == [1000, 1040, 1080, 1120]
    few = [row_of(100.0, shape=(8,)), row_of(100.0, shape=(2,)), row_of(101.0, shape=(1,))]
    assert [row.strategy.devices for row in ranked(few)] == [1, 2, 8]


def test_the_advice_says_why_a_quicker_row_is_not_taken():
    plain, other = row_of(10.0), row_of(6.0, remat=True)
    said = advice_on(ranked([other, plain]), plain, 8, 32)
    assert any("less than such figures can tell (5%, or 5 µs)" in x and "6 µs" in x for x in said)
    model = row_of(50.0, stage=2, timed="formula")
    said = advice_on([row_of(100.0), model], row_of(100.0), 8, 32)
    assert any("~50 µs by formula instead of 100 µs; it was not compiled" in x for x in said)


@pytest.mark.parametrize("given", [{}, {"compile_best": 1, "cache": False}, {"global_batch": 12}])
def test_every_figure_of_the_advice_stands_in_the_table(given):
    found = planned(wires=("exact", "power_sgd"), remats=(False, True), **given)
    assert any("slower than 1" in said for said in found.advice)
    cells = {cell for line in found.table() for cell in line}
    for said in found.advice[1:]:
        for figure in re.findall(r"takes (~?[\d.]+ [µm]?s)|on 1 (~?[\d.]+ [µm]?s)", said):
            assert set(figure) - {""} <= cells
    assert len(found.table()) < len(found.rows)


def test_what_is_modelled_is_marked():
    found = planned(compile_best=1, probes=1, cache=False)
    head, *lines = found.table(most=len(found.rows))
    place = {name: head.index(name) for name in ("memory", "step", "memory from")}
    for row, line in zip(found.rows, lines, strict=True):
        assert line[place["memory from"]] == row.source
        assert line[place["memory"]].startswith("~") == (row.source != "compiled")
        assert line[place["step"]].startswith("~")  # the compiler for CPUs models no times
    assert {row.source for row in found.rows} == {"compiled", "probe", "formula"}
    assert "~ is modelled" in str(found)
    marked = row_of(5.0, timed="compiled", exposed_us=2.0)
    assert (marked.step, marked.waits) == ("5 µs", "2 µs")


def test_rows_that_are_not_compiled_say_what_their_times_consist_of(monkeypatch):
    """Their times are stretched as compiled ones came out; the words go with the figures."""
    compiled = confirmed._compiled_row

    def slower(job, row, report):
        return compiled(job, row, report)._replace(step_us=10 * row.step_us, timed="compiled")

    monkeypatch.setattr(confirmed, "_compiled_row", slower)
    plain, slow = planned(), planned(compile_best=1, cache=False)
    by_name = {str(row.strategy): row for row in plain.rows}
    row = next(row for row in slow.rows if row.source != "compiled")
    assert row.step_us == pytest.approx(10 * by_name[str(row.strategy)].step_us)
    assert row.reason != by_name[str(row.strategy)].reason
    assert {r.strategy.devices for r in slow.rows if r.source == "compiled"} == {1, 8}


def test_rounded_gradients_alone_are_said_to_be_so():
    found = planned(wires=["bfloat16"])
    assert found.best is None
    assert found.advice[0].startswith("Of what was tried only rounded gradients fit")


def test_a_batch_that_divides_among_some_devices():
    found = planned(global_batch=12, chip=CHIPS["h100"]._replace(flops={"bf16": 1e7, "f32": 1e7}))
    assert found.best.devices == 4
    assert any("12 rows divide among 4 of the 8 devices only" in x for x in found.advice)
    assert any("such as 16" in x for x in found.advice)


def test_a_loss_that_does_not_take_every_number_of_rows():
    def pairs(params, batch):
        return loss_fn(params, batch.reshape(batch.shape[0] // 2, 2, WIDTH).mean(1))

    params, batch = mlp()
    found = plan(pairs, params, batch, TX, compile_best=0, probes=0)
    assert {row.strategy.microbatch % 2 for row in found.rows} == {0}
    assert any("Microbatches of 1 row are left out" in note for note in found.notes)


def test_a_loss_that_names_the_flat_axis_is_planned_on_flat_meshes(monkeypatch):
    def gathers(params, batch):
        return loss_fn(params, batch) + 0 * jnp.mean(jdp.all_gather(batch, "data"))

    monkeypatch.setattr(wanted, "_nodes", lambda there, devices: (2, 4))
    params, batch = mlp()
    found = plan(gathers, params, batch, TX, compile_best=0, probes=0, remats=(False,))
    assert {row.strategy.axis_names for row in found.rows} == {("data",)}
    assert any("the loss names the axis 'data'" in note for note in found.notes)
    assert any(len(row.strategy.shape) == 2 for row in planned().rows)


def test_keys_and_model_state_may_be_shapes():
    def full(params, batch, key, model_state):
        noise = jax.random.normal(key, batch.shape)
        return loss_fn(params, batch + noise), {"n": jnp.mean(batch)}, {"n": model_state["n"] + 1}

    params, batch = mlp()
    given = {"key": jax.random.key(0), "model_state": {"n": jnp.zeros(())}}
    arrays, shapes = (
        plan(full, params, batch, TX, probes=0, compile_best=0, remats=(False,), **x)
        for x in (given, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given))
    )
    assert [row.memory for row in arrays.rows] == [row.memory for row in shapes.rows]
    given |= {"probes": 0, "compile_best": 1, "cache": False, "microbatches": [32]}
    compiled = plan(full, params, batch, TX, remats=(False,), **given)
    assert compiled.rows[0].source == "compiled"
    assert compiled.rows[0].memory == pytest.approx(arrays.rows[0].memory, rel=0.1)


def test_an_optimizer_with_state_that_is_never_used():
    """Adafactor keeps arrays of one element in place of factors; programs leave them out."""
    params, batch = mlp()
    tx, given = optax.adafactor(1e-3, min_dim_size_to_factor=8), {"microbatches": [4]}
    given |= {"compile_best": 1, "probes": 0, "remats": (False,), "wires": ("exact",)}
    found = plan(loss_fn, params, batch, tx, cache=False, **given)
    assert found.rows[0].source == "compiled"
    assert not any("left out" in note for note in found.notes)


@pytest.mark.parametrize("masked", [True, False])
def test_optimizers_for_some_parameters_are_planned(masked):
    params, batch = mlp()
    split = [{"w": "adam", "b": "sgd"}] * 3
    parts = {"adam": TX, "sgd": optax.sgd(0.1)}
    tx = optax.masked(TX, [{"w": True, "b": False}] * 3)
    tx = tx if masked else optax.multi_transform(parts, split)
    found = plan(loss_fn, params, batch, tx, compile_best=0, probes=0, remats=(False,))
    sizes = sizes_of(as_shapes(params), tx, batch)
    assert found.best is not None
    assert sum(x.bytes for x in sizes.opt_state) == 3 * 2 * 4 * WIDTH**2 + 4


def test_a_strategy_that_the_chain_refuses_is_left_out(monkeypatch):
    report = confirmed._report

    def refuse(job, s, cache):
        if s.devices == 1:
            raise ValueError("an optimizer of mine wants two devices")
        return report(job, s, cache)

    monkeypatch.setattr(confirmed, "_report", refuse)
    found = planned(compile_best=1, cache=False, microbatches=[4, 32])
    assert found.best.devices > 1
    assert any("wants two devices" in note for note in found.notes)


def test_what_a_formula_rules_out_by_a_little_is_compiled():
    given = {"chip": CHIPS["cpu"]._replace(memory=100_000), "microbatches": [4]}
    assert planned(**given).best is None
    found = planned(**given, compile_best=1, cache=False)
    assert (found.best.stage, found.rows[0].source) == (1, "compiled")
    assert found.rows[0].memory <= 100_000


def test_what_does_not_fit_is_last_and_says_why():
    chip = CHIPS["h100"]._replace(memory=150_000)
    found = planned(chip=chip, params=mlp(layers=4)[0])
    fits = [row.fits for row in found.rows]
    assert fits == sorted(fits, reverse=True)
    assert not all(fits)
    assert found.best.stage > 0
    assert found.rows[-1].bound == "memory"
    assert "too much" in found.rows[-1].reason


def test_an_overlarge_model_is_an_answer():
    layers, width = 32, 8192
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)  # noqa: E731
    params = {"up": shape(layers, width, 4 * width), "down": shape(layers, 4 * width, width)}

    def loss(params, batch):
        body = lambda x, w: (jnp.tanh(x @ w["up"]) @ w["down"], None)  # noqa: E731
        return jnp.mean(jax.lax.scan(body, batch, params)[0] ** 2)

    batch = jax.ShapeDtypeStruct((8, 128, width), jnp.float32)
    found = plan(loss, params, batch, TX, chip=CHIPS["h100"], compile_best=2, probes=2)
    assert found.best is None
    assert not any(row.fits for row in found.rows)
    assert "No data-parallel strategy fits" in found.advice[0]
    assert "transformer of 32 layers of width 8192" in found.advice[1]
    assert any("jdp.layerwise" in said for said in found.advice)


def test_the_best_are_compiled_and_ranked_by_that(tmp_path):
    found = planned(compile_best=2, cache=tmp_path)
    assert [row.source for row in found.rows[:3]] == ["compiled", "compiled", "formula"]
    step = found.best.step(loss_fn)
    state, _ = step(jdp.init_state(mlp()[0], found.best.tx, step.mesh), np.ones((32, WIDTH), "f"))
    assert int(state.step) == 1


def test_lossy_wires_are_shown_but_not_taken_unasked():
    slow, chip = Link(1e6, 1e-7, "slow"), CHIPS["h100"]._replace(flops={"bf16": 1e7, "f32": 1e7})
    given = {"compile_best": 1, "cache": False}
    kept = planned(chip=chip, links=slow, wires=("exact", "bfloat16"), **given)
    assert kept.rows[0].source == "compiled"
    taken = planned(chip=chip, links=slow, wires=("exact", "bfloat16"), allow_lossy=True)
    assert kept.best.wire == "exact"
    assert taken.best.wire == "bfloat16"


def test_a_plan_is_text_and_json():
    found = planned()
    assert str(found.best) in str(found)
    assert found.best.code() in str(found)
    told = json.loads(found.to_json())
    assert told["best"]["name"] == str(found.best)
    assert len(told["rows"]) == len(found.rows)
    assert told["rows"][0]["communication_share"] == found.rows[0].share


# --- tensor and pipeline parallelism ---


def test_the_memory_table_of_the_zero_paper():
    paper = Transformer(36, 4096, 1024, 7.5e9, 0, 2, 2, 12)
    sizes = [memory_of_split(paper, data=64, stage=s, rows=0) / 1e9 for s in range(4)]
    assert [round(size, 1) for size in sizes] == [120.0, 31.4, 16.6, 1.9]


def test_a_model_beyond_data_parallelism_is_split_within_the_node():
    llama = Transformer(126, 16_384, 8192, 405.9e9, 128_256)
    assert memory_of_split(llama, data=128, stage=3, recompute="full") > CHIPS["h100"].memory
    found = splits(llama, CHIPS["h100"], 128, 128)
    assert found
    assert found[0].tensor > 1
    assert found[0].tensor <= CHIPS["h100"].per_node
    assert all(s.data * s.tensor * s.pipeline == 128 for s in found)
    assert all(s.memory <= CHIPS["h100"].memory for s in found)


@pytest.mark.parametrize("scanned", [True, False])
def test_a_transformer_is_recognised(scanned):
    front = (6,) if scanned else ()
    layer = {"qkv": jnp.ones((*front, 32, 96)), "up": jnp.ones((*front, 32, 128))}
    params = {"layers": layer if scanned else [layer] * 6, "embed": jnp.ones((500, 32))}
    batch = jnp.ones((8, 17), jnp.int32)
    found = describe(params, sizes_of(params, TX, batch), batch)
    assert (found.layers, found.width, found.sequence, found.vocabulary) == (6, 32, 17, 500)


def test_what_is_no_transformer_is_not_taken_for_one():
    params, batch = {"w": jnp.ones((8, 3)), "v": jnp.ones((3, 1))}, jnp.ones((4, 8))
    assert describe(params, sizes_of(params, TX, batch), batch) is None


# --- bad input ---


def test_a_target_that_does_not_exist_lists_those_that_do():
    with pytest.raises(ValueError, match=r"no target 'v9:4x4'.*h100:2x8"):
        planned(target="v9:4x4")


def test_a_batch_that_divides_no_device_count():
    with pytest.raises(ValueError, match=r"7 rows divides among none of 2 to 8.*such as 8"):
        planned(global_batch=7)


def test_params_without_floats():
    with pytest.raises(TypeError, match=r"'w'.*int32.*real floating-point"):
        planned(params={"w": jnp.ones(3, jnp.int32)})


def test_params_without_arrays():
    with pytest.raises(ValueError, match="nothing to train"):
        planned(params={})


@pytest.mark.parametrize(
    "tx", [jdp.zero1(TX), optax.chain(jdp.all_reduce(), TX), optax.chain(jdp.power_sgd(rank=2), TX)]
)
def test_a_tx_that_communicates_already(tx):
    params, batch = mlp()
    with pytest.raises(ValueError, match=r"communicates already.*give the optimizer alone"):
        plan(loss_fn, params, batch, tx)


def test_a_tx_that_communicates_over_the_mesh_that_is_set():
    params, batch = mlp()
    with jax.set_mesh(jdp.make_mesh()), pytest.raises(ValueError, match=r"it holds a jdp.zero2"):
        plan(loss_fn, params, batch, jdp.zero2(TX))


def test_a_tx_that_is_none():
    params, batch = mlp()
    with pytest.raises(TypeError, match=r"given a str as tx.*optax.adamw"):
        plan(loss_fn, params, batch, "adam")


def test_a_tx_for_other_params_is_not_said_to_communicate():
    params, batch = mlp()
    tx = optax.multi_transform({"a": TX}, [{"w": "a", "b": "b"}] * 3)
    with pytest.raises(ValueError, match="cannot be used with these params: Some parameters"):
        plan(loss_fn, params, batch, tx)


def test_a_tx_that_accumulates_over_calls():
    params, batch = mlp()
    with pytest.raises(ValueError, match=r"jdp.multi_steps\(found.best.tx, every=...\)"):
        plan(loss_fn, params, batch, jdp.multi_steps(TX, every=2))


def test_a_tx_whose_state_is_offloaded_already():
    params, batch = mlp()
    with pytest.raises(ValueError, match=r"tx with jdp.offload.*give the optimizer alone"):
        plan(loss_fn, params, batch, optax.chain(optax.clip(1.0), jdp.offload(TX, min_size=1)))


def test_a_tx_that_communicates_for_some_parameters():
    params, batch = mlp()
    parts = {"a": optax.chain(jdp.all_reduce(), TX), "b": optax.sgd(0.1)}
    with pytest.raises(ValueError, match=r"communicates already: it holds jdp.all_reduce"):
        plan(loss_fn, params, batch, optax.multi_transform(parts, [{"w": "a", "b": "b"}] * 3))


def test_params_of_16_bits_without_master_weights():
    params, batch = mlp()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    with pytest.raises(ValueError, match=r"dtype bfloat16.*jdp.master_weights"):
        plan(loss_fn, params, batch, TX)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (jnp.ones(()), "is a scalar; every leaf needs a leading dim"),
        ({}, "no arrays in it"),
        (jnp.ones((0, WIDTH)), "0 rows"),
        ({"x": jnp.ones((32, WIDTH)), "y": jnp.ones(5)}, r"32 and 5 rows"),
    ],
    ids=["scalar", "empty", "no rows", "ragged"],
)
def test_batches_that_are_none(batch, said):
    with pytest.raises(ValueError, match=said):
        planned(batch=batch)


@pytest.mark.parametrize("rows", [0, -8, 8.0, True, "8"])
def test_a_global_batch_that_is_no_number(rows):
    with pytest.raises(ValueError, match=r"global_batch=.*whole number of at least 1"):
        planned(global_batch=rows)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"microbatches": [3]}, ValueError, r"None of microbatches=\[3\] divides .* 4 on 8"),
        ({"microbatches": [0]}, ValueError, "holds 0; a microbatch is a whole number"),
        ({"microbatches": 4}, TypeError, r"give a sequence .*microbatches=\[1, 4\]"),
        ({"remats": []}, TypeError, r"give a sequence .*remats=\[False, True\]"),
        ({"remats": ["dots"]}, ValueError, "no rematerialisation policy"),
        ({"remats": [jax.checkpoint_policies.dots_saveable]}, TypeError, "names of policies"),
        ({"wires": "bfloat16"}, TypeError, "give a sequence"),
        ({"wires": ["fp8"]}, ValueError, "'fp8'; what jdp.plan can try is exact, bfloat16"),
        ({"key": 0}, TypeError, r"key=0, which is no random key"),
        ({"key": jax.random.key(0)}, TypeError, r"would call loss_fn\(params, batch, key\)"),
        ({"model_state": {}}, TypeError, r"batch, model_state=...\), but it takes"),
        ({"chip": "h100"}, ValueError, r"no figures of 'h100'.*CHIPS\['h100'\]"),
        ({"chip": CHIPS["h100"]._replace(flops={})}, ValueError, "those of 'bf16' and 'f32'"),
        ({"links": {"inner": 5}}, ValueError, "'inner' is 5. Give a jdp.hardware.Link"),
        ({"links": Link(0.0, 0.0, "")}, ValueError, "more than 0 bytes a second"),
    ],
)
def test_arguments_that_are_wrong(given, error, said):
    with pytest.raises(error, match=said):
        planned(**given)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda p, b: jnp.mean(b, axis=1) * p[0]["b"][0], r"has the shape \(32,\)"),
        (lambda p, b: jnp.int32(1), "dtype int32"),
        (lambda p, b: (loss_fn(p, b), {"rows": b}), r"metric \['rows'\] has the shape"),
        (lambda p, b: jnp.mean(jdp.all_gather(b, "model")), "names a mesh axis that jdp.plan has"),
        (None, "NoneType as loss_fn"),
    ],
    ids=["vector", "integer", "aux", "axis", "none"],
)
def test_losses_that_are_none(wrong, said):
    params, batch = mlp()
    with pytest.raises((ValueError, TypeError), match=said):
        plan(wrong, params, batch, TX, compile_best=0, probes=0)


def test_links_that_are_none():
    with pytest.raises(ValueError, match='"inner", "outer" and "host"'):
        planned(links={"ethernet": Link(1e9, 1e-6, "")})


# --- targets ---


@pytest.mark.aot
@pytest.mark.parametrize("name", ["v5e:2x4", "h100:2x4"])
def test_a_plan_for_devices_that_are_not_here(name, tmp_path):
    platform = "tpu" if name.startswith("v") else "gpu"
    if what := targets.missing(platform):
        pytest.skip(what)
    found = planned(target=name, compile_best=1, cache=tmp_path, global_batch=512)
    assert found.rows[0].source == "compiled"
    assert found.rows[0].step_us > 0
    assert found.best.devices == found.rows[0].strategy.devices
    assert importlib.util.find_spec("jdp") is not None


def test_held_pads_what_no_dim_divides():
    assert held([Array((1000, 3), 4)], 7) == 143 * 3 * 4
