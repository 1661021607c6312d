"""The command lines of the README work."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from opt_partition._cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()
FILE = re.compile(r"^```(?:python|toml)\n# (\S+\.\w+)\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^opt-partition (.*)$", re.M)


def test_the_command_lines_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    files = dict(FILE.findall(README))
    assert {"job.py", "rules.toml"} <= files.keys()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "job", raising=False)
    commands = COMMAND.findall(README)
    assert len(commands) >= 4
    for command in commands:
        assert main(shlex.split(command)) == 0
        printed = capsys.readouterr().out
        assert printed
        assert printed.startswith("wrote ") == ("--picture" in command)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.delitem(sys.modules, "job")
