"""What Orbax is told: how a manifest is written beside the arrays, and which files are steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future
from orbax.checkpoint.path import step as step_lib

from opt_checkpoint._disk.manifest import FILE_NAME
from opt_checkpoint._disk.storage import flatten

LEAVES, MANIFEST = "leaves", "manifest"


class ManifestHandler(ocp.AsyncCheckpointHandler):
    """Writes a manifest once its digests are known, while the arrays are being written."""

    async def async_save(self, directory: Any, args: ManifestSave) -> list[Future]:
        """Starts to write it; only the first process does."""

        async def write() -> None:
            if jax.process_index() == 0:
                (Path(directory) / FILE_NAME).write_bytes(args.encode())

        return [CommitFutureAwaitingContractedSignals(write(), name="manifest")]

    def save(self, directory: Any, args: ManifestSave) -> None:
        """Writes it."""
        if jax.process_index() == 0:
            (Path(directory) / FILE_NAME).write_bytes(args.encode())

    def restore(self, directory: Any, args: ManifestRestore | None = None) -> bytes:
        """Returns its bytes."""
        return (Path(directory) / FILE_NAME).read_bytes()


@ocp.args.register_with_handler(ManifestHandler, for_save=True)
@dataclasses.dataclass
class ManifestSave(ocp.args.CheckpointArgs):
    """What to write: called in the background."""

    encode: Callable[[], bytes]


@ocp.args.register_with_handler(ManifestHandler, for_restore=True)
@dataclasses.dataclass
class ManifestRestore(ocp.args.CheckpointArgs):
    """Nothing: there is one manifest."""


class StepNames(step_lib.NameFormat[step_lib.Metadata]):
    """Steps are folders named by a number that hold a manifest; all else in the root is ignored."""

    def build_name(self, step: int) -> str:
        """Returns the name of a step's folder."""
        return str(step)

    def find_all(self, base_path: Any) -> Iterator[step_lib.Metadata]:
        """Yields the steps that are there."""
        for step in list_steps(Path(base_path)):
            yield step_lib.Metadata(step=step, path=base_path / str(step))

    def find_step(self, base_path: Any, step: int) -> step_lib.Metadata:
        """Returns where a step is.

        Raises:
          ValueError: there is none.
        """
        if step not in list_steps(Path(base_path)):
            raise ValueError(f"no step {step} in `{base_path}`")
        return step_lib.Metadata(step=step, path=base_path / str(step))


def list_steps(root: Path) -> list[int]:
    """Returns the steps in a folder, the oldest first; follows no link."""
    if not root.is_dir():
        return []
    steps = (_step(path) for path in root.iterdir())
    return sorted(step for step in steps if step is not None)


def _step(path: Path) -> int | None:
    name = path.name
    if not (name.isascii() and name.isdecimal() and str(int(name)) == name):
        return None
    if path.is_symlink() or not (path / MANIFEST).is_dir():
        return None
    return int(name)


def array_handler(**options: Any) -> ocp.PyTreeCheckpointHandler:
    """Returns a fresh handler of arrays: one that failed is not used again."""
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, **options)


def _leaves(folder: Path) -> Path:
    """Where the arrays are: in an item of `OptimizerHandler` they are beside the manifest."""
    return folder / LEAVES if (folder / MANIFEST).is_dir() else folder


def restore_arrays(folder: Path, item: Any, restore_args: Sequence[Any] | Any) -> Any:
    """Reads some arrays of a step into where they are wanted."""
    handler = array_handler()
    try:
        return handler.restore(
            _leaves(folder),
            args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True),
        )
    finally:
        handler.close()  # type: ignore[no-untyped-call]


def stored_arrays(folder: Path) -> dict[tuple[str, ...], tuple[tuple[int, ...], Any]]:
    """Returns shape and dtype of every array of a step, without reading them, by its key."""
    handler = array_handler()
    try:
        tree = handler.metadata(_leaves(folder)).tree
    finally:
        handler.close()  # type: ignore[no-untyped-call]
    return {key: (tuple(a.shape), np.dtype(a.dtype)) for key, a in flatten(tree).items()}
