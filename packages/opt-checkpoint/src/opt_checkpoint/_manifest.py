"""What folders hold: steps, another program's or our own, and the manifest of one.

A manifest is JSON next to the arrays that says what they are.
The structure of a pytree saved as `extras`, here `{"position": 3, "rng": [key, None]}`, is

    {"dict": [["position", "python"], ["rng", {"list": ["jax", null]}]]}

Leaves are the words that say what they were; `None` is itself.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
from flax.traverse_util import unflatten_dict
from opt_core.extend import (
    LeafInfo,
    Names,
    Schema,
    children,
    named_leaves,
    path_str,
    read_record,
    record_data,
)

from opt_checkpoint.errors import (
    DamagedError,
    ForeignError,
    LeafError,
    LoadError,
    MissingError,
    VersionError,
)

MANIFEST = "manifest.json"
ITEM = "leaves"  # Orbax's item of a step: the arrays, with the manifest next to them
ITEM_MARK = "_METADATA"  # Orbax's mark of a tree
CHECKPOINT_MARK = "_CHECKPOINT_METADATA"  # of Orbax
INDEX = "checkpoint"  # of T5X's own layout, and of Orbax 0.1
_STEP = re.compile(r"(?:.*[_.-])?\d+", re.DOTALL)
_LISTED = 5

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


def has_item(folder: Path) -> bool:
    """Whether a folder is a step of a `Checkpointer`; a tree of Orbax may have that name in it."""
    return (folder / ITEM).is_dir() and not (folder / ITEM_MARK).is_file()


def item_folder(folder: Path) -> Path:
    """Returns where the manifest and the arrays are: in a step of a `Checkpointer`, or here."""
    return folder / ITEM if has_item(folder) else folder


def list_steps(root: Path) -> list[int]:
    """Returns the steps of a `Checkpointer` in a folder, the oldest first; follows no link."""
    if not root.is_dir():
        return []
    steps = (_step(path) for path in root.iterdir())
    return sorted(step for step in steps if step is not None)


def _step(path: Path) -> int | None:
    name = path.name
    if not (name.isascii() and name.isdecimal() and str(int(name)) == name):
        return None
    return int(name) if has_item(path) and not path.is_symlink() else None


def list_checked(root: Path) -> list[int]:
    """Returns `list_steps`; a `ForeignError` says how to read those of another program."""
    if names := foreign_steps(root):
        raise ForeignError(describe_foreign(root, names))
    return list_steps(root)


def foreign_steps(root: Path) -> list[str]:
    """Returns the names of steps that another program wrote; `.` if the folder itself is a step."""
    if not root.is_dir():
        return []
    if is_orbax(root) and not has_item(root):
        return ["."]
    return sorted(path.name for path in root.iterdir() if _is_foreign(path))


def item_with_manifest(folder: Path) -> Path | None:
    """Returns the folder of the manifest: this folder, or its only item that has a manifest."""
    if has_item(folder) or _is_item(folder):
        return folder
    items = sorted(path for path in folder.iterdir() if _is_item(path))
    if len(items) > 1:
        names = ", ".join(f"`{path.name}`" for path in items)
        raise ForeignError(f"`{folder}` holds several optimizers: give the folder of {names}")
    return items[0] if items else None


def is_orbax(folder: Path) -> bool:
    """Whether a folder is a checkpoint of Orbax, or an item of one."""
    return (folder / CHECKPOINT_MARK).is_file() or (folder / ITEM_MARK).is_file()


def describe_foreign(root: Path, names: Sequence[str]) -> str:
    """Returns the message of a `ForeignError` about foreign steps."""
    step, what = root, "is a checkpoint that no `Checkpointer` wrote"
    if names[0] != ".":
        shown = ", ".join(f"`{name:.80}`" for name in names[:_LISTED])
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        step, what = root / names[0], f"has checkpoints that no `Checkpointer` wrote: {shown}{more}"
    who = "" if step.is_dir() and item_with_manifest(step) else ", written_by=..."
    return (
        f"`{root}` {what}. It is not empty, and nothing in it is touched. Restore one by "
        f"`plan_restore(open_foreign({str(step)!r}{who}), target).apply()`, or a msgpack file by "
        "`restore_legacy`, and save into another folder"
    )


def _is_item(folder: Path) -> bool:
    """Whether `OptimizerHandler` wrote it: its manifest is next to Orbax's description."""
    return (folder / MANIFEST).is_file() and (folder / ITEM_MARK).is_file()


def _is_foreign(path: Path) -> bool:
    """Whether it has the name of a step, another program's marks, and no item of ours."""
    name = path.name
    if path.is_symlink() or not _STEP.fullmatch(name) or "orbax-checkpoint-tmp" in name:
        return False
    if path.is_file():
        return name.startswith("checkpoint_")  # Flax's msgpack
    if not path.is_dir() or has_item(path):
        return False
    if is_orbax(path) or (path / INDEX).is_file():
        return True
    return any((item / ITEM_MARK).is_file() for item in path.iterdir())


# The manifest


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a manifest.

    Attributes:
      step: the number it was saved under.
      schema: its leaves and the optimizer that wrote them.
      digests: of each leaf in the store, 16 hexadecimal digits over its bits and its name.
      metadata: JSON data saved with it.
      extras: the structure of the pytree saved with it.
    """

    step: int
    schema: Schema = dataclasses.field(repr=False)
    digests: Mapping[str, str] = dataclasses.field(repr=False)
    metadata: Any = None
    extras: Any = dataclasses.field(default=None, repr=False)


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
    """Returns the key in the store: letters, digits, `_`, `-`, and `%` escapes."""
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


def json_copy(data: Any) -> Any:
    """Returns JSON data as they will be read; a `LeafError` of anything else."""
    try:
        _check_keys(data)
        return json.loads(json.dumps(data))
    except (TypeError, ValueError, RecursionError) as error:
        raise LeafError(f"`metadata` or `extras`: expected JSON data: {error!s:.200}") from None


def encode(manifest: Manifest) -> bytes:
    """Returns the bytes of the file: canonical JSON and its SHA-256."""
    infos = manifest.schema.leaves
    # The values of counts are not of the schema, and defaults are left out. `record_data` would
    # make a deep copy of every leaf.
    fields = [(x.name, x.default) for x in dataclasses.fields(LeafInfo) if x.name != "value"]
    leaves = [
        {name: value for name, default in fields if (value := getattr(leaf, name)) != default}
        for leaf in infos
    ]
    schema = dataclasses.replace(manifest.schema, leaves=(), versions=_versions())
    step = {
        "metadata": manifest.metadata,
        "number": manifest.step,
        "values": {x.name: x.value for x in infos if x.value is not None},
    }
    if manifest.extras is not None:
        step["extras"] = manifest.extras
    body = {
        "digests": [manifest.digests.get(x.name) for x in infos],
        "schema": record_data(schema) | {"leaves": leaves},
        "step": step,
    }
    head = {
        "format_version": FORMAT_VERSION,
        "needs": NEEDS,
        "sha256": hashlib.sha256(text := _canonical(body)).hexdigest(),
    }
    return _canonical(head)[:-1] + b',"manifest":' + text + b"}\n"


def decode(data: bytes, *, where: str) -> Manifest:
    """Reads the bytes of a file, which errors call `where`."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"`{where}` is not JSON: {error!s:.200}") from None
    version = document.get("format_version") if isinstance(document, dict) else None
    if type(version) is not int or version < 1:
        raise LoadError(f"`{where}` is not a manifest: expected `format_version`")
    if version > FORMAT_VERSION:
        raise VersionError(
            f"`{where}`: written in format {version}, which needs opt-checkpoint >= "
            f"{document.get('needs')!s:.40}; this one reads format {FORMAT_VERSION}"
        )
    body = document.get("manifest")
    if hashlib.sha256(_canonical(body)).hexdigest() != document.get("sha256"):
        raise DamagedError(f"`{where}` is damaged: its SHA-256 is not the one written in it")
    try:
        return _manifest(body)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise LoadError(f"`{where}` is not a manifest: {error}") from None


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


def _manifest(body: Any) -> Manifest:
    schema = read_record(Schema, body["schema"], "schema", LoadError)
    step, infos = body["step"], schema.leaves
    values = step["values"]
    leaves = [
        dataclasses.replace(x, value=values[x.name]) if x.name in values or x.dtype == PYTHON else x
        for x in infos
    ]
    digests = dict(zip((x.name for x in infos), body["digests"], strict=True))
    digests = {name: digest for name, digest in digests.items() if digest is not None}
    if digests.keys() != {x.name for x in infos if is_stored(x)}:
        raise LoadError("its digests are not of the leaves that are stored")
    schema = dataclasses.replace(schema, leaves=tuple(leaves))
    return Manifest(step["number"], schema, digests, step["metadata"], step.get("extras"))


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


def extra_leaves(tree: Any, argument: str) -> list[tuple[LeafInfo, Any]]:
    """Returns the leaves of a pytree of extras with what they are, under `extra/`."""
    try:
        flat = named_leaves(tree)
    except (TypeError, ValueError) as error:
        text = " ".join(str(error).split())[:200]
        raise LeafError(f"`{argument}`: expected a pytree of named leaves: {text}") from error
    return [(_extra_info((EXTRA, *path), leaf), leaf) for path, leaf in flat]


def _extra_info(path: Names, leaf: Any) -> LeafInfo:
    if is_scalar(leaf):
        return LeafInfo(path, (), PYTHON, EXTRA)
    if hasattr(leaf, "dtype"):
        return LeafInfo(path, tuple(np.shape(leaf)), str(leaf.dtype), EXTRA)
    expected = "an array, a typed PRNG key or a Python scalar"
    raise LeafError(f"`{path_str(path)}`: expected {expected}, found {type(leaf).__name__}")


def structure_of(tree: Any) -> Any:
    """Returns the structure of extras as JSON data; nodes that JSON lacks become dicts."""
    opened = children(tree)
    if tree is None:
        return None
    if opened is None:
        if isinstance(tree, np.generic | np.ndarray):
            return "numpy" if isinstance(tree, np.ndarray) else "scalar"
        return "python" if is_scalar(tree) else "jax"
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [structure_of(child) for child in tree]}
    named = tree.items() if isinstance(tree, dict) else opened.children
    return {"dict": [[_extra_key(key), structure_of(child)] for key, child in named]}


def _extra_key(key: Any) -> Any:
    if key is None or is_scalar(key):
        return key
    if isinstance(key, str) and key == str(key):  # such as `np.str_`
        return str(key)
    raise LeafError(
        f"`extras`: expected strings, Python numbers or `None` as keys of dicts, found {key!r:.80}"
    )


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
        case {"dict": members}:
            return {key: rebuilt(inner, leaf, (*path, str(key))) for key, inner in members}
    ((kind, members),) = structure.items()
    nodes = [rebuilt(inner, leaf, (*path, str(i))) for i, inner in enumerate(members)]
    return nodes if kind == "list" else tuple(nodes)
