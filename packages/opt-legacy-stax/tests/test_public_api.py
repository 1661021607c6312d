"""The package installs and imports alone, and exports what it says."""

import importlib.metadata
import subprocess
import sys

import opt_legacy_stax


def test_version_is_that_of_the_distribution() -> None:
    assert opt_legacy_stax.__version__ == importlib.metadata.version("opt-legacy-stax")


def test_exports_nothing_yet() -> None:
    assert opt_legacy_stax.__all__ == []


def test_import_does_no_work() -> None:
    code = "import sys, opt_legacy_stax; print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
