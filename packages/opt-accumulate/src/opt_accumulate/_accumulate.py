"""`jax.value_and_grad` over a batch that is too large to be differentiated at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from opt_accumulate._arrays import check_dtype
from opt_accumulate._batch import Sizes, batch_rows, check_devices
from opt_accumulate._deferred import accumulate_deferred, check_axes, find_mesh
from opt_accumulate._loop import Loop, Rng, Stacks, Sums, accumulate
from opt_accumulate._losses import Weights, check_rules, divide
from opt_accumulate._placement import leaf_shardings, like_params, place, sum_as_like
from opt_accumulate._trees import (
    broadcast_prefix,
    check_choice,
    check_integer,
    described,
    what_is_wrong,
)
from opt_accumulate.errors import OptionError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AccumulationMetrics:
    """What happened to the microbatches of one batch.

    Attributes:
      weight: scalar float32 (float64 for weights of 64 bits): the total weight that losses and
        gradients were divided by; where it is 0, they are zeros.
      weights: (microbatches,): the weight of each; 0 where it was dropped.
      skipped: (microbatches,) bool: whether `skip_fn` dropped it.
    """

    weight: jax.Array
    weights: jax.Array
    skipped: jax.Array


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    *,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
    weights: Weights = "returned",
    has_aux: bool = False,
    aux: Any = "stack",
    rng: Rng = False,
    skip_fn: Literal["non_finite"] | None = None,
    with_metrics: bool = False,
    accumulator_dtype: Any = jnp.float32,
    reduce: Literal["auto", "deferred"] = "auto",
    data_axes: str | Sequence[str] = "data",
    mesh: Mesh | AbstractMesh | None = None,
    out_shardings: Any = None,
) -> Callable[..., tuple[Any, Any]]:
    """Returns a `jax.value_and_grad` of `loss_fn` that goes through the batch in small parts.

    The result is that of the full batch at once, `sum of losses / sum of weights` and its
    gradient, to rounding; memory holds the activations of one microbatch and one accumulator.
    Microbatch `i` of `n` has the rows `i, i + n, i + 2n, ...`: no row of a sharded batch moves to
    another device where each device has a multiple of `n` rows; `mesh` has that checked.

    Inside a `jax.shard_map` over the rows the result is that of `jax.value_and_grad` there; the
    gradient of parameters that all devices share is summed over them once, at the end.

    Args:
      loss_fn: `loss_fn(params, microbatch, *args, **kwargs)`. Scalars of the batch (Python's
        numbers, arrays without axes) are in every microbatch as they are. `weights` and `has_aux`
        say what it returns.
      num_microbatches: how many microbatches; give this or `microbatch_size`. A batch that does not
        divide is padded with rows of zeros. Their weight must be 0, and under `"returned"` their
        loss too, thus by a mask in the batch that is 0 where nothing counts (labels of -100 are
        not: pad with these yourself). A weight that does not depend on the rows is an error; if
        rows of zeros count for another reason, loss and gradients are NaN.
      microbatch_size: rows of a microbatch.
      weights: what the loss is and how much it counts. `"returned"`: `loss_fn` returns
        `(sum of losses, weight)`, such as the sum over tokens that are not masked, and their
        number. `"examples"`: it returns a mean in which every row counts the same. A function: it
        returns a mean whose weight is `weights(microbatch)`; where that is 0 the mean may be
        anything. `"mean_of_means"`: every microbatch counts the same, which is not the mean over
        tokens where their numbers differ. Weights are summed in float32, and have no gradient.
      has_aux: whether `loss_fn` returns `(loss, aux)`, under `"returned"` thus
        `((sum, weight), aux)`.
      aux: what becomes of the auxiliary outputs: `"stack"` (a new first dimension),
        `"sum"` (of all that `skip_fn` did not drop, those of weight 0 and rows of padding too;
        integers stay integers, of 32 bits at least), `"mean"` (by weight; where that is 0 they may
        be anything), `"concat"` (outputs for each row, in the order of the batch), or a tree of
        these that may end above the leaves.
      rng: whether `loss_fn` takes a key, by the name `rng`: `True`, `jax.random.fold_in(key, i)` in
        microbatch `i`; `"rows"`: an array of keys, `fold_in(key, r)` for row `r` of the batch, so
        that draws do not depend on the number of microbatches.
      skip_fn: `"non_finite"`: to drop microbatches whose loss, weight or gradients are not finite,
        with their weights, as if the batch did not have them. Where a function `weights` says 0,
        there is nothing to drop.
      with_metrics: whether to return an `AccumulationMetrics` too.
      accumulator_dtype: of the sum of gradients and of what is returned, real, of 16 bits or more.
        Complex and float64 gradients stay so. `None`: the gradients' own.
      reduce: when gradients are added up over the devices of a sharded batch. `"auto"`: where
        the compiler sees fit, which is in every microbatch. `"deferred"`: once, at the end; each
        device goes through its own rows and keeps an accumulator of the parameters' size (as they
        are sharded over other mesh axes). `loss_fn` then sees one device's part of a microbatch,
        on a mesh without `data_axes`: sharding constraints in it are `PartitionSpec`s of other
        axes, without a mesh. For `rng`, `skip_fn`, `"stack"` and the metrics part `d` of
        microbatch `i` is microbatch `d * n + i`.
      data_axes: the mesh axes that the batch is sharded over, all of them; for `"deferred"` and
        `mesh`.
      mesh: for `"deferred"`, by default that of `out_shardings` or of `jax.set_mesh`. With
        `"auto"` it is an error if a microbatch does not divide over `data_axes` of `mesh`; without
        `mesh` that is known on Explicit meshes only, and on Auto meshes the compiler then gathers
        the batch.
      out_shardings: where the accumulator and the returned gradients lie: a `NamedSharding`, or a
        tree of them like the parameters that may end early. `None`: like the parameters where
        that is known: on Explicit meshes and, on others, outside of `jax.jit`. Under `jit` on Auto
        meshes it is the compiler's choice, and with `"deferred"` each device has complete
        gradients: give `out_shardings` with parameters sharded over `data_axes` (FSDP).
        Sharded over `data_axes` (ZeRO-2), `"auto"` keeps a part of the accumulator on each
        device, and `"deferred"` ends in a reduce-scatter.

    Returns:
      `value_and_grad(params, batch, *args, **kwargs)`, with a keyword `rng` for the key. It
      returns `(loss, grads)`; in the place of `loss`, `(loss, aux)`, `(loss, metrics)` or
      `(loss, aux, metrics)` where these are asked for. `*args` and `**kwargs` go to `loss_fn` as
      they are, arrays or not. Call it under `jax.jit`, which makes arrays of Python's bools and
      numbers but for those in `static_argnames`.

    Raises:
      OptionError: arguments that do not exist or do not go together.

    Examples:
      >>> def loss_fn(w, batch):
      ...     error = (batch['x'] * w - 1.0) ** 2 * batch['mask']
      ...     return error.sum(), batch['mask'].sum()
      >>> batch = {'x': jnp.arange(4.0), 'mask': jnp.array([1.0, 1.0, 0.0, 1.0])}
      >>> loss, grad = accumulate_gradients(loss_fn, num_microbatches=2)(jnp.float32(2.0), batch)
      >>> print(f'{loss:.4f} {grad:.4f}')
      9.0000 10.6667
    """
    if not callable(loss_fn):
        raise OptionError(
            f"`loss_fn` must be a function of (params, microbatch); it is {loss_fn!r}."
        )
    sizes = _check_sizes(num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    check_rules(weights, skip_fn, aux)
    if accumulator_dtype is not None:
        check_dtype("accumulator_dtype", accumulator_dtype, 16)
    if aux != "stack" and not has_aux:
        raise OptionError(
            f"`aux`={aux!r} needs `has_aux=True`: without it there are no auxiliary outputs."
        )
    axes = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
    if not axes:
        raise OptionError("`data_axes` must name the mesh axes of the batch; it is empty.")
    if mesh is not None:
        check_axes(mesh, axes)
    check_choice("rng", rng, (False, True, "rows"))
    check_choice("reduce", reduce, ("auto", "deferred"))
    loop = Loop(loss_fn, sizes, weights, has_aux, aux, rng, skip_fn, accumulator_dtype)

    @jax.named_scope("accumulate_gradients")
    def value_and_grad(
        params: Any, batch: Any, /, *args: Any, rng: Any = None, **kwargs: Any
    ) -> tuple[Any, Any]:
        _check_key(loop.rng, rng)
        _check_params(params)
        further = args, kwargs
        shardings = leaf_shardings(out_shardings, params)
        if reduce == "deferred":
            over = find_mesh(mesh, shardings, axes)
            shardings = like_params(shardings, params, over)
            sums, stacks = accumulate_deferred(
                loop, over, axes, shardings, rng, params, batch, further
            )
        else:
            shardings = like_params(shardings, params)
            split = sizes.of(batch_rows(batch))
            if mesh is not None:
                check_devices(split, mesh, axes, "`data_axes`")
            keep_place = functools.partial(place, shardings=shardings)
            sums, stacks = accumulate(loop, split, 0, rng, params, batch, further, keep_place)

        grads, loss = jax.tree.map(
            lambda total: divide(total, sums.weight), (sums.grads, sums.loss)
        )
        value: tuple[Any, ...] = (loss,)
        if has_aux:
            value += (_outputs(aux, sums, stacks),)
        if with_metrics:
            value += (AccumulationMetrics(sums.weight, stacks.weights, stacks.skipped),)
        grads = place(sum_as_like(grads, params), shardings)
        return (value if len(value) > 1 else value[0]), grads

    return value_and_grad


def _outputs(aux: Any, sums: Sums, stacks: Stacks) -> Any:
    """The auxiliary outputs of the batch: each is in one of two trees, in the other is `None`."""
    both = jax.tree.map(
        lambda total, output: output if total is None else total,
        sums.outputs,
        stacks.outputs,
        is_leaf=lambda x: x is None,
    )
    rules = broadcast_prefix(aux, both, "aux")
    return jax.tree.map(lambda r, x: divide(x, sums.weight) if r == "mean" else x, rules, both)


def _check_sizes(**asked: Any) -> Sizes:
    given = [name for name, value in asked.items() if value is not None]
    if len(given) != 1:
        found = " and ".join(map(repr, asked.values()))
        raise OptionError(
            f"Give `num_microbatches` or `microbatch_size`, one of them: they are {found}."
        )
    (name,) = given
    return Sizes(name, check_integer(name, asked[name], 1))


def _check_params(params: Any) -> None:
    if wrong := described(params, lambda leaf: what_is_wrong(leaf) or _not_inexact(leaf)):
        raise OptionError(
            "`params` must be arrays of floating-point or complex numbers, to differentiate by; "
            "found\n" + "\n".join(wrong) + "\nPass counters, keys and other state that is not "
            "learned as a further argument."
        )


def _not_inexact(leaf: Any) -> str:
    dtype = jnp.result_type(leaf)
    return "" if jnp.issubdtype(dtype, jnp.inexact) else str(dtype)


def _check_key(wanted: Rng, key: Any) -> None:
    if wanted is not False and key is None:
        raise OptionError(
            f"`accumulate_gradients(..., rng={wanted!r})` needs a key: call the returned function "
            "with the keyword `rng=jax.random.key(...)`."
        )
    if wanted is False and key is not None:
        raise OptionError(
            "A key `rng` was given, but `loss_fn` takes none: say so by "
            "`accumulate_gradients(..., rng=True)` (or 'rows'). One key for all microbatches is a "
            "further argument: pass it by position, or by another name."
        )
