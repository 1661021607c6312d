"""Sphinx configuration: everything is built from this checkout, offline."""

import importlib.metadata

project = "opt"
copyright = "2026, the authors"  # noqa: A001
version = release = importlib.metadata.version("opt-core")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "opt"

default_role = "literal"  # docstrings write `code`
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_use_rtype = False
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # READMEs link to folders of the repository
