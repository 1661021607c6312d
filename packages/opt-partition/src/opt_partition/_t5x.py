"""T5X's interface for the logical axes of Optax states."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import tree_leaves_with_path

from opt_partition._layout import shape_and_dtype
from opt_partition._param_axes import is_axes, read_axes
from opt_partition._trees import KeyPath, map_leaves, names_of, owner_of, path_str
from opt_partition.errors import AxesError


class OptaxStatePartitionRules:
    """T5X's two class methods, for existing states.

    They see only the state and not its `init`, and therefore derive only the axes of leaves that
    have the rank of their parameter and one shape; `derive_logical_axes` derives those of any
    state. Unlike T5X's, this class needs no table of rules: its path determines which parameter a
    leaf follows.
    """

    @classmethod
    def derive_optax_logical_axes(cls, optax_state: Any, params_axes: Any) -> Any:
        """Returns the logical axes of an Optax state.

        Args:
          optax_state: the state; arrays or `jax.ShapeDtypeStruct`s.
          params_axes: the logical axes of the parameters, usually `PartitionSpec`s.

        Returns:
          A tree with the structure of the state, with a `PartitionSpec` for each leaf that follows
          a parameter and `None` for scalars, placeholders of one element and leaves whose path
          names no parameter.

        Raises:
          AxesError: leaves follow a parameter but do not have its shape, such as Adafactor's.

        Examples:
          >>> import optax
          >>> state = optax.adam(0.1).init({'w': jax.numpy.ones((4, 3))})
          >>> axes = {'w': PartitionSpec('embed', 'mlp')}
          >>> derived = OptaxStatePartitionRules.derive_optax_logical_axes(state, axes)
          >>> tuple(derived[0].mu['w'])
          ('embed', 'mlp')
        """
        leaves, head = _leaves_of_axes(params_axes), "`params_axes` are not axes:"
        every = map_leaves(lambda path, given, _: (path, read_axes(given)), leaves, leaves, head)
        named = {names_of(path): (path, axes) for path, axes in every}
        specs: list[PartitionSpec | None] = []
        shapes: dict[KeyPath, tuple[int, ...]] = {}
        other = []
        for path, leaf in tree_leaves_with_path(optax_state):
            (owner, _), shape = owner_of(names_of(path), named), shape_and_dtype(leaf)[0]
            if owner is None or math.prod(shape) <= 1:
                specs.append(None)
                continue
            of, axes = owner
            if len(shape) != len(axes) or shape != shapes.setdefault(of, shape):
                other.append(f"  {path_str(path)} {shape}")
            specs.append(PartitionSpec(*axes))
        if other:
            raise AxesError(
                "these state leaves do not have the shape of their parameter:\n"
                + "\n".join(other)
                + "\nUse `derive_logical_axes` with the transformation."
            )
        return jax.tree.unflatten(jax.tree.structure(optax_state), specs)

    @classmethod
    def derive_params_axes(cls, optax_params: Any, params_axes: Any) -> Any:
        """Returns the axes of parameters, some of which may be masked.

        Args:
          optax_params: a tree with the structure of the parameters, in which an `optax.MaskedNode`
            may replace a leaf or a subtree.
          params_axes: the logical axes of the parameters.

        Returns:
          The tree of `optax_params`, including masked nodes, with the axes of each leaf.

        Raises:
          AxesError: a leaf has no axes.
        """
        paths = [path for path, _ in tree_leaves_with_path(optax_params)]
        named = {names_of(path): axes for path, axes in _leaves_of_axes(params_axes)}
        missing = [f"  {path_str(path)}" for path in paths if names_of(path) not in named]
        if missing:
            raise AxesError("`params_axes` has no axes of `optax_params`:\n" + "\n".join(missing))
        found = [named[names_of(path)] for path in paths]
        return jax.tree.unflatten(jax.tree.structure(optax_params), found)


def _leaves_of_axes(axes: Any) -> list[tuple[KeyPath, Any]]:
    return tree_leaves_with_path(axes, is_leaf=lambda node: node is None or is_axes(node))
