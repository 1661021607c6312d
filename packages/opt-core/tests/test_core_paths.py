from collections import OrderedDict
from typing import Any

import hypothesis.strategies as st
import jax
import pytest
from core_testing import Layer, Pair, given, trees
from opt_core import children, flatten_with_paths, path_names, path_str, split_path


@pytest.mark.parametrize(
    ("node", "names"),
    [
        ({"b": 1, "a": 2}, ["a", "b"]),
        (OrderedDict(b=1, a=2), ["b", "a"]),
        ({10: 1, 9: 2}, ["9", "10"]),
        ({"a/b": 1, "": 2}, ["", "a/b"]),
        ([1, 2], ["0", "1"]),
        (Pair(1, 2), ["left", "right"]),
        (Layer(1), ["kernel", "bias"]),
        ({}, []),
    ],
    ids=repr,
)
def test_children_are_named_as_in_state_dicts(node: Any, names: list[str]) -> None:
    opened = children(node)
    assert opened is not None
    assert [name for name, _ in opened.children] == names
    rebuilt = opened.rebuild([child for _, child in opened.children])
    assert rebuilt == node
    assert type(rebuilt) is type(node)


@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, *items: Any) -> None:
        self.items = items

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.items, None

    @classmethod
    def tree_unflatten(cls, _: None, items: tuple[Any, ...]) -> "Box":
        return cls(*items)


def test_children_of_unnamed_nodes_are_numbered_and_leaves_have_none() -> None:
    opened = children(Box(5, 6))
    assert opened is not None
    assert opened.children == [("0", 5), ("1", 6)]
    for leaf in (None, 1.0, "text", object()):
        assert children(leaf) is None


@given(tree=trees)
def test_paths_are_those_of_jax(tree: Any) -> None:
    ours = list(flatten_with_paths(tree))
    theirs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None)
    assert [names for names, _ in ours] == [path_names(path) for path, _ in theirs]
    assert all(a is b for (_, a), (_, b) in zip(ours, theirs, strict=True))


names = st.lists(st.text("ab/~01."), max_size=4)


@given(one=names, other=names)
def test_different_names_have_different_paths(one: list[str], other: list[str]) -> None:
    # `.` is the root, which has no leaf beside it.
    paths = [path_str(names) for names in (one, other)]
    assert (paths[0] == paths[1]) == (one == other) or "." in paths
    if one not in (["."], []):
        assert split_path(paths[0]) == tuple(one)
