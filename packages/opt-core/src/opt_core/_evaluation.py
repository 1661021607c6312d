"""The parameters to evaluate, for optimizers that keep an average of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp

from opt_core._trees import Names, children, named_leaves, path_str
from opt_core.errors import EvaluationError

_SCHEDULE_FREE: Final = frozenset({"b1", "weight_sum", "z"})
_LOOKAHEAD: Final = frozenset({"fast", "slow"})


def evaluation_params(params: Any, state: Any) -> Any:
    """Returns the parameters to evaluate; see `Optimizer.evaluating`."""
    # States may implement `protocols.HoldsEvalParams`. Optax's own states are recognised by their
    # fields, since this package does not import Optax.
    averages = list(_averages(params, state))
    if _fields(params) == _LOOKAHEAD:
        averages.append(("the slow parameters", {}))
        if len(averages) > 1:
            raise _conflict(averages[0][0], averages[1][0])
        params = params.slow
    leaves = dict(named_leaves(params))
    owners: dict[Names, str] = {}
    found = dict(leaves)
    for owner, average in averages:
        for path, leaf in average.items():
            if path not in leaves:
                raise EvaluationError(
                    f"{owner} has `{path_str(path)}`, which is not a parameter of this optimizer"
                )
            if path in owners:
                raise _conflict(owners[path], owner)
            owners[path] = owner
            found[path] = jnp.asarray(leaf, jnp.result_type(leaves[path]))
    return jax.tree.unflatten(jax.tree.structure(params), list(found.values()))


def _averages(params: Any, node: Any, path: Names = ()) -> Iterator[tuple[str, dict[Names, Any]]]:
    """Yields each node that keeps an average, with the average by the path of the parameter."""
    opened = children(node)
    if opened is None:
        return
    owner = f"`{path_str(path)}` ({type(node).__name__})"
    if callable(getattr(type(node), "eval_params", None)):
        yield owner, dict(named_leaves(node.eval_params(params)))
    elif _fields(node) >= _SCHEDULE_FREE:
        own, b1 = dict(named_leaves(params)), jnp.asarray(node.b1)
        z = named_leaves(node.z)
        yield owner, {at: (own[at] - (1 - b1) * leaf) / b1 for at, leaf in z if at in own}
    for name, child in opened.children:
        yield from _averages(params, child, (*path, name))


def _fields(node: Any) -> frozenset[str]:
    return frozenset(getattr(node, "_fields", ()))


def _conflict(one: str, other: str) -> EvaluationError:
    return EvaluationError(
        f"{one} and {other} both have parameters to evaluate. Keep one of them: an average of an "
        "average is neither."
    )
