"""The planner: memory as compiled, the right choice where it is plain, sentences, bad input."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp import targets
from jdp.hardware import CHIPS, Link
from jdp.memory import memory_of
from jdp.memory_model import predict
from jdp.planning import plan
from jdp.probe import FEW, few_of, guess, probe, with_stage
from jdp.sizes import Array, as_shapes, held, sizes_of, with_rows
from jdp.split_advice import Transformer, describe, memory_of_split, splits
from jdp.strategy import strategies

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


@pytest.mark.parametrize(
    ("stage", "microbatches"), [(0, 1), (0, 4), (1, 1), (1, 4), (2, 4), (3, 1), (3, 4)]
)
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


def test_a_guess_counts_products_and_what_is_kept():
    params, batch = mlp(layers=3)
    found = guess(loss_fn, params, batch, microbatch=32)
    # forward, gradient of weights, gradient of inputs but for the first layer
    assert found.flops == 2 * 32 * WIDTH**2 * (3 + 3 + 2)
    assert found.kept >= 3 * 32 * WIDTH * 4
    row = guess(loss_fn, params, batch, microbatch=1)
    assert row.kept < WIDTH**2 * 4  # parameters are not kept anew
    assert guess(loss_fn, params, batch, microbatch=32, remat=True).kept < found.kept


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


@pytest.mark.parametrize("way", range(12))
def test_a_strategy_plugs_into_the_builder(way):
    params, batch = mlp(width=16, layers=1)
    every = strategies(optax.sgd(0.1), rows=32, devices=8, nodes=2, microbatches=[2])
    chosen = [s for s in every if s.devices == 8 and s.remat in (False, True)]
    s = chosen[way * len(chosen) // 12]
    mesh = s.mesh()
    step = s.step(loss_fn, mesh)
    lowered = step.lower(jdp.init_state(as_shapes(params), s.tx, mesh), with_rows(batch, 32))
    assert lowered is not None
    assert dict(mesh.shape) == dict(zip(s.axis_names, s.shape, strict=True))


def test_the_code_of_a_strategy_makes_it():
    params, _ = mlp(width=16, layers=1)
    names = {"jdp": jdp, "optax": optax, "jnp": jnp, "optimizer": TX, "loss_fn": loss_fn}
    for s in strategies(TX, rows=16, devices=8, nodes=2, microbatches=[2], remats=[False]):
        made = dict(names)
        exec(s.code(), made)
        assert dict(made["mesh"].shape) == dict(s.mesh().shape)
        with jax.set_mesh(made["mesh"]):
            state, same = (jax.eval_shape(tx.init, params) for tx in (made["tx"], s.tx))
        assert jax.tree.structure(state) == jax.tree.structure(same)


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
    with jax.set_mesh(jdp.make_mesh()), pytest.raises(ValueError, match=r"it is a jdp.zero2"):
        plan(loss_fn, params, batch, jdp.zero2(TX))


def test_a_tx_that_is_none():
    params, batch = mlp()
    with pytest.raises(TypeError, match=r"given a str as tx.*optax.adamw"):
        plan(loss_fn, params, batch, "adam")


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
