"""The same training step written four ways, each behind the same small face.

    jdp         jdp.train_step with optax.chain(jdp.all_reduce(), adamw)
    shard_map   by hand: local gradient, jax.lax.pmean, adamw, all inside one jax.shard_map
    jit         plain jax.jit over a batch-sharded array; the compiler finds the all-reduces
    pmap        by hand: local gradient, jax.lax.pmean, adamw, inside jax.pmap

All donate their state, keep the loss on the devices, and get their batch already in place. AdamW
starts from zero moments, so after the first update its first moment is 0.1 times the gradient:
that is how the very programs that are timed are checked.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import Model

import jdp

B1 = 0.9  # adamw's decay of the first moment
OPTIMIZER = optax.adamw(1e-4, b1=B1)


class Arm(NamedTuple):
    """One way to do a step.

    Attributes:
        name: Column of the table.
        start: Makes a fresh state.
        step: State to (state, loss); what was given is consumed.
        lower: State to the lowered program of one step, traced anew after `jax.clear_caches()`.
    """

    name: str
    start: Callable[[], Any]
    step: Callable[[Any], tuple[Any, Any]]
    lower: Callable[[Any], Any]


def first_gradient(state: Any) -> Any:
    """The gradient of the first update, on the host, out of AdamW's state after it."""
    moment = optax.tree_utils.tree_get(state, "mu")
    return jax.tree.map(lambda m: np.asarray(m) / (1 - B1), moment)


def reference_gradient(model: Model) -> Any:
    """The gradient of the whole batch on one device: the definition."""
    return jax.jit(jax.grad(model.loss))(model.params, model.batch)


def race(
    contenders: Sequence[Arm], model: Model, rounds: int, clock: str, calls: int = 1
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each round by arm, and each arm's gradient error; the first step is not timed."""
    reference, turns, errors = reference_gradient(model), {}, {}
    for arm in contenders:
        state, _ = arm.step(arm.start())
        errors[arm.name] = measure.gradient_error(first_gradient(state), reference)
        turns[arm.name] = measure.stepper(arm.step, state, calls, measure.CLOCKS[clock])
    return measure.interleave(turns, rounds), errors


def steps(model: Model, mesh: Mesh) -> list[Arm]:
    """All four arms on one mesh."""
    return [make(model, mesh) for make in (jdp_step, shard_map_step, jit_step, pmap_step)]


def jdp_step(model: Model, mesh: Mesh, microbatch: int | None = None) -> Arm:
    tx = optax.chain(jdp.all_reduce(), OPTIMIZER)
    build = lambda: jdp.train_step(model.loss, tx, mesh, microbatch=microbatch)  # noqa: E731
    batch, step = place(model.batch, mesh, P("data")), build()
    return Arm(
        "jdp",
        lambda: jdp.init_state(model.params, tx, mesh),
        lambda state: step(state, batch),
        lambda state: build().lower(state, batch),
    )


def shard_map_step(model: Model, mesh: Mesh) -> Arm:
    def local(state: Any, batch: Any) -> Any:
        # without this mark JAX itself would sum the gradient, and pmean would divide nothing
        params = jax.lax.pcast(state[0], "data", to="varying")
        loss, grads = jax.lax.pmean(jax.value_and_grad(model.loss)(params, batch), "data")
        return apply(state, grads), loss

    split = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    return jitted("shard_map", split, model, mesh, place(model.batch, mesh, P("data")))


def jit_step(model: Model, mesh: Mesh) -> Arm:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(model.loss)(state[0], batch)
        return apply(state, grads), loss

    return jitted("jit", step, model, mesh, place(model.batch, mesh, P("data")))


def pmap_step(model: Model, mesh: Mesh) -> Arm:
    devices = list(mesh.devices.flat)

    def local(state: Any, batch: Any) -> Any:
        loss, grads = jax.lax.pmean(jax.value_and_grad(model.loss)(state[0], batch), "data")
        return apply(state, grads), loss

    step = jax.pmap(local, axis_name="data", donate_argnums=0, devices=devices)
    spread = jax.pmap(lambda x: x, devices=devices)
    copies = lambda x: np.broadcast_to(x, (len(devices), *np.shape(x)))  # noqa: E731
    batch = spread(jax.tree.map(lambda x: x.reshape(len(devices), -1, *x.shape[1:]), model.batch))

    def start() -> Any:
        state = model.params, OPTIMIZER.init(jax.tree.map(jnp.asarray, model.params))
        return spread(jax.tree.map(copies, state))

    return Arm(
        "pmap", start, lambda state: step(state, batch), lambda state: step.lower(state, batch)
    )


def jitted(name: str, step: Any, model: Model, mesh: Mesh, batch: Any) -> Arm:
    """An arm of `step(state, batch)`, which is jitted here with the state replicated."""
    run = jax.jit(step, donate_argnums=0, out_shardings=NamedSharding(mesh, P()))
    return Arm(
        name,
        lambda: replicated(model, mesh),
        lambda state: run(state, batch),
        lambda state: run.lower(state, batch),
    )


def replicated(model: Model, mesh: Mesh, optimizer: Any = OPTIMIZER) -> Any:
    """Parameters and optimizer state, whole on every device, in memory of their own."""
    make = lambda params: jax.tree.map(jnp.copy, (params, optimizer.init(params)))  # noqa: E731
    return jax.jit(make, out_shardings=NamedSharding(mesh, P()))(model.params)


def place(tree: Any, mesh: Mesh, spec: P) -> Any:
    return jax.device_put(tree, NamedSharding(mesh, spec))


def apply(state: Any, grads: Any, optimizer: Any = OPTIMIZER) -> Any:
    params, opt_state = state
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state
