"""The README runs."""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.contract

BESIDE = Path(__file__).parents[1] / "README.md"
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def readme() -> str:
    """The checkout's, or where the tests were copied alone, the installed distribution's."""
    if BESIDE.is_file() and (text := BESIDE.read_text()).startswith("# opt-legacy-stax\n"):
        return text
    return str(importlib.metadata.metadata("opt-legacy-stax").get_payload())  # type: ignore[attr-defined]


def test_the_examples_run() -> None:
    blocks = PYTHON.findall(readme())
    assert len(blocks) == 1
    namespace: dict[str, Any] = {"__name__": "readme"}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)
