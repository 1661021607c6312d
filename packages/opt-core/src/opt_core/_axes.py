"""Logical axes of a state by its description, for definitions that do not derive them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from opt_core._description.describe import describe_state
from opt_core._paths import Names, flatten_with_paths, path_str
from opt_core.errors import TreeMismatchError

if TYPE_CHECKING:
    from opt_core._optimizer import Optimizer


def axes_of_leaves(paths: Sequence[Names], param_axes: Any) -> list[Any]:
    """Returns the axes of every parameter, in order; lists the paths that are missing or extra."""
    axes = dict(flatten_with_paths(param_axes))
    problems = {
        path_str(names): "expected a `PartitionSpec`, found nothing"
        for names in paths
        if names not in axes
    }
    extra = [names for names, spec in axes.items() if spec is not None and names not in set(paths)]
    problems |= {path_str(names): "expected nothing, found axes" for names in extra}
    if problems:
        raise TreeMismatchError(
            "`param_axes` do not have the paths of the parameters:\n"
            + "\n".join(f"  {path}: {problem}" for path, problem in sorted(problems.items()))
            + "\nGive one `PartitionSpec`, or `None`, for every parameter."
        )
    return [axes[names] for names in paths]


def derive_by_description(optimizer: Optimizer, param_axes: Any) -> tuple[Any, Any]:
    """Returns the axes of the parameters and of `param_states`, in their own containers.

    A leaf of the state has the axes of those dimensions of its parameter that it keeps.
    """
    paths = [names for names, leaf in flatten_with_paths(optimizer.target) if leaf is not None]
    axes = axes_of_leaves(paths, param_axes)
    by_path = dict(zip(paths, axes, strict=True))
    kept = [
        None if leaf.parameter is None else _kept(by_path[leaf.parameter], leaf.dimensions)
        for leaf in describe_state(optimizer).leaves
    ]
    trees: list[Any] = [optimizer.target, optimizer.state.param_states]
    target, states = map(jax.tree.structure, trees)
    return jax.tree.unflatten(target, axes), jax.tree.unflatten(states, kept)


def _kept(spec: Any, dimensions: tuple[int | None, ...] | None) -> Any:
    if spec is None or dimensions is None:
        return None
    if dimensions == tuple(range(len(dimensions))) and len(spec) <= len(dimensions):
        return spec  # all of them: as it was written
    names = [None if d is None or d >= len(spec) else spec[d] for d in dimensions]
    return PartitionSpec(*names) if any(names) else None
