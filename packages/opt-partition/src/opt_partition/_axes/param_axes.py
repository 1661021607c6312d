"""The parameters of a tree with the logical axes of each, in whatever form those are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from opt_partition._trees import KeyPath, children, flatten_with_paths, key_name, path_str
from opt_partition.errors import AxesError

Axis = str | tuple[str, ...] | None


@runtime_checkable
class HasPartitionSpec(Protocol):
    """A box of Flax that knows its own spec, such as `nn.LogicallyPartitioned`."""

    def get_partition_spec(self) -> PartitionSpec | None:
        """Returns the logical axes."""


@runtime_checkable
class HasNames(Protocol):
    """Metadata of Flax that carries names, such as `flax.linen.partitioning.AxisMetadata`."""

    names: Any


@runtime_checkable
class HasMetadata(Protocol):
    """A `Variable` of Flax NNX: a pytree node around its value, with metadata beside that."""

    def get_metadata(self) -> Mapping[str, Any]:
        """Returns the metadata; the names of the dimensions are under one of `_NAMES`."""


# The newest first; Flax 0.12.0 has the second, which later versions rename.
_NAMES = ("out_sharding", "sharding_names", "sharding")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
      key_path: JAX's key path.
      shape: its shape.
      dtype: its dtype.
      axes: the logical name, several names, or `None`, of each dimension.
      given: the axes as they were given.
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
    """Returns the logical axes of every parameter as a `PartitionSpec`, in the tree of `params`.

    Args:
      params: arrays or `jax.ShapeDtypeStruct`s.
      param_axes: a tree with the same keys, whose containers may be of another kind. A leaf is a
        `PartitionSpec`, a sequence of names, a box of Flax, a `Variable` of NNX whose metadata
        has names, or `None` for no names at all. An array among boxes or variables is a parameter
        that has none.
      pad: whether to make the specs as long as the parameters' rank. If not they are as given, and
        `None` stays `None`.

    Returns:
      Specs in the containers of `params`.

    Raises:
      AxesError: a parameter has no axes or too many, axes name no parameter or are no names, or
        there are only arrays where axes should be.

    Examples:
      >>> tuple(normalise_param_axes({'w': np.ones((2, 3))}, {'w': ('embed',)})['w'])
      ('embed', None)
    """
    table = parameters(params, param_axes)
    specs = [PartitionSpec(*p.axes) if pad else p.given for p in table]
    return jax.tree.unflatten(jax.tree.structure(params), specs)


def parameters(params: Any, param_axes: Any) -> list[Parameter]:
    """Returns the parameters in JAX's order; see `normalise_param_axes`."""
    leaves = list(flatten_with_paths(params))
    found: dict[KeyPath, Any] = {}
    problems = list(_collect(params, param_axes, (), found))
    if found and all(map(_is_array, found.values())):
        raise AxesError(
            "`param_axes` hold arrays and no names of dimensions. Give a PartitionSpec or a tuple "
            "of names for each parameter, boxes of Flax, or an nnx.State whose Variables have "
            "`out_sharding` metadata; nnx.to_pure_dict drops those, so take it of "
            "nnx.get_partition_spec(state). `None` stands for a parameter without names."
        )
    table = []
    for path, leaf in leaves:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) and not isinstance(
            leaf, int | float | complex
        ):
            problems.append(
                f"{path_str(path)}: `params` must hold arrays or jax.ShapeDtypeStructs, "
                f"found {type(leaf).__name__} (of a module of Equinox, give the arrays alone: "
                "`eqx.filter(model, eqx.is_array)`)"
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
        raise AxesError("`param_axes` do not fit `params`:\n  " + "\n  ".join(problems))
    return table


def _collect(params: Any, axes: Any, path: KeyPath, found: dict[KeyPath, Any]) -> Iterator[str]:
    """Puts what `axes` hold for each parameter into `found`; yields what does not fit."""
    if isinstance(params, HasPartitionSpec) and not isinstance(params, PartitionSpec):
        yield f"{path_str(path)}: `params` holds a {type(params).__name__}; unbox the parameters"
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
        # The names of a variable are those of its value.
        found |= {(*path, *below): axes for below, _ in flatten_with_paths(params)}
        return
    for key, child in node:
        name = key_name(key)
        if name in by_name:
            yield from _collect(child, by_name.pop(name), (*path, key), found)
        else:
            for below, _ in flatten_with_paths(child):
                yield f"{path_str((*path, key, *below))}: no axes are given"
    for name, extra in by_name.items():
        if is_axes(extra) or jax.tree.leaves(extra):
            where = path_str(path) + "/" if path else ""
            yield f"{where}{name}: axes are given, but there is no such parameter"


def _names_of_variable(node: Any) -> Any:
    """What a variable says of its dimensions, or its value; any other node as it is."""
    if not isinstance(node, HasMetadata):
        return node
    value = next((child for _, child in children(node) or ()), None)
    metadata = node.get_metadata()
    names = next((metadata[name] for name in _NAMES if metadata.get(name) is not None), None)
    if names is None or is_axes(value):  # of `nnx.get_partition_spec`, specs are the values
        return value
    return names.spec if isinstance(names, NamedSharding) else PartitionSpec(*names)


def _is_array(node: Any) -> bool:
    return isinstance(node, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def is_axes(node: Any) -> bool:
    """Whether a node is the axes of one parameter for certain; a tuple may be a container."""
    return isinstance(node, PartitionSpec | HasPartitionSpec | HasNames)


def read_axes(given: Any) -> tuple[Axis, ...]:
    """Returns the names of one parameter's dimensions, as far as they are given.

    Raises:
      AxesError: they are no names.

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
