"""Which parameter each leaf of a state follows.

`init` is run on nodes without leaves in the places of the parameters, as
`optax.tree_utils.tree_map_params` does with one for all of them. Where one comes out again, what
the state has there follows its parameter:

  >>> params = {'b': jnp.ones(3), 'w': jnp.ones((2, 3))}
  >>> init = lambda params: {'n': jnp.zeros(2), 'mu': jax.tree.map(jnp.zeros_like, params)}
  >>> for leaf in follow(init, params, init(params)):
  ...     print('/'.join(leaf.path), leaf.parameter)
  mu/b ('b',)
  mu/w ('w',)
  n None

`init` may look at its parameters, or flatten them: then nothing is known here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp  # noqa: F401 (of the example)

from opt_core._paths import Names, children, flatten_with_paths, path_names


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("number",))
@dataclasses.dataclass(frozen=True)
class Placeholder:
    """A node without leaves in the place of a parameter, of which it has the number."""

    number: int


def is_placeholder(node: Any) -> bool:
    """Whether a node is in the place of a parameter."""
    return isinstance(node, Placeholder)


def placeholders(params: Any) -> Any:
    """Returns a tree with the containers of the parameters and a `Placeholder` for each."""
    structure: Any = jax.tree.structure(params)
    return structure.unflatten(map(Placeholder, range(structure.num_leaves)))


def on_placeholders(init: Callable[[Any], Any], tree: Any) -> Any | None:
    """Returns the state that `init` makes of placeholders; `None` if it needs the parameters."""
    try:
        return jax.eval_shape(init, tree)
    except Exception:  # whatever it raises where it expects an array
        return None


def places(
    placed: Any, names: Sequence[Names], at: Names = ()
) -> Iterator[tuple[Names, tuple[Names, Names]]]:
    """Yields the places of parameters in what `init` made of placeholders, at a path of the state.

    With each the path of its parameter, and the path around the containers of the parameters.
    """
    for path, node in jax.tree_util.tree_leaves_with_path(placed, is_leaf=is_placeholder):
        if is_placeholder(node):
            place, parameter = (*at, *path_names(path)), names[node.number]
            yield place, (parameter, around(place, parameter))


def around(place: Names, parameter: Names) -> Names:
    """Returns a path without the names at its end that are those of a parameter.

    Examples:
      >>> around(('0', 'mu', 'mlp', 'w'), ('mlp', 'w')), around(('last', 'w'), ('mlp', 'w'))
      (('0', 'mu'), ('last',))
    """
    end = 0
    while end < min(len(place), len(parameter)) and place[-1 - end] == parameter[-1 - end]:
        end += 1
    return place[: len(place) - end]


class StateLeaf(NamedTuple):
    """A leaf of a state, and the parameter that it follows.

    Attributes:
      path: where it is.
      kinds: the types of the nodes above it.
      parameter: the path of the parameter that it follows, if any.
      outer: the path down to where the containers of the parameters begin.
      inner: the path below the place of its parameter.
    """

    path: Names
    kinds: Sequence[type]
    parameter: Names | None
    outer: Names
    inner: Names

    @property
    def field(self) -> Names:
        """Its path without that of the parameter."""
        return (*self.outer, *self.inner)

    @property
    def record(self) -> int | None:
        """The depth of the innermost node outside the parameters that is no plain container."""
        depths = reversed(range(len(self.outer)))
        return next((k for k in depths if not is_plain(self.kinds[k])), None)


def is_plain(kind: type) -> bool:
    """Whether nodes of a class are containers and not records."""
    return kind in (tuple, list, dict) or issubclass(kind, Mapping)


def leaves_of(state: Any, followed: Mapping[Names, tuple[Names, Names]]) -> list[StateLeaf]:
    """Returns the leaves of a state in the order of JAX; `followed` is a dict of `places`."""
    return [_leaf(path, kinds, followed) for path, kinds in _walk(state, (), ())]


def _leaf(
    path: Names, kinds: Sequence[type], followed: Mapping[Names, tuple[Names, Names]]
) -> StateLeaf:
    for end in range(len(path), -1, -1):
        if (at := followed.get(path[:end])) is not None:
            return StateLeaf(path, kinds, *at, path[end:])
    return StateLeaf(path, kinds, None, path, ())


def _walk(
    node: Any, path: Names, kinds: tuple[type, ...]
) -> Iterator[tuple[Names, Sequence[type]]]:
    opened = children(node)
    if opened is None:
        if node is not None:
            yield path, kinds
        return
    for name, child in opened.children:
        yield from _walk(child, (*path, name), (*kinds, type(node)))


def follow(init: Callable[[Any], Any], params: Any, state: Any) -> list[StateLeaf]:
    """Returns the leaves of a state that `init` made, with the parameters that they follow."""
    names = [path for path, leaf in flatten_with_paths(params) if leaf is not None]
    placed = on_placeholders(init, placeholders(params))
    return leaves_of(state, dict(places(placed, names)))
