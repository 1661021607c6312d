"""The package installs and imports alone, and exports what it says."""

import importlib.metadata
import subprocess
import sys

import opt_partition


def test_version_is_that_of_the_distribution() -> None:
    assert opt_partition.__version__ == importlib.metadata.version("opt-partition")


def test_exports_nothing_yet() -> None:
    assert opt_partition.__all__ == []


def test_import_does_no_work() -> None:
    code = "import sys, opt_partition; print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
