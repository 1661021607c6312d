"""The acceptance list: 60 cases, a test for each."""

import re
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
NUMBERS = {"a": 10, "b": 11, "c": 8, "d": 13, "e": 12, "f": 6}
CASES = {f"{letter}{n}" for letter, last in NUMBERS.items() for n in range(1, last + 1)}
# A test that is named after its case, or a row of one.
NAMED = re.compile(
    r'^ *def test_([a-f]\d+)_|pytest\.param\((?:[^()]|\([^()]*\))*id="([a-f]\d+)"', re.MULTILINE
)


def test_every_case_has_exactly_one_test() -> None:
    folders = [REPOSITORY / "tests-integration", *REPOSITORY.glob("packages/*/tests")]
    files = [path.read_text() for folder in folders for path in folder.rglob("test_*.py")]
    found = Counter(a or b for text in files for a, b in NAMED.findall(text))
    assert found == Counter(CASES)


def test_the_table_of_the_docs_has_every_case() -> None:
    page = (REPOSITORY / "docs" / "checkpoint-cases.md").read_text(encoding="utf-8")
    listed = [row.lower() for row in re.findall(r"^\| ([A-F]\d+) \|", page, re.MULTILINE)]
    assert sorted(listed) == sorted(CASES)
