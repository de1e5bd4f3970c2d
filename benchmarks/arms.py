"""The same training step written in several ways, each behind the same small face.

    jdp         jdp.train_step with optax.chain(jdp.all_reduce(), adamw), or another stage
    shard_map   by hand: local gradient, jax.lax.pmean, adamw, all inside one jax.shard_map
    jit         plain jax.jit over a batch-sharded array; the compiler finds the all-reduces
    pmap        by hand: local gradient, jax.lax.pmean, adamw, inside jax.pmap
    hand zero1  by hand: local gradient, psum_scatter of each leaf, adamw on parts, all_gather of
                the new parameters
    hand zero3  by hand: parameters in parts, all_gather of each leaf in the loss, adamw on parts

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
    moment = jdp.logical(optax.tree_utils.tree_get(state, "mu"))
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


def jdp_step(
    model: Model, mesh: Mesh, microbatch: int | None = None, *, name: str = "jdp", tx: Any = None
) -> Arm:
    tx = optax.chain(jdp.all_reduce(), OPTIMIZER) if tx is None else tx
    build = lambda: jdp.train_step(model.loss, tx, mesh, microbatch=microbatch)  # noqa: E731
    batch, step = place(model.batch, mesh, P("data")), build()
    return Arm(
        name,
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


def zero1_by_hand(model: Model, mesh: Mesh) -> Arm:
    """Each device updates a part of each leaf; the new parameters are gathered.

    They take the place of the old ones as they arrive. Gathered updates would need room besides:
    on the MLP, 6 MB and 12 % of the time.
    """
    dims = split_dims(model, mesh)

    def scatter(grad: jax.Array, dim: int) -> jax.Array:
        if dim < 0:
            return jax.lax.pmean(grad, "data")
        return jax.lax.psum_scatter(grad, "data", scatter_dimension=dim, tiled=True) / mesh.size

    def own(param: jax.Array, dim: int) -> jax.Array:
        if dim < 0:
            return param
        size = param.shape[dim] // mesh.size
        start = jax.lax.axis_index("data") * size
        return jax.lax.dynamic_slice_in_dim(param, start, size, axis=dim)

    def gather(part: jax.Array, dim: int) -> jax.Array:
        if dim < 0:
            return part
        return jax.lax.all_gather(part, "data", axis=dim, tiled=True, to="invarying")

    def local(state: Any, batch: Any) -> Any:
        params, opt_state = state
        varying = jax.lax.pcast(params, "data", to="varying")
        loss, grads = jax.value_and_grad(model.loss)(varying, batch)
        grads = jax.tree.map(scatter, grads, dims)
        parts = jax.tree.map(own, params, dims)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, parts)
        params = jax.tree.map(gather, optax.apply_updates(parts, updates), dims)
        return (params, opt_state), jax.lax.pmean(loss, "data")

    return _in_parts("hand zero1", local, model, mesh, split_params=False)


def zero3_by_hand(model: Model, mesh: Mesh, *, regather: bool) -> Arm:
    """Each device keeps a part of each leaf, parameters included."""
    dims = split_dims(model, mesh)

    def gather(part: jax.Array, dim: int) -> jax.Array:
        if dim < 0:
            return jax.lax.pcast(part, "data", to="varying")
        return jax.lax.all_gather(part, "data", axis=dim, tiled=True)

    def loss_of(parts: Any, batch: Any) -> jax.Array:
        return model.loss(jax.tree.map(gather, parts, dims), batch)

    def keep(primitive: Any, *_: Any, **__: Any) -> bool:
        return not primitive.name.startswith("all_gather")

    def local(state: Any, batch: Any) -> Any:
        loss = jax.checkpoint(loss_of, policy=keep) if regather else loss_of  # pyright: ignore
        value, grads = jax.value_and_grad(loss)(state[0], batch)
        # the transpose of all_gather has scattered the sum, that of pcast has summed
        grads = jax.tree.map(lambda g: g / mesh.size, grads)
        return apply(state, grads), jax.lax.pmean(value, "data")

    name = "hand zero3" if regather else "hand zero3 kept"
    return _in_parts(name, local, model, mesh, split_params=True)


def split_dims(model: Model, mesh: Mesh) -> Any:
    """The first dim of each leaf that the devices divide; -1 where there is none."""
    return jax.tree.map(lambda leaf: _split_dim(leaf, mesh), model.params)


def _split_dim(leaf: Any, mesh: Mesh) -> int:
    return next((dim for dim, size in enumerate(leaf.shape) if size % mesh.size == 0), -1)


def _in_parts(name: str, local: Any, model: Model, mesh: Mesh, *, split_params: bool) -> Arm:
    """An arm of `local(state, batch)` on one device, of an optimizer state in parts."""

    def spec(leaf: Any) -> P:
        dim = _split_dim(leaf, mesh)
        return P() if dim < 0 else P(*[None] * dim, "data")

    make = lambda params: jax.tree.map(jnp.copy, (params, OPTIMIZER.init(params)))  # noqa: E731
    params, opt_state = jax.eval_shape(make, model.params)
    params = jax.tree.map(spec, params) if split_params else jax.tree.map(lambda _: P(), params)
    specs = params, jax.tree.map(spec, opt_state)
    places = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
    step = jax.shard_map(local, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()))
    run, batch = jax.jit(step, donate_argnums=0), place(model.batch, mesh, P("data"))
    return Arm(
        name,
        lambda: jax.jit(make, out_shardings=places)(model.params),
        lambda state: run(state, batch),
        lambda state: run.lower(state, batch),
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
