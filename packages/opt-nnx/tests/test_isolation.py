"""Importing the package imports nothing that it does not declare."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.contract

PROGRAM = """
import json, sys
import jax, flax.linen, flax.nnx, optax, optax.contrib
before = set(sys.modules)
import opt_nnx
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(new - sys.stdlib_module_names)))
"""


def test_importing_needs_only_what_is_declared() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    declared = {"jax", "jaxlib", "flax", "optax", "opt_core", "opt_optax_bridge", "opt_partition"}
    assert set(json.loads(done.stdout.splitlines()[-1])) <= declared | {"opt_nnx"}
