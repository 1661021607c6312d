"""The names and signatures of JAX's module, and what works without the extras."""

import inspect
import subprocess
import sys

import opt_legacy_stax
import pytest
from jax.example_libraries import optimizers as theirs

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


def exported_by_jax() -> list[str]:
    """What JAX's module defines; it has no `__all__`, and its imports are no exports."""
    defined = [
        name
        for name, value in vars(theirs).items()
        if getattr(value, "__module__", "") == theirs.__name__ and not name.startswith("_")
    ]
    aliases = ["Array", "Params", "State", "Updates", "Step", "Schedule"]
    aliases += ["InitFn", "UpdateFn", "ParamsFn"]
    return sorted({*defined, *aliases})


@pytest.mark.parametrize("name", exported_by_jax())
def test_names_and_signatures_are_those_of_jax(name: str) -> None:
    mine, other = getattr(opt_legacy_stax, name), getattr(theirs, name)
    if getattr(other, "__module__", "") != theirs.__name__:
        return  # an alias of a type
    assert mine.__name__ == other.__name__
    if inspect.isfunction(other):
        parameters = [
            (p.name, p.kind, p.default)
            for p in inspect.signature(mine).parameters.values()
            if p.name != "upstream_numerics"  # by keyword alone
        ]
        assert parameters == [
            (p.name, p.kind, p.default) for p in inspect.signature(other).parameters.values()
        ]


@pytest.mark.slow
def test_without_an_extra_the_functions_that_need_it_say_so() -> None:
    words = (
        "this function needs the package `{}`. Install it with `pip install opt-legacy-stax[{}]`."
    )
    optax, core = words.format("optax", "optax"), words.format("opt_core", "core")
    files = words.format("safetensors", "files")
    command = [sys.executable, "-c", WITHOUT_EXTRAS]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [optax, optax, optax, core, files, files]
