"""The table of who reads what says what tests run, and all of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.matrix import DOCUMENT, ROWS, with_table

ROOT = Path(__file__).parents[2]
TESTS = sorted({row.test for row in ROWS})


def test_the_table_in_the_document_is_that_of_the_tests() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_table(text) == text, "run `python tests/support/matrix.py`, and look at what changed"


@pytest.mark.parametrize("test", TESTS)
def test_each_row_is_a_test_that_takes_its_cases_from_the_table(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert len(functions) == 1
    if not any(row.counts for row in ROWS if row.test == test):
        return
    taken = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert f"cases({test!r})" in taken
    decorators = " ".join(ast.unparse(one) for one in functions[0].decorator_list)
    assert "parametrize" in decorators
    assert "CASES" in decorators or "cases(" in decorators
