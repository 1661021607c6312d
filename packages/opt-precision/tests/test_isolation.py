"""Importing the package imports nothing that it does not declare, and starts no device."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.contract

PROGRAM = """
import json, sys
import jax, optax, optax.contrib
declared = set(sys.modules)
import opt_precision
new = {name.partition(".")[0] for name in set(sys.modules) - declared}
from jax._src import xla_bridge
print(json.dumps([sorted(new - sys.stdlib_module_names), xla_bridge.backends_are_initialized()]))
"""


def test_importing_needs_only_jax_and_optax_and_no_device() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:opt_precision", "-c", PROGRAM],
        check=True,
        capture_output=True,
        text=True,
    )
    new, is_started = json.loads(done.stdout.splitlines()[-1])
    assert set(new) <= {"opt_precision", "jax", "numpy"}  # modules that JAX itself left alone
    assert not is_started
