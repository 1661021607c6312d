import argparse
import dataclasses
import enum
import functools
import math
import pickle
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from core_testing import MomentumHyperParams, Pair
from flax.core import FrozenDict
from opt_core import OptimizerDef
from opt_core.extend import fingerprint

SCALE = 2.0


@dataclasses.dataclass
class Config:
    rate: Any
    other: Any = None


@dataclasses.dataclass(frozen=True)
class Nothing:
    pass


@flax.struct.dataclass
class NothingStruct:
    pass


@dataclasses.dataclass(eq=False)
class Sentinel:
    pass


class Plain:
    def __init__(self, rate: Any) -> None:
        self.rate = rate

    def schedule(self, step: Any) -> Any:
        return self.rate * step


class Scaled:
    def __init__(self, function: Any, rate: Any) -> None:
        functools.update_wrapper(self, function)
        self.rate = rate

    def __call__(self, step: Any) -> Any:
        return self.rate * len_of(step)


class Slotted(OptimizerDef):
    __slots__ = ("rate",)

    def __init__(self, rate: Any) -> None:
        super().__init__(None)
        self.rate = rate

    @functools.cached_property
    def half(self) -> Any:
        return self.rate / 2


class Role(enum.Enum):
    ROW = 1
    COLUMN = 2


def closure(rate: Any) -> Callable[[Any], Any]:
    def inner(step: Any) -> Any:
        return rate * step

    return inner


def len_of(values: Any) -> int:
    return len(values)


# Built twice from the same rate they are the same, from another they are not.
BUILDERS: dict[str, Callable[[Any], Any]] = {
    "closure": closure,
    "partial": lambda rate: functools.partial(math.pow, rate),
    "bound method": lambda rate: Plain(rate).schedule,
    "plain object": Plain,
    "object that wraps a function": lambda rate: Scaled(len_of, rate),
    "default of a dict": lambda rate: defaultdict(lambda: rate, a=1),
    "method of a dict": lambda rate: {"rate": rate}.get,
    "unhashable object": lambda rate: argparse.Namespace(rate=rate),
    "slot of a definition": Slotted,
    "dataclass": Config,
    "struct of an array": lambda rate: MomentumHyperParams(jnp.array([rate], jnp.float32)),
    "bfloat16 scalar": ml_dtypes.bfloat16,
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
def test_what_is_built_the_same_way_is_the_same(build: Callable[[Any], Any]) -> None:
    one, same, other = fingerprint(build(0.5)), fingerprint(build(0.5)), fingerprint(build(0.25))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other


def test_what_a_definition_has_cached_is_no_part_of_it() -> None:
    used = Slotted(0.5)
    assert used.half == 0.25
    assert used == Slotted(0.5)


@pytest.mark.parametrize("method", [None, "get"])
def test_what_can_change_is_what_it_holds_now(method: str | None) -> None:
    config: Any = {"rate": 0.1} if method else argparse.Namespace(rate=0.1)
    captured = closure(getattr(config, method) if method else config)
    before = fingerprint(captured)
    vars(config).update(rate=0.2) if method is None else config.update(rate=0.2)
    assert fingerprint(captured) != before


DIFFERENT: list[tuple[Any, Any]] = [
    (1, 1.0),
    ({"a": 1}, FrozenDict(a=1)),
    ({"a": 1}, OrderedDict(a=1)),
    (Pair(1, 2), (1, 2)),
    (jnp.asarray(1.0), jnp.float32(1)),
    (jax.random.key(0), jax.random.key(1)),
    ([Role.ROW, Role.ROW], [Role.ROW, Role.COLUMN]),
    (Nothing(), NothingStruct()),
    # Numbers of shared objects are not given again: an index after a container said two things.
    (((closure,), len_of, closure), ((closure,), len_of, len_of)),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_differs(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one)


EQUAL: list[tuple[Any, Any]] = [
    ([float("nan"), complex("nan")], [float("nan"), complex("nan")]),
    (jax.random.key(3), jax.random.key(3)),
    ([Role.ROW, Role.ROW], [Role.ROW, pickle.loads(pickle.dumps(Role.ROW))]),
    (Nothing(), Nothing()),
    (NothingStruct(), NothingStruct()),
]


@pytest.mark.parametrize(("one", "same"), EQUAL)
def test_what_is_equal(one: Any, same: Any) -> None:
    assert fingerprint(one) == fingerprint(same)
    assert hash(fingerprint(one)) == hash(fingerprint(same))


# An opaque object is equal only to itself.
OPAQUE: dict[str, Callable[[], Any]] = {
    "jitted": lambda: jax.jit(closure(1.0)),
    "sentinel": Sentinel,
    "masked array": lambda: np.ma.array([1.0], mask=[True]),
}


@pytest.mark.parametrize("build", OPAQUE.values(), ids=OPAQUE.keys())
def test_what_cannot_be_looked_into(build: Callable[[], Any]) -> None:
    one, other = build(), build()
    assert fingerprint(one) == fingerprint(one)
    assert fingerprint([one]) == fingerprint([one])
    assert fingerprint(one) != fingerprint(other)
    hash(fingerprint(one))


def test_a_function_that_rebinds_a_captured_number_stays_what_it_was() -> None:
    def decay(steps: int) -> Callable[[int], float]:
        def schedule(count: int) -> float:
            nonlocal steps
            steps = float(steps)  # type: ignore[assignment]  # as Optax's cosine schedule does
            return count / steps

        return schedule

    used = decay(100)
    used(3)
    assert fingerprint(used) == fingerprint(decay(100))
    assert fingerprint(used) != fingerprint(decay(200))


GLOBAL_RATES = {"rate": 0.1, "array": np.zeros(2)}
GLOBAL_SPACE = types.SimpleNamespace(rate=0.1)
GLOBAL_OBJECT = Plain(0.1)
GLOBAL_MODULE = types.ModuleType("settings")
GLOBAL_MODULE.rate = 0.1  # type: ignore[attr-defined]


class GlobalClass:
    rate = 0.1


GLOBAL_SPACES: dict[str, Any] = {
    "namespace": GLOBAL_SPACE,
    "object of this module": GLOBAL_OBJECT,
    "module": GLOBAL_MODULE,
    "class": GlobalClass,
}


def reads_globals(step: Any) -> Any:
    others = GLOBAL_OBJECT.rate, GLOBAL_MODULE.rate, GlobalClass.rate
    return reads_more(step) * GLOBAL_SPACE.rate * sum(others)


def reads_more(step: Any) -> Any:
    return [SCALE * step * GLOBAL_RATES["rate"] for _ in range(3)]


@pytest.mark.parametrize("where", ["number", "dict", "array", *GLOBAL_SPACES])
def test_a_global_that_changed_makes_another_function(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(reads_globals)
    assert fingerprint(reads_globals) == before
    match where:
        case "number":
            monkeypatch.setitem(globals(), "SCALE", 3.0)
        case "dict":  # read through another function of this module
            monkeypatch.setitem(GLOBAL_RATES, "rate", 0.5)
        case "array":
            monkeypatch.setitem(GLOBAL_RATES, "array", np.ones(2))
        case _:
            monkeypatch.setattr(GLOBAL_SPACES[where], "rate", 0.5)
    assert fingerprint(reads_globals) != before


def test_an_attribute_called_like_a_global_reads_no_global(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(reads_an_attribute)
    monkeypatch.setitem(globals(), "SCALE", 3.0)  # such as the step of a loop
    assert fingerprint(reads_an_attribute) == before


def reads_an_attribute(state: Any) -> Any:
    return state.SCALE


def test_shared_functions_are_looked_into_once() -> None:
    shared: Any = closure(1.0)
    for _ in range(60):  # 2**60 paths lead to the first
        shared = functools.partial(shared, shared, shared)
    assert hash(fingerprint(shared)) == hash(fingerprint(shared))


@pytest.mark.parametrize("container", [dict, FrozenDict])
def test_the_order_of_a_mapping_makes_no_difference(container: Any) -> None:
    shared, other = closure(1.0), closure(2.0)
    values = {"a": shared, "b": other, "c": shared, "d": Role.ROW, "e": Role.ROW}
    turned = dict(reversed(values.items()))
    assert fingerprint(container(values)) == fingerprint(container(turned))
    assert fingerprint(container(values)) != fingerprint(container({**values, "c": other}))
