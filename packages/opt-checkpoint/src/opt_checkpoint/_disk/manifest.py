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

from opt_core.extend import LeafInfo, Names, Schema
from opt_core.json_records import read_record, record_data

from opt_checkpoint._disk.storage import DTYPES, PYTHON, Record, check, is_readable
from opt_checkpoint.errors import DamagedError, LeafError, LoadError, MissingError, VersionError

_LIBRARIES = (
    *("jax", "flax", "optax", "orbax-checkpoint"),
    *("opt-core", "opt-optax-bridge", "opt-checkpoint"),
)
FORMAT_VERSION = 1
FILE_NAME = "manifest.json"
NEEDS = "0.1.0"  # the first release that reads `FORMAT_VERSION`
# What a manifest may hold; more is an error before memory is allocated for it.
MAX_BYTES, MAX_ITEMS = 256 * 2**20, 16_000_000
_MAX_DEPTH = 200  # of metadata: leaves room on any call stack
_DIGEST_BYTES = 19  # with quotes and a comma
_FIXED_BYTES = 200  # what else every manifest holds


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


def encode_schema(schema: Schema) -> bytes:
    """Returns the JSON of a schema without the values of counts, shared by all steps."""
    names = [field.name for field in dataclasses.fields(LeafInfo) if field.name != "value"]
    leaves = [{name: getattr(leaf, name) for name in names} for leaf in schema.leaves]
    # `to_data` would make a deep copy of every leaf.
    others = record_data(dataclasses.replace(schema, leaves=(), versions=_versions()))
    return _canonical({**others, "leaves": leaves})


def encode_step(
    step: int, metadata: Any, values: Mapping[str, Any], impls: Mapping[str, str], extras: Any
) -> bytes:
    """Returns the JSON of what a schema does not say, without digests.

    By name, `values` are those of counts and Python scalars, `impls` the types of PRNG keys;
    `extras` is a structure. A `LeafError` says that the metadata are not JSON data, or could not be
    read again.
    """
    try:
        _check_json(metadata, 0)
        own = {"impls": impls, "metadata": metadata, "number": step, "values": values}
        return _canonical(own if extras is None else {**own, "extras": extras})
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


def check_size(schema: bytes, step: bytes, leaves: int) -> None:
    """Raises a `LeafError` if the manifest would be too large to be read again."""
    size = len(schema) + len(step) + _DIGEST_BYTES * leaves + _FIXED_BYTES
    if excess := _excess(size, _count_items(schema) + _count_items(step) + leaves):
        raise LeafError(f"the names and metadata are {excess}")


def decode(data: bytes, *, where: str) -> Manifest:
    """Reads the bytes of a file, which errors call `where`; raises as `read_manifest` does."""
    whole = _parse(data, where)
    version = whole.get("format_version")
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
        return _from_data(body)
    except LoadError as error:
        raise LoadError(f"`{where}`: {error}") from None


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a step, or of an item that `OptimizerHandler` wrote.

    Raises:
      DamagedError: it has changed since it was written, or is missing.
      LoadError: it is not a manifest, or too large.
      MissingError: the folder does not exist.
      VersionError: a newer format.
    """
    path = folder / FILE_NAME
    path = path if path.is_file() else folder / "manifest" / FILE_NAME
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        if not folder.is_dir():
            raise MissingError(f"`{folder}` has been deleted") from None
        raise DamagedError(f"`{path}` cannot be read: {error.strerror}") from error
    return decode(data, where=str(path))


def _from_data(body: Any) -> Manifest:
    body = _mapping(body, {"digests": list, "schema": dict, "step": dict})
    parts = {"impls": dict, "metadata": object, "number": int, "values": dict}
    has_extras = isinstance(body["step"], dict) and "extras" in body["step"]
    step = _mapping(body["step"], {**parts, "extras": object} if has_extras else parts)
    number, digests, values = step["number"], body["digests"], step["values"]
    if type(number) is not int or number < 0:
        raise LoadError(f"expected a non-negative step, found {number!r:.40}")
    schema = read_record(Schema, body["schema"], "schema", LoadError)
    _check_leaves(schema.leaves)
    if len(digests) != len(schema.leaves):
        raise LoadError(f"{len(digests)} digests of {len(schema.leaves)} leaves")
    leaves, records = [], {}
    for leaf, digest in zip(schema.leaves, digests, strict=True):
        name, value = leaf.name, values.get(leaf.name)
        is_count = value is not None and leaf.dtype != PYTHON
        record = Record(digest, step["impls"].get(name), None if is_count else value)
        if not isinstance(digest or "", str) or not isinstance(record.impl or "", str):
            raise LoadError(f"`{name:.200}`: malformed record")
        if is_count and type(value) is not int:
            raise LoadError(f"`{name:.200}`: expected an integer, found {value!r:.40}")
        check(leaf, record)
        records[name] = record
        leaves.append(dataclasses.replace(leaf, value=value) if is_count else leaf)
    if unknown := (values.keys() | step["impls"].keys()) - records.keys():
        raise LoadError(f"no leaf is called `{min(unknown):.200}`")
    return Manifest(
        number,
        dataclasses.replace(schema, leaves=tuple(leaves)),
        records,
        step["metadata"],
        step.get("extras"),
    )


def _check_leaves(leaves: Sequence[LeafInfo]) -> None:
    seen: set[Names] = set()
    for i, leaf in enumerate(leaves):
        where = f"schema/leaves/{i}"
        if not leaf.path:
            raise LoadError(f"`{where}/path`: expected a name, found nothing")
        if leaf.path in seen:
            raise LoadError(f"`{where}/path`: `{leaf.name}` is there twice")
        for k, size in enumerate(leaf.shape):
            if size < 0:
                raise LoadError(f"`{where}/shape/{k}`: expected a non-negative size, found {size}")
        is_scalar = (leaf.kind, leaf.dtype) == ("extra", "python")
        if not leaf.is_key and not is_scalar and leaf.dtype not in DTYPES:
            raise LoadError(f"`{where}/dtype`: `{leaf.dtype:.40}` is not a dtype of checkpoints")
        seen.add(leaf.path)


@functools.cache  # the metadata of a distribution take milliseconds to parse
def _versions() -> Mapping[str, str]:
    return {library: version(library) for library in _LIBRARIES}


def _mapping(data: Any, parts: Mapping[str, type]) -> dict[str, Any]:
    if (
        not isinstance(data, dict)
        or data.keys() != parts.keys()
        or not all(isinstance(data[name], kind) for name, kind in parts.items())
    ):
        raise LoadError("expected the parts of a manifest, found others")
    return data


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def _parse(data: bytes, where: str) -> dict[str, Any]:
    if excess := _excess(len(data), _count_items(data)):
        raise LoadError(f"`{where}`: {excess}")
    try:
        whole = json.loads(data, object_pairs_hook=_unique)
    except RecursionError:
        raise LoadError(f"`{where}`: nested too deeply for a manifest") from None
    except ValueError as error:
        raise DamagedError(f"`{where}` is not JSON: {error!s:.200}") from None
    if not isinstance(whole, dict):
        raise LoadError(f"`{where}`: expected a mapping, found {type(whole).__name__}")
    return whole


def _excess(size: int, items: int) -> str | None:
    for found, allowed, what in ((size, MAX_BYTES, "bytes"), (items, MAX_ITEMS, "values")):
        if found > allowed:
            return f"more than {allowed:,} {what}, the limit of a manifest"
    return None


def _count_items(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _check_json(data: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} deep")
    if isinstance(data, int) and not is_readable(data):
        raise ValueError("Python could not read so many digits again")
    if isinstance(data, dict):
        if odd := [key for key in data if not isinstance(key, str)]:
            raise TypeError(f"expected strings as keys, found {odd[0]!r:.80}")
        data = data.values()
    elif not isinstance(data, list | tuple):
        return
    for value in data:
        _check_json(value, depth + 1)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
