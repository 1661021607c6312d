"""Orbax's handlers and options: a manifest next to the arrays, and which folders are steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict
from jax.sharding import (
    AbstractMesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future
from orbax.checkpoint.path import atomicity_types
from orbax.checkpoint.path import step as step_lib

from opt_checkpoint._disk.manifest import FILE_NAME
from opt_checkpoint._disk.saving import Saving
from opt_checkpoint._disk.steps import LEAVES, MANIFEST, list_steps
from opt_checkpoint._naming.names import is_wide
from opt_checkpoint.errors import CheckpointError, DamagedError, MissingError

TRASH = "trash"
TEMPORARY = atomicity_types.TMP_DIR_SUFFIX
_SUMS = "sums.{}"
_T = TypeVar("_T")


class ManifestHandler(ocp.AsyncCheckpointHandler):
    """Writes a manifest once every process has summed its shards of the arrays.

    The sums go through files: collectives in the background would interfere with the training's.
    """

    def __init__(self) -> None:
        self._saving: Saving | None = None

    async def async_save(self, directory: Any, args: ManifestSave) -> list[Future]:
        """Starts to sum the shards of this process."""
        self._saving = args.saving

        async def sums() -> None:
            self.save(directory, args)

        return [CommitFutureAwaitingContractedSignals(sums(), name="digests")]

    def save(self, directory: Any, args: ManifestSave) -> None:
        """Sums the shards of this process."""
        self._saving = args.saving
        path = Path(directory) / _SUMS.format(jax.process_index())
        path.write_bytes(args.saving.sums().tobytes())

    def finalize(self, directory: Any) -> None:
        """Writes the manifest: Orbax calls it in the first process, once all have saved."""
        saving, self._saving = self._saving, None
        if saving is None or jax.process_index() > 0:
            return
        paths = [Path(directory) / _SUMS.format(i) for i in range(jax.process_count())]
        parts = [np.frombuffer(path.read_bytes(), np.uint32).reshape(-1, 2) for path in paths]
        sums = np.stack(parts).sum(axis=0, dtype=np.uint32)
        (Path(directory) / FILE_NAME).write_bytes(saving.encode(sums))
        for path in paths:
            path.unlink()

    def restore(self, directory: Any, args: Any = None) -> bytes:
        """Returns its bytes."""
        return (Path(directory) / FILE_NAME).read_bytes()


# Orbax does not accept a handler with arguments for saving only.
@ocp.args.register_with_handler(ManifestHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class ManifestSave(ocp.args.CheckpointArgs):
    """What to write."""

    saving: Saving


class StepNames(step_lib.NameFormat[step_lib.Metadata]):
    """Steps are the folders named by a number that hold a manifest."""

    def build_name(self, step: int) -> str:
        """Returns the name of a step's folder."""
        return str(step)

    def find_all(self, base_path: Any) -> Iterator[step_lib.Metadata]:
        """Yields the steps that are there."""
        for step in list_steps(Path(base_path)):
            yield step_lib.Metadata(step=step, path=base_path / str(step))

    def find_step(self, base_path: Any, step: int) -> step_lib.Metadata:
        """Returns where a step is; Orbax expects a `ValueError` if it does not exist."""
        if step not in list_steps(Path(base_path)):
            raise ValueError(f"no step {step} in `{base_path}`")
        return step_lib.Metadata(step=step, path=base_path / str(step))


def open_manager(
    directory: Path, before_commit: Callable[[], None], **policy: Any
) -> ocp.CheckpointManager:
    """Returns Orbax's manager of a folder.

    Args:
      directory: the folder.
      before_commit: called in the first process once a step is written, before it gets its name.
      **policy: which steps are kept.
    """
    options = ocp.CheckpointManagerOptions(
        **policy,
        async_options=ocp.options.AsyncOptions(
            # Threads that wait for a folder that cannot be created keep the process alive.
            create_directories_asynchronously=False,
            # It is called after the handlers' `finalize`, and before the rename (Orbax 0.12).
            post_finalization_callback=before_commit,
        ),
        cleanup_tmp_directories=True,
        step_name_format=StepNames(),
        todelete_subdir=TRASH,
    )
    handlers = {LEAVES: ocp.PyTreeCheckpointHandler(), MANIFEST: ManifestHandler()}
    return ocp.CheckpointManager(directory, item_handlers=handlers, options=options)


def temporary_path(directory: Path, step: int) -> Path:
    """Returns where Orbax writes a step before it gets its name."""
    return directory / f"{step}{TEMPORARY}"


def _leaves(folder: Path) -> Path:
    """Where the arrays are: an item of `OptimizerHandler` has them next to the manifest."""
    return folder / LEAVES if (folder / MANIFEST).is_dir() else folder


def restore_arrays(folder: Path, item: Any, restore_args: Any) -> Any:
    """Reads some arrays of a step into the given shardings."""
    args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
    with closing(ocp.PyTreeCheckpointHandler()) as handler:  # after a failure it cannot be reused
        return handler.restore(_leaves(folder), args=args)


def restore_args(shape: tuple[int, ...], dtype: Any, sharding: Sharding | None) -> Any:
    """Returns how to read an array; a dtype of `None` is that of the store."""
    if dtype is not None and is_wide(dtype):
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
    place = sharding or SingleDeviceSharding(jax.local_devices()[0])
    return ocp.ArrayRestoreArgs(sharding=place, global_shape=shape, dtype=dtype)


def sharding_of(metadata: Any) -> NamedSharding | None:
    """Returns where an array was on a mesh, from Orbax's metadata of it.

    A mesh of devices that this process does not have is an `AbstractMesh`.
    """
    saved: Any = getattr(metadata, "sharding", None)
    if not hasattr(saved, "partition_spec"):
        return None
    entries = (tuple(x) if isinstance(x, list) else x for x in saved.partition_spec)
    spec = PartitionSpec(*entries)
    try:
        return NamedSharding(saved.to_jax_sharding().mesh, spec)
    except ValueError:  # Orbax: the available devices are different
        sizes = tuple(int(size) for size in saved.shape)
        types = {} if saved.axis_types is None else {"axis_types": tuple(saved.axis_types)}
        return NamedSharding(AbstractMesh(sizes, tuple(saved.axis_names), **types), spec)


def stored_shardings(folder: Path) -> dict[tuple[str, ...], NamedSharding]:
    """Returns where the arrays of a step were on a mesh when they were saved, by key."""
    with closing(ocp.PyTreeCheckpointHandler()) as handler:
        tree = handler.metadata(_leaves(folder)).tree
    found = {key: sharding_of(array) for key, array in flatten_dict(tree).items()}
    return {key: sharding for key, sharding in found.items() if sharding is not None}


def stored_arrays(folder: Path) -> dict[tuple[str, ...], tuple[tuple[int, ...], Any]]:
    """Returns shape and dtype of every array of a step, without reading them, by its key."""
    with closing(ocp.PyTreeCheckpointHandler()) as handler:
        tree = handler.metadata(_leaves(folder)).tree
    return {key: (tuple(a.shape), np.dtype(a.dtype)) for key, a in flatten_dict(tree).items()}


def tried(folder: Path, read: Callable[[], _T]) -> _T:
    """Makes errors of Orbax and TensorStore typed, unless they say nothing of the checkpoint."""
    try:
        return read()
    except (MemoryError, CheckpointError):
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        if "RESOURCE_EXHAUSTED" in text:
            raise
        raise damaged(folder, f"cannot be read: {text}") from error


def damaged(folder: Path, what: str) -> CheckpointError:
    """Returns the error of a checkpoint that is damaged, or was deleted meanwhile."""
    if not folder.is_dir():
        return MissingError(f"`{folder}` has been deleted while it was read")
    return DamagedError(f"`{folder}`: {what}")
