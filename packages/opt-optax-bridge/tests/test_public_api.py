import importlib.metadata
import inspect
from importlib.resources import files
from typing import Any

import opt_optax_bridge
import pytest
from opt_optax_bridge import OptaxWrapper, optimizer_names, t5x

pytestmark = pytest.mark.contract

MODULES = [opt_optax_bridge, t5x]


def test_all_is_there() -> None:
    for module in MODULES:  # ruff sorts
        assert len(module.__all__) == len(set(module.__all__))
        assert all(hasattr(module, name) for name in module.__all__)


def test_all_is_what_is_public() -> None:
    helpers = {"Any", "Callable", "t5x"}
    public = {name for name in vars(opt_optax_bridge) if not name.startswith("_")} - helpers
    assert public == set(opt_optax_bridge.__all__)


def documented() -> list[Any]:
    found: list[Any] = []
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            is_ours = getattr(value, "__module__", "").startswith("opt_optax_bridge")
            if is_ours and (inspect.isfunction(value) or inspect.isclass(value)):
                found.append(pytest.param(value, id=f"{module.__name__}.{name}"))
        found.append(pytest.param(module, id=module.__name__))
    for name, member in vars(OptaxWrapper).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            found.append(pytest.param(member, id=f"OptaxWrapper.{name}"))
    return found


@pytest.mark.parametrize("value", documented())
def test_every_public_name_is_documented(value: Any) -> None:
    assert value.__doc__, "inherited words do not count"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_dir_lists_the_constructors(module: Any) -> None:
    listed = dir(module)
    assert listed == sorted(set(listed))
    assert set(optimizer_names()) | set(module.__all__) <= set(listed)


def test_types_are_shipped() -> None:
    for name in ("py.typed", "__init__.pyi", "_t5x_constructors.pyi"):
        assert files("opt_optax_bridge").joinpath(name).is_file()


def test_version_is_that_of_the_distribution() -> None:
    assert opt_optax_bridge.__version__ == importlib.metadata.version("opt-optax-bridge")
