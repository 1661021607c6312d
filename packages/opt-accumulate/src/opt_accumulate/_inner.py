"""The optimizer inside: what it gets, what of its answer is kept, and steps that are not made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from opt_accumulate._arrays import cast_like, own_buffers, widen
from opt_accumulate._placement import axes_of_types, vary
from opt_accumulate._trees import check_numbers, differences


class ParamsTransformation(optax.GradientTransformationExtraArgs):
    """A `optax.GradientTransformationExtraArgs` that has `apply` too.

    It goes wherever the pair goes: into `optax.chain`, `optax.partition`, a training loop that
    calls `update`. Where a step may not be made, `apply` is the cheaper way to make it, since
    nothing of the parameters' size is returned to say so.

    Attributes:
      init: from the parameters to a state.
      update: from `(grads, state, params, **extra_args)` to updates and a state.
      apply: from `(params, state, grads, **extra_args)` to the next parameters and state.
    """

    init: Callable[..., Any]
    update: Callable[..., tuple[Any, Any]]
    apply: Callable[..., tuple[Any, Any]]

    def __new__(cls, init: Any, update: Any, apply: Any) -> ParamsTransformation:
        """Takes the functions."""
        self = super().__new__(cls, init, update)
        self.apply = apply
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (*self, self.apply)


class Step(NamedTuple):
    """A step that `emit_if` makes or not: from zeros to updates, or from params to params."""

    make: Callable[[Any, Any], Any]  # from `(carry, operands)` to what takes the carry's place
    carry: tuple[Any, Any]  # updates or parameters, and the optimizer's state
    operands: Any  # what it only reads


class InnerUpdate:
    """An optimizer whose state never changes structure, shapes, dtypes or weak types."""

    def __init__(self, opt: Any) -> None:
        if not hasattr(opt, "init") or not (hasattr(opt, "update") or hasattr(opt, "apply")):
            raise TypeError(
                "`opt` must be a gradient transformation, with `init` and `update`, found "
                f"{opt!r}. Give an optimizer, e.g. `optax.adamw(1e-3)`; for an optimizer "
                "definition: give `opt_optax_bridge.as_transformation(...)` of it."
            )
        self.opt = _with_extra_args(opt)
        self._apply = getattr(opt, "apply", None)

    def init(self, params: Any) -> Any:
        """Returns the optimizer's state, without weak types, in buffers that may be donated."""
        check_numbers(params, "params")
        state = self.opt.init(params)
        return own_buffers(cast_like(state, state), apart_from=params)

    def __call__(
        self, acc: Any, like: Any, state: Any, params: Any, extra_args: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Returns updates and the new state."""
        wide = widen(acc, like)
        try:
            updates, new_state = self.opt.update(wide, state, params, **extra_args)
        except TypeError as error:
            if (dtypes := _dtypes(wide)) != _dtypes(like):
                error.add_note(
                    f"The inner optimizer got gradients of {', '.join(dtypes)}, the accumulator's, "
                    f"not of {', '.join(_dtypes(like))}. If it needs one dtype for all, give it "
                    "float32 parameters, or `accumulator_dtype=None` to accumulate in theirs."
                )
            raise
        return updates, _like_old(new_state, state)

    def apply(
        self, acc: Any, like: Any, state: Any, params: Any, extra_args: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Returns new parameters, by the optimizer's own `apply` if it has one, and state."""
        if self._apply is None:
            updates, new_state = self(acc, like, state, params, extra_args)
            return cast_like(optax.apply_updates(params, updates), params), new_state
        taken = _taken(self._apply, extra_args)
        new_params, new_state = self._apply(params, state, widen(acc, like), **taken)
        return cast_like(new_params, params), _like_old(new_state, state)

    def updating(
        self, acc: Any, like: Any, state: Any, params: Any, extra_args: Mapping[str, Any]
    ) -> Step:
        """Returns a step from zeros to updates, such as gradients `like` would give."""
        inner = self
        # It is traced once, though it is asked for shapes first. What is not an array has to stay
        # as it is, and costs a second trace.
        if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(extra_args)):
            update: Any = jax.jit(lambda *args, **keywords: self.opt.update(*args, **keywords))
            inner = InnerUpdate(self.opt._replace(update=update))

        def make(carry: Any, operands: Any) -> Any:
            updates, new = inner(operands[0], like, carry[1], *operands[1:])
            return cast_like(updates, carry[0]), new

        shapes = jax.eval_shape(lambda: inner.opt.update(like, state, params, **extra_args)[0])
        zeros = jax.tree.map(jnp.zeros_like, shapes)
        return Step(make, (zeros, cast_like(state, state)), (acc, params, extra_args))

    def applying(
        self, acc: Any, like: Any, state: Any, params: Any, extra_args: Mapping[str, Any]
    ) -> Step:
        """Returns a step from parameters to parameters."""

        def make(carry: Any, operands: Any) -> Any:
            acc, extra_args = operands
            return self.apply(acc, like, carry[1], carry[0], extra_args)

        carry = cast_like(params, params), cast_like(state, state)
        return Step(make, carry, (acc, extra_args))


def _dtypes(tree: Any) -> list[str]:
    return sorted({str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree)})


def _with_extra_args(opt: Any) -> optax.GradientTransformationExtraArgs:
    if not hasattr(opt, "update"):
        return optax.GradientTransformationExtraArgs(opt.init, _no_update)
    if hasattr(opt, "gradient_transformation"):  # a `MultiSteps`, of ours or of Optax
        return _with_extra_args(opt.gradient_transformation())
    if isinstance(opt, optax.GradientTransformation):
        return optax.with_extra_args_support(opt)  # type: ignore[attr-defined]

    def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return opt.update(grads, state, params, **_taken(opt.update, extra_args))

    init_and_update: Any = opt.init, update  # Optax's type of `update` lacks the extra arguments
    return optax.GradientTransformationExtraArgs(*init_and_update)


def _taken(function: Any, extra_args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns those of the extra arguments that a function takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return extra_args
    return {name: value for name, value in extra_args.items() if name in parameters}


def _no_update(*_: Any, **__: Any) -> Any:
    raise TypeError("the optimizer has `apply` alone: call `apply(params, state, grads)`, too.")


def _like_old(new: Any, old: Any) -> Any:
    if wrong := differences(old, new):
        raise TypeError(
            "the inner optimizer `opt` returned another state than it was given:\n"
            + "\n".join(wrong)
            + "\nA state must keep its structure and shapes from `init` on: otherwise no compiled "
            "step can take it back."
        )
    return cast_like(new, old)


def emit_if(
    emit: jax.Array, body: Callable[[Any, Any], Any], carry: Any, operands: Any
) -> tuple[jax.Array, Any]:
    """Returns `body(carry, operands)` where `emit` is true, `carry` otherwise."""
    # A loop of no or one trip, whose carry stays in place: `lax.cond` copies what passes through.
    # It is not folded where `emit` is static: XLA would copy the accumulator that it reads.
    # Under `shard_map` it may be made on some devices only: its results then vary over them.
    limit, axes = emit.astype(jnp.int32), axes_of_types(emit)

    def trip(counted: tuple[jax.Array, Any]) -> Any:
        count, carry = counted
        return vary((count + 1, body(carry, _tied_to(count, operands))), axes)

    start = vary((jnp.int32(0), carry), axes)
    trips, carry = lax.while_loop(lambda counted: counted[0] < limit, trip, start)
    return trips > 0, carry


def zeros_if(done: jax.Array, tree: Any) -> Any:
    """Returns zeros where `done`, of `emit_if`, is true, `tree` otherwise."""
    # When this overwrites `tree`, all that reads it has been computed: XLA need not copy it.
    return emit_if(done, lambda carry, _: jax.tree.map(jnp.zeros_like, carry), tree, ())[1]


def _tied_to(count: jax.Array, tree: Any) -> Any:
    """Ties arrays to the loop's count: what does not depend on it, XLA computes before the loop."""
    # One by one: what passes a barrier together varies, under `shard_map`, over the same axes.

    def tie(leaf: Any) -> Any:
        return lax.optimization_barrier((count, leaf))[1] if _is_plain_array(leaf) else leaf

    return jax.tree.map(tie, tree)


def _is_plain_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
