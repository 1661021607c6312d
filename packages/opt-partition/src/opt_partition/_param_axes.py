"""The parameters of a tree and their logical axes, read from all supported forms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves_with_path

from opt_partition._layout import shape_and_dtype
from opt_partition._trees import KeyPath, align, map_leaves, path_str
from opt_partition.errors import AxesError

Axis = str | tuple[str, ...] | None

# Where an NNX variable has its axis names. Newest first; Flax 0.12.0 uses the second one, which
# later versions renamed.
_NAMES = ("out_sharding", "sharding_names", "sharding")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
      key_path: JAX's key path.
      shape: its shape.
      dtype: its dtype.
      axes: for each dimension the logical name, a tuple of names, or `None`.
      given: the axes as given.
    """

    key_path: KeyPath
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[Axis, ...]
    given: PartitionSpec | None = None

    @functools.cached_property
    def path(self) -> str:
        """`/`-joined keys."""
        return path_str(self.key_path)


def normalise_param_axes(params: Any, param_axes: Any, *, pad: bool = True) -> Any:
    """Returns logical axes as `PartitionSpec`s in the structure of `params`.

    Args:
      params: arrays or `jax.ShapeDtypeStruct`s.
      param_axes: a tree with the same keys; container types may differ. A leaf is a
        `PartitionSpec`, a sequence of names, a Flax box, an NNX `Variable` with names in its
        metadata, or `None` for no names. An array among boxes or variables is a parameter without
        names.
      pad: whether to pad the specs to the rank of the parameters. If not, they are returned as
        given, and `None` stays `None`.

    Returns:
      A tree of specs with the containers of `params`.

    Raises:
      AxesError: a parameter has no axes or too many, axes belong to no parameter or are not names,
        or `param_axes` contains only arrays.

    Examples:
      >>> tuple(normalise_param_axes({'w': np.ones((2, 3))}, {'w': ('embed',)})['w'])
      ('embed', None)
    """
    table = parameters(params, param_axes)
    if pad:
        return axes_of(params, table)
    return jax.tree.unflatten(jax.tree.structure(params), [p.given for p in table])


def axes_of(params: Any, table: Sequence[Parameter]) -> Any:
    """Returns the axes of `parameters`, a name or `None` for each dimension, as a tree of specs."""
    specs = [PartitionSpec(*parameter.axes) for parameter in table]
    return jax.tree.unflatten(jax.tree.structure(params), specs)


def unboxed(params: Any) -> Any:
    """Returns parameters without Flax boxes; NNX variables stay as they are."""
    return jax.tree.map(
        lambda node: jax.tree.leaves(node)[0] if _is_box(node) else node, params, is_leaf=_is_box
    )


def parameters(params: Any, param_axes: Any) -> list[Parameter]:
    """Returns the parameters in JAX's order; see `normalise_param_axes`."""
    for path, node in tree_leaves_with_path(params, is_leaf=_is_box):
        if _is_box(node):
            raise AxesError(
                f"{path_str(path)}: `params` contains a {type(node).__name__}; unbox the parameters"
            )
    units = jax.tree.leaves(params, is_leaf=_is_variable)
    entries = list(map(_names, align(param_axes, params, "param_axes", is_leaf=_is_variable)))
    if entries and all(map(_is_array, entries)):
        raise AxesError(
            "`param_axes` contain arrays but no axis names. Pass a PartitionSpec or a tuple of "
            "names for each parameter, Flax boxes, or an nnx.State whose Variables have "
            "`out_sharding` metadata; nnx.to_pure_dict drops that metadata, so apply it to "
            "nnx.get_partition_spec(state). `None` means a parameter without names."
        )
    # The names of a variable apply to its value.
    every = [
        None if _is_array(entry) else entry
        for unit, entry in zip(units, entries, strict=True)
        for _ in jax.tree.leaves(unit)
    ]
    leaves = tree_leaves_with_path(params)
    return map_leaves(_parameter, leaves, every, "`param_axes` do not match `params`:")


def _parameter(path: KeyPath, leaf: Any, entry: Any) -> Parameter:
    shape, _, axes = named_leaf(path, leaf, entry)
    given = None if entry is None else PartitionSpec(*axes)
    full = (*axes, *[None] * (len(shape) - len(axes)))
    return Parameter(path, shape, jax.dtypes.result_type(leaf), full, given)


def named_leaf(
    _path: KeyPath, leaf: Any, entry: Any
) -> tuple[tuple[int, ...], Any, tuple[Axis, ...]]:
    """Returns the shape and dtype of a leaf, and names of no more than its dimensions."""
    shape, dtype = shape_and_dtype(leaf)
    axes = read_axes(entry)
    if len(axes) > len(shape):
        raise AxesError(
            f"expected at most {len(shape)} axes, one per dimension of {shape}, found {axes}"
        )
    return shape, dtype, axes


def _names(entry: Any) -> Any:
    """Returns the axis names in the metadata of a variable, else its value; others unchanged."""
    if not _is_variable(entry):
        return entry
    value = next(iter(jax.tree.leaves(entry, is_leaf=lambda node: node is not entry)), None)
    metadata = entry.get_metadata()
    names = next((metadata[name] for name in _NAMES if metadata.get(name) is not None), None)
    if names is None or is_axes(value):  # `nnx.get_partition_spec` puts specs in the values
        return value
    return names.spec if isinstance(names, NamedSharding) else PartitionSpec(*names)


def _is_variable(node: Any) -> bool:
    """Whether a node is an NNX `Variable`: a pytree node that holds a value and metadata."""
    return hasattr(node, "get_metadata")


def _is_box(node: Any) -> bool:
    """Whether a node is a Flax box that knows its own spec, such as `nn.LogicallyPartitioned`."""
    return hasattr(node, "get_partition_spec")


def _is_array(node: Any) -> bool:
    return isinstance(node, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def is_axes(node: Any) -> bool:
    """Whether a node certainly is the axes of one parameter; tuples may be containers."""
    # `flax.linen.partitioning.AxisMetadata` has names.
    return isinstance(node, PartitionSpec) or _is_box(node) or hasattr(node, "names")


def read_axes(given: Any) -> tuple[Axis, ...]:
    """Returns the names given for the dimensions of one parameter."""
    names = given.get_partition_spec() if _is_box(given) else getattr(given, "names", given)
    if names is None:
        return ()
    if isinstance(names, str) or not isinstance(names, PartitionSpec | Sequence):
        raise AxesError(f"axes must be a PartitionSpec or a tuple of names, found {given!r:.80}")
    axes = tuple(tuple(name) if isinstance(name, list) else name for name in names)
    for axis in axes:
        is_names = isinstance(axis, tuple) and all(isinstance(name, str) for name in axis)
        if not (axis is None or isinstance(axis, str) or is_names):
            raise AxesError(f"the name of a dimension must be a string or None, found {axis!r}")
    return axes
