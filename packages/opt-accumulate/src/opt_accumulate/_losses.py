"""What a loss function returns, how much it counts, and when a microbatch is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from opt_accumulate._arrays import at_least_32_bits, inexact
from opt_accumulate._batch import Split, has_rows
from opt_accumulate._placement import any_over, axes_of_types
from opt_accumulate._skip import all_finite
from opt_accumulate._trees import broadcast_prefix, check_choice, described, path_str, what_is_wrong
from opt_accumulate.errors import LossOutputError, OptionError

Reduction: TypeAlias = Literal["stack", "sum", "mean", "concat"]  # of auxiliary outputs
NamedWeights: TypeAlias = Literal["returned", "examples", "mean_of_means"]
Weights: TypeAlias = NamedWeights | Callable[[Any], Any]

_REDUCTIONS = get_args(Reduction)

_CHOICES = """
  weights='returned'       it returns (sum of losses, weight), e.g. the sum over tokens and their \
number
  weights='examples'       it returns the mean over its rows, each counting the same
  weights=f                it returns a mean; f(microbatch) is the weight of that mean
  weights='mean_of_means'  every microbatch counts the same, whatever it holds"""


class Weighted(NamedTuple):
    """One microbatch's loss, in the words of its loss function."""

    loss: jax.Array  # differentiate this
    weight: jax.Array  # of 32 bits or more
    aux: Any  # what else the loss function returned


def check_rules(weights: Any, skip_fn: Any, aux: Any) -> None:
    """Raises an `OptionError` unless these arguments are rules for losses and other outputs."""
    if not callable(weights):
        choices = f", or a function. If the loss function{_CHOICES}"
        check_choice("weights", weights, get_args(NamedWeights), choices)
    check_choice("skip_fn", skip_fn, (None, "non_finite"))
    if wrong := described(aux, _no_reduction):
        listed = ", ".join(map(repr, _REDUCTIONS))
        raise OptionError(
            f"`aux` must be one of {listed}, or a tree of them; it has\n" + "\n".join([*wrong, ""])
        )


def _no_reduction(leaf: Any) -> str:
    return "" if isinstance(leaf, str) and leaf in _REDUCTIONS else repr(leaf)


def is_sum(weights: Weights) -> bool:
    """Whether losses are sums already, or means still to be multiplied by their weight."""
    return weights == "returned"


def sum_dtype(dtype: Any) -> Any:
    """Returns the dtype that weights are summed in, where counts do not wrap."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float64 if dtype.itemsize == 8 else jnp.float32)


def read_loss(output: Any, microbatch: Any, weights: Weights, has_aux: bool) -> Weighted:
    """Takes apart what a loss function returned, or raises a `LossOutputError`."""
    aux = None
    if has_aux:
        if not _is_pair(output):
            raise LossOutputError(
                f"With `has_aux=True` the loss function must return (loss, aux), not "
                f"{_describe(output)}."
            )
        output, aux = output
        if wrong := described(aux, what_is_wrong):
            raise LossOutputError(
                "Auxiliary outputs must be arrays or numbers; `loss_fn` returned\n"
                + "\n".join(wrong)
            )
    if is_sum(weights):
        if not _is_pair(output):
            returned = "((sum of losses, weight), aux)" if has_aux else "(sum of losses, weight)"
            raise LossOutputError(
                f"The loss function must return {returned}, not {_describe(output)}"
                f"{' in the place of the pair' if has_aux else ''}. That is `weights='returned'`; "
                f"say what it returns:{_CHOICES}"
            )
        loss, weight = output
    else:
        loss, weight = output, _weight_of(microbatch, weights)
    return Weighted(
        _scalar_loss(loss), _scalar_weight(weight, weights), jax.tree.map(jnp.asarray, aux)
    )


def should_skip(skip_fn: str | None, loss: jax.Array, grads: Any, weight: jax.Array) -> jax.Array:
    """Returns whether to drop a microbatch."""
    if skip_fn is None:
        return jnp.zeros((), jnp.bool_)
    # Parts of one loss are dropped together, though gradients of parts of parameters differ.
    kept = axes_of_types((loss, weight))
    weight = weight.astype(inexact(weight.dtype))
    return any_over(~all_finite((loss, grads, weight)), kept)


def _weight_of(microbatch: Any, weights: Weights) -> Any:
    if callable(weights):
        return weights(microbatch)
    if weights == "mean_of_means":
        return jnp.int32(1)
    return jnp.int32(next(leaf.shape[0] for leaf in jax.tree.leaves(microbatch) if has_rows(leaf)))


def _scalar_loss(loss: Any) -> jax.Array:
    if not _is_scalar(loss) or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        hint = "Sum or average it over its dimensions."
        if _is_pair(loss):
            hint = (
                "Does the loss function return (sum, weight)? Then give `weights='returned'`. Or "
                "(loss, aux)? Then `has_aux=True`."
            )
        raise LossOutputError(
            "The loss must be one floating-point number (shape (), a real dtype), not "
            f"{_describe(loss)}. {hint}"
        )
    return jnp.asarray(loss)


def _scalar_weight(weight: Any, weights: Weights) -> jax.Array:
    source = "the loss function" if is_sum(weights) else "`weights`"
    dtype = jnp.result_type(weight) if _is_scalar(weight) else None
    if dtype is None or jnp.issubdtype(dtype, jnp.complexfloating):
        raise LossOutputError(
            f"The weight that {source} returns must be one real number, such as `mask.sum()`, not "
            f"{_describe(weight)}."
        )
    return jnp.asarray(weight).astype(at_least_32_bits(dtype))


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _is_scalar(value: Any) -> bool:
    return jax.tree_util.all_leaves([value]) and np.shape(value) == ()


def _describe(value: Any) -> str:
    leaves = jax.tree.leaves(value)
    if len(leaves) == 1 and leaves[0] is value:
        return f"{getattr(value, 'dtype', type(value).__name__)} of shape {np.shape(value)}"
    shapes = jax.tree.map(lambda leaf: tuple(np.shape(leaf)), value)
    return f"a {type(value).__name__} of shapes {shapes}"


def reductions_of(shapes: Any, aux: Any, split: Split) -> Any:
    """Returns a tree of the reduction of each leaf of an auxiliary output."""
    rules = broadcast_prefix(aux, shapes, "aux")

    def fits(rule: Reduction, leaf: Any) -> bool:
        if rule == "concat":
            return bool(leaf.shape[:1] == (split.size,))
        return rule == "stack" or not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)

    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    wrong = [
        f"  {path_str(path)}: {rule!r} of {_describe(leaf)}\n"
        for (path, leaf), rule in zip(leaves, jax.tree.leaves(rules), strict=True)
        if not fits(rule, leaf)
    ]
    if wrong:
        raise LossOutputError(
            f"`aux='concat'` needs outputs with one entry for each of the microbatch's "
            f"{split.size} rows, 'sum' and 'mean' need numbers, but found\n"
            + "".join(wrong)
            + "Take 'stack', or another of these."
        )
    return rules


def select(keep: jax.Array, value: jax.Array) -> jax.Array:
    """Returns `value`, or zeros where it is not kept: selected, since `0 * inf` is NaN."""
    return jnp.where(keep, value, jnp.zeros_like(value))


def divide(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `total / weight`, and zeros for a weight of zero."""
    empty = weight == 0
    wide = inexact(total.dtype)  # counts do not fit float16
    quotient = total.astype(wide) / jnp.where(empty, jnp.ones_like(weight), weight).astype(wide)
    return select(~empty, quotient.astype(total.dtype))
