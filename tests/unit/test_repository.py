"""The promises that the source itself keeps: size, direction of imports, what is packaged and what is pinned."""

from __future__ import annotations

import ast
import re
import tomllib
from graphlib import CycleError, TopologicalSorter
from typing import Any

import pytest
from packaging.requirements import Requirement

from support.source_tree import ROOT, Import, imports, module_files, module_name

MAX_LINES = 400
MANAGER = "safepoint.manager"
COORDINATION, ADAPTERS = f"{MANAGER}.coordination", f"{MANAGER}.adapters"
DEMO_TRAINING = f"{MANAGER}.cli.demo_training"  # plays the user's own script

# package → who may import it
ALLOWED: dict[str, tuple[str, ...]] = {
    "torch_xla": (
        COORDINATION,
        ADAPTERS,
        f"{MANAGER}.staging",
        f"{MANAGER}.preemption",
        f"{MANAGER}.rng",
        f"{MANAGER}.integrations.lightning_io",
        DEMO_TRAINING,
    ),
    "torch.distributed": (COORDINATION, ADAPTERS, "safepoint.formats.foreign.dcp_writing", DEMO_TRAINING),
    "tensorstore": (
        "safepoint.formats.codecs",
        "safepoint.formats.orbax",
        "safepoint.formats.foreign.orbax_files",
        "safepoint.formats.storage.object_client",
    ),
    "jax": (f"{MANAGER}.orbax_reader",),  # a program of its own, which nothing imports
    "orbax": (f"{MANAGER}.orbax_reader",),
    "pickle": (),
    "typer": (f"{MANAGER}.cli",),
    "rich": (f"{MANAGER}.cli",),
    "lightning": (f"{MANAGER}.integrations",),
    "transformers": (f"{MANAGER}.integrations",),
    "accelerate": (f"{MANAGER}.integrations",),
}
PURE = ("policies", "planner", "wire", "step_listing")
NOT_PURE = ("os", "io", "pathlib", "shutil", "tempfile", "socket", "subprocess", "torch", COORDINATION)
RUNS_DATA = {"eval", "exec", "compile", "__import__", "import_module", "importlib.import_module"}


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def describe(found: list[Import]) -> list[str]:
    return [f"{one.importer}:{one.line} imports {one.target}" for one in found]


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_modules_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in module_files()}

    assert {name: length for name, length in lengths.items() if length >= MAX_LINES} == {}


def test_functions_are_simple_and_the_linter_sees_to_it() -> None:
    lint = pyproject()["tool"]["ruff"]["lint"]

    assert lint["select"] == ["ALL"]
    assert lint["mccabe"]["max-complexity"] <= 10
    assert not any("C901".startswith(rule) for rule in lint["ignore"])
    assert [str(path) for path in module_files() if re.search(r"noqa[^\n]*C901", path.read_text())] == []


def test_formats_never_import_the_manager() -> None:
    assert (
        describe([one for one in imports() if one.importer.startswith("safepoint.formats") and one.is_of(MANAGER)])
        == []
    )


@pytest.mark.parametrize("package", [COORDINATION, ADAPTERS])
def test_the_lowest_layer_of_the_manager_knows_only_its_errors(package: str) -> None:
    allowed = (package, f"{MANAGER}.errors")

    found = [one for one in imports() if is_in(one.importer, (package,)) and one.is_of(MANAGER)]

    assert describe([one for one in found if not is_in(one.target, allowed)]) == []


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_do_no_input_or_output(name: str) -> None:
    found = [one for one in imports() if one.importer == f"{MANAGER}.{name}" and is_in(one.target, NOT_PURE)]

    assert describe([one for one in found if not one.is_for_types]) == []


def test_nothing_inside_imports_the_facade() -> None:
    users = (MANAGER, f"{MANAGER}.cli", f"{MANAGER}.integrations")
    found = [one for one in imports() if one.is_of(f"{MANAGER}.checkpoint_manager")]

    assert describe([one for one in found if one.importer != MANAGER and not is_in(one.importer, users[1:])]) == []


@pytest.mark.parametrize("package", ALLOWED)
def test_optional_and_dangerous_packages_are_imported_only_where_they_belong(package: str) -> None:
    found = [one for one in imports() if one.is_of(package) and not is_in(one.importer, ALLOWED[package])]

    assert describe(found) == []


@pytest.mark.parametrize("package", ["torch_xla", "tensorstore"])
def test_importing_safepoint_imports_nothing_that_starts_threads_or_devices(package: str) -> None:
    found = [one for one in imports() if one.is_of(package)]

    assert describe([one for one in found if not (one.is_lazy or one.is_for_types)]) == []


def test_nothing_inside_imports_an_integration() -> None:
    integrations = f"{MANAGER}.integrations"

    found = [one for one in imports() if one.is_of(integrations) and not is_in(one.importer, (integrations,))]

    assert describe(found) == []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    names = {module_name(path) for path in module_files()}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for one in imports():
        target = one.target if one.target in names else one.target.rpartition(".")[0]
        # A package that collects its own modules is no circle: what it collects names modules, not the package.
        if target in names and target != one.importer and not (one.is_lazy or one.is_for_types):
            graph[one.importer].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_nothing_is_run_by_name_from_data() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} calls {ast.unparse(node.func)}"
        for path in module_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in RUNS_DATA
    ]

    assert found == []


def test_every_folder_with_modules_is_packaged() -> None:
    folders = {path.parent for path in module_files()}
    wanted = sorted(".".join(("safepoint", *folder.relative_to(ROOT).parts)) for folder in folders)

    assert sorted(pyproject()["tool"]["setuptools"]["packages"]) == wanted


def test_types_are_shipped() -> None:
    shipped = pyproject()["tool"]["setuptools"]["package-data"]

    assert shipped["safepoint.formats"] == shipped["safepoint.manager"] == ["py.typed"]


def test_every_file_that_is_no_module_is_shipped() -> None:
    shipped = pyproject()["tool"]["setuptools"]["package-data"]
    listed = {ROOT.joinpath(*package.split(".")[1:], name) for package, names in shipped.items() for name in names}
    folders = {path.parent for path in module_files()}
    others = {path for folder in folders for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}

    assert others == listed


@pytest.mark.parametrize("name", ["xla", "cpu"])
def test_environments_are_pinned_and_satisfy_what_the_package_asks_for(name: str) -> None:
    lines = (ROOT / "tests" / "requirements" / f"{name}.txt").read_text().splitlines()
    pins = {}
    for line in lines:
        if line and not line.startswith("#"):
            package, _, version = line.partition("==")
            assert re.fullmatch(r"[0-9][0-9a-z.]*", version), line
            pins[package.lower().replace("_", "-")] = version
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras["test"], *(extras["xla"] if name == "xla" else ())):
        wanted = Requirement(text)
        pinned = pins.get(wanted.name.lower().replace("_", "-"))
        assert pinned is not None, f"{text} is not in {name}.txt"
        assert wanted.specifier.contains(pinned), f"{text}, but {name}.txt has {pinned}"
