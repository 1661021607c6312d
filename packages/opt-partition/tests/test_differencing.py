"""What changing sizes tells, and that no threshold is crossed by it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from opt_partition._axes.differencing import difference
from opt_partition._axes.param_axes import parameters
from opt_partition._axes.probing import Prober
from opt_partition._axes.verdicts import Verdict, Wanted
from opt_partition._trees import flatten_with_paths


def verdicts(init: Callable[[Any], Any], *shapes: tuple[int, ...]) -> list[tuple[Verdict, ...]]:
    """The verdicts on a state whose leaves are in a dict like the parameters'."""
    params = {f"p{i}": jax.ShapeDtypeStruct(shape, "float32") for i, shape in enumerate(shapes)}
    table = parameters(params, dict.fromkeys(params))
    index = {parameter.path: i for i, parameter in enumerate(table)}
    state = jax.eval_shape(init, params)
    wanted = []
    for path, leaf in flatten_with_paths(state):
        parameter = index.get(path[-1].key)
        place = None if parameter is None else (len(path) - 1, len(path))
        wanted.append(Wanted(path, leaf.shape, parameter, place))
    prober = Prober(init, jax.tree.structure(params), table)
    found = difference(prober, table, wanted, state)
    return [found[leaf.path] for leaf in wanted]


def each(make: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable[[Any], Any]:
    """An `init` that makes, of nothing but its shape, one leaf of each parameter."""
    return lambda params: jax.tree.map(lambda p: jnp.zeros(make(p.shape)), params)


SIZES = [(8, 6), (6, 8), (8, 8), (1, 5), (5, 1), (1, 1), (2, 2), (0, 3), (300, 127)]


@pytest.mark.parametrize("shape", SIZES)
def test_rows_columns_and_neither(shape: tuple[int, ...]) -> None:
    assert verdicts(each(lambda s: s[:1]), shape) == [(Verdict(0),)]
    assert verdicts(each(lambda s: s[1:]), shape) == [(Verdict(1),)]
    assert verdicts(each(lambda s: s[::-1]), shape) == [(Verdict(1), Verdict(0))]
    assert verdicts(each(lambda s: (3, *s)), shape) == [(Verdict(), Verdict(0), Verdict(1))]
    assert verdicts(each(lambda s: (1,)), shape) == [(Verdict(),)]


def test_both_dimensions_of_a_gram_matrix_follow_one() -> None:
    assert verdicts(each(lambda s: (s[0], s[0])), (4, 7)) == [(Verdict(0), Verdict(0))]


def test_merged_dimensions_follow_none() -> None:
    [(verdict,)] = verdicts(each(lambda s: (s[0] * s[1],)), (4, 7))
    assert (verdict.dim, verdict.is_known) == (None, True)
    assert verdict.note == "computed from the parameter dimensions 0, 1"
    [(verdict,)] = verdicts(each(lambda s: (3 * s[0],)), (4, 7))
    assert verdict.note == "grows 3 times as much as parameter dimension 0"


@pytest.mark.parametrize("block", [4, 5, 128])
def test_blocks_are_seen_and_not_taken_for_nothing(block: int) -> None:
    """As the scales of quantised moments."""
    [(first, second)] = verdicts(each(lambda s: (s[0], -(-s[1] // block))), (6, 2 * block))
    assert first == Verdict(0)
    assert not second.is_known
    assert second.note == "counts blocks of parameter dimension 1"
    [(verdict,)] = verdicts(each(lambda s: (-(-s[0] // block),)), (2 * block + 1, 7))
    assert not verdict.is_known, "the last block is a part of one"
    [(verdict,)] = verdicts(each(lambda s: (s[0] * s[1] // block,)), (4 * block, 2 * block))
    assert verdict.dim is None


def factor(threshold: int) -> Callable[[Any], Any]:
    """Rows if both sizes reach a threshold, else a placeholder."""
    return each(lambda s: s[:1] if min(s) >= threshold else (1,))


@pytest.mark.parametrize("size", range(125, 132))
@pytest.mark.parametrize("other", [127, 128, 500])
def test_thresholds_are_not_crossed(size: int, other: int) -> None:
    is_factored = min(size, other) >= 128
    expected = Verdict(0) if is_factored else Verdict()
    for shape in ((size, other), (size, other, 7)[:2]):
        assert verdicts(factor(128), shape) == [(expected,)]


@pytest.mark.parametrize("shape", [(6, 8), (8, 6), (7, 8), (8, 7)])
def test_the_order_of_sizes_is_not_crossed(shape: tuple[int, ...]) -> None:
    [(verdict,)] = verdicts(each(lambda s: (max(s),)), shape)
    assert verdict == Verdict(shape.index(8))


def test_a_tie_that_only_the_order_decides_is_not_guessed() -> None:
    [(verdict,)] = verdicts(each(lambda s: (max(s),)), (8, 8))
    assert not verdict.is_known
    assert verdict.note == "changes of parameter dimension 0 give inconsistent results"


def test_an_init_that_takes_no_other_sizes() -> None:
    def init(params: Any) -> Any:
        assert params["p0"].shape == (4, 7), "only this one"
        return {"p0": jnp.zeros(4)}

    [(verdict,)] = verdicts(init, (4, 7))
    assert not verdict.is_known
    assert verdict.note == "sizes cannot be changed: AssertionError: only this one"


def test_one_parameter_of_each_kind_is_looked_at() -> None:
    seen = []

    def init(params: Any) -> Any:
        seen.append(len(jax.tree.leaves(params)))
        return jax.tree.map(lambda p: jnp.zeros(p.shape[:1]), params)

    found = verdicts(init, *[(8, 6)] * 50, *[(6, 8)] * 50)
    assert found == [(Verdict(0),)] * 100
    assert seen[1:-1] == [2] * (len(seen) - 2)
    assert seen[-1] == 100, "once, whether what holds for these holds for all"
    assert len(seen) < 10


def test_parameters_of_one_kind_that_are_treated_differently() -> None:
    """Each other layer keeps the columns; nothing but its number tells them apart."""

    def init(params: Any) -> Any:
        kept = enumerate(params.values())
        return {f"p{i}": jnp.zeros(p.shape[i % 2 :][:1]) for i, p in kept if hasattr(p, "shape")}

    found = verdicts(init, *[(8, 8)] * 6)
    assert [verdict.dim for [verdict] in found] == [0, 1] * 3


def test_kinds_that_do_not_stand_for_one_another_are_looked_at_together() -> None:
    """Where a leaf is made of all parameters, one of each kind makes another leaf."""

    def init(params: Any) -> Any:
        return {"all": jnp.zeros(sum(p.size for p in jax.tree.leaves(params)))}

    [(verdict,)] = verdicts(init, (3,), (3,), (3,))
    assert verdict.dim is None
    assert verdict.is_known


def test_leaves_without_a_path_find_their_parameter() -> None:
    def init(params: Any) -> Any:
        return [jnp.zeros(p.shape[::-1]) for p in jax.tree.leaves(params)]

    params = {
        name: jax.ShapeDtypeStruct((3, 3 + i % 2), "float32") for i, name in enumerate("abcde")
    }
    table = parameters(params, dict.fromkeys(params))
    prober = Prober(init, jax.tree.structure(params), table)
    state = jax.eval_shape(init, params)
    leaves = list(flatten_with_paths(state))
    found = difference(prober, table, [Wanted(p, leaf.shape, None) for p, leaf in leaves], state)
    assert [found[path] for path, _ in leaves] == [
        (Verdict(1, parameter=i), Verdict(0, parameter=i)) for i in range(5)
    ]
