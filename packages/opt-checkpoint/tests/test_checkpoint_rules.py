from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import opt_optax_bridge as opt
import pytest
from opt_checkpoint import Rename, Stack, Unstack, errors, named_state, plan_restore
from opt_checkpoint._planning.rules import KINDS
from opt_core import Optimizer

pytestmark = pytest.mark.usefixtures("optax_promotion")


def created(**arrays: Any) -> Optimizer:
    made: Optimizer = opt.sgd(0.1).create(arrays)
    return made


def restored(saved: Optimizer, target: Optimizer, rules: Any, allow: Any = ()) -> dict[str, Any]:
    result = plan_restore(named_state(saved), target, rules=rules, allow=allow).apply()
    return {name: leaf.tolist() for name, leaf in result.target.items()}


def test_the_first_rule_that_matches_decides() -> None:
    saved, target = (
        created(a=jnp.ones(1), b=jnp.zeros(1)),
        created(a=jnp.full(1, 5.0), b=jnp.ones(1)),
    )
    rules = [("params/a", "keep"), ("params/.*", "initialise")]
    assert restored(saved, target, rules) == {"a": [5.0], "b": [1.0]}
    assert restored(saved, target, rules[::-1])["a"] == [5.0]
    renamed = [("params/a", Rename("params/b")), rules[1]]
    assert restored(saved, target, renamed, {"drop"}) == {"a": [0.0], "b": [1.0]}


def test_two_leaves_may_come_from_one() -> None:
    saved, target = created(a=jnp.ones(2)), created(a=jnp.zeros(2), b=jnp.zeros(2))
    result = plan_restore(
        named_state(saved), target, rules=[("params/b", Rename("params/a"))]
    ).apply()
    assert result.target["b"].tolist() == [1.0, 1.0]
    one, other = (result.target[name].unsafe_buffer_pointer() for name in "ab")
    assert one != other


@pytest.mark.parametrize("axis", [0, -1])
def test_stacks_along_any_axis(axis: int) -> None:
    layers = {f"l{i}": jnp.arange(2.0) + 10 * i for i in range(3)}
    target = created(l=jnp.stack(list(layers.values()), axis))
    rule = ("params/l", Stack("params/l{i}", axis))
    assert restored(created(**layers), created(l=target.target["l"] * 0), [rule])["l"] == (
        target.target["l"].tolist()
    )
    back = (r"params/l(\d)", Unstack("params/l", r"\1", axis))
    zeros = {name: jnp.zeros(2) for name in layers}
    assert restored(target, created(**zeros), [back]) == {
        name: layer.tolist() for name, layer in layers.items()
    }


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (("params/l", Stack("params/l{i}", 2)), "has no axis 2 to stack"),
        (("params/l", Stack("params/l{i}", 1)), "expected `params/l0` of [3], found [2]"),
        (("params/l", Unstack("params/l0", "7")), "`params/l0` [2] has no index '7' along 0"),
        (("params/l", Unstack("params/l0", "0", -2)), "`params/l0` [2] has no axis -2"),
        (("params/l", Unstack("params/l0", "0")), "expected `params/l0` of [2, 3, 2], found [2]"),
    ],
)
def test_what_cannot_be_made_is_told(rule: Any, told: str) -> None:
    saved = created(**{f"l{i}": jnp.zeros(2) for i in range(3)})
    target = created(l=jnp.zeros((3, 2)))
    with pytest.raises(errors.PlanError) as caught:
        plan_restore(named_state(saved), target, rules=[rule], allow=KINDS).apply()
    assert told in str(caught.value)


def test_stacks_of_several_dtypes_are_refused() -> None:
    saved = created(l0=jnp.zeros(2), l1=jnp.zeros(2, jnp.bfloat16))
    plan = plan_restore(
        named_state(saved),
        created(l=jnp.zeros((2, 2))),
        rules=[("params/l", Stack("params/l{i}"))],
        allow=KINDS,
    )
    assert "have different dtypes" in str(plan)
    assert not plan.is_ok


def test_a_word_admits_its_leaves_alone() -> None:
    saved = created(a=jnp.ones(2), b=jnp.ones(2))
    target = created(a=jnp.zeros(2, jnp.bfloat16), b=jnp.zeros(2, jnp.bfloat16))
    plan = plan_restore(named_state(saved), target, rules=[("params/a", "cast")])
    assert [row.is_ok for row in plan.rows] == [True, False, True]
    assert plan.missing_kinds == {"cast"}


@pytest.mark.parametrize(
    ("allow", "rules", "error", "told"),
    [
        (
            "initialise",
            [],
            TypeError,
            "`allow` must be a set of words; found the string 'initialise': give `{'initialise'}`",
        ),
        ({"init"}, [], ValueError, "`allow`: expected words among"),
        (
            (),
            [("params/a", "forget")],
            ValueError,
            "`rules`: expected one of .*; found 'forget' for 'params/a'",
        ),
        (
            (),
            [("params/a", None)],
            TypeError,
            "NoneType is not an action; found None for 'params/a'",
        ),
        ((), [("params/(", "drop")], ValueError, "'params/\\(' is not a regular expression"),
        ((), [("params/a", Rename(r"params/\2"))], ValueError, "params/a"),
        ((), [(3, "drop")], TypeError, "`rules`"),
    ],
)
def test_what_is_no_policy_is_refused(allow: Any, rules: Any, error: type, told: str) -> None:
    saved = created(a=jnp.ones(1))
    with pytest.raises(error, match=told):
        plan_restore(named_state(saved), saved, allow=allow, rules=rules)
