"""Makes notebooks of the main guides: `hatch run dev:notebooks`, with `--check` to compare only.

A guide is the source: its text becomes Markdown cells, its Python blocks become code cells. The
first cell installs what the guide imports, for Colab.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "examples" / "notebooks"
GUIDES = ("getting-started", "sharding", "checkpoints")
_BLOCK = re.compile(r"^```python\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)
_IMPORT = re.compile(r"^(?:from|import) (opt_\w+)", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)([^)]*)\)")


def convert(guide: str, text: str) -> dict[str, Any]:
    """Returns the notebook of a guide, in nbformat 4.5.

    Args:
      guide: the guide's name, which the ids of cells are made of.
      text: its Markdown.
    """
    packages = sorted({name.replace("_", "-") for name in _IMPORT.findall(text)})
    cells = [_code(f"%pip install --quiet {' '.join(packages)}", tags=["skip-execution"])]
    for i, part in enumerate(_BLOCK.split(text)):  # text and code in turns
        if part.strip():
            cells.append(_code(part) if i % 2 else _markdown(part))
    return {
        "cells": [{"id": f"{guide}-{number}", **cell} for number, cell in enumerate(cells)],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _code(source: str, **metadata: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"execution_count": None, "outputs": []}
    return {"cell_type": "code", "metadata": metadata, "source": source.strip(), **empty}


def _markdown(text: str) -> dict[str, Any]:
    """A cell of text; a notebook does not know where the other pages are."""
    text = _LINK.sub(lambda link: link[1] or f"`{link[2]}`", text)
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip()}


def main(arguments: list[str] | None = None) -> int:
    """Writes the notebooks, or says which are out of date; returns the exit code."""
    parser = argparse.ArgumentParser(description="Makes notebooks of the main guides.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one differs")
    options = parser.parse_args(arguments)
    OUT.mkdir(exist_ok=True)
    old = []
    for guide in GUIDES:
        notebook = convert(guide, (ROOT / "docs" / f"{guide}.md").read_text())
        made = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        file = OUT / f"{guide}.ipynb"
        if not file.exists() or file.read_text() != made:
            old.append(file.name)
            if not options.check:
                file.write_text(made)
    if options.check and old:
        print(f"{', '.join(old)}: not those of the guides. Run `hatch run dev:notebooks`.")
    return int(options.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
