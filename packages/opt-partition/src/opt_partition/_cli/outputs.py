"""Outputs of the command line: tables on a terminal, text in a file."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from opt_partition._axes.explain import Explanation, Row
from opt_partition._cli.inputs import InputError, reason
from opt_partition._display import (
    Table,
    byte_cells,
    collapse,
    dtype_name,
    human_bytes,
    join_entries,
    join_ints,
    pattern,
    words,
)
from opt_partition._mesh.layout import Layout, LeafLayout


def explanation_table(
    explanation: Explanation, layout: Layout | None = None, *, show_all: bool = False
) -> Table:
    """Returns the table of an explanation, with repeated leaves collapsed.

    Args:
      explanation: the explanation.
      layout: the layout of the state, if known.
      show_all: whether every leaf gets its own row.
    """
    columns = ["state", "leaves", "shape", "dtype", "parameter", "axes", "source"]
    columns += ["spec", "per device", "bytes per device"] if layout else []
    leaves: Sequence[LeafLayout | None] = layout.rows if layout else [None] * len(explanation.rows)
    pairs = list(zip(explanation.rows, leaves, strict=True))
    groups = (
        [(row.path, [(row, leaf)]) for row, leaf in pairs]
        if show_all
        else collapse(pairs, lambda pair: pair[0].path, lambda pair: _alike(*pair))
    )
    rows = []
    for name, group in groups:
        row, leaf = group[0]
        parameter = pattern([member.parameter or "" for member, _ in group])
        shape, axes = join_ints(row.shape), join_entries(row.axes)
        dtype = dtype_name(row.dtype)
        cells = [name, f"{len(group):,}", shape, dtype, parameter, axes, row.source]
        if leaf:
            per_device = sum(member.bytes_per_device for _, member in group if member)
            cells += [join_entries(leaf.spec), *byte_cells(per_device)]
        rows.append((*cells, "; ".join(_notes(row, leaf))))
    size = sum(row.bytes for row in explanation.rows)
    return Table(
        f"optimizer state: {len(explanation.rows):,} leaves, {human_bytes(size)} ({size:,} bytes); "
        f"evaluations of `init`: {explanation.evaluations}",
        (*columns, "note"),
        tuple(rows),
        frozenset({"leaves", "per device", "bytes per device"}),
    )


@contextlib.contextmanager
def standard_output() -> Iterator[None]:
    """Context in which to write to standard output; ignores a pipe closed by its reader.

    Raises:
      InputError: standard output cannot be written, e.g. on a full disk.
    """
    # None if the process was started with standard output closed.
    if (stream := sys.stdout) is None:
        raise InputError("standard output cannot be written: it is closed")
    try:
        try:
            yield
        finally:
            stream.flush()
    except OSError as error:
        # Flushing the rest when Python exits would fail again, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader may close a pipe early
            raise InputError(f"standard output cannot be written: {reason(error)}") from error


def print_text(text: str) -> None:
    """Prints text to standard output."""
    with standard_output():
        print(text)


def write_text(path: str, text: str) -> None:
    """Writes a file atomically.

    Raises:
      InputError: the file cannot be written.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(None, "Is a directory")
        target = target.resolve()  # replace the target of a link, not the link
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", errors="xmlcharrefreplace") as file:
                file.write(text)
            os.chmod(temporary, target.stat().st_mode if target.exists() else 0o666 & ~_umask())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise InputError(f"`{path}` cannot be written: {reason(error)}") from error


def _alike(row: Row, leaf: LeafLayout | None) -> tuple[object, ...]:
    """Returns the key of leaves that share a row of the table."""
    spec = leaf and (leaf.spec, leaf.memory_kind)
    owner = words(row.parameter or "")
    return row.shape, dtype_name(row.dtype), row.axes, row.source, owner, spec, _notes(row, leaf)


def _notes(row: Row, leaf: LeafLayout | None) -> tuple[str, ...]:
    memory = (f"in {leaf.memory_kind}",) if leaf and leaf.memory_kind else ()
    return (*filter(None, [row.note]), *memory, *(leaf.notes if leaf else ()))


def _umask() -> int:
    """Returns the umask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
