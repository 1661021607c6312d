"""Makes notebooks of the main guides by jupytext: `hatch run dev:notebooks`.

A guide is the source: its text becomes Markdown cells, its Python blocks become code cells. The
first cell installs what the guide imports, for Colab.
"""

import re
from pathlib import Path

import jupytext
import nbformat.v4

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "examples" / "notebooks"
GUIDES = ("getting-started", "sharding", "checkpoints")
_IMPORT = re.compile(r"^(?:from|import) (opt_\w+)", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)([^)]*)\)")


def convert(guide: str, text: str) -> str:
    """Returns the notebook of a guide, whose name the ids of cells are made of."""
    packages = sorted({name.replace("_", "-") for name in _IMPORT.findall(text)})
    # A notebook does not know where the other pages are.
    text = _LINK.sub(lambda link: link[1] or f"`{link[2]}`", text)
    notebook = jupytext.reads(text, "md")
    install = f"%pip install --quiet {' '.join(packages)}"
    metadata = {"tags": ["skip-execution"]}
    cell = nbformat.v4.new_code_cell(install, metadata=metadata)  # type: ignore[no-untyped-call]
    notebook.cells.insert(0, cell)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"{guide}-{i}"
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    return f"{jupytext.writes(notebook, 'ipynb')}\n"


if __name__ == "__main__":
    for name in GUIDES:
        (OUT / f"{name}.ipynb").write_text(
            convert(name, (ROOT / "docs" / f"{name}.md").read_text())
        )
