"""What a step sends and keeps, counted in the compiled program (D03, D04, goals 1 and 2)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest
import reference

import jdp

MESH = jdp.make_mesh()
MLP = reference.mlp()
SCALARS = 16  # loss, weights and the like: at most four float32 entries


def nbytes(params):
    return sum(p.size * p.dtype.itemsize for p in jax.tree.leaves(params))


# a transformer of two layers, its embedding used at both ends ----------------------------------

VOCABULARY, WIDTH, HEADS, LENGTH = 96, 32, 4, 12


def transformer_params():
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape) / shape[0] ** 0.5, jnp.float32)  # noqa: E731
    layer = lambda: {  # noqa: E731
        "qkv": normal(WIDTH, 3 * WIDTH),
        "out": normal(WIDTH, WIDTH),
        "up": normal(WIDTH, 4 * WIDTH),
        "down": normal(4 * WIDTH, WIDTH),
        "scale": jnp.ones(WIDTH),
    }
    return {"embedding": normal(VOCABULARY, WIDTH), "layers": [layer(), layer()]}


def block(x, layer):
    normed = x * layer["scale"] * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    heads = (normed @ layer["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
    q, k, v = jnp.moveaxis(heads, 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH / HEADS) ** 0.5
    scores = jnp.where(jnp.tri(x.shape[1]) > 0, scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
    x = x + mixed @ layer["out"]
    return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]


def transformer_loss(params, batch):
    x = params["embedding"][batch["tokens"][:, :-1]]
    for layer in params["layers"]:
        x = block(x, layer)
    logits = jax.nn.log_softmax(x @ params["embedding"].T)
    taken = jnp.take_along_axis(logits, batch["tokens"][:, 1:, None], -1)[..., 0]
    return jdp.Mean(-jnp.sum(taken * batch["mask"]), jnp.sum(batch["mask"]))


def transformer_batch(rows=64):
    random = np.random.default_rng(1)
    return {
        "tokens": random.integers(0, VOCABULARY, (rows, LENGTH + 1)).astype(np.int32),
        "mask": (random.random((rows, LENGTH)) < 0.7).astype(np.float32),
    }


MODELS = {
    "mlp": (MLP[0], MLP[2], jax.tree.map(np.asarray, MLP[3])),
    "transformer": (transformer_params(), transformer_loss, transformer_batch()),
}


@functools.cache
def program(model, microbatch=None, wire_dtype=None, every=1):
    params, loss, batch = MODELS[model]
    tx = optax.chain(jdp.all_reduce(wire_dtype=wire_dtype), optax.sgd(0.1))
    tx = jdp.multi_steps(tx, every) if every > 1 else tx
    step = jdp.train_step(loss, tx, MESH, microbatch=microbatch)
    return step.lower(jdp.init_state(params, tx, MESH), batch).compile()


def sent(*args, **keywords):
    return programs.collectives(program(*args, **keywords).as_text())


@pytest.mark.parametrize("microbatch", [None, 1, 8])
@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_is_sent_once(model, microbatch):
    """One all-reduce outside any loop, of the parameters' bytes and a few scalars.

    The tied embedding is in it once: gradients of both its uses are added on the device.
    """
    size = nbytes(MODELS[model][0])
    once = jdp.Contract(
        counts={"all-reduce": 1},  # D04: no rows travel
        dtypes=["float32"],
        in_loops=False,  # D03
        ignore_below=SCALARS + 1,
    )
    once.check(program(model, microbatch), MESH)
    found = sent(model, microbatch)
    assert not any(c.in_loop or c.in_branch for c in found)
    assert size <= sum(c.bytes for c in found) <= size + SCALARS


@pytest.mark.parametrize("model", MODELS)
def test_microbatches_send_what_one_batch_sends(model):
    """k = 1 and k = 8: the same operations of the same size."""
    once = [(c.kind, c.dtypes, c.bytes) for c in sent(model, None)]
    for microbatch in (1, 8):
        assert [(c.kind, c.dtypes, c.bytes) for c in sent(model, microbatch)] == once


@pytest.mark.parametrize("microbatch", [None, 1])
@pytest.mark.parametrize("model", MODELS)
def test_half_the_bytes_with_a_bfloat16_wire(model, microbatch):
    plain = programs.sent_bytes(sent(model, microbatch), 8)
    halved = jdp.Contract(
        counts={"all-gather": 1, "all-to-all": 1},
        dtypes=["uint16"],
        in_loops=False,
        # rounded up to a multiple of eight entries, and the scalars stay float32
        most_bytes=0.501 * plain + 2 * SCALARS + 2 * 2 * 8,
        ignore_below=SCALARS + 1,
    )
    halved.check(program(model, microbatch, jnp.bfloat16), MESH)


def test_live_bytes_do_not_grow_with_the_number_of_microbatches():
    """Goal 2: eight microbatches of 4 against one of 4; the batches themselves left out."""
    params = {"w1": jnp.zeros((256, 1024)), "w2": jnp.zeros((1024, 256))}
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["w1"]) @ p["w2"] - x) ** 2)  # noqa: E731
    tx = optax.chain(jdp.all_reduce(), optax.sgd(0.1))
    state = jdp.init_state(params, tx, MESH)

    def live(k):
        step = jdp.train_step(loss, tx, MESH, microbatch=4)
        rows = np.zeros((8 * 4 * k, 256), np.float32)
        compiled = step.lower(state, rows).compile()
        sent = sum(c.bytes for c in programs.collectives(compiled.as_text()))
        return programs.live_bytes(compiled) - rows.nbytes // 8, sent

    (one, sent_one), (eight, sent_eight) = live(1), live(8)
    assert eight <= 1.01 * one
    assert sent_eight == sent_one


def test_accumulation_over_calls_sends_the_gradient_in_its_last_call_only():
    found = sent("mlp", None, None, 4)
    assert sum(c.bytes for c in found if not c.in_branch) <= SCALARS
    assert sum(c.bytes for c in found if c.in_branch) == nbytes(MLP[0])
    assert {c.kind for c in found} == {"all-reduce"}


@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_alone_sends_scalars_only(model):
    params, loss, batch = MODELS[model]
    grad_fn = jdp.value_and_grad(loss, MESH, microbatch=1)
    compiled = grad_fn.lower(params, batch).compile()
    scalars = jdp.Contract(at_most={"all-reduce": 4}, in_loops=False, ignore_below=0)
    found = scalars.check(compiled, MESH)
    assert {c.kind for c in found} <= {"all-reduce"}
    assert sum(c.bytes for c in found) <= SCALARS


def test_the_transformer_learns_what_the_plain_loop_learns():
    """So that what is counted above is the right gradient."""
    params, loss, batch = MODELS["transformer"]
    tx = optax.chain(jdp.all_reduce(), optax.sgd(0.1))
    state = jdp.init_state(params, tx, MESH)
    compiled = program("transformer", 1)
    state, _ = compiled(state, batch, None)
    want, _ = reference.train(loss, params, optax.sgd(0.1), [batch])
    reference.assert_close(state.params, want, 2e-6)
