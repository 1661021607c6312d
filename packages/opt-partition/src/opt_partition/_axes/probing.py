"""Abstract evaluation of `init` for parameters of changed shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax

from opt_partition._axes.param_axes import Parameter
from opt_partition._trees import KeyPath, flatten_with_paths

Shape = tuple[int, ...]
# Maps the index and shape of a parameter to its changed shape.
Change = Callable[[int, Shape], Shape]


class Prober:
    """Evaluates `init` abstractly for parameters of changed shapes.

    Attributes:
      evaluations: number of evaluations so far.
    """

    def __init__(
        self, init: Callable[[Any], Any], treedef: Any, table: Sequence[Parameter]
    ) -> None:
        self._init = init
        self._treedef = treedef
        self._table = table
        self.evaluations = 0

    def state(self, kept: Iterable[int], change: Change = lambda _, shape: shape) -> Any:
        """Returns the state, as `jax.ShapeDtypeStruct`s.

        Args:
          kept: the parameters to keep; the others are replaced by empty nodes.
          change: returns the changed shape of a parameter.
        """
        self.evaluations += 1
        kept = {*kept}
        leaves = [
            jax.ShapeDtypeStruct(change(index, parameter.shape), parameter.dtype)
            if index in kept
            else optax.MaskedNode()
            for index, parameter in enumerate(self._table)
        ]
        # A new lambda each time, as JAX caches evaluations by function identity.
        return jax.eval_shape(lambda params: self._init(params), self._treedef.unflatten(leaves))

    def shapes(
        self, kept: Iterable[int], change: Change = lambda _, shape: shape
    ) -> dict[KeyPath, Shape]:
        """Returns the shape of every state leaf by path; see `state`."""
        return shapes_of(self.state(kept, change))


def shapes_of(state: Any) -> dict[KeyPath, Shape]:
    """Returns the shape of every leaf by its path."""
    return {path: tuple(leaf.shape) for path, leaf in flatten_with_paths(state)}


def first_line(error: Exception) -> str:
    """Returns the type and message of an error, shortened to one line.

    Examples:
      >>> first_line(KeyError('w'))
      "KeyError: 'w'"
    """
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return text if len(text) < 120 else f"{text[:117]}..."
