"""The optimizer as one item of a checkpoint of Orbax: a `Checkpointer`'s, or a program's own.

The item is an Orbax tree by the names of this package, which any reader of Orbax opens, with the
manifest as an additional file in its folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from opt_core.extend import Rule
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from opt_checkpoint._folder import MANIFEST
from opt_checkpoint._processes import is_first, sync_errors
from opt_checkpoint._saving import Saving
from opt_checkpoint._step import SavedStep
from opt_checkpoint._targets import plan_restore
from opt_checkpoint.errors import SaveError

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
            saved = SavedStep(Path(directory))
            saved.manifest  # noqa: B018  # an error in one process is raised in all
        return saved

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
      allow: the kinds of changes that are admitted: see `plan_restore`.
      rules: for single leaves: see `plan_restore`.
      placement: where leaves go that the target does not place: see `plan_restore`.
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
        saving = Saving.prepare(None, target)
    saving.check_equal(f"`{directory}`")
    return saving


async def _nothing() -> None:
    pass


def _write_sums(directory: Any, saving: Saving) -> None:
    """Writes the sums of this process: collectives would interfere with those of the training."""
    file = Path(directory) / _SUMS.format(jax.process_index())
    file.write_bytes(saving.sums().tobytes())
