"""What is worth it: findings against their thresholds, and predictions against the model."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.findings import Facts, find, show
from jdp.hardware import Link
from jdp.hlo import parse
from jdp.pays import Payoff, pays
from jdp.silent import sends, silence, silence_program

P = jax.sharding.PartitionSpec
WIDTH = 128
CALM = Facts(step=100, compute=85, communication=10, input=2, host=3)


def titles(facts, payoffs=()):
    return [finding.what for finding in find(facts, payoffs)]


def test_nothing_is_found_where_nothing_passes():
    assert find(CALM) == ()
    assert "Nothing passes its threshold" in show(())


@pytest.mark.parametrize(
    ("changes", "says", "argument"),
    [
        ({"compute": 75, "input": 12}, "input 12 % of the step", "prefetch=2"),
        ({"compute": 60, "communication": 35}, "communication 35 % of the step", "microbatch=..."),
        ({"compute": 65, "host": 23}, "devices used 75 % of the time", "jax.lax.scan(step"),
        ({"replica_ms": (10, 10, 10, 12)}, "replica 3 computes 12 ms", "jdp.balance("),
        ({"replica_ms": (10, 12)}, "replica 1 computes 12 ms a step, 20 %", "jdp.balance("),
        ({"recompiled": 2, "compile_ms": 7.0}, "2 programs were compiled", "jdp.feed(pad=True)"),
        (
            {"large": (("opt_state.mu['w']", 4 * 2**20),), "replicas": 8},
            "1 large leaves of optimizer state lie whole",
            "jdp.zero1(inner)",
        ),
        ({"half_is_faster": 2.0}, "matrix products are in float32", "jdp.compute_in(loss_fn"),
        ({"waits_on_others": (3, 25.0)}, "process 3 keeps the others waiting", "process 3"),
    ],
)
def test_each_threshold_has_a_finding_with_what_to_write(changes, says, argument):
    (finding,) = find(CALM._replace(**changes))
    assert says in finding.what
    assert argument in finding.change
    assert finding.what in show((finding,))
    assert "-> " in show((finding,))


@pytest.mark.parametrize(
    "changes",
    [
        {"compute": 78, "input": 10},
        {"compute": 65, "communication": 30},
        {"compute": 72, "communication": 8, "host": 18},
        {"replica_ms": (10, 10, 10, 11)},
        {"replica_ms": (10, 19), "shares_cores": True},
        {"communication": 60, "waiting": 40},
        {"large": (("opt_state.mu['w']", 4 * 2**20),), "replicas": 1},
        {"waits_on_others": (3, 9.0)},
        {"half_is_faster": 1.4},
    ],
)
def test_on_the_threshold_is_not_over_it(changes):
    assert find(CALM._replace(**changes)) == ()


def test_findings_are_ranked_by_their_gain():
    facts = Facts(step=100, compute=40, communication=0, input=25, host=35, recompiled=1)
    gains = [finding.gain_ms for finding in find(facts)]
    assert gains == [35, 25, 0]


def test_shares_are_dealt_where_the_microbatches_are_known():
    (finding,) = find(CALM._replace(replica_ms=(10, 10, 10, 20), microbatches=28))
    assert "here shares=[8, 8, 8, 4]" in finding.change
    # 7 microbatches each take 20 ms on the slow one; dealt out, 8 take 80/7 on the others
    assert finding.gain_ms == pytest.approx(20 - 80 / 7)


def test_communication_takes_the_best_that_pays_and_leaves_the_batch_alone():
    row = Payoff("accumulation", "multi_steps", True, 100, 40, 1, 1, 0, "")
    rows = [row, row._replace(what="bfloat16 wire", argument="bf16", then_ms=80)]
    (finding,) = find(CALM._replace(compute=50, communication=45), rows)
    assert (finding.change, finding.gain_ms) == ("bf16", 20)


def _step(tx, loss=None):
    mesh = jdp.make_mesh()

    def plain(params, x):
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)

    step = jdp.train_step(loss or plain, tx, mesh)
    params = {name: jnp.ones((WIDTH, WIDTH)) / WIDTH for name in "wv"}
    batch = jdp.replicate(np.ones((32, WIDTH), np.float32), mesh)
    return step, jdp.init_state(params, tx, mesh), batch


TRANSFORMS = {
    "all_reduce": lambda: optax.chain(jdp.all_reduce(), optax.adam(1e-3)),
    "int8": lambda: optax.chain(jdp.all_reduce(wire_dtype=jnp.int8), optax.adam(1e-3)),
    "zero1": lambda: jdp.zero1(optax.adam(1e-3)),
    "zero3": lambda: jdp.zero3(optax.adam(1e-3)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_silent_step_computes_the_same_and_sends_nothing(name):
    step, state, batch = _step(TRANSFORMS[name]())
    state, before = step(state, batch)
    silent = silence(step, state, batch)
    assert silent.replaced > 0
    assert silent.left == 0
    shapes = [x.shape for x in jax.tree.leaves(state)]
    copy = jax.tree.map(jnp.copy, state)
    out, _ = silent.run(copy, batch)
    assert [x.shape for x in jax.tree.leaves(out)] == shapes
    assert all(x.is_deleted() for x in jax.tree.leaves(copy.params))  # consumed, as by the step
    # the step itself still sends, and computes as if nothing had been silenced
    assert any(
        x.collective
        for part in parse(step.lower(state, batch).compile().as_text()).computations.values()
        for x in part.instructions
    )
    other, again, batch = _step(TRANSFORMS[name]())
    again, first = other(again, batch)
    assert float(first["loss"]) == float(before["loss"])
    (state, after), (again, second) = step(state, batch), other(again, batch)
    assert float(after["loss"]) == float(second["loss"])


def test_matrix_products_are_all_there_without_communication():
    step, state, batch = _step(TRANSFORMS["zero3"]())
    lowered = step.recipe.on(step.mesh).lower(state, batch)
    count = lambda: lowered.as_text().count("dot_general")  # noqa: E731
    before = count()
    silence_program(lowered)
    assert count() == before > 0


def test_each_collective_becomes_something_local_of_its_shape():
    mesh = jdp.make_mesh()

    def body(x):
        return (
            jax.lax.psum(x, "data"),
            jax.lax.all_gather(x, "data", tiled=True),
            jax.lax.psum_scatter(x, "data", tiled=True),
            jax.lax.all_to_all(x, "data", 0, 1, tiled=True),
            jax.lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)]),
        )

    specs = (P(), P("data"), P("data"), P("data"), P("data"))
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=specs))
    x = jnp.arange(8 * 16.0).reshape(64, 2)  # 8 rows of 2 on each device
    lowered = program.lower(jax.device_put(x, jax.NamedSharding(mesh, P("data"))))
    assert sends(lowered) == [
        ("all-reduce", 64),
        ("all-gather", 512),
        ("reduce-scatter", 64),
        ("all-to-all", 64),
        ("collective-permute", 64),
    ]
    silent = silence_program(lowered)
    assert (silent.replaced, silent.left) == (5, 0)
    outs = silent.run(jax.device_put(x, jax.NamedSharding(mesh, P("data"))))
    one = lambda y, device: np.asarray(y.addressable_shards[device].data)  # noqa: E731
    for device in (0, 5):
        mine = np.asarray(x)[8 * device : 8 * device + 8]
        total, gathered, scattered, exchanged, moved = (one(y, device) for y in outs)
        np.testing.assert_array_equal(total, mine)
        np.testing.assert_array_equal(gathered, np.tile(mine, (8, 1)))
        np.testing.assert_array_equal(scattered, mine[:1])
        np.testing.assert_array_equal(exchanged, np.tile(mine[:1], (1, 8)))
        np.testing.assert_array_equal(moved, mine)


def by_name(rows):
    return {row.what: row for row in rows}


def test_on_a_slow_link_sending_less_pays_and_the_figures_are_the_models():
    step, state, batch = _step(TRANSFORMS["all_reduce"]())
    slow = Link(1e6, 0.0, "made up")
    rows = by_name(pays(step, state, batch, links=slow, step_seconds=1.0, exposed_seconds=0.8))
    size = 2 * WIDTH * WIDTH * 4
    for name, share in (("bfloat16 wire", 0.5), ("int8 wire", 0.254)):
        row = rows[name]
        assert row.pays
        assert row.sent_then == pytest.approx(share * row.sent_now, rel=0.01)
        # what is left is exposed in proportion to the bytes, and encoding comes on top
        assert row.then_ms >= 1e3 * (0.2 + 0.8 * share) * 0.99
    assert rows["PowerSGD, rank 4"].sent_then < 0.1 * rows["PowerSGD, rank 4"].sent_now
    assert rows["accumulation"].then_ms == pytest.approx(1e3 * (0.2 + 0.8 / 4), rel=0.05)
    zero1 = rows["ZeRO 1"]
    assert zero1.sent_then == pytest.approx(2 * 7 / 8 * size)
    assert zero1.saves == pytest.approx(7 / 8 * 2 * size, rel=0.01)
    assert rows["ZeRO 3"].then_ms > zero1.then_ms  # gathered once more
    assert not rows["hierarchical"].pays


def test_nothing_that_sends_less_pays_where_nothing_is_exposed():
    step, state, batch = _step(TRANSFORMS["all_reduce"]())
    fast = Link(1e9, 1e-6, "made up")
    rows = by_name(pays(step, state, batch, links=fast, step_seconds=1.0, exposed_seconds=0.0))
    assert [row.what for row in rows.values() if row.pays] == []
    assert "no more than 0 ms are to be gained" in rows["int8 wire"].why


def test_encoding_that_costs_more_than_it_saves_is_a_no(monkeypatch):
    from jdp import pays as module

    monkeypatch.setattr(module, "_encoding", lambda *given: 0.5)
    step, state, batch = _step(TRANSFORMS["all_reduce"]())
    slow = Link(1e6, 0.0, "made up")
    rows = by_name(pays(step, state, batch, links=slow, step_seconds=1.0, exposed_seconds=0.4))
    assert not rows["int8 wire"].pays
    assert "encoding takes 5e+02 ms" in rows["int8 wire"].why


def test_a_stage_that_is_there_already_is_not_proposed():
    step, state, batch = _step(TRANSFORMS["zero1"]())
    link = Link(1e6, 0.0, "made up")
    rows = by_name(pays(step, state, batch, links=link, step_seconds=1.0, exposed_seconds=0.8))
    assert rows["ZeRO 1"].why == "the step has zero1 already"
    assert not rows["ZeRO 1"].pays
    assert rows["bfloat16 wire"].argument == "jdp.zero1(wire_dtype=jnp.bfloat16)"
    assert rows["PowerSGD, rank 4"].argument == "jdp.power_sgd(rank=4) before jdp.zero1"
    step, state, batch = _step(TRANSFORMS["zero3"]())
    rows = by_name(pays(step, state, batch, links=link, step_seconds=1.0, exposed_seconds=0.8))
    assert "zero3 reduces gradients itself" in rows["PowerSGD, rank 4"].why


def test_one_device_has_nothing_to_send():
    mesh, tx = jdp.make_mesh(num_devices=1), TRANSFORMS["all_reduce"]()
    step = jdp.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh)
    state = jdp.init_state({"w": jnp.ones((8, 8))}, tx, mesh)
    rows = pays(step, state, jnp.ones((4, 8)), step_seconds=0.1, exposed_seconds=0.0)
    assert not [row.what for row in rows if row.pays]
    assert "one device sends nothing" in {row.why for row in rows}


@pytest.mark.parametrize("given", [{}, {"step_seconds": 1.0}, {"exposed_seconds": 1.0}])
def test_times_that_are_missing_are_asked_for(given):
    step, state, batch = _step(TRANSFORMS["all_reduce"]())
    with pytest.raises(ValueError, match="needs both step_seconds and exposed_seconds"):
        pays(step, state, batch, **given)


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_target_is_predicted_from_its_own_compiler():
    step, state, batch = _step(TRANSFORMS["all_reduce"]())
    rows = by_name(pays(step, state, batch, target="v5e:2x4"))
    now = {row.now_ms for row in rows.values()}
    assert len(now) == 1
    assert 0 < now.pop() < 10
    assert rows["bfloat16 wire"].sent_then < rows["bfloat16 wire"].sent_now
