"""The training step: one compiled program from a state and a batch to the next state.

    state, batch  --value_and_grad-->  per-replica gradients  --tx.update-->  state, metrics

It holds no loop, no optimizer and no strategy of its own; each of those is a value that is passed
in. What is wrong with a chain, a state or a batch is said before anything runs. Metrics stay on
the devices until they are read.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import Mesh

from jdp.dataflow import run_checked
from jdp.finite import find_loss_scale
from jdp.grad import value_and_grad
from jdp.mesh import AxisNames
from jdp.options import known_options, xla_options
from jdp.order import check_order
from jdp.pace import is_emulated, keep_pace
from jdp.split import find_placement
from jdp.state import TrainState
from jdp.update import keep_if_skipped, skips, update
from jdp.watchdog import note_step


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis: AxisNames | None = None,
    microbatch: int | None = None,
    remat: bool | str | Callable[..., bool] = False,
    donate: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> "TrainStep":
    """Builds the training step: one compiled program from a state and a batch to the next state.

    What it does is `value_and_grad`, then `tx.update`, then `optax.apply_updates`. How gradients
    are reduced, accumulated or clipped is said by `tx`.

    Guarantees:
        - Compiled once for each shape of batch; the state keeps its shapes, dtypes and the places
          of the first state that the step was given.
        - The old state's memory is reused for the new one (unless `donate=False`).
        - Nothing waits for the devices (on emulated ones, at most eight programs run ahead);
          metrics are arrays, the same on every device.
        - It may be part of a larger program: a `lax.scan` over steps, a jit of your own.

    Args:
        loss_fn: See `jdp.value_and_grad`. It is given the key fold_in(state.key, state.step) if
            the state has a key, and `model_state=` if it has one.
        tx: An optax transformation of per-replica gradients. It is given the loss as `value`, for
            those that ask for it (`optax.contrib.reduce_on_plateau`).
        mesh: The mesh.
        axis: Data axes; `None` finds them, see `jdp.data_axes`.
        microbatch: Examples per microbatch; `None` takes a replica's whole share as one.
        remat: Recompute the forward pass in the backward pass: True, a policy or its name.
        donate: Reuse the state's memory. False keeps the old state valid, as one may want in a
            notebook.
        compiler_options: XLA options; `None` takes `jdp.xla_options(mesh)`. One that this jaxlib
            does not know is left out with a warning.

    Returns:
        `step(state, batch, *, shares=None) -> (state, metrics)`; metrics holds "loss" and the
        leaves of aux (under their own names if aux is a dict, else under "aux"); "skipped", the
        steps left out so far, where `tx` has a `skip_nonfinite` or a loss scale.
        `step.lower(state, batch)` gives the program without running it, from shapes alone too.

    Raises:
        ValueError: At the first call, if gradients are not reduced, or are computed with before
            they are, or the state lies on another mesh or was already consumed.

    Example:
        >>> mesh, tx = jdp.make_mesh(), optax.chain(jdp.all_reduce(), optax.sgd(0.5))
        >>> step = jdp.train_step(lambda p, batch: jnp.mean((p["w"] - batch) ** 2), tx, mesh)
        >>> state = jdp.init_state({"w": jnp.zeros(())}, tx, mesh)
        >>> state, metrics = step(state, jnp.arange(16.0))
        >>> float(metrics["loss"]), float(state.params["w"])
        (77.5, 7.5)
    """
    tx = optax.with_extra_args_support(tx)
    grad_fn = value_and_grad(loss_fn, mesh, axis=axis, microbatch=microbatch, remat=remat)
    options = xla_options(mesh, axis=axis) if compiler_options is None else compiler_options

    def step(state: TrainState, batch: Any, shares: Any) -> tuple[TrainState, dict[str, Any]]:
        key = None if state.key is None else jax.random.fold_in(state.key, state.step)
        values, grads = grad_fn(
            state.params,
            batch,
            key,
            model_state=state.model_state,
            shares=shares,
            loss_scale=find_loss_scale(state.opt_state),
            placement=find_placement(state.opt_state),
        )
        loss, aux, model_state = (
            *(values if isinstance(values, tuple) else (values,)),
            None,
            None,
        )[:3]
        params, opt_state = update(tx, grads, state, loss)
        model_state = keep_if_skipped(model_state, state.model_state, opt_state)
        new = TrainState(state.step + 1, params, opt_state, state.key, model_state)
        return jax.tree.map(_strong, new), {"loss": loss, **skips(opt_state), **_by_name(aux)}

    def on(mesh: Mesh, **changes: Any) -> TrainStep:
        same = {"axis": axis, "microbatch": microbatch, "remat": remat, "donate": donate}
        chosen = {"compiler_options": compiler_options, **same, **changes}
        return train_step(loss_fn, tx, mesh, **chosen)

    known = known_options(options, mesh)
    recipe = Recipe(loss_fn, tx, on, microbatch)
    return TrainStep(step, mesh, donate=donate, options=known, recipe=recipe)


def _strong(x: jax.Array) -> jax.Array:
    """The same without a weak type, which would make the next call compile anew."""
    return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def _by_name(aux: Any) -> dict[str, Any]:
    """The metrics of aux under their names."""
    if not isinstance(aux, dict):
        return {} if aux is None else {"aux": aux}
    if "loss" in aux:
        raise ValueError(
            'The loss function\'s aux has a metric called "loss", which is the name of the loss '
            "itself among the step's metrics. Give it another name."
        )
    return aux


def _check_kept(old: Any, new: Any) -> None:
    """Says which leaf of the state changes its kind, so that its memory cannot be used again."""
    kinds = [
        [(jax.tree_util.keystr(path), jnp.shape(x), jnp.result_type(x)) for path, x in leaves]
        for leaves in (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (old, new))
    ]
    for (name, *before), (_, *after) in zip(*kinds, strict=True):
        if before != after:
            warnings.warn(
                f"state{name} goes into the step as {before[1]} of shape {before[0]} and comes out "
                f"as {after[1]} of shape {after[0]}: its memory cannot be reused for the new value "
                "(donation has no effect), and the next step will be compiled anew. Make it come "
                "out as it went in, or start with what comes out.",
                stacklevel=5,
            )


class Recipe(NamedTuple):
    """What a step was built from.

    Attributes:
        loss_fn: The loss function.
        tx: The transformation.
        on: `on(mesh, **changes)` builds the step anew, for another mesh or with other arguments of
            `jdp.train_step`.
        microbatch: As given to `jdp.train_step`.
    """

    loss_fn: Callable[..., Any]
    tx: optax.GradientTransformation
    on: Callable[..., "TrainStep"]
    microbatch: int | None = None


class TrainStep:
    """A compiled training step, see `jdp.train_step`.

    Attributes:
        mesh: Its mesh.
        recipe: What it was built from.
        options: The compiler options it is compiled with.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        mesh: Mesh,
        *,
        donate: bool,
        options: Mapping[str, Any],
        recipe: Recipe,
    ) -> None:
        self.mesh = mesh
        self.recipe = recipe
        self._donate = (0,) if donate else ()
        self.options = dict(options)
        self._step = step
        self._compiled: Any = None
        self._treedef: Any = None
        self._emulated = is_emulated(mesh)

    def __call__(
        self, state: TrainState, batch: Any, *, shares: Any = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """Runs one step; see `jdp.train_step`."""
        given = (getattr(state, "step", None), *jax.tree.leaves((batch, shares)))
        if any(isinstance(leaf, Tracer) for leaf in given):
            return self._inline(state, batch, shares)
        first = None
        if self._compiled is None:
            self._compiled, self._treedef = self._prepare(state, batch, shares)
            first = int(state.step) + 1  # now: the step may overwrite it
        else:
            note_step()  # before it is dispatched: that can wait for other processes
        if getattr(state.step, "is_deleted", bool)():
            self._explain(state, batch)  # beforehand: jax 0.10 can crash on such arrays
        try:
            new, metrics = self._compiled(state, batch, shares)
        except (TypeError, ValueError, RuntimeError):
            self._explain(state, batch)
            if jax.tree.structure(state) == self._treedef:
                raise
            # found while tracing, so nothing was consumed: a state of another structure
            self._compiled, self._treedef = self._prepare(state, batch, shares)
            new, metrics = self._compiled(state, batch, shares)
        if first is not None:
            note_step(first)  # afterwards: compiling may take its time
        if self._emulated:
            keep_pace(metrics["loss"])
        return new, metrics

    def _inline(self, state: TrainState, batch: Any, shares: Any) -> Any:
        """The step as part of a larger traced program: a scan over steps, a user's own jit."""
        check = functools.partial(check_order, strict=True)
        return run_checked(self._step, check, state, batch, shares)

    def lower(self, state: TrainState, batch: Any, *, shares: Any = None) -> Any:
        """The program, not yet compiled, for arrays or for shapes with shardings."""
        return self.trace(state, batch, shares=shares).lower()

    def trace(self, state: TrainState, batch: Any, *, shares: Any = None) -> Any:
        """The step as traced: `.jaxpr` is what it computes, `.lower()` the program of it."""
        return self._prepare(state, batch, shares)[0].trace(state, batch, shares)

    def _prepare(self, state: TrainState, batch: Any, shares: Any) -> tuple[Any, Any]:
        """The jitted step, checked, and the structure of the state it is for.

        Its output state lies where its input state does.
        """
        if not all(hasattr(state, name) for name in ("step", "params", "opt_state")):
            raise TypeError(
                f"The step was given a {type(state).__name__} where its state belongs. Call "
                "step(state, batch) with the state that jdp.init_state made, or that the step "
                "returned."
            )
        self._explain(state, batch)
        places = jax.tree.map(lambda x: getattr(x, "sharding", None), state)
        jitted = jax.jit(
            self._step,
            donate_argnums=self._donate,
            out_shardings=(places, None),
            compiler_options=self.options or None,
        )
        traced = jitted.trace(state, batch, shares)
        check_order(traced.jaxpr.jaxpr, strict=True)
        _check_kept(state, traced.out_info[0])
        return jitted, jax.tree.structure(state)

    def _explain(self, state: TrainState, batch: Any) -> None:
        """A sentence for a state or batch that was consumed already or lies on other devices."""
        devices = set(self.mesh.devices.flat)
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
            placed = leaf.sharding.device_set if getattr(leaf, "committed", False) else devices
            if placed != devices:
                raise ValueError(
                    f"The batch leaf {jax.tree_util.keystr(path)} lies on {len(placed)} device(s) "
                    f"of its own, not on the {len(devices)} of the step's mesh. Give host arrays "
                    "(NumPy), or place batches with jdp.feed."
                )
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
            where = f"state{jax.tree_util.keystr(path)}"
            if isinstance(leaf, Tracer):
                continue
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ValueError(
                    f"{where} was consumed by an earlier call of this step, which reused its "
                    "memory. Use the state that the call returned: state, metrics = step(state, "
                    "batch); or build the step with donate=False to keep old states."
                )
            sharding = getattr(leaf, "sharding", None)
            if sharding is None:
                continue
            if sharding.device_set != devices:
                raise ValueError(
                    f"{where} lies on {len(sharding.device_set)} device(s), but the step was built "
                    f"for a mesh of {self.mesh.size}: {dict(self.mesh.shape)}. A new state is made "
                    "with jdp.init_state(params, tx, mesh) for that mesh; one that was saved is "
                    "placed where init_state's lies, see Saving and restoring in the README."
                )
            order = getattr(getattr(sharding, "mesh", None), "devices", self.mesh.devices)
            if [*order.flat] != [*self.mesh.devices.flat]:
                raise ValueError(
                    f"{where} lies on a mesh of the same devices in another order. Use one mesh "
                    "for the step, the state and the batches."
                )
