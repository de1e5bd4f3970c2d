"""What a transformation is made of is read as it was written."""

import jax.numpy as jnp
import optax
import pytest

import jdp
from jdp.chain import parts

pytestmark = pytest.mark.alternate

INNER = optax.adamw(1e-3)


@pytest.mark.parametrize(
    ("tx", "reduction"),
    [
        (optax.chain(jdp.all_reduce(), INNER), "jdp.all_reduce()"),
        (
            optax.chain(jdp.all_reduce(wire_dtype=jnp.bfloat16), INNER),
            "jdp.all_reduce(wire_dtype=jnp.bfloat16)",
        ),
        (
            jdp.all_reduce(wire_dtype=jnp.int8, error_feedback=True),
            "jdp.all_reduce(wire_dtype=jnp.int8)",
        ),
        (
            optax.chain(jdp.hierarchical(across_wire_dtype=jnp.bfloat16), INNER),
            "jdp.hierarchical(across_wire_dtype=jnp.bfloat16)",
        ),
        (jdp.multi_steps(optax.chain(jdp.all_reduce(), INNER), every=2), "jdp.all_reduce()"),
        (jdp.skip_nonfinite(optax.chain(jdp.all_reduce(), INNER)), "jdp.all_reduce()"),
        (optax.chain(optax.chain(jdp.top_k(0.1)), INNER), "jdp.top_k(...)"),
        (
            optax.chain(jdp.begin_with(jdp.all_reduce(), 9, jdp.power_sgd(4)), INNER),
            "jdp.begin_with(...)",
        ),
        (
            optax.chain(jdp.all_reduce_in_backward(), INNER),
            "jdp.all_reduce_in_backward(...)",
        ),
        (jdp.zero1(INNER), ""),
        (INNER, ""),
    ],
)
def test_the_reduction_is_found_where_it_is(tx, reduction):
    assert parts(tx).reduction == reduction


def test_stages_accumulation_and_local_steps_are_told():
    found = parts(jdp.multi_steps(jdp.zero2(INNER, reduce="step", wire_dtype="bfloat16"), every=3))
    assert (found.every, found.zero.number, found.zero.reduce) == (3, 2, "step")
    assert found.wire_dtype == jnp.bfloat16
    found = parts(optax.chain(jdp.power_sgd(rank=2), jdp.zero1(INNER)))
    assert (found.name, found.zero.number, found.compresses) == ("power_sgd", 1, True)
    begun = jdp.begin_with(jdp.all_reduce(wire_dtype=jnp.int8), 9, jdp.power_sgd(4))
    found = parts(optax.chain(begun, INNER))
    assert (found.compresses, found.reduces.update is begun.update) == (True, True)
    for make in (jdp.local_sgd, lambda inner, every: jdp.diloco(inner, INNER, every=every)):
        found = parts(make(INNER, every=5))
        assert (found.local in ("local_sgd", "diloco"), found.every) == (True, 5)


def test_the_reduction_found_is_the_users_own():
    reduces = jdp.all_reduce()
    assert parts(optax.chain(reduces, INNER)).reduces.update is reduces.update


@pytest.mark.parametrize("microbatch", [None, 4])
def test_the_microbatch_is_known(microbatch):
    step = jdp.train_step(
        lambda p, x: jnp.mean(x @ p), jdp.all_reduce(), jdp.make_mesh(), microbatch=microbatch
    )
    assert step.recipe.microbatch == microbatch
    assert step.recipe.on(step.mesh, microbatch=2).recipe.microbatch == 2
