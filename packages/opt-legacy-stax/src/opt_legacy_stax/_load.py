"""Reading states from files."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Sequence
from itertools import islice
from typing import IO, Any

import jax
import numpy as np

from opt_legacy_stax import _format
from opt_legacy_stax._describe import describe, differences, leaves, name_of
from opt_legacy_stax._format import Header
from opt_legacy_stax._identity import HasTriple, Identity, identity_of, triple_of
from opt_legacy_stax._leaves import (
    LeafSpec,
    dtype_of,
    fits,
    from_file,
    is_within,
    needs_64_bits,
    spec_of,
)
from opt_legacy_stax._optimizers import Optimizer, OptimizerState
from opt_legacy_stax._states import is_state
from opt_legacy_stax._trees import first_lines, shown
from opt_legacy_stax.errors import DamagedFileError, StateMismatchError, UnnamedStateWarning

_CHUNK = 2**24
_HEADER_SLACK = 2**19
_SMALLEST = _format.LENGTH_SIZE + 2 + _format.CHECKSUM_SIZE


def load(
    path_or_file: str | bytes | os.PathLike[str] | IO[bytes],
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

    A damaged or mismatching file is rejected as a whole, and no memory is allocated for arrays
    before the header agrees with the length of the file and with the expected state.

    Args:
      path_or_file: a path, or a seekable file object opened for reading bytes, which is read from
        its current position to its end.
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
      TypeError: neither `like` nor both `optimizer` and `params` are given, or both `like` and
        `params` are.
    """
    reference = _reference(like, optimizer, params)
    expected = None if optimizer is None else identity_of(optimizer)
    if not isinstance(path_or_file, str | bytes | os.PathLike) and not hasattr(
        path_or_file, "read"
    ):
        raise TypeError(
            "`path_or_file` must be a path or a file object opened for reading bytes; got "
            f"{type(path_or_file).__name__}."
        )
    if isinstance(path_or_file, str | bytes | os.PathLike):
        with open(path_or_file, "rb") as file:
            state, found = _load(file, reference, expected)
    else:
        state, found = _load(path_or_file, reference, expected)
    if found is None or expected is None:
        warnings.warn(_not_compared(found, expected), UnnamedStateWarning, stacklevel=2)
    return state


def _reference(like: Any, optimizer: Any, params: Any) -> Any:
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


def _not_compared(found: Identity | None, expected: Identity | None) -> str:
    if found is None:
        assumed = f"a state of `{shown(expected.name)}`" if expected else "the expected one"
        return (
            f"the file does not name the optimizer of its state. It was loaded as {assumed}, as "
            "tree structure, shapes and dtypes match; other optimizers may have the same. If that "
            "is correct, save it again with `save(..., optimizer=...)`."
        )
    return (
        f"the file holds a state of `{shown(found.name)}`, which was not compared because the "
        "expected optimizer is not known. Pass `optimizer` (in addition to `like`, if given), or a "
        "name if the triple has none."
    )


def _load(
    file: IO[bytes], reference: Any, optimizer: Identity | None
) -> tuple[OptimizerState, Identity | None]:
    start = file.tell()
    size = file.seek(0, io.SEEK_END) - start
    file.seek(start)
    reader = _Reader(file, size)
    expected = _expected_header(reference, optimizer)
    header = _read_header(reader, expected.bound)
    _check_structure(header, expected)
    arrays = [reader.array(spec) for spec in header.specs]
    reader.check_end()
    _check_values(header, expected, arrays)
    found = [from_file(spec, a) for spec, a in zip(header.specs, arrays, strict=True)]
    leaves = [_placed(*pair) for pair in zip(found, jax.tree.leaves(reference[0]), strict=True)]
    state: OptimizerState = jax.tree.unflatten(jax.tree.structure(reference), leaves)
    return state, header.optimizer


class _Reader:
    """Reads a file sequentially and hashes what it reads."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = size
        self.left = size

    def read(self, count: int) -> bytes:
        if count > self.left:
            raise _truncated(self.size)
        parts, missing = [], count
        while missing:  # an unbuffered file may return fewer bytes than requested
            part = self._file.read(missing)
            if not part:
                raise _truncated(self.size)
            parts.append(part)
            missing -= len(part)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self.left -= count
        self._digest.update(data)
        return data

    def array(self, spec: LeafSpec) -> np.ndarray:
        if spec.nbytes > self.left:
            raise _truncated(self.size)
        raw = np.empty(spec.nbytes, np.uint8)
        view = raw.data
        for begin in range(0, spec.nbytes, _CHUNK):
            part = view[begin : begin + _CHUNK]
            part[:] = self.read(len(part))
        if spec.dtype == "bool" and raw.size and raw.max() > 1:
            raise _damaged("a value of a boolean array is neither 0 nor 1")
        return raw.view(dtype_of(spec.dtype)).reshape(spec.shape)

    def skip_data(self) -> None:
        """Hashes everything up to the checksum without keeping it."""
        while self.left > _format.CHECKSUM_SIZE:
            self.read(min(_CHUNK, self.left - _format.CHECKSUM_SIZE))

    def check_end(self) -> None:
        digest = self._digest.digest()
        if self.left != _format.CHECKSUM_SIZE:
            raise _damaged(f"{self.left} bytes follow the data, expected {_format.CHECKSUM_SIZE}")
        if self.read(_format.CHECKSUM_SIZE) != digest:
            raise _damaged("its checksum does not match its contents")


def _expected_header(reference: Any, optimizer: Identity | None) -> Header:
    packed, tree_def, subtree_defs = reference
    tree = describe(jax.tree.unflatten(tree_def, [0] * tree_def.num_leaves))
    subtrees = [describe(jax.tree.unflatten(d, [0] * d.num_leaves)) for d in subtree_defs]
    return Header(tree, subtrees, [spec_of(leaf) for leaf in jax.tree.leaves(packed)], optimizer)


def _read_header(reader: _Reader, bound: int) -> Header:
    if reader.size < _SMALLEST:
        raise _damaged(f"it has only {reader.size} bytes")
    length = int.from_bytes(reader.read(_format.LENGTH_SIZE), "little")
    if length > min(_format.MAX_HEADER, reader.left - _format.CHECKSUM_SIZE):
        raise _damaged(
            f"it declares a header of {length} bytes, but has {reader.size} bytes in total"
        )
    # it cannot match: verify the checksum without parsing it
    if length > _HEADER_SLACK + 2 * bound:
        reader.skip_data()
        reader.check_end()
        raise StateMismatchError(
            f"the file holds a different state than expected: its header has {length} bytes, "
            f"expected at most {bound}. Load it with the optimizer and parameters it was saved "
            "with."
        )
    header = _format.decode(reader.read(length))
    declared = header.data_size + _format.CHECKSUM_SIZE
    if declared != reader.left:
        raise _damaged(f"it declares {declared} bytes of data, but has {reader.left}")
    return header


def _check_structure(header: Header, expected: Header) -> None:
    """Raises unless the tree structure and the leaf specs are as expected."""
    lines = list(islice(differences(expected.tree, header.tree), 100))
    if not lines:
        pairs = zip(_params(header), expected.subtrees, header.subtrees, strict=True)
        for name, ours_kept, theirs_kept in pairs:
            found = islice(differences(ours_kept, theirs_kept), 100)
            lines += [f"{shown(name)}, in its state: {line}" for line in found]
    if not lines:
        specs = zip(header.names, header.specs, expected.specs, strict=True)
        for name, found_spec, spec in specs:
            if not fits(found_spec, spec):
                lines.append(f"{shown(name)}: expected {spec}, found {found_spec}")
    ours, theirs = expected.optimizer, header.optimizer
    if ours is not None and theirs is not None and ours != theirs:
        lines.insert(0, f"optimizer: expected {ours}, found {theirs}")
    _raise_mismatch(lines)
    if any(map(needs_64_bits, header.specs)):
        raise StateMismatchError(
            "the file holds 64-bit arrays, but JAX's 64-bit mode is off in this process. Turn it "
            "on with `jax.config.update('jax_enable_x64', True)`."
        )


def _check_values(header: Header, expected: Header, arrays: Sequence[np.ndarray]) -> None:
    """Raises if an integer does not fit into the narrower dtype that is expected."""
    lines = [
        f"{shown(name)}: expected {spec}, found an integer out of its range"
        for name, array, spec in zip(header.names, arrays, expected.specs, strict=True)
        if spec.kind == "abstract" and not is_within(array, spec.dtype)
    ]
    _raise_mismatch(lines)


def _raise_mismatch(lines: Sequence[str]) -> None:
    if lines:
        raise StateMismatchError(
            f"the file holds a different state than expected:\n{first_lines(lines)}\nLoad it with "
            "the optimizer and parameters it was saved with."
        )


def _params(header: Header) -> list[str]:
    return [name_of(outer, ()) for outer in leaves(header.tree)]


def _placed(leaf: Any, like: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if isinstance(like, jax.Array) and like.committed:
        return jax.device_put(leaf, like.sharding)
    if isinstance(like, jax.ShapeDtypeStruct) and like.sharding is not None:
        return jax.device_put(leaf, like.sharding)
    return leaf


def _truncated(size: int) -> DamagedFileError:
    return _damaged(f"it ends after {size} bytes, before the end of the data it declares")


def _damaged(reason: str) -> DamagedFileError:
    return DamagedFileError(
        f"the file is damaged, or was not written by `save`: {reason}. Restore it from a backup."
    )
