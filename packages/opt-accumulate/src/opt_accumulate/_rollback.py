"""`rollback`: the last good states, kept on the host, for runs that get stuck."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opt_accumulate._guard import guard_states
from opt_accumulate._trees import check_integer
from opt_accumulate.errors import RollbackError


def rollback(keep: int = 2, memory_kind: str | None = "pinned_host") -> Rollback:
    """Returns a store of the last good states of a training loop.

    Args:
      keep: how many states to hold.
      memory_kind: the memory kind to hold them in; `None` for that of the arrays. Shards stay with
        the process of their device.

    Raises:
      OptionError: `keep` is not positive.

    Examples:
      >>> import optax
      >>> from opt_accumulate import Spike, guard, report
      >>> tx = guard(optax.sgd(1.0), loss=None, max_consecutive=2)
      >>> params, good = jnp.zeros(()), rollback(keep=2, memory_kind=None)
      >>> state = tx.init(params)
      >>> apply = jax.jit(tx.apply)
      >>> for step, grad in enumerate([1.0, 1.0, jnp.inf, jnp.inf]):
      ...     params, state = apply(params, state, jnp.float32(grad))
      ...     if report(state).stuck:
      ...         last, (params, state) = good.restore()
      ...         print('back to', last, 'from', step)
      ...     else:
      ...         taken = good.take(step, (params, state))
      back to 1 from 3
    """
    check_integer("keep", keep, 1)
    return Rollback(deque(maxlen=keep), memory_kind)


class _Snapshot(NamedTuple):
    step: int
    tree: Any
    shardings: Any  # of its arrays, where they were; `None` for other leaves


@dataclasses.dataclass(frozen=True)
class Rollback:
    """What `rollback` returns: a helper for the training loop, outside of compiled functions."""

    _held: deque[_Snapshot]
    _memory_kind: str | None

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are held, the oldest first."""
        return tuple(snapshot.step for snapshot in self._held)

    def take(self, step: int, tree: Any) -> bool:
        """Copies a state to the host, if the guard in it accepted the last step.

        Copies are asynchronous; `tree` may be donated to the next step.

        Args:
          step: its number.
          tree: what the run needs to continue: parameters, states.

        Returns:
          Whether it was taken. Of more than `keep` the oldest is dropped.
        """
        if any(bool(state.was_skipped) for _, state in guard_states(tree)):
            return False
        shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), tree)
        self._held.append(_Snapshot(step, jax.tree.map(self._host_copy, tree), shardings))
        return True

    def restore(self) -> tuple[int, Any]:
        """Returns the step and the newest state held, where its arrays were.

        That state is then dropped, unless it is the only one: a run that gets stuck again before
        another was taken goes back further.

        Raises:
          RollbackError: no state is held.
        """
        if not self._held:
            raise RollbackError(
                "no good state is held: `take` was never called, or only after skipped steps."
            )
        found = self._held.pop() if len(self._held) > 1 else self._held[-1]
        return found.step, jax.tree.map(_copy_to, found.tree, found.shardings)

    def _host_copy(self, leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and self._memory_kind is not None:
            sharding = sharding.with_memory_kind(self._memory_kind)
        return _copy_to(leaf, sharding)


def _copy_to(leaf: Any, sharding: Any) -> Any:
    if sharding is None:
        return copy.deepcopy(leaf)
    if leaf.sharding.memory_kind == sharding.memory_kind:
        # A transfer within one memory may share the buffer that the next step reuses.
        leaf = jnp.copy(leaf)
    return jax.device_put(leaf, sharding)
