"""What becomes of a loss function's auxiliary outputs over the microbatches.

A tree of outputs is parted by reduction: as many trees of the same structure, each with `None` in
the place of the leaves of the others, so that sums and stacks need no description beside them.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from opt_accumulate._arrays import inexact
from opt_accumulate._microbatches.batch import Split
from opt_accumulate._microbatches.varying import axes_of_types, vary
from opt_accumulate._trees import broadcast_prefix, described, not_numbers, path_str
from opt_accumulate.errors import LossOutputError, OptionError

Reduction: TypeAlias = Literal["stack", "sum", "mean", "concat"]

_REDUCTIONS = get_args(Reduction)


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


def only(output: Any, rules: tuple[Reduction, ...], reduction: Reduction) -> Any:
    """Returns the leaves of one reduction, with `None` in the place of the others."""
    leaves, treedef = jax.tree.flatten(output)
    pairs = zip(leaves, rules, strict=True)
    return jax.tree.unflatten(
        treedef, [leaf if rule == reduction else None for leaf, rule in pairs]
    )


def joined(*parts: Any) -> Any:
    """Returns the tree whose leaves `only` has parted."""

    def first(*leaves: Any) -> Any:
        return next((leaf for leaf in leaves if leaf is not None), None)

    return jax.tree.map(first, *parts, is_leaf=lambda leaf: leaf is None)


def zero_sums(shapes: Any, to_dtype: Any) -> Any:
    """Returns zeros that lie and vary as types say, on an Explicit mesh and in `shard_map`."""

    def zeros(shape: jax.ShapeDtypeStruct) -> Any:
        spec = () if shape.sharding is None else tuple(shape.sharding.spec)
        lies = shape.sharding if any(entry is not None for entry in spec) else None
        leaf = jnp.zeros(shape.shape, to_dtype(shape.dtype), device=lies)
        return vary(leaf, axes_of_types(shape))

    return jax.tree.map(zeros, shapes)


def add_sums(sums: Any, output: Any, keep: jax.Array | None) -> Any:
    """Adds outputs of one microbatch to their sums, unless it is not kept."""
    return jax.tree.map(
        lambda total, leaf: total + select(keep, jnp.asarray(leaf)).astype(total.dtype),
        sums,
        output,
    )


def times_weight(output: Any, weight: jax.Array) -> Any:
    """Returns outputs times a weight; where that is 0, they may be anything."""

    def product(leaf: Any) -> jax.Array:
        dtype = inexact(jnp.result_type(leaf))
        return select(weight != 0, jnp.asarray(leaf, dtype) * weight.astype(dtype))

    return jax.tree.map(product, output)


def select(keep: jax.Array | None, value: jax.Array) -> jax.Array:
    """Returns `value`, or zeros where it is not kept: selected, since `0 * inf` is NaN."""
    return value if keep is None else jnp.where(keep, value, jnp.zeros_like(value))


def divide(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `total / weight`, and zeros for a weight of zero."""
    empty = weight == 0
    wide = inexact(total.dtype)  # counts do not fit float16
    quotient = total.astype(wide) / jnp.where(empty, jnp.ones_like(weight), weight).astype(wide)
    return select(~empty, quotient.astype(total.dtype))
