"""The names of the package are those of the installed Optax."""

import json
import subprocess
import sys
from importlib.resources import files
from typing import Any

import opt_optax_bridge
import pytest
from opt_optax_bridge import optimizer_names, t5x

PROGRAM = """
import json
import optax, optax.contrib
del optax.adamw, optax.contrib.muon          # an Optax without them
class Odd:
    __signature__ = property(lambda self: 1 / 0)
    def __call__(self, learning_rate): ...
optax.odd = Odd()                            # and with something strange
import opt_optax_bridge, opt_optax_bridge.t5x
print(json.dumps(opt_optax_bridge.optimizer_names()))
"""


@pytest.mark.parametrize("module", [opt_optax_bridge, t5x], ids=lambda module: module.__name__)
def test_dir_lists_the_constructors(module: Any) -> None:
    listed = dir(module)
    assert listed == sorted(set(listed))
    assert set(optimizer_names()) | set(module.__all__) <= set(listed)


def test_stubs_are_shipped() -> None:
    for name in ("__init__.pyi", "_t5x_constructors.pyi"):
        assert files("opt_optax_bridge").joinpath(name).is_file()


def test_another_optax_gives_other_names() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    names = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"adam", "lion"} <= names
    assert not {"adamw", "muon", "odd"} & names
