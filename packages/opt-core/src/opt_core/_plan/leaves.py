"""The leaves of a source or a target, by names that say what they mean."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from opt_core._description import TransformationDescription, TransformationKey, describe_state
from opt_core._optimizer import Optimizer
from opt_core._trees import Names, committed_sharding, named_leaves, path_str, split_path
from opt_core.errors import LeafError
from opt_core.protocols import Storage

if TYPE_CHECKING:
    from opt_core._plan.stored import PlainOptimizer

Kind: TypeAlias = Literal["params", "state", "extra"]


@dataclasses.dataclass(frozen=True)
class LeafInfo:
    """One leaf of a checkpoint.

    Attributes:
      path: the components of its name.
      shape: of the array; of a typed PRNG key, that of the array of keys.
      dtype: `'float32'`, `'bfloat16'`, ...; of a typed PRNG key `'key<fry>'` and the like; of a
        Python scalar among the extras `'python'`.
      kind: `'params'`, `'state'` or `'extra'`.
      parameter: the path of the parameter that the leaf is or follows, if any.
      group: the names of the groups around it, outermost first.
      transformation: what keeps it, e.g. `'adam'`, or `'adam#2'` for the second one.
      role: what it is for, see `opt_core.LeafDescription`; empty for other leaves.
      dimensions: for each of its dimensions that of the parameter, or `None`; `None` altogether if
        that is not known.
      value: of a single integer: counts are needed before arrays are read.
      stored: of an array that stands for another leaf, or for more digits of a parameter, how: a
        key of `Schema.storage`.
    """

    path: Names
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    parameter: Names | None = None
    group: Names = ()
    transformation: str = ""
    role: str = ""
    dimensions: tuple[int | None, ...] | None = None
    value: int | None = None
    stored: str = ""

    @functools.cached_property  # used many times, for thousands of leaves
    def name(self) -> str:
        """The components joined: see `path_str`."""
        return path_str(self.path)

    @property
    def is_key(self) -> bool:
        """Whether it is a typed PRNG key."""
        return self.dtype.startswith("key<")

    @functools.cached_property
    def field(self) -> Names:
        """The part of its name between transformation and parameter."""
        first = 2 * len(self.group) + 2  # state, groups and names, transformation
        return self.path[first : len(self.path) - len(self.parameter or ())]

    @functools.cached_property
    def kept_by(self) -> TransformationKey:
        """The transformation that keeps it."""
        name, _, number = self.transformation.partition("#")
        return TransformationKey(self.group, name, int(number or 1))


def abstract(leaf: LeafInfo, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a leaf, with a sharding."""
    # A Python scalar has no dtype of arrays; the result for it is not used.
    if leaf.dtype == "python":
        return jax.ShapeDtypeStruct((), jnp.int32)
    dtype: Any = key_kind(leaf.dtype)[1] if leaf.is_key else jnp.dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)


def key_kind(name: str) -> tuple[str, Any]:
    """Returns the implementation and the dtype of typed PRNG keys such as `'key<fry>'`."""
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        dtype = jax.eval_shape(functools.partial(jax.random.key, impl=impl), 0).dtype
        if str(dtype) == name:
            return impl, dtype
    raise LeafError(f"`{name}` is not a type of PRNG keys of this JAX")


def shown(leaf: Any) -> str:
    """Returns the dtype and the shape of a leaf or an array: `'float32[2, 3]'`."""
    return f"{leaf.dtype}{list(leaf.shape)}"


@functools.lru_cache(maxsize=4096)
def state_path(key: TransformationKey) -> Names:
    """Returns the beginning of the paths of what a transformation keeps."""
    groups = (part for label in key.group for part in ("groups", label))
    return ("state", *groups, str(key._replace(group=())))  # `'adam#2'` for the second `adam`


@dataclasses.dataclass(frozen=True)
class Schema:
    """The leaves of a checkpoint, and what is known about the optimizer that wrote it.

    Attributes:
      leaves: every leaf, in the order of JAX.
      optimizer: the transformations in the order in which they act: the optimizer's fingerprint;
        `None` if it is not known.
      groups: the path of every parameter of each group, by the group's name; frozen ones too.
      versions: of the libraries that wrote it.
      storage: how leaves are stored in other arrays: the data of `opt_core.protocols.Storage`.
    """

    leaves: tuple[LeafInfo, ...]
    optimizer: tuple[TransformationDescription, ...] | None = None
    groups: Mapping[str, tuple[Names, ...]] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    storage: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def by_name(self) -> dict[str, LeafInfo]:
        """The leaves by name."""
        return {leaf.name: leaf for leaf in self.leaves}

    @property
    def transformations(self) -> tuple[TransformationDescription, ...]:
        """The transformations that are known."""
        return self.optimizer or ()


@runtime_checkable
class Source(Protocol):
    """A source of restores: a checkpoint on disk, or a state in memory."""

    @property
    def schema(self) -> Schema:
        """The leaves, without their values."""

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Returns the named leaves, in the dtype and shape in which they were saved.

        Args:
          wanted: the sharding of each leaf, by name; shapes and dtypes are those of the schema.
            Without a sharding: on the default device. What JAX cannot hold, 64 bits without
            `jax_enable_x64`, is a NumPy array.

        Raises:
          DamagedError: a leaf has changed since it was written.
        """

    def same(self, names: Iterable[str]) -> bool | None:
        """Whether leaves of one shape and dtype are the same; `None` if arrays must be read."""

    def shardings(self, names: Iterable[str]) -> Mapping[str, Sharding]:
        """Returns the shardings of those leaves of which one is known, by name."""


@dataclasses.dataclass(frozen=True)
class View:
    """A target as the planner sees it."""

    optimizer: Optimizer  # parameters, state and step, with what updates them
    # makes the caller's kind of target from an optimizer and other leaves
    put_back: Callable[[Optimizer, Mapping[Names, Any]], Any] = lambda optimizer, _: optimizer
    # leaves of the model that the optimizer does not update, by path
    others: Mapping[Names, Any] = dataclasses.field(default_factory=dict)
    # fields of the target that are neither: they are kept as they are
    unsaved: tuple[str, ...] = ()
    # what `optimizer` is the plain one of, where the target stores leaves differently
    stored: PlainOptimizer | None = None
    placement: Any = None  # what the target knows of where its leaves lie, as `params` and `state`

    def leaves(self) -> list[Any]:
        """Returns the leaves in the order of rows: parameters, others, step and state."""
        optimizer = self.optimizer
        params, state = jax.tree.leaves(optimizer.target), jax.tree.leaves(optimizer.state)
        return [*params, *self.others.values(), *state]

    def rebuilt(self, leaves: Sequence[Any]) -> tuple[Optimizer, dict[Names, Any]]:
        """Returns the optimizer and the others with other leaves, in that order."""
        params: Any = jax.tree.structure(self.optimizer.target)
        state = jax.tree.structure(self.optimizer.state)
        first, rest = params.num_leaves, params.num_leaves + len(self.others)
        optimizer: Optimizer = self.optimizer.replace(
            target=jax.tree.unflatten(params, leaves[:first]),
            state=jax.tree.unflatten(state, leaves[rest:]),
        )
        return optimizer, dict(zip(self.others, leaves[first:rest], strict=True))


@dataclasses.dataclass(frozen=True)
class NamedState(Mapping[str, Any]):
    """The leaves of an optimizer by name; a `Source` that restores may come from.

    Attributes:
      leaves: arrays (or `jax.ShapeDtypeStruct`s) by name.
      schema: what they are.
    """

    leaves: Mapping[str, Any]
    schema: Schema

    def __getitem__(self, name: str) -> Any:
        return self.leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Returns copies in the wanted shardings; see `Source.read`."""
        return {name: _placed(self.leaves[name], place.sharding) for name, place in wanted.items()}

    def same(self, names: Iterable[str]) -> bool | None:
        """Whether leaves have the same bits; `None` where no value is at hand."""
        bits = {_bits(self.leaves[name]) for name in names}
        return None if None in bits else len(bits) == 1

    def shardings(self, names: Iterable[str]) -> dict[str, Sharding]:
        """Returns where leaves are on a mesh, by name; memory kinds are left out, as on disk."""
        places = {name: committed_sharding(self.leaves[name]) for name in names}
        return {
            name: NamedSharding(place.mesh, place.spec)
            for name, place in places.items()
            if isinstance(place, NamedSharding)
        }


class HeldState(NamedState):
    """The leaves of an optimizer that goes on as another: they are handed over, not copied."""

    @functools.cached_property
    def is_abstract(self) -> bool:
        """Whether there are only shapes: what becomes of them is abstract too."""
        return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in self.leaves.values())

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Returns the leaves themselves; see `Source.read`."""
        return {name: self.leaves[name] for name in wanted}

    def shardings(self, names: Iterable[str]) -> dict[str, Sharding]:
        """Returns where leaves are on a mesh, by name, with their memory."""
        places = {name: committed_sharding(self.leaves[name]) for name in names}
        return {name: place for name, place in places.items() if isinstance(place, NamedSharding)}


def _bits(leaf: Any) -> tuple[str, tuple[int, ...], bytes] | None:
    """What two leaves have in common if they are the same; `None` of one that is not here."""
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
        return None
    dtype, shape = _dtype(leaf), tuple(np.shape(leaf))
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted() or not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            return None
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
    return dtype, shape, local(leaf).tobytes()


def _placed(leaf: Any, sharding: Any) -> Any:
    """A copy: what is restored can be donated, and what was saved stays."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise LeafError(f"found {leaf} where a value is needed: the named state is abstract")
    if not isinstance(leaf, jax.Array) and is_wide((leaf := np.array(leaf)).dtype):
        return leaf
    leaf = jnp.array(leaf)
    return leaf if sharding is None else jax.device_put(leaf, sharding)


def is_wide(dtype: Any) -> bool:
    """Whether JAX cannot hold a dtype, as 64 bits by default."""
    return bool(jax.dtypes.canonicalize_dtype(dtype) != dtype)


def named_view(view: View) -> NamedState:
    """Returns the leaves of what the planner sees: parameters, then others, then the state."""
    optimizer, states = view.optimizer, view.optimizer.state.param_states
    described, stored = describe_state(optimizer), _storages(states)
    infos = [
        leaf_info(leaf, ("params", *at), "params", parameter=at)
        for at, leaf in named_leaves(optimizer.target)
    ]
    infos += [
        leaf_info(leaf, ("params", *at), "params", parameter=at) for at, leaf in view.others.items()
    ]
    infos += [
        leaf_info(leaf, ("state", "step"), "state")
        for leaf in jax.tree.leaves(optimizer.state.step)
    ]
    infos += [
        leaf_info(
            leaf,
            (*state_path(known.kept_by), *known.field, *(known.parameter or ())),
            "state",
            parameter=known.parameter,
            group=known.group,
            transformation=state_path(known.kept_by)[-1],
            role=known.role,
            dimensions=known.dimensions,
            stored=str(how or ""),
        )
        for leaf, known, how in zip(jax.tree.leaves(states), described.leaves, stored, strict=True)
    ]
    _check_unique(infos)
    schema = Schema(
        leaves=tuple(infos),
        optimizer=described.transformations,
        groups=_groups(optimizer),
        storage={str(how): how.to_data() for how in stored if how is not None},
    )
    return NamedState(dict(zip((i.name for i in infos), view.leaves(), strict=True)), schema)


def leaf_info(leaf: Any, path: Names, kind: Kind, **about: Any) -> LeafInfo:
    """Returns the record of a leaf: its shape and dtype, its value if it is a single integer."""
    return LeafInfo(path, tuple(np.shape(leaf)), _dtype(leaf), kind, value=count_of(leaf), **about)


def _dtype(leaf: Any) -> str:
    return _dtype_name(leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf))


_dtype_name = functools.cache(str)  # NumPy takes long over the name of a dtype


def _storages(tree: Any) -> list[Storage | None]:
    """Returns for each array of a state how it is stored; `None` for leaves as they are."""
    nodes, ways, _ = stored_nodes(tree)
    arrays = (
        1 if how is None else len(jax.tree.leaves(node))
        for node, how in zip(nodes, ways, strict=True)
    )
    return [how for how, count in zip(ways, arrays, strict=True) for _ in range(count)]


# To check the protocols, `StoresLeaf` and `StoresParams`, takes a hundred times as long.


def _is_stored_leaf(node: Any) -> bool:
    return hasattr(type(node), "leaf_storage")


def is_params_store(node: Any) -> bool:
    """Whether a node holds more of the parameters than these can."""
    return hasattr(type(node), "params_storage")


def stored_nodes(states: Any) -> tuple[list[Any], list[Storage | None], Any]:
    """Returns the nodes of a state in the place of leaves, how each is stored, the structure."""
    structure: Any = jax.tree.structure(states)
    numbers = structure.unflatten(range(structure.num_leaves))
    extras: dict[Any, Storage] = {}
    both = (jax.tree.leaves(x, is_leaf=is_params_store) for x in (states, numbers))
    for store, places in zip(*both, strict=True):
        if is_params_store(store):
            field, how = store.params_storage()
            extras |= dict.fromkeys(jax.tree.leaves(getattr(places, field)), how)
    tree: Any = jax.tree.structure(numbers, is_leaf=_is_stored_leaf)
    positions = tree.flatten_up_to(numbers)
    nodes: list[Any] = tree.flatten_up_to(states)
    ways = [
        extras.get(at) if isinstance(at, int) else node.leaf_storage()
        for at, node in zip(positions, nodes, strict=True)
    ]
    return nodes, ways, tree


def _check_unique(infos: list[LeafInfo]) -> None:
    seen: dict[str, LeafInfo] = {}
    for info in infos:
        if info.name in seen:
            raise LeafError(
                f"two leaves would have the name `{info.name}`: {shown(info)} and "
                f"{shown(seen[info.name])}. Rename a key of the parameters or a field of the state."
            )
        seen[info.name] = info


def count_of(leaf: Any) -> int | None:
    """Returns the value of a single integer; `None` for anything else."""
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer) or np.size(leaf) != 1:
        return None
    if not jnp.issubdtype(jnp.result_type(leaf), np.integer):
        return None
    return int(local(leaf).reshape(()))


def update_counts(leaves: Iterable[LeafInfo]) -> tuple[dict[str, int | None], bool]:
    """Returns the counts of a state, and whether they say the number of updates."""
    single = [leaf for leaf in leaves if leaf.kind == "state" and not leaf.shape]
    counts = {leaf.name: leaf.value for leaf in single if leaf.path[-1] == "count"}
    are_mini = any(leaf.path[-1] in ("mini_step", "gradient_step") for leaf in single)
    return counts, len(set(counts.values())) <= 1 and not are_mini


def local(leaf: Any) -> np.ndarray[Any, Any]:
    """Returns the local value of a leaf that is the same in all processes."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = leaf.addressable_data(0)
    return np.asarray(leaf)


def _groups(optimizer: Optimizer) -> dict[str, tuple[Names, ...]]:
    """The parameters of each group; those without one are frozen."""
    groups = {
        path_str(group): tuple(path for path, _ in named_leaves(part.target))
        for group, part in optimizer.optimizer_def.leaf_groups(optimizer)
        if group
    }
    trained = {path for paths in groups.values() for path in paths}
    frozen = [path for path, _ in named_leaves(optimizer.target) if path not in trained]
    if groups and frozen:
        # no group can have this name: `~` is escaped in the names of groups
        groups["frozen" if "frozen" not in groups else "~frozen"] = tuple(frozen)
    return groups


# A source or a target: the leaves of its transformations, and what they say of one another.


TRAINED: Final = frozenset(
    {"moment", "second_moment", "accumulator", "params_copy", "factored", "statistic"}
)
"""Roles of leaves whose values training determines."""


# A raw PRNG key has up to four words, a typed one is a scalar.
_FEW: Final = 4


class Side:
    """The source of a plan, or its target: what the leaves of transformations are.

    Args:
      source: what holds the leaves.
      leaves: those of transformations.
      transformations: in the order in which they act.
      paths: where the leaves are in `param_states`, by name, of a target.
      origins: of a target the parameters of the source that each of its own is computed from, where
        these are others.
    """

    def __init__(
        self,
        source: Source,
        leaves: Sequence[LeafInfo],
        transformations: Sequence[TransformationDescription],
        paths: Mapping[str, Names] | None = None,
        origins: Mapping[Names, Sequence[Names]] | None = None,
    ) -> None:
        self.source, self.paths = source, paths or {}
        self.transformations, self._origins = transformations, origins or {}
        self.leaves = {leaf.name: leaf for leaf in leaves}
        self.owners = _owners(source.schema)
        self._kept: dict[TransformationKey, list[LeafInfo]] = {}
        self._index: dict[Any, LeafInfo] = {}
        self._groups: dict[Any, dict[Names, None]] = {}
        for leaf in leaves:
            name, parameter = leaf.kept_by.name, leaf.parameter
            self._kept.setdefault(leaf.kept_by, []).append(leaf)
            self._index[(*leaf.kept_by, leaf.field, parameter)] = leaf
            for what in ((name, parameter), (name,), (parameter,)):
                self._groups.setdefault(what, {})[leaf.group] = None
        self._by_key = {transformation.key: transformation for transformation in transformations}
        self._alike: dict[Any, list[TransformationDescription]] = {}
        for x in sorted(transformations, key=lambda x: x.number):
            self._alike.setdefault((x.group, x.name), []).append(x)

    def same(self, leaves: Sequence[LeafInfo]) -> bool | None:
        """Whether leaves have the same value bit for bit; `None` if that needs reading arrays."""
        # Counts are in the schema; the source compares others of up to four elements.
        if len(leaves) == 1:
            return True
        values = {leaf.value for leaf in leaves}
        if None not in values:
            return len(values) == 1
        if len({(leaf.shape, leaf.dtype) for leaf in leaves}) > 1:
            return False
        if any(leaf.parameter is not None or math.prod(leaf.shape) > _FEW for leaf in leaves):
            return None
        return self.source.same([leaf.name for leaf in leaves])

    def find(self, leaf: LeafInfo, group: Names, number: int) -> LeafInfo | None:
        """Returns the corresponding leaf in a group, whatever its dimensions."""
        return self._index.get((group, leaf.kept_by.name, number, leaf.field, leaf.parameter))

    def groups(self, *what: Any) -> Sequence[Names]:
        """Returns the groups in which a transformation, a parameter, or both, have leaves."""
        return list(self._groups.get(what, ()))

    def alike(self, group: Names, name: str) -> Sequence[TransformationDescription]:
        """Returns the transformations of one name in a group, by number."""
        return self._alike.get((group, name), ())

    def keeper(self, leaf: LeafInfo) -> TransformationDescription:
        """Returns the transformation that keeps a leaf."""
        return self.transformation(leaf.kept_by)

    def transformation(self, key: TransformationKey) -> TransformationDescription:
        """Returns a transformation; only its name if it is not described."""
        return self._by_key.get(key) or TransformationDescription(key.name, key.number, key.group)

    def before(self, key: TransformationKey) -> Sequence[TransformationDescription]:
        """Returns the transformations before one, in enclosing and nested groups too."""
        earlier: list[TransformationDescription] = []
        for transformation in self.transformations:
            if transformation.key == key:
                return earlier
            if is_around(transformation.group, key.group):
                earlier.append(transformation)
        return []

    def leaves_of(self, key: TransformationKey) -> Sequence[LeafInfo]:
        """Returns the leaves of a transformation."""
        return self._kept.get(key, ())

    def followed(self, key: TransformationKey) -> Sequence[Names]:
        """Returns the parameters that leaves of a transformation follow."""
        params = (leaf.parameter for leaf in self.leaves_of(key))
        return list(dict.fromkeys(param for param in params if param is not None))

    def came_from(self, param: Names) -> Sequence[Names]:
        """Returns the parameters of the source that one is computed from."""
        return self._origins.get(param, (param,))

    def is_recorded(self, leaf: LeafInfo) -> bool:
        """Whether a leaf is a setting recorded in the state, rather than a result of training."""
        # Of a transformation that nobody has described, a number may be learnt whatever its name.
        is_number = leaf.parameter is None and leaf.role == "other" and leaf.field != ()
        keeper = self.keeper(leaf)
        return is_number and keeper.source != "types" and leaf.field[-1] in keeper.settings

    def holds_parameters(self, leaf: LeafInfo) -> bool:
        """Whether a leaf belongs to parameters by their order; entries of a list may."""
        is_unknown = leaf.parameter is None and leaf.role == "other"
        is_entry = is_unknown and leaf.field[-1:] != () and leaf.field[-1].isdigit()
        return is_concatenated(leaf) or (is_entry and self.keeper(leaf).source == "types")

    def counts_updates(self, leaf: LeafInfo) -> bool:
        """Whether a leaf counts the updates emitted by a window of mini-steps."""
        bearings = self.keeper(leaf).bearing.values()
        windows = {bearing.count for bearing in bearings if bearing.effect == "window"}
        is_count = leaf.parameter is None and leaf.role == "count"
        return bool(windows) and is_count and leaf.field not in windows


def is_around(group: Names, other: Names) -> bool:
    """Whether groups are the same, or one of them is inside of the other."""
    shared = min(len(group), len(other))
    return group[:shared] == other[:shared]


def is_concatenated(leaf: LeafInfo) -> bool:
    """Whether a leaf is a vector of all parameters, as in `optax.flatten`."""
    is_array = bool(leaf.dimensions) and leaf.role in TRAINED and leaf.role != "statistic"
    return leaf.parameter is None and is_array


def has_window(transformation: TransformationDescription) -> bool:
    """Whether it holds partial results until the end of a window or a cycle."""
    return any(bearing.effect == "window" for bearing in transformation.bearing.values())


def source_side(source: Source, like: Schema) -> Side:
    """Returns the side of a source; leaves of no known transformation are those of their names."""
    leaves = []
    for leaf in source.schema.leaves:
        known = like.by_name.get(leaf.name)
        if leaf.kind == "state" and leaf.transformation:
            leaves.append(leaf)
        elif leaf.kind == "state" and known is not None:
            leaves.append(
                dataclasses.replace(known, shape=leaf.shape, dtype=leaf.dtype, value=leaf.value)
            )
    return Side(source, leaves, source.schema.transformations)


def _owners(schema: Schema) -> dict[Names, Names]:
    """The group of every parameter that is trained."""
    if not schema.groups:
        return {leaf.path[1:]: () for leaf in schema.leaves if leaf.kind == "params"}
    return {param: group for param, groups in _training(schema).items() for group in groups}


def _training(schema: Schema) -> dict[Names, set[Names]]:
    """The groups of every parameter in which transformations act; none of a frozen one."""
    acting = {t.group[:n] for t in schema.transformations for n in range(1, len(t.group) + 1)}
    groups: dict[Names, set[Names]] = {}
    for name, params in schema.groups.items():
        for param in params:
            groups.setdefault(param, set()).update({split_path(name)} & acting)
    return groups


def frozen(schema: Schema) -> set[Names]:
    """Returns the parameters known not to be trained: `FROZEN`, or `set_to_zero`."""
    last = {transformation.group: transformation.name for transformation in schema.transformations}
    groups = _training(schema)
    for leaf in schema.leaves:
        if leaf.kind == "state" and leaf.parameter is not None and leaf.group:
            groups.setdefault(leaf.parameter, set()).add(leaf.group)
    # `optax.partition` does not say which parameters are in a group without state for each.
    unknown = {group for group in last if group} - set().union(*groups.values())
    idle = {param for param, training in groups.items() if not training}
    for leaf in schema.leaves:
        if leaf.kind == "params":
            training = groups.get(leaf.path[1:]) or unknown
            if {last[group] for group in training if group in last} == {"set_to_zero"}:
                idle.add(leaf.path[1:])
    return idle


UPDATE: Final = "update"
"""The setting that names the factory of the update function if another one created the state."""


def like_numbers(
    old: Side, new: Side, name: str, was: Names, now: Names
) -> tuple[Mapping[int, int], bool]:
    """Returns, for each number of a transformation in `new`, the matching number in `old`."""
    # Equal settings are matched first, then the rest in order. Of several the first that acts on a
    # common parameter is taken: a chain around groups has one `adam` for each. Also returned is
    # whether the matching is unambiguous.
    before, after = old.alike(was, name), new.alike(now, name)
    is_one = len(before) == len(after) == 1
    free, numbers, is_clear = list(before), dict[int, int](), True
    for is_like in (_is_same, is_alike, None):
        left = [x for x in after if x.number not in numbers]
        if is_like is None:
            is_clear = not (left and free) or len(left) == len(free)
        for one in left:
            # Different functions may update states of one `init`.
            update, may_differ = one.settings.get(UPDATE), is_like is None and is_one
            like = [x for x in free if may_differ or x.settings.get(UPDATE) == update]
            like = [x for x in like if is_like is None or is_like(x, one)]
            if like:
                params = _acted_on(new, one)
                best = next((x for x in like if params & _acted_on(old, x)), like[0])
                numbers[one.number] = best.number
                free.remove(best)
    return numbers, is_clear


def _acted_on(side: Side, transformation: TransformationDescription) -> set[Names]:
    return {*side.followed(transformation.key), *(transformation.parameters or ())}


def shared_settings(
    old: TransformationDescription, new: TransformationDescription
) -> Sequence[str]:
    """Returns the settings that both have; the writer of a checkpoint may have known fewer."""
    return sorted(old.settings.keys() & new.settings.keys())


def _is_same(old: TransformationDescription, new: TransformationDescription) -> bool:
    return dict(old.settings) == dict(new.settings)


def is_alike(old: TransformationDescription, new: TransformationDescription) -> bool:
    """Whether the settings that both have are equal."""
    return all(old.settings[name] == new.settings[name] for name in shared_settings(old, new))
