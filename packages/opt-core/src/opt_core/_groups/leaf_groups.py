"""The optimizers of a `MultiOptimizer`, nested ones included."""

from __future__ import annotations

from collections.abc import Iterator

from opt_core._groups.multi_optimizer import MultiOptimizer
from opt_core._optimizer import Optimizer
from opt_core._paths import Names, flatten_with_paths


def leaf_groups(optimizer: Optimizer, outer: Names = ()) -> Iterator[tuple[Names, Optimizer]]:
    """Yields the optimizers without groups that an optimizer consists of, possibly itself.

    Args:
      optimizer: of any definition.
      outer: the names of the groups around it.

    Yields:
      The names of the groups around each, outermost first, and the optimizer of that group: its
      parameters, its state, and a definition that is not a `MultiOptimizer`. Frozen leaves are
      omitted.

    Examples:
      >>> from opt_core import OptimizerDef, OptimizerState
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
        for names, leaf in flatten_with_paths(part.target):
            if leaf is not None:
                yield group, names
