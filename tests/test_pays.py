"""What is worth it: findings against their thresholds, and predictions against the model."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.asked import sends
from jdp.findings import Facts, find, show
from jdp.hardware import Link
from jdp.hlo import parse
from jdp.payoff import Change, predicted
from jdp.payoff import show as show_payoffs
from jdp.payoff_facts import Facts as PredictionFacts
from jdp.pays import Payoff, pays
from jdp.sent import Sent
from jdp.silent import silence, silence_program

pytestmark = pytest.mark.alternate

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
        ({"compute": 60, "communication": 35}, "communication 35 % of the step", "A larger batch"),
        ({"compute": 65, "host": 23}, "devices used 75 % of the time", "jax.lax.scan(step"),
        ({"replica_ms": (10, 10, 10, 12)}, "replica 3 computes 12 ms", "jdp.balance("),
        ({"replica_ms": (10, 12)}, "replica 1 computes 12 ms a step, 20 %", "jdp.balance("),
        ({"recompiled": 2, "compile_ms": 7.0}, "2 programs were compiled", "jdp.feed(pad=True)"),
        (
            {"large": (("opt_state.mu['w']", 4 * 2**20),), "replicas": 8},
            "4.19 MB of optimizer state lie whole on each of 8 replicas, in large leaves such as",
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
    text = " ".join(show((finding,)).split())
    assert finding.what in text
    assert f"-> {finding.change}" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"compute": 78, "input": 10},
        {"compute": 65, "communication": 30},
        {"compute": 72, "communication": 8, "host": 18},
        {"replica_ms": (10, 10, 10, 11)},
        {"replica_ms": (10, 190), "shares_cores": True},
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
    busy = CALM._replace(compute=50, communication=45)
    (finding,) = find(busy, [FEWER, BFLOAT])
    assert (finding.change, finding.gain_ms) == ("bf16 in place of f32", 20)
    (finding,) = find(busy, [FEWER, BFLOAT._replace(pays=None)])
    assert finding.change == "multi_steps in place of tx, if fewer updates will do"


def test_communication_of_which_nothing_can_be_told_claims_no_gain():
    busy = CALM._replace(compute=50, communication=45, microbatch=4)
    (finding,) = find(busy, [FEWER._replace(pays=False), BFLOAT._replace(pays=None)])
    assert finding.gain_ms == 0
    assert "cannot be told whether bf16 pays" in finding.change
    assert "microbatch=8 (now 4)" in finding.change
    (finding,) = find(busy, [FEWER._replace(pays=False), BFLOAT._replace(pays=False)])
    assert "Nothing that jdp has" in finding.change


FEWER = Payoff("accumulation", "multi_steps", "tx", True, 100, 40, 0, 1, 1, 0, "")
BFLOAT = FEWER._replace(what="bfloat16 wire", argument="bf16", instead="f32", then_ms=80)
SENT = Sent(
    *("reduce-scatter.1", "reduce-scatter", ("f32",), 2**20, 1e6, ("data",), 8, 4, True, False),
    *(False, (), None, None, "", "jdp.value_and_grad", 1.0),
)


def test_what_zero_sends_for_each_microbatch_is_not_taken_for_the_losss():
    rows = (SENT, SENT, SENT._replace(bytes=4))
    calm = CALM._replace(collectives=rows, stage=2, microbatch=8)
    assert find(calm) == ()  # as intended, where communication is no burden
    busy = find(calm._replace(compute=50, communication=45))
    (finding,) = (one for one in busy if "for each microbatch" in one.what)
    assert finding.what == "jdp.zero2 sends 2.10 MB for each microbatch, 4 times a step"
    assert "microbatch=16 in place of 8" in finding.change
    assert 'jdp.zero2(inner, reduce="step")' in finding.change
    assert not [one for one in busy if "in a loop" in one.what]


def test_collectives_of_one_line_in_a_loop_are_one_finding():
    rows = [SENT._replace(source="model.py:3"), SENT._replace(source="model.py:3")]
    (finding,) = find(CALM._replace(collectives=(*rows,)))
    assert finding.what.startswith("2 reduce-scatters of 2.10 MB in a loop, 4 times a step")


@pytest.mark.parametrize(
    ("reduction", "says"),
    [
        ("jdp.all_reduce()", "jdp.zero1(inner) in place of optax.chain(jdp.all_reduce(), inner)"),
        (
            "jdp.all_reduce(wire_dtype=jnp.bfloat16)",
            "jdp.zero1(inner, wire_dtype=jnp.bfloat16) in place of optax.chain(jdp.all_reduce(",
        ),
        ("jdp.power_sgd(...)", "optax.chain(jdp.power_sgd(...), jdp.zero1(inner))"),
        ("", "jdp.zero1(inner) in place of what averages"),
    ],
)
def test_zero_is_written_with_what_the_step_has(reduction, says):
    large = {"large": (("opt_state.mu['w']", 4 * 2**20),), "replicas": 8}
    (finding,) = find(CALM._replace(reduction=reduction, **large))
    assert says in finding.change


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


def _facts(**changes):
    facts = PredictionFacts(
        *(8, 1, 1.0, 0.5, 0.5, 1e6, 0.0, 10**6, 10**6, 10**6, 0, lambda *_: 0.0, 0.0)
    )
    return facts._replace(**changes)


@pytest.mark.parametrize(
    ("facts", "change", "pays"),
    [
        ({}, Change(0.031), True),
        ({}, Change(0.029), False),
        ({}, Change(-0.2), False),
        ({"off": 0.5}, Change(0.07), True),  # 0.035 at least
        ({"off": 0.5}, Change(0.05), None),  # 0.025 to 0.075
        ({"off": 0.5}, Change(0.019), False),  # 0.0285 at most
        ({"doubt": 0.5}, Change(0.06, added=0.04), None),
        ({"doubt": 0.5}, Change(0.07), True),  # nothing of it is timed
        ({"doubt": 0.5}, Change(work=0.05), None),
        ({"idle": 0.21}, Change(0.5), None),
        ({"idle": 0.19}, Change(0.5), True),
    ],
)
def test_a_forecast_that_may_be_off_by_more_than_it_gains_is_none(facts, change, pays):
    row = predicted(_facts(**facts), "x", ("argument", ""), change, 1e6)
    assert row.pays is pays
    assert row.why.startswith("cannot tell") is (pays is None)
    text = show_payoffs((row,))
    assert (" ms a step;" in text) is (pays is not None)
    assert {True: "yes", None: "?", False: "no"}[pays] == text.split("\n")[1].split()[0]


@pytest.fixture
def untimed(monkeypatch):
    """Nothing is compiled to be timed: for what does not depend on times."""
    monkeypatch.setattr("jdp.payoff_facts._update_seconds", lambda *a, **b: (1e-6, 0.0))
    monkeypatch.setattr("jdp.pays.silent_seconds", lambda *given: 0.0)


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


def test_nothing_that_sends_less_pays_where_nothing_is_exposed(untimed):
    step, state, batch = _step(TRANSFORMS["all_reduce"]())
    fast = Link(1e9, 1e-6, "made up")
    rows = by_name(pays(step, state, batch, links=fast, step_seconds=1.0, exposed_seconds=0.0))
    assert [row.what for row in rows.values() if row.pays] == []
    assert "no more than 0 ms are to be gained" in rows["int8 wire"].why


def test_encoding_that_costs_more_than_it_saves_is_a_no(untimed, monkeypatch):
    from jdp import pays as module

    monkeypatch.setattr(module, "_encoding", lambda *given: 5.0)
    step, state, batch = _step(TRANSFORMS["all_reduce"]())
    slow = Link(1e6, 0.0, "made up")
    rows = by_name(pays(step, state, batch, links=slow, step_seconds=1.0, exposed_seconds=0.4))
    assert not rows["int8 wire"].pays
    assert "encoding takes 5000 ms" in rows["int8 wire"].why


def test_a_stage_that_is_there_already_is_not_proposed(untimed):
    step, state, batch = _step(TRANSFORMS["zero1"]())
    link = Link(1e6, 0.0, "made up")
    rows = by_name(pays(step, state, batch, links=link, step_seconds=1.0, exposed_seconds=0.8))
    assert rows["ZeRO 1"].why == "the step has zero1 already"
    assert not rows["ZeRO 1"].pays
    assert rows["bfloat16 wire"][1:3] == (
        "jdp.zero1(inner, wire_dtype=jnp.bfloat16)",
        "jdp.zero1(inner)",
    )
    chained = "optax.chain(jdp.power_sgd(rank=4), jdp.zero1(inner))"
    assert rows["PowerSGD, rank 4"].argument == chained
    step, state, batch = _step(TRANSFORMS["zero3"]())
    rows = by_name(pays(step, state, batch, links=link, step_seconds=1.0, exposed_seconds=0.8))
    assert rows["accumulation"].pays is None
    assert "what summing up takes was not timed" in rows["accumulation"].why
    assert "zero3 reduces gradients itself" in rows["PowerSGD, rank 4"].why


def _rows(tx, **changes):
    step, state, batch = _step(tx)
    link = Link(1e6, 0.0, "made up")
    given = {"links": link, "step_seconds": 1.0, "exposed_seconds": 0.8} | changes
    return by_name(pays(step, state, batch, **given))


def test_what_the_step_has_already_is_not_proposed_again(untimed):
    inner = optax.sgd(0.1)
    rows = _rows(jdp.zero1(inner, wire_dtype=jnp.bfloat16))
    assert rows["bfloat16 wire"].why == "the step sends 16 bits already"
    assert rows["bfloat16 wire"].pays is False
    assert rows["int8 wire"].instead == "jdp.zero1(inner, wire_dtype=jnp.bfloat16)"
    assert rows["ZeRO 2"].argument == "jdp.zero2(inner, wire_dtype=jnp.bfloat16)"
    rows = _rows(optax.chain(jdp.power_sgd(rank=2), inner))
    for what in ("bfloat16 wire", "int8 wire", "PowerSGD, rank 4"):
        assert rows[what].why == "the step has jdp.power_sgd(...) already"
    assert rows["ZeRO 1"].argument == "optax.chain(jdp.power_sgd(...), jdp.zero1(inner))"
    assert "reduces gradients itself" in rows["ZeRO 2"].why
    # a residual belongs to its replica: ZeRO cannot share it out
    assert rows["ZeRO 1"].saves < WIDTH * WIDTH
    assert {row.pays for row in rows.values()} == {True, False}  # accumulating does


def test_accumulating_that_costs_more_than_it_spares_does_not_pay(untimed, monkeypatch):
    def seconds(tx, state, mesh, *, calls=1, own=True):
        return (0.2, 0.0) if own else (0.9, 0.0)  # for each batch

    monkeypatch.setattr("jdp.payoff_facts._update_seconds", seconds)
    row = _rows(TRANSFORMS["all_reduce"](), exposed_seconds=0.1)["accumulation"]
    assert row.pays is False
    assert row.then_ms == pytest.approx(1e3 * (1 - 0.075 - 0.2 + 0.9))
    assert "summing up and updating take 900 ms, where updating takes 200 ms" in row.why
    # an update alone cannot take longer than the step: something else was running
    monkeypatch.setattr("jdp.payoff_facts._update_seconds", lambda *a, **b: (7.0, 5.0))
    row = _rows(TRANSFORMS["all_reduce"](), exposed_seconds=0.1)["accumulation"]
    assert row.pays is None or row.pays is False
    assert row.then_ms > 0


def test_accumulating_and_local_steps_are_carried_further(untimed):
    rows = _rows(jdp.multi_steps(optax.chain(jdp.all_reduce(), optax.sgd(0.1)), every=4))
    assert rows["accumulation"][1:3] == ("jdp.multi_steps(inner, every=8)", "every=4")
    size = 2 * WIDTH * WIDTH * 4
    assert rows["bfloat16 wire"].sent_now == pytest.approx(2 * 7 / 8 * size / 4, rel=0.01)
    assert rows["ZeRO 1"].saves < size  # gradients that are summed up are each replica's own
    rows = _rows(jdp.local_sgd(optax.sgd(0.1), every=3))
    assert [*rows] == ["fewer rounds"]
    assert rows["fewer rounds"].argument == "jdp.local_sgd(..., every=6)"


@pytest.mark.parametrize("wrong", [3.0, {"data": 1.0}, "fast"])
def test_links_that_are_none_are_refused(untimed, wrong):
    with pytest.raises(TypeError, match=r"Give that, one jdp\.hardware\.Link"):
        _rows(TRANSFORMS["all_reduce"](), links=wrong)


def test_links_of_another_mesh_are_refused(untimed):
    with pytest.raises(ValueError, match=r"the replicas also lie along \['data'\]"):
        _rows(TRANSFORMS["all_reduce"](), links={"node": Link(1e9, 0.0, "")})


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
