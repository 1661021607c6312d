"""The manifest of a checkpoint: JSON next to the arrays that says what they are."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from opt_core.extend import LeafInfo, Schema, read_record, record_data, shown

from opt_checkpoint.errors import DamagedError, LeafError, LoadError, MissingError, VersionError

FORMAT_VERSION = 1
FILE_NAME = "manifest.json"
ITEM = "leaves"  # Orbax's item of a step: the arrays, with the manifest next to them
ITEM_MARK = "_METADATA"  # Orbax's mark of a tree
NEEDS = "0.1.0"  # the first release that reads `FORMAT_VERSION`
_LIBRARIES = (
    *("jax", "flax", "optax", "orbax-checkpoint"),
    *("opt-core", "opt-optax-bridge", "opt-checkpoint"),
)
# What TensorStore's zarr driver writes and reads back bit for bit.
DTYPES = frozenset(
    {
        *("bool", "int2", "int4", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64", "bfloat16", "float16", "float32", "float64"),
        *("complex64", "complex128", "float4_e2m1fn", "float8_e4m3b11fnuz", "float8_e4m3fn"),
        *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    }
)
PYTHON = "python"  # the dtype of Python scalars, which the manifest holds
_SCALARS = (bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class Record:
    """What the manifest says about one leaf in addition to the schema.

    Attributes:
      digest: 16 hexadecimal digits over its bits and its name; `None` if it is not in the store.
      impl: of a PRNG key.
      scalar: of a Python scalar.
    """

    digest: str | None = None
    impl: str | None = None
    scalar: Any = None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a manifest.

    Attributes:
      step: the number it was saved under.
      schema: its leaves and the optimizer that wrote them.
      records: what else is known about each leaf, by name.
      metadata: JSON data saved with it.
      extras: the structure of the pytree saved with it: see `extras.py`.
    """

    step: int
    schema: Schema
    records: Mapping[str, Record]
    metadata: Any = None
    extras: Any = None


@functools.cache  # the metadata of a distribution take milliseconds to parse
def _versions() -> Mapping[str, str]:
    return {library: version(library) for library in _LIBRARIES}


def is_stored(info: LeafInfo) -> bool:
    """Whether a leaf is in the store: an array with elements."""
    return info.dtype != PYTHON and 0 not in info.shape


def is_scalar(leaf: Any) -> bool:
    """Whether it is a Python scalar, which the manifest holds."""
    return type(leaf) in _SCALARS


def encode_schema(schema: Schema) -> bytes:
    """Returns the JSON of a schema without the values of counts, shared by all steps."""
    names = [field.name for field in dataclasses.fields(LeafInfo) if field.name != "value"]
    leaves = [{name: getattr(leaf, name) for name in names} for leaf in schema.leaves]
    # `record_data` would make a deep copy of every leaf.
    others = record_data(dataclasses.replace(schema, leaves=(), versions=_versions()))
    return _canonical({**others, "leaves": leaves})


def encode_step(
    step: int, metadata: Any, values: Mapping[str, Any], impls: Mapping[str, str], extras: Any
) -> bytes:
    """Returns the JSON of what a schema does not say, without digests.

    By name, `values` are those of counts and Python scalars, `impls` the types of PRNG keys;
    `extras` is a structure. A `LeafError` says that the metadata are not JSON data.
    """
    step_data = {"impls": impls, "metadata": metadata, "number": step, "values": values}
    try:
        _check_keys(metadata)
        return _canonical(step_data if extras is None else {**step_data, "extras": extras})
    except (TypeError, ValueError, RecursionError) as error:
        raise LeafError(f"`metadata`: expected JSON data: {error!s:.200}") from None


def encode(schema: bytes, step: bytes, digests: Sequence[str | None]) -> bytes:
    """Returns the bytes of the file: canonical JSON and its SHA-256."""
    body = b'{"digests":%s,"schema":%s,"step":%s}' % (_canonical(digests), schema, step)
    head = {
        "format_version": FORMAT_VERSION,
        "needs": NEEDS,
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return _canonical(head)[:-1] + b',"manifest":' + body + b"}\n"


def decode(data: bytes, *, where: str) -> Manifest:
    """Reads the bytes of a file, which errors call `where`."""
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"`{where}` is not JSON: {error!s:.200}") from None
    version = whole.get("format_version") if isinstance(whole, dict) else None
    if type(version) is not int or version < 1:
        raise LoadError(f"`{where}` is not a manifest: expected `format_version`")
    if version > FORMAT_VERSION:
        raise VersionError(
            f"`{where}`: written in format {version}, which needs opt-checkpoint >= "
            f"{whole.get('needs')!s:.40}; this one reads format {FORMAT_VERSION}"
        )
    body = whole.get("manifest")
    if hashlib.sha256(_canonical(body)).hexdigest() != whole.get("sha256"):
        raise DamagedError(f"`{where}` is damaged: its SHA-256 is not the one written in it")
    try:
        return _manifest(body)
    except LoadError as error:
        raise LoadError(f"`{where}`: {error}") from None


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a step, or of an item that `OptimizerHandler` wrote."""
    path = item_folder(folder) / FILE_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        if not folder.is_dir():
            raise MissingError(f"`{folder}` has been deleted") from None
        raise DamagedError(f"`{path}` cannot be read: {error.strerror}") from error
    return decode(data, where=str(path))


def has_item(folder: Path) -> bool:
    """Whether a folder is a step of a `Checkpointer`; a tree of Orbax may have that name in it."""
    return (folder / ITEM).is_dir() and not (folder / ITEM_MARK).is_file()


def item_folder(folder: Path) -> Path:
    """Returns where the manifest and the arrays are: in a step of a `Checkpointer`, or here."""
    return folder / ITEM if has_item(folder) else folder


@dataclasses.dataclass(frozen=True)
class _Step:
    """What `encode_step` writes."""

    number: int
    values: Mapping[str, Any]
    impls: Mapping[str, str]
    metadata: Any
    extras: Any = None


@dataclasses.dataclass(frozen=True)
class _Body:
    """What `encode` writes."""

    digests: tuple[str | None, ...]
    schema: Schema
    step: _Step


def _manifest(data: Any) -> Manifest:
    body = read_record(_Body, data, "manifest", LoadError)
    step, infos = body.step, body.schema.leaves
    if len(body.digests) != len(infos):
        raise LoadError(f"{len(body.digests)} digests of {len(infos)} leaves")
    leaves, records = [], {}
    for info, digest in zip(infos, body.digests, strict=True):
        value, impl = step.values.get(info.name), step.impls.get(info.name)
        is_python = info.dtype == PYTHON
        if not (info.is_key or is_python or info.dtype in DTYPES):
            raise LoadError(f"`{info.name:.200}`: `{info.dtype:.40}` is not a dtype of checkpoints")
        if (
            (is_python and not is_scalar(value))
            or info.is_key != (impl is not None)
            or is_stored(info) != (digest is not None)
        ):
            raise LoadError(f"`{info.name:.200}`: what was recorded is not of {shown(info):.80}")
        records[info.name] = Record(digest, impl, value if is_python else None)
        leaves.append(info if is_python else dataclasses.replace(info, value=value))
    if len(records) != len(leaves):
        raise LoadError("two leaves have one name")
    schema = dataclasses.replace(body.schema, leaves=tuple(leaves))
    # `read_record` makes tuples of lists.
    metadata, extras = data["step"]["metadata"], data["step"].get("extras")
    return Manifest(step.number, schema, records, metadata, extras)


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def _check_keys(data: Any) -> None:
    """Raises a `TypeError` where JSON would change a key."""
    if isinstance(data, dict):
        if odd := [key for key in data if not isinstance(key, str)]:
            raise TypeError(f"expected strings as keys, found {odd[0]!r:.80}")
        data = [*data.values()]
    if isinstance(data, list | tuple):
        for value in data:
            _check_keys(value)
