"""Importing the package imports nothing that it does not declare, and Orbax when it is needed."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.contract

PROGRAM = """
import json, sys
import jax, flax.struct, flax.core, numpy, optax, optax.contrib
before = set(sys.modules)
import opt_checkpoint, opt_checkpoint.errors
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(new - sys.stdlib_module_names)))
"""

LAZY = """
import sys, opt_checkpoint
assert not {"orbax", "opt_partition"} & sys.modules.keys()
opt_checkpoint.Checkpointer
assert "orbax.checkpoint" in sys.modules
"""


def run(program: str) -> str:
    command = [sys.executable, "-W", "error::UserWarning:opt_checkpoint", "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout


def test_importing_needs_only_what_is_declared() -> None:
    new = set(json.loads(run(PROGRAM).splitlines()[-1]))
    ours = {"opt_checkpoint", "opt_core", "opt_optax_bridge"}
    assert ours <= new <= ours | {"jax", "jaxlib", "flax", "optax"}


def test_orbax_is_imported_where_it_is_needed() -> None:
    run(LAZY)
