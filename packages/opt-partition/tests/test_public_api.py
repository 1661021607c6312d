"""The package exports what it says, documented and typed."""

import importlib.metadata
import inspect
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import opt_partition
import pytest
from opt_partition import errors

pytestmark = pytest.mark.contract


def test_all_is_what_is_public() -> None:
    public = {name for name in vars(opt_partition) if not name.startswith("_")}
    assert public == set(opt_partition.__all__)


def test_errors_exports_what_it_defines() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert sorted(defined) == errors.__all__
    kinds = (errors.PartitionError, Warning)
    assert all(issubclass(getattr(errors, name), kinds) for name in defined)


def documented() -> Iterator[tuple[str, Any]]:
    for module in (opt_partition, errors):
        yield module.__name__, module
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value
            if inspect.isclass(value):
                for member in vars(value).values():
                    function = member.fget if isinstance(member, property) else member
                    if inspect.isfunction(function) and not function.__name__.startswith("_"):
                        yield f"{value.__name__}.{function.__name__}", function


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in documented()])
def test_every_public_name_is_documented(value: Any) -> None:
    assert value.__doc__, "inherited words do not count"


def test_types_are_shipped() -> None:
    assert files("opt_partition").joinpath("py.typed").is_file()


def test_version_is_that_of_the_distribution() -> None:
    assert opt_partition.__version__ == importlib.metadata.version("opt-partition")
