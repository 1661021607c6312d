"""Norms of gradients, parameters and updates by group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from opt_core._gradients import gradient_leaves
from opt_core._groups.division import Division
from opt_core._groups.multi_optimizer import MultiOptimizer
from opt_core._groups.patterns import has_shape
from opt_core._optimizer import Optimizer


class GroupNorms(flax.struct.PyTreeNode):
    """Euclidean norms over all leaves of one group, float32 scalars.

    Attributes:
      gradient: of the gradients; for a frozen group of those that are given.
      parameter: of the parameters before the update.
      update: of the change of the parameters.
      update_to_parameter: `update / parameter`; 0 where the parameters are all zero.
    """

    gradient: jax.Array
    parameter: jax.Array
    update: jax.Array
    update_to_parameter: jax.Array


def group_metrics(before: Optimizer, grads: Any, after: Optimizer) -> dict[str, GroupNorms]:
    """Returns the norms of gradient, parameter and update of every group.

    Every array is read once. Sums are in float32, in float64 for float64 leaves. Traceable: call
    it in the training step, where XLA joins it with the update.

    Args:
      before: an optimizer; one that is not a `MultiOptimizer` is a single group, `'rest'`.
      grads: the gradients of the update, like its `target`.
      after: what `before.apply_gradient(grads)` returned.

    Returns:
      Norms by group name, in the order of the groups, frozen groups included; a group without any
      leaf is left out. An `OrderedDict`, which keeps its order under `jax.jit`.

    Raises:
      TreeMismatchError: `grads` do not have the containers of the parameters.

    Examples:
      >>> from opt_core import MultiOptimizer, OptimizerDef, OptimizerState
      >>> class Sgd(OptimizerDef):
      ...     def init_state(self, params):
      ...         return OptimizerState(jnp.zeros((), jnp.int32), ())
      ...     def apply_gradient(self, hyper_params, params, state, grads):
      ...         return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), state
      >>> definition = MultiOptimizer(('w', Sgd(None)), names=['weights'])
      >>> before = definition.create({'w': jnp.array([4.0, 0.0]), 'b': jnp.ones(4)})
      >>> grads = {'w': jnp.array([3.0, 4.0])}
      >>> found = group_metrics(before, grads, before.apply_gradient(grads))
      >>> {name: [float(x) for x in jax.tree.leaves(norms)] for name, norms in found.items()}
      {'weights': [5.0, 4.0, 2.5, 0.625], 'rest': [0.0, 2.0, 0.0, 0.0]}
    """
    division = _division(before)
    gradients = gradient_leaves(before.target, grads, optional=frozenset(division.frozen))
    old, new = jax.tree.leaves(before.target), jax.tree.leaves(after.target)
    norms = OrderedDict[str, GroupNorms]()  # of a dict, `jax.jit` sorts the keys
    for name, members in division.members.items():
        if not members:
            continue
        updates = [(new[i], old[i]) for i in members] if name in division.trained else []
        parameter = _norm([(old[i],) for i in members])
        update = _norm(updates)
        ratio = jnp.where(parameter > 0, update / jnp.where(parameter > 0, parameter, 1), 0)
        gradient = _norm([(gradients[i],) for i in members if gradients[i] is not None])
        norms[name] = GroupNorms(gradient, parameter, update, ratio)
    return norms


class ClipMetrics(flax.struct.PyTreeNode):
    """What clipping by a global norm does to the gradients of a step, float32 scalars.

    Attributes:
      norm: the global norm of the gradients.
      clipped: 1 if that is above the bound, else 0: its mean over steps is the rate of clipping.
      factor: by what the gradients are multiplied.
    """

    norm: jax.Array
    clipped: jax.Array
    factor: jax.Array


def clip_metrics(norms: Mapping[str, GroupNorms], max_norm: Any) -> ClipMetrics:
    """Returns what clipping does to gradients whose norms are known; reads no gradient again.

    Args:
      norms: what `group_metrics` returned, of gradients before they are clipped. Clipped together
        are all groups in it: leave out those that are clipped by themselves, or not at all.
      max_norm: the bound, as of `optax.clip_by_global_norm`.

    Examples:
      >>> norms = [GroupNorms(jnp.float32(x), *jnp.zeros(3)) for x in (3.0, 4.0)]
      >>> found = clip_metrics(dict(zip('ab', norms)), 2.5)
      >>> [float(x) for x in jax.tree.leaves(found)]
      [5.0, 1.0, 0.5]
    """
    norm = jnp.zeros((), jnp.float32)
    for group in norms.values():
        norm = jnp.hypot(norm, group.gradient)  # no square that overflows
    is_above = norm > max_norm
    factor = jnp.where(is_above, max_norm / norm, 1)
    return ClipMetrics(norm, is_above.astype(jnp.float32), factor.astype(jnp.float32))


def _division(optimizer: Optimizer) -> Division:
    """The groups of any optimizer; one without groups is a single one."""
    definition = optimizer.optimizer_def
    if isinstance(definition, MultiOptimizer):
        return definition.division(optimizer.state)
    treedef: Any = jax.tree.structure(optimizer.target)
    return Division(("rest",), ("rest",), (0,) * treedef.num_leaves, treedef)


def _norm(terms: list[tuple[Any, ...]]) -> jax.Array:
    """The norm of all leaves, or of all differences of two leaves."""
    squares = [_square(*term) for term in terms if _is_float(term[0])]
    if not squares:
        return jnp.zeros((), jnp.float32)
    total = squares[0]
    for square in squares[1:]:
        total = total + square.astype(total.dtype)
    return jnp.sqrt(total).astype(jnp.float32)


def _square(leaf: Any, minus: Any = None) -> jax.Array:
    dtype = jnp.result_type(leaf)
    dtype = jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype
    value = jnp.asarray(leaf, dtype)
    if minus is not None:
        value = value - jnp.asarray(minus, dtype)
    return jnp.sum(jnp.real(value * jnp.conj(value)))


def _is_float(leaf: Any) -> bool:
    is_number = has_shape(leaf) or isinstance(leaf, float | complex)
    return is_number and bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))
