"""The loop over the microbatches of the rows that are at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from opt_accumulate._arrays import accumulator_dtype_of, at_least_32_bits, inexact
from opt_accumulate._batch import Sizes, Split, fold, map_rows, take, unfold, zero_rows
from opt_accumulate._losses import (
    Reduction,
    Weighted,
    Weights,
    is_sum,
    read_loss,
    reductions_of,
    select,
    should_skip,
    sum_dtype,
)
from opt_accumulate._placement import axes_of_types, vary

Rng: TypeAlias = bool | Literal["rows"]
Further: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]  # arguments after the microbatch


@dataclass(frozen=True)
class Loop:
    """What happens to each microbatch: the arguments of `accumulate_gradients`."""

    loss_fn: Callable[..., Any]
    sizes: Sizes
    weights: Weights
    has_aux: bool
    aux: Any
    rng: Rng
    skip_fn: Literal["non_finite"] | None
    accumulator_dtype: Any


class Sums(NamedTuple):
    """What is added up."""

    grads: Any  # in the accumulator's dtype
    loss: jax.Array
    weight: jax.Array  # in the dtype of `sum_dtype`
    outputs: Any  # auxiliary ones for `"sum"` and `"mean"`; `None` for others


class Stacks(NamedTuple):
    """What is kept for each microbatch; all leaves begin with that dimension."""

    weights: jax.Array  # those that counted
    skipped: jax.Array
    outputs: Any  # for `"stack"` and `"concat"`, these in the end in the order of the batch


def accumulate(
    loop: Loop,
    split: Split,
    shard_index: Any,
    key: Any,
    params: Any,
    batch: Any,
    further: Further,
    place: Callable[[Any], Any],
) -> tuple[Sums, Stacks]:
    """Sums losses and gradients over microbatches."""
    folded = fold(batch, split)
    args, keywords = further

    def call(params: Any, microbatch: Any, index: Any) -> Weighted:
        kwargs = dict(keywords)
        if loop.rng == "rows":
            rows = jnp.arange(split.size, dtype=jnp.int32) * split.num + index
            rows += shard_index * split.rows
            kwargs["rng"] = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
        elif loop.rng:
            kwargs["rng"] = jax.random.fold_in(key, index + shard_index * split.num)
        output = loop.loss_fn(params, microbatch, *args, **kwargs)
        return read_loss(output, microbatch, loop.weights, loop.has_aux)

    # Not as an argument: a Python scalar of the batch would come out of `eval_shape` as a tracer.
    first = take(folded, 0)
    shapes = jax.eval_shape(lambda params: call(params, first, 0), params)
    if (axes := axes_of_types(shapes.loss)) and any(
        axes - axes_of_types(leaf) for leaf in jax.tree.leaves(params)
    ):
        params = vary(params, axes)
        shapes = jax.eval_shape(lambda params: call(params, first, 0), params)
    rules = reductions_of(shapes.aux, loop.aux, split)
    # What total loss / total weight varies over.
    axes |= axes_of_types(shapes.weight)

    def varying(sums: Sums) -> Sums:
        others: Sums = vary(sums._replace(outputs=None), axes)
        return others._replace(outputs=sums.outputs)  # vary as `loss_fn` has it

    def body(sums: Sums, index: jax.Array) -> tuple[Sums, Stacks]:
        microbatch = take(folded, index)

        def loss_and_rest(params: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            loss, weight, aux = call(params, microbatch, index)
            return loss, (weight, aux)

        (loss, rest), grads = jax.value_and_grad(loss_and_rest, has_aux=True)(params)
        sums, stacks = _add(loop, rules, sums, Weighted(loss, *rest), place(grads))
        return varying(sums), stacks

    def zeros(param: Any) -> jax.Array:
        dtype = accumulator_dtype_of(jnp.result_type(param), loop.accumulator_dtype)
        return jnp.zeros_like(param, dtype=dtype)

    def zero_output(rule: Reduction, output: jax.ShapeDtypeStruct) -> jax.Array | None:
        if rule not in ("sum", "mean"):
            return None
        dtype = inexact(output.dtype) if rule == "mean" else at_least_32_bits(output.dtype)
        zeros = jnp.zeros(output.shape, dtype, device=output.sharding)
        over = axes if rule == "mean" or loop.skip_fn else frozenset()
        varying: jax.Array = vary(zeros, axes_of_types(output) | over)
        return varying

    sums = Sums(
        grads=place(jax.tree.map(zeros, params)),
        loss=jnp.zeros((), at_least_32_bits(shapes.loss.dtype)),
        weight=jnp.zeros((), sum_dtype(shapes.weight.dtype)),
        outputs=jax.tree.map(zero_output, rules, shapes.aux),
    )
    indices = jnp.arange(split.num, dtype=jnp.int32)
    counts = _padding_counts(loop, split, lambda rows: call(params, rows, 0), first)
    sums, stacks = jax.lax.scan(body, varying(sums), indices)
    if counts is not None:
        sums = sums._replace(weight=jnp.where(counts, jnp.nan, sums.weight))

    def in_order(rule: Reduction, output: Any) -> Any:
        return unfold(output, split) if rule == "concat" else output

    return sums, stacks._replace(outputs=jax.tree.map(in_order, rules, stacks.outputs))


def _add(
    loop: Loop, rules: Any, sums: Sums, microbatch: Weighted, grads: Any
) -> tuple[Sums, Stacks]:
    """Adds one microbatch to the sums, if it counts."""
    loss, weight, aux = microbatch
    skip = should_skip(loop.skip_fn, loss, grads, weight)
    counts = ~skip
    if callable(loop.weights):
        # The mean over nothing is often 0/0: it does not count, and is not judged.
        skip, counts = skip & (weight != 0), counts & (weight != 0)
    counted = select(counts, weight)

    def add(total: jax.Array, value: jax.Array) -> jax.Array:
        # Multiplied here and not before differentiating: cotangents of a bfloat16 or float16 loss
        # would be rounded, or overflow, on their way through it. Counts do not fit float16 either.
        if not is_sum(loop.weights):
            wide = inexact(value.dtype)
            value = value.astype(wide) * weight.astype(wide)
        return total + select(counts, value.astype(total.dtype))

    def add_output(rule: Reduction, output: jax.Array, total: jax.Array | None) -> Any:
        if total is None:
            return None
        if rule == "sum":
            return total + (select(~skip, output) if loop.skip_fn else output).astype(total.dtype)
        product = output.astype(total.dtype) * counted.astype(total.dtype)
        return total + select(counted != 0, product)  # where it is 0, outputs may be anything

    def kept(rule: Reduction, output: jax.Array) -> jax.Array | None:
        return None if rule in ("sum", "mean") else output

    sums = Sums(
        grads=jax.tree.map(add, sums.grads, grads),
        loss=add(sums.loss, loss),
        weight=sums.weight + counted.astype(sums.weight.dtype),
        outputs=jax.tree.map(add_output, rules, aux, sums.outputs),
    )
    return sums, Stacks(counted, skip, jax.tree.map(kept, rules, aux))


def _padding_counts(
    loop: Loop, split: Split, call: Callable[[Any], Weighted], microbatch: Any
) -> jax.Array | None:
    """Whether a microbatch of padding alone has a weight, or a loss that is a sum, other than 0."""
    if not split.padding:
        return None
    # In the program, since a mask may be made of anything. A weight that does not depend on the
    # rows cannot be 0 for some of them: that is seen in the jaxpr.
    rows: list[Any] = []
    map_rows(rows.append, microbatch)

    def weight(rows: list[Any]) -> jax.Array:
        remaining = iter(rows)
        return call(map_rows(lambda _: next(remaining), microbatch)).weight

    jaxpr = jax.make_jaxpr(weight)(rows).jaxpr
    _, depends = partial_eval.dce_jaxpr(jaxpr, [True])
    if not any(depends):
        raise loop.sizes.not_divided(split)
    of_padding = call(map_rows(zero_rows, microbatch))
    counts = of_padding.weight != 0
    # The mean over nothing is often 0/0, and has no weight.
    return counts | (of_padding.loss != 0) if is_sum(loop.weights) else counts
