"""Reads the repository's own source, for tests of its structure."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ROOT", "Import", "imports", "module_files", "module_name"]

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("manager", "formats")


@dataclass(frozen=True)
class Import:
    """One imported name, as `importer` sees it.

    Attributes:
        importer: the module in which it stands.
        target: what it imports, dotted, with the name taken from the module where there is one.
        line: where.
        is_lazy: whether it is inside a function, so that importing `importer` does not run it.
        is_for_types: whether only type checkers run it.
    """

    importer: str
    target: str
    line: int
    is_lazy: bool
    is_for_types: bool

    def is_of(self, package: str) -> bool:
        """Say whether it imports the package, or something in it."""
        return self.target == package or self.target.startswith(package + ".")


def module_files() -> list[Path]:
    """Return the files of the two packages."""
    return sorted(path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the name under which a file of ours is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("safepoint", *parts[: -1 if parts[-1] == "__init__" else None]))


@cache
def imports() -> tuple[Import, ...]:
    """Return all imports of the two packages."""
    return tuple(
        found
        for path in module_files()
        for found in _imports_in(ast.parse(path.read_text()), module_name(path), is_lazy=False, is_for_types=False)
    )


def _imports_in(node: ast.AST, importer: str, *, is_lazy: bool, is_for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        lazy = is_lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        types = is_for_types or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        names: list[str] = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            names = [f"{child.module}.{alias.name}" for alias in child.names]
        for name in names:
            yield Import(importer, name, child.lineno, lazy, types)
        yield from _imports_in(child, importer, is_lazy=lazy, is_for_types=types)
