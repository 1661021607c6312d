"""What a loss function returns, how much it counts, and when a microbatch is dropped.

Every rule comes down to a loss and a weight for each microbatch, so that the whole batch has
`sum(loss sums) / sum(weights)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from opt_accumulate._arrays import at_least_32_bits, inexact
from opt_accumulate._batch import Split, has_rows
from opt_accumulate._placement import any_over, axes_of_types
from opt_accumulate._skip import all_finite
from opt_accumulate._trees import broadcast_prefix, described, not_numbers, path_str
from opt_accumulate.errors import LossOutputError, OptionError

Reduction: TypeAlias = Literal["stack", "sum", "mean", "concat"]  # of auxiliary outputs
NamedWeights: TypeAlias = Literal["returned", "examples", "mean_of_means"]
Weights: TypeAlias = NamedWeights | Callable[[Any], Any]
SkipFunction: TypeAlias = Literal["non_finite"] | Callable[[jax.Array, Any, jax.Array], Any]

_NAMED = get_args(NamedWeights)
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


def check_weights(weights: Any) -> None:
    """Raises an `OptionError` unless `weights` is one of the rules."""
    named = isinstance(weights, str) and weights in _NAMED
    if not named and not callable(weights):
        raise OptionError(f"`weights` has no rule {weights!r}. If the loss function{_CHOICES}")


def check_skip_function(skip_fn: Any) -> None:
    """Raises an `OptionError` unless `skip_fn` can say what to drop."""
    named = isinstance(skip_fn, str) and skip_fn == "non_finite"
    if skip_fn is not None and not named and not callable(skip_fn):
        raise OptionError(
            "`skip_fn` must be None, 'non_finite', or a function of (loss, grads, weight) that "
            f"returns whether to drop the microbatch; it is {skip_fn!r}."
        )


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
    if is_sum(weights):
        if not _is_pair(output):
            returned, where = "(sum of losses, weight)", ""
            if has_aux:
                returned, where = f"({returned}, aux)", " in the place of the pair"
            raise LossOutputError(
                f"The loss function must return {returned}, not {_describe(output)}{where}. "
                f"That is `weights='returned'`; say what it returns:{_CHOICES}"
            )
        loss, weight = output
        if not has_aux and _is_pair(loss):
            raise LossOutputError(
                "The loss function must return (sum of losses, weight), not a pair and "
                f"{_describe(weight)}. Does it return ((sum, weight), aux)? Then `has_aux=True`."
            )
    else:
        loss, weight = output, _weight_of(microbatch, weights)
    return Weighted(_scalar_loss(loss), _scalar_weight(weight, weights), aux)


def should_skip(
    skip_fn: SkipFunction | None, loss: jax.Array, grads: Any, weight: jax.Array
) -> jax.Array | None:
    """Returns whether to drop a microbatch; `None` where none ever is."""
    if skip_fn is None:
        return None
    # Parts of one loss are dropped together, though gradients of parts of parameters differ.
    kept = axes_of_types((loss, weight))
    if skip_fn == "non_finite":
        weight = weight.astype(inexact(weight.dtype))
        return any_over(~all_finite((loss, grads, weight)), kept)
    skip = skip_fn(loss, grads, weight)
    dtype = getattr(skip, "dtype", type(skip))
    if isinstance(skip, tuple):
        raise LossOutputError(
            "`skip_fn` must return one truth value, not a tuple. Is it a `should_skip_update_fn` "
            "of `MultiSteps`? Here it is a function of (loss, grads, weight), or 'non_finite'."
        )
    if jnp.shape(skip) != () or dtype not in (bool, jnp.bool_):
        raise LossOutputError(
            f"`skip_fn` must return one truth value (shape (), bool), not {dtype} of shape "
            f"{jnp.shape(skip)}. Join several by `jnp.any`."
        )
    return any_over(jnp.asarray(skip), kept)


def _weight_of(microbatch: Any, weights: Weights) -> Any:
    if callable(weights):
        return weights(microbatch)
    if weights == "mean_of_means":
        return jnp.int32(1)
    return jnp.int32(next(leaf.shape[0] for leaf in jax.tree.leaves(microbatch) if has_rows(leaf)))


def _scalar_loss(loss: Any) -> jax.Array:
    if _is_pair(loss):
        raise LossOutputError(
            f"The loss must be one number, not {_describe(loss)}. Does the loss function return "
            "(sum, weight)? Then give `weights='returned'`. Or (loss, aux)? Then `has_aux=True`."
        )
    if not _is_scalar(loss) or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise LossOutputError(
            f"The loss must be one floating-point number (shape (), a real dtype), not "
            f"{_describe(loss)}. Sum or average it over its dimensions."
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


# Auxiliary outputs.


def check_reductions(aux: Any) -> None:
    """Raises an `OptionError` unless every leaf of `aux` is a reduction; lists every path."""
    if wrong := described(aux, _no_reduction):
        raise OptionError(
            "`aux` must be one of 'stack', 'sum', 'mean', 'concat', or a tree of them; it has\n"
            + "\n".join([*wrong, ""])
        )


def _no_reduction(leaf: Any) -> str:
    return "" if isinstance(leaf, str) and leaf in _REDUCTIONS else repr(leaf)


def check_outputs(output: Any) -> None:
    """Raises a `LossOutputError` unless every leaf is an array or a number; lists every path."""
    if wrong := not_numbers(output):
        raise LossOutputError(
            "Auxiliary outputs must be arrays or numbers; `loss_fn` returned\n" + "\n".join(wrong)
        )


def reductions_of(shapes: Any, aux: Any, split: Split) -> tuple[Reduction, ...]:
    """Returns the reduction of each leaf of an auxiliary output."""
    rules = broadcast_prefix(aux, shapes, "aux")
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    keyed = [(path, leaf, rule) for (path, leaf), rule in zip(leaves, rules, strict=True)]
    wrong = [
        f"  {path_str(path)}: shape {leaf.shape}\n"
        for path, leaf, rule in keyed
        if rule == "concat" and leaf.shape[:1] != (split.size,)
    ]
    if wrong:
        raise LossOutputError(
            f"`aux='concat'` needs outputs with one entry for each of the microbatch's "
            f"{split.size} rows, but found\n" + "".join(wrong) + "Take 'stack', 'sum' or 'mean'."
        )
    keys = [
        f"  {path_str(path)}: {leaf.dtype}\n"
        for path, leaf, rule in keyed
        if rule in ("sum", "mean") and jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    ]
    if keys:
        raise LossOutputError(
            "`aux='sum'` and `'mean'` need outputs that are numbers, but found\n"
            + "".join(keys)
            + "Take 'stack'."
        )
    return tuple(rules)


def of_rule(rule: Reduction, rules: Sequence[Reduction], outputs: Any) -> Any:
    """Returns the outputs of one rule, with `None` in the place of all others."""
    leaves, treedef = jax.tree.flatten(outputs)
    kept = [leaf if own == rule else None for leaf, own in zip(leaves, rules, strict=True)]
    return jax.tree.unflatten(treedef, kept)


def select(keep: jax.Array | None, value: jax.Array) -> jax.Array:
    """Returns `value`, or zeros where it is not kept: selected, since `0 * inf` is NaN."""
    return value if keep is None else jnp.where(keep, value, jnp.zeros_like(value))


def divide(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `total / weight`, and zeros for a weight of zero."""
    empty = weight == 0
    wide = inexact(total.dtype)  # counts do not fit float16
    quotient = total.astype(wide) / jnp.where(empty, jnp.ones_like(weight), weight).astype(wide)
    return select(~empty, quotient.astype(total.dtype))
