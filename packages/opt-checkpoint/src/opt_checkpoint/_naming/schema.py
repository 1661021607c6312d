"""What a checkpoint holds, without its values: written as JSON next to the arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import jax
from jax.sharding import Sharding
from opt_core import LeafDescription, TransformationDescription
from opt_core.json_records import read_record, record_data

from opt_checkpoint.errors import LoadError

Names = tuple[str, ...]
Kind: TypeAlias = Literal["params", "state", "extra"]

# What TensorStore's zarr driver writes and reads back bit for bit.
DTYPES = frozenset(
    {
        *("bool", "int2", "int4", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64", "bfloat16", "float16", "float32", "float64"),
        *("complex64", "complex128", "float4_e2m1fn", "float8_e4m3b11fnuz", "float8_e4m3fn"),
        *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    }
)


def leaf_name(path: Sequence[str]) -> str:
    """Returns the components of a name joined by `/`; inside of them `~` is `~0` and `/` is `~1`.

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
      transformation: what keeps it, e.g. `'adam'`, or `'adam#2'` for the second one.
      role: what it is for, see `opt_core.LeafDescription`; empty for other leaves.
      dimensions: for each of its dimensions that of the parameter, or `None`; `None` altogether if
        that is not known.
      axes: logical axes, if known.
      value: of a single integer: counts are needed before arrays are read.
      stored: of an array that stands for another leaf, or for more digits of a parameter, how: a
        key of `Schema.storage`, or a word of `opt_core.protocols.StoresParams`.
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
    axes: tuple[Any, ...] | None = None
    value: int | None = None
    stored: str = ""

    @functools.cached_property  # used many times, for thousands of leaves
    def name(self) -> str:
        """The components joined: see `leaf_name`."""
        return leaf_name(self.path)

    @property
    def is_key(self) -> bool:
        """Whether it is a typed PRNG key."""
        return self.dtype.startswith("key<")

    @property
    def base(self) -> str:
        """What keeps it, without the number."""
        return self.transformation.partition("#")[0]

    @property
    def field(self) -> Names:
        """The part of its name between transformation and parameter."""
        first = 2 * len(self.group) + 2  # state, groups and names, transformation
        return self.path[first : len(self.path) - len(self.parameter or ())]

    @property
    def description(self) -> LeafDescription:
        """Its `opt_core.LeafDescription`, with the name as its path."""
        number = self.transformation.partition("#")[2]
        role: Any = self.role or "other"
        return LeafDescription(
            path=self.path,
            group=self.group,
            transformation=self.base,
            number=int(number or 1),
            field=self.field,
            parameter=self.parameter,
            dimensions=self.dimensions,
            role=role,
            source="stated",
        )


def shown(leaf: Any) -> str:
    """Returns the dtype and the shape of a leaf or an array: `'float32[2, 3]'`."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def numbered(name: str, number: int) -> str:
    """Returns what names of leaves have for a transformation: `'adam#2'` for the second `adam`."""
    return name if number == 1 else f"{name}#{number}"


def state_path(group: Names, transformation: str) -> Names:
    """Returns the beginning of the paths of what a transformation in a group keeps."""
    return ("state", *(part for label in group for part in ("groups", label)), transformation)


@dataclasses.dataclass(frozen=True)
class Schema:
    """The leaves of a checkpoint, and what is known about the optimizer that wrote it.

    Attributes:
      leaves: every leaf, in the order of JAX.
      optimizer: the transformations in the order in which they act: the optimizer's fingerprint;
        `None` if it is not known.
      groups: the path of every parameter of each group, by the group's name; frozen ones too.
      versions: of the libraries that wrote it.
      storage: what codes mean: see `opt_core.protocols.StoresLeaf`.
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

    def to_data(self) -> dict[str, Any]:
        """Returns it as JSON data; `Schema.from_data` is the inverse."""
        data: dict[str, Any] = record_data(self)
        return data

    @classmethod
    def from_data(cls, data: Any) -> Schema:
        """Returns the schema of JSON data.

        Raises:
          LoadError: they are not those of a schema; says where.
        """
        return read_record(cls, data, "schema", LoadError)


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


@runtime_checkable
class HasShardings(Protocol):
    """A source that knows where its leaves were."""

    def shardings(self, names: Iterable[str]) -> Mapping[str, Sharding]:
        """Returns the shardings of those leaves of which one is known, by name.

        One over devices that this process does not have is on an `AbstractMesh`.
        """
