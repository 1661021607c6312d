"""Importing the package imports nothing that it does not declare."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.contract

PROGRAM = """
import json, sys
import jax, flax.struct
declared = set(sys.modules)
import opt_core
new = {name.partition(".")[0] for name in set(sys.modules) - declared}
print(json.dumps(sorted(new - sys.stdlib_module_names)))
"""


def test_importing_needs_only_jax_and_flax() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:opt_core", "-c", PROGRAM],
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == ["opt_core"]
