"""The package installs and imports alone, and exports what it says."""

import importlib.metadata
import inspect
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import opt_checkpoint
import pytest
from opt_checkpoint import errors
from opt_core.errors import OptimizerError

pytestmark = pytest.mark.contract

MODULES = (opt_checkpoint, errors)
LATER = {
    "Checkpointer",
    "OptimizerHandler",
    "OptimizerHandlerV1",
    "OptimizerRestore",
    "OptimizerSave",
    "Plan",
    "Row",
    "SavedStep",
    "StepReport",
    "flax_optim_equivalent",
    "open_foreign",
    "open_step",
    "plan_restore",
    "read_legacy",
    "restore_legacy",
}  # imported when asked for


def test_all_is_there() -> None:
    for module in MODULES:  # ruff sorts
        assert len(module.__all__) == len(set(module.__all__))
        assert all(hasattr(module, name) for name in module.__all__)
    assert set(opt_checkpoint.__all__) <= set(dir(opt_checkpoint))


def test_all_is_what_is_public() -> None:
    helpers = {"Any", "TYPE_CHECKING", "importlib"}
    public = {name for name in vars(opt_checkpoint) if not name.startswith("_")} - helpers
    assert public | LATER == set(opt_checkpoint.__all__)


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'opt_checkpoint' has no attribute 'Checkpoint'"):
        opt_checkpoint.Checkpoint  # noqa: B018


def test_errors_are_those_of_opt_core() -> None:
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert defined - {"OptimizerError"} == set(errors.__all__)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.CheckpointError)
    assert issubclass(errors.CheckpointError, OptimizerError)


def documented() -> Iterator[tuple[str, Any]]:
    for module in MODULES:
        yield module.__name__, module
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield name, value
    for cls in (opt_checkpoint.Checkpointer, opt_checkpoint.SavedStep, opt_checkpoint.Plan):
        for member in vars(cls).values():
            if inspect.isfunction(member) and not member.__name__.startswith("_"):
                yield f"{cls.__name__}.{member.__name__}", member


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in documented()])
def test_every_public_name_is_documented(value: Any) -> None:
    assert value.__doc__, "inherited words do not count"


def test_types_are_shipped() -> None:
    assert files("opt_checkpoint").joinpath("py.typed").is_file()


def test_version_is_that_of_the_distribution() -> None:
    assert opt_checkpoint.__version__ == importlib.metadata.version("opt-checkpoint")
