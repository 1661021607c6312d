"""Importing the package imports nothing that it does not declare; Optax is an extra."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.contract

PROGRAM = """
import json, sys
import jax, flax.struct, opt_core, opt_core.t5x
declared = set(sys.modules)
import opt_adafactor.t5x
new = {name.partition(".")[0] for name in set(sys.modules) - declared}
print(json.dumps(sorted(new - sys.stdlib_module_names)))
"""

WITHOUT_OPTAX = """
import sys
sys.modules["optax"] = None
import jax
import jax.numpy as jnp
import opt_adafactor
optimizer = opt_adafactor.Adafactor(0.1).create({"w": jnp.ones(3)})
optimizer = jax.jit(lambda o: o.apply_gradient({"w": jnp.ones(3)}))(optimizer)
for call in (
    opt_adafactor.adafactor,
    opt_adafactor.scale_by_generalized_factored_rms,
    lambda: opt_adafactor.to_optax_state(optimizer.state, ()),
    lambda: opt_adafactor.from_optax_state(()),
):
    try:
        call()
    except ImportError as error:
        print(error)
"""


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return done.stdout


def test_importing_needs_only_jax_flax_and_opt_core() -> None:
    assert json.loads(run(PROGRAM).splitlines()[-1]) == ["opt_adafactor"]


def test_without_optax_the_definition_works_and_the_rest_says_what_to_install() -> None:
    lines = run(WITHOUT_OPTAX).splitlines()
    assert len(lines) == 4
    assert all('`pip install "opt-adafactor[optax]"`' in line for line in lines)
