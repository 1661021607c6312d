"""What a checkpoint holds, without its values: data that is written beside the arrays as JSON."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp

from opt_checkpoint.errors import LoadError

Names = tuple[str, ...]

DIGEST = ":sha256"
"""Ends the names of settings that are digests: they only tell transformations apart."""

INJECTED = f"injected{DIGEST}"
"""The setting of what `optax.inject_hyperparams` injects, and of what it injects it into."""

MADE_BY = "init:"
"""The setting that names what made the state, where that is not what updates it."""

DIMENSIONS = "dimensions:"
"""Begins the names of settings that say which dimensions of a parameter a leaf of the state has."""


def leaf_name(path: Sequence[str]) -> str:
    """Returns the components of a name joined by `/`; inside of one `~` is `~0` and `/` is `~1`.

    The escapes are those of JSON Pointer (RFC 6901), so no two paths share a name.

    Examples:
      >>> leaf_name(('params', 'decoder', 'kernel'))
      'params/decoder/kernel'
      >>> leaf_name(('params', 'a/b')), leaf_name(('params', 'a', 'b'))
      ('params/a~1b', 'params/a/b')
    """
    return "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)


def leaf_path(name: str) -> Names:
    """Returns the components of a name; the inverse of `leaf_name`.

    Examples:
      >>> leaf_path('params/a~1b')
      ('params', 'a/b')
    """
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in name.split("/"))


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
      transformation: what keeps it, e.g. `'adam'`, with `'#2'` for the second of its like.
      type: the type that holds it, as package and name, e.g. `'optax:ScaleByAdamState'`.
      axes: logical axes, where they are known.
      value: of a single integer: a count is needed before arrays are read.
    """

    path: Names
    shape: tuple[int, ...]
    dtype: str
    kind: str
    parameter: Names | None = None
    group: Names = ()
    transformation: str = ""
    type: str = ""
    axes: tuple[Any, ...] | None = None
    value: int | None = None

    @property
    def name(self) -> str:
        """The components joined: see `leaf_name`."""
        return leaf_name(self.path)

    @property
    def is_key(self) -> bool:
        """Whether it is a typed PRNG key."""
        return self.dtype.startswith("key<")


@dataclasses.dataclass(frozen=True)
class Transformation:
    """One transformation of an optimizer: what decides whether two states mean the same.

    Attributes:
      name: of the function or class that made it, e.g. `'scale_by_adam'`.
      group: the names of the groups around it.
      settings: what was fixed when it was made and can be written down: numbers, booleans,
        strings, by name; of arrays and functions digests, under names that end in `DIGEST`.
      number: which of its like it is in names of leaves, from 1 (`2`: `'adam#2'`); `None` where
        that is not known.
    """

    name: str
    group: Names = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    number: int | None = None


@dataclasses.dataclass(frozen=True)
class Schema:
    """The names of a checkpoint, and what is known about who wrote it.

    Attributes:
      leaves: every leaf, in the order of JAX.
      optimizer: the transformations, in the order in which they act: the optimizer's fingerprint.
      groups: the path of every parameter of each group, by the group's name; frozen ones too.
      versions: of the libraries that wrote it.
    """

    leaves: tuple[LeafInfo, ...]
    optimizer: tuple[Transformation, ...] = ()
    groups: Mapping[str, tuple[Names, ...]] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, LeafInfo]:
        """The leaves by name."""
        return {leaf.name: leaf for leaf in self.leaves}

    def to_data(self) -> dict[str, Any]:
        """Returns it as JSON has data: `Schema.from_data` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_data(cls, data: Any) -> Schema:
        """Returns the schema that JSON data describe.

        Raises:
          LoadError: they describe none; says where.
        """
        schema = _read(cls, data, "schema")
        _check_leaves(schema.leaves)
        return schema


_KINDS = ("params", "state", "extra")


def _check_leaves(leaves: Sequence[LeafInfo]) -> None:
    seen: set[Names] = set()
    for i, leaf in enumerate(leaves):
        where = f"schema/leaves/{i}"
        if not leaf.path:
            raise LoadError(f"`{where}/path`: expected a name, found nothing")
        if leaf.path in seen:
            raise LoadError(f"`{where}/path`: `{leaf.name}` is there twice")
        if leaf.kind not in _KINDS:
            raise LoadError(f"`{where}/kind`: expected one of {_KINDS}, found {leaf.kind!r:.40}")
        is_scalar = (leaf.kind, leaf.dtype) == ("extra", "python")
        if not leaf.is_key and not is_scalar and not _is_dtype(leaf.dtype):
            raise LoadError(f"`{where}/dtype`: `{leaf.dtype:.40}` is no dtype of a checkpoint")
        seen.add(leaf.path)


def _is_dtype(name: str) -> bool:
    try:
        return bool(jnp.dtype(name).name == name)
    except Exception:  # NumPy parses the text: a syntax error, an unknown name, a bad character
        return False


_Record = TypeVar("_Record")


def _read(kind: type[_Record], data: Any, where: str) -> _Record:
    """A dataclass out of JSON data, every field of the type that it is annotated with."""
    if not isinstance(data, Mapping):
        raise LoadError(f"`{where}`: expected a mapping, found {_shown(data)}")
    hints = _hints(typing.cast(Any, kind))
    if unknown := sorted(map(str, data.keys() - hints.keys())):
        raise LoadError(f"`{where}`: expected the fields {sorted(hints)}, found `{unknown[0]:.40}`")
    given = {
        name: _value(hints[name], data[name], f"{where}/{name}") for name in hints if name in data
    }
    try:
        return kind(**given)
    except TypeError as error:
        raise LoadError(f"`{where}`: {error}") from None


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _frozen(data)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        return _value(inner, data, where)
    if origin is tuple and isinstance(data, list | tuple):
        return tuple(_value(args[0], item, f"{where}/{i}") for i, item in enumerate(data))
    if origin is Mapping and isinstance(data, Mapping):
        keys = (_value(str, key, where) for key in data)
        return {key: _value(args[1], data[key], f"{where}/{key}") for key in keys}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _read(hint, data, where)
    if hint is int and where.rpartition("/shape/")[1] and type(data) is int and data < 0:
        raise LoadError(f"`{where}`: expected a size from 0 on, found {data}")
    if isinstance(hint, type) and type(data) is hint:
        return data
    raise LoadError(f"`{where}`: expected {_hinted(hint)}, found {_shown(data)}")


def _frozen(data: Any) -> Any:
    return tuple(map(_frozen, data)) if isinstance(data, list) else data


def _hinted(hint: Any) -> str:
    origin = typing.get_origin(hint) or hint
    names = {tuple: "a list", Mapping: "a mapping", int: "an integer", str: "a string"}
    return names.get(origin, str(hint))


def _shown(data: Any) -> str:
    return f"{data!r:.40}" if isinstance(data, bool | int | float | str) else type(data).__name__


@runtime_checkable
class Source(Protocol):
    """Something that restores may come from: a checkpoint on disk, or a state in memory."""

    @property
    def schema(self) -> Schema:
        """What there is, without reading it."""

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Returns the named leaves, in the dtype and shape that they were saved in.

        Args:
          wanted: for each name where the leaf is to lie; its shape and dtype are those of the
            schema. Without a sharding: on the default device. What JAX cannot hold, 64 bits
            without `jax_enable_x64`, comes as a NumPy array.

        Raises:
          DamagedError: a leaf is not what was written.
        """
