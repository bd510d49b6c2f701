"""What the package is made of, counted: `python scripts/structure.py`, or `--check` to fail where a limit is passed.

Lines and files; functions of more than 80 lines; circles of imports between files, those for types included; names
imported through a package's `__init__`; modules with one importer; class names that stand for several classes.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp

PACKAGE = Path(__file__).parents[1] / "src" / "evener"
DOORS = ("evener", "evener.autodiff")
"""Packages that users import from: they alone may hold names."""
LIMITS = {
    "functions over 80 lines": 0,
    "circles of imports": 0,
    "names imported from a package": 0,
    "class names with more than one meaning": 0,
}


def sources() -> dict[str, tuple[Path, ast.Module]]:
    """Every module's name with its file and its syntax tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = (path, ast.parse(path.read_text()))
    return found


def long_functions(modules: dict[str, tuple[Path, ast.Module]]) -> Iterator[str]:
    """Functions of more than 80 lines, their docstrings not counted."""
    for name, (_, tree) in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = node.body[0] if ast.get_docstring(node) else None
                lines = _lines_of(node) - (_lines_of(docstring) if docstring else 0)
                if lines > 80:
                    yield f"{name}.{node.name}: {lines} lines"


def _lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def circles(graph: grimp.ImportGraph) -> Iterator[str]:
    """Groups of modules that import one another, directly or by way of others."""
    seen: set[str] = set()
    for module in sorted(graph.modules):
        if module not in seen:
            circle = {module} | (_reached(graph, module) & _reaching(graph, module))
            seen |= circle
            if len(circle) > 1:
                yield ", ".join(sorted(circle))


def _reached(graph: grimp.ImportGraph, module: str) -> set[str]:
    return set(graph.find_upstream_modules(module))


def _reaching(graph: grimp.ImportGraph, module: str) -> set[str]:
    return set(graph.find_downstream_modules(module))


def package_imports(modules: dict[str, tuple[Path, ast.Module]]) -> Iterator[str]:
    """Imports of a name from a package's `__init__`, and packages whose `__init__` holds more than a docstring."""
    packages = {name for name, (path, _) in modules.items() if path.name == "__init__.py"} - set(DOORS)
    for name, (_, tree) in modules.items():
        if _is_door(name):
            continue
        if name in packages and len(tree.body) > 1:
            yield f"{name}: its __init__ holds more than a docstring"
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in packages and not _is_door(node.module):
                yield from (
                    f"{name}: {node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" not in modules
                )


def _is_door(name: str) -> bool:
    return name == "evener" or name.startswith("evener.autodiff")


def with_one_importer(graph: grimp.ImportGraph) -> Iterator[str]:
    """Modules that one other module imports, and no more."""
    for module in sorted(graph.modules):
        importers = graph.find_modules_that_directly_import(module)
        if len(importers) == 1:
            yield f"{module} (by {next(iter(importers))})"


def repeated_classes(modules: dict[str, tuple[Path, ast.Module]]) -> Iterator[str]:
    """Class names that more than one module defines; `autodiff` says PyTorch's names again on purpose."""
    homes = defaultdict(list)
    for name, (_, tree) in modules.items():
        if not name.startswith("evener.autodiff"):
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(name)
    yield from (f"{name}: {', '.join(found)}" for name, found in sorted(homes.items()) if len(found) > 1)


def main() -> None:
    """Print every count; with `--check`, end with 1 where one is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where a limit is passed")
    parser.add_argument(
        "--package", default="", help="list what concerns evener.PACKAGE, modules with one importer too"
    )
    arguments = parser.parse_args()
    modules = sources()
    graph = grimp.build_graph("evener", cache_dir=None)
    counted = {
        "functions over 80 lines": list(long_functions(modules)),
        "circles of imports": list(circles(graph)),
        "names imported from a package": list(package_imports(modules)),
        "class names with more than one meaning": list(repeated_classes(modules)),
        "modules with one importer": list(with_one_importer(graph)),
    }
    lines = sum(len(path.read_text().splitlines()) for path, _ in modules.values())
    print(f"{lines} lines in {len(modules)} files")
    for what, found in counted.items():
        print(f"{len(found)} {what}")
        for item in found if what in LIMITS or arguments.package else ():
            if f"evener.{arguments.package}" in item:
                print(f"    {item}")
    over = [what for what, limit in LIMITS.items() if len(counted[what]) > limit]
    if arguments.check and over:
        sys.exit(f"over the limit: {', '.join(over)}")


if __name__ == "__main__":
    main()
