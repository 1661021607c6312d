"""The README runs, prints what it shows, and its command lines work."""

import importlib.metadata
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from opt_partition._cli.main import main

pytestmark = pytest.mark.contract

BESIDE = Path(__file__).parents[1] / "README.md"
PYTHON = re.compile(r"^```python\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", re.M | re.S)
FILE = re.compile(r"^```(?:python|toml)\n# (\S+\.\w+)\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^opt-partition (.*)$", re.M)


def readme() -> str:
    """The checkout's, or where the tests were copied alone, the installed distribution's."""
    if BESIDE.is_file() and (text := BESIDE.read_text()).startswith("# opt-partition\n"):
        return text
    return str(importlib.metadata.metadata("opt-partition").get_payload())  # type: ignore[attr-defined]


def test_the_examples_run_and_print_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "readme"}
    shown = 0
    for number, (block, output) in enumerate(PYTHON.findall(readme()), start=1):
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert printed == output.splitlines(), f"block {number}"
        shown += bool(output)
    assert shown >= 2
    assert namespace["report"].ok


def test_the_command_lines_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = dict(FILE.findall(readme()))
    assert {"job.py", "rules.toml"} <= files.keys()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "job", raising=False)
    commands = COMMAND.findall(readme())
    assert len(commands) >= 4
    for command in commands:
        assert main(shlex.split(command)) == 0
        printed = capsys.readouterr().out
        assert printed
        assert printed.startswith("wrote ") == ("--html" in command)
    assert "4096x16384" in (tmp_path / "plan.html").read_text()
    monkeypatch.delitem(sys.modules, "job")
