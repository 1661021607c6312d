"""The notebooks are those of the guides, and run."""

import jupytext
import nbclient
import notebooks
import pytest


@pytest.mark.parametrize("guide", notebooks.GUIDES)
def test_they_are_those_of_the_guides(guide: str) -> None:
    text = (notebooks.ROOT / "docs" / f"{guide}.md").read_text()
    found = (notebooks.OUT / f"{guide}.ipynb").read_text()
    assert found == notebooks.convert(guide, text), "run `hatch run dev:notebooks`"


def test_code_and_text_alternate() -> None:
    text = "# A\n\nSee [b](b.md).\n\n```python\nimport opt_core\n```\n\nEnd\n"
    cells = jupytext.reads(notebooks.convert("a", text), "ipynb").cells
    assert [(cell.cell_type, cell.source) for cell in cells] == [
        ("code", "%pip install --quiet opt-core"),
        ("markdown", "# A\n\nSee b."),
        ("code", "import opt_core"),
        ("markdown", "End"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("guide", notebooks.GUIDES)
def test_they_run(guide: str) -> None:
    notebook = jupytext.read(notebooks.OUT / f"{guide}.ipynb")
    nbclient.NotebookClient(notebook, timeout=300).execute()
