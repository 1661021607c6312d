"""Which parameter a state leaf belongs to, by its place."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from opt_partition._axes.matching import match_leaves
from opt_partition._axes.param_axes import parameters
from opt_partition._trees import flatten_with_paths, path_str


class Pair(NamedTuple):
    mu: Any
    nu: Any


def owners(params: Any, state: Any) -> dict[str, set[str]]:
    """The parameters that each leaf may belong to, by path."""
    axes = jax.tree.map(lambda _: None, params)
    table = parameters(params, axes)
    matches = match_leaves(params, state, table)
    return {
        path_str(path): {table[match.parameter].path for match in found}
        for (path, _), found in zip(flatten_with_paths(state), matches, strict=True)
    }


X = jnp.ones(2)
NESTED = {"mlp": {"wi": X, "wo": X}, "norm": X}


def test_mirrors_wherever_they_are() -> None:
    state = (optax.EmptyState(), {"count": 0, "trees": [NESTED, NESTED]})
    found = owners(NESTED, state)
    assert found.pop("1/count") == set()
    assert found == {
        f"1/trees/{i}/{path}": {path} for i in range(2) for path in ("mlp/wi", "mlp/wo", "norm")
    }


def test_holes_and_subtrees() -> None:
    masked = {"mlp": optax.MaskedNode(), "norm": {"real": X, "imaginary": X}}
    assert owners(NESTED, Pair(masked, 0)) == {
        "mu/norm/real": {"norm"},
        "mu/norm/imaginary": {"norm"},
        "nu": set(),
    }


def test_lists_in_lists() -> None:
    """As SM3: one list of vectors per parameter, whose places look like those of parameters."""
    assert owners([X, X], {"mu": [[X, X], [X, X]]}) == {
        "mu/0/0": {"0"},
        "mu/0/1": {"0"},
        "mu/1/0": {"1"},
        "mu/1/1": {"1"},
    }


def test_a_chain_of_states_is_not_a_tuple_of_parameters() -> None:
    state = (optax.TraceState((X, (X,))), optax.EmptyState())
    assert owners((X, (X,)), state) == {"0/trace/0": {"0"}, "0/trace/1/0": {"1/0"}}
    sm3 = optax.ScaleBySM3State(([X, X], [X]), (X, X))
    assert owners((X, X), (sm3, optax.TraceState((X, X)))) == {
        "0/mu/0/0": {"0"},
        "0/mu/0/1": {"0"},
        "0/mu/1/0": {"1"},
        "0/nu/0": {"0"},
        "0/nu/1": {"1"},
        "1/trace/0": {"0"},
        "1/trace/1": {"1"},
    }


def test_a_number_alone_names_nothing() -> None:
    params = Pair(X, [X])
    assert owners(params, (optax.ScaleByAdamState(X, params, params),))["0/count"] == set()


def test_parameters_with_the_names_of_fields() -> None:
    params = Pair(X, X)
    assert owners(params, optax.ScaleByAdamState(X, params, params)) == {
        "count": set(),
        "mu/mu": {"mu"},
        "mu/nu": {"nu"},
        "nu/mu": {"mu"},
        "nu/nu": {"nu"},
    }


def test_one_array_owns_everything() -> None:
    assert owners(X, (X, {"a": X})) == {"0": {"."}, "1/a": {"."}}


def test_a_part_of_the_parameters() -> None:
    """As Lookahead: the state is one of half of the parameters."""
    params = optax.LookaheadParams(NESTED, NESTED)
    assert owners(params, {"mu": NESTED})["mu/mlp/wi"] == {"fast/mlp/wi", "slow/mlp/wi"}


def test_the_longest_run_of_keys_decides() -> None:
    params = {"a": {"w": X}, "b": {"w": X}}
    assert owners(params, {"rows": {"a": {"w": X}}, "a": {"b": {"w": X}}}) == {
        "rows/a/w": {"a/w"},
        "a/b/w": {"b/w"},
    }


@pytest.mark.parametrize("params", [{}, [], ()])
def test_no_parameters(params: Any) -> None:
    assert owners(params, (X,)) == {"0": set()}
