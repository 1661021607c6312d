"""What a state means: a definition's own description, or one by placeholders, types and shapes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from opt_core._closures import origin_of, qualified, snake_case
from opt_core._description import (
    LeafDescription,
    LeafRole,
    StateDescription,
    TransformationDescription,
    json_settings,
)
from opt_core._optimizer import Optimizer, OptimizerDef, OptimizerState
from opt_core._trees import Names, children, flatten_with_paths, named_leaves, path_names, path_str
from opt_core.errors import DescriptionError, TreeMismatchError

# Descriptions.

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
        if key is not None and (cached := _cache.get(key)) is not None:
            _cache.move_to_end(key)
            return cached
    description = _describe(definition, params, state)
    if key is not None:
        with _lock:
            _cache[key] = description
            while len(_cache) > _KEPT:
                _cache.popitem(last=False)
    return description


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
    avals = [getattr(leaf, "aval", leaf) for leaf in leaves]
    try:
        # Not a tuple per leaf: thousands of new objects set off the garbage collector.
        return tuple([x.shape for x in avals]), tuple([x.dtype for x in avals])
    except AttributeError:  # of a Python number
        kinds = [getattr(x, "dtype", type(x)) for x in avals]
        return tuple([np.shape(x) for x in avals]), tuple(kinds)


def _describe(definition: OptimizerDef, params: Any, state: OptimizerState) -> StateDescription:
    description = definition.describe_state(params, state)
    count = len(jax.tree.leaves(state.param_states))
    if len(description.leaves) != count:
        raise DescriptionError(
            f"`describe_state` of {type(definition).__name__}: expected {count} leaves, one per "
            f"leaf of `state.param_states`, found {len(description.leaves)}"
        )
    return description


def describe_by_types(
    definition: OptimizerDef, params: Any, state: OptimizerState
) -> StateDescription:
    """Returns a description by placeholders, types and shapes alone."""
    origin = origin_of(type(definition))
    outer = qualified(snake_case(type(definition).__name__), origin)
    shapes = {names: np.shape(x) for names, x in named_leaves(params)}
    followed = follow(
        lambda tree: definition.init_state(tree).param_states, params, state.param_states
    )
    leaves = jax.tree.leaves(state.param_states)
    axes = _derived_axes(definition, params, state)
    places: dict[str, list[Names]] = {}
    described = []
    for at, leaf, spec in zip(followed, leaves, axes, strict=True):
        # Records are their definition's, whichever package has their classes.
        depth = at.record
        place = () if depth is None else at.outer[:depth]
        name = outer if depth is None else qualified(snake_case(at.kinds[depth].__name__), origin)
        alike = places.setdefault(name, [])
        if place not in alike:
            alike.append(place)
        shape = None if at.parameter is None else shapes[at.parameter]
        dims = _dimensions(np.shape(leaf), shape, spec)
        described.append(
            LeafDescription(
                path=at.path,
                group=(),
                transformation=name,
                number=alike.index(place) + 1,
                field=at.field[len(place) :],
                parameter=at.parameter,
                dimensions=dims,
                role=role_by_type(leaf, shape, dims),
                source="types",
            )
        )
    records = [
        TransformationDescription(name, number)
        for name, alike in places.items()
        for number in range(1, len(alike) + 1)
        if (name, number) != (outer, 1)
    ]
    settings = json_settings(definition.hyper_params)
    transformations = TransformationDescription(outer, settings=settings), *records
    return StateDescription(tuple(described), transformations)


def role_by_type(
    leaf: Any, param_shape: tuple[int, ...] | None, dims: tuple[int | None, ...] | None
) -> LeafRole:
    """Returns the role of a leaf as far as its type and shape show."""
    dtype, shape = jnp.result_type(leaf), np.shape(leaf)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "key"
    if param_shape is None:
        return "count" if jnp.issubdtype(dtype, jnp.integer) and not shape else "other"
    if not jnp.issubdtype(dtype, jnp.inexact):
        return "other"
    if shape == param_shape:
        return "moment"
    has_some = any(d is not None for d in dims) if dims else _embeddings(shape, param_shape)
    return "factored" if 0 < len(shape) < len(param_shape) and has_some else "other"


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
    shape: tuple[int, ...], param_shape: tuple[int, ...] | None, axes: Any
) -> tuple[int | None, ...] | None:
    """The dimensions that a leaf keeps: as derived, or if its sizes determine them."""
    if param_shape is None:
        return (None,) * len(shape)
    if isinstance(axes, PartitionSpec) and len(axes) == len(shape):
        return tuple(None if axis is None else int(str(axis)) for axis in axes)
    ways = _embeddings(shape, param_shape)
    return ways[0] if len(ways) == 1 else None


def _embeddings(shape: tuple[int, ...], param_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The ways to find the sizes of a leaf among those of its parameter, in order."""
    ways = itertools.combinations(range(len(param_shape)), len(shape))
    return [dims for dims in ways if tuple(param_shape[dim] for dim in dims) == shape]


# Which parameter each leaf follows.


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("number",))
@dataclasses.dataclass(frozen=True)
class Placeholder:
    """A node without leaves in the place of a parameter, of which it has the number."""

    number: int


def is_placeholder(node: Any) -> bool:
    """Whether a node is in the place of a parameter."""
    return isinstance(node, Placeholder)


def placeholders(params: Any) -> Any:
    """Returns a tree with the containers of the parameters and a `Placeholder` for each."""
    structure: Any = jax.tree.structure(params)
    return structure.unflatten(map(Placeholder, range(structure.num_leaves)))


def on_placeholders(init: Callable[[Any], Any], tree: Any) -> Any | None:
    """Returns the state that `init` makes of placeholders; `None` if it needs the parameters."""
    try:
        return jax.eval_shape(init, tree)
    except Exception:  # whatever it raises where it expects an array
        return None


def places(
    placed: Any, names: Sequence[Names], at: Names = ()
) -> Iterator[tuple[Names, tuple[Names, Names]]]:
    """Yields the place of each parameter in what `init` returns for placeholders."""
    for path, node in jax.tree_util.tree_leaves_with_path(placed, is_leaf=is_placeholder):
        if is_placeholder(node):
            place, parameter = (*at, *path_names(path)), names[node.number]
            yield place, (parameter, around(place, parameter))


def around(place: Names, parameter: Names) -> Names:
    """Returns a path without the names at its end that are those of a parameter."""
    end = 0
    while end < min(len(place), len(parameter)) and place[-1 - end] == parameter[-1 - end]:
        end += 1
    return place[: len(place) - end]


class StateLeaf(NamedTuple):
    """A leaf of a state, and the parameter that it follows."""

    path: Names  # where it is
    kinds: Sequence[type]  # the types of the nodes above it
    parameter: Names | None  # the path of the parameter that it follows, if any
    outer: Names  # the path down to where the containers of the parameters begin
    inner: Names  # the path below the place of its parameter

    @property
    def field(self) -> Names:
        """Its path without that of the parameter."""
        return (*self.outer, *self.inner)

    @property
    def record(self) -> int | None:
        """The depth of the innermost node outside the parameters that is no plain container."""
        depths = reversed(range(len(self.outer)))
        return next((k for k in depths if not is_plain(self.kinds[k])), None)


def is_plain(kind: type) -> bool:
    """Whether nodes of a class are containers and not records."""
    return kind in (tuple, list, dict) or issubclass(kind, Mapping)


def leaves_of(state: Any, followed: Mapping[Names, tuple[Names, Names]]) -> list[StateLeaf]:
    """Returns the leaves of a state in the order of JAX; `followed` is a dict of `places`."""
    return [_leaf(path, kinds, followed) for path, kinds in _walk(state, (), ())]


def _leaf(
    path: Names, kinds: Sequence[type], followed: Mapping[Names, tuple[Names, Names]]
) -> StateLeaf:
    for end in range(len(path), -1, -1):
        if (at := followed.get(path[:end])) is not None:
            return StateLeaf(path, kinds, *at, path[end:])
    return StateLeaf(path, kinds, None, path, ())


def _walk(
    node: Any, path: Names, kinds: tuple[type, ...]
) -> Iterator[tuple[Names, Sequence[type]]]:
    opened = children(node)
    if opened is None:
        if node is not None:
            yield path, kinds
        return
    for name, child in opened.children:
        yield from _walk(child, (*path, name), (*kinds, type(node)))


def follow(init: Callable[[Any], Any], params: Any, state: Any) -> list[StateLeaf]:
    """Returns the leaves of a state that `init` returned, with the parameters that they follow."""
    names = [path for path, _ in named_leaves(params)]
    placed = on_placeholders(init, placeholders(params))
    return leaves_of(state, dict(places(placed, names)))


# Logical axes.


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
    """Returns the axes of the parameters and of `param_states`, in their own containers."""
    paths = [names for names, _ in named_leaves(optimizer.target)]
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
