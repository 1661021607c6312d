"""The import contract, on files that break it."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from import_contract import ALWAYS, ARROWS, check, check_imports, find_imports, main
from workspace import read_packages

CORE = ["jax>=0.8", "flax>=0.12"]


def _breaches(
    tmp_path: Path,
    make_package: Callable[..., Path],
    source: str,
    *,
    name: str = "opt-core",
    dependencies: list[str] = CORE,
    extras: Mapping[str, list[str]] | None = None,
) -> list[str]:
    """What the contract says about a package with `source` in one of its modules."""
    module = name.replace("-", "_")
    files = {
        f"src/{module}/__init__.py": f"from {module} import _first\n",
        f"src/{module}/_first.py": source,
    }
    make_package(name, dependencies, extras=extras, files=files)
    return check(read_packages(tmp_path))


@pytest.mark.parametrize(
    "source",
    [
        "import jax",
        "import jax.numpy as jnp",
        "from flax import struct",
        "import os, sys\nfrom importlib.metadata import version",
        "import numpy as np",
        "from opt_core import _first",
        "from . import _first",
        "from ._first import x",
        "from __future__ import annotations",
        "import_module(f'{name}.x')",
    ],
)
def test_what_is_declared_may_be_imported(
    source: str, tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    assert _breaches(tmp_path, make_package, source) == []


@pytest.mark.parametrize(
    ("line", "source", "name"),
    [
        (1, "import optax", "optax"),
        (1, "from optax import contrib", "optax"),
        (1, "import jax, chex", "chex"),
        (1, "import torch.nn as nn", "torch"),
        (1, "import msgpack", "msgpack"),
        (1, "from orbax import checkpoint", "orbax"),
        (1, "import opt_partition", "opt_partition"),
        (1, "from opt_partition import specs", "opt_partition"),
        (2, "def late():\n    import optax", "optax"),
        (3, "class A:\n    async def late(self):\n        from optax import adam", "optax"),
        (2, "try:\n    import optax\nexcept ImportError:\n    pass", "optax"),
        (3, "import typing\nif typing.TYPE_CHECKING:\n    import optax", "optax"),
        (2, "import importlib\nimportlib.import_module('optax.contrib')", "optax"),
        (1, "__import__('optax')", "optax"),
        (1, "late = lambda: __import__('optax')", "optax"),
    ],
)
def test_what_is_not_declared_may_not(
    line: int, source: str, name: str, tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    (breach,) = _breaches(tmp_path, make_package, source)
    assert f"_first.py:{line}: imports `{name}`; opt-core declares `flax`, `jax`." in breach
    assert "Do without it, or declare it." in breach


def test_flax_is_not_for_opt_partition(tmp_path: Path, make_package: Callable[..., Path]) -> None:
    (breach,) = _breaches(
        tmp_path,
        make_package,
        "import flax",
        name="opt-partition",
        dependencies=["jax", "optax"],
    )
    assert "imports `flax`; opt-partition declares `jax`, `optax`" in breach


@pytest.mark.parametrize(
    ("dependencies", "extras", "message"),
    [
        ([*CORE, "optax"], {}, "declares `optax` under `dependencies`; the design lists `flax`"),
        (CORE, {"fast": ["numba"]}, "declares `numba` under `fast`; the design lists nothing"),
    ],
)
def test_declaring_is_not_enough(
    dependencies: list[str],
    extras: dict[str, list[str]],
    message: str,
    tmp_path: Path,
    make_package: Callable[..., Path],
) -> None:
    (breach,) = _breaches(
        tmp_path, make_package, "import jax", dependencies=dependencies, extras=extras
    )
    assert message in breach


def test_tools_for_tests_are_declared_freely_but_not_imported(
    tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    extras = {"test": ["chex", "pytest"]}
    (breach,) = _breaches(tmp_path, make_package, "import chex", extras=extras)
    assert "imports `chex`" in breach


def test_a_package_without_a_row_is_a_breach(
    tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    (breach,) = _breaches(tmp_path, make_package, "", name="opt-new", dependencies=[])
    assert breach.startswith("opt-new: no row in ARROWS")


ORBAX = {"orbax": ["orbax-checkpoint"], "test": ["opt-optax-bridge[orbax]"]}


@pytest.mark.parametrize(
    ("init", "other", "early"),
    [
        ("", "import orbax.checkpoint", False),
        ("import opt_optax_bridge.other", "import orbax.checkpoint", True),
        ("from opt_optax_bridge import other", "import orbax.checkpoint", True),
        ("from .other import x", "import orbax.checkpoint", True),
        ("from .other import x", "def f():\n    import orbax.checkpoint", False),
        ("def f():\n    from . import other", "import orbax.checkpoint", False),
    ],
)
def test_an_extra_is_imported_late(
    init: str, other: str, early: bool, tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    files = {
        "src/opt_optax_bridge/__init__.py": init,
        "src/opt_optax_bridge/other.py": other,
    }
    make_package("opt-optax-bridge", ["optax"], extras=ORBAX, files=files)
    breaches = list(check_imports(read_packages(tmp_path)["opt-optax-bridge"]))
    assert len(breaches) == early
    for breach in breaches:
        assert "other.py:1: `import opt_optax_bridge` imports `orbax`" in breach


def test_relative_imports_are_resolved() -> None:
    assert [i.name for i in find_imports("from ..b import c", "p.a.m")] == ["p.b", "p.b.c"]
    assert [i.name for i in find_imports("from .b import c", "p.a", is_package=True)] == [
        "p.a.b",
        "p.a.b.c",
    ]


def test_main_names_files_from_the_root_and_fails(
    tmp_path: Path, make_package: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    make_package("opt-core", CORE, files={"src/opt_core/bad.py": "\nimport torch\n"})
    assert main(root=tmp_path) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("packages/opt-core/src/opt_core/bad.py:2: imports `torch`")
    assert captured.out == "import contract: 1 packages, 1 breaches\n"


def test_this_repository_keeps_the_contract() -> None:
    packages = read_packages()
    assert packages.keys() == ARROWS.keys()
    assert all(ALWAYS in row for row in ARROWS.values())
    assert check(packages) == []
