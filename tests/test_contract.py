"""Contracts: each promise is kept by a step and broken by another, with a sentence."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jdp
from jdp.contract import Contract, ContractError
from jdp.report import explain

SHAPE = jax.ShapeDtypeStruct((256, 64), jnp.float32)
BATCH = jax.ShapeDtypeStruct((32, 256), jnp.float32)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def built(tx, **arguments):
    mesh = jdp.make_mesh()
    step = jdp.train_step(loss_fn, tx, mesh, **arguments)
    return step, jdp.init_state({"w": SHAPE}, tx, mesh)


@pytest.fixture(scope="module")
def plain():
    return explain(*built(optax.chain(jdp.all_reduce(), optax.sgd(0.1))), BATCH, cache=False)


@pytest.fixture(scope="module")
def in_loop():
    tx = jdp.zero2(optax.sgd(0.1), reduce="microbatch")
    return explain(*built(tx, microbatch=2), BATCH, cache=False)


def test_a_step_that_keeps_its_contract(plain):
    contract = Contract(
        counts={"all-reduce": 1},
        never=["all-gather"],
        dtypes=["float32"],
        most_bytes=2 * 7 / 8 * 256 * 64 * 4 + 64,
        most_times_floor=1.01,
        in_loops=False,
    )
    (one,) = contract.check(plain)
    assert one.kind == "all-reduce"


@pytest.mark.parametrize(
    ("promise", "sentence"),
    [
        (
            {"counts": {}},
            r"1 all-reduce\(s\) are sent, and the contract says exactly 0: all-reduce",
        ),
        ({"counts": {"all-reduce": 2}}, r"says exactly 2: all-reduce of 65.5 kB f32 \(all-reduce"),
        ({"at_most": {"all-reduce": 0}}, "says at most 0: .*from jdp.all_reduce"),
        ({"never": ["all-reduce"]}, "all-reduce of 65.5 kB f32 .*from jdp.all_reduce.* never"),
        ({"dtypes": ["bfloat16"]}, "jdp.all_reduce.* sends f32, and the contract allows bfloat16"),
        ({"most_bytes": 1000}, "sends 115 kB in a step, and the contract allows 1.00 kB. Most of"),
        (
            {"most_times_floor": 0.5},
            "sends 1 times the least possible, and the contract allows 0.5",
        ),
    ],
)
def test_a_broken_promise_names_the_operation(plain, promise, sentence):
    with pytest.raises(ContractError, match=sentence):
        Contract(**promise).check(plain)


def test_nothing_inside_loops(in_loop):
    with pytest.raises(ContractError, match="is inside a loop and runs 2 times, and the contract"):
        Contract(in_loops=False).check(in_loop)


def test_small_collectives_are_left_out(in_loop):
    everything = Contract(ignore_below=0).check(in_loop)
    assert len(everything) > len(Contract().check(in_loop))


@pytest.mark.parametrize(("hidden", "kept"), [(0.8, True), (0.95, False)])
def test_the_share_that_is_hidden(plain, hidden, kept):
    (one,) = plain.collectives
    timed = one._replace(us=100.0, exposed_us=10.0)
    report = plain._replace(
        collectives=(timed,), sent_us=100.0, exposed_us=10.0, target="h100:8", platform="gpu"
    )
    if kept:
        Contract(hidden=hidden).check(report)
        return
    sentence = "90% of the time of communication is hidden on h100:8, and .* 95%. Longest .* 10 of"
    with pytest.raises(ContractError, match=sentence):
        Contract(hidden=hidden).check(report)


def test_a_compiled_program_will_do():
    step, state = built(optax.chain(jdp.all_reduce(), optax.sgd(0.1)))
    compiled = step.lower(state, BATCH).compile()
    with pytest.raises(ContractError, match="never all-reduce"):
        Contract(never=["all-reduce"]).check(compiled, step.mesh)
    with pytest.raises(TypeError, match=r"got a Compiled without a mesh. Give what jdp.explain"):
        Contract().check(compiled)
    with pytest.raises(ValueError, match="asks for hidden, which a program alone does not tell"):
        Contract(hidden=0.5).check(compiled, step.mesh)


def test_a_share_hidden_needs_a_target(plain):
    with pytest.raises(
        ValueError, match=r"hidden=0.8, but no times are known on cpu. Give a report"
    ):
        Contract(hidden=0.8).check(plain)


@pytest.mark.parametrize(
    ("promise", "sentence"),
    [
        ({"never": ["allreduce"]}, "names the kind 'allreduce', which is no collective"),
        ({"dtypes": ["fp32"]}, "names the dtype 'fp32', which XLA does not send"),
        ({"hidden": 80}, "asks for hidden=80, but that is a share .* 0.8 for 80 %"),
    ],
)
def test_a_contract_that_could_never_be_broken_is_refused(promise, sentence):
    with pytest.raises(ValueError, match=sentence):
        Contract(**promise)
