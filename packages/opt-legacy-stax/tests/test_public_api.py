"""The package exports what JAX's module does and what it says, documented and typed."""

import importlib.metadata
import inspect
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import opt_legacy_stax
import pytest
from jax.example_libraries import optimizers as theirs
from opt_legacy_stax import errors

pytestmark = pytest.mark.contract


def exported_by_jax() -> list[str]:
    """What JAX's module defines; it has no `__all__`, and its imports are no exports."""
    defined = [
        name
        for name, value in vars(theirs).items()
        if getattr(value, "__module__", "") == theirs.__name__ and not name.startswith("_")
    ]
    aliases = ["Array", "Params", "State", "Updates", "Step", "Schedule"]
    aliases += ["InitFn", "UpdateFn", "ParamsFn"]
    return sorted({*defined, *aliases})


def test_jax_exports_what_we_think() -> None:
    assert {"adam", "sm3", "JoinPoint", "OptimizerState", "make_schedule"} <= {*exported_by_jax()}


@pytest.mark.parametrize("name", exported_by_jax())
def test_names_and_signatures_are_those_of_jax(name: str) -> None:
    mine, other = getattr(opt_legacy_stax, name), getattr(theirs, name)
    if getattr(other, "__module__", "") != theirs.__name__:
        return  # an alias of a type
    assert mine.__name__ == other.__name__
    if inspect.isfunction(other):
        parameters = [
            (p.name, p.kind, p.default)
            for p in inspect.signature(mine).parameters.values()
            if p.name != "upstream_numerics"  # by keyword alone
        ]
        assert parameters == [
            (p.name, p.kind, p.default) for p in inspect.signature(other).parameters.values()
        ]


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "sm3"])
def test_functions_of_a_triple_have_the_names_of_jax(name: str) -> None:
    arguments = (0.1, 0.9) if name == "momentum" else (0.1,)
    mine, other = (getattr(m, name)(*arguments) for m in (opt_legacy_stax, theirs))
    assert [f.__name__ for f in mine] == [f.__name__ for f in other]
    assert mine._fields == other._fields


def test_all_is_what_is_public() -> None:
    public = {name for name in vars(opt_legacy_stax) if not name.startswith("_")}
    assert public == {*opt_legacy_stax.__all__}
    assert opt_legacy_stax.__all__ == sorted(opt_legacy_stax.__all__)


def test_errors_exports_what_it_defines() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert sorted(defined) == sorted(errors.__all__)
    kinds = (errors.StaxError, UserWarning)
    assert all(issubclass(getattr(errors, name), kinds) for name in defined)


def documented() -> Iterator[tuple[str, Any]]:
    for module in (opt_legacy_stax, errors):
        yield module.__name__, module
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in documented()])
def test_every_public_name_is_documented(value: Any) -> None:
    assert value.__doc__, "inherited words do not count"


def test_types_are_shipped() -> None:
    assert files("opt_legacy_stax").joinpath("py.typed").is_file()


def test_version_is_that_of_the_distribution() -> None:
    assert opt_legacy_stax.__version__ == importlib.metadata.version("opt-legacy-stax")
