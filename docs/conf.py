"""Sphinx configuration: everything is built from this checkout, offline."""

import importlib.metadata
import inspect
import re
import textwrap
from typing import Any

import opt_legacy_stax
import opt_optax_bridge
from docutils import nodes
from sphinx.addnodes import desc, pending_xref
from sphinx.util.inspect import stringify_signature

project = "Mesopt"
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
html_title = "Mesopt"
html_logo = html_favicon = "_static/mark.svg"
html_static_path = ["_static"]
html_css_files = ["custom.css"]

default_role = "literal"  # docstrings write `code`
highlight_language = "none"  # of blocks that name none
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
    if code[2] == "_":  # a link: `title <address>`_
        return code[0]
    return f"``{code[1]}``" + (f"\\ {code[2]}" if code[2] else "")


_PRIVATE_PATH = re.compile(r"~?\b(?:\w+\.)+_\w+(?:\.\w+)*\.(\w+)|~[\w.]+\.(\w+)")
_PRIVATE_NAME = re.compile(r"(?<![\w.])_([A-Z]\w*)")  # a type variable, or an internal class


def _public_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str, Any] | None:
    """Hides the constructor of a class with private fields, and of an enumeration.

    The metaclass of Flax NNX hides that of a module: it is looked up.
    """
    del app, name, options
    if what == "class" and signature == "(*args, **kwargs)":
        found = stringify_signature(inspect.signature(obj.__init__), show_annotation=False)
        found = re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", found.replace("self, ", ""))
        return ("" if found == signature else found), None  # a protocol has none
    if what == "class" and re.search(r"[(,] ?_\w|^\(\*values\)", signature or ""):
        return "", returns
    return signature and signature.replace("<factory>", "..."), returns


def _skip_field(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out the fields of a named tuple, which its docstring lists."""
    del app, what, name, skip, options
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field") else None


def _drop_undescribed(app: Any, domain: str, objtype: str, content: Any) -> None:
    """Leaves out what says nothing: names that the signature has, `Any`, `object`."""
    del app, domain
    for block in content.findall(nodes.field_list):
        fields = [(*field[0].astext().partition(" ")[::2], field) for field in block]
        described = {name for kind, name, field in fields if kind == "param" and field[1].astext()}
        for kind, name, field in fields:
            text = field[1].astext().rpartition(".")[2]
            if (
                (kind in {"param", "type"} and name and name not in described)
                or (kind in {"type", "rtype"} and text in {"Any", "None"})
                or (kind == "rtype" and objtype == "class")
            ):
                block.remove(field)
    for line in list(content.findall(nodes.paragraph)):
        if line.astext() == "Bases: object":
            line.parent.remove(line)


def _public_names(app: Any, tree: Any) -> None:
    """Writes types as users import them: `Array`, not `jax.jaxlib._jax.Array`."""
    del app
    for description in tree.findall(desc):
        for text in list(description.findall(nodes.Text)):
            if isinstance(text.parent.parent, nodes.literal_block):
                continue
            short = _PRIVATE_PATH.sub(lambda found: found[1] or found[2], text)
            short = _PRIVATE_NAME.sub(r"\1", short).removeprefix("~")
            short = short.replace("collections.abc.", "")
            if short != text:
                text.parent.replace(text, nodes.Text(short))


_JAX = "https://docs.jax.dev/en/latest/"
_OPTAX = "https://optax.readthedocs.io/en/latest/api/"
_ELSEWHERE = {
    "Array": _JAX + "_autosummary/jax.Array.html",
    "Mesh": _JAX + "jax.sharding.html#jax.sharding.Mesh",
    "AbstractMesh": _JAX + "jax.sharding.html#jax.sharding.AbstractMesh",
    "NamedSharding": _JAX + "jax.sharding.html#jax.sharding.NamedSharding",
    "PartitionSpec": _JAX + "jax.sharding.html#jax.sharding.PartitionSpec",
    "ShapeDtypeStruct": _JAX + "_autosummary/jax.ShapeDtypeStruct.html",
    "GradientTransformation": _OPTAX + "transformations.html#optax.GradientTransformation",
    "GradientTransformationExtraArgs": (
        _OPTAX + "transformations.html#optax.GradientTransformationExtraArgs"
    ),
}


def _link(app: Any, env: Any, node: pending_xref, content: Any) -> Any:
    """Links a type to its page: a public name of these packages, or of JAX and Optax.

    autodoc writes the module that defines a class; readers import it from the package.
    """
    module, _, name = node.get("reftarget", "").rpartition(".")
    if node.get("refdomain") != "py" or not module:
        return None
    package = module.partition(".")[0]
    if package.startswith("opt_"):
        domain = env.get_domain("py")
        return domain.resolve_xref(
            env, node.get("refdoc"), app.builder, "obj", f"{package}.{name}", node, content
        )
    if package in {"jax", "optax"} and name in _ELSEWHERE:
        return nodes.reference("", "", content, refuri=_ELSEWHERE[name], internal=False)
    return None


def _list_constructors(app: Any, page: str, source: list[str]) -> None:
    """Writes an entry for every wrapped constructor, so that search and index find `adamw`."""
    del app
    if page != "reference/opt-optax-bridge":
        return
    names = (*opt_optax_bridge.optimizer_names(), *opt_optax_bridge.building_block_names())
    entries = "\n   ".join(f"{name}(...)" for name in sorted(names))
    directive = f"```{{eval-rst}}\n.. py:function:: {entries}\n   :module: opt_optax_bridge\n```"
    source[0] = source[0].replace("<!-- constructors -->", directive)


def _site_links(app: Any, path: Any, page: str, source: list[str]) -> None:
    """Makes links of a README, which are for readers of the repository, links of the site."""
    del app, page
    if path.name == "README.md":
        text = re.sub(r"\]\(packages/(opt-[\w-]+)\)", r"](/reference/\1.md)", source[0])
        text = re.sub(r"`docs/([\w/-]+\.md)`", r"[](/\1)", text)  # by its title
        text = re.sub(r" \(?(?:in|of) the repository\)?", "", text)
        text = text.replace("[CONTRIBUTING.md](CONTRIBUTING.md)", "`CONTRIBUTING.md`")
        # What the site has already, and a link to itself.
        text = re.sub(r'^<img src="docs/_static/mark.*\n', "", text)
        text = re.sub(r" The \[site\][^.]*\.md\)[^.]*\.", "", text)
        source[0] = text.replace('src="docs/', 'src="')


_LONG_CODE = re.compile(r'(?<=<span class="pre">)[^<]{14,}(?=</span>)')
_BREAK = re.compile(r"(?<=[._/=(,])(?=[\w&])|(?<=[a-z])(?=[A-Z])")


def _breakable(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Lets long code in a line of text break between its words; the style sheet says where."""
    del app, page, template, tree
    context["body"] = _LONG_CODE.sub(
        lambda code: _BREAK.sub("<wbr>", code[0]), context.get("body", "")
    )


def setup(app: Any) -> None:
    """What Sphinx calls."""
    for function in vars(opt_legacy_stax).values():
        if "__signature__" in getattr(function, "__dict__", {}):
            # Sphinx (9.2) reads defaults in the source, which has not all that a decorator adds.
            function.__wrapped__ = len
    app.connect("autodoc-process-docstring", _to_rst, priority=400)  # before Napoleon
    app.connect("autodoc-process-signature", _public_signature)
    app.connect("autodoc-skip-member", _skip_field)
    app.connect("object-description-transform", _drop_undescribed, priority=900)  # after autodoc
    app.connect("doctree-read", _public_names)
    app.connect("missing-reference", _link)
    app.connect("source-read", _list_constructors)
    app.connect("include-read", _site_links)
    app.connect("html-page-context", _breakable)
