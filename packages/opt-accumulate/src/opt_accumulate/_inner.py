"""The optimizer inside: what it gets, what of its answer is kept, and steps that are not made."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from opt_accumulate._arrays import cast_like, own_buffers, widen
from opt_accumulate._trees import differences


class ParamsTransformation(optax.GradientTransformationExtraArgs):
    """A `optax.GradientTransformationExtraArgs` that has `apply` too.

    It goes wherever the pair goes: into `optax.chain`, `optax.partition`, a training loop that
    calls `update`. Where a step may not be made, `apply` is the cheaper way to make it, since
    nothing of the parameters' size is returned to say so.

    Attributes:
      init: from the parameters to a state.
      update: from `(grads, state, params, **extra_args)` to updates and a state.
    """

    init: Callable[..., Any]
    update: Callable[..., tuple[Any, Any]]

    def __new__(cls, init: Any, update: Any, apply: Any = None) -> ParamsTransformation:
        """Takes the functions; without `apply` there is the one that the other two imply."""
        self = super().__new__(cls, init, update)
        if apply is not None:
            vars(self)["apply"] = apply
        return self

    def apply(self, params: Any, state: Any, grads: Any, **extra_args: Any) -> tuple[Any, Any]:
        """Makes one step.

        Args:
          params: the parameters.
          state: the state.
          grads: the gradients.
          **extra_args: those of `update`.

        Returns:
          The new parameters and the new state.
        """
        updates, state = self.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (*self, *(vars(self)[name] for name in ("apply",) if name in vars(self)))


class InnerUpdate:
    """An optimizer whose state never changes structure, shapes, dtypes or weak types."""

    def __init__(self, opt: Any, *, takes_apply: bool = False) -> None:
        acts = hasattr(opt, "update") or (takes_apply and hasattr(opt, "apply"))
        if not (hasattr(opt, "init") and acts):
            raise TypeError(
                "`opt` must be a gradient transformation, with `init` and `update`, found "
                f"{opt!r}. Give an optimizer, e.g. `optax.adamw(1e-3)`; for an optimizer "
                "definition: give `opt_optax_bridge.as_transformation(...)` of it."
            )
        self.opt = _with_extra_args(opt)
        self._apply = getattr(opt, "apply", None)

    def init(self, params: Any) -> Any:
        """Returns the optimizer's state, without weak types, in buffers that may be donated."""
        state = self.opt.init(params)
        return own_buffers(cast_like(state, state), apart_from=params)

    def __call__(
        self, acc: Any, like: Any, state: Any, params: Any, extra_args: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Makes one step; `acc` goes in no narrower dtypes than its own and those of `like`."""
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
        _check_state(state, new_state)
        return updates, cast_like(new_state, state)

    def apply(
        self, params: Any, state: Any, grads: Any, extra_args: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Makes one step by the optimizer's own `apply`, if it has one; keeps all dtypes."""
        if self._apply is None:
            updates, new_state = self(grads, grads, state, params, extra_args)
            return cast_like(optax.apply_updates(params, updates), params), new_state
        new_params, new_state = self._apply(params, state, grads, **extra_args)
        _check_state(state, new_state)
        return cast_like(new_params, params), cast_like(new_state, state)

    def traced_once(self, extra_args: Mapping[str, Any]) -> InnerUpdate:
        """Returns the same, for one step, which is traced once though `updates_like` is asked."""
        # What is not an array has to stay as it is, and costs a second trace.
        if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(extra_args)):
            return self

        def update(grads: Any, state: Any, params: Any, **extra_args: Any) -> Any:
            return self.opt.update(grads, state, params, **extra_args)

        again = copy.copy(self)
        again.opt = optax.GradientTransformationExtraArgs(self.opt.init, jax.jit(update))
        return again

    def updates_like(
        self, grads: Any, state: Any, params: Any, extra_args: Mapping[str, Any]
    ) -> Any:
        """Returns shape, dtype and sharding of the updates that these gradients would give."""
        return jax.eval_shape(lambda: self.opt.update(grads, state, params, **extra_args)[0])


def _dtypes(tree: Any) -> list[str]:
    return sorted({str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree)})


def _with_extra_args(opt: Any) -> optax.GradientTransformationExtraArgs:
    if isinstance(opt, optax.GradientTransformationExtraArgs):
        return opt
    if not hasattr(opt, "update"):
        return optax.GradientTransformationExtraArgs(opt.init, _no_update)
    if hasattr(opt, "gradient_transformation"):  # a `MultiSteps`, of ours or of Optax
        return _with_extra_args(opt.gradient_transformation())

    if not isinstance(opt, optax.GradientTransformation) and _takes_any_keyword(opt.update):
        return optax.GradientTransformationExtraArgs(opt.init, opt.update)

    def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        del extra_args
        return opt.update(grads, state, params)

    init_and_update: Any = opt.init, update  # Optax's type of `update` lacks the extra arguments
    return optax.GradientTransformationExtraArgs(*init_and_update)


def _takes_any_keyword(function: Any) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _no_update(*_: Any, **__: Any) -> Any:
    raise TypeError("the optimizer has `apply` alone: call `apply(params, state, grads)`, too.")


def _check_state(old: Any, new: Any) -> None:
    if wrong := differences(old, new):
        raise TypeError(
            "the inner optimizer `opt` returned another state than it was given:\n"
            + "\n".join(wrong)
            + "\nA state must keep its structure and shapes from `init` on: otherwise no compiled "
            "step can take it back."
        )


def emit_if(
    emit: jax.Array, body: Callable[[Any, Any], Any], carry: Any, operands: Any
) -> tuple[jax.Array, Any]:
    """Returns `body(carry, operands)` where `emit` is true, `carry` otherwise."""
    # A loop of no or one trip, whose carry stays in place: `lax.cond` copies what passes through.
    # It is not folded where `emit` is static: XLA would copy the accumulator that it reads.
    limit = emit.astype(jnp.int32)

    def trip(counted: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        count, carry = counted
        return count + 1, body(carry, _tied_to(count, operands))

    trips, carry = lax.while_loop(lambda counted: counted[0] < limit, trip, (jnp.int32(0), carry))
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
