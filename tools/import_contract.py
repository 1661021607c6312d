"""Hold every package to the imports that the design lists for it.

    python tools/import_contract.py

`ARROWS` is the list. A package may declare in its `pyproject.toml` only what its row names, and
may import only what it declares, itself, the standard library and NumPy, inside functions too.
What an extra brings must not be imported by `import <package>`. A list of what is allowed
notices the dependency that nobody thought of forbidding.
"""

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from workspace import ROOT, Package, closure, names, read_packages

# What each package may depend on: always, and through which extra.
ALWAYS = "dependencies"
ARROWS: Mapping[str, Mapping[str, set[str]]] = {
    "opt-core": {ALWAYS: {"jax", "flax"}},
    "opt-partition": {ALWAYS: {"jax", "optax"}, "cli": {"rich"}},
    "opt-accumulate": {ALWAYS: {"jax", "optax"}},
    "opt-adafactor": {ALWAYS: {"opt-core", "jax", "flax"}, "optax": {"optax"}},
    "opt-optax-bridge": {
        ALWAYS: {"opt-core", "opt-partition", "optax", "jax", "flax"},
        "orbax": {"orbax-checkpoint"},
        "cli": {"rich"},
    },
    "opt-legacy-stax": {ALWAYS: {"jax"}, "optax": {"optax"}, "core": {"opt-core", "flax"}},
}

# What tests and tools need is no business of the shipped code.
_NOT_SHIPPED = {"test"}
_FREE = {*sys.stdlib_module_names, "numpy"}
_IMPORT_NAMES = {"orbax-checkpoint": "orbax"}


@dataclass(frozen=True)
class Import:
    """One imported name: dotted and absolute, where, and whether importing the file runs it."""

    name: str
    line: int
    eager: bool

    @property
    def top(self) -> str:
        """The top-level module."""
        return self.name.partition(".")[0]


def find_imports(source: str, module: str, *, is_package: bool = False) -> list[Import]:
    r"""Every import in a file, in functions and by `import_module("...")` too.

    Args:
        source: The text of the file.
        module: Its dotted name, which relative imports start from.
        is_package: Whether the file is an `__init__.py`.

    Examples:
        >>> find_imports("from optax import contrib", "m")
        [Import(name='optax', line=1, eager=True), Import(name='optax.contrib', line=1, eager=True)]
        >>> find_imports("def f():\n  import jax.numpy", "m")
        [Import(name='jax.numpy', line=2, eager=False)]
    """
    finder = _Finder(module if is_package else module.rpartition(".")[0])
    finder.visit(ast.parse(source))
    return finder.found


def check_declarations(package: Package, row: Mapping[str, set[str]]) -> Iterator[str]:
    """Yields a message for each requirement that `row` does not list."""
    groups = {ALWAYS: package.requirements, **package.extras}
    for group, requirements in groups.items():
        if group in _NOT_SHIPPED:
            continue
        listed = row.get(group, set()) | {package.name}
        for name in sorted(names(requirements) - listed):
            yield (
                f"{package.name}: pyproject.toml declares `{name}` under `{group}`; "
                f"the design lists {_join(listed - {package.name})} there. "
                "Remove it, or change the design and ARROWS in tools/import_contract.py first."
            )


def check_imports(package: Package) -> Iterator[str]:
    """Yields a message for each import that `package` does not declare or makes too early."""
    files = _modules(package)
    imports = {
        module: find_imports(path.read_text(), module, is_package=path.name == "__init__.py")
        for module, path in files.items()
    }
    required = _import_names(names(package.requirements))
    shipped = [reqs for extra, reqs in package.extras.items() if extra not in _NOT_SHIPPED]
    optional = _import_names(names(r for reqs in shipped for r in reqs)) - required
    at_import = closure([package.import_name], _eager_graph(imports))
    for module, found in imports.items():
        for top, line, eager in sorted({(i.top, i.line, i.eager) for i in found}):
            where = f"{files[module]}:{line}"
            if top not in _FREE | required | optional | {package.import_name}:
                yield (
                    f"{where}: imports `{top}`; {package.name} declares "
                    f"{_join(required | optional)}. Do without it, or declare it."
                )
            elif top in optional and eager and module in at_import:
                yield (
                    f"{where}: `import {package.import_name}` imports `{top}`, which only an "
                    "extra installs. Import it inside the function that needs it, or in a module "
                    "that the package does not import by itself."
                )


def check(packages: Mapping[str, Package]) -> list[str]:
    """Every breach of the contract, as messages."""
    found = [
        f"{name}: no row in ARROWS of tools/import_contract.py. Say there what it may import."
        for name in sorted(packages.keys() - ARROWS.keys())
    ]
    for name in sorted(packages.keys() & ARROWS.keys()):
        found += check_declarations(packages[name], ARROWS[name])
        found += check_imports(packages[name])
    return found


def main(argv: Sequence[str] = (), root: Path = ROOT) -> int:
    """Runs the command line."""
    packages = read_packages(root)
    problems = check(packages)
    for problem in problems:
        print(problem.replace(f"{root}/", ""), file=sys.stderr)
    print(f"import contract: {len(packages)} packages, {len(problems)} breaches")
    return 1 if problems else 0


class _Finder(ast.NodeVisitor):
    """Collects the imports of one file."""

    def __init__(self, package: str) -> None:
        self.found: list[Import] = []
        self._package = package
        self._eager = True

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parents = self._package.split(".")
        base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
        module = ".".join(part for part in (base, node.module) if part)
        self._add(module, node)
        for alias in node.names:
            # It may be a submodule, which is then imported as well.
            self._add(f"{module}.{alias.name}", node)

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func).rpartition(".")[2]
        if called in {"import_module", "__import__"} and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._add(name.value, node)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING":
            self._visit_later(node.body)
            node.body = []
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_later(node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_later(node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_later([node.body])

    def _visit_later(self, body: Sequence[ast.AST]) -> None:
        """Visits what does not run when the file is imported."""
        before, self._eager = self._eager, False
        for node in body:
            self.visit(node)
        self._eager = before

    def _add(self, name: str, node: ast.stmt | ast.expr) -> None:
        self.found.append(Import(name, node.lineno, self._eager))


def _modules(package: Package) -> dict[str, Path]:
    files = {}
    for path in sorted(package.source.rglob("*.py")):
        parts = path.relative_to(package.source.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def _eager_graph(imports: Mapping[str, Sequence[Import]]) -> dict[str, set[str]]:
    """For each module of a package, those modules of it that importing it imports."""
    graph = {}
    for module, found in imports.items():
        reached = {name for i in found if i.eager for name in _with_parents(i.name)}
        graph[module] = reached & imports.keys()
    return graph


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:stop]) for stop in range(1, len(parts) + 1)]


def _import_names(distributions: set[str]) -> set[str]:
    return {
        _IMPORT_NAMES.get(name, canonicalize_name(name).replace("-", "_")) for name in distributions
    }


def _join(items: set[str]) -> str:
    return ", ".join(f"`{item}`" for item in sorted(items)) or "nothing"


if __name__ == "__main__":
    sys.exit(main())
