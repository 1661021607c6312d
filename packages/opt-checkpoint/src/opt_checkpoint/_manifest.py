"""The manifest of a checkpoint: JSON next to the arrays that says what they are.

The structure of a pytree saved as `extras`, here `{"position": 3, "rng": [key, None]}`, is

    {"dict": [["position", "python"], ["rng", {"list": ["jax", null]}]]}

Leaves are the words that say what they were; `None` is itself.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
from flax.traverse_util import unflatten_dict
from opt_core.extend import LeafInfo, Names, Schema, children, read_record, record_data, shown

from opt_checkpoint._folder import MANIFEST, item_folder
from opt_checkpoint.errors import DamagedError, LeafError, LoadError, MissingError, VersionError

FORMAT_VERSION = 1
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
EXTRA: Final = "extra"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a manifest.

    Attributes:
      step: the number it was saved under.
      schema: its leaves and the optimizer that wrote them.
      digests: of each leaf in the store, 16 hexadecimal digits over its bits and its name.
      impls: the types of PRNG keys, by name.
      scalars: the values of Python scalars, by name.
      metadata: JSON data saved with it.
      extras: the structure of the pytree saved with it.
    """

    step: int
    schema: Schema
    digests: Mapping[str, str]
    impls: Mapping[str, str]
    scalars: Mapping[str, Any]
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


def store_key(path: Names) -> Names:
    """Returns the components of the key in the store: letters, digits, `_`, `-`, and `%` escapes.

    Examples:
      >>> store_key(('params', 'a.b', '../x', ''))
      ('params', 'a%2Eb', '%2E%2E%2Fx', '%')
    """
    return tuple(
        urllib.parse.quote(part, safe="", errors="surrogatepass")
        .replace(".", "%2E")
        .replace("~", "%7E")
        or "%"
        for part in path
    )


def nest(flat: Mapping[Names, Any]) -> dict[str, Any]:
    """Returns a nested dictionary; raises a `LeafError` if one key is the beginning of another."""
    for path in flat:
        if any(path[:length] in flat for length in range(1, len(path))):
            raise LeafError(
                f"`{'/'.join(path)}`: another leaf has the same name, or its name is the beginning "
                "of this one: rename one of them"
            )
    return dict(unflatten_dict(flat))


def encode_schema(schema: Schema) -> bytes:
    """Returns the JSON of a schema without the values of counts, shared by all steps."""
    fields = [(x.name, x.default) for x in dataclasses.fields(LeafInfo) if x.name != "value"]
    leaves = [
        {name: value for name, default in fields if (value := getattr(leaf, name)) != default}
        for leaf in schema.leaves
    ]
    # `record_data` would make a deep copy of every leaf.
    data = record_data(dataclasses.replace(schema, leaves=(), versions=_versions()))
    return _canonical({**data, "leaves": leaves})


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
    path = item_folder(folder) / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        if not folder.is_dir():
            raise MissingError(f"`{folder}` has been deleted") from None
        raise DamagedError(f"`{path}` cannot be read: {error.strerror}") from error
    return decode(data, where=str(path))


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
    leaves, digests, scalars = [], {}, {}
    for info, digest in zip(infos, body.digests, strict=True):
        value = step.values.get(info.name)
        is_python = info.dtype == PYTHON
        if not (info.is_key or is_python or info.dtype in DTYPES):
            raise LoadError(f"`{info.name:.200}`: `{info.dtype:.40}` is not a dtype of checkpoints")
        if (
            (is_python and not is_scalar(value))
            or info.is_key != (info.name in step.impls)
            or is_stored(info) != (digest is not None)
        ):
            raise LoadError(f"`{info.name:.200}`: what was recorded is not of {shown(info):.80}")
        if digest is not None:
            digests[info.name] = digest
        if is_python:
            scalars[info.name] = value
        elif info.value != value:
            info = dataclasses.replace(info, value=value)
        leaves.append(info)
    schema = dataclasses.replace(body.schema, leaves=tuple(leaves))
    if len(schema.by_name) != len(leaves):
        raise LoadError("two leaves have one name")
    # `read_record` makes tuples of lists.
    metadata, extras = data["step"]["metadata"], data["step"].get("extras")
    return Manifest(step.number, schema, digests, step.impls, scalars, metadata, extras)


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


def structure_of(tree: Any) -> Any:
    """Returns the structure of a pytree as JSON data.

    Nodes other than dicts, lists and tuples become dicts by the names of their children; so do keys
    that JSON does not have become strings.
    """
    opened = children(tree)
    if tree is None:
        return None
    if opened is None:
        if isinstance(tree, np.generic | np.ndarray):
            return "numpy" if isinstance(tree, np.ndarray) else "scalar"
        return "python" if is_scalar(tree) else "jax"
    if isinstance(tree, dict):
        named = [(_key(key), child) for key, child in tree.items()]
    elif type(tree) in (list, tuple):
        return {type(tree).__name__: [structure_of(child) for child in tree]}
    else:
        named = list(opened.children)
    return {"dict": [[key, structure_of(child)] for key, child in named]}


def _key(key: Any) -> Any:
    is_exact = key is None or type(key) in (bool, int, float, str)
    return key if is_exact else str(key)


def rebuilt(structure: Any, leaf: Callable[[Names], Any], path: Names = (EXTRA,)) -> Any:
    """Returns a pytree of the leaves at its paths; the inverse of `structure_of`."""
    match structure:
        case None:
            return None
        case "python" | "jax":
            return leaf(path)
        case "numpy":
            return np.array(leaf(path))
        case "scalar":
            return np.asarray(leaf(path))[()]
        case {"list": list(members)} | {"tuple": list(members)}:
            nodes = [rebuilt(x, leaf, (*path, str(i))) for i, x in enumerate(members)]
            return nodes if "list" in structure else tuple(nodes)
        case {"dict": list(members)}:
            return dict(_item(member, leaf, path) for member in members)
    raise LoadError(f"`extras`: {structure!s:.40} is not the structure of a pytree")


def _item(member: Any, leaf: Callable[[Names], Any], path: Names) -> tuple[Any, Any]:
    match member:
        case [None | bool() | int() | float() | str() as key, inner]:
            return key, rebuilt(inner, leaf, (*path, str(key)))
    raise LoadError(f"`extras`: {member!s:.40} is not a key and a structure")
