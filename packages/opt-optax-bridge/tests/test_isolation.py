"""Importing the package imports nothing that it does not declare, whatever Optax exports."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.contract

PROGRAM = """
import json, sys
import jax, flax.struct, flax.core, numpy
import optax, optax.contrib
before = set(sys.modules)
del optax.adamw, optax.contrib.muon          # an Optax without them
class Odd:
    __signature__ = property(lambda self: 1 / 0)
    def __call__(self, learning_rate): ...
optax.odd = Odd()                            # and with something strange
import opt_optax_bridge, opt_optax_bridge.t5x
new = {name.partition(".")[0] for name in set(sys.modules) - before}
names = opt_optax_bridge.optimizer_names()
print(json.dumps({"new": sorted(new - sys.stdlib_module_names), "names": names}))
"""


def run() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:opt_optax_bridge", "-c", PROGRAM],
        check=True,
        capture_output=True,
        text=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_importing_needs_only_what_is_declared() -> None:
    answer = run()
    declared = {"jax", "jaxlib", "flax", "optax", "opt_core", "opt_partition"}
    assert set(answer["new"]) <= declared | {"opt_optax_bridge"}
    assert "opt_core" in answer["new"]
    assert {"adam", "lion"} <= set(answer["names"])
    assert not {"adamw", "muon", "odd"} & set(answer["names"])
