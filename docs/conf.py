"""Sphinx configuration: everything is built from this checkout, offline."""

import importlib.metadata
import re
import textwrap
from typing import Any

project = "opt"
copyright = "2026, the authors"  # noqa: A001
version = release = importlib.metadata.version("opt-core")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "opt"
html_static_path = ["_static"]

default_role = "literal"  # docstrings write `code`
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True  # not `opt_core._optimizer.Optimizer`
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_use_rtype = False
myst_heading_anchors = 3
suppress_warnings = [
    "myst.xref_missing",  # READMEs link to folders of the repository
    "ref.python",  # two packages have an `Optimizer`, and a `TreeMismatchError`
]

_FENCE = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(?<![`:])`([^`\n]+)`(?!`)(\w?)")


def _to_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Takes Markdown's code in a docstring to reStructuredText.

    That has other ideas of a plural behind code and, to Napoleon, of a colon in it.
    """
    del app, what, name, obj, options
    parts = _FENCE.split("\n".join(lines))
    parts[::2] = [_CODE.sub(_literal, text) for text in parts[::2]]
    parts[1::2] = [f"::\n\n{textwrap.indent(block, '    ')}" for block in parts[1::2]]
    lines[:] = "".join(parts).split("\n")


def _literal(code: re.Match[str]) -> str:
    return f"``{code[1]}``" + (f"\\ {code[2]}" if code[2] else "")


def setup(app: Any) -> None:
    """What Sphinx calls."""
    app.connect("autodoc-process-docstring", _to_rst, priority=400)  # before Napoleon
