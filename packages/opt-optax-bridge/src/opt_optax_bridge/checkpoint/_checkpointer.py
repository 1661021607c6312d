"""Saves steps under one folder, and finds those that are there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orbax.checkpoint as ocp
from opt_core import Optimizer

from opt_optax_bridge.checkpoint import _digest, _orbax, _storage
from opt_optax_bridge.checkpoint._durable import DurablePath
from opt_optax_bridge.checkpoint._manifest import Manifest
from opt_optax_bridge.checkpoint._names import NamedState, named_state
from opt_optax_bridge.checkpoint._saved_step import SavedStep, open_step
from opt_optax_bridge.checkpoint.errors import MissingError, SaveError


class Checkpointer:
    """The checkpoints of a run: one folder, one writer, a folder per step."""

    def __init__(
        self,
        directory: str | Path,
        *,
        max_to_keep: int | None = None,
        async_save: bool = True,
        read_only: bool = False,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.read_only = read_only
        self._manager: ocp.CheckpointManager | None = None
        if not read_only:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(
                self.directory,
                item_handlers={
                    _orbax.LEAVES: _orbax.array_handler(),
                    _orbax.MANIFEST: _orbax.ManifestHandler(),
                },
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=max_to_keep,
                    enable_async_checkpointing=async_save,
                    cleanup_tmp_directories=True,
                    step_name_format=_orbax.StepNames(),
                    temporary_path_class=DurablePath,
                    todelete_subdir="trash",
                ),
            )

    def save(
        self, step: int, named: NamedState | Optimizer, *, metadata: Any = None, extras: Any = None
    ) -> None:
        """Saves a step."""
        if self._manager is None:
            raise SaveError(f"`{self.directory}` is open for reading: `read_only=True`")
        if isinstance(named, Optimizer):
            named = named_state(named)
        manifest, arrays = _prepare(step, named, metadata)
        sums = _digest.digests(arrays)

        def encode() -> bytes:
            digests = {name: _digest.to_hex(pair) for name, pair in sums.items()}
            records = {
                name: dataclasses.replace(record, digest=digests.get(name))
                for name, record in manifest.records.items()
            }
            return dataclasses.replace(manifest, records=records).encode()

        items: dict[str, Any] = {_orbax.MANIFEST: _orbax.ManifestSave(encode)}
        if arrays:
            tree = _storage.nest({manifest.records[n].key: leaf for n, leaf in arrays.items()})
            items[_orbax.LEAVES] = ocp.args.PyTreeSave(tree)
        saved = self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        if not saved:
            raise SaveError(f"step {step} was not saved in `{self.directory}`")

    def wait(self) -> None:
        """Waits until what is being saved is on the disk."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and lets go of the folder."""
        if self._manager is not None:
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps that are there, the oldest first."""
        return _orbax.list_steps(self.directory)

    def latest_step(self) -> int | None:
        """Returns the latest step that is there."""
        return max(self.steps(), default=None)

    def at(self, step: int) -> SavedStep:
        """Opens a step for reading."""
        if step not in self.steps():
            raise MissingError(f"no step {step} in `{self.directory}`: {self.steps()}")
        return open_step(self.directory / str(step))


def _prepare(
    step: int, named: NamedState, metadata: Any
) -> tuple[Manifest, Mapping[str, Any]]:
    records, arrays = {}, {}
    for info in named.schema.leaves:
        records[info.name], array = _storage.encode(info, named[info.name])
        if array is not None:
            arrays[info.name] = array
    return Manifest(step, named.schema, records, metadata), arrays
