"""What one step writes: arrays for Orbax, and a manifest whose digests come from the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from opt_core import flatten_with_paths

from opt_checkpoint._disk import digest as _digest
from opt_checkpoint._disk import storage as _storage
from opt_checkpoint._disk.manifest import (
    Limits,
    Manifest,
    canonical_json,
    json_copy,
    over_limits,
)
from opt_checkpoint._naming.names import NamedState
from opt_checkpoint._naming.schema import LeafInfo
from opt_checkpoint.errors import LeafError

EXTRA = "extra"


@dataclasses.dataclass(frozen=True)
class Saving:
    """One step on its way to the disk.

    Attributes:
      manifest: without digests.
      arrays: to be stored, by name.
      sums: their digests, being computed. They are started before `save` returns, so a step that
        donates the arrays may follow.
    """

    manifest: Manifest
    arrays: Mapping[str, Any]
    sums: Mapping[str, _digest.Sums]

    @classmethod
    def prepare(
        cls,
        step: int,
        named: NamedState,
        infos: Sequence[LeafInfo],
        values: Sequence[Any],
        metadata: Any,
    ) -> Saving:
        """Decides how every leaf is stored and starts the digests.

        Args:
          step: its number.
          named: the state.
          infos: of further leaves.
          values: those leaves.
          metadata: JSON data.

        Raises:
          LeafError: a leaf or the metadata cannot be saved, or all that is too much for a manifest.
        """
        metadata = json_copy(metadata)
        schema = dataclasses.replace(named.schema, leaves=(*named.schema.leaves, *infos))
        leaves = {**named, **{i.name: v for i, v in zip(infos, values, strict=True)}}
        if len(schema.by_name) != len(schema.leaves) or schema.by_name.keys() != leaves.keys():
            odd = schema.by_name.keys() ^ leaves.keys()
            raise LeafError(
                f"`schema` and leaves differ: {sorted(odd)[:3] or 'a name stands twice'}"
            )
        records, arrays = {}, {}
        for info in schema.leaves:
            records[info.name], array = _storage.encode(info, leaves[info.name])
            if array is not None:
                arrays[info.name] = _to_save(array)
        _storage.nest({records[name].key: None for name in arrays})
        manifest = Manifest(step, schema, records, metadata)
        _check_size(manifest)
        sums = _digest.digests(arrays)
        if jax.process_count() > 1:
            # What follows communicates: on CPU, Gloo's collectives of several programs at once may
            # wait for one another for ever. The arrays are copied off the devices next, anyway.
            jax.block_until_ready(list(arrays.values()))
        return cls(manifest, arrays, sums)

    def added_up(self) -> Saving:
        """Waits for the digests of what many processes have, and adds theirs; all must call it."""
        return dataclasses.replace(self, sums=_digest.add_up(self.sums))

    def tree(self) -> dict[str, Any]:
        """Returns the arrays as a nested dictionary, by the keys of the store."""
        records = self.manifest.records
        return _storage.nest({records[name].key: array for name, array in self.arrays.items()})

    def encode(self) -> bytes:
        """Waits for the digests and returns the manifest's bytes."""
        digests = {name: _digest.to_hex(sums) for name, sums in self.sums.items()}
        records = {
            name: dataclasses.replace(record, digest=digests.get(name))
            for name, record in self.manifest.records.items()
        }
        return dataclasses.replace(self.manifest, records=records).encode()

    def local_data(self) -> bytes:
        """Returns what must be equal in every process: the manifest, and arrays that each has."""
        if jax.process_count() == 1:
            return b""
        local = {
            name: _digest.to_hex(self.sums[name])
            for name, array in self.arrays.items()
            if isinstance(array, np.ndarray)
        }
        return self.manifest.encode() + canonical_json(local)


def extra_leaves(extras: Any) -> tuple[list[LeafInfo], list[Any]]:
    """Returns what each leaf of a pytree is, under `extra/`, and the leaves."""
    try:
        flat = [(path, leaf) for path, leaf in flatten_with_paths(extras) if leaf is not None]
    except (TypeError, ValueError) as error:
        text = " ".join(str(error).split())[:200]
        raise LeafError(f"`extras`: expected a pytree of named leaves: {text}") from error
    infos = [_extra_info((EXTRA, *path), leaf) for path, leaf in flat]
    return infos, [leaf for _, leaf in flat]


def _extra_info(path: tuple[str, ...], leaf: Any) -> LeafInfo:
    if _storage.is_scalar(leaf):
        return LeafInfo(path, (), _storage.PYTHON, EXTRA)
    if isinstance(leaf, np.generic | np.ndarray) or hasattr(leaf, "dtype"):
        return LeafInfo(path, tuple(np.shape(leaf)), str(leaf.dtype), EXTRA)
    raise LeafError(
        f"`{'/'.join(path)}`: expected an array, a typed PRNG key or a Python scalar, found "
        f"{type(leaf).__name__}"
    )


def _check_size(manifest: Manifest) -> None:
    """Nothing is saved that could not be read: every digest has one length."""
    records = {
        name: dataclasses.replace(record, digest="0" * 16 if record.key else None)
        for name, record in manifest.records.items()
    }
    whole = dataclasses.replace(manifest, records=records).encode()
    if excess := over_limits(whole, Limits()):
        raise LeafError(f"step {manifest.step}: its names and metadata are {excess}")


def _to_save(array: Any) -> Any:
    """In a run of many processes, an array that each has to itself is saved by the first."""
    if isinstance(array, jax.Array) and jax.process_count() > 1 and array.is_fully_addressable:
        return np.asarray(array)
    if isinstance(array, np.ndarray):
        return np.array(array, order="C")  # Saved as it is now, whatever becomes of it.
    return jnp.asarray(array)
