"""The file format: safetensors, with the state's structure in its metadata and a checksum.

```
8 bytes     length of the header, little-endian
header      JSON, padded with spaces to a multiple of 8 bytes
data        the leaves, in the order of the state, without gaps
32 bytes    SHA-256 of everything before; itself stored as a tensor
```

Any safetensors reader can read the arrays. The metadata has one entry, `opt_legacy_stax`, whose
value is JSON with the keys `version`, `tree` (structure of the parameters), `subtrees` (structure
of the state of each parameter), `leaves` (`[kind, dtype, shape, impl]` of each leaf) and, if the
optimizer was given, `optimizer`: its name and the names of the entries it keeps for a parameter.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from opt_legacy_stax._describe import Description, check_description, leaves, name_of
from opt_legacy_stax._identity import Identity
from opt_legacy_stax._leaves import KINDS, LeafSpec, is_consistent, is_known
from opt_legacy_stax._trees import shown
from opt_legacy_stax.errors import DamagedFileError, FormatVersionError

VERSION = 1
CHECKSUM = "checksum:sha256"
CHECKSUM_SIZE = 32
LENGTH_SIZE = 8
MAX_HEADER = 64 * 2**20  # enforced by `save` too
_KEY = "opt_legacy_stax"
_ALIGNMENT = 8
_MAX_DIMS = 64


@dataclasses.dataclass(frozen=True)
class Header:
    """The description of a state in a file.

    Attributes:
      tree: description of the structure of the parameters.
      subtrees: description of the structure of each parameter's state.
      specs: specs of the leaves, in order.
      optimizer: the optimizer that the state belongs to; `None` if unknown.
    """

    tree: Description
    subtrees: Sequence[Description]
    specs: Sequence[LeafSpec]
    optimizer: Identity | None = None

    @property
    def names(self) -> Iterator[str]:
        """The name of each leaf; a generator, as a long key may be part of many names."""
        for outer, subtree in zip(leaves(self.tree), self.subtrees, strict=True):
            for inner in leaves(subtree):
                yield name_of(outer, inner)

    @property
    def data_size(self) -> int:
        """Total size of the leaves in bytes."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def bound(self) -> int:
        """Approximate upper bound on the length of `encode(header)`."""
        trees = len(_dump([self.tree, list(self.subtrees), self.optimizer]))
        dims = sum(len(spec.shape) for spec in self.specs)
        return 2 * trees + sum(map(len, self.names)) + 300 * (1 + len(self.specs)) + 40 * dims


def encode(header: Header) -> bytes:
    """Returns the encoded header, including the length prefix."""
    listed = [[s.kind, s.dtype, list(s.shape), s.impl] for s in header.specs]
    about: dict[str, Any] = {
        "version": VERSION,
        "tree": header.tree,
        "subtrees": list(header.subtrees),
        "leaves": listed,
    }
    if header.optimizer is not None:
        about["optimizer"] = [header.optimizer.name, list(header.optimizer.keeps)]
    content: dict[str, Any] = {"__metadata__": {_KEY: _dump(about)}, **dict(_tensors(header))}
    text = _dump(content).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_SIZE, "little") + text


def decode(text: bytes) -> Header:
    """Decodes a header, accepting only the exact bytes that `encode` would write.

    Args:
      text: the JSON text, without the length prefix.

    Raises:
      DamagedFileError: the header is malformed or inconsistent.
      FormatVersionError: the header has an unsupported format version.
    """
    content = _parse(text, "the header")
    metadata = content.pop("__metadata__", None)
    if type(metadata) is not dict or type(metadata.get(_KEY)) is not str:
        raise DamagedFileError(
            f"the metadata of the file has no entry `{_KEY}`: it was not written by `save`."
        )
    about = _parse(metadata[_KEY].encode("utf-8", "surrogatepass"), "the metadata")
    version = about.get("version")
    if type(version) is not int or version != VERSION:
        raise FormatVersionError(
            f"the file has format version {_shown(version)}; expected {VERSION}. Load it with the "
            "version of opt-legacy-stax that wrote it."
        )
    header = _header(about)
    _check_names(content)
    for expected, found in zip_longest(_tensors(header), content.items()):
        if expected != found:
            name = shown((expected or found)[0])
            raise DamagedFileError(f"the header contradicts its own metadata at `{name}`.")
    if encode(header)[LENGTH_SIZE:] != text:
        raise DamagedFileError(
            "the header is not in the form that `save` writes: it differs in whitespace or "
            "encoding, or has extra entries."
        )
    return header


def _tensors(header: Header) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the safetensors header entry of each tensor."""
    end = 0
    for name, spec in zip(header.names, header.specs, strict=True):
        start, end = end, end + spec.nbytes
        yield (
            name,
            {
                "dtype": spec.stored_dtype,
                "shape": list(spec.stored_shape),
                "data_offsets": [start, end],
            },
        )
    offsets = [end, end + CHECKSUM_SIZE]
    yield CHECKSUM, {"dtype": "U8", "shape": [CHECKSUM_SIZE], "data_offsets": offsets}


def _header(about: dict[str, Any]) -> Header:
    tree, subtrees, listed = (about.get(key) for key in ("tree", "subtrees", "leaves"))
    try:
        params = check_description(tree)
        if not isinstance(subtrees, list) or not isinstance(listed, list):
            raise ValueError("`subtrees` and `leaves` must be lists")
        if len(subtrees) != params:
            raise ValueError(f"found {len(subtrees)} subtrees for {params} parameters")
        count = sum(map(check_description, subtrees))
        if len(listed) != count:
            raise ValueError(f"found {count} names for {len(listed)} leaves")
        optimizer = _identity(about["optimizer"]) if "optimizer" in about else None
        return Header(tree, subtrees, [_spec(entry) for entry in listed], optimizer)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"the metadata does not describe a state: {error}.") from None


def _identity(entry: Any) -> Identity:
    match entry:
        case [str(name), list(keeps)] if name and all(type(field) is str for field in keeps):
            return Identity(name, tuple(keeps))
        case _:
            raise ValueError("`optimizer` must be a name and a list of the names of its entries")


def _spec(entry: Any) -> LeafSpec:
    match entry:
        case [str(kind), str(dtype), list(dims), str(impl)]:
            pass
        case _:
            raise ValueError(
                "a leaf must be described by kind, dtype, shape and PRNG implementation"
            )
    if kind not in KINDS or not is_known(dtype):
        raise ValueError("a leaf has an unknown kind or dtype")
    if len(dims) > _MAX_DIMS or not all(type(d) is int and 0 <= d < 2**63 for d in dims):
        raise ValueError("a leaf has an invalid shape")
    if (kind == "key") != bool(impl):
        raise ValueError("a PRNG key, and only a PRNG key, must have an implementation")
    spec = LeafSpec(kind, dtype, tuple(dims), impl)
    if not is_consistent(spec):
        raise ValueError("a leaf has a dtype or shape that its kind does not allow")
    return spec


def _check_names(content: dict[str, Any]) -> None:
    for name in content:
        parts = name.partition(":")[0].split("/")
        if any(part in ("", ".", "..") for part in parts) or "\\" in name or "\0" in name:
            raise DamagedFileError(
                f"the array name {_shown(name)} looks like a file system path; `save` never writes "
                "such names."
            )


def _parse(text: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, _RefusedError) else "it is not valid JSON"
        raise DamagedFileError(f"{what} of the file cannot be read: {reason}.") from None
    if not isinstance(found, dict):
        raise DamagedFileError(f"{what} of the file cannot be read: it is not a JSON object.")
    return found


class _RefusedError(ValueError):
    """Input that Python's parser accepts although it is not strict JSON."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _RefusedError(f"duplicate key {_shown(twice)}")
    return found


def _refuse(name: str) -> Any:
    raise _RefusedError(f"{name} is not a JSON number")


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _shown(value: Any) -> str:
    return shown(repr(value), 60)
