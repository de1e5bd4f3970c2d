"""A run that goes on with fewer or more devices and processes is the run that was not moved.

With dropout, a schedule and a ragged end of each epoch; through checkpoints, to another ZeRO stage
each time. Losses are told by every step; SGD shows a wrong scale of gradients in the parameters,
which Adam would hide.
"""

import functools

import cluster
import jax
import numpy as np
import optax
import pytest
import reference
from reference import mlp

import jdp

pytestmark = pytest.mark.alternate

STEPS = 9
RATE = optax.warmup_cosine_decay_schedule(0.01, 0.1, 3, STEPS)
OPTIMIZERS = {"adam": optax.adamw(RATE), "sgd": optax.sgd(RATE, momentum=0.9)}
STAGES = {
    "zero1": functools.partial(jdp.zero1, min_size=0),
    "zero3": functools.partial(jdp.zero3, min_size=0),
}


def loss_fn(params, batch, key):
    hidden = jax.numpy.tanh(batch["x"] @ params["w1"] + params["b1"])
    hidden *= 2.0 * jax.random.bernoulli(key, 0.5, hidden.shape)
    return jdp.Mean.of(((hidden @ params["w2"] - batch["y"]) ** 2).mean(-1), batch["weight"])


@functools.cache
def prepared(optimizer, stage, devices):
    """A mesh of so many devices, a step, and a state to start from."""
    mesh, tx = jdp.make_mesh(num_devices=devices), STAGES[stage](OPTIMIZERS[optimizer])
    state = jdp.init_state(mlp()[0], tx, mesh, key=jax.random.key(5))
    return mesh, jdp.train_step(loss_fn, tx, mesh, microbatch=2, donate=False), state


def go_on(folder, optimizer, stage, devices, until):
    """Trains up to a step, from the last checkpoint on; saves there. Returns the losses."""
    mesh, step, state = prepared(optimizer, stage, devices)
    rows = {name: np.asarray(x)[:61] for name, x in mlp()[3].items() if name in ("x", "y")}
    batches = jdp.Batches(jdp.Columns(rows), mesh, batch=16, seed=3, microbatch=2)
    losses = []
    with jdp.Checkpoints(folder) as checkpoints:
        if checkpoints.latest() is not None:
            state, position = checkpoints.restore(state)
            batches.restore(position)
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            if int(state.step) == until:
                break
        assert checkpoints.save(state, data=batches)
    return losses


def saved_params(folder):
    shapes = jax.eval_shape(lambda: mlp()[0])
    return jdp.Checkpoints(folder).restore({"params": shapes}, parts=("params",))[0]["params"]


@pytest.mark.parametrize(
    ("optimizer", "here", "there"),
    [
        ("adam", "zero1", "zero3"),
        ("sgd", "zero3", "zero1"),
    ],
)
def test_e13_e12_e01_on_8_then_4_then_8_devices(tmp_path, optimizer, here, there):
    """E13 pytorch/torchft#186, horovod/horovod#1955: the batch is the user's, not the devices'."""
    whole = go_on(tmp_path / "whole", optimizer, here, 8, STEPS)
    moved = [
        *go_on(tmp_path / "moved", optimizer, here, 8, 3),
        *go_on(tmp_path / "moved", optimizer, there, 4, 6),
        *go_on(tmp_path / "moved", optimizer, here, 8, STEPS),
    ]
    np.testing.assert_allclose(moved, whole, rtol=1e-6)
    if optimizer == "sgd":
        params = [saved_params(tmp_path / name) for name in ("moved", "whole")]
        reference.assert_close(*params, rtol=1e-6)


def _run():
    import os

    import test_elastic

    given = os.environ
    return test_elastic.go_on(
        given["FOLDER"], "sgd", given["STAGE"], jax.device_count(), int(given["UNTIL"])
    )


@pytest.mark.multiprocess
def test_e02_e13_on_1_then_4_then_2_then_1_processes(tmp_path):
    """E02 maxtext#1760: the position is one of the run, not of its processes."""
    whole = go_on(tmp_path / "whole", "sgd", "zero3", 8, STEPS)
    folder = tmp_path / "moved"
    moved = go_on(folder, "sgd", "zero3", 8, 2)
    for processes, stage, until in ((4, "zero1", 4), (2, "zero3", 6)):
        env = {"FOLDER": str(folder), "STAGE": stage, "UNTIL": str(until)}
        answers = cluster.run(_run, num_processes=processes, num_devices=2, env=env)
        assert all(answer.value == answers[0].value for answer in answers)
        moved += answers[0].value
    moved += go_on(folder, "sgd", "zero3", 8, STEPS)
    np.testing.assert_allclose(moved, whole, rtol=1e-6)
    reference.assert_close(saved_params(folder), saved_params(tmp_path / "whole"), rtol=1e-6)
