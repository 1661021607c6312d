"""The leaves of a trained optimizer's state, with the group and the parameter that each is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from opt_core._dtypes import convert_held, held_dtype
from opt_core._groups import Names
from opt_core._multi_optimizer import MultiOptimizer
from opt_core._optimizer import Optimizer, OptimizerState
from opt_core._paths import flatten_with_paths, path_str
from opt_core._roles import Role, roles
from opt_core._selection import described
from opt_core.errors import GroupError


@dataclasses.dataclass(frozen=True)
class Entry:
    """One leaf of a state.

    Attributes:
      path: where it is in `param_states`.
      group: the names of the groups around it, outermost first.
      role: what it is for.
      leaf: itself.
    """

    path: str
    group: Names
    role: Role
    leaf: Any

    @property
    def kind(self) -> tuple[Any, ...]:
        """What another leaf must have in common with it to take its place."""
        dtype = held_dtype(self.leaf) if hasattr(self.leaf, "dtype") else type(self.leaf)
        return self.role, np.shape(self.leaf), dtype

    def for_place(self, new: Entry) -> Any:
        """Returns the leaf for the place of another, in the dtype that JAX holds there.

        Raises:
          GroupError: a value does not survive the 32 bits that JAX makes of its 64.
        """
        dtype = getattr(new.leaf, "dtype", None)
        if dtype is None or dtype == self.leaf.dtype or not isinstance(self.leaf, np.ndarray):
            return self.leaf
        converted, lost = convert_held(self.leaf, dtype)
        if lost is not None:
            raise GroupError(
                f"`{self.path}` is {self.leaf.dtype}{list(self.leaf.shape)} with {lost}, which "
                f"does not fit the {dtype} JAX holds there without `jax_enable_x64`. Set that, or "
                "convert the state first."
            )
        return converted

    @property
    def is_hyper_param(self) -> bool:
        """Whether it records a hyper-parameter, as the state of `optax.inject_hyperparams` does."""
        return any(
            name == "hyperparams" and issubclass(kind, tuple) for kind, name in self.role.outer
        )


def entries(optimizer: Optimizer) -> list[Entry]:
    """Returns every leaf of the state, in order."""
    states = optimizer.state.param_states
    leaves = jax.tree.leaves(states)
    positions = jax.tree.unflatten(jax.tree.structure(states), range(len(leaves)))
    paths = {i: path_str(names) for names, i in flatten_with_paths(positions) if i is not None}
    indexed = optimizer.replace(state=OptimizerState(optimizer.state.step, positions))
    found: dict[int, Entry] = {}
    for group, part in leaf_groups(indexed):
        own = part.state.param_states
        given = roles(
            part.target,
            jax.tree.map(lambda i: leaves[i], own),
            whole_tree=part.optimizer_def.whole_tree,
        )
        for i, role in zip(jax.tree.leaves(own), given, strict=True):
            found[i] = Entry(paths[i], group, role, leaves[i])
    return [found[i] for i in range(len(leaves))]


def leaf_groups(optimizer: Optimizer, outer: Names = ()) -> Iterator[tuple[Names, Optimizer]]:
    """Yields the optimizers that an optimizer is made of: itself, where it has no groups.

    Args:
      optimizer: of any definition.
      outer: the names of the groups around it.

    Yields:
      The names of the groups around each, outermost first, and the optimizer of that group: its
      parameters, its state, and a definition that is no `MultiOptimizer`. Frozen leaves are in
      none.

    Examples:
      >>> from opt_core import OptimizerDef
      >>> class Sgd(OptimizerDef):
      ...     def init_state(self, params):
      ...         return OptimizerState(0, ())
      >>> groups = MultiOptimizer.from_rules([('weights', 'w', Sgd(None))], rest=Sgd(None))
      >>> [names for names, _ in leaf_groups(groups.create({'w': 1.0, 'b': 2.0}))]
      [('weights',), ('rest',)]
    """
    definition = optimizer.optimizer_def
    if not isinstance(definition, MultiOptimizer):
        yield outer, optimizer
        return
    for name, part in definition.split(optimizer).items():
        yield from leaf_groups(part, (*outer, name))


def members(optimizer: Optimizer) -> Iterator[tuple[Names, Names]]:
    """Yields the group and the path of every leaf that is updated."""
    for group, part in leaf_groups(optimizer):
        for leaf in described(part.target)[0]:
            yield group, leaf.names
