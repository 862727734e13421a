"""What is released: the wheel and the source distribution hold the package, all of it and nothing else, and say so."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

from support.source_tree import ROOT, module_files

if TYPE_CHECKING:
    from pathlib import Path

BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
NOT_SOURCES = (".git", ".venv", ".*cache", ".hypothesis", "__pycache__", "build", "dist", "runs", "*.egg-info")
DATA = {"safepoint/formats/py.typed", "safepoint/manager/py.typed"}


@dataclass(frozen=True)
class Built:
    wheel: Path
    source: Path
    wheel_of_source: Path


def build(kind: str, source: Path, folder: Path) -> Path:
    folder.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Deprecat" not in ended.stderr, ended.stderr
    return folder / ended.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("release")
    shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*NOT_SOURCES))
    source = build("sdist", folder / "checkout", folder / "sdist")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    wheel = build("wheel", folder / "checkout", folder / "wheel")
    return Built(wheel=wheel, source=source, wheel_of_source=build("wheel", unpacked, folder / "wheel-of-source"))


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def shipped() -> set[str]:
    """Return the files that the package consists of."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    others = {f"{package.replace('.', '/')}/{name}" for package, names in data.items() for name in names}
    return {f"safepoint/{path.relative_to(ROOT)}" for path in module_files()} | others


def metadata_of(wheel: Path) -> Metadata:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Metadata.from_email(archive.read(name), validate=True)


def test_the_wheel_has_every_module_and_its_types_and_no_tests(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
        assert archive.testzip() is None
    package = {name for name in names if not name.split("/")[0].endswith(".dist-info")}

    assert package == shipped()
    assert package >= DATA
    assert len(names) == len(set(names))
    assert built.wheel.name == f"safepoint-{project()['version']}-py3-none-any.whl"


def test_the_wheel_says_what_it_holds(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
        (record,) = [name for name in names if name.endswith(".dist-info/RECORD")]
        listed = [line.rsplit(",", 2) for line in archive.read(record).decode().splitlines()]
        for name, digest, size in listed:
            if name != record:
                data = archive.read(name)
                wanted = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                assert (digest, int(size)) == (f"sha256={wanted}", len(data)), name
    info = record.rpartition("/")[0]

    assert sorted(name for name, _, _ in listed) == sorted(names)
    assert {f"{info}/licenses/LICENSE", f"{info}/entry_points.txt", f"{info}/METADATA"} <= set(names)


def test_the_metadata_are_valid_and_say_what_pyproject_says(built: Built) -> None:
    metadata = metadata_of(built.wheel)
    said = project()

    assert metadata.name == "safepoint"
    assert str(metadata.version) == said["version"]
    assert metadata.license_expression == said["license"]
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text()
    assert metadata.requires_python is not None
    assert "3.11.0" in metadata.requires_python
    assert "3.10.9" not in metadata.requires_python
    assert metadata.classifiers == said["classifiers"]
    assert set(metadata.provides_extra or ()) == set(said["optional-dependencies"])
    required = {Requirement(text) for text in said["dependencies"]}
    assert {one for one in metadata.requires_dist or () if one.marker is None} == required


def test_every_dependency_has_a_floor(built: Built) -> None:
    required = metadata_of(built.wheel).requires_dist or ()

    assert [str(one) for one in required if not one.specifier and not one.extras] == []


def test_the_source_distribution_makes_the_same_wheel(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as one, zipfile.ZipFile(built.wheel_of_source) as other:
        contents = [{name: wheel.read(name) for name in wheel.namelist()} for wheel in (one, other)]

    assert contents[0] == contents[1]


def test_the_source_distribution_has_no_more_than_that(built: Built) -> None:
    with tarfile.open(built.source) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    modules = {name.removeprefix("safepoint/") for name in shipped()}

    assert {name for name in names if name.split("/")[0] in ("manager", "formats")} == modules
    others = {name for name in names - modules if not name.startswith("safepoint.egg-info/")}
    assert others == {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
