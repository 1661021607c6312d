"""One step on disk, open for reading."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from opt_core import flatten_with_paths

from opt_checkpoint._disk import digest as _digest
from opt_checkpoint._disk import orbax as _orbax
from opt_checkpoint._disk import storage as _storage
from opt_checkpoint._disk.foreign_steps import describe, is_orbax, own_item
from opt_checkpoint._disk.manifest import Limits, Manifest, read_manifest
from opt_checkpoint._disk.processes import is_first, together
from opt_checkpoint._disk.saving import EXTRA
from opt_checkpoint._disk.storage import Record
from opt_checkpoint._naming.schema import LeafInfo, Schema, leaf_name
from opt_checkpoint.errors import (
    CheckpointError,
    DamagedError,
    ForeignError,
    LeafError,
    MissingError,
)

Level = Literal["manifest", "digests"]
_T = TypeVar("_T")
# Read at once when a step is checked.
_BATCH_BYTES = 512 * 2**20


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What was found out about a step.

    Attributes:
      step: its number.
      level: how well it was looked at.
      leaves: how many it has.
      error: what is wrong, if anything.
    """

    step: int
    level: Level
    leaves: int = 0
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.error is None


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """A step on disk: a `Source` that a restore may come from.

    Attributes:
      path: the folder of the step.
      limits: on what its manifest may hold.
    """

    path: Path
    limits: Limits | None = None

    @cached_property
    def manifest(self) -> Manifest:
        """What it says about itself; read once."""
        return read_manifest(self.path, limits=self.limits)

    @property
    def step(self) -> int:
        """The step that it was saved as."""
        return self.manifest.step

    @property
    def schema(self) -> Schema:
        """The leaves, and who wrote them."""
        return self.manifest.schema

    @property
    def metadata(self) -> Any:
        """The JSON data that was saved with it."""
        return self.manifest.metadata

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Reads leaves into where they are wanted, each device its own share, and checks them.

        Args:
          wanted: where each leaf is to lie, by name; without a sharding, on the default device. A
            leaf of 64 bits comes as a NumPy array where JAX has no 64 bits.

        Raises:
          DamagedError: a leaf is not what was written.
          LeafError: a leaf does not divide as its sharding says; nothing has been read.
          MissingError: there is no such leaf, or the step has been deleted.
        """
        infos = self.schema.by_name
        if unknown := sorted(wanted.keys() - infos.keys()):
            raise MissingError(f"`{self.path}` has no leaf `{unknown[0]}`: it has {len(infos)}")
        records = {name: self.manifest.records[name] for name in wanted}
        places = {name: place.sharding for name, place in wanted.items()}
        stored: dict[str, Any] = {}
        with together():
            for name, sharding in places.items():
                _check_sharding(infos[name], sharding)
            stored = self._read_stored({infos[name]: places[name] for name in wanted})
        with together():
            self._check(stored)
        return {
            name: _storage.decode(infos[name], records[name], stored.get(name), places[name])
            for name in wanted
        }

    def read_extras(self, like: Any = None) -> Any:
        """Reads what was saved as `extras`.

        Args:
          like: a pytree of the structure that was saved; its arrays (or `jax.ShapeDtypeStruct`s)
            say where the leaves are to lie.

        Returns:
          The pytree; without `like`, nested dictionaries by the names of its paths.

        Raises:
          DamagedError: a leaf is not what was written.
          LeafError: a leaf is of another shape or dtype than that of `like`.
          MissingError: a leaf of `like` was not saved.
        """
        infos = {info.path: info for info in self.schema.leaves if info.kind == EXTRA}
        if like is None:
            read = self.read({info.name: _place(info) for info in infos.values()})
            nested = _storage.nest({path: read[info.name] for path, info in infos.items()})
            return nested.get(EXTRA)
        flat = [((EXTRA, *path), leaf) for path, leaf in flatten_with_paths(like)]
        wanted = {}
        for path, leaf in flat:
            if leaf is None:
                continue
            if path not in infos:
                raise MissingError(f"`{self.path}`: no `{leaf_name(path)}` was saved")
            wanted[leaf_name(path)] = _like(infos[path], leaf)
        read = self.read(wanted)
        leaves = [None if leaf is None else read[leaf_name(path)] for path, leaf in flat]
        return jax.tree.unflatten(jax.tree.structure(like, is_leaf=lambda x: x is None), leaves)

    def validate(self, *, level: Level = "digests") -> StepReport:
        """Checks the step; see `Checkpointer.validate`."""
        report = StepReport(self.step, level, leaves=len(self.schema.leaves))
        try:
            with together():
                if is_first():
                    self._check_stored_shapes()
            if level == "digests":
                self._check_digests()
        except MissingError:
            raise
        except CheckpointError as found:
            return dataclasses.replace(report, error=str(found))
        return report

    def _check_stored_shapes(self) -> None:
        infos = self.schema.by_name
        stored = self._try(lambda: _orbax.stored_arrays(self.path)) if self._in_store() else {}
        for name, record in self._in_store().items():
            struct = _storage.stored_shape(infos[name], record)
            found = stored.pop(record.key, None)
            if found != (struct.shape, struct.dtype):
                raise self._damaged(
                    f"`{name}`: expected {struct.dtype}{list(struct.shape)}, found "
                    f"{f'{found[1]}{list(found[0])}' if found else 'none'}"
                )
        if stored:
            raise self._damaged(f"`{next(iter(stored))}` is not in the manifest")

    def _check_digests(self) -> None:
        batch: dict[LeafInfo, Sharding | None] = {}
        size = 0
        for info in self.schema.leaves:
            place = _spread(info.shape)
            batch[info] = place
            size += math.prod(place.shard_shape(info.shape)) * 8
            if size > _BATCH_BYTES:
                self._check_batch(batch)
                batch, size = {}, 0
        self._check_batch(batch)

    def _check_batch(self, places: Mapping[LeafInfo, Sharding | None]) -> None:
        stored: dict[str, Any] = {}
        with together():
            stored = self._read_stored(places)
        with together():
            self._check(stored)

    def check_extras(self) -> None:
        """Reads what was saved as `extras` and compares the digests.

        Raises:
          DamagedError: a leaf is not what was written.
        """
        self.read({info.name: _place(info) for info in self.schema.leaves if info.kind == EXTRA})

    def _in_store(self) -> dict[str, Record]:
        return {n: r for n, r in self.manifest.records.items() if r.digest is not None}

    def _read_stored(self, places: Mapping[LeafInfo, Sharding | None]) -> dict[str, Any]:
        item: dict[Any, Any] = {}
        restore_args: dict[Any, Any] = {}
        names: dict[Any, str] = {}
        for info, sharding in places.items():
            record = self.manifest.records[info.name]
            if record.digest is None:
                continue
            struct = _storage.stored_shape(info, record)
            if record.storage == _storage.KEY:
                sharding = _storage.data_sharding(sharding, len(struct.shape))
            item[record.key] = struct
            restore_args[record.key] = _restore_args(struct, sharding)
            names[record.key] = info.name
        if not item:
            return {}
        nested = _storage.nest(item), _storage.nest(restore_args)
        tree = self._try(lambda: _orbax.restore_arrays(self.path, *nested))
        stored = {names[key]: leaf for key, leaf in _storage.flatten(tree).items()}
        for name in names.values():
            if not isinstance(stored.get(name), jax.Array | np.ndarray):
                raise self._damaged(f"`{name}` is missing")
        return stored

    def _check(self, stored: Mapping[str, Any]) -> None:
        sums = _digest.add_up(_digest.digests(stored))
        for name, pair in sums.items():
            expected, found = self.manifest.records[name].digest, _digest.to_hex(pair)
            if found != expected:
                raise self._damaged(
                    f"`{name}`: expected the digest {expected}, found {found}: its "
                    "bytes are not those that were written"
                )

    def _try(self, read: Callable[[], _T]) -> _T:
        """Nothing raw leaves Orbax and TensorStore, but what says nothing about the step."""
        try:
            return read()
        except MemoryError:
            raise
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            if "RESOURCE_EXHAUSTED" in text:
                raise
            raise self._damaged(f"cannot be read: {text}") from error

    def _damaged(self, what: str) -> CheckpointError:
        if not self.path.is_dir():
            return MissingError(f"`{self.path}` has been deleted while it was read")
        return DamagedError(f"`{self.path}`: {what}")


def open_step(
    path: str | Path, *, step: int | None = None, limits: Limits | None = None
) -> SavedStep:
    """Opens the folder of one step for reading; takes no lock.

    Args:
      path: the folder; or, in another program's checkpoint, the item that `OptimizerHandler` wrote,
        or the step with that item.
      step: that it must have been saved as, if given.
      limits: on what its manifest may hold.

    Raises:
      DamagedError: its manifest is not what was written.
      ForeignError: another program wrote it; see `open_foreign`.
      LoadError: it has no manifest, or a hostile one.
      MissingError: there is no such folder.
      VersionError: a newer version wrote it.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise MissingError(f"`{folder}` is no folder")
    own = own_item(folder)
    if own is None and is_orbax(folder):
        raise ForeignError(describe(folder, ["."]))
    saved = SavedStep(own or folder, limits)
    if step not in (None, saved.step):
        raise DamagedError(f"`{folder}` was saved as step {saved.step}, not {step}")
    return saved


def _spread(shape: tuple[int, ...]) -> Sharding:
    """A sharding over all devices of all processes; whole on each where no dimension divides."""
    devices: Any = jax.devices()
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    mesh = Mesh(np.array(devices), ("devices",))
    for dim in sorted(range(len(shape)), key=lambda dim: -shape[dim]):
        if shape[dim] and shape[dim] % len(devices) == 0:
            return NamedSharding(mesh, PartitionSpec(*[None] * dim, "devices"))
    return NamedSharding(mesh, PartitionSpec())


def _restore_args(struct: jax.ShapeDtypeStruct, sharding: Sharding | None) -> Any:
    if jax.dtypes.canonicalize_dtype(struct.dtype) != struct.dtype:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=struct.dtype)
    return ocp.ArrayRestoreArgs(
        sharding=sharding or SingleDeviceSharding(jax.local_devices()[0]),
        global_shape=struct.shape,
        dtype=struct.dtype,
    )


def _check_sharding(info: LeafInfo, sharding: Sharding | None) -> None:
    if sharding is None or info.dtype == _storage.PYTHON:
        return
    try:
        sharding.shard_shape(info.shape)
    except (ValueError, IndexError) as error:
        spec = getattr(sharding, "spec", sharding)
        raise LeafError(
            f"`{info.name}`: {list(info.shape)} does not divide as `{spec}` says: "
            f"{' '.join(str(error).split())[:200]}"
        ) from None


def _place(info: LeafInfo) -> jax.ShapeDtypeStruct:
    dtype = np.dtype("int32") if info.is_key or info.dtype == _storage.PYTHON else info.dtype
    return jax.ShapeDtypeStruct(info.shape, jnp.dtype(dtype))


def _like(info: LeafInfo, leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = _storage.PYTHON if _storage.is_scalar(leaf) else str(leaf.dtype)
    if (tuple(np.shape(leaf)), dtype) != (info.shape, info.dtype):
        raise LeafError(
            f"`{info.name}`: expected {dtype}{list(np.shape(leaf))} as in `like`, found "
            f"{info.dtype}{list(info.shape)} in the checkpoint"
        )
    sharding = leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None
    place = _place(info)
    return jax.ShapeDtypeStruct(place.shape, place.dtype, sharding=sharding)
