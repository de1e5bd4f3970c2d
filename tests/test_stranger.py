"""What users do that nobody planned for: each was once wrong, or a message that did not help."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import assert_close, gradient, mean_gradient, mlp

import jdp

pytestmark = pytest.mark.alternate

PARAMS, LOSS, MASKED, BATCH = mlp()
SGD = optax.chain(jdp.all_reduce(), optax.sgd(1.0))


@pytest.fixture(scope="module")
def mesh():
    return jdp.make_mesh()


def errors(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2, axis=-1)


def gathered_count(params, batch):
    count = jdp.all_gather(batch["mask"], "data").sum()
    return jnp.sum(errors(params, batch) * batch["mask"]) / count


def count_of_sums(params, batch):
    count = jax.lax.psum(batch["mask"], "data").sum()
    return jnp.sum(errors(params, batch) * batch["mask"]) / count


def hard_examples(params, batch):
    loss = errors(params, batch)
    hard = jax.lax.stop_gradient(loss > 1.0).astype(jnp.float32)
    return jnp.sum(loss * hard) / jax.lax.psum(hard.sum(), "data")


def reciprocal(params, batch):
    share = 1.0 / jax.lax.psum(batch["mask"].sum(), "data")
    return jnp.sum(errors(params, batch) * batch["mask"] * share)


def as_product(params, batch):
    weight = batch["mask"] / jax.lax.psum(batch["mask"].sum(), "data")
    return jnp.dot(errors(params, batch), weight)


def kept_dims(params, batch):
    mask = batch["mask"]
    total = (errors(params, batch) * mask).sum(keepdims=True)
    return (total / jax.lax.psum(mask.sum(keepdims=True), "data")).sum()


def guarded(params, batch):
    count = jax.lax.psum(batch["mask"].sum(), "data")
    sums = ((errors(params, batch) * batch["mask"]).sum(), count)
    return jax.lax.cond(count > 0, lambda s: s[0] / s[1], lambda s: s[0] * 0, sums)


BY_A_COUNT = [gathered_count, count_of_sums, hard_examples, reciprocal]


@pytest.mark.parametrize("loss", [*BY_A_COUNT, as_product, kept_dims, guarded])
def test_a03_a_plain_loss_divided_by_a_global_count_is_refused(mesh, loss):
    with pytest.raises(ValueError, match=r"such as a count.*Return jdp.Mean\(total, weight\)"):
        jdp.value_and_grad(loss, mesh)(PARAMS, BATCH)


def masked_statistics(params, batch, total=lambda x: jax.lax.psum(x, "data")):
    hidden, mask = batch["x"] @ params["w1"], batch["mask"][:, None]
    count = total(mask.sum())
    mean = total((hidden * mask).sum(0)) / count
    deviation = jnp.sqrt(total((mask * (hidden - mean) ** 2).sum(0)) / count + 1e-3)
    return jnp.mean(((hidden - mean) / deviation) ** 4)


def balanced_experts(params, batch, total=lambda x: jax.lax.psum(x, "data")):
    scores = jax.nn.softmax(batch["x"] @ params["w1"])
    counts = total(jax.nn.one_hot(scores.argmax(-1), 24).sum(0))
    return jnp.sum(counts / counts.sum() * scores.mean(0))


def baseline(params, batch, mean=lambda x: jax.lax.pmean(x, "data")):
    gain = batch["x"][:, 0]
    spread = jnp.sqrt(mean(((gain - mean(gain.mean())) ** 2).mean()))
    return jnp.mean(errors(params, batch) * (gain - mean(gain.mean())) / spread)


@pytest.mark.parametrize("loss", [masked_statistics, balanced_experts, baseline])
def test_exchanged_statistics_are_no_count(mesh, loss):
    """Right as they are, so refusing them would be a false alarm."""
    value, grads = jdp.value_and_grad(loss, mesh)(PARAMS, BATCH)
    want = gradient(lambda p, b: loss(p, b, lambda x: x), PARAMS, BATCH)
    assert_close((value, mean_gradient(grads)), want, rtol=3e-5)


def test_a_step_inside_a_trace_leaves_others_alone(mesh):
    step = jdp.train_step(LOSS, SGD, mesh, donate=False)
    state = jdp.init_state(PARAMS, SGD, mesh)
    ahead = jax.jit(lambda batch: step(state, batch)[1]["loss"])(BATCH)  # a concrete state
    for _ in range(12):
        state, metrics = step(state, BATCH)
    assert np.isfinite(ahead)
    assert np.isfinite(metrics["loss"])
    slope = jax.grad(lambda x: step(state, BATCH | {"x": x})[1]["loss"])(BATCH["x"])
    want = jax.grad(lambda x: LOSS(jax.device_get(state.params), BATCH | {"x": x}))(BATCH["x"])
    assert_close(slope, want, rtol=2e-6)


def test_shapes_beside_a_real_key_and_model_state(mesh):
    shapes = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
    given = {"key": jax.random.key(0), "model_state": {"m": jnp.zeros(3)}}
    abstract = jdp.init_state(shapes, SGD, mesh, **given)
    real = jdp.init_state({"w": jnp.zeros(3)}, SGD, mesh, **given)
    kind = lambda x: (x.shape, x.dtype, x.sharding.is_fully_replicated)  # noqa: E731
    assert jax.tree.map(kind, abstract) == jax.tree.map(kind, real)


def test_statistics_of_the_input_are_no_count(mesh):
    def normalised(params, batch):
        mean = jax.lax.pmean(batch["x"].mean(0), "data")
        deviation = jnp.sqrt(jax.lax.pmean(((batch["x"] - mean) ** 2).mean(0), "data"))
        return errors(params, batch | {"x": (batch["x"] - mean) / deviation}).mean()

    x = np.asarray(BATCH["x"])
    batch = BATCH | {"x": (x - x.mean(0)) / x.std(0)}
    _, grads = jdp.value_and_grad(normalised, mesh)(PARAMS, BATCH)
    assert_close(mean_gradient(grads), gradient(LOSS, PARAMS, batch)[1], rtol=2e-6)


def test_a_step_can_be_scanned_and_traced(mesh):
    step = jdp.train_step(LOSS, SGD, mesh, donate=False)
    state = jdp.init_state(PARAMS, SGD, mesh)
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x - 1]), BATCH)
    last, metrics = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(state, stacked)
    losses = []
    for i in range(3):
        state, one = step(state, jax.tree.map(lambda x, i=i: x[i], stacked))
        losses.append(one["loss"])
    assert_close(last.params, state.params)
    assert_close(metrics["loss"], np.asarray(losses))
    shapes = jax.eval_shape(step, state, BATCH)
    assert jax.tree.structure(shapes[0]) == jax.tree.structure(state)


def test_the_order_is_checked_inside_a_scan_too(mesh):
    tx = optax.chain(optax.clip(1.0), SGD)
    step, state = jdp.train_step(LOSS, tx, mesh), jdp.init_state(PARAMS, tx, mesh)
    with pytest.raises(ValueError, match="before they are reduced"):
        jax.jit(lambda s, b: step(s, b))(state, BATCH)


def test_a13_a_norm_taken_before_the_reduction_is_refused(mesh):
    inner = optax.with_extra_args_support(SGD)

    def update(updates, state, params=None, **extra):
        norm = optax.tree.norm(updates)
        updates, state = inner.update(updates, state, params, **extra)
        return jax.tree.map(lambda u: u / jnp.maximum(1, norm), updates), state

    tx = optax.GradientTransformationExtraArgs(inner.init, update)
    with pytest.raises(ValueError, match="before they are reduced"):
        jdp.train_step(LOSS, tx, mesh)(jdp.init_state(PARAMS, tx, mesh), BATCH)


def test_a_gradient_that_is_zero_passes_the_check(mesh):
    def attention(params, x):  # the bias of the keys shifts all scores alike
        scores = jnp.einsum("bqd,bkd->bqk", x @ params["q"], x @ params["k"] + params["bias"])
        return jnp.mean((jax.nn.softmax(scores) @ x - 1) ** 2)

    keys = jax.random.split(jax.random.key(0), 3)
    params = {"q": jax.random.normal(keys[0], (4, 4)), "k": jax.random.normal(keys[1], (4, 4))}
    x = jax.random.normal(keys[2], (16, 6, 4))
    params["bias"] = jnp.ones(4)
    assert jdp.check_against_one_device(attention, params, x, mesh, microbatch=1) < 1e-4


def test_low_precision_gradients_of_large_totals_do_not_overflow(mesh):
    """The total of a microbatch may be large where its mean is not."""
    params = {"w": jnp.ones(4, jnp.float16)}
    batch = {"x": np.full((16, 4), 30.0, np.float16), "tokens": np.full(16, 4096.0, np.float32)}

    def loss(params, batch):
        losses = (batch["x"] @ params["w"]).astype(jnp.float32) / 100
        return jdp.Mean.of(losses, batch["tokens"])

    value, grads = jdp.value_and_grad(loss, mesh, microbatch=1)(params, batch)
    assert float(value) == pytest.approx(1.2, rel=1e-3)
    np.testing.assert_allclose(mean_gradient(grads)["w"], 0.3, rtol=2e-3)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_shares_may_be_a_list(kind):
    mesh = jdp.make_mesh(axis_types=kind)
    step = jdp.train_step(LOSS, SGD, mesh, microbatch=2)
    state, _ = step(jdp.init_state(PARAMS, SGD, mesh), BATCH, shares=[4] * 8)
    want = gradient(LOSS, PARAMS, BATCH)[1]
    assert_close(jax.tree.map(jnp.subtract, PARAMS, state.params), want, rtol=2e-6)


def test_shares_that_the_step_forgets_do_not_pass_for_data(mesh):
    loader = [{name: np.asarray(x)[:32] for name, x in BATCH.items()}]
    shares = [1, 3, 2, 2, 2, 2, 3, 1]
    batch = next(iter(jdp.feed(loader, mesh, microbatch=2, shares=shares, pad=False)))
    run = jdp.value_and_grad(LOSS, mesh, microbatch=2)
    assert np.isnan(run(PARAMS, batch)[0])
    loss, grads = run(PARAMS, batch, shares=shares)
    want = gradient(LOSS, PARAMS, jax.tree.map(lambda x: x[:32], BATCH))
    assert_close((loss, mean_gradient(grads)), want, rtol=2e-6)


def test_a_saved_state_is_placed_as_a_new_one(mesh):
    tx = jdp.multi_steps(SGD, every=3)
    step = jdp.train_step(LOSS, tx, mesh, donate=False)
    state, _ = step(jdp.init_state(PARAMS, tx, mesh), BATCH)
    saved = jax.tree.map(np.asarray, state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    for like in (PARAMS, shapes):
        places = jax.tree.map(lambda x: x.sharding, jdp.init_state(like, tx, mesh))
        restored = jax.device_put(saved, places)
        gathered = restored.opt_state.accumulated["w1"].value
        assert gathered.addressable_shards[0].data.shape == (1, 16, 24)
        assert_close(step(restored, BATCH)[0], step(state, BATCH)[0])


def test_a_state_of_another_order_of_devices_is_refused(mesh):
    other = jdp.make_mesh(devices=jax.devices()[::-1])
    state = jdp.init_state(PARAMS, SGD, other)
    with pytest.raises(ValueError, match="same devices in another order"):
        jdp.train_step(LOSS, SGD, mesh)(state, BATCH)


def test_parameters_in_the_place_of_a_state(mesh):
    with pytest.raises(TypeError, match="given a dict where its state belongs"):
        jdp.train_step(LOSS, SGD, mesh)(PARAMS, BATCH)


def test_a_key_that_the_loss_does_not_take(mesh):
    state = jdp.init_state(PARAMS, SGD, mesh, key=jax.random.key(0))
    with pytest.raises(
        TypeError, match=r"called as loss_fn\(params, batch, key\).*if there is one"
    ):
        jdp.train_step(LOSS, SGD, mesh)(state, BATCH)


def test_a_number_is_no_key(mesh):
    with pytest.raises(TypeError, match=r"Use jax.random.key\(0\)"):
        jdp.init_state(PARAMS, SGD, mesh, key=0)


def test_no_parameters_at_all(mesh):
    tx = jdp.multi_steps(SGD, every=1)
    step = jdp.train_step(lambda p, b: b.mean() + 0 * jax.lax.axis_index("data"), tx, mesh)
    state, metrics = step(jdp.init_state({}, tx, mesh), np.arange(8.0, dtype=np.float32))
    assert float(metrics["loss"]) == 3.5
    assert state.params == {}


def test_the_loss_is_handed_to_those_that_ask_for_it(mesh):
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
    tx = optax.chain(jdp.all_reduce(), optax.sgd(0.0), plateau)
    step, state = jdp.train_step(LOSS, tx, mesh), jdp.init_state(PARAMS, tx, mesh)
    for _ in range(4):
        state, _ = step(state, BATCH)
    assert float(state.opt_state[2].scale) < 1


def test_a_value_of_each_replica_is_no_number(mesh):
    _, grads = jdp.value_and_grad(LOSS, mesh)(PARAMS, BATCH)
    for use in (bool, abs, len, lambda g: g > 0, lambda g: g // 2, np.asarray, jnp.sum):
        with pytest.raises(TypeError, match=r"jdp.PerReplica.*Put jdp.all_reduce\(\)"):
            use(grads["w1"])
