"""Which leaves hold matrices, and which of their dimensions those are."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, keystr

from opt_matrix.errors import OptionError, UndecidedError


@dataclasses.dataclass(frozen=True)
class Dims:
    """The dimensions of a leaf that make a matrix; all others count matrices.

    Attributes:
      reduction: those that a layer sums over, the rows of `x @ W`.
      output: those that it returns, the columns.
      split: sizes of matrices that lie side by side along `output`, as of fused queries, keys and
        values; each is a matrix of its own. `()` for one matrix.
    """

    reduction: tuple[int, ...]
    output: tuple[int, ...]
    split: tuple[int, ...] = ()

    def resolve(self, path: str, shape: Sequence[int]) -> Dims:
        """Returns the same with dimensions counted from 0.

        Raises:
          OptionError: the leaf has no such dimensions, or `split` does not add up.
        """
        rank = len(shape)
        dims = [*self.reduction, *self.output]
        if not self.reduction or not self.output or any(not -rank <= d < rank for d in dims):
            raise OptionError(f"{path}: {self} are not dimensions of {tuple(shape)}")
        resolved = Dims(
            tuple(d % rank for d in self.reduction),
            tuple(d % rank for d in self.output),
            self.split,
        )
        if len({*resolved.reduction, *resolved.output}) < len(dims):
            raise OptionError(f"{path}: {self} name a dimension of {tuple(shape)} more than once")
        if not all(shape[d] for d in dims):
            raise OptionError(f"{path}: matrices of {tuple(shape)} are empty; make the leaf rest")
        width = math.prod(shape[d] for d in resolved.output)
        if self.split and (sum(self.split) != width or min(self.split) < 1):
            raise OptionError(
                f"{path}: `split` must be positive sizes that add up to the output dimensions' "
                f"{width}; got {self.split}"
            )
        return resolved

    def order(self, rank: int) -> tuple[int, ...]:
        """Returns the dimensions of a leaf: those that count matrices, then rows, then columns."""
        matrix = self.reduction + self.output
        return tuple(d for d in range(rank) if d not in matrix) + matrix

    def stacked(self, leaf: jax.Array) -> jax.Array:
        """Returns the matrices of a leaf, or of its shard, as `[matrices, *dimensions of one]`."""
        moved = leaf.transpose(self.order(leaf.ndim))
        return moved.reshape(-1, *moved.shape[leaf.ndim - len(self.reduction + self.output) :])

    def unstacked(self, stack: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Returns what `stacked` has made of a leaf of this shape as the leaf."""
        order = self.order(len(shape))
        return stack.reshape([shape[d] for d in order]).transpose(np.argsort(order))

    def along_output(self, columns: Any, shape: Sequence[int]) -> np.ndarray:
        """Returns one value for each column of a matrix, so that they broadcast against the leaf.

        Examples:
          >>> Dims((1,), (2, 0)).along_output(range(6), (2, 5, 3)).tolist()
          [[[0, 2, 4]], [[1, 3, 5]]]
        """
        by_dim = np.reshape(columns, [shape[d] for d in self.output])
        by_dim = by_dim.transpose(np.argsort(self.output))
        return by_dim.reshape([size if d in self.output else 1 for d, size in enumerate(shape)])


_WORDS = {
    "batch": ("layers", "layer", "stack", "scan", "stages", "expert", "experts", "qkv"),
    "rest": ("vocab", "position", "length", "relpos_buckets"),
    "embed": ("embed",),
    "inner": (
        *("mlp", "heads", "q_heads", "kv_heads", "kv", "head_dim", "kv_head_dim", "joined_kv"),
    ),
}
DEFAULT_RULES: Mapping[str, str] = {name: word for word, names in _WORDS.items() for name in names}


@dataclasses.dataclass(frozen=True, eq=False)
class Matrices:
    """Which leaves of a tree hold matrices; made by one of the methods `by_...`.

    A leaf is *matrices*, with `Dims`, or *rest*, for another optimizer. One that no rule decides is
    an error: what is orthogonalized by mistake trains badly and says nothing.
    """

    _decide: Callable[[str, tuple[int, ...]], Dims | None]  # of a leaf's path and shape
    _patterns: Sequence[re.Pattern[str]] = ()

    @classmethod
    def by_rank2(cls) -> Matrices:
        """Leaves of two dimensions are matrices, those of fewer are rest.

        A leaf of more dimensions is an error: it may be a stack of matrices or of biases.

        Examples:
          >>> import jax.numpy as jnp
          >>> Matrices.by_rank2().resolve({'b': jnp.ones(3), 'w': jnp.ones((2, 3))})
          {'b': None, 'w': Dims(reduction=(0,), output=(1,), split=())}
        """
        return cls(_by_rank2)

    @classmethod
    def by_path(cls, patterns: Mapping[str, Any]) -> Matrices:
        """The regular expression that matches a leaf's complete path says what it is.

        The path of a variable or box of Flax is `mlp/kernel`, as without the box.

        Args:
          patterns: for each, `(reduction, output)` as dimensions or tuples of dimensions, `Dims`,
            Optax's `MuonDimensionNumbers`, or `None` for rest. Every leaf must be matched by
            exactly one, and every pattern must match.

        Examples:
          >>> import jax.numpy as jnp
          >>> rules = Matrices.by_path({'.*/kernel': (-2, -1), '.*/bias': None})
          >>> rules.resolve({'mlp': {'bias': jnp.ones(3), 'kernel': jnp.ones((4, 2, 3))}})
          {'mlp/bias': None, 'mlp/kernel': Dims(reduction=(1,), output=(2,), split=())}
        """
        table = {_compiled(pattern): as_dims(dims) for pattern, dims in patterns.items()}

        def decide(path: str, shape: tuple[int, ...]) -> Dims | None:
            matches = [pattern for pattern in table if pattern.fullmatch(path)]
            if not matches:
                raise _undecided(path, shape)
            if len(matches) > 1:
                raise UndecidedError(f"{path}: matched by {[p.pattern for p in matches]}")
            return table[matches[0]]

        return cls(decide, list(table))

    @classmethod
    def by_logical_axes(
        cls,
        param_axes: Any,
        rules: Mapping[str, str] = DEFAULT_RULES,
        *,
        split: Mapping[str, Sequence[int]] | None = None,
    ) -> Matrices:
        """The names of a leaf's dimensions say what it is.

        Args:
          param_axes: a tree with the keys of the parameters; each leaf a `PartitionSpec` or a tuple
            of names, or a box of Flax that has `names` or `get_partition_spec()`.
          rules: what each name is. `'batch'`: counts matrices. `'rest'`: no leaf with this name
            holds matrices. Any other word is a side: neighbours with the same word are multiplied
            together, and two sides make a matrix, the first one its rows. Two dimensions are a
            matrix whatever their words. Fewer than two are rest. To make matrices of single heads,
            give `{**DEFAULT_RULES, 'heads': 'batch'}`.
          split: sizes of the matrices side by side along the dimension of a name, e.g.
            `{'joined_qkv': (512, 128, 128)}`; it must be the output by itself.

        Examples:
          >>> import jax.numpy as jnp
          >>> axes = {'q': ('layers', 'embed', 'heads', 'kv'), 'norm': ('layers', 'embed')}
          >>> shapes = {'q': jnp.ones((2, 4, 3, 5)), 'norm': jnp.ones((2, 4))}
          >>> Matrices.by_logical_axes(axes).resolve(shapes)
          {'norm': None, 'q': Dims(reduction=(1,), output=(2, 3), split=())}
        """
        blocks = {name: tuple(sizes) for name, sizes in (split or {}).items()}
        words = {**dict.fromkeys(blocks, "inner"), **rules}
        named = leaves_by_path(param_axes, is_leaf=_is_axes)

        def decide(path: str, shape: tuple[int, ...]) -> Dims | None:
            if path not in named:
                raise _undecided(path, shape)
            return _by_names(path, shape, _names(path, named[path], shape), words, blocks)

        return cls(decide)

    def resolve(self, params: Any, *, all_used: bool = True) -> dict[str, Dims | None]:
        """Returns the `Dims` of every leaf by path, or `None` for rest.

        Args:
          params: arrays or `jax.ShapeDtypeStruct`s.
          all_used: whether a pattern that matches nothing is an error.

        Raises:
          UndecidedError: a leaf is decided by no rule or by two, or a pattern matches nothing.
          OptionError: a rule does not fit a leaf's shape.
        """
        resolved: dict[str, Dims | None] = {}
        problems: list[str] = []
        leaves = leaves_by_path(params)
        for path, leaf in leaves.items():
            try:
                decision = self._decide(path, tuple(leaf.shape))
            except UndecidedError as error:
                problems.append(str(error))
            else:
                resolved[path] = decision and decision.resolve(path, leaf.shape)
        for pattern in self._patterns if all_used else ():
            if not any(map(pattern.fullmatch, leaves)):
                problems.append(f"{pattern.pattern!r} matches no leaf")
        if problems:
            raise UndecidedError(
                "`matrices` must say of every leaf which dimensions make a matrix, or that it is "
                "rest:\n  " + "\n  ".join(problems)
            )
        return resolved


def labelled(params: Any, matrices: Matrices, of_matrices: str, of_rest: str) -> Any:
    """A tree with a name for each leaf, or variable of Flax: that of matrices, or of the rest."""
    decided = matrices.resolve(params)

    def label(path: Any, node: Any) -> str:
        [(inside, _)] = jax.tree_util.tree_leaves_with_path(node)
        return of_rest if decided[path_str((*path, *inside))] is None else of_matrices

    def is_variable(node: Any) -> bool:  # of Flax NNX, with one array
        return hasattr(node, "get_metadata") and len(jax.tree.leaves(node)) == 1

    # Masks stand for variables, not inside of them: trainers read the dtype of each.
    return jax.tree_util.tree_map_with_path(label, params, is_leaf=is_variable)


def require_rules(matrices: Any) -> None:
    """Raises `OptionError` where `matrices` is something else."""
    if not isinstance(matrices, Matrices):
        raise OptionError(
            "`matrices` must say which leaves hold matrices, e.g. `Matrices.by_rank2()`; got "
            f"{type(matrices).__name__}"
        )


def all_matrices(who: str, decided: Mapping[str, Dims | None]) -> dict[str, Dims]:
    """Returns the dimensions of leaves that must hold matrices."""
    if others := [path for path, dims in decided.items() if dims is None]:
        raise UndecidedError(
            f"`{who}` updates matrices alone, and these hold none; `rest` of `muon` or "
            "`hyperball`, or `optax.partition`, sends them to another optimizer:\n  "
            + "\n  ".join(others)
        )
    return {path: dims for path, dims in decided.items() if dims is not None}


def as_dims(dims: Any) -> Dims | None:
    """Returns what a user writes for one leaf as `Dims`."""
    if dims is None or isinstance(dims, Dims):
        return dims
    if hasattr(dims, "reduction_axis"):  # Optax's, since its 0.2.6
        dims = (dims.reduction_axis, dims.output_axis)
    if isinstance(dims, tuple | list) and len(dims) == 2:
        sides = [(side,) if isinstance(side, int) else side for side in dims]
        if all(
            isinstance(side, tuple | list) and side and all(isinstance(d, int) for d in side)
            for side in sides
        ):
            return Dims(tuple(sides[0]), tuple(sides[1]))
    raise OptionError(
        f"dimensions must be `(reduction, output)`, `Dims` or `None` for rest; got {dims!r}"
    )


def _undecided(path: str, shape: tuple[int, ...]) -> UndecidedError:
    return UndecidedError(f"{path}: {shape} is decided by no rule")


def _by_rank2(path: str, shape: tuple[int, ...]) -> Dims | None:
    if len(shape) > 2:
        raise _undecided(path, shape)
    return Dims((0,), (1,)) if len(shape) == 2 else None


def _by_names(
    path: str,
    shape: tuple[int, ...],
    names: tuple[Any, ...],
    words: Mapping[str, str],
    blocks: Mapping[str, tuple[int, ...]],
) -> Dims | None:
    by_dim = [words.get(name) if isinstance(name, str) else None for name in names]
    if "rest" in by_dim:
        return None
    kept = [d for d, word in enumerate(by_dim) if word != "batch"]
    if len(kept) < 2:
        return None
    starts = [i for i in range(1, len(kept)) if by_dim[kept[i]] != by_dim[kept[i - 1]]]
    if len(kept) == 2:
        starts = [1]
    if None in (by_dim[d] for d in kept) or len(starts) != 1:
        raise _undecided(path, shape)
    rows, columns = tuple(kept[: starts[0]]), tuple(kept[starts[0] :])
    sizes = {names[d]: blocks[names[d]] for d in kept if names[d] in blocks}
    if not sizes:
        return Dims(rows, columns)
    if len(columns) > 1 or names[columns[0]] not in sizes:
        raise UndecidedError(
            f"{path}: `split` along {sorted(sizes)} must be along the output by itself, which is "
            f"{[names[d] for d in columns]}"
        )
    return Dims(rows, columns, sizes[names[columns[0]]])


def _is_axes(node: Any) -> bool:
    is_box = hasattr(node, "get_partition_spec") or hasattr(node, "names")
    if is_box or isinstance(node, PartitionSpec):
        return True
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)


def _names(path: str, axes: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    if hasattr(axes, "get_partition_spec"):
        axes = axes.get_partition_spec()
    names = tuple(getattr(axes, "names", axes))
    if len(names) > len(shape):
        raise OptionError(f"{path}: {names} are more names than {shape} has dimensions")
    return names + (None,) * (len(shape) - len(names))


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise OptionError(f"{pattern!r} is not a valid regular expression: {error}") from None


def path_str(path: Sequence[Any]) -> str:
    """Returns a JAX key path as `decoder/layers_0/kernel`; the root is `.`."""
    # As in JSON Pointer (RFC 6901). The attribute `value` of a box, as of Flax's variables, is left
    # out: a plan, and the rules of `Matrices`, are for trees with and without boxes.
    keys = path[:-1] if path[-1:] == (GetAttrKey("value"),) else path
    names = (keystr((key,), simple=True) for key in keys)
    return "/".join(name.replace("~", "~0").replace("/", "~1") for name in names) or "."


def leaves_by_path(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths, in JAX's order."""
    keyed = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {path_str(path): leaf for path, leaf in keyed}
