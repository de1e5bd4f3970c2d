"""The step against the plain loop, and everything that must not happen around it."""

import functools
import re
import warnings

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest
import reference
from flax import nnx
from flax.training import train_state as flax_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp

PARAMS, LOSS, MASKED, BATCH = reference.mlp()
BATCH = jax.tree.map(np.asarray, BATCH)
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
CASES = [(1, "auto"), (2, "explicit"), (4, "auto"), (8, "auto"), (8, "explicit")]
REDUCE_SGD = optax.chain(jdp.all_reduce(), optax.sgd(0.5))
COMPILES = []


@jax.monitoring.register_event_duration_secs_listener
def _count(event, *_, **__):
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILES.append(event)


@functools.cache
def mesh_of(count=8, kind="auto"):
    return jdp.make_mesh(num_devices=count, axis_types=(KINDS[kind],))


def square(params, batch):
    """A loss whose gradient anybody can compute."""
    return jnp.mean((params["w"] - batch) ** 2) / 2


def tiny(tx=REDUCE_SGD, loss=square, mesh=None, w=0.0, key=None, **keywords):
    mesh = mesh or mesh_of()
    params = {"w": jnp.full((), w, jnp.float32)}
    return jdp.train_step(loss, tx, mesh, **keywords), jdp.init_state(params, tx, mesh, key=key)


VALUES = np.arange(16, dtype=np.float32)


# the arithmetic -----------------------------------------------------------------------------------

BATCHES = [jax.tree.map(lambda x, i=i: np.roll(x, 7 * i, 0) * (1 + i), BATCH) for i in range(5)]


@functools.cache
def plain_loop(optimizer):
    return reference.train(
        MASKED, PARAMS, {"sgd": optax.sgd(0.3), "adamw": optax.adamw(0.01)}[optimizer], BATCHES
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("count", "kind"), CASES)
def test_equals_the_plain_loop(count, kind, optimizer):
    inner = {"sgd": optax.sgd(0.3), "adamw": optax.adamw(0.01)}[optimizer]
    mesh = mesh_of(count, kind)
    tx = optax.chain(jdp.all_reduce(), inner)
    step = jdp.train_step(MASKED, tx, mesh, microbatch=4)
    state, losses = jdp.init_state(PARAMS, tx, mesh), []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    params, want = plain_loop(optimizer)
    # float32 sums in another order; adamw divides by their root, which magnifies it
    reference.assert_close(state.params, params, 2e-6 if optimizer == "sgd" else 2e-5)
    np.testing.assert_allclose(losses, want, rtol=2e-6)
    assert int(state.step) == 5
    reference.assert_same_copies((state, metrics))


@pytest.mark.parametrize("wrong", [8.0, 1 / 8, 1.01])
def test_a_wrong_scale_would_be_noticed(wrong):
    """A23: with SGD. Adam's update is the same for a gradient eight times too large."""
    want, _ = plain_loop("sgd")
    bad, _ = reference.train(
        MASKED, PARAMS, optax.chain(optax.scale(wrong), optax.sgd(0.3)), BATCHES
    )
    with pytest.raises(AssertionError, match="off by"):
        reference.assert_close(bad, want, 2e-6)


def test_one_step_by_hand():
    step, state = tiny()
    state, metrics = step(state, VALUES)
    assert float(state.params["w"]) == 3.75  # 0 + 0.5 * mean(0..15)
    assert float(metrics["loss"]) == np.mean(VALUES**2) / 2
    state, _ = step(state, VALUES)
    assert float(state.params["w"]) == 5.625


@pytest.mark.parametrize("microbatch", [1, 2, 8, None])
def test_microbatches_do_not_change_the_result(microbatch):
    step = jdp.train_step(LOSS, REDUCE_SGD, mesh_of(), microbatch=microbatch)
    state, metrics = step(jdp.init_state(PARAMS, REDUCE_SGD, mesh_of()), BATCH)
    want, losses = reference.train(LOSS, PARAMS, optax.sgd(0.5), [BATCH])
    reference.assert_close(state.params, want)
    np.testing.assert_allclose(float(metrics["loss"]), losses[0], rtol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_every_microbatch_of_every_step_has_its_own_key(count):
    """The same keys on any number of devices: fold_in(fold_in(key, step), j)."""
    key = jax.random.key(7)

    def loss(params, batch, key):
        return params["w"] * jax.random.normal(key)

    step, state = tiny(loss=loss, mesh=mesh_of(count), key=key, microbatch=2)
    moved = []
    for _ in range(2):
        before = float(state.params["w"])
        state, _ = step(state, VALUES)
        moved.append(before - float(state.params["w"]))
    fold = jax.random.fold_in
    want = [np.mean([jax.random.normal(fold(fold(key, s), j)) for j in range(8)]) for s in range(2)]
    np.testing.assert_allclose(moved, np.multiply(0.5, want), rtol=1e-5)
    assert jax.random.key_data(state.key).tolist() == jax.random.key_data(key).tolist()


def test_names_of_metrics():
    def dictionary(params, batch):
        return square(params, batch), {
            "top": batch.max(),
            "mean": jdp.Mean(batch.sum(), batch.size),
        }

    step, state = tiny(loss=dictionary)
    metrics = step(state, VALUES)[1]
    assert set(metrics) == {"loss", "top", "mean"}
    assert float(metrics["mean"]) == 7.5
    assert float(metrics["top"]) == np.mean([1, 3, 5, 7, 9, 11, 13, 15])  # a mean over replicas
    for metric in metrics.values():
        assert isinstance(metric, jax.Array)
        assert metric.sharding.is_fully_replicated
    step, state = tiny(
        loss=lambda params, batch: (square(params, batch), (batch.min(), batch.max()))
    )
    metrics = step(state, VALUES)[1]
    assert set(metrics) == {"loss", "aux"}
    assert float(metrics["aux"][0]) == 7.0
    step, state = tiny()
    assert set(step(state, VALUES)[1]) == {"loss"}


def test_a_metric_called_loss():
    step, state = tiny(loss=lambda params, batch: (square(params, batch), {"loss": batch.max()}))
    with pytest.raises(ValueError, match=r'metric called "loss".*another name'):
        step(state, VALUES)


def test_metrics_that_are_not_linear_come_from_means():
    """A27, huggingface/transformers#13681: RMSE of the whole batch, not the mean of RMSEs."""

    def loss(params, batch):
        return square(params, batch), {"squares": jdp.Mean(jnp.sum(batch**2), batch.size)}

    step, state = tiny(loss=loss, microbatch=1)
    rmse = float(step(state, VALUES)[1]["squares"]) ** 0.5
    np.testing.assert_allclose(rmse, np.sqrt(np.mean(VALUES**2)), rtol=1e-6)
    assert abs(rmse - np.abs(VALUES).mean()) > 1


@pytest.mark.parametrize("count", [1, 2, 8])
def test_ragged_batches_count_exactly(count):
    """A28, huggingface/transformers#608: 36 values 0..35; the mean is 17.5, zero-padded 15.75."""

    def loss(params, batch):
        losses = (params["w"] - batch["x"]) ** 2 / 2
        return jdp.Mean((batch["weight"] * losses).sum(), batch["weight"].sum())

    step, state = tiny(
        optax.chain(jdp.all_reduce(), optax.sgd(1.0)), loss, mesh_of(count), microbatch=5
    )
    batches = list(jdp.feed([{"x": np.arange(36, dtype=np.float32)}], mesh_of(count), microbatch=5))
    assert len(batches) == 1
    assert len(batches[0]["x"]) == 40
    state, metrics = step(state, batches[0])
    np.testing.assert_allclose(state.params["w"], 17.5, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], np.mean(np.arange(36) ** 2) / 2, rtol=1e-6)


# compiled once, in place, without waiting ---------------------------------------------------------


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(jdp.all_reduce(), optax.adamw(0.1)),
        optax.chain(jdp.all_reduce(), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)),
        optax.chain(jdp.all_reduce(), optax.apply_if_finite(optax.adam(0.1), 3)),
        jdp.multi_steps(optax.chain(jdp.all_reduce(), optax.adam(0.1)), 2),
    ],
    ids=["adamw", "inject", "apply_if_finite", "multi_steps"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_once(tx, kind):
    """D02, marin-community/marin#8911: the second step must find the state as the first did."""
    step, state = tiny(
        tx, mesh=mesh_of(8, kind), key=jax.random.key(0), loss=lambda p, b, k: square(p, b)
    )
    kinds = lambda tree: [(x.shape, x.dtype, x.aval.weak_type) for x in jax.tree.leaves(tree)]  # noqa: E731
    before = kinds(state)
    places = jax.tree.leaves(jax.tree.map(lambda x: x.sharding, state))
    state, _ = step(state, VALUES)
    COMPILES.clear()
    for _ in range(3):
        state, _ = step(state, VALUES)
    assert not COMPILES
    assert kinds(state) == before
    for place, leaf in zip(places, jax.tree.leaves(state), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)


@pytest.mark.parametrize(
    "w", [1.0, np.float32(1.0), jnp.asarray(1.0)], ids=["float", "numpy", "weak"]
)
def test_compiled_once_for_parameters_of_weak_type(w):
    step = jdp.train_step(square, REDUCE_SGD, mesh_of())
    state = jdp.init_state({"w": w}, REDUCE_SGD, mesh_of())
    state, _ = step(state, VALUES)
    COMPILES.clear()
    step(state, VALUES)
    assert not COMPILES


def test_compiled_once_in_an_epoch_with_a_ragged_end():
    """D01, pytorch/xla#855: 64, 64 and 56 rows."""

    def loss(params, batch):
        losses = (params["w"] - batch["x"]) ** 2
        return jdp.Mean((batch["weight"] * losses).sum(), batch["weight"].sum())

    step, state = tiny(loss=loss)
    loader = [{"x": np.ones(rows, np.float32)} for rows in (64, 64, 56)]
    for index, batch in enumerate(jdp.feed(loader, mesh_of())):
        state, _ = step(state, batch)
        if index == 0:
            COMPILES.clear()
    assert not COMPILES
    assert int(state.step) == 3


def test_changing_a_hyperparameter_compiles_nothing():
    """D06, google-deepmind/optax#353: what changes during a run is state, not a new optimizer."""
    tx = optax.chain(jdp.all_reduce(), optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    step, state = tiny(tx)
    state, _ = step(state, VALUES)
    assert float(state.params["w"]) == 0.5 * 7.5
    state.opt_state[1].hyperparams["learning_rate"] = jax.device_put(
        jnp.float32(0.25), state.step.sharding
    )
    COMPILES.clear()
    state, _ = step(state, VALUES)
    assert not COMPILES
    assert float(state.params["w"]) == 3.75 + 0.25 * (7.5 - 3.75)


def test_nothing_is_fetched_or_placed_anew_in_the_loop():
    """D07, allenai/OLMo#601: dispatching the next step reads nothing back."""
    step, state = tiny(key=jax.random.key(0), loss=lambda p, b, k: square(p, b))
    batches = list(jdp.feed([VALUES] * 4, mesh_of(), pad=False))
    state, _ = step(state, batches[0])
    with jax.transfer_guard("disallow"):
        for batch in batches[1:]:
            state, metrics = step(state, batch)
    assert float(metrics["loss"]) > 0


def bytes_on_a_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_state_is_reused_in_place(accumulate, kind):
    """C02, google/jax#15368. Warnings are errors here, the one about unused donation too."""
    tx = optax.chain(jdp.all_reduce(), optax.adamw(0.1))
    tx = jdp.multi_steps(tx, 2) if accumulate else tx
    mesh = mesh_of(8, kind)
    state = jdp.init_state(PARAMS, tx, mesh)
    for donate in (True, False):
        step = jdp.train_step(LOSS, tx, mesh, donate=donate)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled = step.lower(state, BATCH).compile()
        alias = compiled.memory_analysis().alias_size_in_bytes
        assert alias >= bytes_on_a_device(state) if donate else alias == 0


def test_a_state_can_be_used_once():
    """B08, google/jax#9635: a notebook cell that is run again."""
    step, state = tiny()
    new, _ = step(state, VALUES)
    with pytest.raises(
        ValueError, match=r"state\.step was consumed by an earlier call.*donate=False"
    ):
        step(state, VALUES)
    step(new, VALUES)
    step, state = tiny()
    new, _ = step(state, VALUES)
    with pytest.raises(ValueError, match="was consumed"):
        tiny()[0](state, VALUES)  # also by a step that was never called


def test_without_donation_old_states_stay():
    step, state = tiny(donate=False)
    first, _ = step(state, VALUES)
    again, _ = step(state, VALUES)
    assert float(first.params["w"]) == float(again.params["w"]) == 3.75
    assert float(state.params["w"]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_each_device_computes_its_part_only(kind):
    """D05: a replicated batch would be computed by everyone."""
    flops = {}
    for count in (1, 8):
        step = jdp.train_step(LOSS, REDUCE_SGD, mesh_of(count, kind))
        state = jdp.init_state(PARAMS, REDUCE_SGD, mesh_of(count, kind))
        rows = {k: np.concatenate([v] * 8) for k, v in BATCH.items()}
        flops[count] = step.lower(state, rows).compile().cost_analysis()["flops"]
    # the update itself, a few flops for each parameter, is done by everyone
    size = sum(p.size for p in PARAMS.values())
    assert flops[8] <= flops[1] / 8 + 8 * size
    assert flops[1] > 40 * size


@pytest.mark.parametrize("committed", ["replicated", "split", "host", "one row each way"])
def test_where_the_batch_comes_from_does_not_matter(committed):
    step, state = tiny()
    place = {"replicated": P(), "split": P("data")}
    if committed in place:
        batch = jax.device_put(VALUES, NamedSharding(mesh_of(), place[committed]))
    else:
        batch = VALUES if committed == "host" else jnp.asarray(VALUES)
    assert float(step(state, batch)[0].params["w"]) == 3.75


# misuse -------------------------------------------------------------------------------------------


def test_a_state_of_another_mesh():
    step, _ = tiny(mesh=mesh_of(4))
    _, state = tiny(mesh=mesh_of(8))
    with pytest.raises(ValueError, match=r"state\.step lies on 8 device\(s\), but.*mesh of 4"):
        step(state, VALUES)
    step, state4 = tiny(mesh=mesh_of(4))
    step(state4, VALUES)
    with pytest.raises(ValueError, match=r"lies on 8 device\(s\)"):
        step(state, VALUES)


def test_a_batch_of_another_device():
    step, state = tiny()
    batch = jax.device_put(VALUES, jax.devices()[3])
    with pytest.raises(ValueError, match=r"batch.*1 device\(s\).*jdp.feed"):
        step(state, batch)


def test_a_batch_that_does_not_divide():
    step, state = tiny()
    with pytest.raises(ValueError, match=r"batch of 15 does not divide over the 8 replicas"):
        step(state, VALUES[:15])
    assert float(step(state, VALUES)[0].params["w"]) == 3.75  # the state is still there


def test_forgetting_the_reduction():
    """A10: the step without its reduction is caught on step 1."""
    step, state = tiny(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"one gradient for each replica.*Put jdp.all_reduce\(\)"):
        step(state, VALUES)


def test_unknown_compiler_options_are_left_out():
    with pytest.warns(UserWarning, match="xla_no_such_option"):
        step, state = tiny(compiler_options={"xla_no_such_option": True})
    assert float(step(state, VALUES)[0].params["w"]) == 3.75


def test_a_key_given_or_left_out_later():
    """A second state of another structure is one more program, not an obscure error."""
    step = jdp.train_step(lambda p, b, k=None: square(p, b), REDUCE_SGD, mesh_of())
    for key in (None, jax.random.key(0)):
        state = jdp.init_state({"w": jnp.zeros(())}, REDUCE_SGD, mesh_of(), key=key)
        assert float(step(state, VALUES)[0].params["w"]) == 3.75


def test_non_finite_steps_are_skipped_by_all_or_by_none():
    """A20, microsoft/dion#79: an infinity in one replica's rows."""
    tx = optax.chain(jdp.all_reduce(), optax.apply_if_finite(optax.sgd(0.5), 5))
    step, state = tiny(tx, w=1.0)
    bad = VALUES.copy()
    bad[6] = np.inf
    state, _ = step(state, bad)
    for shard in state.params["w"].addressable_shards:
        assert float(shard.data) == 1.0
    assert int(state.opt_state[1].total_notfinite) == 1
    reference.assert_same_copies(state)
    state, _ = step(state, VALUES)
    assert float(state.params["w"]) == 1 + 0.5 * 6.5


def test_schedules_are_independent_of_devices_and_microbatches():
    """A21, huggingface/accelerate#1398: warm-up four times too short on four devices."""
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    loss = lambda params, batch: params["w"] * jnp.mean(batch)  # noqa: E731
    for count, microbatch in ((1, 1), (8, 2), (4, None)):
        step, state = tiny(
            optax.chain(jdp.all_reduce(), optax.sgd(schedule)),
            loss,
            mesh_of(count),
            microbatch=microbatch,
        )
        seen = [0.0]
        for _ in range(3):
            state, _ = step(state, np.ones(16, np.float32))
            seen.append(-float(state.params["w"]))
        np.testing.assert_allclose(np.diff(seen), [1.0, 0.9, 0.8], rtol=1e-5)


# what is on the wire ------------------------------------------------------------------------------


def mixed_precision(params, batch):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return LOSS(half, {k: v.astype(jnp.bfloat16) for k, v in batch.items()})


@pytest.mark.parametrize(
    ("wire", "dtype", "large"),
    [
        (None, jnp.float32, {"f32"}),
        (jnp.bfloat16, jnp.float32, {"ui16"}),
        (None, jnp.bfloat16, {"ui16"}),
    ],
)
def test_dtype_of_the_reduction(wire, dtype, large):
    """A17, google/jax#27496: as written, before any pass; a bf16 forward pass is not a bf16 sum."""
    tx = optax.chain(jdp.all_reduce(wire_dtype=wire), jdp.master_weights(optax.sgd(0.1)))
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    step = jdp.train_step(mixed_precision, tx, mesh_of())
    text = step.lower(jdp.init_state(params, tx, mesh_of()), BATCH).as_text()
    sent = re.findall(r"tensor<([0-9x]*)x(f32|bf16|ui16|f64)>", _collective_lines(text))
    elements = {t for dims, t in sent if np.prod([int(d) for d in dims.split("x")]) > 8}
    assert elements == large
    assert "bf16" not in {t for _, t in programs.lowered_collectives(text)}


def _collective_lines(text):
    """The types of the collectives in StableHLO: of an all-reduce it follows its region."""
    found = []
    pattern = r'"stablehlo\.(?:all_reduce|all_to_all|all_gather)".*?(?:\}\) |\}> ): (\([^\n]*)'
    for match in re.finditer(pattern, text, re.DOTALL):
        found.append(match.group(1))
    return "\n".join(found)


def test_lower_from_shapes():
    """Nothing is allocated and nothing runs."""
    everywhere = NamedSharding(mesh_of(), P())
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)  # noqa: E731
    tx = optax.chain(jdp.all_reduce(), optax.adamw(0.1))
    state = jax.tree.map(struct, jdp.init_state(PARAMS, tx, mesh_of()))
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh_of(), P("data")))
        for name, x in BATCH.items()
    }
    step = jdp.train_step(LOSS, tx, mesh_of())
    compiled = step.lower(state, batch).compile()
    real = jdp.init_state(PARAMS, tx, mesh_of())
    assert compiled.as_text() == step.lower(real, batch).compile().as_text()


# the beginning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["function", "lambda", "partial", "jit", "method"])
def test_parameters_from_a_function(how):
    class Model:
        def make(self):
            return {"w": jax.random.normal(jax.random.key(0), (4, 3))}

    def make(scale=1.0):
        return jax.tree.map(lambda x: scale * x, Model().make())

    made = {
        "function": make,
        "lambda": lambda: make(),
        "partial": functools.partial(make, scale=1.0),
        "jit": jax.jit(make),
        "method": Model().make,
    }[how]
    state = jdp.init_state(made, REDUCE_SGD, mesh_of())
    np.testing.assert_allclose(state.params["w"], Model().make()["w"], rtol=1e-6)
    assert state.params["w"].sharding.is_equivalent_to(NamedSharding(mesh_of(), P()), 2)
    reference.assert_same_copies(state)


@pytest.mark.parametrize("where", ["numpy", "jax", "mesh"])
def test_the_callers_arrays_stay_valid(where):
    w = np.ones((4, 3), np.float32)
    w = {
        "numpy": lambda: w,
        "jax": lambda: jnp.asarray(w),
        "mesh": lambda: jdp.replicate(w, mesh_of()),
    }[where]()
    key, model_state = jax.random.key(0), {"seen": jnp.zeros(())}

    def loss(params, batch, key, *, model_state):
        return jnp.mean(params["w"]) * jnp.mean(batch), None, {"seen": model_state["seen"] + 1}

    step = jdp.train_step(loss, REDUCE_SGD, mesh_of())
    state = jdp.init_state({"w": w}, REDUCE_SGD, mesh_of(), key=key, model_state=model_state)
    for _ in range(2):
        state, _ = step(state, np.ones(8, np.float32))
    np.testing.assert_array_equal(w, np.ones((4, 3)))
    assert float(model_state["seen"]) == 0
    assert float(state.model_state["seen"]) == 2
    jax.random.normal(key)
    jdp.init_state({"w": w}, REDUCE_SGD, mesh_of(), key=key, model_state=model_state)


def test_the_callers_numpy_arrays_may_change_afterwards():
    """Large enough that the copy is still under way when `init_state` returns."""
    buffer = np.zeros(2**20 + 16, np.float32)
    w = buffer[-buffer.ctypes.data // 4 % 16 :][: 2**20]
    state = jdp.init_state({"w": w}, REDUCE_SGD, mesh_of())
    w[:] = 7
    assert {float(np.max(s.data)) for s in state.params["w"].addressable_shards} == {0.0}


def test_tied_leaves_and_averages_of_parameters_are_copies_of_their_own():
    """One buffer twice in the state could not be donated."""
    w = jdp.replicate(jnp.ones(3), mesh_of())
    ema = optax.GradientTransformation(
        init=lambda params: params, update=lambda updates, state, params: (updates, params)
    )
    tx = optax.chain(jdp.all_reduce(), ema, optax.sgd(0.5))
    loss = lambda params, batch: jnp.sum(params["a"] * params["b"]) * jnp.mean(batch)  # noqa: E731
    step = jdp.train_step(loss, tx, mesh_of())
    state = jdp.init_state({"a": w, "b": w}, tx, mesh_of())
    pointers = [x.unsafe_buffer_pointer() for x in _on_device_0((state, w))]
    assert len(set(pointers)) == len(pointers)
    for _ in range(2):
        state, _ = step(state, np.ones(8, np.float32))
    np.testing.assert_array_equal(state.params["a"], np.full(3, 0.25))
    np.testing.assert_array_equal(w, np.ones(3))


def _on_device_0(tree):
    return [x.addressable_shards[0].data for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"w": np.ones(3, np.int32)}, r"parameter \['w'\] has the dtype int32"),
        ({"a": np.ones(3), "b": {"c": np.ones(3, bool)}}, r"\['b'\]\['c'\] has the dtype bool"),
        ({"w": np.ones(3, np.complex64)}, r"dtype complex64.*split complex"),
        ({"w": np.ones(3), "act": jax.nn.relu}, r"\['act'\]"),
        ({"w": np.ones(3), "name": "mlp"}, r"\['name'\]"),
        ({"w": jax.random.key(0)}, r"\['w'\]"),
    ],
    ids=["int", "bool", "complex", "function", "string", "key"],
)
def test_what_cannot_be_a_parameter(params, match):
    with pytest.raises(TypeError, match=match):
        jdp.init_state(params, REDUCE_SGD, mesh_of())


def test_broadcast_of_one_process_is_nothing():
    for broadcast in (False, True):
        state = jdp.init_state({"w": np.ones(3)}, REDUCE_SGD, mesh_of(), broadcast=broadcast)
        np.testing.assert_array_equal(state.params["w"], np.ones(3))


def test_optimizer_state_shares_the_placement_of_its_parameter():
    mesh = jdp.make_mesh(("data", "model"), (4, 2))
    columns = NamedSharding(mesh, P(None, "model"))
    params = jdp.replicate(PARAMS, mesh)
    params["w1"] = jax.device_put(params["w1"], columns)
    tx = optax.chain(jdp.all_reduce(), optax.adam(0.1))
    state = jdp.init_state(params, tx, mesh)
    assert state.params["w1"].sharding.is_equivalent_to(columns, 2)
    assert state.opt_state[1][0].mu["w1"].sharding.is_equivalent_to(columns, 2)
    step = jdp.train_step(LOSS, tx, mesh)
    new, _ = step(state, BATCH)
    want, _ = reference.train(LOSS, PARAMS, optax.adam(0.1), [BATCH])
    reference.assert_close(new.params, want, 2e-5)
    assert new.opt_state[1][0].nu["w1"].sharding.is_equivalent_to(columns, 2)


def test_a_placement_of_ones_own_is_kept():
    """The state lies where it lay, whatever the compiler would prefer."""
    tx = optax.chain(jdp.all_reduce(), optax.adam(0.1))
    state = jdp.init_state(PARAMS, tx, mesh_of())
    split = NamedSharding(mesh_of(), P("data"))
    adam = state.opt_state[1][0]
    mine = adam._replace(mu={**adam.mu, "w1": jax.device_put(adam.mu["w1"], split)})
    state = state._replace(opt_state=(state.opt_state[0], (mine, *state.opt_state[1][1:])))
    step = jdp.train_step(LOSS, tx, mesh_of())
    for _ in range(2):
        state, _ = step(state, BATCH)
        assert state.opt_state[1][0].mu["w1"].sharding.is_equivalent_to(split, 2)
        assert state.opt_state[1][0].nu["w1"].sharding.is_fully_replicated
    want, _ = reference.train(LOSS, PARAMS, optax.adam(0.1), [BATCH] * 2)
    reference.assert_close(state.params, want, 2e-5)


# other people's pytrees ---------------------------------------------------------------------------


def trained(loss, params):
    """Parameters after two steps on eight devices, and those of the plain loop."""
    step = jdp.train_step(loss, REDUCE_SGD, mesh_of())
    state = jdp.init_state(params, REDUCE_SGD, mesh_of())
    for _ in range(2):
        state, _ = step(state, BATCH)
    return state.params, reference.train(loss, params, optax.sgd(0.5), [BATCH] * 2)[0]


def test_equinox_model():
    model = equinox.nn.MLP(16, 8, 24, 1, key=jax.random.key(0))
    params, static = equinox.partition(model, equinox.is_inexact_array)

    def loss(params, batch):
        return jnp.mean((jax.vmap(equinox.combine(params, static))(batch["x"]) - batch["y"]) ** 2)

    got, want = trained(loss, params)
    reference.assert_close(got, want)
    assert isinstance(got, equinox.nn.MLP)


def test_nnx_model():
    graph, params = nnx.split(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))

    def loss(params, batch):
        return jnp.mean((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2)

    got, want = trained(loss, params)
    reference.assert_close(got, want)
    assert isinstance(got, nnx.State)


def test_flax_train_state_in_a_step_of_ones_own():
    """Two changed lines: where the gradient comes from, and the first link of the chain."""
    state = flax_state.TrainState.create(apply_fn=None, params=PARAMS, tx=REDUCE_SGD)
    grad_fn = jdp.value_and_grad(LOSS, mesh_of())

    @jax.jit
    def step(state, batch):
        loss, grads = grad_fn(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    for _ in range(2):
        state, _ = step(state, BATCH)
    reference.assert_close(
        state.params, reference.train(LOSS, PARAMS, optax.sgd(0.5), [BATCH] * 2)[0]
    )
