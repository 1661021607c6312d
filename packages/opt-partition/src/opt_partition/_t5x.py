"""T5X's interface for the logical axes of Optax states."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.tree_util import tree_leaves_with_path

from opt_partition._param_axes import Parameter, is_axes, match_paths, parameters, read_axes
from opt_partition._rules import Answer, StateLeaf, apply_rules
from opt_partition._trees import KeyPath, children, key_name, path_str
from opt_partition.errors import AxesError

_UNKNOWN = -1  # stands for an unknown size


def align_shape(shape: Sequence[int], parameter: Sequence[int]) -> tuple[int | None, ...] | None:
    """Returns the largest match of sizes in order, `None` if there are several."""
    if tuple(shape) == tuple(parameter):
        return tuple(range(len(parameter)))
    for size in range(min(len(shape), len(parameter)), -1, -1):
        ways = {
            (here, there)
            for here in itertools.combinations(range(len(shape)), size)
            for there in itertools.combinations(range(len(parameter)), size)
            if all(shape[i] == parameter[j] for i, j in zip(here, there, strict=True))
        }
        if len(ways) > 1:
            return None
        if ways:
            [(here, there)] = ways
            dims = dict(zip(here, there, strict=True))
            return tuple(dims.get(axis) for axis in range(len(shape)))
    return (None,) * len(shape)


def factored_dimensions(leaf: StateLeaf) -> Answer:
    """The rule for Adafactor: rows and columns lack the largest or second largest dimension."""
    parameter = leaf.parameter
    if parameter is None or leaf.field not in ("v_row", "v_col", "v"):
        return None
    shape = parameter.shape
    if leaf.shape == (1,) != shape:
        return (None,)  # a placeholder
    if leaf.field == "v" or len(shape) < 2:
        return None
    second, largest = np.argsort(shape)[-2:].tolist()
    removed = largest if leaf.field == "v_row" else second
    kept = tuple(dim for dim in range(len(shape)) if dim != removed)
    return kept if leaf.shape == tuple(shape[dim] for dim in kept) else None


_RULES = {optax.FactoredState: factored_dimensions}


class OptaxStatePartitionRules:
    """T5X's two class methods, for existing states.

    They see only the state and not its `init`, and therefore derive less than
    `derive_logical_axes`, which is preferable if the transformation is available. Unlike T5X's,
    this class needs no table of rules: its path determines which parameter a leaf follows.
    """

    @classmethod
    def derive_optax_logical_axes(
        cls, optax_state: Any, params_axes: Any, params: Any = None
    ) -> Any:
        """Returns the logical axes of an Optax state.

        Args:
          optax_state: the state; arrays or `jax.ShapeDtypeStruct`s.
          params_axes: the logical axes of the parameters, usually `PartitionSpec`s.
          params: the parameters, for their shapes. Not in T5X; required for states without any leaf
            of the parameter's shape, such as Adafactor's.

        Returns:
          A tree with the structure of the state, with a `PartitionSpec` for each leaf that follows
          a parameter and `None` for all others, as in T5X.

        Raises:
          AxesError: the shape of a parameter is needed but cannot be inferred from the state; the
            message lists the leaves.

        Examples:
          >>> import optax
          >>> state = optax.sm3(0.1).init({'w': jax.numpy.ones((4, 3))})
          >>> axes = {'w': PartitionSpec('embed', 'mlp')}
          >>> derived = OptaxStatePartitionRules.derive_optax_logical_axes(state, axes)
          >>> [tuple(spec) for spec in derived[0].mu['w']]
          [('embed',), ('mlp',)]
        """
        is_inferred = params is None
        like = params_axes if is_inferred else params
        if is_inferred:
            flat = jax.tree_util.tree_leaves_with_path(params_axes, is_leaf=_is_leaf)
            named = [(path, read_axes(axes)) for path, axes in flat]
            table = [Parameter(path, (_UNKNOWN,) * len(axes), None, axes) for path, axes in named]
        else:
            table = parameters(params, params_axes)
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), optax_state)
        paths, leaves = [path for path, _ in tree_leaves_with_path(state)], jax.tree.leaves(state)
        indices = [next(iter(match), None) for match in match_paths(like, optax_state, table)]
        for index, leaf in zip(indices, leaves, strict=True):
            if is_inferred and index is not None and len(leaf.shape) == len(table[index].axes):
                # The largest shape of that rank, which is never a placeholder of size 1.
                shape = max(table[index].shape, leaf.shape)
                table[index] = dataclasses.replace(table[index], shape=shape)
        owners = [None if index is None else table[index] for index in indices]
        specs: list[PartitionSpec | None] = []
        unknown = []
        for path, leaf, owner, answer in zip(
            paths, leaves, owners, apply_rules(state, owners, _RULES), strict=True
        ):
            specs.append(None)
            if owner is None:
                continue
            dims: Any = align_shape(leaf.shape, owner.shape) if answer is None else answer
            if dims is None or _UNKNOWN in owner.shape:
                if math.prod(leaf.shape) > 1:
                    unknown.append(f"  {path_str(path)} {leaf.shape}")
            elif any(dim is not None for dim in dims):
                specs[-1] = PartitionSpec(*(None if d is None else owner.axes[d] for d in dims))
        if unknown:
            raise AxesError(
                "the axes of these state leaves cannot be inferred from their shapes:\n"
                + "\n".join(unknown)
                + ("\nPass `params`, or use" if is_inferred else "\nUse")
                + " `derive_logical_axes` with the transformation."
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
        found = [_at(params_axes, path) for path in paths]
        pairs = zip(paths, found, strict=True)
        missing = [f"  {path_str(path)}: no axes given" for path, axes in pairs if axes is _MISSING]
        if missing:
            raise AxesError("`params_axes` do not match `optax_params`:\n" + "\n".join(missing))
        return jax.tree.unflatten(jax.tree.structure(optax_params), found)


_MISSING = object()


def _at(axes: Any, path: KeyPath) -> Any:
    """Returns the axes at a path, `_MISSING` if there are none."""
    for key in path:
        node = None if is_axes(axes) else children(axes)
        axes = {key_name(k): child for k, child in node or ()}.get(key_name(key), _MISSING)
    return axes


def _is_leaf(node: Any) -> bool:
    return node is None or is_axes(node)
