"""Tree structures as plain JSON, and the names of their leaves.

A description is the string `"*"` for a leaf, otherwise `[kind, [[key, description], ...]]`. Keys
are strings or integers; a kind is `dict`, `list`, `tuple`, `None`, or a class name.
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
      SaveError: a key is neither a string nor an integer, two keys have the same string form, or
        the tree is deeper than `MAX_DEPTH`.

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
        raise SaveError(f"two keys in `{where}` have the same string form. Rename one of them.")
    return [kind, [[key, describe(child, (*path, key))] for key, child in named]]


def leaves(description: Description, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the key path of each leaf, in leaf order.

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
    """Returns the name of a leaf in a file: its parameter's path, then its path within the state.

    Keys are escaped so that the name can never be used as a file system path.

    Examples:
      >>> name_of(('mlp', 'kernel'), (1,)), name_of((), ()), name_of(('../x', ''), (0,))
      ('mlp/kernel:1', '@', '%2E%2E%2Fx/%:0')
    """
    name = "/".join(map(_escape, outer)) or _ROOT
    return name + ":" + "/".join(map(_escape, inner)) if inner else name


def check_description(description: Any, depth: int = 0) -> int:
    """Returns the number of leaves of a description; raises `ValueError` if it is malformed."""
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
                        raise ValueError("a child of a node is not a [key, node] pair")
            if len(keys) != len(entries):
                raise ValueError("two children of a node have the same key")
            return count
        case _:
            raise ValueError("a node of the tree is neither a leaf nor a [kind, children] pair")


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
            f"{path}: keys in a different order, expected `{shown(ours[first])}` where "
            f"`{shown(theirs[first])}` was found"
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
        f"keys of a saved state must be strings or integers; a key in `{where}` is a "
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
