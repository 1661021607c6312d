"""Variables of Flax NNX: values, sharding metadata, and new variables for state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import NamedSharding, PartitionSpec

Filter = Any  # what `nnx.state` takes
Rules = tuple[tuple[str, Any], ...]  # pairs of a name and mesh axes

# The newest first; Flax 0.12.0 has the second, which later versions rename.
_NAMES = ("out_sharding", "sharding_names", "sharding")
_OF_OPTIMIZER = "optimizer_sharding"  # Flax 0.12.8: names that the state has instead
# Hooks of the parameter, which would change the values of its state.
_HOOKS = ("on_create_value", "on_get_value", "on_set_value")


def state_of(node: Any, wrt: Filter, graph: bool | None) -> Any:
    """Returns `nnx.state(node, wrt)`, in that graph mode."""
    options = {} if graph is None else {"graph": graph}  # Flax 0.12.0 has no modes
    return nnx.state(node, wrt, **options)


def pure(tree: Any) -> Any:
    """Replaces variables and references by their values."""
    if (as_pure := getattr(nnx, "as_pure", None)) is not None:
        return as_pure(tree)
    return nnx.to_arrays(nnx.pure(tree))  # type: ignore[attr-defined]  # until Flax 0.12.1


def is_variable(node: Any) -> bool:
    """Whether a node is a variable."""
    return isinstance(node, nnx.Variable)


def has_variables(tree: Any) -> bool:
    """Whether there is a variable in a tree or a module."""
    return any(map(is_variable, variables_of(tree)))


def variables_of(tree: Any) -> list[Any]:
    """Returns the variables, and leaves outside of variables, in leaf order."""
    return jax.tree.leaves(tree, is_leaf=is_variable)


def assign(tree: Any, values: Any) -> None:
    """Sets the variables of a tree to the values of another of the same structure."""
    structure: Any = jax.tree.structure(tree, is_leaf=is_variable)
    for variable, value in zip(variables_of(tree), structure.flatten_up_to(values), strict=True):
        nnx.update(variable, value)


def metadata_of(node: Any) -> Mapping[str, Any]:
    """Returns the metadata of a variable; none for any other leaf."""
    return node.get_metadata() if is_variable(node) else {}


def names_in(metadata: Mapping[str, Any], *, of_optimizer: bool = False) -> Any:
    """Returns the `PartitionSpec` or `NamedSharding` in the metadata of a variable, if any.

    With `of_optimizer`, names for the optimizer's state take precedence.
    """
    keys = (_OF_OPTIMIZER, *_NAMES) if of_optimizer else _NAMES
    names = next((metadata[key] for key in keys if metadata.get(key)), None)
    names = getattr(names, "sharding", names)  # of a `jax.experimental.layout.Format`
    if names is None or isinstance(names, NamedSharding | PartitionSpec):
        return names
    return PartitionSpec(*names)


def _names_key() -> str:
    """The key of logical axes in the installed Flax, which deprecates older keys."""
    return "out_sharding" if hasattr(nnx.Variable, "sharding_names") else "sharding_names"


def state_variable(
    value: Any, parameter: Mapping[str, Any] | None, names: Sequence[Any] | None
) -> Any:
    """Returns a variable of an optimizer's state, with the metadata of the parameter it follows."""
    dropped = {*_NAMES, _OF_OPTIMIZER, *_HOOKS}
    kept = {key: item for key, item in (parameter or {}).items() if key not in dropped}
    kind: Callable[..., Any] = nnx.OptArray if parameter is None else nnx.OptVariable
    variable = kind(value, **kept)
    if names is not None:
        # Not in the constructor, which would move the value, or raise without a mesh.
        variable.set_metadata(**{_names_key(): tuple(names)})
    return variable


def as_rules(rules: Any) -> Rules:
    """Returns rules, pairs or a mapping, in hashable form."""
    pairs = rules.items() if isinstance(rules, Mapping) else rules or ()
    return tuple(
        (name, axes if axes is None or isinstance(axes, str) else tuple(axes))
        for name, axes in pairs
    )


def rules_in(metadata: Mapping[str, Any]) -> list[Rules]:
    """Returns the rules that Flax applies to a variable, the context's first."""
    sources = (get_logical_axis_rules(), metadata.get("sharding_rules"))
    return [as_rules(dict(rules)) if rules else () for rules in sources]  # the later counts


def resolved_names(variable: Any) -> tuple[Any, ...]:
    """Returns the mesh axes that Flax reads from the metadata of a variable."""
    return tuple(pure(nnx.get_partition_spec(variable)))
