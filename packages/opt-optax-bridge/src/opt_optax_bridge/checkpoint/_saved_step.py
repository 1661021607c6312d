"""One step on disk, open for reading."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding, SingleDeviceSharding

from opt_optax_bridge.checkpoint import _digest, _orbax, _storage
from opt_optax_bridge.checkpoint._manifest import Limits, Manifest, read_manifest
from opt_optax_bridge.checkpoint._schema import LeafInfo, Schema
from opt_optax_bridge.checkpoint.errors import DamagedError, MissingError


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
          wanted: where each leaf is to lie, by name. Without a sharding: on the default device; a
            leaf of 64 bits comes as a NumPy array then where JAX has no 64 bits.

        Raises:
          DamagedError: a leaf is not what was written.
          MissingError: there is no such leaf.
        """
        infos = self.schema.by_name
        if unknown := sorted(wanted.keys() - infos.keys()):
            raise MissingError(f"`{self.path}` has no leaf `{unknown[0]}`: it has {len(infos)}")
        records = {name: self.manifest.records[name] for name in wanted}
        places = {name: place.sharding for name, place in wanted.items()}
        stored = self._read_stored({infos[name]: places[name] for name in wanted})
        return {
            name: _storage.decode(infos[name], records[name], stored.get(name), places[name])
            for name in wanted
        }

    def read_extras(self, like: Any = None) -> Any:
        """Reads what was saved as `extras`."""
        raise NotImplementedError

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
        try:
            tree = _orbax.restore_arrays(
                self.path, _storage.nest(item), _storage.nest(restore_args)
            )
        except Exception as error:
            raise DamagedError(f"`{self.path}` cannot be read: {error!s:.300}") from error
        stored = {names[key]: leaf for key, leaf in _storage.flatten(tree).items()}
        self._check(stored, names.values())
        return stored

    def _check(self, stored: Mapping[str, Any], names: Iterable[str]) -> None:
        sums = {}
        for name in names:
            leaf = stored.get(name)
            if not isinstance(leaf, jax.Array | np.ndarray):
                raise DamagedError(f"`{self.path}`: `{name}` is missing")
            sums[name] = _digest.digest(leaf)
        for name, pair in sums.items():
            expected, found = self.manifest.records[name].digest, _digest.to_hex(pair)
            if found != expected:
                raise DamagedError(
                    f"`{self.path}`: `{name}`: expected the digest {expected}, found {found}: its "
                    "bytes are not those that were written"
                )


def open_step(path: str | Path, *, limits: Limits | None = None) -> SavedStep:
    """Opens the folder of one step for reading; takes no lock.

    Raises:
      DamagedError: its manifest is not what was written.
      LoadError: it has no manifest, or a hostile one.
      MissingError: there is no such folder.
      VersionError: a newer version wrote it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise MissingError(f"`{folder}` is no folder")
    saved = SavedStep(folder, limits)
    _ = saved.manifest
    return saved


def _restore_args(struct: jax.ShapeDtypeStruct, sharding: Sharding | None) -> Any:
    if sharding is None and jnp.zeros((), struct.dtype).dtype != struct.dtype:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=struct.dtype)
    return ocp.ArrayRestoreArgs(
        sharding=sharding or SingleDeviceSharding(jax.local_devices()[0]),
        global_shape=struct.shape,
        dtype=struct.dtype,
    )
