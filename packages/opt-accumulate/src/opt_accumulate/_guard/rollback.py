"""`rollback`: the last good states, on the host, for a run that cannot go on from the last one."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp

from opt_accumulate._checks import check_integer
from opt_accumulate._guard.state import guard_states
from opt_accumulate.errors import RollbackError


def rollback(keep: int = 2, memory_kind: str | None = "pinned_host") -> Rollback:
    """Returns a store of the last good states of a training loop.

    Args:
      keep: how many to hold.
      memory_kind: where: a memory kind of the devices that the arrays lie on; `None` for where they
        are. Each device's share stays with its own process.

    Raises:
      OptionError: `keep` is not positive.

    Examples:
      >>> import optax
      >>> from opt_accumulate import Spike, guard, report
      >>> tx = guard(optax.sgd(1.0), loss=None, max_consecutive=2)
      >>> params, good = jnp.zeros(()), rollback(keep=2, memory_kind=None)
      >>> state = tx.init(params)
      >>> for step, grad in enumerate([1.0, 1.0, jnp.inf, jnp.inf]):
      ...     params, state = tx.apply(params, state, jnp.float32(grad))
      ...     if report(state).stuck:
      ...         last, (params, state) = good.restore()
      ...         print('back to', last, 'from', step)
      ...     else:
      ...         taken = good.take(step, (params, state))
      back to 1 from 3
    """
    check_integer("keep", keep, 1)
    return Rollback(deque(maxlen=keep), memory_kind)


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    step: int
    leaves: list[Any]
    homes: list[Any]
    structure: Any


@dataclasses.dataclass(frozen=True)
class Rollback:
    """What `rollback` returns: a helper of the training loop, not part of a compiled step."""

    _held: deque[_Snapshot]
    _memory_kind: str | None

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are held, the oldest first."""
        return tuple(snapshot.step for snapshot in self._held)

    def take(self, step: int, tree: Any) -> bool:
        """Copies a state to the host, if the guard in it calls it good.

        It is good if the last step was not skipped: it was judged, and made. The copies are made
        by the devices while the host goes on; `tree` may be donated to the next step.

        Args:
          step: its number.
          tree: whatever the run needs to go on: parameters, states.

        Returns:
          Whether it was taken. The oldest is let go if there are `keep` already.
        """
        if any(bool(state.was_skipped) for _, state in guard_states(tree)):
            return False
        leaves, structure = jax.tree.flatten(tree)
        homes = [leaf.sharding if isinstance(leaf, jax.Array) else None for leaf in leaves]
        copies = [self._host_copy(leaf) for leaf in leaves]
        self._held.append(_Snapshot(step, copies, homes, structure))
        return True

    def restore(self) -> tuple[int, Any]:
        """Returns the newest state that is held, where it was, and its step.

        It is let go, unless it is the only one: a run that is stuck again, before another was
        taken, goes further back.

        Raises:
          RollbackError: nothing is held.
        """
        if not self._held:
            raise RollbackError(
                "no good state is held: `take` was not called, or each time after a skipped step."
            )
        found = self._held.pop() if len(self._held) > 1 else self._held[-1]
        leaves = [
            copy.deepcopy(leaf) if home is None else _copy_to(leaf, home)
            for leaf, home in zip(found.leaves, found.homes, strict=True)
        ]
        return found.step, jax.tree.unflatten(found.structure, leaves)

    def _host_copy(self, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return copy.deepcopy(leaf)
        if self._memory_kind is None:
            return jnp.copy(leaf)
        return _copy_to(leaf, leaf.sharding.with_memory_kind(self._memory_kind))


def _copy_to(leaf: jax.Array, home: Any) -> jax.Array:
    """A transfer within one memory may be none, and share what the next step overwrites."""
    if leaf.sharding.memory_kind == home.memory_kind:
        leaf = jnp.copy(leaf)
    moved: jax.Array = jax.device_put(leaf, home)
    return moved
