"""The inner optimizer: what it gets, and what of its answer is kept."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from opt_accumulate._arrays import cast_like, own_buffers, widen
from opt_accumulate._trees import differences


class InnerUpdate:
    """An optimizer whose state never changes structure, shapes, dtypes or weak types."""

    def __init__(self, opt: Any, *, takes_apply: bool = False) -> None:
        acts = hasattr(opt, "update") or (takes_apply and hasattr(opt, "apply"))
        if not (hasattr(opt, "init") and acts):
            is_definition = hasattr(opt, "init_state") and hasattr(opt, "apply_gradient")
            raise TypeError(
                "`opt` must be a gradient transformation, with `init` and `update`, found "
                f"{opt!r}. "
                + (
                    "It is an optimizer definition: give "
                    "`opt_optax_bridge.as_transformation(...)` of it."
                    if is_definition
                    else "Give an optimizer, e.g. `optax.adamw(1e-3)`."
                )
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
