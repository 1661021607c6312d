"""The README runs, and prints what it shows."""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.contract

BESIDE = Path(__file__).parents[1] / "README.md"
PYTHON = re.compile(r"^```python\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", re.M | re.S)


def readme() -> str:
    """The checkout's, or where the tests were copied alone, the installed distribution's."""
    if BESIDE.is_file() and (text := BESIDE.read_text()).startswith("# opt-matrix\n"):
        return text
    return str(importlib.metadata.metadata("opt-matrix").get_payload())  # type: ignore[attr-defined]


def test_the_examples_run_and_print_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "readme"}
    shown = 0
    for number, (block, output) in enumerate(PYTHON.findall(readme()), start=1):
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert printed == output.splitlines(), f"block {number}"
        shown += bool(output)
    assert shown == 2
