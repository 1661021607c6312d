"""Every Python block of the README and the guides runs, in order, one namespace a page."""

import importlib
import pathlib
import re
import tomllib
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
PRINTED = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]
# They compile most; the packages' own tests have the same calls in the gate.
LONG = {
    *("accumulation.md", "adafactor.md", "answers.md", "averages-and-guards.md"),
    *("changed-models.md", "checkpoints.md", "cookbook.md", "hyper-parameters.md", "matrix.md"),
    *("maxtext.md", "nnx.md", "optax.md", "other-checkpoints.md", "parameter-groups.md"),
    *("precision.md", "pytorch.md", "sharding.md", "t5x.md", "train-state.md"),
}


def test_there_are_pages() -> None:
    names = {page.name for page in WITH_CODE}
    assert {"README.md", "getting-started.md", "checkpoints.md", "t5x.md"} <= names


# T5X's own example makes traversals of Flax, which warn.
@pytest.mark.filterwarnings("ignore:`flax.traverse_util.Traversal`:DeprecationWarning")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=pytest.mark.slow if page.name in LONG else ())
        for page in WITH_CODE
    ],
)
def test_blocks_run_and_print_what_the_page_shows(
    page: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace: dict[str, Any] = {}
    for number, block in enumerate(BLOCK.findall(page.read_text()), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    for shown in PRINTED.findall(page.read_text()):
        assert shown in printed


def test_the_readme_installs_what_its_program_imports() -> None:
    page = (ROOT / "README.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("pip install ./"))
    imported = set(re.findall(r"\bopt_\w+", BLOCK.findall(page)[0]))
    for path in line.split()[2:]:
        project = tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"]
        siblings = re.findall(r"\bopt-[\w-]+", " ".join(project["dependencies"]))
        imported |= {sibling.replace("-", "_") for sibling in siblings}
    assert {pathlib.Path(path).name.replace("-", "_") for path in line.split()[2:]} == imported


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_reference_has_every_public_name_once(page: pathlib.Path) -> None:
    text, package = page.read_text(), page.stem.replace("-", "_")
    directives = re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.MULTILINE)
    directives += [
        f"{package}.{name}" for name in re.findall(r"^\.\. py:data:: (\w+)$", text, re.M)
    ]
    assert len(directives) == len(set(directives))
    names = set(importlib.import_module(package).__all__)
    # Aliases, and what is another library's, are only mentioned.
    assert {name for name in names if f"{package}.{name}" not in directives} <= set(
        re.findall(r"`(\w+)`", text)
    )
