"""Every command takes the URL of a root or step, and copies go from one kind of root to another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from safepoint.formats.storage import open_storage
from safepoint.manager import CheckpointManager
from safepoint.manager.pins import pinned_steps

from support.command import example_state, run, save_steps

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Three steps, copied to an object store of this process."""
    save_steps(tmp_path / "run", 10, 20, 30)
    url = f"memory://cli/{request.node.name}/run é"
    copied = run("copy", tmp_path / "run", url, "--json")
    assert copied.code == 0
    assert copied.json["copied"] == [10, 20, 30]
    assert copied.json["destination"] == url
    return url


def steps(root: object) -> list[int]:
    return [one["step"] for one in run("ls", root, "--json").json["steps"]]


def test_looking_at_a_root_and_its_steps(root: str, tmp_path: Path) -> None:
    assert steps(root) == [10, 20, 30]
    assert run("show", f"{root}/20", "--json").json["step"] == 20
    assert run("show", root, "--json").json["step"] == 30
    assert run("cat", f"{root}/20", "step", "--json").code == run("cat", tmp_path / "run" / "20", "step", "--json").code
    assert run("verify", root).code == 0
    assert run("diff", f"{root}/20", tmp_path / "run" / "20").code == 0
    assert run("verify", "memory://cli/nothing here").code != 0


def test_copies_come_back_to_a_directory(root: str, tmp_path: Path) -> None:
    back = tmp_path / "back"
    assert run("copy", f"{root}/20", back).code == 0
    assert run("copy", root, back).code == 0
    assert steps(back) == [10, 20, 30]  # as they were committed
    assert run("verify", back).code == 0
    with CheckpointManager(back) as manager:
        assert manager.restore(20).state is not None


def test_pins_removals_and_sweeps(root: str) -> None:
    assert run("pin", f"{root}/10").code == 0
    assert pinned_steps(open_storage(root)) == {10}
    assert run("rm", f"{root}/20", "--yes").code == 0
    assert steps(root) == [10, 30]
    with CheckpointManager(root) as manager:
        manager.save(40, example_state(40))
    planned = run("gc", root, "--keep-last", "1", "--json").json
    assert [one["step"] for one in planned["leftovers"]] == [30]
    assert planned["num_bytes"] > 0
    assert run("gc", root, "--keep-last", "1", "--yes").code == 0
    assert steps(root) == [10, 40]
    assert {entry.name for entry in open_storage(root).list("")} == {"10", "40", ".safepoint"}


def test_a_damaged_step_is_removed_by_its_number(root: str) -> None:
    open_storage(root).replace("20/commit.json", b"{")
    assert run("rm", f"{root}/20", "--yes").code == 0
    assert {entry.name for entry in open_storage(root).list("")} == {"10", "30", ".safepoint"}


def test_consolidating_to_a_url(root: str, tmp_path: Path) -> None:
    assert run("consolidate", f"{root}/20", f"{root} export").code == 0
    assert steps(f"{root} export") == [20]
    assert run("diff", f"{root} export/20", tmp_path / "run" / "20").code == 0


def test_doctor_says_how_a_root_by_url_is(root: str) -> None:
    found = run("doctor", root, "--json")
    assert found.code == 0, found.out
    findings = {one["name"]: one for one in found.json["findings"]}
    assert findings["root"]["data"] == {"steps": 3, "problems": 0}
    assert {findings[name]["level"] for name in ("root", "writable", "conditions", "a save")} == {"ok"}
    assert {entry.name for entry in open_storage(root).list("")} == {"10", "20", "30", ".safepoint"}
    refused = run("doctor", "ftp://bucket/run", "--json")
    assert refused.code != 0
