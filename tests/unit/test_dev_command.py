from __future__ import annotations

import fcntl
import importlib.machinery
import importlib.util
import os
import sys
import tomllib
import types
from typing import TYPE_CHECKING, Any

import pytest

from support.source_tree import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OLDER = "0123456789abcdef"


class Pip:
    """Stands in for pip: notes what it was asked to install, and fails if told to."""

    def __init__(self) -> None:
        self.installed: list[Path] = []
        self.fails = False

    def __call__(self, python: Path, *_arguments: object) -> None:
        if self.fails:
            raise SystemExit("no network")
        self.installed.append(python)


@pytest.fixture
def pip() -> Pip:
    return Pip()


@pytest.fixture
def dev(tmp_path: Path, pip: Pip) -> Iterator[Any]:
    """The command as a module, with a cache folder and a checkout of its own."""
    loader = importlib.machinery.SourceFileLoader("dev_command", str(ROOT / "dev"))
    module = types.ModuleType(loader.name)
    module.__file__ = str(ROOT / "dev")
    sys.modules[loader.name] = module
    source = loader.get_source(loader.name)
    assert source is not None
    exec(compile(source, module.__file__, "exec"), module.__dict__)  # noqa: S102  # leaves no bytecode beside the command
    (tmp_path / "tests" / "requirements").mkdir(parents=True)
    (tmp_path / "tests" / "requirements" / "cpu.txt").write_text("# nothing\n")
    (tmp_path / "pyproject.toml").touch()
    vars(module).update(ROOT=tmp_path, BUILD=tmp_path / "build", CACHE=tmp_path / "cache", pip=pip)
    yield module
    for descriptor in module.held_locks:
        os.close(descriptor)
    del sys.modules[loader.name]


def older_environment(dev: Any, *, age_secs: float) -> Path:
    folder: Path = dev.CACHE / f"cpu-{OLDER}"
    folder.mkdir(parents=True)
    mark = folder / "complete"
    mark.touch()
    then = mark.stat().st_mtime - age_secs
    os.utime(mark, (then, then))
    return folder


def test_an_environment_is_built_once_and_again_only_for_other_requirements(dev: Any, pip: Pip) -> None:
    first = dev.Environment("cpu").ready().folder
    again = dev.Environment("cpu").ready().folder
    assert (again, len(pip.installed)) == (first, 1)

    (dev.ROOT / "tests" / "requirements" / "cpu.txt").write_text("# something else\n")

    assert dev.Environment("cpu").ready().folder != first
    assert len(pip.installed) == 2


def test_an_interrupted_build_is_started_again(dev: Any, pip: Pip) -> None:
    pip.fails = True
    with pytest.raises(SystemExit):
        dev.Environment("cpu").ready()
    left_over = dev.Environment("cpu").folder / "left-over"
    left_over.touch()
    for descriptor in dev.held_locks:  # as the end of the interrupted process does
        os.close(descriptor)
    dev.held_locks.clear()
    pip.fails = False

    assert dev.Environment("cpu").ready().is_complete
    assert not left_over.exists()


def test_an_older_environment_is_removed_when_nobody_uses_it(dev: Any) -> None:
    folder = older_environment(dev, age_secs=2 * dev.GRACE_SECS)

    dev.Environment("cpu").ready()

    assert not folder.exists()


def test_an_older_environment_stays_while_it_is_used_or_was_lately(dev: Any) -> None:
    used = older_environment(dev, age_secs=2 * dev.GRACE_SECS)
    with dev.lock_of(used).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        dev.Environment("cpu").ready()
        assert used.exists()

    os.utime(used / "complete")
    (dev.ROOT / "tests" / "requirements" / "cpu.txt").write_text("# something else\n")
    dev.Environment("cpu").ready()
    assert used.exists()


def test_what_is_not_ours_in_the_cache_folder_stays(dev: Any) -> None:
    foreign = dev.CACHE / "cpu-mine"
    foreign.mkdir(parents=True)

    dev.Environment("cpu").ready()

    assert foreign.exists()


def test_the_checkout_is_installed_over_an_environment_and_linked(dev: Any, pip: Pip) -> None:
    environment = dev.Environment("cpu").ready()

    folder = dev.checkout(environment)
    dev.checkout(environment)

    assert (dev.ROOT / ".venv").resolve() == folder
    assert [python.parent.parent for python in pip.installed] == [environment.folder, folder]


def test_a_virtual_environment_of_the_users_own_stays(dev: Any) -> None:
    own = dev.ROOT / ".venv"
    own.mkdir()

    dev.checkout(dev.Environment("cpu").ready())

    assert own.is_dir()
    assert not own.is_symlink()


def test_a_report_goes_on_after_a_failure_and_ends_with_it(dev: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = dev.Report()

    report.stage("first", sys.executable, "-c", "raise SystemExit(3)")
    report.stage("second", sys.executable, "-c", "pass")

    assert report.failed
    assert [line.split("(")[0].split() for line in report.lines] == [["FAILED", "first"], ["ok", "second"]]
    assert "second" in capsys.readouterr().out


def test_the_site_is_left_out_where_sphinx_is_not_installed(dev: Any) -> None:
    report = dev.Report()
    report.docs(dev.Environment("cpu"), dev.BUILD / "python")

    assert report.lines == ["skipped docs: Sphinx, myst-parser and furo are not in the cpu environment"]
    assert not report.failed


def test_floors_are_tested_at_exactly_the_lower_bounds_that_the_project_states(
    dev: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dev.ROOT / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    environment = dev.Environment("cpu")
    installed, tested = [], []
    monkeypatch.setitem(vars(dev), "main_environment", environment.ready)
    monkeypatch.setitem(vars(dev), "build_wheel", lambda _environment: dev.BUILD / "the.whl")
    monkeypatch.setitem(vars(dev), "pip", lambda _python, *arguments: installed.append(arguments))
    monkeypatch.setitem(vars(dev), "run", lambda *command: tested.append(command) or 0)

    assert dev.floors() == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + [
        text for name in ("lightning", "huggingface", "orbax") for text in project["optional-dependencies"][name]
    ]
    pins = {text for arguments in installed for text in arguments if "==" in str(text)}
    assert pins == {text.replace(">=", "==") for text in asked if not text.startswith("torch>=")}
    assert [command[-1] for command in tested] == ["tests/compat", "tests/integrations"]


def test_a_lane_runs_beside_a_stage_and_its_failure_counts(
    dev: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    waits = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\nprint('met')"
    makes = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
    report = dev.Report()
    dev.BUILD.mkdir(exist_ok=True)

    lane = [
        dev.Stage("makes", (sys.executable, "-c", makes, tmp_path / "made")),
        dev.Stage("fails", (sys.executable, "-c", "raise SystemExit(1)")),
    ]
    with report.beside(lane):
        report.stage("waits for the lane", sys.executable, "-c", waits, tmp_path / "made")

    ends = [line.split("(")[0].split(maxsplit=1) for line in report.lines]
    assert [(end, name.strip()) for end, name in ends] == [
        ("ok", "waits for the lane"),
        ("ok", "makes"),
        ("FAILED", "fails"),
    ]
    assert report.failed
    assert "── fails" in capfd.readouterr().out
