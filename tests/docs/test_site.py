"""The API page of the site, built: it has every public name, also of what is made for packages not installed here."""

from __future__ import annotations

import ast
import html
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.source_tree import ROOT

DOCS = ROOT / "docs"
DIRECTIVE = re.compile(r"^\.\. automodule:: safepoint\.([\w.]+)\n((?:   :.*\n)*)", re.MULTILINE)
IMPORT = re.compile(r"^from (safepoint[\w.]*) import (.+)$", re.MULTILINE)


def source_of(module: str) -> str:
    path = ROOT / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def public_names(module: str) -> list[str]:
    """What a module offers, by its source: so that nothing is imported here which the site's build would."""
    for statement in ast.parse(source_of(module)).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    return []


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The API page alone, which takes a quarter of the time of the site."""
    pytest.importorskip("sphinx", reason="the site is built where Sphinx is")
    folder = tmp_path_factory.mktemp("site")
    (folder / "docs").mkdir()
    shutil.copy(DOCS / "api.md", folder / "docs")
    options = ("-W", "--keep-going", "-q", "-D", "root_doc=api", "-D", "suppress_warnings=myst.xref_missing")
    built = subprocess.run(
        [sys.executable, "-P", "-m", "sphinx", *options, "-c", DOCS, folder / "docs", folder / "out"],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=110,
    )
    assert built.returncode == 0, built.stderr
    return (Path(folder) / "out" / "api.html").read_text()


def described(page: str) -> set[str]:
    return set(re.findall(r'<dt [^>]*\bid="([\w.]+)"', page))


def test_every_public_name_has_its_place_on_the_api_page(page: str) -> None:
    names = {name.rsplit(".", 1)[-1] for name in described(page)}
    missing = {}
    for module, options in DIRECTIVE.findall((DOCS / "api.md").read_text()):
        excluded = re.search(r":exclude-members: (.*)", options)
        hidden = set(excluded[1].split(", ")) if excluded else set()
        missing[module] = sorted(set(public_names(module)) - hidden - names)

    assert len(missing) > 5
    assert {module: names for module, names in missing.items() if names} == {}


def test_what_the_guides_import_has_its_place_on_the_api_page(page: str) -> None:
    names = {name.rsplit(".", 1)[-1] for name in described(page)}
    guides = [ROOT / "README.md", *DOCS.glob("*.md")]
    imported = {
        (module, name)
        for guide in guides
        for module, imported in IMPORT.findall(guide.read_text())
        for name in imported.split(", ")
    }

    assert len(imported) > 20
    assert {(module, name) for module, name in imported if name not in names} == set()


def test_the_callback_for_hugging_face_is_described_whether_or_not_transformers_is_installed(page: str) -> None:
    text = html.unescape(re.sub(r"<[^>]+>", "", page))

    assert "integrations.transformers.SafepointCallback(root, *, save_every=None," in text
    assert "resume(trainer, *, step=None)" in text
