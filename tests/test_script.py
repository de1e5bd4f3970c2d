"""A script is run as far as its step, or followed through its steps, without a change to it."""

import sys
import textwrap

import jax
import numpy as np
import optax
import pytest

from jdp import script
from jdp.train import TrainStep

TRAINS = """
    import sys

    import jax.numpy as jnp
    import numpy as np
    import optax

    import jdp

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    tx = {tx}
    mesh = jdp.make_mesh()
    step = jdp.train_step(loss_fn, tx, mesh)
    state = jdp.init_state({params}, tx, mesh)
    losses = []
    if __name__ == "__main__":
        for number in range(int(sys.argv[1])):
            try:
                state, metrics = step(state, np.full((8, 4), 1.0 + number, np.float32))
            except Exception:
                print("swallowed")
            losses.append(float(metrics["loss"]))
        print("trained", losses)
"""


@pytest.fixture
def write(tmp_path):
    def write(
        text, tx="optax.chain(jdp.all_reduce(), optax.sgd(0.01))", params='{"w": jnp.ones(4)}'
    ):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text).replace("{tx}", tx).replace("{params}", params))
        return path

    return write


def test_the_script_stops_at_its_first_step_and_trains_nothing(write, capsys):
    real, search, argv = TrainStep.__call__, list(sys.path), list(sys.argv)
    job = script.first_step(write(TRAINS), ["3"])
    assert job.batch.shape == (8, 4)
    assert int(job.state.step) == 0
    assert not job.state.params["w"].is_deleted()
    assert capsys.readouterr().out == ""  # not even "swallowed": nothing of the script goes on
    assert (TrainStep.__call__, sys.path, sys.argv) == (real, search, argv)
    _, metrics = job.step(job.state, job.batch)  # what was found can be run
    assert float(metrics["loss"]) == 16.0


def test_lowering_is_a_step_too(write):
    text = TRAINS.replace("losses = []", "step.lower(state, np.ones((16, 4), np.float32))")
    assert script.first_step(write(text), ["0"]).batch.shape == (16, 4)


def test_shapes_only_makes_no_array(write):
    huge = 'lambda: {"w": jnp.ones((4, 2**40))}'  # 16 TiB
    job = script.first_step(write(TRAINS, params=huge), ["1"], shapes=True)
    leaf = job.state.params["w"]
    assert isinstance(leaf, jax.ShapeDtypeStruct)
    assert leaf.shape == (4, 2**40)


@pytest.mark.parametrize(
    ("tx", "removed"),
    [
        ("optax.chain(jdp.all_reduce(), optax.sgd(0.01))", ("all_reduce",)),
        ("jdp.zero3(optax.sgd(0.01))", ("zero3",)),
        ("optax.chain(jdp.power_sgd(2), jdp.zero1(optax.sgd(0.01)))", ("power_sgd", "zero1")),
        ("jdp.diloco(optax.sgd(0.01), optax.sgd(1.0), every=4)", ("diloco",)),
    ],
)
def test_plain_leaves_the_optimizer(write, tx, removed):
    job = script.first_step(write(TRAINS, tx=tx), ["1"], plain=True)
    assert job.removed == removed
    ours = job.step.recipe.tx
    grads = {"w": np.arange(4.0, dtype=np.float32)}
    updates, _ = ours.update(grads, ours.init(grads), grads)
    np.testing.assert_allclose(updates["w"], -0.01 * grads["w"])


def test_followed_the_script_trains_as_if_alone(write, capsys):
    path = write(TRAINS)

    def watch(step, state, batches):
        seen = []
        for batch in batches:
            state, metrics = step(state, batch)
            seen.append(float(metrics["loss"]))
        return seen

    seen = script.follow(path, ["4"], watch)
    mesh_loss, w = [], np.ones(4, np.float32)
    for number in range(4):  # the definition
        batch = np.full((8, 4), 1.0 + number, np.float32)
        mesh_loss.append(float(np.mean((batch @ w) ** 2)))
        w = w - 0.01 * 2 * np.mean((batch @ w)[:, None] * batch, axis=0)
    np.testing.assert_allclose(seen, mesh_loss, rtol=1e-5)
    assert f"trained {seen}" in capsys.readouterr().out


def test_followed_for_some_steps_the_script_is_stopped(write, capsys):
    def watch(step, state, batches):
        step(state, next(batches))
        return "enough"

    assert script.follow(write(TRAINS), ["1000000"], watch) == "enough"
    assert "trained" not in capsys.readouterr().out


def test_an_error_of_the_function_comes_through(write):
    def watch(step, state, batches):
        next(batches)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        script.follow(write(TRAINS), ["3"], watch)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"train\.py ended without calling a training step\. A script is expected"),
        ("raise RuntimeError('no data')", r"train\.py failed before .*RuntimeError: no data"),
        ("import sys; sys.exit(4)", r"train\.py exited with 4"),
    ],
)
@pytest.mark.parametrize("use", [script.first_step, lambda path: script.follow(path, [], print)])
def test_a_script_without_a_step_is_told_what_is_expected(write, text, message, use):
    with pytest.raises(script.ScriptError, match=message):
        use(write(text))


def test_a_script_that_is_not_there(tmp_path):
    with pytest.raises(script.ScriptError, match=r"There is no script .*nothing\.py"):
        script.first_step(tmp_path / "nothing.py")


def test_optax_is_what_the_plain_chain_is_made_of(write):
    job = script.first_step(
        write(TRAINS, tx="optax.chain(jdp.top_k(0.1), optax.adam(1e-3))"), ["1"], plain=True
    )
    assert isinstance(job.step.recipe.tx, optax.GradientTransformationExtraArgs)
