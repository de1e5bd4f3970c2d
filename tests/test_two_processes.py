"""Training over real processes: the same numbers as one process, and what only processes can do.

Each launch checks several things, since starting JAX is most of the cost.
"""

import cluster
import jax
import numpy as np
import pytest
import training_job
from reference import assert_close


def _run():
    import jax.numpy as jnp
    import numpy as np
    import optax
    import training_job
    from programs import lowered_collectives
    from reference import assert_same_copies, mlp

    import jdp

    me, mesh, params = jax.process_index(), jdp.make_mesh(), mlp()[0]
    state, losses = training_job.train(training_job.part(me))
    said = {"losses": losses, "updates": int(state.opt_state.num_updates)}
    said["params"] = {name: np.asarray(x).tolist() for name, x in state.params.items()}

    # gradients travel in flat buckets between processes: as many as the bytes ask for
    for name, size in (("one bucket", 2**20), ("three buckets", 1200)):
        tx = optax.chain(jdp.all_reduce(bucket_bytes=size), optax.sgd(1.0))
        state = jdp.init_state(params, tx, mesh)
        step = jdp.train_step(lambda p, b: jnp.mean((b @ p["w1"]) ** 2) + p["b1"].sum(), tx, mesh)
        shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
        said[name] = len(lowered_collectives(step.lower(state, shape).as_text()))

    mine = {"a": np.zeros(3), "b": {"w": np.full(2, 1.0 + me)}}
    try:
        jdp.init_state(mine, optax.sgd(1.0), mesh)
    except ValueError as error:
        said["different start"] = str(error)
    state = jdp.init_state(mine, optax.sgd(1.0), mesh, broadcast=True, key=jax.random.key(me))
    assert_same_copies(state.params)
    said["broadcast"] = np.asarray(state.params["b"]["w"]).tolist()
    said["key"] = jax.random.key_data(state.key).tolist()
    return said


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_devices", [4, 1])
def test_a30_a31_b11_e17_two_processes_train_as_one_does(num_devices):
    state, losses = training_job.train(training_job.whole())
    answers = [a.value for a in cluster.run(_run, num_devices=num_devices, seconds=120)]
    for said in answers:
        assert said["losses"] == pytest.approx(losses, rel=1e-6)
        assert said["updates"] == 2  # two calls, then the third one flushed
        params = {name: np.asarray(x, np.float32) for name, x in said["params"].items()}
        assert_close(params, state.params, rtol=2e-6)
        # the three leaves are 1536, 96 and 768 bytes; loss and weight travel beside them
        assert said["three buckets"] - said["one bucket"] == 2
        assert "['params']['b']['w'] on process 1 differs from process 0" in said["different start"]
        assert said["broadcast"] == [1.0, 1.0]
        assert said["key"] == jax.random.key_data(jax.random.key(0)).tolist()
    assert answers[0] == answers[1]
