"""The parameters to evaluate, wherever in a state they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path

from opt_accumulate._trees import path_str, walk
from opt_accumulate.errors import EvaluationError


@runtime_checkable
class HoldsMasterParams(Protocol):
    """A state that keeps the parameters in higher precision than the model has them.

    Structural: a class of states only needs a method of this name.
    """

    def master_params(self, params: Any) -> Any:
        """Returns a tree like `params`, of float32 or wider where it has more precision.

        Args:
          params: the parameters that belong to the state.
        """


@runtime_checkable
class HoldsEvalParams(Protocol):
    """A state that keeps the parameters to evaluate, such as `AverageState`.

    Structural: a class of states only needs a method of this name.
    """

    def eval_params(self, params: Any) -> Any:
        """Returns a tree like `params`, with `optax.MaskedNode()` for those it does not keep.

        Args:
          params: the parameters that belong to the state.
        """


_SCHEDULE_FREE = {"b1", "weight_sum", "z"}  # fields of a state that Optax does not export


class _Provider(NamedTuple):
    name: str
    leaves: dict[str, Any]


def eval_params(state: Any, params: Any) -> Any:
    """Returns the parameters to evaluate: an average of them, if an optimizer keeps one.

    At any depth of the state it finds the average of `with_average` (or any `HoldsEvalParams`),
    the one that `optax.contrib.schedule_free` implies, and the slow parameters of
    `optax.lookahead`. Without these it returns the master copy (`HoldsMasterParams`), if there
    is one, or `params`. In `optax.partition` and in groups, each part may have its own.
    Traceable.

    Args:
      state: the state of an optimizer, or any tree that contains it.
      params: the parameters that belong to it; with `optax.lookahead` its `LookaheadParams`.

    Returns:
      A tree like `params`, in their dtypes; with `optax.lookahead` like the slow ones.

    Raises:
      EvaluationError: two of them provide the same parameter, or one provides a parameter that is
        not in `params`.

    Examples:
      >>> from opt_accumulate import with_average
      >>> tx = optax.chain(optax.clip(1.0), with_average(optax.sgd(1.0), 0.9))
      >>> params = jnp.zeros(2, jnp.bfloat16)
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(-jnp.ones(2), state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> found = eval_params(state, params)
      >>> str(found.dtype), [round(float(x), 2) for x in found]
      ('bfloat16', [0.1, 0.1])
    """
    providers = list(_providers(state, params))
    if isinstance(params, optax.LookaheadParams):
        providers.append(_Provider("the slow parameters", {}))
        if len(providers) > 1:
            raise _conflict(providers[0], providers[1], "")
        params = params.slow
    structure = jax.tree.structure(params)
    leaves = _by_path(params)
    owners: dict[str, _Provider] = {}
    for provider in providers:
        for path in provider.leaves:
            if path not in leaves:
                raise EvaluationError(
                    f"{provider.name} of `state` has `{path}`, which `params` lack. "
                    "Pass the parameters that the state belongs to."
                )
            if path in owners:
                raise _conflict(owners[path], provider, path)
            owners[path] = provider
    if providers:
        found = [owners[path].leaves[path] if path in owners else leaves[path] for path in leaves]
    else:
        found = jax.tree.leaves(master_params(state, params))
    cast = [_cast(new, old) for new, old in zip(found, leaves.values(), strict=True)]
    return jax.tree.unflatten(structure, cast)


def master_params(state: Any, params: Any) -> Any:
    """Returns the parameters as precisely as a state has them."""
    for _, node in walk(state):
        if callable(getattr(type(node), "master_params", None)):
            params = node.master_params(params)
    return params


def _providers(state: Any, params: Any) -> Iterator[_Provider]:
    own = _by_path(params)
    for path, node in walk(state):
        name = f"the `{type(node).__name__}` at `{path_str(path)}`"
        if callable(getattr(type(node), "eval_params", None)):
            yield _Provider(name, _by_path(node.eval_params(params)))
        elif set(getattr(node, "_fields", ())) >= _SCHEDULE_FREE:
            # Optax's own function wants all of the parameters, which a part of a partition has not.
            z, b1 = _by_path(node.z), jnp.asarray(node.b1)
            leaves = {at: (own[at] - (1 - b1) * leaf) / b1 for at, leaf in z.items() if at in own}
            yield _Provider(name, leaves)


def _by_path(tree: Any) -> dict[str, Any]:
    # By name: a group may see a dict where the parameters are a `FrozenDict`.
    return {path_str(path): leaf for path, leaf in tree_leaves_with_path(tree)}


def _conflict(one: _Provider, other: _Provider, path: str) -> EvaluationError:
    of = f" of `{path}`" if path else ""
    return EvaluationError(
        f"{one.name} and {other.name} both provide parameters to evaluate{of}. Keep only one of "
        "them."
    )


def _cast(new: Any, old: Any) -> Any:
    dtype = jnp.result_type(old)
    return new if jnp.result_type(new) == dtype else jax.lax.convert_element_type(new, dtype)
