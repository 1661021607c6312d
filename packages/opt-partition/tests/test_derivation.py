"""Random trees under random nestings of transformations, against a reference by construction.

Each transformation comes with what its state is for parameters of given shapes, written down from
its documentation; a wrapper's is made of those of what it wraps.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from jax.tree_util import keystr
from opt_partition import explain

# Much of what it exports is not an explicit export, which mypy asks for.
optax: Any = importlib.import_module("optax")

Tree = Any
MIN_DIM = 4


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Shape and names of a leaf of the parameters or of the reference state."""

    shape: tuple[int, ...] = ()
    names: tuple[str | None, ...] = ()

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def take(self, *dims: int) -> Leaf:
        return Leaf(tuple(self.shape[d] for d in dims), tuple(self.names[d] for d in dims))

    def under(self, size: int) -> Leaf:
        return Leaf((size, *self.shape), (None, *self.names))


SCALAR, PLACEHOLDER = Leaf(), Leaf((1,), (None,))


class Block(NamedTuple):
    kernel: Any
    mu: Any  # a field of `ScaleByAdamState`, too


class Rows(NamedTuple):
    """A user's state: what is left of each parameter without its last dimension."""

    rows: Any


@dataclasses.dataclass(frozen=True)
class Known:
    """A transformation, and the state that it makes of parameters.

    Attributes:
      name: how it was built.
      tx: the transformation.
      state: from a tree of `Leaf`s to the state.
    """

    name: str
    tx: Any
    state: Callable[[Tree], Tree]

    def __repr__(self) -> str:
        return self.name


def each(leaf: Callable[[Leaf], Any], params: Tree) -> Tree:
    return jax.tree.map(leaf, params)


def same(params: Tree) -> Tree:
    return params


def factored(leaf: Leaf) -> tuple[Leaf, Leaf, Leaf]:
    """Rows are without the largest dimension, columns without the second, of NumPy's order."""
    order = np.argsort(leaf.shape).tolist()
    if leaf.ndim < 2 or leaf.shape[order[-2]] < MIN_DIM:
        return PLACEHOLDER, PLACEHOLDER, leaf
    row, column = (leaf.take(*sorted(set(order) - {order[i]})) for i in (-1, -2))
    return row, column, PLACEHOLDER


def user(make: Callable[[Any], Any]) -> Any:
    def init(params: Tree) -> Any:
        return make(jax.tree.map(lambda p: jnp.sum(p, axis=-1) if p.ndim else p, params))

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def without_last(leaf: Leaf) -> Leaf:
    return leaf.take(*range(leaf.ndim - 1))


LEAVES = [
    Known(
        "adam",
        optax.scale_by_adam(),
        lambda p: optax.ScaleByAdamState(SCALAR, same(p), same(p)),
    ),
    Known("trace", optax.trace(0.9), lambda p: optax.TraceState(same(p))),
    Known(
        "adafactor",
        optax.scale_by_factored_rms(min_dim_size_to_factor=MIN_DIM),
        lambda p: optax.FactoredState(
            SCALAR,
            each(lambda leaf: factored(leaf)[0], p),
            each(lambda leaf: factored(leaf)[1], p),
            each(lambda leaf: factored(leaf)[2], p),
        ),
    ),
    Known(
        "sm3",
        optax.scale_by_sm3(),
        lambda p: optax.ScaleBySM3State(
            each(lambda leaf: [leaf.take(d) for d in range(leaf.ndim)], p), same(p)
        ),
    ),
    Known(
        "lbfgs",
        optax.scale_by_lbfgs(memory_size=3),
        lambda p: optax.ScaleByLBFGSState(
            SCALAR,
            same(p),
            same(p),
            each(lambda leaf: leaf.under(3), p),
            each(lambda leaf: leaf.under(3), p),
            Leaf((3,), (None,)),
        ),
    ),
    Known("user", user(Rows), lambda p: Rows(each(without_last, p))),
]


def keep(params: Tree, condition: Callable[[Any], bool]) -> Tree:
    return jax.tree.map(lambda leaf: leaf if condition(leaf) else optax.MaskedNode(), params)


def is_matrix(leaf: Any) -> bool:
    return bool(leaf.ndim == 2)


def is_long(leaf: Any) -> bool:
    return bool(leaf.ndim and leaf.shape[-1] > 3)


def masked(inner: Known, condition: Callable[[Any], bool]) -> Known:
    return Known(
        f"masked({inner})",
        optax.masked(inner.tx, lambda params: jax.tree.map(condition, params)),
        lambda p: optax.MaskedState(inner.state(keep(p, condition))),
    )


def partition(one: Known, other: Known, condition: Callable[[Any], bool]) -> Known:
    def state(params: Tree) -> Any:
        groups = {
            "one": one.state(keep(params, condition)),
            "other": other.state(keep(params, lambda leaf: not condition(leaf))),
        }
        return optax.PartitionState({name: optax.MaskedState(s) for name, s in groups.items()})

    return Known(
        f"partition({one}, {other})",
        optax.partition(
            {"one": one.tx, "other": other.tx},
            lambda params: jax.tree.map(lambda leaf: "one" if condition(leaf) else "other", params),
        ),
        state,
    )


def multi_steps(inner: Known) -> Known:
    return Known(
        f"MultiSteps({inner})",
        optax.MultiSteps(inner.tx, 2),
        lambda p: optax.MultiStepsState(SCALAR, SCALAR, inner.state(p), same(p), ()),
    )


def inject(inner: Known) -> Known:
    def factory(learning_rate: float) -> Any:
        return optax.chain(inner.tx, optax.scale(learning_rate))

    rate = {"learning_rate": SCALAR}
    state = optax.InjectStatefulHyperparamsState
    return Known(
        f"inject({inner})",
        optax.inject_hyperparams(factory)(0.1),
        lambda p: state(SCALAR, rate, {}, (inner.state(p), optax.EmptyState())),
    )


def chain(inner: list[Known]) -> Known:
    return Known(
        f"chain{inner}",
        optax.chain(*(known.tx for known in inner)),
        lambda p: tuple(known.state(p) for known in inner),
    )


def wrapped(inner: st.SearchStrategy[Known]) -> st.SearchStrategy[Known]:
    conditions = st.sampled_from([is_matrix, is_long])
    return st.one_of(
        st.builds(chain, st.lists(inner, min_size=1, max_size=3)),
        st.builds(masked, inner, conditions),
        st.builds(partition, inner, inner, conditions),
        st.builds(multi_steps, inner),
        st.builds(inject, inner),
    )


transformations = st.recursive(st.sampled_from(LEAVES), wrapped, max_leaves=4)

# Few sizes: most repeat. Some are next to the threshold.
shapes = st.lists(st.sampled_from([1, 3, 4, 5, 8, 8]), max_size=4).map(tuple)


def containers(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", "mu", "0"]), inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
        st.builds(Block, inner, inner),
    )


trees = st.recursive(shapes.map(Leaf), containers, max_leaves=6)


def named(tree: Tree) -> Tree:
    """Gives every dimension of every parameter a name of its own."""

    def leaf(path: Any, shape: Leaf) -> Leaf:
        return Leaf(shape.shape, tuple(f"{keystr(path)}:{d}" for d in range(shape.ndim)))

    return jax.tree_util.tree_map_with_path(leaf, tree)


def check(tree: Tree, known: Known) -> None:
    params = named(tree)
    structs = each(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
    axes = each(lambda leaf: PartitionSpec(*leaf.names), params)
    explanation = explain(known.tx, structs, axes)
    reference = known.state(params)
    structure: Any = jax.tree.structure(explanation.axes)
    assert structure == jax.tree.structure(reference)
    assert structure == jax.tree.structure(explanation.state)
    sizes = {
        name: size
        for leaf in jax.tree.leaves(params)
        for name, size in zip(leaf.names, leaf.shape, strict=True)
    }
    specs = jax.tree.leaves(explanation.axes)
    for row, spec, expected in zip(
        explanation.rows, specs, jax.tree.leaves(reference), strict=True
    ):
        assert row.shape == expected.shape
        assert len(spec) <= len(row.shape)
        assert all(n is None or sizes[n] == s for n, s in zip(row.axes, row.shape, strict=True))
        assert row.axes == expected.names, row.path


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(Leaf((1,)), next(known for known in LEAVES if known.name == "adafactor"))
@given(trees, transformations)
def test_the_axes_are_those_that_each_transformation_is_known_for(tree: Tree, known: Known) -> None:
    check(tree, known)
