"""Structures of trees as plain JSON, and the names of their leaves.

A description is the string `"*"` for a leaf, else `[kind, [[key, description], ...]]`. Keys are
texts or integers; kinds are `dict`, `list`, `tuple`, `None`, or the name of a class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from opt_legacy_stax._trees import children, path_str, shown
from opt_legacy_stax.errors import SaveError

LEAF = "*"
MAX_DEPTH = 100
Description = Any
_ROOT = "@"


def describe(tree: Any, path: tuple[Any, ...] = ()) -> Description:
    """Returns the description of a tree.

    Raises:
      SaveError: a key is neither text nor an integer, two keys are the same text, or the tree is
        deeper than `MAX_DEPTH`.

    Examples:
      >>> describe({'w': (1, None)})
      ['dict', [['w', ['tuple', [[0, '*'], [1, ['None', []]]]]]]]
    """
    found = children(tree)
    if found is None:
        return LEAF
    where = _path(path)
    if len(path) >= MAX_DEPTH:
        raise SaveError(
            f"`{where}` is nested deeper than {MAX_DEPTH} containers. Flatten the tree."
        )
    kind = "None" if tree is None else type(tree).__name__
    named = [(_key(key, where), child) for key, child in found]
    if len({str(key) for key, _ in named}) != len(named):
        raise SaveError(f"two keys in `{where}` are the same as text. Rename one.")
    return [kind, [[key, describe(child, (*path, key))] for key, child in named]]


def leaves(description: Description, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the keys along the path of each leaf, in the order of the leaves.

    Examples:
      >>> list(leaves(describe({'w': [1, 2]})))
      [('w', 0), ('w', 1)]
    """
    if description == LEAF:
        yield keys
        return
    for key, child in description[1]:
        yield from leaves(child, (*keys, key))


def name_of(outer: tuple[Any, ...], inner: tuple[Any, ...]) -> str:
    """Returns the name of a leaf in a file: the path of its parameter, and its own within.

    Whatever the keys are, the name is no path that leads anywhere.

    Examples:
      >>> name_of(('mlp', 'kernel'), (1,)), name_of((), ()), name_of(('../x', ''), (0,))
      ('mlp/kernel:1', '@', '%2E%2E%2Fx/%:0')
    """
    name = "/".join(map(_escape, outer)) or _ROOT
    return name + ":" + "/".join(map(_escape, inner)) if inner else name


def check_description(description: Any, depth: int = 0) -> int:
    """Returns how many leaves a description has; raises a `ValueError` if it is none."""
    if description == LEAF:
        return 1
    if depth >= MAX_DEPTH:
        raise ValueError(f"the tree is nested deeper than {MAX_DEPTH} nodes")
    match description:
        case [str(), list(entries)]:
            count, keys = 0, set()
            for entry in entries:
                match entry:
                    case [str(key) | int(key), child] if key is not True and key is not False:
                        keys.add(str(key))
                        count += check_description(child, depth + 1)
                    case _:
                        raise ValueError("a child of a node is no pair of key and node")
            if len(keys) != len(entries):
                raise ValueError("two children of a node have one key")
            return count
        case _:
            raise ValueError("a node of the tree is neither a leaf nor a pair of kind and children")


def differences(
    expected: Description, found: Description, keys: tuple[Any, ...] = ()
) -> Iterator[str]:
    """Yields a line for each place where two descriptions differ.

    Examples:
      >>> list(differences(describe({'a': 1}), describe({'b': (1,)})))
      ['a: expected an array, found nothing', 'b: expected nothing, found a tuple']
    """
    path = _path(keys)
    if LEAF in (expected, found) or expected[0] != found[0]:
        if expected != found:
            yield f"{path}: expected {_kind(expected)}, found {_kind(found)}"
        return
    others = {str(key): (key, child) for key, child in found[1]}
    for key, child in expected[1]:
        if str(key) in others:
            other_key, other = others.pop(str(key))
            if type(key) is not type(other_key):
                yield f"{path}: expected key {shown(repr(key))}, found {shown(repr(other_key))}"
            yield from differences(child, other, (*keys, key))
        else:
            yield f"{_path((*keys, key))}: expected {_kind(child)}, found nothing"
    for key, child in others.values():
        yield f"{_path((*keys, key))}: expected nothing, found {_kind(child)}"
    ours, theirs = ([str(key) for key, _ in node[1]] for node in (expected, found))
    if ours != theirs and sorted(ours) == sorted(theirs):
        first = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        yield (
            f"{path}: expected its keys in another order, `{shown(ours[first])}` where "
            f"`{shown(theirs[first])}` is"
        )


def _path(keys: tuple[Any, ...]) -> str:
    return shown(path_str(tuple(map(DictKey, keys))))


def _kind(description: Description) -> str:
    if description == LEAF:
        return "an array"
    kind = shown(str(description[0]), 40)
    if kind == "None":
        return kind
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


def _key(key: Any, where: str) -> str | int:
    match key:
        case DictKey(key=name) | FlattenedIndexKey(key=name):
            pass
        case SequenceKey(idx=name):
            pass
        case GetAttrKey(name=name):
            pass
        case _:
            name = str(key)
    if type(name) in (str, int):
        return name
    raise SaveError(
        f"a state is saved with keys that are texts or integers; a key in `{where}` is a "
        f"{type(name).__name__}. Rename it."
    )


def _escape(key: Any) -> str:
    text = str(key)
    if set(text) == {"."}:
        return text.replace(".", "%2E")
    if text.startswith(".."):
        text, dots = text.lstrip("."), len(text) - len(text.lstrip("."))
        return "%2E" * dots + _escape(text)
    return re.sub(r"[^A-Za-z0-9_.\-]", _percent, text) or "%"


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))
