"""What makes no sense is refused by every command: with a message and a status, as one JSON document with `--json`."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import pytest

from safepoint.manager import CheckpointManager
from safepoint.manager.errors import InvalidArgumentError, StorageError

from support.command import example_state, run, save_steps

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMANDS = (
    "ls {}",
    "show {}",
    "cat {} model.weight",
    "verify {}",
    "diff {} run/10",
    "diff run/10 {}",
    "report {} -o page.html",
    "copy {} copied",
    "copy run/10 {}",
    "consolidate {} whole",
    "consolidate run/10 {}",
    "convert {} converted",
    "convert run/10 {}",
    "convert run/10 {} --format huggingface --item model",
    "convert run/10 {} --format dcp",
    "rm {} --yes",
    "gc {}",
    "gc {} --keep-last 1 --yes",
    "pin {}",
    "doctor {}",
)
"""All that take a path, each in the place of `{}`."""

PLACES = ("a file", "a dangling link", "below a file", "a fifo", "a loop", "too long", "an unknown URL", "")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory to be in, with a sound root and what is none."""
    monkeypatch.chdir(tmp_path)
    save_steps(tmp_path / "run", 10, 20)
    (tmp_path / "a file").write_text("something")
    (tmp_path / "a dangling link").symlink_to("nowhere")
    (tmp_path / "a loop").symlink_to("a loop")
    os.mkfifo(tmp_path / "a fifo")
    yield tmp_path
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".safepoint", "10", "20"]


def path_of(place: str) -> str:
    return {"below a file": "a file/run", "too long": "a" * 300, "an unknown URL": "ftp://host/run"}.get(place, place)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_what_is_no_directory(command: str) -> None:
    for place in PLACES:
        arguments = [path_of(place) if word == "{}" else word for word in command.split()]
        done = run(*arguments, "--json")

        assert done.code in (1, 2, 4), (place, done)
        if command.startswith("doctor") and done.out:
            findings = done.json["findings"]
            assert any(one["level"] == "problem" for one in findings), place
            continue
        assert done.out == "", place
        error = json.loads(done.err)["error"]
        assert error["type"] in ("InvalidArgumentError", "StorageError", "StepNotFoundError"), (place, error)
        assert error["message"], place


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls",),
        ("ls", "run", "too", "many"),
        ("ls", "run", "--no-such-option"),
        ("ls", "run", "--keep-last", "some"),
        ("ls", "run", "--keep-last", "0"),
        ("convert", "run", "out", "--mode", "other"),
        ("demo", "--steps", "4"),
        ("no-such-command",),
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_a_document_where_json_is_asked_for_and_a_message_otherwise(
    arguments: tuple[str, ...],
) -> None:
    done = run(*arguments, "--json")
    assert (done.code, done.out) == (2, "")
    assert json.loads(done.err)["error"]["type"] == "InvalidArgumentError"

    told = run(*arguments)
    assert (told.code, told.out) == (2, "")
    assert "Usage" in told.err
    assert not told.err.startswith("{")


def test_json_behind_two_dashes_is_a_name() -> None:
    done = run("ls", "--", "--json")

    assert done.code == 2
    assert done.err.startswith("error: there is no such directory")


def test_what_is_logged_meanwhile_is_no_part_of_a_document(tmp_path: Path) -> None:
    save_steps(tmp_path / "other", 10)
    (tmp_path / "other" / "10" / "commit.json").write_bytes(b"\xff[]")
    done = run("copy", "run/10", "other", "--json")

    assert (done.code, done.err) == (0, "")
    assert done.json["copied"] == [10]


@pytest.mark.parametrize("command", ["copy run/10 run/20", "consolidate run/10 run/20", "convert run/10 run/20"])
def test_no_root_is_made_inside_a_step(command: str, tmp_path: Path) -> None:
    before = sorted(path.name for path in (tmp_path / "run" / "20").iterdir())
    done = run(*command.split())

    assert done.code == 2
    assert "this is a step, and a root is wanted" in done.err
    assert sorted(path.name for path in (tmp_path / "run" / "20").iterdir()) == before
    found = {one["name"]: one for one in run("doctor", "run/20", "--json").json["findings"]}
    assert "this is a step" in found["root"]["text"]
    with pytest.raises(InvalidArgumentError, match="this is a step"):
        CheckpointManager(tmp_path / "run" / "20")


def test_a_root_whose_link_leads_nowhere_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "dead").symlink_to(tmp_path / "unmounted")
    for root in (tmp_path / "dead", tmp_path / "dead" / "run"):
        with pytest.raises(StorageError, match=f"a symbolic link leads to {re.escape(str(tmp_path))}/unmounted"):
            CheckpointManager(root)
    assert "leads to no directory" in run("ls", tmp_path / "dead").err
    (tmp_path / "unmounted").mkdir()
    with CheckpointManager(tmp_path / "dead") as manager:
        assert manager.restore_latest() is None
        manager.save(1, example_state(1))
    assert (tmp_path / "unmounted" / "1" / "commit.json").exists()


def test_a_link_with_the_name_of_a_step_is_a_problem_and_never_followed_or_deleted(tmp_path: Path) -> None:
    moved, root = tmp_path / "elsewhere", tmp_path / "root"
    save_steps(root, 1, 2, 3)
    (root / "2").rename(moved)
    (root / "2").symlink_to(moved)
    (root / "7").symlink_to(tmp_path / "unmounted")
    (root / "8").symlink_to(tmp_path)  # something else: not ours

    listed = run("ls", root, "--json").json
    told = {one["name"]: one["kind"] for one in listed["others"]}
    assert [one["step"] for one in listed["steps"]] == [1, 3]
    assert told == {"2": "problem", "7": "problem", "8": "not ours"}
    assert "links in a root are not followed" in run("ls", root).out
    found = {one["name"]: one for one in run("doctor", root, "--json").json["findings"]}
    assert found["root"]["level"] == "problem"
    assert run("verify", root).code == 1
    assert run("show", root / "2").code == 1
    for command in ("rm", "pin"):
        assert run(command, root / "2", *(["--yes"] if command == "rm" else [])).code != 0
    assert run("gc", root, "--keep-last", 1, "--yes").code == 0
    with CheckpointManager(root) as manager:
        with pytest.raises(Exception, match="symbolic link"):
            manager.save(2, example_state(2))
        restored = manager.restore_latest()
        assert restored is not None
        assert restored.step == 3
    assert (root / "2").is_symlink()
    assert (root / "7").is_symlink()
    assert (moved / "commit.json").exists()


def test_a_root_with_nothing_but_a_link_to_a_step_is_not_begun_anew(tmp_path: Path) -> None:
    save_steps(tmp_path / "root", 1)
    (tmp_path / "root" / "1").rename(tmp_path / "elsewhere")
    (tmp_path / "root" / "1").symlink_to(tmp_path / "elsewhere")

    with (
        CheckpointManager(tmp_path / "root") as manager,
        pytest.raises(Exception, match=r"none of them can be restored.*symbolic link"),
    ):
        manager.restore_latest()


def test_convert_takes_urls_on_both_sides(tmp_path: Path) -> None:
    url = f"memory://nonsense/{tmp_path.name}"
    assert run("convert", "run/10", url).code == 0
    assert run("convert", f"{url}/10", "back").code == 0
    assert run("diff", "run/10", "back/10").code == 0
    assert not (tmp_path / "memory:").exists()
