"""Which dtype parameters are kept, computed and sent in, and float32 copies of narrow ones.

    loss_fn          --compute_in-->     parameters and batch cast to the compute dtype
    inner optimizer  --master_weights--> works on float32 copies; parameters are their rounding

In: a loss function, an optimizer, a pytree. Out: the same kind of thing. The wire dtype is only
carried along, for the reductions that take one; how to survive float16 is in `jdp.finite`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdp.collectives import check_wire_dtype
from jdp.loss import WEIGHT, Mean, is_mean
from jdp.replica import find_nodes, is_gradient, widen
from jdp.unshard import is_shard


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
        master: Wide copies of the parameters, `None` for those that need none.
        inner_state: State of the inner transformation, made for the wide copies.
    """

    master: Any
    inner_state: Any


def master_weights(
    inner: optax.GradientTransformation, dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Lets parameters narrower than float32 take steps that are smaller than their spacing.

    Of each such parameter p the state keeps a copy m in float32. With g its gradient,

        u = inner.update(float32(g), ..., m)
        m' = m + u
        update = float32(cast(m', p.dtype)) - float32(p)

    so that p + update, cast to p's dtype as `optax.apply_updates` does, is cast(m', p.dtype).

    Guarantees:
        - The inner transformation sees float32 gradients and parameters and keeps float32
          moments: it does what it would do for float32 parameters.
        - Parameters of 32 bits and more have no second copy.
        - Errors do not add up: parameters follow from the copies alone.

    | a step that | the parameter |
    | --- | --- |
    | is smaller than its spacing | stays until such steps have added up to half of it |
    | shrinks it by more than 2^-13 (float16) or 2^-16 (bfloat16) | is off by up to 2^-24 of its \
old value, for one step |
    | takes the copy beyond the range of its dtype | becomes inf; put `jdp.skip_nonfinite` around |
    | is 0 (frozen by `optax.set_to_zero`) | stays |

    Parameters that you change by hand are overwritten from the copies: make a new state for them.

    Args:
        inner: A transformation of reduced gradients, such as `optax.adamw(3e-4)`; inside a ZeRO
            stage the copies are split as the rest of its state.
        dtype: Dtype of the copies, float32 or wider. `None` says that no copies are wanted: the
            inner transformation works in the parameters' own dtype. What is lost: a bfloat16
            parameter of 1.0 has a spacing of 0.0078 and never moves by steps of 1e-3, and
            moments have 8 bits.

    Returns:
        A transformation with state `MasterWeightsState`, to be used with `optax.apply_updates`.

    Raises:
        ValueError: If gradients are not reduced yet, the parameters are not given, or the dtype
            is narrower than float32.

    Example:
        >>> params = {"w": jnp.ones((), jnp.bfloat16)}
        >>> tx = jdp.master_weights(optax.sgd(1e-3))
        >>> state = tx.init(params)
        >>> for _ in range(100):
        ...     updates, state = tx.update({"w": jnp.ones((), jnp.bfloat16)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params["w"], round(float(state.master["w"]), 4)
        (Array(0.898438, dtype=bfloat16), 0.9)

    References:
        Micikevicius et al., Mixed Precision Training, 2018.
    """
    if dtype is not None and _dtype(dtype, "jdp.master_weights(dtype=...)").itemsize < 4:
        raise ValueError(
            f"jdp.master_weights got dtype={jnp.dtype(dtype).name}, which is as narrow as the "
            "parameters it is to keep apart. Use jnp.float32, or None for no copies at all."
        )
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> MasterWeightsState:
        def copy(param: Any) -> Any:
            narrow = dtype is not None and param.dtype.itemsize < jnp.dtype(dtype).itemsize
            return param.astype(dtype) if narrow else None

        master = jax.tree.map(copy, params)
        return MasterWeightsState(master, inner.init(_either(master, params)))

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, MasterWeightsState]:
        _check_update(updates, params)
        wide = _either(state.master, params)
        grads = jax.tree.map(lambda g, w: g.astype(w.dtype), updates, wide)
        steps, inner_state = inner.update(grads, state.inner_state, wide, **extra)
        master = _where_kept(lambda m, w: w, state.master, optax.apply_updates(wide, steps))
        updates = _either(_where_kept(_difference, master, params), steps)
        return updates, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def check_master(params: Any, opt_state: Any) -> None:
    """Refuses narrow parameters for which no decision about wide copies was taken.

    Args:
        params: Pytree of parameters, or of their shapes.
        opt_state: The optimizer state; a `MasterWeightsState` anywhere in it is the decision.

    Raises:
        ValueError: If there is none and a parameter is narrower than float32, naming it.

    Example:
        >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
        >>> check_master(params, jdp.master_weights(optax.adam(1e-3)).init(params))
    """
    if find_nodes(opt_state, MasterWeightsState):
        return
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4:
            name, spacing = leaf.dtype.name, float(jnp.finfo(leaf.dtype).eps)
            raise ValueError(
                f"The parameter {jax.tree_util.keystr(path)} has the dtype {name}, whose spacing "
                f"at 1.0 is {spacing:.2g}: smaller steps are rounded away, and training stalls "
                "without an error. Keep float32 copies in the optimizer state: "
                "jdp.master_weights(optax.adamw(3e-4)), behind the reduction or inside the ZeRO "
                "stage. If such parameters are to be trained in their own dtype, say so: "
                "jdp.master_weights(..., dtype=None)."
            )


class ComputeIn:
    """A loss function that computes in another dtype, see `compute_in`.

    Attributes:
        loss_fn: The function itself.
        compute_dtype: What it computes in.
    """

    def __init__(self, loss_fn: Callable[..., Any], dtype: Any) -> None:
        functools.update_wrapper(self, loss_fn, updated=())
        self.loss_fn = loss_fn
        self.compute_dtype = _dtype(dtype, "jdp.compute_in(loss_fn, dtype)")

    def __call__(self, params: Any, batch: Any, *args: Any, **keywords: Any) -> Any:
        """The loss, as `loss_fn` returns it, its numbers at least float32."""
        params = _cast(params, self.compute_dtype)
        batch = _cast(batch, self.compute_dtype, but=f"[{WEIGHT!r}]")  # whose sums must be exact
        output = self.loss_fn(params, batch, *args, **keywords)
        if not isinstance(output, tuple):
            return _widen(output)
        return (*_widen(output[:2]), *output[2:])  # model state, if any, keeps its dtypes


def compute_in(loss_fn: Callable[..., Any], dtype: Any) -> ComputeIn:
    """Makes a loss function compute in a narrower dtype than its parameters are kept in.

    With c the cast of floating-point arrays to the dtype,

        compute_in(loss_fn, dtype)(params, batch) = float32(loss_fn(c(params), c(batch)))

    Gradients come out in the dtypes of the parameters, the cast being differentiated as well.

    Guarantees:
        - Loss and aux, totals and weights of `jdp.Mean`s too, are float32 or wider.
        - Integers, flags, keys and model state are handed on as they are, and so is
          `batch["weight"]`, the weights that `jdp.feed` adds.
        - ZeRO stages that gather parameters gather them in this dtype.

    A sum of 0s and 1s in bfloat16 is exact only up to 256: add up masks of your own as
    `jnp.sum(mask, dtype=jnp.float32)`, or keep them boolean. For the same reason the last steps
    of a loss (a softmax, a sum over examples) are better taken in float32.

    Args:
        loss_fn: See `jdp.value_and_grad`.
        dtype: float16, bfloat16, float32 or float64. For float16 see `jdp.dynamic_loss_scale`.

    Returns:
        A loss function of the same signature, with the attribute `compute_dtype`.

    Raises:
        TypeError: If the dtype cannot be computed in.
        ValueError: If the weight of a `jdp.Mean` was added up in fewer than 32 bits.

    Example:
        >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> narrow = jdp.compute_in(loss_fn, jnp.bfloat16)
        >>> loss, grads = jax.value_and_grad(narrow)({"w": jnp.ones(3) / 3}, jnp.ones((4, 3)))
        >>> loss, grads["w"].dtype
        (Array(1., dtype=float32), dtype('float32'))
    """
    return ComputeIn(loss_fn, dtype)


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a run: parameters as they are kept, computed with, and sent.

    | | params | compute | wire |
    | --- | --- | --- | --- |
    | full | float32 | float32 | None |
    | mixed | float32 | bfloat16 | None |
    | narrow parameters, float32 copies in the optimizer | bfloat16 | bfloat16 | None |

    Args:
        params: Dtype of the parameters.
        compute: Dtype that the loss computes in.
        wire: Dtype of gradients between devices, for the `wire_dtype` of a reduction; `None`
            sends them as they are.

    Raises:
        TypeError: If a dtype is not float16, bfloat16, float32 or float64.
        ValueError: If the wire dtype is not one that reductions take.

    Example:
        >>> precision = jdp.Precision(params=jnp.bfloat16, compute=jnp.bfloat16)
        >>> params = precision.cast_params({"w": jnp.ones(3)})
        >>> optimizer = precision.optimizer(optax.adamw(3e-4))
        >>> tx = optax.chain(jdp.all_reduce(wire_dtype=precision.wire), optimizer)
        >>> state = jdp.init_state(params, tx, jdp.make_mesh())
        >>> state.params["w"].dtype, state.opt_state[1].master["w"].dtype
        (dtype(bfloat16), dtype('float32'))
    """

    params: Any = jnp.float32
    compute: Any = jnp.float32
    wire: Any = None

    def __post_init__(self) -> None:
        for name in ("params", "compute"):
            dtype = _dtype(getattr(self, name), f"jdp.Precision({name}=...)")
            object.__setattr__(self, name, dtype)
        object.__setattr__(self, "wire", check_wire_dtype(self.wire))

    def cast_params(self, tree: Any) -> Any:
        """Floating-point leaves in the dtype of the parameters, others as they are."""
        return _cast(tree, self.params)

    def loss(self, loss_fn: Callable[..., Any]) -> ComputeIn:
        """The loss function computing in the compute dtype, see `compute_in`."""
        return compute_in(loss_fn, self.compute)

    def optimizer(
        self, inner: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """The optimizer, with `master_weights` around it if the parameters are narrow."""
        narrow = self.params.itemsize < 4
        return master_weights(inner) if narrow else optax.with_extra_args_support(inner)


def _dtype(dtype: Any, argument: str) -> Any:
    """The dtype, or a sentence why parameters cannot have it."""
    names = ("float16", "bfloat16", "float32", "float64")
    try:
        found = jnp.dtype(dtype) if dtype is not None else None
    except TypeError:
        found = None
    if found is None or found.name not in names:
        raise TypeError(
            f"{argument} got {dtype!r}; parameters are trained in {', '.join(names[:3])} or "
            f"{names[3]}. Integers have no gradients, and JAX does not add narrower floats."
        )
    if found != jax.dtypes.canonicalize_dtype(found):
        raise TypeError(
            f"{argument} got float64, which JAX silently turns into float32. Use float32, or "
            'jax.config.update("jax_enable_x64", True) at the start.'
        )
    return found


def _cast(tree: Any, dtype: Any, but: str | None = None) -> Any:
    """Floating-point leaves in another dtype, but for the one with this path."""

    def one(path: Any, x: Any) -> Any:
        if is_shard(x):  # it comes in this dtype when it is gathered
            return x
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(dtype) if floating and jax.tree_util.keystr(path) != but else x

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_shard)


def _widen(output: Any) -> Any:
    """Floating-point numbers of a loss and its aux in float32, if they are narrower."""

    def wide(x: Any) -> Any:
        return widen(x) if jnp.issubdtype(getattr(x, "dtype", object), jnp.floating) else x

    def one(leaf: Any) -> Any:
        if not is_mean(leaf):
            return wide(leaf)
        kind = jnp.result_type(leaf.weight)
        if jnp.issubdtype(kind, jnp.floating) and kind.itemsize < 4:
            raise ValueError(
                f"The weight of a jdp.Mean was added up in {kind.name}, where whole numbers are "
                f"exact only up to {int(2 / jnp.finfo(kind).eps)}: the mean would be divided by "
                "another number than that of its examples. Use jnp.sum(mask, dtype=jnp.float32), "
                "or a mask of booleans."
            )
        return Mean(wide(leaf.total), leaf.weight)

    return jax.tree.map(one, output, is_leaf=is_mean)


def _is_none(x: Any) -> bool:
    return x is None


def _where_kept(fn: Callable[..., Any], master: Any, *rest: Any) -> Any:
    """Maps over the parameters that have a wide copy; `None` for the others."""
    one = lambda m, *xs: None if m is None else fn(m, *xs)  # noqa: E731
    return jax.tree.map(one, master, *rest, is_leaf=_is_none)


def _either(kept: Any, others: Any) -> Any:
    """The first tree, its `None`s filled from the second."""
    return jax.tree.map(lambda k, o: o if k is None else k, kept, others, is_leaf=_is_none)


def _difference(master: jax.Array, param: jax.Array) -> jax.Array:
    """What takes a parameter to the rounding of its copy."""
    return _round(master, param.dtype) - param.astype(master.dtype)


def _round(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds to a narrower dtype but stays in its own.

    A cast there and back would do, were it not that XLA removes the pair on GPUs
    (xla_allow_excess_precision).
    """
    to = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, to.nexp, to.nmant)
    if to.nexp == jnp.finfo(x.dtype).nexp:
        return rounded
    # reduce_precision gives 0 for subnormal numbers, which lie at equal distances
    spacing = float(to.smallest_subnormal)
    return jnp.where(jnp.abs(x) < float(to.tiny), jnp.round(x / spacing) * spacing, rounded)


def _check_update(updates: Any, params: Any) -> None:
    if params is None:
        raise ValueError(
            "jdp.master_weights needs the parameters, to know what its rounded copies differ from: "
            "tx.update(grads, opt_state, params)."
        )
    if any(map(is_gradient, jax.tree.leaves(updates, is_leaf=is_gradient))):
        raise ValueError(
            "jdp.master_weights received gradients that no reduction has taken yet: it stands "
            "around the reduction, where its copies would be kept whole on every device. Put it "
            "behind, optax.chain(jdp.all_reduce(), jdp.master_weights(...)), or inside the ZeRO "
            "stage."
        )
