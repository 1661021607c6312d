"""States in safetensors files: leaves by path, and one entry of metadata, `opt_legacy_stax`.

It has the format's version, the optimizer, the nodes and leaves of the state, and a digest of all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
import warnings
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opt_legacy_stax._extras import needs
from opt_legacy_stax._identity import Identity, identity_of, triple_of
from opt_legacy_stax._optimizers import Optimizer, OptimizerState, check_state
from opt_legacy_stax._trees import differences, first_lines, leaf_paths, nodes, shown
from opt_legacy_stax.errors import (
    DamagedFileError,
    FormatVersionError,
    SaveError,
    StateMismatchError,
    UnnamedStateWarning,
)

_VERSION = 2
_KEY = "opt_legacy_stax"

# dtypes with a name in safetensors since its release 0.4; others are stored as bytes
_NATIVE = {
    *("bool", "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
_PLAIN = (np.ndarray, np.memmap, int, float, bool, complex)


class _Leaf(NamedTuple):
    """The name, dtype and shape of a leaf, as in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_integer(self) -> bool:
        """Whether it is a single integer: the shapes of `sm3` are `int` at first, then int32."""
        return "int" in self.dtype and not self.shape

    def __str__(self) -> str:
        return "an integer" if self.is_integer else f"{self.dtype}{list(self.shape)}"


def _describe(state: Any) -> tuple[dict[str, str], list[_Leaf]]:
    """Returns the kinds of the nodes by path, and the leaves, which may be abstract."""
    packed, tree_def, subtree_defs = state
    tree, names = nodes(tree_def), []
    for path, subtree_def in zip(leaf_paths(tree_def), subtree_defs, strict=True):
        inner = nodes(subtree_def)
        tree |= {f"{path}:{'' if at == '.' else at}": kind for at, kind in inner.items()}
        names += [path if at == "." else f"{path}:{at}" for at in leaf_paths(subtree_def)]
    leaves = []
    for name, leaf in zip(names, jax.tree.leaves(packed), strict=True):
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        is_int = type(leaf) is int and array.dtype == int  # not `2**63`, a `uint64`
        leaves.append(_Leaf(name, "int" if is_int else array.dtype.name, array.shape))
    return tree, leaves


def _kinds(tree: dict[str, str], leaves: list[_Leaf]) -> dict[str, str]:
    """Returns the kinds of the nodes, those of leaves with dtype and shape."""
    kinds = dict(tree)
    for leaf in leaves:
        root = f"{leaf.name}:"  # the node of a state that is a single leaf
        kinds[root if root in tree else leaf.name] = str(leaf)
    return kinds


def _encode(state: Any, optimizer: Identity | None) -> bytes:
    """Returns the contents of a file."""
    with needs("files"):
        from safetensors.numpy import save as save_tensors
    check_state(state, optimizer, "state")
    tree, leaves = _describe(state)
    name = None if optimizer is None else optimizer.name
    text = json.dumps({"optimizer": name, "tree": list(tree.items()), "leaves": leaves})
    digest = hashlib.sha256(text.encode())
    tensors: dict[str, np.ndarray] = {}
    for (name, *_), leaf in zip(leaves, jax.tree.leaves(state[0]), strict=True):
        if name in tensors or name == "__metadata__":
            raise SaveError(
                f"two entries would have the name `{shown(name)}` in the file. Rename a key."
            )
        array = _array(leaf, name)
        raw = array.tobytes()
        digest.update(raw)
        if array.dtype.name not in _NATIVE:
            array = np.frombuffer(raw, np.uint8).reshape(*array.shape, array.dtype.itemsize)
        tensors[name] = array
    entry = {"version": _VERSION, "sha256": digest.hexdigest(), "state": text}
    return save_tensors(tensors, metadata={_KEY: json.dumps(entry)})


def _array(leaf: Any, name: str) -> np.ndarray:
    """Returns the values of a leaf as a contiguous array, of a key its data."""
    try:
        array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    except (TypeError, RuntimeError) as error:
        # It is traced, has been donated, or is distributed over processes.
        raise SaveError(f"`{name}` has no values that can be saved here: {error}") from error
    is_plain = isinstance(leaf, jax.Array | np.generic) or type(leaf) in _PLAIN
    if not is_plain or not is_number(array.dtype):
        raise SaveError(
            f"`{name}` is a {shown(type(leaf).__name__)} of dtype {array.dtype}, which the format "
            "cannot hold exactly. Leaves of a saved state must be arrays or numbers."
        )
    return array.astype(array.dtype.newbyteorder("="), order="C", copy=False)


def is_number(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of JAX's numbers or booleans."""
    return dtype == np.bool_ or bool(jnp.issubdtype(dtype, jnp.number))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and bool(
        jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    )


def _decode(data: bytes) -> tuple[str | None, dict[str, str], list[_Leaf], list[np.ndarray]]:
    """Returns the name of the optimizer, the description of the state, and its values."""
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
        leaves = [_Leaf(name, dtype, tuple(shape)) for name, dtype, shape in about["leaves"]]
        digest = hashlib.sha256(entry["state"].encode())
        arrays = []
        for name, dtype, shape in leaves:
            raw, is_key = tensors.pop(name), dtype.startswith("key<")
            digest.update(raw)
            array = np.frombuffer(raw, np.uint32 if is_key else dtype)
            arrays.append(array.reshape((*shape, *[-1] * is_key)).copy())
        optimizer, tree = about["optimizer"], dict(about["tree"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(f"its metadata do not describe its tensors ({error!r})") from None
    if tensors or digest.hexdigest() != entry.get("sha256"):
        raise _damaged("its checksum does not match its contents")
    return optimizer, tree, leaves, arrays


def _damaged(reason: str) -> DamagedFileError:
    return DamagedFileError(
        f"the file is damaged, or was not written by `save`: {reason}. Restore it from a backup."
    )


PathOrFile = str | bytes | os.PathLike[str] | IO[bytes]


def save(
    path_or_file: PathOrFile,
    state: Any,
    *,
    optimizer: Optimizer | str | Any = None,
) -> None:
    """Writes a state to a safetensors file, bit for bit. Needs the extra `files`.

    A path is replaced atomically, and keeps its permissions. A process that is killed leaves its
    temporary file `.NAME.*.tmp` behind.

    Args:
      path_or_file: a path, or a file object opened for writing bytes, which is written from its
        current position.
      state: an `OptimizerState` of this module or of JAX's.
      optimizer: the optimizer that the state belongs to, for `load` to compare, as a state does not
        record it: a triple; the result of `to_optax`, `to_optimizer_def` or `optax_equivalent`; or
        a name, for triples not made by the `optimizer` decorator, such as those of JAX's module.

    Raises:
      SaveError: the state is traced, donated, distributed over processes, or contains something
        that the format cannot represent; or `optimizer` has no name. Nothing is written.
      LayoutError: `state` is not an `OptimizerState`, or not one of `optimizer`.
      TypeError: `optimizer` is neither a triple nor a name.
      MissingExtraError: the package safetensors is not installed.
      OSError: the file cannot be written.

    Examples:
      >>> import io
      >>> from opt_legacy_stax import load, momentum
      >>> triple, params = momentum(0.1, 0.9), {'w': jax.numpy.ones(3)}
      >>> file = io.BytesIO()
      >>> save(file, triple.init_fn(params), optimizer=triple)
      >>> _ = file.seek(0)
      >>> triple.params_fn(load(file, optimizer=triple, params=params))['w'].tolist()
      [1.0, 1.0, 1.0]
    """
    identity = None if optimizer is None else identity_of(optimizer)
    if optimizer is not None and identity is None:
        raise SaveError(
            "`optimizer` is a triple without a name: it was not made by applying "
            "`opt_legacy_stax.optimizer` to a named function. Pass a name instead, here and to "
            "`load`."
        )
    data = _encode(state, identity)
    if isinstance(path_or_file, str | bytes | os.PathLike):
        # Symbolic links stay: their target is replaced.
        _write_atomically(Path(os.path.realpath(os.fsdecode(path_or_file))), data)
    else:
        _write_all(path_or_file, data)


def load(
    path_or_file: PathOrFile,
    *,
    like: Any = None,
    optimizer: Optimizer | str | Any = None,
    params: Any = None,
) -> OptimizerState:
    """Loads a state from a file, after checking that it is the expected one.

    The expected state is `like`, or what `optimizer` creates for `params`. Names of optimizers, the
    tree structure, keys and their order, shapes and dtypes must be equal; only a single integer,
    such as an entry of the shapes that `sm3` keeps, may have another integer dtype if it fits. An
    `UnnamedStateWarning` is issued if the file or the caller names no optimizer.

    Every leaf becomes what the expected leaf is: a JAX array (placed like it, if it is committed or
    has a sharding), NumPy array, Python number or PRNG key. Abstract leaves, as all described by
    `optimizer` and `params`, become JAX arrays; Python integers stay what they are. The state has
    the class of `like`, or the class that `optimizer` creates: this module's or JAX's.

    Args:
      path_or_file: a path, or a file object opened for reading bytes, which is read from its
        current position to its end.
      like: a state; leaves may be `jax.ShapeDtypeStruct`.
      optimizer: see `save`; a name only together with `like`.
      params: parameters; arrays or `jax.ShapeDtypeStruct` leaves.

    Raises:
      DamagedFileError: the file is truncated, altered, or not in this format.
      FormatVersionError: the file has an unsupported format version.
      StateMismatchError: the file holds a different state; the message lists the paths.
      MissingExtraError: the package safetensors is not installed.
      LayoutError: `like` is not an `OptimizerState`.
      TypeError: neither `like` nor both `optimizer` and `params` are given, or both `like` and
        `params` are.
    """
    reference = _reference(like, optimizer, params)
    identity = None if optimizer is None else identity_of(optimizer)
    name, tree, found, arrays = _decode(read(path_or_file))
    lines = differences(_kinds(*_describe(reference)), _kinds(tree, found))
    theirs = "no optimizer" if name is None else f"`{shown(name)}`"
    ours = "none" if identity is None else f"`{shown(identity.name)}`"
    is_compared = name is not None and identity is not None
    if identity is not None and name not in (None, identity.name):
        lines.insert(0, f"optimizer: expected {ours}, found {theirs}")
    if lines:
        raise StateMismatchError(
            f"the file holds a different state than expected:\n{first_lines(lines)}\nLoad it with "
            "the optimizer and parameters it was saved with."
        )
    likes, structure = jax.tree.flatten(reference)
    leaves = list(map(_leaf, found, arrays, likes))
    if not is_compared:
        warnings.warn(
            f"the file names {theirs}, this call {ours}: they were not compared, and others may "
            "keep states of the same structure. Pass `optimizer`, to `save` too.",
            UnnamedStateWarning,
            stacklevel=2,
        )
    return jax.tree.unflatten(structure, leaves)  # type: ignore[no-any-return]


def read(path_or_file: PathOrFile) -> bytes:
    """Returns the contents of a file, or what is left of a file object."""
    if isinstance(path_or_file, str | bytes | os.PathLike):
        return Path(os.fsdecode(path_or_file)).read_bytes()
    return b"".join(iter(lambda: path_or_file.read(2**24), b""))  # raw files may return less


def _reference(like: Any, optimizer: Any, params: Any) -> Any:
    """Returns a state with the expected structure, shapes and dtypes."""
    has_triple = not isinstance(optimizer, str | None)
    if (like is None) == (params is None) or (like is None and not has_triple):
        raise TypeError(
            "`load` needs either `like`, a state to compare with, or both `optimizer` (a triple, "
            "as a name does not determine the structure of a state) and `params`."
        )
    if like is None:
        return jax.eval_shape(triple_of(optimizer)[0], params)
    check_state(like, argument="like")
    return OptimizerState(*like) if type(like) is tuple else like


def _leaf(found: _Leaf, array: np.ndarray, like: Any) -> Any:
    """Returns the values of a file as what the expected leaf is, and where it is."""
    if found.is_integer and hasattr(like, "dtype"):
        limits = jnp.iinfo(like.dtype)
        if not limits.min <= array.item() <= limits.max:
            raise StateMismatchError(
                f"the file holds {array} in `{shown(found.name)}`, which is out of the range of "
                f"the expected {like.dtype}."
            )
    if isinstance(like, np.ndarray):
        return array
    if isinstance(like, np.generic):
        return array.astype(like.dtype)[()]
    # Python integers are abstract in what an optimizer creates, as the shapes that `sm3` keeps.
    is_abstract_int = found.dtype == "int" and isinstance(like, jax.ShapeDtypeStruct)
    if is_abstract_int or not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return array.item()
    if _is_key(like):
        implementations: list[Any] = []
        jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), like)
        leaf = jax.random.wrap_key_data(jnp.asarray(array), impl=implementations[0])
    elif jax.dtypes.canonicalize_dtype(like.dtype) != like.dtype:
        raise StateMismatchError(
            f"the file holds 64-bit arrays, as {shown(found.name)}, but JAX's 64-bit mode is off "
            "in this process. Turn it on with `jax.config.update('jax_enable_x64', True)`."
        )
    else:
        leaf = jnp.asarray(array, like.dtype)
        if like.weak_type and leaf.ndim == 0:
            # Only Python scalars become weak arrays, which loses signalling NaNs.
            weak = jnp.asarray(array.item())
            leaf = weak if np.asarray(weak).tobytes() == np.asarray(leaf).tobytes() else leaf
    is_placed = like.committed if isinstance(like, jax.Array) else like.sharding is not None
    return jax.device_put(leaf, like.sharding) if is_placed else leaf


def _write_atomically(path: Path, data: bytes) -> None:
    # File systems limit the length of names.
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            if path.exists():  # before it contains anything private
                os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
            _write_all(file, data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # makes the rename durable; Windows cannot open directories
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_all(file: IO[bytes], data: bytes) -> None:
    """Writes all data, also to unbuffered files, which may write less than requested."""
    rest = memoryview(data)
    while rest:
        count = file.write(rest)
        if not count:
            raise BlockingIOError(errno.EAGAIN, "the file object is not accepting more bytes")
        rest = rest[count:]
