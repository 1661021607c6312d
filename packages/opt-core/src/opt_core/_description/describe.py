"""What a state means: the definition's own description, or one by types; cached by structure."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from opt_core._closures import origin_of, qualified, snake_case
from opt_core._description.follow import StateLeaf, follow
from opt_core._description.values import (
    LeafDescription,
    LeafRole,
    StateDescription,
    TransformationDescription,
)
from opt_core._json_settings import json_settings
from opt_core._optimizer import Optimizer, OptimizerDef, OptimizerState
from opt_core._paths import Names, flatten_with_paths
from opt_core.errors import DescriptionError

_KEPT = 64  # descriptions; one of 10,000 leaves is a few MB
_cache: OrderedDict[Any, StateDescription] = OrderedDict()
_lock = threading.Lock()


@overload
def describe_state(optimizer: Optimizer, /) -> StateDescription: ...
@overload
def describe_state(
    definition: OptimizerDef, params: Any, state: OptimizerState, /
) -> StateDescription: ...
def describe_state(
    optimizer: Optimizer | OptimizerDef, params: Any = None, state: OptimizerState | None = None, /
) -> StateDescription:
    """Returns what every leaf of a state means.

    A definition describes its own state (`OptimizerDef.describe_state`); by default as far as
    types and shapes allow: see `LeafDescription.source`. The result is
    cached for equal definitions and structures.

    Args:
      optimizer: an optimizer, or a definition followed by `params` and `state`.
      params: the parameters; arrays, tracers or `jax.ShapeDtypeStruct` leaves.
      state: the state that belongs to them; likewise.

    Returns:
      One description per leaf of `state.param_states`, in the order of JAX, and the
      transformations. The step belongs to the contract and is not included.

    Raises:
      DescriptionError: the definition describes a different number of leaves.

    Examples:
      >>> class Momentum(OptimizerDef):
      ...     def init_state(self, params):
      ...         return OptimizerState(0, {'velocity': params, 'seen': jnp.int32(0)})
      >>> print(describe_state(Momentum({'beta': 0.9}).create({'w': jnp.ones((2, 3))})))
      transformation  field     parameter  dims  role    source
      momentum        seen                       count   types
      momentum        velocity  w          0,1   moment  types
      <BLANKLINE>
      momentum: beta=0.9
    """
    if isinstance(optimizer, Optimizer):
        definition, params, state = optimizer.optimizer_def, optimizer.target, optimizer.state
    else:
        definition = optimizer
    if state is None:
        raise TypeError("`state`: pass an optimizer, or a definition, parameters and a state")
    key = _key(definition, params, state)
    with _lock:
        if key is not None and (found := _cache.get(key)) is not None:
            _cache.move_to_end(key)
            return found
    found = _describe(definition, params, state)
    if key is not None:
        with _lock:
            _cache[key] = found
            while len(_cache) > _KEPT:
                _cache.popitem(last=False)
    return found


def _key(definition: OptimizerDef, params: Any, state: OptimizerState) -> Any:
    """What the description depends on; `None` if that cannot be compared."""
    leaves, structure = jax.tree.flatten((params, state.param_states))
    key = definition, structure, _avals(leaves)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _avals(leaves: Sequence[Any]) -> tuple[Any, ...]:
    # The properties of an array take five times as long as those of its `aval`.
    found = [getattr(leaf, "aval", leaf) for leaf in leaves]
    try:
        # Not a tuple per leaf: thousands of new objects set off the garbage collector.
        return tuple([x.shape for x in found]), tuple([x.dtype for x in found])
    except AttributeError:  # of a Python number
        return tuple([np.shape(x) for x in found]), tuple(
            [getattr(x, "dtype", type(x)) for x in found]
        )


def _describe(definition: OptimizerDef, params: Any, state: OptimizerState) -> StateDescription:
    found = definition.describe_state(params, state)
    count = len(jax.tree.leaves(state.param_states))
    if len(found.leaves) != count:
        raise DescriptionError(
            f"`describe_state` of {type(definition).__name__}: expected {count} leaves, one per "
            f"leaf of `state.param_states`, found {len(found.leaves)}"
        )
    return found


def describe_by_types(
    definition: OptimizerDef, params: Any, state: OptimizerState
) -> StateDescription:
    """Returns a description by placeholders, types and shapes alone."""
    origin = origin_of(type(definition))
    whole = qualified(snake_case(type(definition).__name__), origin)
    shapes = {names: np.shape(x) for names, x in flatten_with_paths(params) if x is not None}
    followed = follow(
        lambda tree: definition.init_state(tree).param_states, params, state.param_states
    )
    leaves = jax.tree.leaves(state.param_states)
    axes = _derived_axes(definition, params, state)
    nodes: dict[str, list[Names]] = {}
    described = []
    for at, leaf, spec in zip(followed, leaves, axes, strict=True):
        node, name, field = _record_of(at, whole, origin)
        alike = nodes.setdefault(name, [])
        if node not in alike:
            alike.append(node)
        shape = None if at.parameter is None else shapes[at.parameter]
        described.append(
            LeafDescription(
                path=at.path,
                group=(),
                transformation=name,
                number=alike.index(node) + 1,
                field=field,
                parameter=at.parameter,
                dimensions=_dimensions(leaf, shape, spec),
                role=role_by_type(leaf, shape),
                source="types",
            )
        )
    settings = json_settings(definition.hyper_params)
    return StateDescription(tuple(described), _transformations(whole, settings, nodes))


def _transformations(
    whole: str, settings: Mapping[str, Any], places: Mapping[str, Sequence[Names]]
) -> tuple[TransformationDescription, ...]:
    """The definition itself, and the records in its state."""
    others = [
        TransformationDescription(name, number)
        for name, nodes in places.items()
        for number in range(1, len(nodes) + 1)
        if (name, number) != (whole, 1)
    ]
    return TransformationDescription(whole, settings=settings), *others


def _record_of(leaf: StateLeaf, whole: str, origin: str) -> tuple[Names, str, Names]:
    """The place and the name of the innermost record around a leaf, and its field.

    Plain containers, and what is inside the place of a parameter, are not records. Records are
    their definition's, whichever package has their classes.
    """
    for k in reversed(range(len(leaf.outer))):
        kind = leaf.kinds[k]
        if kind not in (tuple, list, dict) and not issubclass(kind, Mapping):
            name = qualified(snake_case(kind.__name__), origin)
            return leaf.outer[:k], name, (*leaf.outer[k:], *leaf.inner)
    return (), whole, leaf.field


def role_by_type(leaf: Any, param_shape: tuple[int, ...] | None) -> LeafRole:
    """Returns the role of a leaf as far as its type and shape show.

    Args:
      leaf: only dtype and shape are read.
      param_shape: that of the parameter it follows, if any.

    Examples:
      >>> role_by_type(jnp.int32(0), None), role_by_type(jnp.zeros(3), (3,))
      ('count', 'moment')
    """
    dtype, shape = jnp.result_type(leaf), np.shape(leaf)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "key"
    if param_shape is None:
        return "count" if jnp.issubdtype(dtype, jnp.integer) and not shape else "other"
    if not jnp.issubdtype(dtype, jnp.inexact):
        return "other"
    if shape == param_shape:
        return "moment"
    is_part = 0 < len(shape) < len(param_shape) and next(embeddings(shape, param_shape), None)
    return "factored" if is_part else "other"


def _derived_axes(definition: OptimizerDef, params: Any, state: OptimizerState) -> Sequence[Any]:
    """For each leaf the numbers of dimensions that the definition derives as its axes."""
    structure: Any = jax.tree.structure(state.param_states)
    if type(definition).derive_logical_axes is OptimizerDef.derive_logical_axes:
        return [None] * structure.num_leaves
    numbers = jax.tree.map(lambda x: PartitionSpec(*map(str, range(np.ndim(x)))), params)
    derived = definition.derive_logical_axes(Optimizer(definition, state, params), numbers)
    axes: Sequence[Any] = structure.flatten_up_to(derived.state.param_states)
    return axes


def _dimensions(
    leaf: Any, param_shape: tuple[int, ...] | None, axes: Any
) -> tuple[int | None, ...] | None:
    shape = np.shape(leaf)
    if param_shape is None:
        return (None,) * len(shape)
    if isinstance(axes, PartitionSpec) and len(axes) == len(shape):
        return tuple(None if axis is None else int(str(axis)) for axis in axes)
    return dimensions_by_shape(shape, param_shape)


def dimensions_by_shape(
    shape: tuple[int, ...], param_shape: tuple[int, ...]
) -> tuple[int | None, ...] | None:
    """Returns the parameter dimensions that a leaf keeps, if the sizes determine them.

    Examples:
      >>> dimensions_by_shape((2, 3), (2, 3)), dimensions_by_shape((3,), (2, 3))
      ((0, 1), (1,))
      >>> dimensions_by_shape((3,), (3, 3)) is None
      True
    """
    if shape == param_shape:
        return tuple(range(len(shape)))
    ways = embeddings(shape, param_shape)
    first, second = next(ways, None), next(ways, None)
    return first if second is None else None


def embeddings(
    shape: tuple[int, ...], param_shape: tuple[int, ...], start: int = 0
) -> Iterator[tuple[int, ...]]:
    """Yields the ways to find the sizes of a leaf among those of its parameter, in order."""
    if not shape:
        yield ()
        return
    for dim in range(start, len(param_shape)):
        if param_shape[dim] == shape[0]:
            for rest in embeddings(shape[1:], param_shape, dim + 1):
                yield (dim, *rest)
