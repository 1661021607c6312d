import sys

import pytest
from run_suites import LANES, Result, main, run_lanes

PASSES = (sys.executable, "-c", "print('fine')")
FAILS = (sys.executable, "-c", "print('broken'); raise SystemExit(3)")


def test_lanes_run_to_their_ends(capfd: pytest.CaptureFixture[str]) -> None:
    results = run_lanes([{"a": FAILS, "bee": PASSES}, {"c": PASSES}])
    assert results == {"a": Result(3), "bee": Result(0), "c": Result(0)}
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == ["a   | broken", "bee | fine", "c   | fine"]
    assert lines.index("a   | broken") < lines.index("bee | fine")


@pytest.mark.parametrize(("command", "code"), [(PASSES, 0), (FAILS, 1)])
def test_one_failure_fails_all(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], code: int
) -> None:
    assert main([{"a": PASSES}, {"b": command}]) == code
    verdict = "passed" if code == 0 else "FAILED"
    assert f"{verdict}  b" in capsys.readouterr().out


def test_what_failed_is_said_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    says = (sys.executable, "-c", "print('FAILED a.py::test_b - no'); raise SystemExit(1)")
    main([{"a": says, "bee": PASSES}])
    *_, verdict, failure, other, _ = capsys.readouterr().out.splitlines()
    assert (verdict, failure, other) == ("FAILED  a", "FAILED a.py::test_b - no", "passed  bee")


def test_every_suite_is_in_a_lane() -> None:
    folders = [command[-1] for lane in LANES for command in lane.values()]
    assert sorted(folders) == ["packages", "tests-integration", "tools"]
