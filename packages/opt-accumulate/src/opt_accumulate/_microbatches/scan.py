"""The loop over the microbatches of the rows that are at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from opt_accumulate._dtypes import accumulator_dtype_of, at_least_32_bits, inexact
from opt_accumulate._microbatches import auxiliary
from opt_accumulate._microbatches.auxiliary import AuxPlan, select
from opt_accumulate._microbatches.batch import Split, fold, row_numbers, take, take_last
from opt_accumulate._microbatches.call import Further, call_loss
from opt_accumulate._microbatches.skipping import SkipFunction, should_skip
from opt_accumulate._microbatches.varying import axes_of_type, vary
from opt_accumulate._microbatches.weighted import Weighted, Weights, is_sum, read_loss, sum_dtype

Rng: TypeAlias = bool | Literal["rows"]


@dataclass(frozen=True)
class Loop:
    """What happens to each microbatch.

    Attributes:
      loss_fn: the user's.
      weights: what it returns.
      has_aux: whether it returns more.
      aux: reductions of that.
      rng: whether it takes a key, or one key for each row.
      skip_fn: which microbatches to drop.
      accumulator_dtype: of the sum of gradients.
      unroll: that of `jax.lax.scan`.
    """

    loss_fn: Callable[..., Any]
    weights: Weights
    has_aux: bool
    aux: Any
    rng: Rng
    skip_fn: SkipFunction | None
    accumulator_dtype: Any
    unroll: int | bool


class Sums(NamedTuple):
    """What is added up.

    Attributes:
      grads: like the parameters, in the accumulator's dtype.
      loss: scalar.
      weight: scalar, of `sum_dtype`.
      aux: the leaves of the auxiliary output that are summed or averaged.
    """

    grads: Any
    loss: jax.Array
    weight: jax.Array
    aux: list[jax.Array]


class Stacks(NamedTuple):
    """What is kept for each microbatch; all leaves begin with that dimension.

    Attributes:
      weights: those that counted.
      skipped: whether it was dropped.
      aux: the leaves of the auxiliary output that are stacked or concatenated.
    """

    weights: jax.Array
    skipped: jax.Array
    aux: list[jax.Array]


class BatchShard(NamedTuple):
    """The part of a batch that one call of `accumulate` sums.

    Attributes:
      index: of this shard.
      rng: the key of the whole batch; `None` without.
    """

    index: Any
    rng: Any


def accumulate(
    loop: Loop,
    split: Split,
    shard: BatchShard,
    params: Any,
    batch: Any,
    further: Further,
    place: Callable[[Any], Any],
) -> tuple[Sums, Stacks, AuxPlan]:
    """Sums losses and gradients over microbatches.

    Args:
      loop: what happens to each.
      split: of the rows of `batch`.
      shard: which part of the whole batch this is.
      params: to differentiate by.
      batch: leaves of `split.rows` rows, and scalars.
      further: arguments of the loss function.
      place: puts a tree like the gradients where the accumulator lies.
    """
    folded = fold(batch, split)

    def keys(index: Any, rows: Any) -> jax.Array | None:
        if loop.rng is False:
            return None
        if loop.rng == "rows":
            rows = rows + shard.index * split.rows
            return jax.vmap(jax.random.fold_in, (None, 0))(shard.rng, rows)
        return jax.random.fold_in(shard.rng, index + shard.index * split.total)

    def weighted(params: Any, microbatch: Any, key: jax.Array | None) -> Weighted:
        output = call_loss(loop.loss_fn, params, microbatch, further, key)
        found = read_loss(output, microbatch, loop.weights, loop.has_aux)
        auxiliary.check_outputs(found.aux)
        return found

    # Not as arguments: a Python scalar of the batch would come out of `eval_shape` as a tracer.
    first = take(folded, 0), keys(0, row_numbers(split, 0))
    shapes = jax.eval_shape(lambda params: weighted(params, *first), params)
    if (axes := axes_of_type(shapes.loss)) and any(
        axes - axes_of_type(leaf) for leaf in jax.tree.leaves(params)
    ):
        params = vary(params, axes)
        shapes = jax.eval_shape(lambda params: weighted(params, *first), params)
    plan = auxiliary.plan_aux(shapes.aux, loop.aux, split)
    # What total loss / total weight varies over; so does all that is divided by that weight.
    axes |= axes_of_type(shapes.weight)

    def step(sums: Sums, one: Callable[[Any], Weighted]) -> tuple[Sums, Stacks]:
        sums, stacks = _step(loop, plan, place, sums, one, params)
        return vary(sums, axes), stacks

    def body(sums: Sums, index: jax.Array) -> tuple[Sums, Stacks]:
        microbatch, key = take(folded, index), keys(index, row_numbers(split, index))
        return step(sums, lambda p: weighted(p, microbatch, key))

    def smaller(params: Any) -> Weighted:
        rows = jnp.arange(split.num * split.size, split.rows, dtype=jnp.int32)
        output = weighted(params, take_last(batch, split), keys(split.num, rows))
        auxiliary.check_last(plan, output.aux, split)
        return output

    sums = Sums(
        place(_zero_gradients(params, loop.accumulator_dtype)),
        jnp.zeros((), at_least_32_bits(shapes.loss.dtype)),
        jnp.zeros((), sum_dtype(shapes.weight.dtype)),
        auxiliary.zero_sums(plan),
    )
    sums = vary(sums, axes)
    indices = jnp.arange(split.num, dtype=jnp.int32)
    sums, stacks = jax.lax.scan(body, sums, indices, unroll=loop.unroll)
    last = None
    if split.last:
        sums, last = step(sums, smaller)
    return sums, _join(plan, stacks, last, split), plan


def _zero_gradients(params: Any, dtype: Any) -> Any:
    return jax.tree.map(
        lambda p: jnp.zeros_like(p, dtype=accumulator_dtype_of(jnp.result_type(p), dtype)), params
    )


def _step(
    loop: Loop,
    plan: AuxPlan,
    place: Callable[[Any], Any],
    sums: Sums,
    weighted: Callable[[Any], Weighted],
    params: Any,
) -> tuple[Sums, Stacks]:
    def loss_and_rest(params: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        loss, weight, aux = weighted(params)
        return loss, (weight, aux)

    (loss, (weight, aux)), grads = jax.value_and_grad(loss_and_rest, has_aux=True)(params)
    grads = place(grads)
    filled = weight != 0
    skip = should_skip(loop.skip_fn, loss, grads, weight)
    keep = None
    if callable(loop.weights):
        # The mean over nothing is often 0/0: it is not judged.
        skip = None if skip is None else skip & filled
        keep = filled
    if skip is not None:
        keep = ~skip if keep is None else keep & ~skip

    def contribution(value: jax.Array, dtype: Any) -> jax.Array:
        # Multiplied here and not before differentiating: cotangents of a bfloat16 or float16 loss
        # would be rounded, or overflow, on their way through it. Counts do not fit float16 either.
        if not is_sum(loop.weights):
            wide = inexact(value.dtype)
            value = value.astype(wide) * weight.astype(wide)
        return select(keep, value.astype(dtype))

    counted = select(keep, weight)
    sums = Sums(
        jax.tree.map(lambda a, g: a + contribution(g, a.dtype), sums.grads, grads),
        sums.loss + contribution(loss, sums.loss.dtype),
        sums.weight + counted.astype(sums.weight.dtype),
        auxiliary.add_sums(plan, sums.aux, aux, weight, None if skip is None else ~skip),
    )
    skipped = jnp.zeros((), jnp.bool_) if skip is None else skip
    return sums, Stacks(counted, skipped, auxiliary.stacked_leaves(plan, aux))


def _join(plan: AuxPlan, stacks: Stacks, last: Stacks | None, split: Split) -> Stacks:
    if last is None:
        return stacks._replace(aux=auxiliary.join_last(plan, stacks.aux, None, split))
    return Stacks(
        jnp.concatenate([stacks.weights, last.weights[None]]),
        jnp.concatenate([stacks.skipped, last.skipped[None]]),
        auxiliary.join_last(plan, stacks.aux, last.aux, split),
    )
