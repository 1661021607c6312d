"""States in safetensors files, replaced atomically."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import warnings
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_legacy_stax._format import check, decode, describe, encode, is_key
from opt_legacy_stax._identity import Identity, identity_of, triple_of
from opt_legacy_stax._optimizers import Optimizer, OptimizerState, is_state
from opt_legacy_stax._trees import shown
from opt_legacy_stax.errors import SaveError, StateMismatchError, UnnamedStateWarning

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
    data = encode(state, _identity(optimizer))
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
      TypeError: neither `like` nor both `optimizer` and `params` are given, or both `like` and
        `params` are.
    """
    reference = _reference(like, optimizer, params)
    identity = None if optimizer is None else identity_of(optimizer)
    arrays, found = decode(read(path_or_file))
    check(found, describe(reference, identity), arrays)
    likes: list[Any] = jax.tree.leaves(reference[0])
    if any(map(_needs_64_bits, likes)):
        raise StateMismatchError(
            "the file holds 64-bit arrays, but JAX's 64-bit mode is off in this process. Turn it "
            "on with `jax.config.update('jax_enable_x64', True)`."
        )
    if found.optimizer is None or identity is None:
        warnings.warn(_not_compared(found.optimizer, identity), UnnamedStateWarning, stacklevel=2)
    are_ints = [leaf.dtype == "int" for leaf in found.leaves]
    state: OptimizerState = jax.tree.unflatten(
        jax.tree.structure(reference), list(map(_leaf, arrays, likes, are_ints))
    )
    return state


def read(path_or_file: PathOrFile) -> bytes:
    """Returns the contents of a file, or what is left of a file object."""
    if isinstance(path_or_file, str | bytes | os.PathLike):
        return Path(os.fsdecode(path_or_file)).read_bytes()
    return b"".join(iter(lambda: path_or_file.read(2**24), b""))  # raw files may return less


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


def _reference(like: Any, optimizer: Any, params: Any) -> Any:
    """Returns a state with the expected structure, shapes and dtypes."""
    has_triple = not (optimizer is None or isinstance(optimizer, str))
    if (like is None) == (params is None) or (like is None and not has_triple):
        raise TypeError(
            "`load` needs either `like`, a state to compare with, or both `optimizer` (a triple, "
            "as a name does not determine the structure of a state) and `params`."
        )
    if like is None:
        return jax.eval_shape(triple_of(optimizer)[0], params)
    if not is_state(like):
        raise TypeError(
            f"`like` must be an OptimizerState; got {type(like).__name__}. For a tree of "
            "parameters pass `optimizer` and `params`."
        )
    return OptimizerState(*like) if type(like) is tuple else like


def _leaf(array: np.ndarray, like: Any, is_int: bool) -> Any:
    """Returns the values of a file as what the expected leaf is, and where it is."""
    if isinstance(like, np.ndarray):
        return array
    if isinstance(like, np.generic):
        return array.astype(like.dtype)[()]
    # Python integers are abstract in what an optimizer creates, as the shapes that `sm3` keeps.
    is_abstract_int = is_int and isinstance(like, jax.ShapeDtypeStruct)
    if is_abstract_int or not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return array.item()
    if is_key(like):
        implementations: list[Any] = []
        jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), like)
        leaf = jax.random.wrap_key_data(jnp.asarray(array), impl=implementations[0])
    else:
        leaf = jnp.asarray(array, like.dtype)
        if like.weak_type and leaf.ndim == 0:
            # Only Python scalars become weak arrays, which loses signalling NaNs.
            weak = jnp.asarray(array.item())
            leaf = weak if np.asarray(weak).tobytes() == np.asarray(leaf).tobytes() else leaf
    is_placed = like.committed if isinstance(like, jax.Array) else like.sharding is not None
    return jax.device_put(leaf, like.sharding) if is_placed else leaf


def _needs_64_bits(like: Any) -> bool:
    is_array = isinstance(like, jax.Array | jax.ShapeDtypeStruct) and not is_key(like)
    return is_array and bool(jax.dtypes.canonicalize_dtype(like.dtype) != like.dtype)


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
