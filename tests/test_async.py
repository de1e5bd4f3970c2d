"""Many steps dispatched without reading anything, on emulated devices."""

import subprocess
import sys

from cluster import ROOT

PROGRAM = """
import jax.numpy as jnp, numpy as np, optax
import jdp

jdp.emulate_devices(8)
mesh = jdp.make_mesh()
tx = optax.chain(jdp.all_reduce(), optax.sgd(0.01, momentum=0.9))
step = jdp.train_step(lambda p, b: jnp.mean((jnp.tanh(b["x"] @ p["a"]) @ p["b"]) ** 2), tx, mesh)
params = {"a": jnp.ones((2, 32)), "b": jnp.ones((32, 1))}
for _ in range(8):
    state = jdp.init_state(params, tx, mesh)
    for batch in jdp.feed(({"x": np.ones((64, 2))} for _ in range(100)), mesh, pad=False):
        state, metrics = step(state, batch)
    print(float(metrics["loss"]))
"""


def test_a_loop_that_reads_nothing_does_not_deadlock():
    """XLA:CPU on jax 0.10 hangs with more than about 30 steps under way; unbounded, each did."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(set(done.stdout.split())) == 1


MANY = """
import jax.numpy as jnp, numpy as np, optax
import jdp

jdp.emulate_devices(8)
mesh, tx = jdp.make_mesh(), optax.chain(jdp.all_reduce(), optax.sgd(0.01))
loss = lambda p, b: jnp.mean(jnp.tanh(b @ p["a"]) ** 2)
steps = [jdp.train_step(loss, tx, mesh) for _ in range(6)]
states = [jdp.init_state({"a": jnp.ones((64, 64))}, tx, mesh) for _ in steps]
score = jdp.eval_step(lambda p, b: jdp.Mean(loss(p, b), 1), mesh)
batch = next(iter(jdp.feed([np.ones((64, 64), np.float32)], mesh, pad=False)))
total = 0.0
for _ in range(60):
    for i, step in enumerate(steps):
        states[i], _ = step(states[i], batch)
    total = total + score(states[0].params, batch).total
print(float(total))
"""


def test_several_steps_and_an_evaluation_share_the_bound():
    done = subprocess.run(
        [sys.executable, "-c", MANY], cwd=ROOT, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
