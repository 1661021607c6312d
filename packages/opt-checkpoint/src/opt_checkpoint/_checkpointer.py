"""Saves the steps of a run under one folder, and finds those that are there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from opt_core.extend import Rule

from opt_checkpoint._manifest import foreign_steps, list_checked
from opt_checkpoint._processes import are_equal, sync_errors
from opt_checkpoint._step import SavedStep, open_step
from opt_checkpoint._targets import plan_restore
from opt_checkpoint._writer import Writer
from opt_checkpoint.errors import DamagedError, LoadError, MissingError, SaveError

_log = logging.getLogger(__name__)
_Target = TypeVar("_Target")
_Used = TypeVar("_Used")


class Checkpointer:
    """The checkpoints of a run: a folder with one writer, and in it a folder per step.

    Orbax writes the arrays and commits a step by a rename; a manifest next to them says what they
    are, with a digest of each. In a run of many processes every process makes one and calls the
    same methods in the same order.

    Args:
      directory: of the checkpoints; a path of the file system, made if it is missing.
      max_to_keep: how many of the latest steps stay; `None` keeps all.
      keep_period: steps that are multiples of it are kept too.
      save_interval_steps: `should_save` is true for multiples of it.
      async_save: `save` returns once the values are copied off the devices; they are written in
        the background. What fails there is raised by the next call, once.
      read_only: for evaluation alongside a run: takes no lock and changes nothing.

    In a folder with steps that another program wrote nothing is touched, and every method that
    looks for steps or saves raises a `ForeignError`.

    Attributes:
      restored_step: the step that was restored last, by `restore` or `restore_latest`.

    Raises:
      LockError: another writer has the folder, or it cannot be written.
      SaveError: the folder cannot be made, or Orbax cannot write there.

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
        if "://" in str(directory):
            raise ValueError(f"`directory` must be a local path, found `{directory}`: mount it")
        steps = {"max_to_keep": max_to_keep, "keep_period": keep_period}
        for name, value in {**steps, "save_interval_steps": save_interval_steps}.items():
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"`{name}`: expected a positive integer, found {value!r}")
        self.directory = Path(directory).absolute()
        self.read_only = read_only
        self.restored_step: int | None = None
        self._interval = save_interval_steps
        self._alone = threading.RLock()  # Threads save one after the other.
        self._writer: Writer | None = None
        if not read_only:
            foreign = foreign_steps(self.directory)
            self._check_equal(foreign)
            if not foreign:  # else no lock is taken there
                self._writer = Writer(self.directory, async_save=async_save, **steps)

    def save(self, step: int, target: Any, *, metadata: Any = None, extras: Any = None) -> None:
        """Saves a step, or raises an error: no step is skipped silently.

        Args:
          step: its number, above those of all existing steps; any integer, such as `np.int64`.
          target: an optimizer of any kind that `named_state` takes, or a `NamedState`. Fields that
            a subclass of `TrainState` adds are saved as `extras` only: without, a warning says so.
          metadata: JSON data to be kept with it.
          extras: a pytree of arrays, typed PRNG keys and Python scalars to be kept with it, such as
            the state of a data iterator and a random key.

        Raises:
          LeafError: a leaf or the metadata cannot be saved; nothing was written.
          LockError: the folder has been removed or replaced, or this process was forked.
          SaveError: the step, or in the background the one before, was not saved. Earlier steps are
            unchanged.
          TypeError: `target` is of another kind.
        """
        with self._alone:
            self._open_writer().save(step, target, extras, metadata)

    def should_save(self, step: int) -> bool:
        """Whether a step is due: a multiple of `save_interval_steps`, or a preemption is near."""
        if self._writer is not None and self._writer.reached_preemption(step):
            return True
        return bool(step % self._interval == 0)

    def wait(self) -> None:
        """Waits until the step that is being saved is on the disk.

        Raises:
          SaveError: it was not saved; raised once.
        """
        with self._alone:
            if self._writer is not None:
                self._writer.wait()

    def close(self) -> None:
        """Waits, empties the trash and gives the folder to the next writer; again is fine.

        Raises:
          SaveError: the last step was not saved.
        """
        with self._alone:
            if self._writer is not None:
                try:
                    self._writer.close()
                finally:
                    if self._writer.is_closed:
                        self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except SaveError as failed:
            if error is None:
                raise
            _log.error("%s", failed)  # The error that ends the block is the one to be seen.

    def steps(self) -> list[int]:
        """Returns the steps that are committed, the oldest first; anything else is ignored.

        Raises:
          ForeignError: there are steps that another program wrote; see `open_foreign`.
        """
        return list_checked(self.directory)

    def latest_step(self) -> int | None:
        """Returns the latest step that is committed."""
        return max(self.steps(), default=None)

    def at(self, step: int) -> SavedStep:
        """Opens a step for reading. A step that is still being written is waited for.

        Raises:
          DamagedError: its manifest has changed since it was written.
          MissingError: the step does not exist.
          SaveError: the last step was not saved; raised once.
          VersionError: a newer version wrote it.
        """
        self.wait()
        with sync_errors():
            if step not in (steps := self.steps()):
                found = steps or "none"
                raise MissingError(f"`{self.directory}` has no step {step}; it has {found}")
            return open_step(self.directory / str(step), step=step)

    def validate(self, step: int) -> None:
        """Reads every bit of a step and compares the digests.

        Raises:
          DamagedError: it has changed since it was written; says what.
          MissingError, SaveError, VersionError: as of `at`.
        """
        self.at(step).validate()

    def latest_valid(self) -> SavedStep | None:
        """Opens the latest step whose manifest is intact; logs a warning for each that is not.

        It does not notice a damaged array, but whatever reads it does: `restore_latest` reads once
        and falls back. A step that is still being written is waited for.

        Returns:
          The step; `None` if there are no steps.

        Raises:
          ForeignError: there are steps that another program wrote; see `open_foreign`.
          MissingError: there are steps, but none is valid.
          SaveError: the last step was not saved; raised once.
          VersionError: a newer version wrote the latest step.
        """
        return self._newest(self.at)

    def restore(
        self,
        step: int,
        target: _Target,
        *,
        allow: Iterable[str] = (),
        rules: Sequence[Rule] = (),
        placement: Any = None,
    ) -> _Target:
        """Restores a step: `plan_restore(checkpointer.at(step), target, ...).apply()`.

        Args:
          step: the step to restore.
          target: an optimizer of any kind that `named_state` takes; its leaves may be abstract.
          allow: as `rules` and `placement`, see `plan_restore`.
          rules: for single leaves.
          placement: where leaves go that the target does not place.

        Raises:
          DamagedError: a leaf has changed since it was written.
          LeafError: nothing says where a leaf goes that was sharded: see `Plan.apply`.
          MissingError: the step does not exist.
          PlanError: the step does not fit the target as it is.
          SaveError: the last step was not saved; raised once.
        """
        plan = plan_restore(self.at(step), target, allow=allow, rules=rules, placement=placement)
        restored = plan.apply()
        self.restored_step = step
        return restored

    def restore_latest(
        self,
        target: _Target,
        *,
        allow: Iterable[str] = (),
        rules: Sequence[Rule] = (),
        placement: Any = None,
    ) -> _Target:
        """Restores the latest step that is undamaged, reading it once.

        Every process reads its share of what the target needs and compares the digests. Where a
        leaf or one of the `extras` is damaged, a warning says so, and the step before is restored;
        `restored_step` says which. A step that is still being written is waited for.

        Args:
          target: an optimizer of any kind that `named_state` takes; its leaves may be abstract.
          allow: as `rules` and `placement`, see `plan_restore`.
          rules: for single leaves.
          placement: where leaves go that the target does not place.

        Raises:
          ForeignError: there are steps that another program wrote; see `open_foreign`.
          LeafError: nothing says where a leaf goes that was sharded: see `Plan.apply`.
          MissingError: there are no steps, or all are damaged.
          PlanError: a step does not fit the target; an older one is not tried.
          SaveError: the last step was not saved; raised once.
          VersionError: a newer version wrote the step; an older one is not tried.

        Examples:
          >>> import jax.numpy as jnp
          >>> import optax
          >>> from opt_checkpoint import TrainingState
          >>> tx, params = optax.adam(1e-3), {'w': jnp.ones(2)}
          >>> state = TrainingState(tx, params, tx.init(params))
          >>> with Checkpointer(getfixture('tmp_path')) as checkpointer:
          ...   checkpointer.save(10, state)
          ...   restored = checkpointer.restore_latest(state)
          >>> type(restored).__name__, checkpointer.restored_step
          ('TrainingState', 10)
        """
        options: Any = {"allow": tuple(allow), "rules": tuple(rules), "placement": placement}

        def restore(step: int) -> tuple[int, _Target]:
            saved = self.at(step)
            restored = plan_restore(saved, target, **options).apply()
            saved.check_extras()
            return step, restored

        self.restored_step = None
        newest = self._newest(restore)
        if newest is None:
            raise MissingError(f"`{self.directory}` has no step to restore")
        self.restored_step, restored = newest
        return restored

    def delete(self, step: int) -> None:
        """Deletes a step: it is renamed first, so that it is never partly there.

        Raises:
          MissingError: the step does not exist.
          SaveError: it cannot be deleted.
        """
        with self._alone:
            self._open_writer().delete(step)

    def discard_after(self, step: int) -> list[int]:
        """Deletes the steps after one, so that a run that fell back to it can save again.

        A step that is still being written is one of them: it is waited for.

        Returns:
          The deleted steps.

        Raises:
          SaveError: one cannot be deleted, or the last step was not saved; that is raised once.
        """
        with self._alone:
            self.wait()
            later = [number for number in self.steps() if number > step]
            for number in later:
                self.delete(number)
        return later

    def _newest(self, use: Callable[[int], _Used]) -> _Used | None:
        """What `use` returns for the newest undamaged step, or `None`; all processes call it."""
        passed: set[int] = set()
        self.wait()
        while True:
            steps = self.steps()
            self._check_equal(steps)
            left = [step for step in steps if step not in passed]
            if not left:
                break
            try:
                return use(left[-1])
            except MissingError:
                # A writer may have deleted the step meanwhile, and saved others.
                with sync_errors():
                    if left[-1] in self.steps():
                        raise
            except (DamagedError, LoadError) as error:
                passed.add(left[-1])
                if self._writer is not None:
                    self._writer.passed.add(left[-1])
                _log.warning("step %d is passed over: %s", left[-1], error)
        if steps:
            raise MissingError(f"`{self.directory}`: none of the steps {steps} is valid")
        return None

    def _check_equal(self, steps: Sequence[object]) -> None:
        if not are_equal(repr(steps).encode()):
            raise DamagedError(f"`{self.directory}`: the processes do not see the same steps")

    def _open_writer(self) -> Writer:
        if self._writer is None:
            self.steps()  # raises a `ForeignError` if that is why there is no writer
            why = "open for reading: make a `Checkpointer` without `read_only=True` to save"
            if not self.read_only:
                why = "closed, or had another program's steps when it was opened: make another"
            raise SaveError(f"`{self.directory}` is {why}")
        return self._writer
