import importlib.metadata
import inspect
from importlib.resources import files

import opt_nnx
import pytest
from opt_nnx import Optimizer

pytestmark = pytest.mark.contract


def test_all_is_what_is_public() -> None:
    assert {name for name in vars(opt_nnx) if not name.startswith("_")} == set(opt_nnx.__all__)


def test_every_public_name_is_documented() -> None:
    own = {name: member for name, member in vars(Optimizer).items() if not name.startswith("_")}
    methods = [member for member in own.values() if inspect.isfunction(member)]
    assert {member.__name__ for member in methods} == {
        *("update", "evaluating", "to_core", "load_core", "place"),
        *("resolve_hyper_params", "state_dict", "restore_state"),
    }
    assert all(member.__doc__ for member in (opt_nnx, Optimizer, Optimizer.definition, *methods))


def test_the_constructor_is_that_of_the_design() -> None:
    assert list(inspect.signature(Optimizer.__init__).parameters) == [
        *("self", "model", "tx", "wrt", "mesh", "rules", "zero", "graph"),
    ]


def test_types_are_shipped() -> None:
    assert files("opt_nnx").joinpath("py.typed").is_file()


def test_version_is_that_of_the_distribution() -> None:
    assert opt_nnx.__version__ == importlib.metadata.version("opt-nnx")
