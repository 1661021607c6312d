"""The optimizer as one item of a checkpoint of Orbax: a `Checkpointer`'s, or a program's own.

The item is an Orbax tree by the names of this package, which any reader of Orbax opens, with the
manifest as an additional file in its folder.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from opt_core import describe_state
from opt_core.extend import (
    LeafInfo,
    NamedState,
    Rule,
    Schema,
    View,
    count_of,
    key_kind,
    named_view,
    shown,
)
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from opt_checkpoint import _digest
from opt_checkpoint._manifest import (
    DTYPES,
    MANIFEST,
    PYTHON,
    Manifest,
    encode,
    extra_leaves,
    is_stored,
    json_copy,
    nest,
    store_key,
    structure_of,
)
from opt_checkpoint._processes import are_equal, is_first, sync_errors
from opt_checkpoint._step import SavedStep, read_step
from opt_checkpoint._targets import plan_restore, view_of
from opt_checkpoint.errors import LeafError, SaveError

_log = logging.getLogger(__name__)
_SUMS = "sums.{}"  # files: what each process contributes to the digests


class OptimizerHandler(ocp.AsyncCheckpointHandler):
    """Saves an optimizer with its manifest as an item of a `CheckpointManager` of Orbax.

    Names, settings and digests come with the checkpoints that a program already writes, and a
    restore is a plan. Orbax finds it by the arguments `OptimizerSave` and `OptimizerRestore`; with
    `item_handlers={'optimizer': OptimizerHandler()}` the manager has metadata too: the item's
    `SavedStep`. Names of steps, which are kept and how they are committed is up to the manager.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from opt_checkpoint import OptimizerRestore, OptimizerSave, TrainingState
      >>> tx, params = optax.adam(1e-3), {'w': jnp.ones(2)}
      >>> state = TrainingState(tx, params, tx.init(params))
      >>> with ocp.CheckpointManager(getfixture('tmp_path')) as manager:
      ...   items = {'optimizer': OptimizerSave(state), 'data': ocp.args.JsonSave({'epoch': 3})}
      ...   saved = manager.save(10, args=ocp.args.Composite(**items))
      ...   manager.wait_until_finished()
      ...   restored = manager.restore(
      ...     10, args=ocp.args.Composite(optimizer=OptimizerRestore(state))
      ...   )
      >>> type(restored['optimizer']).__name__
      'TrainingState'
    """

    def __init__(self) -> None:
        self._arrays = ocp.PyTreeCheckpointHandler()
        self._saving: Saving | None = None

    async def async_save(self, directory: Any, args: OptimizerSave) -> list[Future]:
        """Copies the arrays off the devices, and starts to write them and to sum their digests."""
        try:
            saving = self._saving = _prepare(directory, args.target)
        except Exception:
            with suppress(Exception):
                # The threads of other items wait for folders that Orbax creates in the background.
                # If the program ended before, these threads would keep the process alive.
                CommitFutureAwaitingContractedSignals(_nothing(), timeout_secs=60).result()
            raise
        arrays = None
        if saving.tree:
            tree = ocp.args.PyTreeSave(saving.tree)
            arrays = await self._arrays.async_save(directory, args=tree)

        async def write_sums() -> None:
            _write_sums(directory, saving)

        sums = CommitFutureAwaitingContractedSignals(write_sums(), name="digests")
        return [*(arrays or []), sums]

    def save(self, directory: Any, args: OptimizerSave) -> None:
        """Writes the arrays and their digests."""
        saving = self._saving = _prepare(directory, args.target)
        if saving.tree:
            self._arrays.save(directory, args=ocp.args.PyTreeSave(saving.tree))
        _write_sums(directory, saving)

    def finalize(self, directory: Any) -> None:
        """Merges what the processes have written; Orbax calls it in the first, once all have."""
        saving, self._saving = self._saving, None
        if saving is None or not is_first():
            return
        if saving.tree:
            self._arrays.finalize(directory)
        files = [Path(directory) / _SUMS.format(i) for i in range(jax.process_count())]
        parts = [np.frombuffer(file.read_bytes(), np.uint32).reshape(-1, 2) for file in files]
        sums = np.stack(parts).sum(axis=0, dtype=np.uint32)
        (Path(directory) / MANIFEST).write_bytes(saving.encode(sums))
        for file in files:
            file.unlink()

    def restore(self, directory: Any, args: OptimizerRestore | None = None) -> Any:
        """Returns the restored target; without one, the item as a source of plans."""
        saved, args = self.metadata(directory), args or OptimizerRestore()
        if args.target is None:
            return saved
        options = {"allow": args.allow, "rules": args.rules, "placement": args.placement}
        return plan_restore(saved, args.target, **options).apply()

    def metadata(self, directory: Any) -> SavedStep:
        """Returns the item as a source of plans; only its manifest is read."""
        with sync_errors():
            return read_step(Path(directory))

    def close(self) -> None:
        """Closes the handler of the arrays."""
        self._arrays.close()  # type: ignore[no-untyped-call]

    @classmethod
    def typestr(cls) -> str:
        """Returns its name in checkpoints: the public one, wherever the class is defined."""
        return "opt_checkpoint.OptimizerHandler"


@ocp.args.register_with_handler(OptimizerHandler, for_save=True)
@dataclasses.dataclass
class OptimizerSave(ocp.args.CheckpointArgs):
    """Says that an item is saved by `OptimizerHandler`.

    Attributes:
      target: an optimizer of any kind that `named_state` takes, or a `NamedState`. Fields that a
        subclass of `TrainState` adds are not saved: save them as another item.
    """

    target: Any


@ocp.args.register_with_handler(OptimizerHandler, for_restore=True)
@dataclasses.dataclass
class OptimizerRestore(ocp.args.CheckpointArgs):
    """Says how `OptimizerHandler` restores an item.

    Attributes:
      target: an optimizer of any kind that `named_state` takes; its leaves may be abstract. Without
        one, the item is opened as a `SavedStep`, a source for `plan_restore`, and nothing is read.
      allow: as `rules` and `placement`, see `plan_restore`.
      rules: for single leaves.
      placement: where leaves go that the target does not place.
    """

    target: Any = None
    allow: Iterable[str] = ()
    rules: Sequence[Rule] = ()
    placement: Any = None


def _prepare(directory: Any, target: Any) -> Saving:
    """Names the leaves and starts their digests; all processes call it."""
    if isinstance(target, Saving):
        return target
    with sync_errors():
        if "://" in str(directory):
            raise SaveError(f"`{directory}` is not in a file system: mount the bucket")
        check_path(directory)
        saving = Saving.prepare(None, target)
    saving.check_equal(f"`{directory}`")
    return saving


def check_path(directory: Any) -> None:
    """Raises a `SaveError` if Orbax would not find what it has written below a folder."""
    # It looks for the files of each process by a pattern that begins with the path (Orbax 0.12,
    # `merge_ocdbt_per_process_files`), and finds none, or also those of another folder.
    if odd := [char for char in "[*?" if char in str(directory)]:
        raise SaveError(
            f"`{directory}`: nothing can be saved there, as Orbax takes `{odd[0]}` in a path for a "
            "pattern, and does not find its files again: rename the folder"
        )


async def _nothing() -> None:
    pass


def _write_sums(directory: Any, saving: Saving) -> None:
    """Writes the sums of this process: collectives would interfere with those of the training."""
    file = Path(directory) / _SUMS.format(jax.process_index())
    file.write_bytes(saving.sums().tobytes())


# What is written of an optimizer

Origin = tuple[tuple[Any, Any], Schema]  # what a schema depends on, and the schema


@dataclasses.dataclass(frozen=True)
class Saving:
    """One step on its way to the disk.

    Attributes:
      manifest: what is written next to the arrays, still without digests.
      arrays: to be stored, by name.
      tree: the same as a nested dictionary, by the keys of the store.
      digests: of them, in the same order.
      origin: what the schema depends on: while it is the same, the next step's is that schema.
    """

    manifest: Manifest
    arrays: Mapping[str, Any]
    tree: Mapping[str, Any]
    digests: _digest.Digests
    origin: Origin | None

    @classmethod
    def prepare(
        cls,
        step: int | None,
        target: Any,
        extras: Any = None,
        metadata: Any = None,
        previous: Origin | None = None,
    ) -> Saving:
        """Decides how every leaf is stored, and captures its bits; a `LeafError` says what cannot.

        A step of `None`, of an item that `OptimizerHandler` saves, is that of the state, or 0.
        """
        if isinstance(target, NamedState):
            schema, origin = target.schema, None
            if odd := schema.by_name.keys() ^ target.keys():
                raise LeafError(f"`schema` and leaves differ: {sorted(odd)[:3]}")
            leaves = [target[info.name] for info in schema.leaves]
        else:
            view = view_of(target)
            _warn_unsaved(target, view.unsaved, extras)
            leaves = view.leaves()
            origin = _origin(view, previous)
            schema = origin[1]
        pairs = [*zip(schema.leaves, leaves, strict=True), *extra_leaves(extras, "extras")]
        infos = [_with_value(info, leaf) for info, leaf in pairs]
        schema = dataclasses.replace(schema, leaves=tuple(infos))
        if len(schema.by_name) != len(infos):
            raise LeafError("`schema` has a name twice")
        arrays: dict[str, Any] = {}
        for info, leaf in pairs:
            if info.dtype != PYTHON:
                array = _to_store(info, leaf)
                if is_stored(info):
                    arrays[info.name] = array
        if step is None:
            step = next((x.value or 0 for x in infos if x.name == "state/step"), 0)
        manifest = Manifest(step, schema, {}, json_copy(metadata), structure_of(extras))
        tree = nest({store_key(schema.by_name[name].path): x for name, x in arrays.items()})
        if jax.process_count() > 1:
            # What follows communicates: on CPU, Gloo's collectives of several programs can
            # deadlock. The arrays are copied next anyway.
            jax.block_until_ready(arrays)
        return cls(manifest, arrays, tree, _digest.Digests([*arrays.values()]), origin)

    def sums(self) -> _digest.Sums:
        """Waits for the digests; returns what this process contributes to the sums of all."""
        sums = self.digests.sums()
        if jax.process_index() > 0:
            sums[np.setdiff1d(np.arange(len(sums)), self.digests.partial)] = 0
        return sums

    def encode(self, sums: _digest.Sums) -> bytes:
        """Returns the manifest's bytes; the sums are those of all processes together."""
        digests = {
            name: _digest.bound(name, _digest.to_hex(pair))
            for name, pair in zip(self.arrays, sums, strict=True)
        }
        return encode(dataclasses.replace(self.manifest, digests=digests))

    def check_equal(self, where: str) -> None:
        """Raises a `LeafError` unless all processes have the same manifest; all must call it."""
        if jax.process_count() == 1:
            return
        local = [array for array in self.arrays.values() if isinstance(array, np.ndarray)]
        if not are_equal(encode(self.manifest) + _digest.Digests(local).sums().tobytes()):
            raise LeafError(
                f"{where}: the processes would save different things: the schema, scalars and "
                "local arrays must be equal in all. Save what differs as one global array"
            )


def _warn_unsaved(target: Any, unsaved: Sequence[str], extras: Any) -> None:
    saved = extras if isinstance(extras, Mapping) else {}
    if missing := [name for name in unsaved if name not in saved]:
        fields = ", ".join(f"{name!r}: state.{name}" for name in missing)
        _log.warning(
            "%s: `%s` is not saved, because it is not the optimizer's: give `extras={%s}`, or save "
            "it as another item",
            *(type(target).__name__, "`, `".join(missing), fields),
        )


def _with_value(info: LeafInfo, leaf: Any) -> LeafInfo:
    """A leaf with what the manifest holds of it: the value of a count, or of a Python scalar."""
    if info.dtype == PYTHON:
        return dataclasses.replace(info, value=json_copy(leaf))
    return info if info.value is None else dataclasses.replace(info, value=count_of(leaf))


def _origin(view: View, previous: Origin | None) -> Origin:
    """The schema of a view, and what it depends on; to name leaves is a third of a save."""
    scalars = [*jax.tree.leaves(view.optimizer.state.step), *view.others.values()]
    kinds = [(np.shape(x), getattr(x, "dtype", type(x))) for x in scalars]
    source = describe_state(view.optimizer)  # the same object for equal structures
    depends = kinds, list(view.others)
    if previous is not None and previous[0][0] is source and previous[0][1] == depends:
        return previous
    return (source, depends), named_view(view).schema


def _to_store(info: LeafInfo, leaf: Any) -> Any:
    """The array to store for a leaf; a `LeafError` says why it cannot be saved."""
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
        raise LeafError(f"`{info.name}`: expected an array, found `{leaf}`, which has no value")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise LeafError(
            f"`{info.name}`: the array has been donated or deleted: save it before the step that "
            "donates it"
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise LeafError(f"`{info.name}`: a masked array loses its mask. Save `.data` and `.mask`")
    if info.is_key:
        key_kind(info.dtype)  # a `LeafError` of keys that could not be read again
        return _to_save(jax.random.key_data(leaf))
    if not isinstance(leaf, jax.Array | np.ndarray):
        leaf = np.asarray(leaf, dtype=info.dtype if info.dtype in DTYPES else None)
    dtype = _dtype_name(leaf.dtype)
    if dtype not in DTYPES:
        raise LeafError(
            f"`{info.name}`: {dtype} cannot be saved. Convert it, or keep it out of the state. "
            f"These can: {', '.join(sorted(DTYPES))}, and typed PRNG keys"
        )
    if (tuple(leaf.shape), dtype) != (info.shape, info.dtype):
        raise LeafError(
            f"`{info.name}`: expected {shown(info)} as the schema says, found {shown(leaf)}"
        )
    # a copy: the caller may write to it later
    return np.array(leaf, order="C") if isinstance(leaf, np.ndarray) else _to_save(leaf)


@functools.cache  # NumPy composes these names on every call
def _dtype_name(dtype: Any) -> str:
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def _to_save(array: jax.Array) -> Any:
    """With several processes, an array that each of them holds is saved by the first."""
    return np.asarray(array) if jax.process_count() > 1 and array.is_fully_addressable else array
