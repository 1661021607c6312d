"""States as the bytes of a safetensors file.

The leaves are tensors named `path of the parameter:path within its state`. The metadata has one
entry, `opt_legacy_stax`: JSON with the format's `version`, the `state` (again JSON: the name of the
optimizer, the nodes of the trees, and the dtype and shape of each leaf), and `sha256`, the digest
of that text and of the leaves in its order.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opt_legacy_stax._extras import needs
from opt_legacy_stax._identity import Identity
from opt_legacy_stax._optimizers import is_state, other_entries
from opt_legacy_stax._trees import Node, differences, first_lines, leaf_paths, nodes, shown
from opt_legacy_stax.errors import (
    DamagedFileError,
    FormatVersionError,
    SaveError,
    StateMismatchError,
)

_VERSION = 2
_KEY = "opt_legacy_stax"

# dtypes with a name in safetensors since its release 0.4; others are stored as bytes
_NATIVE = {
    *("bool", "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
_PLAIN = (np.ndarray, np.memmap, int, float, bool, complex)


class Leaf(NamedTuple):
    """The name, dtype and shape of a leaf, as in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        is_key = self.dtype.startswith("key<")
        return self.dtype if is_key else f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class Description(NamedTuple):
    """What a file says about its state, or what is expected of it."""

    optimizer: str | None
    tree: list[Node]
    leaves: list[Leaf]


def describe(state: Any, optimizer: Identity | None) -> Description:
    """Returns the description of a state, whose leaves may be abstract."""
    packed, tree_def, subtree_defs = state
    tree, names = nodes(tree_def), []
    for path, subtree_def in zip(leaf_paths(tree_def), subtree_defs, strict=True):
        inner = nodes(subtree_def)
        tree += [[f"{path}:{'' if at == '.' else at}", kind] for at, kind in inner]
        names += [path if at == "." else f"{path}:{at}" for at in leaf_paths(subtree_def)]
    described = []
    for name, leaf in zip(names, jax.tree.leaves(packed), strict=True):
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        dtype = "int" if type(leaf) is int else array.dtype.name
        described.append(Leaf(name, dtype, array.shape))
    return Description(optimizer and optimizer.name, tree, described)


def encode(state: Any, optimizer: Identity | None) -> bytes:
    """Returns the contents of a file."""
    with needs("files"):
        from safetensors.numpy import save as save_tensors
    if not is_state(state):
        raise SaveError(
            f"`state` must be an OptimizerState; got {type(state).__name__}. Pass the state that "
            "`init_fn` or `update_fn` returned."
        )
    packed, tree_def, _ = state
    if (words := other_entries(state, optimizer)) is not None:
        raise SaveError(
            f"`optimizer` is {optimizer}, but the state of {words}: it belongs to a different "
            "optimizer, or to an older JAX (see `convert_old_layout`)."
        )
    arrays = [
        _array(leaf, f"{path}, leaf {j}")
        for path, leaves in zip(leaf_paths(tree_def), packed, strict=True)
        for j, leaf in enumerate(leaves)
    ]
    about = describe(state, optimizer)
    tensors: dict[str, np.ndarray] = {}
    for leaf, array in zip(about.leaves, arrays, strict=True):
        if leaf.name in tensors or leaf.name == "__metadata__":
            raise SaveError(
                f"two entries would have the name `{shown(leaf.name)}` in the file. Rename a key."
            )
        tensors[leaf.name] = _stored(array)
    text = json.dumps(about._asdict())
    digest = _digest(text, [array.tobytes() for array in arrays])
    entry = json.dumps({"version": _VERSION, "sha256": digest, "state": text})
    try:
        data: bytes = save_tensors(tensors, metadata={_KEY: entry})
    except UnicodeError as error:  # a lone surrogate in a key
        raise SaveError(f"a key cannot be written as UTF-8: {error}. Rename it.") from None
    return data


def _array(leaf: Any, name: str) -> np.ndarray:
    """Returns the values of a leaf as a contiguous array, of a key its data."""
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        raise SaveError(
            f"`{name}` is abstract ({type(leaf).__name__}). Call `save` outside of `jit`, "
            "`eval_shape` and other transformations."
        )
    if not (isinstance(leaf, jax.Array | np.generic) or type(leaf) in _PLAIN):
        raise SaveError(
            f"`{name}` is a {shown(type(leaf).__name__)}; leaves of a saved state must be arrays "
            "or numbers."
        )
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise SaveError(
                f"the buffer of `{name}` has been donated or deleted. Save the state that the "
                "update returned."
            )
        if not leaf.is_fully_addressable:
            raise SaveError(
                f"`{name}` is not fully addressable by this process. Gather it first "
                "(`jax.experimental.multihost_utils.process_allgather`)."
            )
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    if not is_number(array.dtype):
        raise SaveError(
            f"`{name}` has dtype {array.dtype}, which the format cannot hold exactly. Convert it "
            "to a numeric dtype."
        )
    return array.astype(array.dtype.newbyteorder("="), order="C", copy=False)


def is_number(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of JAX's numbers or booleans."""
    return dtype == np.bool_ or bool(jnp.issubdtype(dtype, jnp.number))


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and bool(
        jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    )


def _stored(array: np.ndarray) -> np.ndarray:
    """Returns an array as a tensor that safetensors can hold: itself, or its bytes."""
    if array.dtype.name in _NATIVE:
        return array
    shape = (*array.shape, array.dtype.itemsize)
    return np.frombuffer(array.tobytes(), np.uint8).reshape(shape)


def _digest(text: str, leaves: list[bytes]) -> str:
    digest = hashlib.sha256(text.encode())
    for leaf in leaves:
        digest.update(leaf)
    return digest.hexdigest()


def decode(data: bytes) -> tuple[list[np.ndarray], Description]:
    """Returns the values of the leaves, and the description of the state."""
    with needs("files"):
        from safetensors import SafetensorError, deserialize
    try:
        tensors = {name: bytes(entry["data"]) for name, entry in deserialize(data)}  # type: ignore[no-untyped-call]
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        entry = json.loads((header.get("__metadata__") or {}).get(_KEY, "null"))
    except (SafetensorError, ValueError) as error:
        raise _damaged(str(error).removeprefix("Error while deserializing: ")) from None
    if not isinstance(entry, dict):
        raise _damaged(f"its metadata have no entry `{_KEY}`")
    if entry.get("version") != _VERSION:
        raise FormatVersionError(
            f"the file has format version {shown(repr(entry.get('version')), 60)}; expected "
            f"{_VERSION}. Load it with the version of opt-legacy-stax that wrote it."
        )
    try:
        about = json.loads(entry["state"])
        leaves = [Leaf(name, dtype, tuple(shape)) for name, dtype, shape in about["leaves"]]
        found = Description(**{**about, "leaves": leaves})
        contents = [tensors[leaf.name] for leaf in leaves]
        is_intact = _digest(entry["state"], contents) == entry["sha256"]
        arrays = list(map(_values, contents, leaves))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(f"its metadata do not describe its tensors ({error!r})") from None
    if not is_intact or len(tensors) != len(leaves):
        raise _damaged("its checksum does not match its contents")
    return arrays, found


def _values(data: bytes, leaf: Leaf) -> np.ndarray:
    if leaf.dtype.startswith("key<"):
        return np.frombuffer(data, np.uint32).reshape(*leaf.shape, -1)
    return np.frombuffer(data, leaf.dtype).reshape(leaf.shape).copy()


def check(found: Description, expected: Description, arrays: list[np.ndarray]) -> None:
    """Raises unless the optimizer, the tree structure and the leaves are as expected."""
    lines = differences(expected.tree, found.tree)
    if not lines:
        triples = zip(expected.leaves, found.leaves, arrays, strict=True)
        lines = [line for triple in triples for line in _different(*triple)]
    names = (expected.optimizer, found.optimizer)
    if None not in names and names[0] != names[1]:
        ours, theirs = (shown(str(name)) for name in names)
        lines.insert(0, f"optimizer: expected `{ours}`, found `{theirs}`")
    if lines:
        raise StateMismatchError(
            f"the file holds a different state than expected:\n{first_lines(lines)}\nLoad it with "
            "the optimizer and parameters it was saved with."
        )


def _different(expected: Leaf, found: Leaf, array: np.ndarray) -> list[str]:
    if (expected.dtype, expected.shape) == (found.dtype, found.shape):
        return []
    described = str(found)
    if found.shape == expected.shape == () and "int" in expected.dtype and "int" in found.dtype:
        limits = jnp.iinfo(expected.dtype)
        if limits.min <= array.item() <= limits.max:
            return []
        described = "an integer out of its range"
    return [f"{shown(expected.name)}: expected {expected}, found {described}"]


def _damaged(reason: str) -> DamagedFileError:
    return DamagedFileError(
        f"the file is damaged, or was not written by `save`: {reason}. Restore it from a backup."
    )
