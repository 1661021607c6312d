"""Names from other libraries and their equivalents here, for error messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opt_core._paths import flatten_with_paths, path_str

_UPDATE = "`optimizer = optimizer.apply_gradient(grads)`"
_RATE = (
    "`optimizer.apply_gradient(grads, learning_rate=...)` to give one, "
    "`opt_optax_bridge.resolve_hyper_params(optimizer).learning_rate` to read it"
)
_FOR_OPTIMIZERS = {
    "update": _UPDATE,
    "apply_gradients": _UPDATE,
    "minimize": "`optimizer = optimizer.apply_gradient(jax.grad(loss)(optimizer.target))`",
    "learning_rate": _RATE,
    "lr": _RATE,
    "param_groups": "`print(opt_core.describe(optimizer))`, and "
    "`optimizer.apply_gradient(grads, group_overrides={'group': {...}})` to change one",
    "hyper_params": "`optimizer.optimizer_def.hyper_params`",
    "opt_state": "`optimizer.state.param_states`",
    "tx": "`optimizer.optimizer_def`",
    "init": "`opt_optax_bridge.as_transformation(optimizer.optimizer_def)` where a transformation "
    "is wanted",
    "create": "`optimizer.optimizer_def.create(params)`",
    "zero_grad": "nothing: gradients are values, and none are kept",
}
_TRANSFORMATION = (
    "`opt_optax_bridge.as_transformation(definition)` where an Optax transformation is wanted "
    "(`optax.chain`, `TrainState`, `nnx.Optimizer`), `definition.create(params)` for an optimizer"
)
_FOR_DEFINITIONS = {
    **dict.fromkeys(("init", "update"), _TRANSFORMATION),
    **dict.fromkeys(
        ("params", "target", "state", "step", "opt_state", "apply_gradients"),
        "`optimizer = definition.create(params)`, which has them",
    ),
    "learning_rate": "`definition.hyper_params.learning_rate`",
    "param_groups": "`print(opt_core.describe(definition.create(params)))`",
}


def of_optimizer(name: str) -> str:
    """Returns the message for an attribute that optimizers do not have."""
    return _message("Optimizer", name, _FOR_OPTIMIZERS)


def of_definition(kind: str, name: str) -> str:
    """Returns the message for an attribute that definitions of a class do not have."""
    return _message(kind, name, _FOR_DEFINITIONS)


def _message(kind: str, name: str, known: Mapping[str, str]) -> str:
    words = f"{kind!r} object has no attribute {name!r}"
    return f"{words}; write {known[name]}" if name in known else words


def of_leaves(target: Any) -> str:
    """Returns the message for leaves that are not arrays; empty if there are none."""
    others = [
        f"\n  {path_str(names)}: a {type(leaf).__name__}"
        for names, leaf in flatten_with_paths(target)
        if leaf is not None and not hasattr(leaf, "shape") and not isinstance(leaf, int | float)
    ]
    words = (
        "`target` must hold arrays. Create the optimizer for those alone, in Equinox after "
        "`params, static = eqx.partition(model, eqx.is_inexact_array)`, or freeze the others in "
        "a `MultiOptimizer`:"
    )
    return words + "".join(others) if others else ""
