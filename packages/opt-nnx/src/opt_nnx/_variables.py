"""Variables of Flax NNX: values, sharding metadata, and new variables for state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.core.spmd import composite_rules, from_sharding_rules, get_logical_axis_rules
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import all_leaves

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


def state_variable(slot: Any, value: Any, row: Any) -> Any:
    """Returns a variable of an optimizer's state, with the metadata of the one that it follows.

    Args:
      slot: the variable of the parameter that it follows, if it does.
      value: a leaf, or a tree of several or none.
      row: of a leaf, its logical axes and, if it is placed, its mesh axes.
    """
    metadata, dropped = metadata_of(slot), {*_NAMES, _OF_OPTIMIZER, *_HOOKS}
    names = None
    if all_leaves([value]):
        names, spec = row
        if not any(names) and names_in(metadata, of_optimizer=True) is None:
            names = ()
        if spec is not None and trimmed(_resolved(names, metadata)) != trimmed(spec):
            # Flax would read another sharding there than the actual one: ZeRO, or rules of ours.
            names = tuple(spec)
            dropped.add("sharding_rules")
    kind: Callable[..., Any] = nnx.OptVariable if is_variable(slot) else nnx.OptArray
    variable = kind(value, **{key: x for key, x in metadata.items() if key not in dropped})
    if names:
        # Not in the constructor, which would move the value, or raise without a mesh.
        variable.set_metadata(**{_names_key(): names})
    return variable


def _resolved(names: tuple[Any, ...], metadata: Mapping[str, Any]) -> tuple[Any, ...]:
    """The mesh axes that Flax reads from names."""
    rules = composite_rules(get_logical_axis_rules(), metadata.get("sharding_rules"))
    return tuple(from_sharding_rules(names, rules))


def trimmed(spec: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the entries of a spec without trailing ones that shard nothing."""
    entries = [
        entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry for entry in spec
    ]
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


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
