"""The loop over the microbatches of the rows that are at hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from opt_accumulate._arrays import accumulator_dtype_of, at_least_32_bits, inexact
from opt_accumulate._batch import (
    Sizes,
    Split,
    fold,
    has_rows,
    row_numbers,
    take,
    unfold,
    zero_rows,
)
from opt_accumulate._losses import (
    Reduction,
    SkipFunction,
    Weighted,
    Weights,
    check_outputs,
    is_sum,
    of_rule,
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
    skip_fn: SkipFunction | None
    accumulator_dtype: Any


class Sums(NamedTuple):
    """What is added up; grads in the accumulator's dtype, the weight in that of `sum_dtype`."""

    grads: Any
    loss: jax.Array
    weight: jax.Array
    added: Any  # outputs for `"sum"`, as `of_rule` has them
    weighted: Any  # outputs for `"mean"`, times their weights


class Stacks(NamedTuple):
    """What is kept for each microbatch; all leaves begin with that dimension."""

    weights: jax.Array  # those that counted
    skipped: jax.Array
    stacked: Any  # outputs for `"stack"`, as `of_rule` has them
    rows: Any  # outputs for `"concat"`; in the end in the order of the batch


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
            rows = row_numbers(split, index) + shard_index * split.rows
            kwargs["rng"] = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
        elif loop.rng:
            kwargs["rng"] = jax.random.fold_in(key, index + shard_index * split.num)
        output = loop.loss_fn(params, microbatch, *args, **kwargs)
        weighted = read_loss(output, microbatch, loop.weights, loop.has_aux)
        check_outputs(weighted.aux)
        return weighted._replace(aux=jax.tree.map(jnp.asarray, weighted.aux))

    # Not as an argument: a Python scalar of the batch would come out of `eval_shape` as a tracer.
    first = take(folded, 0)
    shapes = jax.eval_shape(lambda params: call(params, first, 0), params)
    if (axes := axes_of_types(shapes.loss)) and any(
        axes - axes_of_types(leaf) for leaf in jax.tree.leaves(params)
    ):
        params = vary(params, axes)
        shapes = jax.eval_shape(lambda params: call(params, first, 0), params)
    padding_counts = None
    if split.padding:
        padding_counts = _padding_counts(loop, split, functools.partial(call, params), first)
    rules = reductions_of(shapes.aux, loop.aux, split)
    # What total loss / total weight varies over; so does all that is divided by that weight.
    axes |= axes_of_types(shapes.weight)

    def varying(sums: Sums) -> Sums:
        outputs = {"added": sums.added, "weighted": sums.weighted}  # vary as `loss_fn` has it
        others: Sums = vary(sums._replace(added=None, weighted=None), axes)
        return others._replace(**outputs)

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

    sums = Sums(
        place(jax.tree.map(zeros, params)),
        jnp.zeros((), at_least_32_bits(shapes.loss.dtype)),
        jnp.zeros((), sum_dtype(shapes.weight.dtype)),
        jax.tree.map(
            lambda x: _zeros(x, at_least_32_bits(x.dtype), axes if loop.skip_fn else ()),
            of_rule("sum", rules, shapes.aux),
        ),
        jax.tree.map(
            lambda x: _zeros(x, inexact(x.dtype), axes), of_rule("mean", rules, shapes.aux)
        ),
    )
    indices = jnp.arange(split.num, dtype=jnp.int32)
    sums, stacks = jax.lax.scan(body, varying(sums), indices)
    if padding_counts is not None:
        sums = sums._replace(weight=jnp.where(padding_counts, jnp.nan, sums.weight))
    rows = jax.tree.map(lambda leaf: unfold(leaf, split), stacks.rows)
    return sums, stacks._replace(rows=rows)


def _zeros(output: jax.ShapeDtypeStruct, dtype: Any, axes: Collection[str]) -> jax.Array:
    """What the sum of an output begins with, of the type that it keeps."""
    zeros = jnp.zeros(output.shape, dtype, device=output.sharding)
    varying: jax.Array = vary(zeros, axes_of_types(output).union(axes))
    return varying


def _add(
    loop: Loop, rules: Sequence[Reduction], sums: Sums, microbatch: Weighted, grads: Any
) -> tuple[Sums, Stacks]:
    """Adds one microbatch to the sums, if it counts."""
    loss, weight, aux = microbatch
    filled = weight != 0
    skip = should_skip(loop.skip_fn, loss, grads, weight)
    counts = None
    if callable(loop.weights):
        # The mean over nothing is often 0/0: it is not judged.
        skip = None if skip is None else skip & filled
        counts = filled
    keep = None if skip is None else ~skip
    if keep is not None:
        counts = keep if counts is None else counts & keep

    def contribution(value: jax.Array, dtype: Any) -> jax.Array:
        # Multiplied here and not before differentiating: cotangents of a bfloat16 or float16 loss
        # would be rounded, or overflow, on their way through it. Counts do not fit float16 either.
        if not is_sum(loop.weights):
            wide = inexact(value.dtype)
            value = value.astype(wide) * weight.astype(wide)
        return select(counts, value.astype(dtype))

    counted = select(counts, weight)

    def weighted(total: jax.Array, output: jax.Array) -> jax.Array:
        product = output.astype(total.dtype) * counted.astype(total.dtype)
        return total + select(counted != 0, product)  # where it is 0, outputs may be anything

    added, means = of_rule("sum", rules, aux), of_rule("mean", rules, aux)
    sums = Sums(
        jax.tree.map(lambda a, g: a + contribution(g, a.dtype), sums.grads, grads),
        sums.loss + contribution(loss, sums.loss.dtype),
        sums.weight + counted.astype(sums.weight.dtype),
        jax.tree.map(lambda a, x: a + select(keep, x).astype(a.dtype), sums.added, added),
        jax.tree.map(weighted, sums.weighted, means),
    )
    skipped = jnp.zeros((), jnp.bool_) if skip is None else skip
    stacked, rows = of_rule("stack", rules, aux), of_rule("concat", rules, aux)
    return sums, Stacks(counted, skipped, stacked, rows)


def _padding_counts(
    loop: Loop, split: Split, call: Callable[[Any, int], Weighted], microbatch: Any
) -> jax.Array:
    """Whether a microbatch of padding alone has a weight, or a loss that is a sum, other than 0."""
    # In the program, since a mask may be made of anything. A weight that does not depend on the
    # rows cannot be 0 for some of them: that is seen in the jaxpr.
    rows = jax.tree.map(lambda leaf: leaf if has_rows(leaf) else None, microbatch)

    def with_rows(rows: Any) -> Weighted:
        def leaf(row: Any, shared: Any) -> Any:
            return shared if row is None else row

        return call(jax.tree.map(leaf, rows, microbatch, is_leaf=lambda x: x is None), 0)

    jaxpr = jax.make_jaxpr(lambda rows: with_rows(rows).weight)(rows).jaxpr
    _, depends = partial_eval.dce_jaxpr(jaxpr, [True])
    if not any(depends):
        raise loop.sizes.not_divided(split)
    of_padding = with_rows(jax.tree.map(zero_rows, rows))
    counts = of_padding.weight != 0
    # The mean over nothing is often 0/0, and has no weight.
    return counts | (of_padding.loss != 0) if is_sum(loop.weights) else counts
