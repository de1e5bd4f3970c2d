"""The loss contract: what a user's function may return, and what it means.

    loss_fn(params, batch[, key][, model_state=...]) -> loss
                                                      | (loss, aux)
                                                      | (loss, aux, model_state)

A loss is a scalar, the mean over the examples of the microbatch it was given, or
`Mean(total, weight)`. Over all microbatches j of a global batch the loss is

    sum_j total_j / sum_j weight_j        a scalar counting as Mean(m * loss, m)

and so is each leaf of aux, a plain scalar being weighted as the loss is. In come these values,
out goes one uniform record, or a sentence that says which part of the contract is broken. The
module runs nothing and sends nothing.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp.mesh import is_whole
from jdp.replica import widen

WEIGHT = "weight"
"""The key under which a batch carries the weight of each example; 0 marks padding."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A weighted mean before its division: a total and the weight it is to be divided by.

    Means add: `Mean(a, u) + Mean(b, w)` is `Mean(a + b, u + w)`, which is how one is taken over
    microbatches, replicas and batches without ever being a mean of means.

    | weight of a microbatch | meaning |
    | --- | --- |
    | > 0 | counts in proportion |
    | 0 | its total is still added, it adds nothing to the divisor |
    | negative, infinite, NaN | the mean, and every gradient of a loss, become NaN; a ValueError \
if the weight is a Python number |
    | 0 in all of them | the loss is NaN, the gradient 0 |

    Args:
        total: Sum over the examples (tokens, ...), a float scalar; an array for a metric with
            several entries.
        weight: What to divide by, a scalar or of the total's shape: the number of examples
            (tokens, ...), or the sum of their weights. It must not depend on the parameters.

    Raises:
        ValueError: If the weight is a number that is negative or NaN.

    Example:
        >>> (jdp.Mean(6.0, 2) + jdp.Mean(0.0, 1)).value
        2.0

    References:
        The gradient-accumulation normalisation corrected across trainers in October 2024,
        huggingface/transformers#34191.
    """

    total: Any
    weight: Any

    def __post_init__(self) -> None:
        if isinstance(self.weight, (int, float, np.number)) and not self.weight >= 0:
            raise ValueError(
                f"jdp.Mean got the weight {self.weight}: a weight is the number of examples or "
                "tokens that the total sums over, so it must be 0 or more. Use 0 for what shall "
                "not count."
            )

    @property
    def value(self) -> Any:
        """Total / weight; NaN where the weight is 0."""
        if isinstance(self.weight, (int, float)) and isinstance(self.total, (int, float)):
            return self.total / self.weight if self.weight else math.nan
        empty = jnp.equal(self.weight, 0)
        return jnp.where(empty, jnp.nan, self.total / jnp.where(empty, 1, self.weight))

    @classmethod
    def of(cls, values: Any, weights: Any) -> "Mean":
        """The weighted mean of what each example (or token) gave.

        Args:
            values: Float array of shape [m, ...].
            weights: Of the values' shape, or of its first dims, such as [m]: one weight then
                counts for all entries behind it.

        Returns:
            `Mean(sum(values * weights), sum(weights))`, the weights repeated to the values' shape.

        Example:
            >>> mean = jdp.Mean.of(jnp.array([[1.0, 3.0], [9.0, 9.0]]), jnp.array([1.0, 0.0]))
            >>> float(mean.value), float(mean.weight)
            (2.0, 2.0)
        """
        values, weights = jnp.asarray(values), jnp.asarray(weights)
        if weights.shape != values.shape[: weights.ndim]:
            raise ValueError(
                f"jdp.Mean.of got values of shape {values.shape} and weights of shape "
                f"{weights.shape}; weights must have the values' shape, or its first dims. "
                "Otherwise they would be broadcast to the wrong examples."
            )
        trailing = (1,) * (values.ndim - weights.ndim)
        weights = jnp.broadcast_to(weights.reshape(*weights.shape, *trailing), values.shape)
        return cls(jnp.sum(values * weights), jnp.sum(weights))

    def __add__(self, other: "Mean") -> "Mean":
        if not isinstance(other, Mean):
            return NotImplemented
        return Mean(self.total + other.total, self.weight + other.weight)

    def __radd__(self, other: Any) -> "Mean":
        return self if other == 0 else NotImplemented  # so that sum() works


def is_mean(leaf: Any) -> bool:
    """Whether a node of a pytree is a `Mean`; for `is_leaf`."""
    return isinstance(leaf, Mean)


class Form(NamedTuple):
    """How a loss returns: so many values, with a weight of its own or the implied 1."""

    values: int
    weighted: bool


class Parts(NamedTuple):
    """What a loss returned, taken apart."""

    loss: Mean
    aux: Any
    model_state: Any
    form: Form


def take_apart(output: Any, *, has_model_state: bool, batch: Any) -> Parts:
    """Reads a loss function's output.

    Args:
        output: What the user's function returned.
        has_model_state: Whether it was given a `model_state` and so must return one.
        batch: The batch it was given, to see whether it carries weights.

    Returns:
        The parts, with the loss and each leaf of aux as a `Mean` of float32 or wider.

    Raises:
        ValueError: If the output is not what the contract says.
        TypeError: If the loss is not real-valued floating point.
    """
    parts = tuple(output) if isinstance(output, tuple) else (output,)
    if not (is_mean(parts[0] if parts else None) or _is_array(parts[0] if parts else None)):
        kind = type(parts[0] if parts else output).__name__
        raise ValueError(
            f"The loss function returned a {kind} where its loss belongs. It must return a scalar "
            "or a jdp.Mean(total, weight), alone or first in a tuple: loss, (loss, aux), or (loss, "
            "aux, model_state) if it is given a model_state."
        )
    wanted = 3 if has_model_state else len(parts)
    if len(parts) != wanted or len(parts) > 3 or (len(parts) == 3 and not has_model_state):
        raise ValueError(
            f"The loss function returned {len(parts)} values. It may return loss or (loss, aux); "
            "given a model_state it must return (loss, aux, model_state), with aux None if there "
            "is none."
        )
    loss, aux, model_state = (*parts, None, None)[:3]
    weighted = isinstance(loss, Mean)
    require_weights((loss, aux), batch)
    if not weighted:
        loss = Mean(loss, 1.0)
    _check_loss(loss)
    loss = Mean(widen(loss.total), _valid(widen(loss.weight)) if weighted else jnp.float32(1))
    return Parts(loss, weigh(aux, loss.weight), model_state, Form(len(parts), weighted))


def require_weights(values: Any, batch: Any) -> None:
    """Refuses plain means of a batch that carries weights: they would count padding as data.

    Raises:
        ValueError: If the batch has weights and a value is not a `Mean`.
    """
    if not (isinstance(batch, Mapping) and WEIGHT in batch):
        return
    if not all(map(is_mean, jax.tree.leaves(values, is_leaf=is_mean))):
        raise ValueError(
            f"The batch carries {WEIGHT!r} for each example (jdp.feed adds it, so that a ragged "
            "last batch counts exactly), but the function returned a plain mean, which would count "
            f"padding as data. Return jdp.Mean(total, weight), for example "
            f"jdp.Mean.of(losses, batch[{WEIGHT!r}]) with one loss for each example; or use "
            "jdp.feed(..., pad=False), which refuses ragged batches."
        )


def weigh(metrics: Any, weight: Any) -> Any:
    """Turns each leaf of a pytree of metrics into a `Mean`, a plain scalar with this weight.

    Raises:
        ValueError: If a leaf is neither a scalar nor a `Mean`, naming its path.
    """

    def one(path: Any, leaf: Any) -> Mean:
        where = jax.tree_util.keystr(path)
        for part in (leaf.total, leaf.weight) if isinstance(leaf, Mean) else (leaf,):
            if not _is_array(part) or jnp.issubdtype(jnp.result_type(part), jax.dtypes.extended):
                raise ValueError(
                    f"The metric {where} is {_kind(part)}, which cannot be averaged. Return "
                    "numbers, or jdp.Mean(total, weight); leave out what is not a metric."
                )
        if isinstance(leaf, Mean):
            return Mean(widen(leaf.total), _valid(widen(leaf.weight)))
        if jnp.shape(leaf) != ():
            raise ValueError(
                f"The metric {where} has the shape {jnp.shape(leaf)}. Each "
                "metric is averaged over microbatches and replicas, so it must be a scalar, or a "
                "jdp.Mean(total, weight) whose total may have any shape. Something for each "
                "example cannot be averaged: reduce it in the function."
            )
        # a microbatch of weight 0 may hold 0/0, which must not spoil the others
        return Mean(jnp.where(weight == 0, 0.0, widen(leaf) * weight), weight)

    return jax.tree_util.tree_map_with_path(one, metrics, is_leaf=is_mean)


def _is_array(x: Any) -> bool:
    return isinstance(x, (int, float, complex, np.generic, np.ndarray, jax.Array))


def _kind(x: Any) -> str:
    """What a value is, in words that fit a traced one as well."""
    return f"of dtype {jnp.result_type(x)}" if _is_array(x) else f"a {type(x).__name__}"


def _check_loss(loss: Mean) -> None:
    for name, part in (("loss", loss.total), ("weight of the loss", loss.weight)):
        if not _is_array(part) or jnp.iscomplexobj(part):
            raise ValueError(
                f"The {name} is {_kind(part)}; it must be a real number. Return "
                "jdp.Mean(total, weight) with the sum over the examples and their number."
            )
        if jnp.shape(part) != ():
            raise ValueError(
                f"The {name} has the shape {jnp.shape(part)}; it must be a scalar. Return the mean "
                "over the microbatch, or jdp.Mean(total, weight) with the sum over its examples "
                "and their number."
            )
    if not jnp.issubdtype(jnp.result_type(loss.total), jnp.floating):
        raise TypeError(
            f"The loss has the dtype {jnp.result_type(loss.total)}; gradients need a real "
            "floating-point loss. Cast it, or check what the loss function returns."
        )


def _valid(weight: jax.Array) -> jax.Array:
    """The weight, or NaN if it is negative or infinite: it must not pass for a mean."""
    return jnp.where((weight >= 0) & jnp.isfinite(weight), weight, jnp.nan)


def check_params(params: Any) -> None:
    """Refuses parameters that have no gradient, naming the first.

    Raises:
        TypeError: If a leaf is not real floating point.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not _is_array(leaf) and not hasattr(leaf, "dtype"):
            raise TypeError(
                f"The parameter {jax.tree_util.keystr(path)} is {leaf!r}, not an array. Keep "
                "functions and settings out of params; for Equinox models, "
                "eqx.partition(model, eqx.is_inexact_array) takes them apart."
            )
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"The parameter {jax.tree_util.keystr(path)} has the dtype {dtype}; jdp trains "
                "real floating-point parameters. Move integers and flags out of params (into the "
                "loss function's closure, or model_state), and split complex numbers into two."
            )


def count_rows(batch: Any) -> int:
    """The leading size that all leaves of a batch share.

    Raises:
        ValueError: If the batch is empty, a leaf is a scalar, or leading sizes differ.
    """
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    if not leaves:
        raise ValueError("The batch has no arrays in it; there is nothing to split over devices.")
    first_path, first = leaves[0]
    for path, leaf in leaves:
        if jnp.ndim(leaf) == 0:
            raise ValueError(
                f"The batch leaf {jax.tree_util.keystr(path)} is a scalar; every leaf needs a "
                "leading dim of one entry for each example. Put constants into the loss function's "
                "closure."
            )
        if leaf.shape[0] != first.shape[0]:
            raise ValueError(
                f"The batch leaves {jax.tree_util.keystr(first_path)} and "
                f"{jax.tree_util.keystr(path)} have {first.shape[0]} and {leaf.shape[0]} rows; all "
                "leaves must have one row for each example, or they would be paired wrongly."
            )
    if first.shape[0] == 0:
        raise ValueError("The batch has 0 rows; its mean is not defined. Skip empty batches.")
    return int(first.shape[0])


def check_divides(rows: int, replicas: int, axes: Sequence[str], microbatch: int | None) -> int:
    """How many microbatches each replica gets.

    Raises:
        ValueError: If the rows cannot be dealt out evenly, with the nearest numbers that can.
    """
    if microbatch is not None and (not is_whole(microbatch) or microbatch < 1):
        raise ValueError(
            f"microbatch={microbatch!r} must be a positive whole number: the examples that one "
            "device works on at a time."
        )
    unit = replicas * (microbatch or 1)
    if rows % unit:
        below, above = rows // unit * unit, (rows // unit + 1) * unit
        nearest = f"{below} or {above}" if below else f"{above}"
        axis = axes[0] if len(axes) == 1 else tuple(axes)
        times = f" in microbatches of {microbatch}" if microbatch is not None else ""
        raise ValueError(
            f"A batch of {rows} does not divide over the {replicas} replicas of mesh axis "
            f"{axis!r}{times}: the nearest sizes that do are {nearest}. Change the batch size; "
            "for a ragged last batch let jdp.feed pad it with weight zero."
        )
    return rows // unit if microbatch is not None else 1
