"""Importing the package imports nothing that it does not declare, and takes little time."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.contract

PROGRAM = """
import json, sys, time
import jax, flax.linen, flax.nnx, optax, optax.contrib
before, start = set(sys.modules), time.process_time()
import opt_nnx
seconds = time.process_time() - start
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"new": sorted(new - sys.stdlib_module_names), "seconds": seconds}))
"""


def run() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_importing_needs_only_what_is_declared() -> None:
    declared = {"jax", "jaxlib", "flax", "optax", "opt_core", "opt_optax_bridge", "opt_partition"}
    assert set(run()["new"]) <= declared | {"opt_nnx"}
