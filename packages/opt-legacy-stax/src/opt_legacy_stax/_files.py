"""States in safetensors files.

The leaves are tensors named `path of the parameter:path within its state`. The metadata has one
entry, `opt_legacy_stax`: JSON with the format's `version`, the `state` (again JSON: the name of the
optimizer, the nodes of the trees, and the kind, dtype and shape of each leaf), and `sha256`, the
digest of that text and of the leaves in its order.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax

from opt_legacy_stax._extras import needs
from opt_legacy_stax._identity import HasTriple, Identity, identity_of, triple_of
from opt_legacy_stax._leaves import (
    LeafSpec,
    fits,
    from_file,
    is_within,
    needs_64_bits,
    parse_spec,
    spec_of,
    stored,
    to_file,
)
from opt_legacy_stax._optimizers import Optimizer, OptimizerState, is_state, kept_by
from opt_legacy_stax._trees import Node, differences, first_lines, leaf_paths, nodes, shown
from opt_legacy_stax.errors import (
    DamagedFileError,
    FormatVersionError,
    SaveError,
    StateMismatchError,
    UnnamedStateWarning,
)

PathOrFile = str | bytes | os.PathLike[str] | IO[bytes]
_VERSION = 2
_KEY = "opt_legacy_stax"


class _Description(NamedTuple):
    """What a file says about its state, or what is expected of it."""

    optimizer: str | None
    tree: list[Node]
    states: list[list[Node]]  # of each parameter
    leaves: list[tuple[str, LeafSpec]]


def save(
    path_or_file: PathOrFile,
    state: Any,
    *,
    optimizer: Optimizer | HasTriple | str | None = None,
) -> None:
    """Writes a state to a safetensors file, bit for bit. Needs the extra `files`.

    Paths are written atomically: to a temporary file in the same directory, which is synced to disk
    and renamed, so that readers see either the old file or the complete new one. The permissions of
    an existing file are kept. A process that is killed leaves its temporary file `.NAME.*.tmp`
    behind, to be deleted by hand.

    Args:
      path_or_file: a path, or a file object opened for writing bytes, which is written from its
        current position.
      state: an `OptimizerState` of this module or of JAX's.
      optimizer: the optimizer that the state belongs to, for `load` to compare: a triple; the
        result of `to_optax`, `to_optimizer_def` or `optax_equivalent`; or a name, for triples not
        made by the `optimizer` decorator, such as those of JAX's module. A state does not record
        its optimizer, and the states of several optimizers look alike.

    Raises:
      SaveError: the state is traced, donated, distributed over processes, or contains something
        that the format cannot represent; or `optimizer` has no name. Nothing is written.
      TypeError: `optimizer` is neither a triple nor a name, or `path_or_file` is not a file.
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
    _check_file(path_or_file, "write")
    data = _encode(state, _identity(optimizer))
    if isinstance(path_or_file, str | bytes | os.PathLike):
        _write_atomically(_target(Path(os.fsdecode(path_or_file))), data)
    else:
        _write_all(path_or_file, data)


def load(
    path_or_file: PathOrFile,
    *,
    like: Any = None,
    optimizer: Optimizer | HasTriple | str | None = None,
    params: Any = None,
) -> OptimizerState:
    """Loads a state from a file, after checking that it is the expected one.

    The expected state is given either by `like` or by `optimizer` and `params`. If `optimizer` is
    given (with `params`, or in addition to `like`), the file must have been saved with an
    `optimizer` of the same name. If either name is missing, an `UnnamedStateWarning` is issued.

    Every leaf is restored as it was saved: JAX or NumPy array, Python number, PRNG key. If an
    expected leaf is a `jax.Array` committed to devices, or has a sharding, the loaded leaf is
    placed accordingly. The state has the class of `like`, or the class that `optimizer` creates:
    this module's or JAX's.

    Tree structure, keys and their order, shapes and dtypes must be equal, with one exception. JAX
    converts Python numbers and 64-bit NumPy arrays to 32 bits unless `jax_enable_x64` is on. Where
    the expected leaf is abstract, as all leaves described by `optimizer` and `params` are, such a
    number or array matches the dtype that JAX would convert it to, provided that integers fit.

    Args:
      path_or_file: a path, or a file object opened for reading bytes, which is read from its
        current position to its end.
      like: a state with the expected structure, shapes and dtypes; leaves may be
        `jax.ShapeDtypeStruct`.
      optimizer: the optimizer that the state belongs to: a triple, the result of `to_optax`,
        `to_optimizer_def` or `optax_equivalent`, or, together with `like`, a name.
      params: parameters with the expected structure, shapes and dtypes; arrays or
        `jax.ShapeDtypeStruct` leaves.

    Returns:
      The state that was saved.

    Raises:
      DamagedFileError: the file is truncated, altered, or not in this format.
      FormatVersionError: the file has an unsupported format version.
      StateMismatchError: the file holds a state of a different optimizer, tree structure, shape or
        dtype; the message lists the paths.
      MissingExtraError: the package safetensors is not installed.
      TypeError: neither `like` nor both `optimizer` and `params` are given, or both `like` and
        `params` are.
    """
    reference = _reference(like, optimizer, params)
    identity = None if optimizer is None else identity_of(optimizer)
    tensors, found = _decode(read(path_or_file))
    specs = [spec_of(leaf) for leaf in jax.tree.leaves(reference)]
    expected = _describe(reference, identity, specs)
    _check(found, expected)
    leaves = [from_file(spec, tensors[name]) for name, spec in found.leaves]
    _raise_mismatch(
        [
            f"{shown(name)}: expected {spec}, found an integer out of its range"
            for leaf, (name, spec) in zip(leaves, expected.leaves, strict=True)
            if not is_within(leaf, spec)
        ]
    )
    if found.optimizer is None or identity is None:
        warnings.warn(_not_compared(found.optimizer, identity), UnnamedStateWarning, stacklevel=2)
    likes: Any = jax.tree.leaves(reference[0])
    placed = [_placed(*pair) for pair in zip(leaves, likes, strict=True)]
    state: OptimizerState = jax.tree.unflatten(jax.tree.structure(reference), placed)
    return state


def read(path_or_file: PathOrFile) -> bytes:
    """Returns the contents of a file, or what is left of a file object."""
    _check_file(path_or_file, "read")
    if isinstance(path_or_file, str | bytes | os.PathLike):
        return Path(os.fsdecode(path_or_file)).read_bytes()
    return b"".join(iter(lambda: path_or_file.read(2**24), b""))  # raw files may return less


def _check_file(path_or_file: Any, action: str) -> None:
    is_path = isinstance(path_or_file, str | bytes | os.PathLike)
    if not is_path and not hasattr(path_or_file, action):
        verb = {"write": "writing", "read": "reading"}[action]
        raise TypeError(
            f"`path_or_file` must be a path or a file object opened for {verb} bytes; got "
            f"{type(path_or_file).__name__}."
        )


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


def _describe(state: Any, optimizer: Identity | None, specs: list[LeafSpec]) -> _Description:
    _, tree_def, subtree_defs = state
    states = [nodes(subtree_def) for subtree_def in subtree_defs]
    names = [
        outer if inner == "." else f"{outer}:{inner}"
        for outer, subtree_def in zip(leaf_paths(tree_def), subtree_defs, strict=True)
        for inner in leaf_paths(subtree_def)
    ]
    name = None if optimizer is None else optimizer.name
    return _Description(name, nodes(tree_def), states, list(zip(names, specs, strict=True)))


def _encode(state: Any, optimizer: Identity | None) -> bytes:
    """Returns the contents of a file."""
    with needs("files"):
        from safetensors.numpy import save as save_tensors
    if not is_state(state):
        raise SaveError(
            f"`state` must be an OptimizerState; got {type(state).__name__}. Pass the state that "
            "`init_fn` or `update_fn` returned."
        )
    packed, tree_def, subtree_defs = state
    for path, subtree_def in zip(leaf_paths(tree_def), subtree_defs, strict=True):
        kept = kept_by(subtree_def)
        if optimizer is not None and optimizer.keeps and kept != len(optimizer.keeps):
            raise SaveError(
                f"`optimizer` is {optimizer}, but the state of `{path}` is "
                f"{f'a tuple of {kept}' if kept > 1 else 'not a tuple'}: it belongs to a "
                "different optimizer, or to an older JAX (see `convert_old_layout`)."
            )
    pairs = [
        to_file(leaf, f"{path}, leaf {j}")
        for path, leaves in zip(leaf_paths(tree_def), packed, strict=True)
        for j, leaf in enumerate(leaves)
    ]
    about = _describe(state, optimizer, [spec for spec, _ in pairs])
    names = ["__metadata__", *(name for name, _ in about.leaves)]
    for k, name in enumerate(names):
        if name in names[:k]:
            raise SaveError(
                f"two entries would have the name `{shown(name)}` in the file. Rename a key."
            )
    tensors = {name: stored(array) for name, (_, array) in zip(names[1:], pairs, strict=True)}
    text = json.dumps(
        {
            **about._asdict(),
            "leaves": [[name, s.kind, s.dtype, s.shape] for name, s in about.leaves],
        }
    )
    digest = _digest(text, [array.tobytes() for _, array in pairs])
    entry = json.dumps({"version": _VERSION, "sha256": digest, "state": text})
    try:
        data: bytes = save_tensors(tensors, metadata={_KEY: entry})
    except UnicodeError as error:  # a lone surrogate in a key
        raise SaveError(f"a key cannot be written as UTF-8: {error}. Rename it.") from None
    return data


def _digest(text: str, leaves: list[bytes]) -> str:
    digest = hashlib.sha256(text.encode())
    for leaf in leaves:
        digest.update(leaf)
    return digest.hexdigest()


def _decode(data: bytes) -> tuple[Mapping[str, bytes], _Description]:
    """Returns the leaves' bytes by name, and the description of the state."""
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
        leaves = [(name, parse_spec(*spec)) for name, *spec in about["leaves"]]
        found = _Description(**{**about, "leaves": leaves})
        contents = [tensors[name] for name, _ in leaves]
        is_intact = _digest(entry["state"], contents) == entry["sha256"]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(f"its metadata do not describe its tensors ({error!r})") from None
    sizes = [spec.nbytes for _, spec in leaves]
    if not is_intact or sizes != list(map(len, contents)) or len(tensors) != len(leaves):
        raise _damaged("its checksum does not match its contents")
    return tensors, found


def _check(found: _Description, expected: _Description) -> None:
    """Raises unless the optimizer, the tree structure and the leaf specs are as expected."""
    lines = differences(expected.tree, found.tree)
    if not lines:
        paths = [path for path, kind in expected.tree if kind == "an array"]
        for path, *pair in zip(paths, expected.states, found.states, strict=True):
            lines += [f"{shown(path)}, in its state: {line}" for line in differences(*pair)]
    if not lines:
        lines = [
            f"{shown(name)}: expected {spec}, found {saved}"
            for (name, spec), (_, saved) in zip(expected.leaves, found.leaves, strict=True)
            if not fits(saved, spec)
        ]
    names = (expected.optimizer, found.optimizer)
    if None not in names and names[0] != names[1]:
        ours, theirs = (shown(str(name)) for name in names)
        lines.insert(0, f"optimizer: expected `{ours}`, found `{theirs}`")
    _raise_mismatch(lines)
    if any(needs_64_bits(spec) for _, spec in found.leaves):
        raise StateMismatchError(
            "the file holds 64-bit arrays, but JAX's 64-bit mode is off in this process. Turn it "
            "on with `jax.config.update('jax_enable_x64', True)`."
        )


def _raise_mismatch(lines: list[str]) -> None:
    if lines:
        raise StateMismatchError(
            f"the file holds a different state than expected:\n{first_lines(lines)}\nLoad it with "
            "the optimizer and parameters it was saved with."
        )


def _reference(like: Any, optimizer: Any, params: Any) -> Any:
    """Returns a state with the expected structure, shapes and dtypes."""
    if (like is None and optimizer is None) or (like is not None and params is not None):
        raise TypeError(
            "`load` needs either `like`, a state to compare with, or both `optimizer` and `params`."
        )
    if like is None:
        if isinstance(optimizer, str):
            raise TypeError(
                f"`optimizer` is {shown(repr(optimizer), 60)}: a name alone does not determine the "
                "expected structure. Pass the triple and `params`, or add a state as `like`."
            )
        if params is None:
            raise TypeError("`load` with an `optimizer` also needs `params`, or a state as `like`.")
        return jax.eval_shape(triple_of(optimizer)[0], params)
    if not is_state(like):
        raise TypeError(
            f"`like` must be an OptimizerState; got {type(like).__name__}. For a tree of "
            "parameters pass `optimizer` and `params`."
        )
    return OptimizerState(*like) if type(like) is tuple else like


def _not_compared(found: str | None, expected: Identity | None) -> str:
    if found is None:
        assumed = f"a state of `{shown(expected.name)}`" if expected else "the expected one"
        return (
            f"the file does not name the optimizer of its state. It was loaded as {assumed}, as "
            "tree structure, shapes and dtypes match; other optimizers may have the same. If that "
            "is correct, save it again with `save(..., optimizer=...)`."
        )
    return (
        f"the file holds a state of `{shown(found)}`, which was not compared because the "
        "expected optimizer is not known. Pass `optimizer` (in addition to `like`, if given), or a "
        "name if the triple has none."
    )


def _placed(leaf: Any, like: Any) -> Any:
    """Returns a leaf where the expected one is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    is_committed = isinstance(like, jax.Array) and like.committed
    if is_committed or (isinstance(like, jax.ShapeDtypeStruct) and like.sharding is not None):
        return jax.device_put(leaf, like.sharding)
    return leaf


def _damaged(reason: str) -> DamagedFileError:
    return DamagedFileError(
        f"the file is damaged, or was not written by `save`: {reason}. Restore it from a backup."
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


def _write_atomically(path: Path, data: bytes) -> None:
    # File systems limit names in bytes.
    start = os.fsencode(path.name)[:100].decode(errors="ignore")
    temporary = path.with_name(f".{start}.{secrets.token_hex(8)}.tmp")
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
