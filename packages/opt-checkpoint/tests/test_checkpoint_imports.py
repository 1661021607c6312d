"""What the package imports late."""

import subprocess
import sys

import opt_checkpoint
import pytest

LAZY = """
import sys, opt_checkpoint
assert not {"orbax", "opt_partition"} & sys.modules.keys()
opt_checkpoint.Checkpointer
assert "orbax.checkpoint" in sys.modules
"""


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'opt_checkpoint' has no attribute 'Checkpoint'"):
        opt_checkpoint.Checkpoint  # noqa: B018


def test_orbax_is_imported_where_it_is_needed() -> None:
    subprocess.run([sys.executable, "-c", LAZY], check=True)
