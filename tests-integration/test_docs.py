"""Every Python block of the README and the guides runs, in order, one namespace a page."""

import pathlib
import re
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


def test_there_are_pages() -> None:
    names = {page.name for page in WITH_CODE}
    assert {"README.md", "getting-started.md", "checkpoints.md", "t5x.md"} <= names


# T5X's own example makes traversals of Flax, which warn.
@pytest.mark.filterwarnings("ignore:`flax.traverse_util.Traversal`:DeprecationWarning")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_blocks_run(page: pathlib.Path) -> None:
    namespace: dict[str, Any] = {}
    for number, block in enumerate(BLOCK.findall(page.read_text()), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)
