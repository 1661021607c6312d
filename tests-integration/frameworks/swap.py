"""Puts our objects in the place of a framework's (`OPT_SWAP`), and outcomes in `OPT_OUTCOMES`."""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def nnx() -> None:
    """`flax.nnx.Optimizer`."""
    theirs: Any = importlib.import_module("flax.nnx")
    theirs.Optimizer = importlib.import_module("opt_nnx").Optimizer


def triples() -> None:
    """`jax.example_libraries.optimizers`."""
    ours = importlib.import_module("opt_legacy_stax")
    sys.modules["jax.example_libraries.optimizers"] = ours
    package: Any = importlib.import_module("jax.example_libraries")
    package.optimizers = ours


def twins() -> None:
    """Every constructor of Optax: a definition of the same name, as a transformation."""
    optax, opt = map(importlib.import_module, ("optax", "opt_optax_bridge"))

    def transformation(name: str, twin: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(getattr(optax, name))
        def constructor(*args: Any, **kwargs: Any) -> Any:
            return opt.as_transformation(twin(*args, **kwargs))

        return constructor

    names = set(opt.optimizer_names()) & set(vars(optax))
    vars(optax).update({name: transformation(name, getattr(opt, name)) for name in names})


@pytest.hookimpl(tryfirst=True)  # before their conftest.py
def pytest_load_initial_conftests() -> None:
    if name := os.environ.get("OPT_SWAP"):
        {"nnx": nnx, "triples": triples, "twins": twins}[name]()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed or report.when == "call":
        with Path(os.environ["OPT_OUTCOMES"]).open("a") as file:
            file.write(f"{report.outcome} {report.nodeid}\n")
