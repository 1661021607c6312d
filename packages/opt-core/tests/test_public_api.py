import importlib.metadata
import inspect
import typing
from collections.abc import Iterator
from importlib.resources import files
from types import ModuleType
from typing import Any

import opt_core
import pytest
from opt_core import closures, errors, json_records, protocols, state_changes, storage, t5x

pytestmark = pytest.mark.contract

MODULES = [opt_core, closures, errors, json_records, protocols, state_changes, storage, t5x]


def test_all_is_what_is_public() -> None:
    assert len(opt_core.__all__) == len(set(opt_core.__all__))
    public = {name for name in vars(opt_core) if not name.startswith("_")}
    modules = {"closures", "json_records", "state_changes", "storage", "t5x"}
    assert public - modules == set(opt_core.__all__)


@pytest.mark.parametrize("module", [errors, protocols], ids=lambda m: m.__name__)
def test_submodules_export_what_they_define(module: ModuleType) -> None:
    defined = {
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__
    }
    assert sorted(defined) == module.__all__


def documented() -> Iterator[tuple[str, Any]]:
    for module in MODULES:
        yield module.__name__, module
        for name in module.__all__:
            value = getattr(module, name)
            if typing.get_origin(value) is typing.Literal:
                continue  # an alias: its words are in the source alone
            yield f"{module.__name__}.{name}", value
            if inspect.isclass(value):
                for member in vars(value).values():
                    if inspect.isfunction(member) and member.__module__.startswith("opt_core"):
                        yield f"{value.__name__}.{member.__name__}", member


@pytest.mark.parametrize(
    "value", [pytest.param(value, id=name) for name, value in documented() if "._" not in name]
)
def test_every_public_name_is_documented(value: Any) -> None:
    if getattr(value, "__name__", "") != "replace":  # flax.struct writes it
        assert inspect.getdoc(value)
        assert value.__doc__, "inherited words do not count"


def test_types_are_shipped() -> None:
    assert files("opt_core").joinpath("py.typed").is_file()


def test_version_is_that_of_the_distribution() -> None:
    assert opt_core.__version__ == importlib.metadata.version("opt-core")
