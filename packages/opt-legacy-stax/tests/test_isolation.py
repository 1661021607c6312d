"""Importing the package imports nothing but jax, and starts no device."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.contract

PROGRAM = """
import json, sys
import jax, ml_dtypes
declared = set(sys.modules)
import opt_legacy_stax
new = {name.partition(".")[0] for name in set(sys.modules) - declared}
from jax._src import xla_bridge
theirs = "jax.example_libraries.optimizers" in sys.modules
print(json.dumps([sorted(new - sys.stdlib_module_names), xla_bridge.backends_are_initialized(),
                  theirs]))
"""
WITHOUT_EXTRAS = """
import sys
sys.modules["optax"] = sys.modules["opt_core"] = sys.modules["safetensors"] = None
import io
import opt_legacy_stax as ours
triple = ours.sgd(0.1)
for call in (lambda: ours.to_optax(triple), lambda: ours.optax_equivalent("sgd", step_size=0.1),
             lambda: ours.from_optax(triple), lambda: ours.to_optimizer_def(triple),
             lambda: ours.save(io.BytesIO(), triple.init_fn(1.0)),
             lambda: ours.load(io.BytesIO(), optimizer=triple, params=1.0)):
    try:
        call()
    except ImportError as error:
        print(error)
"""


def run(program: str) -> list[str]:
    command = [sys.executable, "-W", "error::UserWarning:opt_legacy_stax", "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_importing_needs_only_jax_and_no_device() -> None:
    assert json.loads(run(PROGRAM)[-1]) == [["opt_legacy_stax"], False, False]


def test_without_an_extra_the_functions_that_need_it_say_so() -> None:
    words = (
        "this function needs the package `{}`. Install it with `pip install opt-legacy-stax[{}]`."
    )
    optax, core = words.format("optax", "optax"), words.format("opt_core", "core")
    files = words.format("safetensors", "files")
    assert run(WITHOUT_EXTRAS) == [optax, optax, optax, core, files, files]
