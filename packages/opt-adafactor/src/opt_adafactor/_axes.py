"""Logical axes of parameters, and the factor rules derived from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax.core.meta import Partitioned
from flax.linen.partitioning import AxisMetadata
from jax.sharding import PartitionSpec
from opt_core.extend import path_names, path_str

from opt_adafactor._rules import HEURISTIC_RULE, FactorDim, FactorRule, show
from opt_adafactor.errors import FactorRuleError, ParamAxesError, UnknownNameError


def flatten_axes(param_axes: Any) -> dict[str, PartitionSpec | None]:
    """Returns the axes of every parameter by path, whatever the containers."""
    leaves = jax.tree_util.tree_flatten_with_path(param_axes, is_leaf=_is_axes)[0]
    return axes_by_path((path_str(path_names(keys)), leaf) for keys, leaf in leaves)


def axes_by_path(entries: Iterable[tuple[str, Any]]) -> dict[str, PartitionSpec | None]:
    """Returns the axes of every parameter by path, or raises a `ParamAxesError`."""
    axes: dict[str, PartitionSpec | None] = {}
    for path, leaf in entries:
        if path in axes:
            raise ParamAxesError(f"`param_axes`: two entries have the path `{path}`; rename one")
        axes[path] = _spec(leaf, path)
    return axes


def factor_rules_from_axes(param_axes: Any, dims: Mapping[str, FactorDim]) -> dict[str, FactorRule]:
    """Returns the factor rule of every parameter.

    A dimension without a name is `NONE`; several names on one dimension must agree. Parameters that
    do not have both `ROW` and `COLUMN` dimensions are not factored. Parameters without axes use the
    heuristic.
    """
    return {path: _rule(path, spec, dims) for path, spec in flatten_axes(param_axes).items()}


def check_covers(paths: Mapping[str, tuple[int, ...]], axes: Mapping[str, Any]) -> None:
    """Raises a `ParamAxesError` unless each parameter has exactly one entry, of its rank."""
    lines = [f"{path}: no axes given" for path in paths if path not in axes]
    lines += [f"{path}: not a parameter" for path in axes if path not in paths]
    for path, shape in paths.items():
        spec = axes.get(path)
        if spec is not None and len(spec) != len(shape):
            lines.append(
                f"{path}: expected {len(shape)} axes, one per dimension of {shape}, found "
                f"{len(spec)}: {show_spec(spec)}"
            )
    if any(path.endswith("/value") and path.removesuffix("/value") in axes for path in paths):
        lines.append("the parameters are in Flax boxes: unbox them with `flax.linen.unbox`")
    if lines:
        raise ParamAxesError("`param_axes` do not match the parameters:\n  " + "\n  ".join(lines))


def show_spec(spec: Any) -> str:
    """Formats axes as `(embed, -, mlp)`, independently of the JAX version."""
    names = ("-" if axis is None else axis if isinstance(axis, str) else str(axis) for axis in spec)
    return f"({', '.join(names)})"


def _is_axes(node: Any) -> bool:
    """Whether a node is the axes of one parameter; tuples of other things are containers."""
    # Flax's `AxisMetadata` has no leaves and looks empty to JAX.
    if node is None or isinstance(node, PartitionSpec | Partitioned | AxisMetadata):
        return True
    return type(node) is tuple and all(_is_axis(axis) for axis in node)


def _is_axis(axis: Any) -> bool:
    if isinstance(axis, tuple | list):
        return all(isinstance(name, str) for name in axis)
    return axis is None or isinstance(axis, str)


def _spec(leaf: Any, path: str) -> PartitionSpec | None:
    if isinstance(leaf, Partitioned):
        leaf = leaf.get_partition_spec()
    elif isinstance(leaf, AxisMetadata):
        leaf = leaf.names
    if leaf is None or isinstance(leaf, PartitionSpec):
        return leaf
    if isinstance(leaf, tuple):
        return PartitionSpec(*leaf)
    raise ParamAxesError(
        f"`param_axes` of `{path}` must be a `PartitionSpec`, a tuple of names or None, found a "
        f"{type(leaf).__name__}. Extract the specs of Flax boxes with "
        "`flax.linen.get_partition_spec`."
    )


def _rule(path: str, spec: PartitionSpec | None, dims: Mapping[str, FactorDim]) -> FactorRule:
    if spec is None:
        return HEURISTIC_RULE
    rule = tuple(_dim(path, spec, axis, dims) for axis in spec)
    if FactorDim.ROW in rule and FactorDim.COLUMN in rule:
        if FactorDim.NONE in rule:
            raise FactorRuleError(
                f"`{path}` with axes {show_spec(spec)} would be {show(rule)}: NONE cannot be "
                "combined with ROW and COLUMN. Make those dimensions BATCH, ROW or COLUMN."
            )
        return rule
    return tuple(d if d is FactorDim.BATCH else FactorDim.NONE for d in rule)


def _dim(path: str, spec: PartitionSpec, axis: Any, dims: Mapping[str, FactorDim]) -> FactorDim:
    names = (axis,) if isinstance(axis, str) else tuple(axis or ())
    for name in names:
        if name not in dims:
            known = ", ".join(f"`{known}`" for known in dims)
            raise UnknownNameError(
                f"`logical_factor_rules` have no rule for the axis `{name}` of `{path}`, whose "
                f"axes are {show_spec(spec)}; known axes are {known}. Add a rule for `{name}`."
            )
    roles = list(dict.fromkeys(dims[name] for name in names)) or [FactorDim.NONE]
    if len(roles) > 1:
        raise FactorRuleError(
            f"the names {names} share one dimension of `{path}`, whose axes are {show_spec(spec)}, "
            f"but `logical_factor_rules` map them to {show(tuple(roles))}. Map them to the same "
            "factor dimension."
        )
    return roles[0]
