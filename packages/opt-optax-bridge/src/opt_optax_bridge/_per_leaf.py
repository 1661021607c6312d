"""Updates that a caller traces once for all leaves that are alike.

Where a transformation computes each leaf from that leaf alone, in the same way wherever it is in
the tree, its update of a leaf is one function, called for each, which XLA inlines.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from opt_optax_bridge._description.nodes import Node, open_transformation, transformation_name

PER_LEAF: Final = frozenset(
    {
        *("acprop", "adadelta", "adam", "adamax", "adan", "ademamix", "adopt", "amsgrad"),
        *("belief", "ema", "lion", "radam", "rms", "rss", "stddev", "trace", "yogi"),
        *("add_decayed_weights", "factored_rms", "optimistic_gradient", "rprop"),
        *("adaptive_grad_clip", "centralize", "clip", "clip_by_block_rms", "zero_nans"),
        *("keep_params_nonnegative", "param_block_norm", "param_block_rms", "trust_ratio"),
        *("scale", "schedule", "set_to_zero", "sign", "stateless_with_tree_map"),
    }
)
"""Optax's transformations of which that is true; a test holds it against the installed Optax."""


def acts_per_leaf(tx: Any) -> bool:
    """Whether any part of a transformation is one of `PER_LEAF`."""
    return _has_some(open_transformation(tx))


def update_per_leaf(tx: Any, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Returns what `tx.update(grads, state, params)` returns.

    Parts of a chain that need all leaves at once, such as `clip_by_global_norm` or `masked`, and
    those that are not Optax's, are called as they are.
    """
    if not jax.tree.leaves(grads):
        updated: tuple[Any, Any] = tx.update(grads, state, params)
        return updated
    return _update(open_transformation(tx), grads, state, params)


def _update(node: Node, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    if _is_per_leaf(node):
        grads, (state,) = _update_leaves([node], grads, (state,), params)
        return grads, state
    if not _is_chain(node) or len(node.children) != len(state):
        updated: tuple[Any, Any] = node.tx.update(grads, state, params)
        return updated
    states: list[Any] = []
    for together, run in itertools.groupby(node.children, _is_per_leaf):
        parts = list(run)
        if together:
            old = tuple(state[len(states) : len(states) + len(parts)])
            grads, new = _update_leaves(parts, grads, old, params)
            states += new
        else:
            for part in parts:
                grads, one = _update(part, grads, state[len(states)], params)
                states.append(one)
    return grads, tuple(states)


def _update_leaves(
    parts: Sequence[Node], grads: Any, state: tuple[Any, ...], params: Any
) -> tuple[Any, tuple[Any, ...]]:
    outer: Any
    tree: Any = jax.tree.structure(grads)

    def is_tree(node: Any) -> bool:
        return bool(jax.tree.structure(node) == tree)

    pieces, outer = jax.tree.flatten(state, is_leaf=is_tree)
    owned = [is_tree(piece) for piece in pieces]
    own = [piece for piece, is_own in zip(pieces, owned, strict=True) if is_own]
    shared = [piece for piece, is_own in zip(pieces, owned, strict=True) if not is_own]

    def update_leaf(shared: Sequence[Any], row: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        grad, param, *own = row
        states = _merged(owned, own, shared, outer)
        for i, part in enumerate(parts):
            grad, states[i] = part.tx.update(grad, states[i], param)
        new = list(zip(owned, outer.flatten_up_to(tuple(states)), strict=True))
        return [x for is_own, x in new if not is_own], [grad, *(x for is_own, x in new if is_own)]

    absent = [None] * tree.num_leaves
    columns = [absent if x is None else tree.flatten_up_to(x) for x in (grads, params, *own)]
    new_shared, rows = _map_alike(update_leaf, shared, list(zip(*columns, strict=True)))
    updates, *new_own = (tree.unflatten(column) for column in zip(*rows, strict=True))
    return updates, tuple(_merged(owned, new_own, new_shared, outer))


def _merged(owned: Sequence[bool], own: Iterable[Any], shared: Iterable[Any], outer: Any) -> Any:
    """Returns states of what leaves have of their own and of what they share."""
    own, shared = iter(own), iter(shared)
    return list(jax.tree.unflatten(outer, [next(own if is_own else shared) for is_own in owned]))


def _map_alike(
    function: Callable[[Any, Any], tuple[Any, Any]], shared: Any, rows: Sequence[Any]
) -> tuple[Any, Sequence[Any]]:
    """Maps `(shared, row) -> (shared, row)` over rows; what is shared comes out of each the same.

    Numbers made of what is shared alone, such as the corrections of a bias, are computed once, as
    where the whole tree is updated together: XLA then fuses, and rounds, in the same way.
    """
    calls: dict[Any, _Call] = {}
    computed: dict[Any, Sequence[Any]] = {}
    done: list[Any] = []
    for row in rows:
        kind = tuple(None if x is None else jax.typeof(x) for x in row)
        if kind not in calls:
            calls[kind] = call = _Call.trace(function, shared, row)
            if call.key not in computed:
                computed[call.key] = jaxpr_as_fun(call.once)(*jax.tree.leaves(shared))
        call = calls[kind]
        done.append(call.run(computed[call.key][: call.passed], row))
    first = next(iter(calls.values()))
    return jax.tree.unflatten(first.shared, computed[first.key][first.passed :]), done


@dataclasses.dataclass(frozen=True)
class _Call:
    """A function `(shared, row) -> (shared, row)`, traced for rows of one kind.

    Attributes:
      once: the part that computes scalars from what is shared; returns what `each` takes of it,
        and what is shared afterwards.
      each: the rest, compiled as part of its caller.
      passed: how many values `each` takes.
      shared: the structure of what is shared afterwards.
      row: the structure of a row afterwards.
    """

    once: ClosedJaxpr
    each: Callable[..., Sequence[Any]]
    passed: int
    shared: Any
    row: Any

    @classmethod
    def trace(cls, function: Callable[[Any, Any], Any], shared: Any, row: Any) -> _Call:
        """Traces the function and takes it apart."""
        program, result = jax.make_jaxpr(function, return_shape=True)(shared, row)
        after: list[Any] = [jax.tree.structure(part) for part in result]
        jaxpr, inputs, outputs = program.jaxpr, len(jax.tree.leaves(shared)), after[0].num_leaves
        known = {*jaxpr.constvars, *jaxpr.invars[:inputs]}
        once, each = [], []
        for equation in jaxpr.eqns:
            is_scalar = not any(out.aval.shape for out in equation.outvars)
            if is_scalar and not equation.effects and _is_made_of(known, equation.invars):
                once.append(equation)
                known.update(equation.outvars)
            else:
                each.append(equation)
        if not _is_made_of(known, jaxpr.outvars[:outputs]):
            raise NotImplementedError("what the leaves share would depend on one of them")
        used = [v for equation in each for v in equation.invars] + jaxpr.outvars[outputs:]
        passed = list(dict.fromkeys(v for v in used if not isinstance(v, Literal) and v in known))
        names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        first = jaxpr.replace(
            invars=jaxpr.invars[:inputs],
            outvars=[*passed, *jaxpr.outvars[:outputs]],
            eqns=once,
            debug_info=names,
        )
        rest = jaxpr.replace(
            constvars=[],
            invars=[*passed, *jaxpr.invars[inputs:]],
            outvars=jaxpr.outvars[outputs:],
            eqns=each,
            debug_info=names,
        )

        def update_leaf(*operands: Any) -> Sequence[Any]:
            return list(jaxpr_as_fun(ClosedJaxpr(rest, ()))(*operands))

        return cls(ClosedJaxpr(first, program.consts), jax.jit(update_leaf), len(passed), *after)

    @functools.cached_property
    def key(self) -> Any:
        """What two kinds of rows have in common that compute the same from what is shared."""
        return (str(self.once.jaxpr), *map(id, self.once.consts))

    def run(self, passed: Sequence[Any], row: Any) -> Any:
        """Returns a row after the call."""
        return jax.tree.unflatten(self.row, self.each(*passed, *jax.tree.leaves(row)))


def _is_made_of(known: Collection[Any], variables: Sequence[Any]) -> bool:
    return all(isinstance(v, Literal) or v in known for v in variables)


def _is_per_leaf(node: Node) -> bool:
    if not node.is_own:
        return False
    if node.children:
        return _is_chain(node) and all(map(_is_per_leaf, node.children))
    return transformation_name(node.factory) in PER_LEAF


def _is_chain(node: Node) -> bool:
    return node.is_own and node.factory == "chain"


def _has_some(node: Node) -> bool:
    return _is_per_leaf(node) or (_is_chain(node) and any(map(_has_some, node.children)))
