"""The manifest of a checkpoint: JSON beside the arrays that says what they are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opt_checkpoint._disk.storage import Record, check, is_readable
from opt_checkpoint._naming.schema import LeafInfo, Schema
from opt_checkpoint.errors import (
    DamagedError,
    LeafError,
    LoadError,
    MissingError,
    VersionError,
)

FORMAT_VERSION = 2
FILE_NAME = "manifest.json"
# The first release that reads `FORMAT_VERSION`.
NEEDS = "0.1.0"
# Of metadata: well below what any stack of calls leaves room for.
_MAX_DEPTH = 200


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a manifest may hold; more is an error before memory is taken for it.

    Attributes:
      bytes: of the file.
      items: values in it, however deep.
    """

    bytes: int = 256 * 2**20
    items: int = 16_000_000


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
      step: that it was saved as.
      schema: its leaves and who wrote them.
      records: by name, how each leaf is stored.
      metadata: JSON data that was saved with it.
    """

    step: int
    schema: Schema
    records: Mapping[str, Record]
    metadata: Any = None

    def encode(self) -> bytes:
        """Returns the bytes of the file: canonical JSON and its SHA-256."""
        records = [
            {k: v for k, v in vars(self.records[info.name]).items() if v is not None}
            for info in self.schema.leaves
        ]
        body = {
            "step": self.step,
            "schema": _schema_data(self.schema),
            "records": records,
            "metadata": self.metadata,
        }
        text = _canonical(body)
        whole = {
            "format_version": FORMAT_VERSION,
            "needs": NEEDS,
            "sha256": hashlib.sha256(text).hexdigest(),
        }
        return _canonical(whole)[:-1] + b',"manifest":' + text + b"}\n"

    @classmethod
    def decode(cls, data: bytes, *, where: str, limits: Limits | None = None) -> Manifest:
        """Reads the bytes of a file.

        Args:
          data: the bytes.
          where: for errors, the file.
          limits: on what may be in it.

        Raises:
          DamagedError: they are not those that were written.
          LoadError: they are no manifest, or too large a one.
          VersionError: a newer format.
        """
        whole = _parse(data, where, limits or Limits())
        version = whole.get("format_version")
        if type(version) is not int or version < FORMAT_VERSION:
            raise LoadError(f"`{where}`: expected `format_version`, found none: it is no manifest")
        if version > FORMAT_VERSION:
            raise VersionError(
                f"`{where}`: written in format {version}, which needs opt-checkpoint >= "
                f"{whole.get('needs')!s:.40}; this one reads up to format {FORMAT_VERSION}"
            )
        body = whole.get("manifest")
        if hashlib.sha256(_canonical(body)).hexdigest() != whole.get("sha256"):
            raise DamagedError(f"`{where}`: its SHA-256 is not the one written in it: damaged")
        return cls._from_data(body, where)

    @classmethod
    def _from_data(cls, body: Any, where: str) -> Manifest:
        if not isinstance(body, dict) or body.keys() != {"step", "schema", "records", "metadata"}:
            raise LoadError(f"`{where}`: expected the parts of a manifest, found others")
        step, records = body["step"], body["records"]
        if type(step) is not int or step < 0:
            raise LoadError(f"`{where}`: expected a step from 0 on, found {step!r:.40}")
        schema = Schema.from_data(body["schema"])
        if not isinstance(records, list) or len(records) != len(schema.leaves):
            raise LoadError(
                f"`{where}`: expected {len(schema.leaves)} records, as many as leaves, found "
                f"{len(records) if isinstance(records, list) else 'none'}"
            )
        by_name = {
            info.name: _record(info, record, where)
            for info, record in zip(schema.leaves, records, strict=True)
        }
        if len(by_name) != len(records):
            raise LoadError(f"`{where}`: two leaves have one name")
        return cls(step, schema, by_name, body["metadata"])


def read_manifest(folder: Path, *, limits: Limits | None = None) -> Manifest:
    """Reads the manifest of a step, or of an item that `OptimizerHandler` wrote.

    Raises:
      DamagedError: it is not what was written, or is missing.
      LoadError: it is no manifest, or too large a one.
      MissingError: there is no such folder.
      VersionError: a newer format.
    """
    beside = folder / FILE_NAME
    path = beside if beside.is_file() else folder / "manifest" / FILE_NAME
    limits = limits or Limits()
    try:
        with path.open("rb") as file:
            data = file.read(limits.bytes + 1)
    except OSError as error:
        if not folder.is_dir():
            raise MissingError(f"`{folder}` has been deleted") from None
        raise DamagedError(f"`{path}` cannot be read: {error.strerror}") from error
    return Manifest.decode(data, where=str(path), limits=limits)


def canonical_json(data: Any) -> bytes:
    """Returns JSON data as bytes that depend on nothing but the data.

    Raises:
      TypeError: not JSON data.
    """
    return _canonical(data)


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def _schema_data(schema: Schema) -> dict[str, Any]:
    """`schema.to_data()`, without a deep copy of every leaf: `save` waits for this."""
    names = [field.name for field in dataclasses.fields(LeafInfo)]
    leaves = [{name: getattr(leaf, name) for name in names} for leaf in schema.leaves]
    return {**dataclasses.replace(schema, leaves=()).to_data(), "leaves": leaves}


def _parse(data: bytes, where: str, limits: Limits) -> dict[str, Any]:
    if excess := over_limits(data, limits):
        raise LoadError(f"`{where}`: {excess}")
    try:
        whole = json.loads(data, object_pairs_hook=_unique)
    except RecursionError:
        raise LoadError(f"`{where}`: nested too deeply for a manifest") from None
    except ValueError as error:
        raise DamagedError(f"`{where}`: no JSON: {error!s:.200}") from None
    if not isinstance(whole, dict):
        raise LoadError(f"`{where}`: expected a mapping, found {type(whole).__name__}")
    return whole


def over_limits(data: bytes, limits: Limits) -> str | None:
    """Returns what a manifest has too much of, if anything."""
    items = data.count(b",") + data.count(b"[") + data.count(b"{")
    for found, allowed, what in (
        (len(data), limits.bytes, "bytes"),
        (items, limits.items, "values"),
    ):
        if found > allowed:
            return f"more than {allowed:,} {what}, the limit of a manifest"
    return None


def json_copy(metadata: Any) -> Any:
    """Returns a copy of JSON data that is read again as it is.

    Raises:
      LeafError: no JSON data, nested too deeply, or a number of too many digits.
    """
    try:
        _check_json(metadata, 0)
        return json.loads(json.dumps(metadata))
    except (TypeError, ValueError, RecursionError) as error:
        raise LeafError(f"`metadata`: expected JSON data: {error!s:.200}") from None


def _check_json(data: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} deep")
    if isinstance(data, int) and not is_readable(data):
        raise ValueError("an integer of so many digits is not read again")
    if isinstance(data, dict):
        if odd := [key for key in data if not isinstance(key, str)]:
            raise TypeError(f"keys are texts, found {odd[0]!r:.80}")
        data = data.values()
    elif not isinstance(data, list | tuple):
        return
    for value in data:
        _check_json(value, depth + 1)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _record(info: LeafInfo, data: Any, where: str) -> Record:
    fields = {field.name for field in dataclasses.fields(Record)}
    if not isinstance(data, dict) or not data.keys() <= fields or "storage" not in data:
        raise LoadError(f"`{where}`: `{info.name:.200}`: its record is malformed")
    key = data.get("key", [])
    texts = [data["storage"], data.get("digest") or "", data.get("impl") or ""]
    if not isinstance(key, list) or not all(type(text) is str for text in [*key, *texts]):
        raise LoadError(f"`{where}`: `{info.name:.200}`: its record is malformed")
    record = Record(**{**data, "key": tuple(key)})
    check(info, record)
    return record
