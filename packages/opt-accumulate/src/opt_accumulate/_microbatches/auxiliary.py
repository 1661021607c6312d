"""What becomes of a loss function's auxiliary outputs over the microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from opt_accumulate._dtypes import at_least_32_bits, inexact
from opt_accumulate._microbatches.batch import Split, unfold
from opt_accumulate._microbatches.varying import axes_of_type, vary
from opt_accumulate._trees import broadcast_prefix, differences, not_numbers, path_str
from opt_accumulate.errors import LossOutputError, OptionError

Reduction: TypeAlias = Literal["stack", "sum", "mean", "concat"]

_REDUCTIONS = get_args(Reduction)


@jax.tree_util.register_static
@dataclass(frozen=True)
class AuxPlan:
    """The auxiliary output of one microbatch, and what to do with each of its leaves.

    Attributes:
      treedef: of the output.
      shapes: of its leaves.
      rules: one for each leaf.
    """

    treedef: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    rules: tuple[Reduction, ...]


def check_reductions(aux: Any) -> None:
    """Raises unless every leaf of `aux` is a reduction.

    Raises:
      OptionError: some are not; lists every path.
    """
    wrong = [
        f"  {path_str(path)}: {leaf!r}\n"
        for path, leaf in jax.tree_util.tree_leaves_with_path(aux)
        if not (isinstance(leaf, str) and leaf in _REDUCTIONS)
    ]
    if wrong:
        raise OptionError(
            "`aux` must be one of 'stack', 'sum', 'mean', 'concat', or a tree of them; it has\n"
            + "".join(wrong)
        )


def plan_aux(output: Any, aux: Any, split: Split) -> AuxPlan:
    """Decides what to do with an auxiliary output.

    Args:
      output: the shapes of one microbatch's.
      aux: reductions, a tree that may end above the leaves of `output`.
      split: the sizes of the microbatches.

    Raises:
      LossOutputError: a leaf to be concatenated has no dimension of rows, or keys are to be summed;
        lists every path.
      OptionError: `aux` does not fit `output`.
    """
    keyed, treedef = jax.tree_util.tree_flatten_with_path(output)
    rules = broadcast_prefix(aux, output, "aux")
    wrong = [
        f"  {path_str(path)}: shape {leaf.shape}\n"
        for (path, leaf), rule in zip(keyed, rules, strict=True)
        if rule == "concat" and leaf.shape[:1] != (split.size,)
    ]
    if wrong:
        raise LossOutputError(
            f"`aux='concat'` needs outputs with one entry for each of the microbatch's "
            f"{split.size} rows, but found\n" + "".join(wrong) + "Take 'stack', 'sum' or 'mean'."
        )
    keys = [
        f"  {path_str(path)}: {leaf.dtype}\n"
        for (path, leaf), rule in zip(keyed, rules, strict=True)
        if rule in ("sum", "mean") and jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    ]
    if keys:
        raise LossOutputError(
            "`aux='sum'` and `'mean'` need outputs that are numbers, but found\n"
            + "".join(keys)
            + "Take 'stack'."
        )
    return AuxPlan(treedef, tuple(leaf for _, leaf in keyed), tuple(rules))


def check_outputs(output: Any) -> None:
    """Raises unless every leaf of an auxiliary output is an array or a number.

    Raises:
      LossOutputError: some are not; lists every path.
    """
    if wrong := not_numbers(output):
        raise LossOutputError(
            "Auxiliary outputs must be arrays or numbers; `loss_fn` returned\n" + "\n".join(wrong)
        )


def check_last(plan: AuxPlan, output: Any, split: Split) -> None:
    """Raises unless the output of the smaller last microbatch fits those of the others.

    Raises:
      LossOutputError: it is another tree, or has leaves of other shapes; lists every path.
    """

    def shape_of(leaf: jax.ShapeDtypeStruct, rule: Reduction) -> jax.ShapeDtypeStruct:
        shape = (split.last, *leaf.shape[1:]) if rule == "concat" else leaf.shape
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    shapes = [shape_of(*pair) for pair in zip(plan.shapes, plan.rules, strict=True)]
    if wrong := differences(jax.tree.unflatten(plan.treedef, shapes), output):
        raise LossOutputError(
            "Auxiliary outputs of the smaller last microbatch do not fit those of the others, of "
            f"{split.last} and {split.size} rows:\n" + "\n".join(wrong) + "\n"
            "Take 'concat' for outputs with one entry for each row; for the other reductions "
            "reduce over the rows in `loss_fn`, or give sizes that divide the batch."
        )


def zero_sums(plan: AuxPlan) -> list[jax.Array]:
    """Returns what the sums begin with: one for each leaf that is summed or averaged."""
    return [
        _zeros(shape, inexact(shape.dtype) if rule == "mean" else at_least_32_bits(shape.dtype))
        for shape, rule in zip(plan.shapes, plan.rules, strict=True)
        if rule in ("sum", "mean")
    ]


def _zeros(shape: jax.ShapeDtypeStruct, dtype: Any) -> jax.Array:
    """Returns zeros that lie and vary as types say, on an Explicit mesh and in `shard_map`."""
    spec = () if shape.sharding is None else tuple(shape.sharding.spec)
    lies = shape.sharding if any(entry is not None for entry in spec) else None
    zeros: jax.Array = vary(jnp.zeros(shape.shape, dtype, device=lies), axes_of_type(shape))
    return zeros


def add_sums(
    plan: AuxPlan, sums: Sequence[jax.Array], aux: Any, weight: jax.Array, keep: jax.Array | None
) -> list[jax.Array]:
    """Adds one microbatch's output to the sums.

    Args:
      plan: what to do.
      sums: as `zero_sums` began them.
      aux: the output.
      weight: of the microbatch, for the means; where it is 0, they may be anything.
      keep: false: the microbatch is as if it never was; `None`: it is kept.
    """
    filled = weight != 0
    added = []
    for leaf, rule in zip(jax.tree.leaves(aux), plan.rules, strict=True):
        if rule == "mean":
            dtype = inexact(jnp.result_type(leaf))
            product = jnp.asarray(leaf, dtype) * weight.astype(dtype)
            added.append(select(filled if keep is None else keep & filled, product))
        elif rule == "sum":
            added.append(select(keep, jnp.asarray(leaf)))
    return [total + leaf.astype(total.dtype) for total, leaf in zip(sums, added, strict=True)]


def select(keep: jax.Array | None, value: jax.Array) -> jax.Array:
    """Returns `value`, or zeros where it is not kept: selected, since `0 * inf` is NaN."""
    return value if keep is None else jnp.where(keep, value, jnp.zeros_like(value))


def stacked_leaves(plan: AuxPlan, aux: Any) -> list[jax.Array]:
    """Returns the leaves that are stacked or concatenated."""
    pairs = zip(jax.tree.leaves(aux), plan.rules, strict=True)
    return [jnp.asarray(leaf) for leaf, rule in pairs if rule in ("stack", "concat")]


def join_last(
    plan: AuxPlan,
    stacked: Sequence[jax.Array],
    last: Sequence[jax.Array] | None,
    split: Split,
) -> list[jax.Array]:
    """Puts the outputs of a smaller last microbatch behind the stacked ones."""
    joined = []
    rules = [rule for rule in plan.rules if rule in ("stack", "concat")]
    for index, (rule, leaf) in enumerate(zip(rules, stacked, strict=True)):
        whole = unfold(leaf, split) if rule == "concat" else leaf
        if last is not None:
            tail = last[index] if rule == "concat" else last[index][None]
            whole = jnp.concatenate([whole, tail])
        joined.append(whole)
    return joined


def finish_aux(
    plan: AuxPlan, sums: Sequence[jax.Array], stacked: Sequence[jax.Array], weight: jax.Array
) -> Any:
    """Returns the auxiliary output of the whole batch.

    Args:
      plan: what was done.
      sums: of the leaves that are summed or averaged.
      stacked: the other leaves.
      weight: of the whole batch.
    """
    remaining_sums, remaining_stacks = iter(sums), iter(stacked)
    leaves = []
    for rule in plan.rules:
        leaf = next(remaining_sums if rule in ("sum", "mean") else remaining_stacks)
        leaves.append(divide(leaf, weight) if rule == "mean" else leaf)
    return jax.tree.unflatten(plan.treedef, leaves)


def divide(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `total / weight`, and zeros for a weight of zero.

    Examples:
      >>> divide(jnp.float16(3), jnp.int32(100_000)).dtype, divide(jnp.float32(1), jnp.int32(0))
      (dtype('float16'), Array(0., dtype=float32))
    """
    empty = weight == 0
    wide = inexact(total.dtype)  # counts do not fit float16
    quotient = total.astype(wide) / jnp.where(empty, jnp.ones_like(weight), weight).astype(wide)
    return select(~empty, quotient.astype(total.dtype))
