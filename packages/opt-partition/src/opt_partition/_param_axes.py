"""The parameters of a tree and their logical axes, read from all supported forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from opt_partition._specs import ONLY_ARRAYS
from opt_partition._trees import KeyPath, children, flatten_with_paths, key_name, path_str
from opt_partition.errors import AxesError

Axis = str | tuple[str, ...] | None


@runtime_checkable
class HasPartitionSpec(Protocol):
    """A Flax box that knows its own spec, such as `nn.LogicallyPartitioned`."""

    def get_partition_spec(self) -> PartitionSpec | None:
        """Returns the logical axes."""


@runtime_checkable
class HasNames(Protocol):
    """Flax metadata with axis names, such as `flax.linen.partitioning.AxisMetadata`."""

    names: Any


@runtime_checkable
class HasMetadata(Protocol):
    """A Flax NNX `Variable`: a pytree node that holds a value and metadata."""

    def get_metadata(self) -> Mapping[str, Any]:
        """Returns the metadata, with the axis names under one of `_NAMES`."""


# Newest first; Flax 0.12.0 uses the second one, which later versions renamed.
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

    @property
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
    specs = [PartitionSpec(*p.axes) if pad else p.given for p in table]
    return jax.tree.unflatten(jax.tree.structure(params), specs)


def unboxed(params: Any) -> Any:
    """Returns parameters without Flax boxes; NNX variables stay as they are."""
    return jax.tree.map(
        lambda node: jax.tree.leaves(node)[0] if _is_box(node) else node, params, is_leaf=_is_box
    )


def parameters(params: Any, param_axes: Any) -> list[Parameter]:
    """Returns the parameters in JAX's order; see `normalise_param_axes`."""
    leaves = list(flatten_with_paths(params))
    found: dict[KeyPath, Any] = {}
    problems = list(_collect(params, param_axes, (), found))
    if found and all(map(_is_array, found.values())):
        raise AxesError(
            "`param_axes` contain arrays but no axis names. Pass a PartitionSpec or a tuple of "
            "names for each parameter, Flax boxes, or an nnx.State whose Variables have "
            "`out_sharding` metadata; nnx.to_pure_dict drops that metadata, so apply it to "
            "nnx.get_partition_spec(state). `None` means a parameter without names."
        )
    table = []
    for path, leaf in leaves:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) and not isinstance(
            leaf, int | float | complex
        ):
            problems.append(
                f"{path_str(path)}: `params` must contain arrays or jax.ShapeDtypeStructs, found "
                f"{type(leaf).__name__} {ONLY_ARRAYS}"
            )
            continue
        shape = tuple(np.shape(leaf))
        try:
            axes = read_axes(found.get(path))
        except AxesError as error:
            problems.append(f"{path_str(path)}: {error}")
            continue
        if len(axes) > len(shape):
            problems.append(
                f"{path_str(path)}: expected at most {len(shape)} axes, one per dimension of "
                f"{shape}, found {axes}"
            )
        is_given = is_axes(found.get(path)) or isinstance(found.get(path), Sequence)
        given = PartitionSpec(*axes) if is_given else None
        axes += (None,) * (len(shape) - len(axes))
        table.append(Parameter(path, shape, jax.dtypes.result_type(leaf), axes, given))
    if problems:
        raise AxesError("`param_axes` do not match `params`:\n  " + "\n  ".join(problems))
    return table


def _collect(params: Any, axes: Any, path: KeyPath, found: dict[KeyPath, Any]) -> Iterator[str]:
    """Stores the axes of each parameter in `found`; yields mismatches."""
    if _is_box(params):
        yield f"{path_str(path)}: `params` contains a {type(params).__name__}; unbox the parameters"
        return
    axes = _names_of_variable(axes)
    node = children(params)
    if node is None:
        if params is not None:
            found[path] = axes
        return
    given = children(axes) if not is_axes(axes) else None
    by_name = {key_name(key): child for key, child in given} if given else {}
    if isinstance(params, HasMetadata) and not {key_name(key) for key, _ in node} & {*by_name}:
        # The names of a variable apply to its value.
        found |= {(*path, *below): axes for below, _ in flatten_with_paths(params)}
        return
    for key, child in node:
        name = key_name(key)
        if name in by_name:
            yield from _collect(child, by_name.pop(name), (*path, key), found)
        else:
            for below, _ in flatten_with_paths(child):
                yield f"{path_str((*path, key, *below))}: no axes given"
    for name, extra in by_name.items():
        if is_axes(extra) or jax.tree.leaves(extra):
            where = path_str(path) + "/" if path else ""
            yield f"{where}{name}: axes given, but not a parameter"


def _names_of_variable(node: Any) -> Any:
    """Returns the axis names of a variable, else its value; other nodes are returned unchanged."""
    if not isinstance(node, HasMetadata):
        return node
    value = next((child for _, child in children(node) or ()), None)
    metadata = node.get_metadata()
    names = next((metadata[name] for name in _NAMES if metadata.get(name) is not None), None)
    if names is None or is_axes(value):  # `nnx.get_partition_spec` puts specs in the values
        return value
    return names.spec if isinstance(names, NamedSharding) else PartitionSpec(*names)


def _is_box(node: Any) -> bool:
    return isinstance(node, HasPartitionSpec) and not isinstance(node, PartitionSpec)


def _is_array(node: Any) -> bool:
    return isinstance(node, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def is_axes(node: Any) -> bool:
    """Whether a node certainly is the axes of one parameter; tuples may be containers."""
    return isinstance(node, PartitionSpec | HasPartitionSpec | HasNames)


def read_axes(given: Any) -> tuple[Axis, ...]:
    """Returns the names given for the dimensions of one parameter.

    Raises:
      AxesError: `given` is not axes.

    Examples:
      >>> read_axes(PartitionSpec('embed', None)), read_axes(None)
      (('embed', None), ())
    """
    names = given
    if isinstance(given, HasPartitionSpec):
        names = given.get_partition_spec()
    elif isinstance(given, HasNames) and not isinstance(given, PartitionSpec):
        names = given.names
    if names is None or _is_array(names):
        return ()
    if isinstance(names, str) or not isinstance(names, PartitionSpec | Sequence):
        raise AxesError(f"axes must be a PartitionSpec or a tuple of names, found {given!r}")
    axes = tuple(tuple(name) if isinstance(name, list) else name for name in names)
    for axis in axes:
        is_names = isinstance(axis, tuple) and all(isinstance(name, str) for name in axis)
        if not (axis is None or isinstance(axis, str) or is_names):
            raise AxesError(f"the name of a dimension must be a string or None, found {axis!r}")
    return axes
