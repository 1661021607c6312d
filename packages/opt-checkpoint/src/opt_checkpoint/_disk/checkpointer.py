"""Saves the steps of a run under one folder, and finds those that are there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import jax
import orbax.checkpoint as ocp

from opt_checkpoint._disk import orbax as _orbax
from opt_checkpoint._disk.durable import DurablePath
from opt_checkpoint._disk.exits import at_exit, not_at_exit
from opt_checkpoint._disk.foreign_steps import check_own, foreign_steps
from opt_checkpoint._disk.newest import newest
from opt_checkpoint._disk.processes import agree, are_equal, is_first, together
from opt_checkpoint._disk.root import TRASH, WriterRoot, check_options, one_at_a_time
from opt_checkpoint._disk.saved_step import Level, SavedStep, StepReport, open_step
from opt_checkpoint._disk.saving import Layout, Saving
from opt_checkpoint._disk.uncut import Uncut
from opt_checkpoint._naming.names import NamedState
from opt_checkpoint._planning.match import plan_restore
from opt_checkpoint._planning.rules import Rule
from opt_checkpoint._targets.view import View, view_of
from opt_checkpoint.errors import (
    CheckpointError,
    DamagedError,
    ForeignError,
    LeafError,
    MissingError,
    SaveError,
)

_log = logging.getLogger(__name__)
_Target = TypeVar("_Target")


class Checkpointer:
    """The checkpoints of a run: a folder with one writer, and in it a folder per step.

    A thin face over Orbax's `CheckpointManager`: Orbax writes the arrays and commits a step by a
    rename. Beside them lies a manifest that says what they are, with a digest of each. In a run of
    many processes every process makes one and calls the same methods in the same order.

    Args:
      directory: of the checkpoints; a path of the file system, made if it is missing.
      max_to_keep: how many of the latest steps stay; `None` keeps all.
      keep_period: steps that are multiples of it stay besides.
      save_interval_steps: what `should_save` goes by.
      async_save: `save` returns once the values are copied off the devices; they are written in
        the background. What fails there is raised by the next call, once.
      read_only: for evaluation beside a run: takes no lock and changes nothing.

    A folder with steps that another program wrote is never taken for an empty one: nothing in it is
    touched, no lock is taken, and whatever looks for steps or saves raises a `ForeignError`.

    Attributes:
      restored_step: the step that was restored last, by `restore` or `restore_latest`.

    Raises:
      LockError: another writer has the folder, or it cannot be written.
      SaveError: the folder cannot be made.

    Examples:
      >>> import jax.numpy as jnp
      >>> import opt_optax_bridge as opt
      >>> folder = getfixture('tmp_path')
      >>> optimizer = opt.adam(1e-3).create({'w': jnp.ones(2)})
      >>> with Checkpointer(folder, max_to_keep=3) as checkpointer:
      ...   checkpointer.save(10, optimizer, metadata={'tokens': 4096})
      ...   checkpointer.wait()
      ...   saved = checkpointer.latest_valid()
      >>> saved.step, saved.metadata, saved.schema.leaves[0].name
      (10, {'tokens': 4096}, 'params/w')
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        max_to_keep: int | None = None,
        keep_period: int | None = None,
        save_interval_steps: int = 1,
        async_save: bool = True,
        read_only: bool = False,
    ) -> None:
        check_options(directory, max_to_keep, keep_period, save_interval_steps)
        self.directory = Path(directory).absolute()
        self.read_only = read_only
        self._interval = save_interval_steps
        self.restored_step: int | None = None
        self._saving: int | None = None
        self._layout: Layout | None = None
        self._passed: set[int] = set()
        self._alone = threading.RLock()
        self._root = WriterRoot(self.directory)
        self._manager: ocp.CheckpointManager | None = None
        self._state = "open for reading (`read_only=True`)"
        if not read_only and not self._is_foreign():
            agree(self._root.take() if is_first() else None)
            self._calls = Uncut()
            self._manager = self._open(max_to_keep, keep_period, async_save)
            self._async_save, self._state = async_save, "open"
            at_exit(self._close_at_exit)

    @one_at_a_time
    def save(
        self,
        step: int,
        target: Any,
        *,
        metadata: Any = None,
        extras: Any = None,
    ) -> None:
        """Saves a step. It is saved, or there is an error: none is left out in silence.

        Args:
          step: its number, above those of all steps that are there.
          target: an optimizer of any kind that `named_state` takes, or a `NamedState`. Fields that
            a subclass of `TrainState` adds are saved as `extras` only: without, a warning says so.
          metadata: JSON data to be kept with it.
          extras: a pytree of arrays, typed PRNG keys and Python scalars to be kept with it, such as
            the state of a data iterator and a random key.

        Raises:
          LeafError: a leaf or the metadata cannot be saved; nothing has been written.
          LockError: the folder has been removed or replaced, or this process was forked.
          SaveError: the step, or in the background the one before, was not saved. What was there
            before is as it was.
          TypeError: `target` is of another kind.
        """
        manager = self._writer()
        self.wait()
        saving, error = self._prepare(step, target, metadata, extras)
        agree(error)
        assert saving is not None
        if not are_equal(saving.local_data()):
            raise LeafError(
                f"step {step} is not saved: the processes would save different things: expected "
                "one schema, and arrays and scalars that every process has to be equal in all. "
                "Save what differs as one global array"
            )
        if self._root.failed:
            self._root.clean()
        items: dict[str, Any] = {_orbax.MANIFEST: _orbax.ManifestSave(saving)}
        if saving.arrays:
            items = {_orbax.LEAVES: ocp.args.PyTreeSave(saving.tree()), **items}
        self._saving = step
        with self._failing(step):
            # After a save that failed, Orbax no longer knows the step that it would have retired.
            self._calls.call(manager.reload)
            # Orbax's own policy leaves steps out; `should_save` is asked before.
            save = partial(manager.save, step, args=ocp.args.Composite(**items), force=True)
            saved = self._calls.call(save)
        if not saved:
            raise SaveError(f"step {step} was not saved in `{self.directory}`: Orbax left it out")
        self._layout = saving.layout
        self._calls.start(self._root.clean)
        if not self._async_save:
            self._finish(manager)

    def should_save(self, step: int) -> bool:
        """Whether a step is due: a multiple of `save_interval_steps`, or a preemption is near."""
        if self._manager is not None and self._manager.reached_preemption(step):
            return True
        return step % self._interval == 0

    @one_at_a_time
    def wait(self) -> None:
        """Waits until what is being saved is on the disk.

        Raises:
          SaveError: it was not saved; raised once.
        """
        if self._manager is not None:
            self._finish(self._manager)

    @one_at_a_time
    def close(self) -> None:
        """Waits, empties the trash and gives the folder to the next writer; again is fine.

        Raises:
          SaveError: the last step was not saved.
        """
        manager = self._manager
        if manager is None:
            return
        try:
            self._finish(manager)
        finally:
            with suppress(Exception):  # It would say once more what has just been raised.
                self._calls.call(manager.close)
            step = self._saving  # still, if Ctrl-C has cut the waiting short
            if step is not None and is_first() and step not in self.steps():
                _log.error("step %d in `%s`: not saved", step, self.directory)
            self._root.clean()
            self._root.release()
            # Cut short before this, another call does it all.
            self._manager = self._saving = None
            self._state = "closed"
            self._calls.close()
            not_at_exit(self._close_at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except SaveError as failed:
            if error is None:
                raise
            _log.error("%s", failed)  # The error that ends the block is the one to be seen.

    def steps(self) -> list[int]:
        """Returns the steps that are committed, the oldest first; what is no step is ignored.

        Raises:
          ForeignError: there are steps that another program wrote; see `open_foreign`.
        """
        check_own(self.directory)
        return _orbax.list_steps(self.directory)

    def latest_step(self) -> int | None:
        """Returns the latest step that is committed."""
        return max(self.steps(), default=None)

    def at(self, step: int) -> SavedStep:
        """Opens a step for reading.

        Raises:
          DamagedError: its manifest is not what was written.
          MissingError: there is no such step.
          VersionError: a newer version wrote it.
        """
        steps = self.steps()
        if step not in steps:
            raise MissingError(f"`{self.directory}` has no step {step}; it has {steps or 'none'}")
        return open_step(self.directory / str(step), step=step)

    def validate(self, step: int, *, level: Level = "digests") -> StepReport:
        """Checks a step; what is wrong is in the report.

        Args:
          step: to be checked.
          level: `'manifest'`: the manifest is whole and every array is where it says, of its shape
            and dtype; cheap. `'digests'`: every bit is read too.

        Raises:
          MissingError: there is no such step.
        """
        return self._look(step, level)[1]

    def _look(self, step: int, level: Level) -> tuple[SavedStep | None, StepReport]:
        try:
            with together():
                saved = self.at(step)
        except (ForeignError, MissingError):
            raise
        except CheckpointError as error:
            return None, StepReport(step, level, error=str(error))
        return saved, saved.validate(level=level)

    def latest_valid(self, *, level: Level = "manifest") -> SavedStep | None:
        """Opens the latest step that is valid; logs a warning for each that is not.

        Args:
          level: how well to look: see `validate`. A damaged array is not seen by `'manifest'`, but
            it is by whatever reads it: `restore_latest` reads once, and falls back by itself.

        Returns:
          The step; `None` where there is none at all.

        Raises:
          ForeignError: there are steps that another program wrote; see `open_foreign`.
          MissingError: there are steps, and none is valid.
        """

        def look(step: int) -> SavedStep:
            saved, report = self._look(step, level)
            if saved is None or not report.ok:
                raise DamagedError(report.error or "")
            return saved

        return newest(self.directory, self.steps, look, self._passed)

    def restore(
        self,
        step: int,
        target: _Target,
        *,
        allow: Iterable[str] = (),
        rules: Sequence[Rule] = (),
    ) -> _Target:
        """Restores a step: `plan_restore(checkpointer.at(step), target, ...).apply()`.

        Args:
          step: to be restored.
          target: an optimizer of any kind that `named_state` takes; its leaves may be abstract.
          allow: the kinds of changes that are admitted: see `plan_restore`.
          rules: for single leaves: see `plan_restore`.

        Returns:
          The restored target.

        Raises:
          DamagedError: a leaf is not what was written.
          MissingError: there is no such step.
          PlanError: the step does not fit the target as it is.
        """
        return self._restore(step, target, allow, rules)[0]

    def _restore(
        self, step: int, target: _Target, allow: Iterable[str], rules: Sequence[Rule]
    ) -> tuple[_Target, SavedStep]:
        with together():
            saved = self.at(step)
        restored = plan_restore(saved, target, allow=allow, rules=rules).apply()
        self.restored_step = step
        return restored, saved

    def restore_latest(
        self, target: _Target, *, allow: Iterable[str] = (), rules: Sequence[Rule] = ()
    ) -> _Target:
        """Restores the latest step that is whole, reading it once.

        Every process reads its own share of what the target needs, and the digests are compared
        while it is there. Where a leaf or one of the `extras` is damaged, a warning says so, and
        the step before is restored. `restored_step` says which one it was.

        Args:
          target: an optimizer of any kind that `named_state` takes; its leaves may be abstract.
          allow: the kinds of changes that are admitted: see `plan_restore`.
          rules: for single leaves: see `plan_restore`.

        Returns:
          The restored target.

        Raises:
          ForeignError: there are steps that another program wrote; see `open_foreign`.
          MissingError: there is no step, or none that is whole.
          PlanError: a step does not fit the target; an older one is not tried.
          VersionError: a newer version wrote the step; an older one is not tried.

        Examples:
          >>> import jax.numpy as jnp
          >>> import optax
          >>> from opt_checkpoint import TrainingState
          >>> tx, params = optax.adam(1e-3), {'w': jnp.ones(2)}
          >>> state = TrainingState(tx, params, tx.init(params))
          >>> with Checkpointer(getfixture('tmp_path')) as checkpointer:
          ...   checkpointer.save(10, state)
          ...   checkpointer.wait()
          ...   restored = checkpointer.restore_latest(state)
          >>> type(restored).__name__, checkpointer.restored_step
          ('TrainingState', 10)
        """
        kinds, given = tuple(allow), tuple(rules)

        def restore(step: int) -> tuple[_Target]:
            restored, saved = self._restore(step, target, kinds, given)
            saved.check_extras()
            return (restored,)

        self.restored_step = None
        found = newest(self.directory, self.steps, restore, self._passed)
        if found is None:
            raise MissingError(f"`{self.directory}` has no step to restore")
        return found[0]

    @one_at_a_time
    def delete(self, step: int) -> None:
        """Deletes a step: renamed first, so that it is never half there.

        Raises:
          MissingError: there is no such step.
          SaveError: it cannot be deleted.
        """
        manager = self._writer()
        self.wait()
        missing = None
        if step not in self.steps():
            missing = MissingError(f"`{self.directory}` has no step {step}; it has {self.steps()}")
        agree(missing)
        with self._failing(step):
            self._calls.call(manager.reload)
            self._calls.call(partial(manager.delete, step))
        self._passed.discard(step)
        self._root.clean()

    @one_at_a_time
    def discard_after(self, step: int) -> list[int]:
        """Deletes the steps after one, so that a run that fell back to it can save again.

        Returns:
          The deleted steps.
        """
        later = [found for found in self.steps() if found > step]
        for found in later:
            self.delete(found)
        return later

    def _prepare(
        self, step: int, target: Any, metadata: Any, extras: Any
    ) -> tuple[Saving | None, CheckpointError | None]:
        try:
            self._root.check()
            self._check_step(step)
            state = target if isinstance(target, NamedState) else _view(target, extras)
            return Saving.prepare(step, state, extras, metadata, self._layout), None
        except CheckpointError as error:
            return None, error

    def _check_step(self, step: int) -> None:
        if type(step) is not int or step < 0:
            raise SaveError(f"`step`: expected an integer from 0 on, found {step!r:.80}")
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise SaveError(
                f"step {step} is not saved: `{self.directory}` has step {latest}. Steps only rise; "
                f"after a fall back to an earlier step, call `discard_after` first"
            )
        if passed := sorted(self._passed.intersection(self.steps())):
            raise SaveError(
                f"step {step} is not saved: `latest_valid` has passed over {passed}, which would "
                f"be kept in place of good ones: call `discard_after({passed[0] - 1})` first"
            )
        path = self.directory / str(step)
        if path.exists() or path.is_symlink():
            raise SaveError(f"step {step} is not saved: `{path}` is in the way, and no checkpoint")

    def _open(
        self, max_to_keep: int | None, keep_period: int | None, async_save: bool
    ) -> ocp.CheckpointManager:
        try:
            with self._failing(None):
                return ocp.CheckpointManager(
                    self.directory,
                    item_handlers={
                        _orbax.LEAVES: _orbax.array_handler(),
                        _orbax.MANIFEST: _orbax.ManifestHandler(),
                    },
                    options=ocp.CheckpointManagerOptions(
                        max_to_keep=max_to_keep,
                        keep_period=keep_period,
                        enable_async_checkpointing=async_save,
                        # Threads that wait for a folder that cannot be made keep a process alive.
                        async_options=ocp.options.AsyncOptions(
                            create_directories_asynchronously=False
                        ),
                        cleanup_tmp_directories=True,
                        step_name_format=_orbax.StepNames(),
                        temporary_path_class=DurablePath,
                        todelete_subdir=TRASH,
                    ),
                )
        except BaseException:
            self._calls.close()
            self._root.release()
            raise

    def _is_foreign(self) -> bool:
        """Whether the folder holds another program's steps: then a writer takes nothing there."""
        found = foreign_steps(self.directory)
        if not are_equal(repr(found).encode()):
            raise DamagedError(f"`{self.directory}`: the processes do not see the same steps")
        if found:
            self._state = "not written to: it held another program's checkpoints when it was opened"
        return bool(found)

    def _close_at_exit(self) -> None:
        try:
            self.close()
        except SaveError as error:
            _log.error("%s", error)
        self._state = "closed, because the main thread has ended: let it wait for this one"

    def _finish(self, manager: ocp.CheckpointManager) -> None:
        if self._calls.is_elsewhere:
            return
        step = self._saving
        with self._failing(step):
            self._calls.call(manager.wait_until_finished)
        self._saving = None
        if step is not None and jax.process_count() == 1 and step not in self.steps():
            self._root.failed.add(step)
            raise SaveError(f"step {step} in `{self.directory}` is not there: was it removed?")

    def _writer(self) -> ocp.CheckpointManager:
        if self._manager is None:
            check_own(self.directory)
            raise SaveError(f"`{self.directory}` is {self._state}")
        return self._manager

    @contextmanager
    def _failing(self, step: int | None) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            what = f"`{self.directory}`" if step is None else f"step {step} in `{self.directory}`"
            self._saving = None
            if step is not None:
                self._root.failed.add(step)
            raise SaveError(f"{what}: not saved: {_one_line(error)}") from error


def _view(target: Any, extras: Any) -> View:
    view = view_of(target)
    given = extras if isinstance(extras, Mapping) else {}
    if missing := [name for name in view.unsaved if name not in given]:
        fields = ", ".join(f"{name!r}: state.{name}" for name in missing)
        _log.warning(
            "%s: `%s` is not saved, because it belongs to no optimizer: give `extras={%s}`",
            *(type(target).__name__, "`, `".join(missing), fields),
        )
    return view


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
