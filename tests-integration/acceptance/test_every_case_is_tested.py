"""The acceptance list: 60 cases, a test for each."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CASE = re.compile(r"test_([a-f]\d+)_")
NUMBERS = {"a": 10, "b": 11, "c": 8, "d": 13, "e": 12, "f": 6}
CASES = {f"{letter}{n}" for letter, last in NUMBERS.items() for n in range(1, last + 1)}


def named_cases() -> Iterator[tuple[str, str]]:
    """Yields the id of every test, or row of one, that is named after it, and where it is."""
    folders = [REPOSITORY / "tests-integration", *REPOSITORY.glob("packages/*/tests")]
    for path in sorted(path for folder in folders for path in folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found = CASE.match(node.name)
                if found:
                    where = f"{path.relative_to(REPOSITORY)}::{node.name}"
                    assert ast.get_docstring(node), f"{where}: what is the case?"
                    yield found[1], where
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.param":
                ids = [ast.unparse(word.value)[1:-1] for word in node.keywords if word.arg == "id"]
                yield from ((case, f"{path.name}: {case}") for case in ids if case in CASES)


def test_every_case_has_exactly_one_test() -> None:
    found = list(named_cases())
    counts = Counter(case for case, _ in found)
    missing = sorted(CASES - counts.keys(), key=lambda case: (case[0], int(case[1:])))
    doubled = [where for case, where in found if counts[case] > 1]
    unknown = [where for case, where in found if case not in CASES]
    assert len(CASES) == 60
    assert not unknown, f"no such case: {', '.join(unknown)}"
    assert not doubled, f"more than one test of a case: {', '.join(doubled)}"
    assert not missing, f"no test of {', '.join(missing)}"


def test_the_table_of_the_docs_has_every_case() -> None:
    page = (REPOSITORY / "docs" / "checkpoint-cases.md").read_text(encoding="utf-8")
    listed = [row.lower() for row in re.findall(r"^\| ([A-F]\d+) \|", page, re.MULTILINE)]
    assert sorted(listed) == sorted(CASES)
