"""The file format: safetensors, with the state's structure in its metadata and a checksum.

```
8 bytes     length of the header, little-endian
header      JSON, padded with spaces to a multiple of 8 bytes
data        the leaves, in the order of the state, without gaps
32 bytes    SHA-256 of everything before; itself a tensor, `checksum`
```

So any reader of safetensors reads the arrays. The metadata's one entry, `opt_legacy_stax`, is JSON
again: `version`, `tree` (the structure of the parameters), `subtrees` (for each parameter, that of
what is kept for it), `leaves` (for each leaf `[kind, dtype, shape, impl]`), and `optimizer` where
that was said: `[name, names of what is kept for a parameter]`.
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
MAX_HEADER = 64 * 2**20  # also of what is saved
_KEY = "opt_legacy_stax"
_ALIGNMENT = 8
_MAX_DIMS = 64


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says of the state in it.

    Attributes:
      tree: description of the structure of the parameters.
      subtrees: for each parameter, that of what is kept for it.
      specs: of the leaves, in order.
      optimizer: whose state it is; `None` where it is not said.
    """

    tree: Description
    subtrees: Sequence[Description]
    specs: Sequence[LeafSpec]
    optimizer: Identity | None = None

    @property
    def names(self) -> Iterator[str]:
        """The name of each leaf, one after another: a long key may be part of many."""
        for outer, subtree in zip(leaves(self.tree), self.subtrees, strict=True):
            for inner in leaves(subtree):
                yield name_of(outer, inner)

    @property
    def data_size(self) -> int:
        """How many bytes the leaves take together."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def bound(self) -> int:
        """About how many bytes `encode` gives at most."""
        trees = len(_dump([self.tree, list(self.subtrees), self.optimizer]))
        dims = sum(len(spec.shape) for spec in self.specs)
        return 2 * trees + sum(map(len, self.names)) + 300 * (1 + len(self.specs)) + 40 * dims


def encode(header: Header) -> bytes:
    """Returns the bytes that a file begins with, the length included."""
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
    """Returns what a header says, if it says it exactly as `encode` would.

    Args:
      text: the JSON, without the length.

    Raises:
      DamagedFileError: it is no header of this format, or contradicts itself.
      FormatVersionError: of another version.
    """
    content = _parse(text, "the header")
    metadata = content.pop("__metadata__", None)
    if type(metadata) is not dict or type(metadata.get(_KEY)) is not str:
        raise DamagedFileError(
            f"the file has no entry `{_KEY}` in its metadata: `save` did not write it."
        )
    about = _parse(metadata[_KEY].encode("utf-8", "surrogatepass"), "the metadata")
    version = about.get("version")
    if type(version) is not int or version != VERSION:
        raise FormatVersionError(
            f"the file is of version {_shown(version)} of the format; expected {VERSION}. Load it "
            "with the version of opt-legacy-stax that wrote it."
        )
    header = _header(about)
    _check_names(content)
    for expected, found in zip_longest(_tensors(header), content.items()):
        if expected != found:
            name = shown((expected or found)[0])
            raise DamagedFileError(
                f"the header contradicts its own metadata, first about `{name}`."
            )
    if encode(header)[LENGTH_SIZE:] != text:
        raise DamagedFileError(
            "the header says what `save` would say, in another way: with other spaces, in another "
            "encoding, or with more entries. `save` did not write it."
        )
    return header


def _tensors(header: Header) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields what safetensors wants to know of each tensor, with its name."""
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
            raise ValueError("`subtrees` and `leaves` are no lists")
        if len(subtrees) != params:
            raise ValueError(f"there are {len(subtrees)} subtrees for {params} parameters")
        count = sum(map(check_description, subtrees))
        if len(listed) != count:
            raise ValueError(f"there are {count} names for {len(listed)} leaves")
        optimizer = _identity(about["optimizer"]) if "optimizer" in about else None
        return Header(tree, subtrees, [_spec(entry) for entry in listed], optimizer)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"the metadata describe no state: {error}.") from None


def _identity(entry: Any) -> Identity:
    match entry:
        case [str(name), list(keeps)] if name and all(type(field) is str for field in keeps):
            return Identity(name, tuple(keeps))
        case _:
            raise ValueError("the optimizer is not described by a name and those of what it keeps")


def _spec(entry: Any) -> LeafSpec:
    match entry:
        case [str(kind), str(dtype), list(dims), str(impl)]:
            pass
        case _:
            raise ValueError("a leaf is not described by kind, dtype, shape and implementation")
    if kind not in KINDS or not is_known(dtype):
        raise ValueError("a leaf has an unknown kind or dtype")
    if len(dims) > _MAX_DIMS or not all(type(d) is int and 0 <= d < 2**63 for d in dims):
        raise ValueError("a leaf has an impossible shape")
    if (kind == "key") != bool(impl):
        raise ValueError("a leaf that is no key has an implementation, or a key has none")
    spec = LeafSpec(kind, dtype, tuple(dims), impl)
    if not is_consistent(spec):
        raise ValueError("a leaf of its kind has no such dtype or shape")
    return spec


def _check_names(content: dict[str, Any]) -> None:
    for name in content:
        parts = name.partition(":")[0].split("/")
        if any(part in ("", ".", "..") for part in parts) or "\\" in name or "\0" in name:
            raise DamagedFileError(
                f"the name {_shown(name)} of an array looks like a path; `save` writes none such."
            )


def _parse(text: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, _RefusedError) else "it is no JSON"
        raise DamagedFileError(f"{what} of the file cannot be read: {reason}.") from None
    if not isinstance(found, dict):
        raise DamagedFileError(f"{what} of the file cannot be read: it is no JSON object.")
    return found


class _RefusedError(ValueError):
    """JSON that Python would accept."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _RefusedError(f"the key {_shown(twice)} occurs twice")
    return found


def _refuse(name: str) -> Any:
    raise _RefusedError(f"{name} is no number of JSON")


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _shown(value: Any) -> str:
    return shown(repr(value), 60)
