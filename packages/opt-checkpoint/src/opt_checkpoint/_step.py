"""One step on disk, open for reading, and reading arrays that Orbax wrote.

Each device reads its own share. Errors of Orbax and TensorStore are typed.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from opt_core.errors import OptimizerError
from opt_core.extend import (
    LeafInfo,
    Names,
    abstract,
    is_wide,
    key_kind,
    path_str,
    shown,
)

from opt_checkpoint._digest import bound, digests
from opt_checkpoint._manifest import (
    EXTRA,
    PYTHON,
    Manifest,
    describe_foreign,
    extra_leaves,
    is_orbax,
    item_folder,
    item_with_manifest,
    nest,
    read_manifest,
    rebuilt,
    store_key,
    structure_of,
)
from opt_checkpoint._processes import sync_errors
from opt_checkpoint.errors import DamagedError, ForeignError, LeafError, MissingError

_BATCH_BYTES = 512 * 2**20
_T = TypeVar("_T")
_Key = TypeVar("_Key")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedStep(Manifest):
    """A step on disk, with the contents of its manifest: a `Source` that a restore may come from.

    Attributes:
      path: the folder of the step.
      step: the number it was saved under.
      schema: the leaves, and who wrote them.
      digests: of each leaf in the store, 16 hexadecimal digits over its bits and its name.
      metadata: the JSON data saved with it.
      extras: the structure of the pytree saved with it; `read_extras` reads that.
    """

    path: Path

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Reads leaves into the given shardings, each device its own share, and checks the digests.

        Args:
          wanted: where to place each leaf, by name; without a sharding, on the default device. A
            leaf of 64 bits is a NumPy array where JAX does not have 64 bits.

        Raises:
          DamagedError: a leaf has changed since it was written.
          LeafError: a sharding does not divide its leaf; nothing was read.
          MissingError: a leaf is not there, or the step has been deleted.
        """
        infos = wanted_leaves(self, wanted)
        places = {name: place.sharding for name, place in wanted.items()}
        stored = self._read_stored(places)
        return {
            name: self._leaf(infos[name], stored.get(name), place) for name, place in places.items()
        }

    def same(self, names: Iterable[str]) -> bool | None:
        """Returns whether leaves are the same, bit for bit, by their digests; reads no array.

        `None` if one has no digest: empty arrays and Python scalars.
        """
        leaves = set()
        for name in names:
            if name not in self.digests:
                return None
            info = self.schema.by_name[name]
            leaves.add((info.shape, info.dtype, bound(name, self.digests[name])))
        return len(leaves) == 1

    def shardings(self, names: Iterable[str]) -> dict[str, Sharding]:
        """Returns where leaves were when they were saved, by name, as far as Orbax noted it."""
        keys = {name: store_key(self.schema.by_name[name].path) for name in names}
        with sync_errors():
            return saved_shardings(self.path, keys)

    def read_extras(self, like: Any = None) -> Any:
        """Reads what was saved as `extras`.

        Args:
          like: a pytree of the structure that was saved; its arrays (or `jax.ShapeDtypeStruct`s)
            say where to place the leaves.

        Returns:
          The pytree: dicts, lists, tuples and `None`, with arrays of JAX, those of NumPy, and
          Python scalars as they were saved. Without `like` other nodes, such as named tuples, are
          dicts by the names of their fields, and arrays of JAX are on the default device.

        Raises:
          DamagedError: a leaf has changed since it was written.
          LeafError: a leaf has another shape or dtype than in `like`.
          MissingError: a leaf of `like` was not saved, or without `like` the structure.
        """
        infos = {info.path: info for info in self.schema.leaves if info.kind == EXTRA}
        if like is None:
            if infos and self.extras is None:
                raise MissingError(f"`{self.path}`: the structure was not saved: give `like`")
            read = self.read({info.name: abstract(info) for info in infos.values()})
            return rebuilt(self.extras, lambda path: read[path_str(path)])
        flat = extra_leaves(like, "like")
        if gone := [info.name for info, _ in flat if info.path not in infos]:
            raise MissingError(f"`{self.path}`: no `{gone[0]}` was saved")
        for info, _ in flat:
            found = infos[info.path]
            if (found.shape, found.dtype) != (info.shape, info.dtype):
                expected = f"expected {shown(info)} as in `like`"
                raise LeafError(f"`{info.name}`: {expected}, found {shown(found)}")
        read = self.read({x.name: abstract(x, getattr(y, "sharding", None)) for x, y in flat})
        leaves = [
            rebuilt(structure_of(y), lambda path: read[path_str(path)], x.path) for x, y in flat
        ]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def validate(self) -> None:
        """Reads every bit and compares the digests; raises a `DamagedError` where one differs."""
        for batch in _batches(self.schema.leaves):
            self._read_stored(batch)

    def check_extras(self) -> None:
        """Reads what was saved as `extras` and compares the digests."""
        self._read_stored({x.name: None for x in self.schema.leaves if x.kind == EXTRA})

    def _leaf(self, info: LeafInfo, stored: Any, sharding: Sharding | None) -> Any:
        if info.dtype == PYTHON:
            return info.value
        if stored is None:  # without elements
            stored = np.zeros((struct := _struct(info)).shape, struct.dtype)
        return to_leaf(info, stored, sharding)

    def _read_stored(self, places: Mapping[str, Sharding | None]) -> dict[str, Any]:
        """Reads the stored arrays of some leaves and compares the digests."""
        with sync_errors():
            stored = self._read_unchecked({x: s for x, s in places.items() if x in self.digests})
        with sync_errors():
            for name, sums in zip(stored, digests(list(stored.values())), strict=True):
                if (digest := bound(name, sums)) != self.digests[name]:
                    text = f"expected the digest {self.digests[name]}, found {digest}"
                    raise damaged(self.path, f"`{name}`: {text}")
        return stored

    def _read_unchecked(self, places: Mapping[str, Sharding | None]) -> dict[str, Any]:
        if not places:
            return {}
        keys = {name: store_key(self.schema.by_name[name].path) for name in places}
        structs = {name: _struct(self.schema.by_name[name]) for name in places}
        args = {n: restore_args(x.shape, x.dtype, places[n]) for n, x in structs.items()}
        tree = nest({keys[name]: how for name, how in args.items()})
        arrays = flatten_dict(restore_arrays(self.path, tree, tree))
        read = {name: arrays.get(key) for name, key in keys.items()}
        for name, array in read.items():
            if not isinstance(array, jax.Array | np.ndarray):
                raise damaged(self.path, f"`{name}` is missing")
        return read


def _struct(info: LeafInfo) -> jax.ShapeDtypeStruct:
    """What is stored of a leaf: of PRNG keys their data."""
    if not info.is_key:
        return jax.ShapeDtypeStruct(info.shape, jnp.dtype(info.dtype))
    data: Any = jax.eval_shape(jax.random.key_data, abstract(info))
    return jax.ShapeDtypeStruct(data.shape, data.dtype)


def wanted_leaves(source: Any, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, LeafInfo]:
    """Returns the leaves of a step by name, if it has those wanted, and their shardings divide."""
    infos: dict[str, LeafInfo] = source.schema.by_name
    if unknown := sorted(wanted.keys() - infos.keys()):
        raise MissingError(f"`{source.path}` has no leaf `{unknown[0]}`: it has {len(infos)}")
    for name, place in wanted.items():
        _check_sharding(infos[name], place.sharding)
    return infos


def open_step(path: str | Path, *, step: int | None = None) -> SavedStep:
    """Opens the folder of one step for reading; takes no lock.

    Args:
      path: the folder; or, in another program's checkpoint, the item that `OptimizerHandler` wrote,
        or the step with that item.
      step: the number it must have been saved under.

    Raises:
      DamagedError: its manifest has changed since it was written.
      ForeignError: another program wrote it; see `open_foreign`.
      LoadError: it has no manifest, or one that cannot be read.
      MissingError: the folder does not exist.
      VersionError: a newer version wrote it.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise MissingError(f"`{folder}` is not a folder")
    item = item_with_manifest(folder)
    if item is None and is_orbax(folder):
        raise ForeignError(describe_foreign(folder, ["."]))
    saved = read_step(item or folder)
    if step not in (None, saved.step):
        raise DamagedError(f"`{folder}` was saved as step {saved.step}, not {step}")
    return saved


def read_step(folder: Path) -> SavedStep:
    """Reads the manifest of a step, or of an item that `OptimizerHandler` wrote."""
    return SavedStep(path=folder, **vars(read_manifest(folder)))


def _batches(leaves: Sequence[LeafInfo]) -> Iterator[dict[str, Sharding]]:
    """Batches of leaves that are read together when a step is checked, with their shardings."""
    batch: dict[str, Sharding] = {}
    size = 0
    for info in leaves:
        place = batch[info.name] = _spread(info.shape)
        size += math.prod(place.shard_shape(info.shape)) * 8
        if size > _BATCH_BYTES:
            yield batch
            batch, size = {}, 0
    yield batch


def _spread(shape: tuple[int, ...]) -> Sharding:
    """A sharding over all devices of all processes; replicated if no dimension divides."""
    devices: Any = jax.devices()
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    mesh = Mesh(np.array(devices), ("devices",))
    for dim in sorted(range(len(shape)), key=lambda dim: -shape[dim]):
        if shape[dim] and shape[dim] % len(devices) == 0:
            return NamedSharding(mesh, PartitionSpec(*[None] * dim, "devices"))
    return NamedSharding(mesh, PartitionSpec())


def _check_sharding(info: LeafInfo, sharding: Sharding | None) -> None:
    if sharding is None or info.dtype == PYTHON:
        return
    try:
        sharding.shard_shape(info.shape)
    except (ValueError, IndexError) as error:
        spec = getattr(sharding, "spec", sharding)
        raise LeafError(
            f"`{info.name}`: {list(info.shape)} does not divide as `{spec}` says: "
            f"{' '.join(str(error).split())[:200]}"
        ) from None


# Arrays that Orbax wrote


def restore_arrays(folder: Path, item: Any, restore_args: Any, *, is_partial: bool = True) -> Any:
    """Reads arrays as `restore_args` say; of a partial `item`, a nested dict, only those in it."""
    args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=is_partial)
    with closing(ocp.PyTreeCheckpointHandler()) as handler:  # after a failure it cannot be reused
        return tried(folder, lambda: handler.restore(item_folder(folder), args=args))


def restore_args(shape: tuple[int, ...], dtype: Any, sharding: Sharding | None) -> Any:
    """Returns how to read what is stored of a leaf; a dtype of `None` is that of the store."""
    if dtype is not None and is_wide(dtype):
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
    # Of PRNG keys, whose words are one more dimension, the sharding leaves that dimension together.
    place = sharding or default_device()
    return ocp.ArrayRestoreArgs(sharding=place, global_shape=shape, dtype=dtype)


def default_device() -> Sharding:
    return SingleDeviceSharding(jax.local_devices()[0])


def to_leaf(info: LeafInfo, stored: Any, sharding: Sharding | None) -> Any:
    """Returns the leaf of what is stored of it: words become PRNG keys, and numbers arrays."""
    if info.is_key:
        if jnp.issubdtype(stored.dtype, jax.dtypes.prng_key):
            return stored
        return jax.random.wrap_key_data(jnp.asarray(stored), impl=key_kind(info.dtype)[0])
    if isinstance(stored, jax.Array) and str(stored.dtype) == info.dtype:
        return stored
    array = np.asarray(stored).astype(jnp.dtype(info.dtype), copy=False)
    if is_wide(array.dtype):  # JAX cannot hold it
        return array
    return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)


def saved_shardings(folder: Path, keys: Mapping[_Key, Names]) -> dict[_Key, Sharding]:
    """Returns where arrays were on a mesh, by their keys in the store."""
    # Orbax's own reader opens every array, and this file once for each (Orbax 0.12).
    file = item_folder(folder) / "_sharding"

    def read() -> dict[_Key, Sharding]:
        texts: dict[str, str] = json.loads(file.read_bytes()) if file.is_file() else {}
        saved = {text: json.loads(text) for text in set(texts.values()) if text}
        places = {
            text: _sharding(ocp.metadata.NamedShardingMetadata.from_deserialized_dict(data))
            for text, data in saved.items()
            if data["sharding_type"] == "NamedSharding"
        }
        by_name = {base64.urlsafe_b64decode(x).decode(): places.get(texts[x]) for x in texts}
        shardings = {key: by_name.get(".".join(names)) for key, names in keys.items()}
        return {key: place for key, place in shardings.items() if place is not None}

    return tried(folder, read)


def _sharding(saved: Any) -> NamedSharding:
    """A sharding of Orbax's metadata; on devices that are not here, of an `AbstractMesh`."""
    # of JSON, which has no tuples
    entries = (x if x is None or isinstance(x, str) else tuple(x) for x in saved.partition_spec)
    spec = PartitionSpec(*entries)
    try:
        return NamedSharding(saved.to_jax_sharding().mesh, spec)
    except ValueError:  # Orbax: the available devices are different
        sizes = tuple(int(size) for size in saved.shape)
        types = {} if saved.axis_types is None else {"axis_types": tuple(saved.axis_types)}
        return NamedSharding(AbstractMesh(sizes, tuple(saved.axis_names), **types), spec)


def tried(folder: Path, read: Callable[[], _T]) -> _T:
    """Makes errors of Orbax and TensorStore typed, unless they say nothing of the checkpoint."""
    try:
        return read()
    except (MemoryError, OptimizerError):
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        if "RESOURCE_EXHAUSTED" in text:
            raise
        raise damaged(folder, f"cannot be read: {text}") from error


def damaged(folder: Path, what: str) -> OptimizerError:
    """Returns the error of a checkpoint that is damaged, or was deleted meanwhile."""
    if not folder.is_dir():
        return MissingError(f"`{folder}` has been deleted while it was read")
    return DamagedError(f"`{folder}`: {what}")
