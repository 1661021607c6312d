"""Which group a leaf belongs to."""

import copy
import itertools
import pickle
import re
import warnings
from collections import OrderedDict
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import pytest
from core_testing import Momentum, assert_same, given, structure, trees
from flax_optim import GradientDescent, traversal
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from opt_core import FROZEN, MultiOptimizer, OptimizerDef
from opt_core.errors import GroupError
from opt_core.extend import flatten_with_paths, path_str

PARAMS = {
    "decoder": {"wi": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "norm": jnp.ones(2)},
    "embed": jnp.ones((4, 2), jnp.int32),
}
FLOATS = {**PARAMS, "embed": jnp.ones((4, 2))}
AXES = {
    "decoder": {"wi": {"kernel": P("embed", "mlp"), "bias": P("mlp")}, "norm": P("embed")},
    "embed": P("vocab", "embed"),
}


def members(definition: MultiOptimizer, params: Any = None) -> dict[str, list[str]]:
    division = definition.select(PARAMS if params is None else params)
    return {
        name: [path_str(division.paths[i]) for i in positions]
        for name, positions in division.members.items()
    }


PATTERNS: dict[str, tuple[Any, list[str]]] = {
    "expression": (r"decoder/.*(bias|norm)", ["decoder/norm", "decoder/wi/bias"]),
    "compiled": (re.compile(r"DECODER/.*kernel", re.IGNORECASE), ["decoder/wi/kernel"]),
    "shape": (lambda path, leaf: leaf.ndim == 2, ["decoder/wi/kernel", "embed"]),
    "dtype": (lambda path, leaf: leaf.dtype == jnp.int32, ["embed"]),
    "axes": ({"embed"}, ["decoder/norm", "decoder/wi/kernel", "embed"]),
    "traversal": (traversal(lambda path: path == "/decoder/wi/bias"), ["decoder/wi/bias"]),
}


@pytest.mark.parametrize(("pattern", "expected"), PATTERNS.values(), ids=PATTERNS.keys())
def test_patterns(pattern: Any, expected: list[str]) -> None:
    rules = [("group", pattern, GradientDescent(0.1))]
    definition = MultiOptimizer.from_rules(rules, rest=FROZEN, param_axes=AXES)
    assert members(definition)["group"] == expected


def test_traversals_of_flax_see_containers_and_shapes_and_never_values() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        part = flax.traverse_util.t_identity["decoder"]["wi"]
        by_rank = flax.traverse_util.ModelParamTraversal(lambda path, value: value.ndim > 1)
        by_value = flax.traverse_util.ModelParamTraversal(lambda path, value: value.sum() > 0)
    assert members(MultiOptimizer((part, Momentum())))["0"] == [
        "decoder/wi/bias",
        "decoder/wi/kernel",
    ]
    optimizer = MultiOptimizer((by_rank, Momentum())).create(FLOATS)
    optimizer = jax.jit(lambda o: o.apply_gradient(FLOATS))(optimizer)
    assert optimizer.state.param_states["0"]["decoder"]["norm"] == ()
    assert_same(optimizer.restore_state(optimizer.state_dict()), optimizer)
    with pytest.raises(GroupError, match=r"ModelParamTraversal: .*sum.*never its values"):
        MultiOptimizer((by_value, Momentum())).create(PARAMS)


MADE = (traversal(lambda p: "kernel" in p), Momentum(0.1)), ("embed", Momentum(0.2))


def test_rows_and_names() -> None:
    rules: list[Any] = [("tables", "embed", Momentum()), (".*/wi/.*", FROZEN)]
    definition = MultiOptimizer.from_rules(rules, rest=Momentum(0.1))
    assert members(definition) == {
        "tables": ["embed"],
        "1": ["decoder/wi/bias", "decoder/wi/kernel"],
        "rest": ["decoder/norm"],
    }
    assert definition.group_names == ("tables", "rest")
    named = MultiOptimizer(*MADE, names=["kernels", "tables"])
    assert named.group_names == ("kernels", "tables")


class Transformation:
    """As Optax's."""

    def init(self) -> None: ...

    def update(self) -> None: ...


def created_by(pattern: Any) -> Any:
    return MultiOptimizer.from_rules([(pattern, Momentum())], rest=FROZEN).create(PARAMS)


def pairs_of(*values: Any) -> Any:
    """What type checkers would refuse."""
    return values


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "nothing": (lambda: MultiOptimizer([]), GroupError, "there is no group"),
    "transformation": (
        lambda: MultiOptimizer(*pairs_of(("a", Transformation()))),
        TypeError,
        r"OptaxWrapper\(tx\)",
    ),
    "twice": (lambda: MultiOptimizer(*MADE, names=["a", "a"]), GroupError, "two groups .* `a`"),
    "root": (lambda: MultiOptimizer(*MADE, names=["a", "."]), GroupError, "and not `.`; got '.'"),
    "expression": (lambda: MultiOptimizer(("(", Momentum())), GroupError, "is not a valid regular"),
    "traversal": (
        lambda: MultiOptimizer(MADE[1], (traversal(lambda p: False), Momentum())).create(PARAMS),
        GroupError,
        r"`1` \(ModelParamTraversal\) matches no parameter",
    ),
    "unknown axes": (
        lambda: MultiOptimizer(({"embed"}, Momentum())).create(PARAMS),
        GroupError,
        "axes embed: the logical axes are not known",
    ),
    "axes of some": (
        lambda: MultiOptimizer.from_rules(
            [({"embed"}, Momentum())], rest=FROZEN, param_axes={"decoder": AXES["decoder"]}
        ).create(PARAMS),
        GroupError,
        "`param_axes` have nothing for `embed`",
    ),
    "two keys of one name": (
        lambda: MultiOptimizer((".*", Momentum())).create(OrderedDict([(1, 1.0), ("1", 2.0)])),
        GroupError,
        r"`\[1\]` and `\['1'\]` have the same path, `1`",
    ),
    "function of the path alone": (
        lambda: created_by(lambda path: True),
        GroupError,
        r"<lambda>: .* A pattern is a function of `\(path, leaf\)`",
    ),
    "no answer": (
        lambda: created_by(lambda path, leaf: "norms"),
        GroupError,
        "returns 'norms' for `decoder/norm`: a pattern says whether",
    ),
}


@pytest.mark.parametrize(("make", "error", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_is_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_a_state_without_groups_has_no_state_dict_by_groups() -> None:
    groups = MultiOptimizer((".*", Momentum()))
    swapped = Momentum().create(PARAMS).replace(optimizer_def=groups)
    with pytest.raises(GroupError, match="expected `GroupStates` of the groups"):
        swapped.state_dict()


def test_one_error_tells_everything() -> None:
    definition = MultiOptimizer.from_rules(
        [
            ("kernels", ".*kernel", Momentum()),
            ("wi", "decoder/wi/.*", Momentum()),
            ("tables", "embedding", Momentum()),
            ("part", "bed", FROZEN),
        ]
    )
    with pytest.raises(GroupError) as caught:
        definition.create(PARAMS)
    assert str(caught.value) == (
        "the groups do not divide the parameters:\n"
        "  `decoder/norm` is matched by no group\n"
        "  `decoder/wi/kernel` is matched by `kernels` ('.*kernel') and `wi` ('decoder/wi/.*')\n"
        "  `embed` is matched by no group\n"
        "  `tables` ('embedding') matches no parameter\n"
        "  `part` ('bed') matches no parameter; a part of the path matches for 1: write '.*' "
        "around it\n"
        "A pattern must match the whole path of a leaf. Every leaf needs exactly one group: make "
        "the patterns disjoint, or say `rest=FROZEN` or `rest=` a definition."
    )


def test_definitions_compare_hash_copy_and_pickle() -> None:
    def make(rate: float = 0.1, pattern: str = "a") -> MultiOptimizer:
        return MultiOptimizer.from_rules([(pattern, Momentum(rate))], rest=FROZEN)

    one = make()
    assert one == make()
    assert hash(one) == hash(make())
    assert one != make(0.2)
    assert one != make(pattern="b")
    division = one.create({"a": jnp.ones(2), "b": jnp.ones(2)}).state.param_states.division
    for value in (one, division):
        fresh = pickle.dumps(value)
        hash(value)
        assert pickle.dumps(value) == fresh  # no hash of this process is in it
        for again in (copy.deepcopy(value), pickle.loads(fresh)):
            assert again == value
    with pytest.raises(AttributeError, match="`groups`: a `MultiOptimizer` cannot change"):
        one.groups = ()


class SeesAxes(OptimizerDef):
    """Remembers the axes that it is given."""

    given_axes: Any = None

    def set_param_axes(self, param_axes: Any) -> None:
        self.given_axes = param_axes


def test_axes_reach_copies_of_the_definitions() -> None:
    shared = SeesAxes(None)
    definition = MultiOptimizer((".*kernel", shared), ("embed", shared))
    before = hash(definition)
    definition.set_param_axes(AXES)
    first, second = definition.sub_optimizers
    assert first.given_axes == {"decoder": {"wi": {"kernel": P("embed", "mlp")}}}  # type: ignore[attr-defined]
    assert second.given_axes == {"embed": P("vocab", "embed")}  # type: ignore[attr-defined]
    assert shared.given_axes is None
    assert hash(definition) != before
    plain = MultiOptimizer((".*kernel", shared), ("embed", shared))
    assert plain.with_param_axes(AXES) == definition
    assert plain.param_axes is None


def test_axes_may_come_before_any_parameter() -> None:
    """A group that asks for shapes is given every leaf that no path gives to another group."""
    rules = [
        ("embeddings", "embed", SeesAxes(None)),
        ("matrices", lambda path, leaf: leaf.ndim == 2 and path != "embed", SeesAxes(None)),
    ]
    definition = MultiOptimizer.from_rules(rules, rest=SeesAxes(None), param_axes=AXES)
    first, *others = [d.given_axes for d in definition.sub_optimizers]  # type: ignore[attr-defined]
    assert first == {"embed": AXES["embed"]}
    assert others == [{k: v for k, v in AXES.items() if k != "embed"}] * 2
    assert list(map(len, definition.select(PARAMS).members.values())) == [1, 1, 2]


@given(tree=trees, data=st.data())
def test_every_leaf_of_every_tree_has_one_group(tree: Any, data: st.DataObject) -> None:
    """Cut into groups and put together again, a tree is itself."""
    leaves = [names for names, leaf in flatten_with_paths(tree) if leaf is not None]
    if not leaves:
        return
    chosen = data.draw(st.sets(st.sampled_from(leaves)))
    paths = {path_str(names) for names in chosen}
    definition = MultiOptimizer.from_rules(
        [("a", lambda path, leaf: path in paths, Momentum())] if chosen else [], rest=FROZEN
    )
    division = definition.select(tree)
    values = jax.tree.leaves(tree)
    again: list[Any] = [None] * len(values)
    for name in division.names:
        division.paste(name, division.cut(name, tree), again)
    assert all(a is b for a, b in zip(again, values, strict=True))
    positions = itertools.chain(*division.members.values())
    assert sorted(positions) == list(range(len(values)))


def by_rank() -> MultiOptimizer:
    matrices = ("matrices", lambda path, leaf: leaf.ndim == 2, Momentum(0.1))
    return MultiOptimizer.from_rules([matrices], rest=Momentum(0.5))


def test_a_leaf_stays_in_the_group_of_its_creation() -> None:
    """Created under `vmap`, used outside, where the pattern would answer otherwise."""
    params = {"kernel": jnp.ones((2, 2, 3)), "bias": jnp.ones((2, 3))}
    optimizer = jax.vmap(by_rank().create)(params)
    expected = jax.vmap(lambda o, g: o.apply_gradient(g))(optimizer, params)
    assert expected.target["bias"][0, 0] == 0.5
    # The step is stacked too, and nothing here depends on it.
    outside = optimizer.replace(state=optimizer.state.replace(step=jnp.int32(0)))
    for stepped in (
        outside.apply_gradient(params),
        jax.jit(lambda o: o.apply_gradient(params))(outside),
        copy.deepcopy(outside).apply_gradient(params),
        outside.replace(optimizer_def=by_rank()).apply_gradient(params),
    ):
        assert_same(stepped.target, expected.target)
        assert_same(stepped.state.param_states, expected.state.param_states)
    written = expected.state_dict()
    assert_same(optimizer.restore_state(written), expected)
    assert structure(jax.eval_shape(jax.vmap(by_rank().create), params)) == structure(optimizer)
    # Where an optimizer is created for these shapes, the same definition divides them again.
    assert by_rank().create(params).apply_gradient(params).target["bias"][0, 0] == 0.9


def test_other_groups_and_other_parameters_are_refused() -> None:
    one = MultiOptimizer.from_rules([("a", ".*kernel", Momentum())], rest=Momentum())
    optimizer = one.create(FLOATS)
    other = MultiOptimizer.from_rules([("b", ".*kernel", Momentum())], rest=Momentum())
    with pytest.raises(GroupError, match=r"expected `GroupStates` of the groups \['b', 'rest'\]"):
        optimizer.replace(optimizer_def=other).apply_gradient(FLOATS)
    frozen = MultiOptimizer.from_rules([("a", ".*kernel", Momentum()), ("b", "embed", FROZEN)])
    frozen = frozen.with_groups([*frozen.groups, one.groups[-1]])
    with pytest.raises(GroupError, match=r"found \['a', 'rest'\], of which some are frozen"):
        optimizer.replace(optimizer_def=frozen).apply_gradient(FLOATS)
    fewer = {**FLOATS, "more": jnp.ones(2)}
    del fewer["embed"]
    with pytest.raises(GroupError) as caught:
        optimizer.replace(target=fewer).apply_gradient(fewer)
    assert "`embed`: expected a leaf, found nothing" in str(caught.value)
    assert "`more`: expected nothing, found a leaf" in str(caught.value)


def test_a_definition_may_keep_nothing_for_some() -> None:
    inner = MultiOptimizer.from_rules([(".*kernel", Momentum())], rest=FROZEN)
    params = {"a": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "b": jnp.ones(3)}
    definition = MultiOptimizer.from_rules([("a/.*", inner), ("b", Momentum())])
    optimizer = jax.jit(lambda o: o.apply_gradient(params))(definition.create(params))
    optimizer = optimizer.apply_gradient(params)
    assert int(optimizer.state.step) == 2
    written = optimizer.state_dict()
    assert written["state"]["param_states"]["a"]["bias"] is None
    assert_same(definition.create(params).restore_state(written), optimizer)


def test_leaves_that_are_not_arrays() -> None:
    rules = [(lambda path, leaf: leaf.ndim == 1, Momentum())]
    vectors = MultiOptimizer.from_rules(rules, rest=FROZEN)
    assert members(vectors, {"w": 1.0, "b": jnp.ones(3)})["0"] == ["b"]
    with pytest.raises(GroupError, match=r"`ndim` of `act`, which is not an array but a "):
        vectors.create({"b": jnp.ones(3), "act": jax.nn.relu})
