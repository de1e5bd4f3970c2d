"""What `jdp.explain` tells of a step, here and on hardware that is not here."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp import options, targets
from jdp.asked import as_asked
from jdp.compiling import CHEAP, asked_and_limit
from jdp.flops import flops
from jdp.report import Report, explain
from jdp.sent import Sent

WIDTH, LAYERS, ROWS = 256, 3, 64
TARGETS = {"tpu": "v5e:4x4", "gpu": "h100:2x4"}


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def loss_fn(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return jnp.mean((x @ params["out"]) ** 2)


def built(tx, params=None, mesh=None, **arguments):
    mesh = mesh or jdp.make_mesh()
    params = params or {"layers": shape(LAYERS, WIDTH, WIDTH), "out": shape(WIDTH, WIDTH)}
    return jdp.train_step(loss_fn, tx, mesh, **arguments), jdp.init_state(params, tx, mesh)


PLAIN = optax.chain(jdp.all_reduce(), optax.sgd(0.1))


def explained(tx, target=None, **arguments):
    return explain(*built(tx, **arguments), shape(ROWS, WIDTH), target, cache=False)


@pytest.fixture(scope="module")
def plain():
    return explained(PLAIN)


def test_a_step_on_the_devices_at_hand(plain):
    large = [x for x in plain.collectives if x.bytes > 1024]
    size = 4 * (LAYERS + 1) * WIDTH**2
    assert sum(x.bytes for x in large) == pytest.approx(size, abs=16)
    assert {x.axes for x in large} == {("data",)}
    assert plain.floor.least == 2 * 7 / 8 * size
    assert plain.floor.ratio == pytest.approx(1, abs=1e-3)
    # forward, and both products of the backward pass but that with the batch's gradient
    assert plain.flops == 2 * ROWS // 8 * WIDTH**2 * (3 * (LAYERS + 1))
    assert plain.memory.parameters == size
    assert (plain.fits, plain.step_us, plain.mfu) == (None, None, None)
    assert "Each device sends 1.84 MB a step. No times" in str(plain)


def test_a_report_is_the_same_after_json(plain):
    assert Report.from_json(plain.to_json()) == plain
    with pytest.raises(ValueError, match="not the JSON of a report of this version of jdp"):
        Report.from_json('{"target": ""}')


def test_two_axes_are_told_apart():
    mesh = jdp.make_mesh(("node", "device"), (2, 4))
    tx = optax.chain(jdp.hierarchical(), optax.sgd(0.1))
    found = explained(tx, mesh=mesh)
    axes = {x.axes: x.group for x in found.collectives if x.bytes > 1024}
    assert axes == {("node",): 2, ("device",): 4}


def test_reports_are_kept_and_found_again(tmp_path):
    step, state = built(PLAIN)
    said = []
    first = explain(step, state, shape(ROWS, WIDTH), cache=tmp_path, progress=said.append)
    again = explain(step, state, shape(ROWS, WIDTH), cache=tmp_path)
    assert (first.cached, again.cached) == (False, True)
    assert again._replace(cached=False) == first
    assert said[1] == "compiling for cpu, which may take a minute"
    assert not explain(step, state, shape(2 * ROWS, WIDTH), cache=tmp_path).cached
    for file in tmp_path.iterdir():
        file.write_text("{")  # a broken file is none
    assert not explain(step, state, shape(ROWS, WIDTH), cache=tmp_path).cached


def test_flops_are_those_of_the_traced_program():
    def layers(x, ws):
        y, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, ws)
        return jax.lax.cond(y[0, 0] > 0, lambda y: y @ ws[0], lambda y: y, y)

    traced = jax.make_jaxpr(layers)(jnp.ones((4, 8)), jnp.ones((5, 8, 8)))
    assert flops(traced, 1) == 2 * 4 * 8 * 8 * 6
    image, kernel = jnp.ones((1, 3, 16, 16)), jnp.ones((6, 3, 5, 5))
    traced = jax.make_jaxpr(lambda x, k: jax.lax.conv(x, k, (1, 1), "VALID"))(image, kernel)
    assert flops(traced, 1) == 2 * (6 * 12 * 12) * (3 * 5 * 5)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("h300:8", "There is no target 'h300:8'. Chips .*: .*h100:2x8"),
        ("", "There is no target ''"),
        ("h100", "The target 'h100' has no arrangement .* hosts x GPUs of a host.* 'h100:2x8'"),
        ("h100:2x2x2", "The target 'h100:2x2x2' has no arrangement"),
        (
            "v5e:16",
            "The target 'v5e:16' has no arrangement .* sides of its grid, such as 'v5e:4x4'",
        ),
        ("v5e:4x0", "has no arrangement"),
        ("v5e:four", "has no arrangement"),
    ],
)
def test_a_target_that_does_not_exist(name, sentence):
    with pytest.raises(ValueError, match=sentence):
        targets.target(name)


@pytest.mark.parametrize(("name", "extra"), [("v5e:4x4", "tpu"), ("h100:8", "gpu")])
def test_a_missing_compiler_names_the_extra(name, extra, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sentence = rf"To compile for {name}, .* is not installed \(pip install 'jdp-train\[{extra}\]'\)"
    with pytest.raises(ImportError, match=sentence):
        targets.target(name)


def test_what_is_no_step_or_no_state():
    step, state = built(PLAIN)
    with pytest.raises(TypeError, match="got a function as its step"):
        explain(lambda state, batch: None, state, shape(ROWS, WIDTH))
    with pytest.raises(TypeError, match="got a dict as its state"):
        explain(step, {}, shape(ROWS, WIDTH))


def test_the_compilers_account_of_missing_memory():
    assert asked_and_limit("(53.5G) exceeds available HBM (15.75G).") == (
        int(53.5 * 2**30),
        int(15.75 * 2**30),
    )
    assert asked_and_limit("another reason") == (None, None)


def there(platform):
    if what := targets.missing(platform):
        pytest.skip(what)
    return TARGETS[platform]


@pytest.mark.aot
@pytest.mark.parametrize("platform", TARGETS)
def test_a_step_on_a_target(platform, monkeypatch):
    target = there(platform)
    found = explained(jdp.zero1(optax.adam(1e-3)), target, microbatch=2)
    assert (found.target, found.platform, found.fits) == (target, platform, True)
    assert found.devices == {"tpu": 16, "gpu": 8}[platform]
    assert found.step_us == pytest.approx(found.compute_us + found.exposed_us)
    assert 0 < found.mfu < 1
    assert 0 <= found.hidden <= 1
    assert found.floor.ratio == pytest.approx(1, abs=0.05) or platform == "tpu"
    assert all(x.axes == ("data",) and x.us > 0 for x in found.collectives)
    # libtpu reduces to every device what was asked for in parts: twice the bytes
    floors = {x.kind: round(x.floor, 3) for x in found.collectives if x.bytes > 1000}
    reduced = {"tpu": {"all-reduce": 2.0}, "gpu": {"reduce-scatter": 1.0}}[platform]
    assert floors == {"all-gather": 1.0} | reduced
    in_time = found.compute_us * 1e-6 * targets.target(target).chip.memory_bytes_per_s
    assert 0 < found.bytes_moved < 1.5 * in_time  # copies have no times of their own
    assert found.verdict.split(":")[0] in ("Communication-bound", "Compute-bound", "Memory-bound")
    assert {span.lane for span in found.spans} == {"compute", "communication"}
    assert found.memory.total < found.memory_limit
    assert Report.from_json(found.to_json()) == found


@pytest.mark.aot
def test_a_batch_that_does_not_divide_there(monkeypatch):
    target = there("gpu").replace("2x4", "3x8")
    with pytest.raises(ValueError, match=r"has 64 rows.* 24 replicas of h100:3x8.*\(72, 256\)"):
        explained(PLAIN, target)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("width", "rows", "state_fits"), [(60_000, 32, False), (WIDTH, 16 * 2**23, True)]
)
def test_a_model_that_is_too_large_is_an_answer(width, rows, state_fits):
    target = there("tpu")
    params = {"layers": shape(LAYERS, width, width), "out": shape(width, 8)}
    step, state = built(optax.chain(jdp.all_reduce(), optax.adam(1e-3)), params)
    found = explain(step, state, shape(rows, width), target, cache=False)
    assert found.fits is False
    assert found.memory.total > found.memory_limit
    assert "It does not fit: a device of v5e:4x4 would need" in found.verdict
    # a state that fits lies on the target, and the step was compiled for it
    assert (found.compile_s is not None) == state_fits
    elsewhere = "Who holds what is shown for the mesh that the state was made for."
    assert found.notes == (() if state_fits else (elsewhere,))
    assert Report.from_json(found.to_json()) == found


@pytest.mark.aot
def test_an_option_that_the_compiler_refuses_is_a_note(monkeypatch):
    monkeypatch.setitem(CHEAP, "tpu", {"xla_no_such_option": True})
    found = explained(PLAIN, there("tpu"))
    assert any("does not know xla_no_such_option" in note for note in found.notes)


@pytest.mark.aot
def test_a_chip_whose_times_the_compiler_cannot_model(monkeypatch):
    there("gpu")
    monkeypatch.setattr(options, "_known", {})  # it is the first chip that is asked about
    found = explained(PLAIN, "a100:8")
    assert any("no model of times for this chip" in note for note in found.notes)
    assert any("those of a roofline" in note for note in found.notes)
    assert 0 < found.compute_us <= found.step_us
    assert found.mfu > 0
    assert found.fits
    assert found.floor.ratio == pytest.approx(1, abs=0.01)


@pytest.mark.aot
def test_meshes_of_targets():
    if what := targets.missing("gpu"):
        pytest.skip(what)
    target = targets.target("h100:2x4")
    devices = np.array(jax.devices())
    nodes = jdp.make_mesh(("node", "device"), (4, 2), devices=devices)
    assert dict(targets.mesh_for(target, nodes).shape) == {"node": 2, "device": 4}
    model = jdp.make_mesh(("data", "model"), (4, 2), devices=devices)
    assert dict(targets.mesh_for(target, model).shape) == {"data": 4, "model": 2}
    three = jdp.make_mesh(("data", "model"), (1, 3), devices=devices[:3])
    with pytest.raises(ValueError, match=r"h100:2x4 has 8 devices, which the mesh axes .* not div"):
        targets.mesh_for(target, three)


def sent(kind, size):
    rest: dict[str, Any] = dict.fromkeys(Sent._fields, 0)
    rest |= {"kind": kind, "bytes": size, "floor": 3.0}
    return Sent(**rest)


@pytest.mark.parametrize(
    ("size", "asked", "floor"),
    [
        (4096, [("reduce-scatter", 4096)], 6.0),
        (4096, [("all-reduce", 4096)], 3.0),
        (4096, [("reduce-scatter", 4096), ("all-reduce", 4096)], 3.0),  # either one
        (4104, [("reduce-scatter", 1024), ("reduce-scatter", 3072), ("all-reduce", 8)], 6.0),
        (5000, [("reduce-scatter", 4000), ("all-reduce", 1000)], 5.0),  # joined
        (8, [("reduce-scatter", 4000), ("all-reduce", 8)], 3.0),
        (9000, [("reduce-scatter", 4000), ("all-reduce", 8)], 3.0),  # of something else
        (64, [], 3.0),
    ],
)
def test_an_all_reduce_where_a_reduce_scatter_was_asked_for(size, asked, floor):
    found, other = as_asked((sent("all-reduce", size), sent("all-gather", size)), asked)
    assert found.floor == pytest.approx(floor, rel=0.01)
    assert other.floor == 3.0
