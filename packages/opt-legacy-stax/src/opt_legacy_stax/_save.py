"""Writing states to files."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from opt_legacy_stax._describe import describe
from opt_legacy_stax._format import MAX_HEADER, Header, encode
from opt_legacy_stax._identity import HasTriple, Identity, identity_of
from opt_legacy_stax._leaves import to_file
from opt_legacy_stax._optimizers import Optimizer
from opt_legacy_stax._states import is_state, kept_by
from opt_legacy_stax._trees import leaf_paths
from opt_legacy_stax.errors import SaveError

_CHUNK = 2**24


def save(
    path_or_file: str | bytes | os.PathLike[str] | IO[bytes],
    state: Any,
    *,
    optimizer: Optimizer | HasTriple | str | None = None,
) -> None:
    """Writes a state to a file, bit for bit.

    Paths are written atomically: to a temporary file in the same directory, which is synced to disk
    and renamed, so that readers see either the old file or the complete new one. The permissions of
    an existing file are kept. A process that is killed leaves its temporary file `.NAME.*.tmp`
    behind, to be deleted by hand. The format is safetensors, without pickle and with a checksum.

    Args:
      path_or_file: a path, or a file object opened for writing bytes, which is written from its
        current position.
      state: an `OptimizerState` of this module or of JAX's.
      optimizer: the optimizer that the state belongs to, for `load` to compare: a triple; the
        result of `to_optax`, `to_optimizer_def` or `optax_equivalent`; or a name, for triples not
        made by the `optimizer` decorator. A state does not record its optimizer, and the states of
        several optimizers look alike.

    Raises:
      SaveError: the state is traced, donated, distributed over processes, or contains something
        that the format cannot represent; or `optimizer` has no name. Nothing is written.
      TypeError: `optimizer` is neither a triple nor a name, or `path_or_file` is not a file.
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
    is_path = isinstance(path_or_file, str | bytes | os.PathLike)
    if not is_path and not hasattr(path_or_file, "write"):
        raise TypeError(
            "`path_or_file` must be a path or a file object opened for writing bytes; got "
            f"{type(path_or_file).__name__}."
        )
    header, arrays = _contents(state, _identity(optimizer))
    if isinstance(path_or_file, str | bytes | os.PathLike):
        _write_atomically(_target(Path(os.fsdecode(path_or_file))), header, arrays)
    else:
        _write(path_or_file, header, arrays)


def _identity(optimizer: Any) -> Identity | None:
    if optimizer is None:
        return None
    identity = identity_of(optimizer)
    if identity is None:
        raise SaveError(
            "`optimizer` is a triple without a name: it was not made by applying "
            "`opt_legacy_stax.optimizer` to a named function. Pass a name instead, here and to "
            "`load`."
        )
    return identity


def _contents(state: Any, optimizer: Identity | None) -> tuple[bytes, list[np.ndarray]]:
    if not is_state(state):
        raise SaveError(
            f"`state` must be an OptimizerState; got {type(state).__name__}. Pass the state that "
            "`init_fn` or `update_fn` returned."
        )
    packed, tree_def, subtree_defs = state
    paths = leaf_paths(tree_def)
    subtrees = [describe(jax.tree.unflatten(d, [0] * d.num_leaves)) for d in subtree_defs]
    tree = describe(jax.tree.unflatten(tree_def, [0] * tree_def.num_leaves))
    if optimizer is not None:
        _check_kept(optimizer, paths, subtree_defs)
    found = [
        to_file(leaf, f"{path}, leaf {j}")
        for path, leaves in zip(paths, packed, strict=True)
        for j, leaf in enumerate(leaves)
    ]
    header = Header(tree, subtrees, [spec for spec, _ in found], optimizer)
    twice = [name for name, count in Counter(header.names).items() if count > 1]
    if twice:
        raise SaveError(
            f"two leaves would have the name `{twice[0]}` in the file. Rename one of their keys."
        )
    encoded = encode(header)
    if len(encoded) > MAX_HEADER:
        raise SaveError(
            f"the state has too many leaves or too long keys: its header takes {len(encoded)} "
            f"bytes, and the limit is {MAX_HEADER}."
        )
    return encoded, [array for _, array in found]


def _check_kept(optimizer: Identity, paths: Sequence[str], subtree_defs: Sequence[Any]) -> None:
    """Raises if a state does not have the entries of `optimizer`, if those are known."""
    count = len(optimizer.keeps)
    for path, subtree_def in zip(paths, subtree_defs, strict=True):
        found = kept_by(subtree_def)
        if count and found != count:
            raise SaveError(
                f"`optimizer` is {optimizer}, but the state of `{path}` is "
                f"{f'a tuple of {found}' if found > 1 else 'not a tuple'}: it belongs to a "
                "different optimizer, or to an older JAX (see `convert_old_layout`)."
            )


def _target(path: Path) -> Path:
    """Resolves symbolic links, so that the target is replaced and not the link."""
    try:
        target = path.resolve()
    except RuntimeError:  # symlink loop, in Python before 3.13
        target = path
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


def _write_atomically(path: Path, header: bytes, arrays: list[np.ndarray]) -> None:
    # File systems limit names in bytes.
    start = os.fsencode(path.name)[:100].decode(errors="ignore")
    temporary = path.with_name(f".{start}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            if path.exists():  # before it contains anything private
                os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
            _write(file, header, arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes the rename durable; not possible on Windows, which cannot open directories."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(file: IO[bytes], header: bytes, arrays: list[np.ndarray]) -> None:
    digest = hashlib.sha256(header)
    _write_all(file, header)
    for array in arrays:
        data = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(data), _CHUNK):
            part = data[start : start + _CHUNK]
            digest.update(part)
            _write_all(file, part)
    _write_all(file, digest.digest())


def _write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """Writes all data, also to unbuffered files, which may write less than requested."""
    rest = memoryview(data)
    while rest:
        count = file.write(rest)
        if not count:
            raise BlockingIOError(errno.EAGAIN, "the file object is not accepting more bytes")
        rest = rest[count:]
