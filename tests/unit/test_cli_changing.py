from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from safepoint.formats.commit_record import CommitRecord
from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager
from safepoint.manager.copying import copy_steps
from safepoint.manager.pins import pinned_steps
from safepoint.manager.verifying import verify_steps

from support.command import commit_sharded, example_state, flip_byte, run, save_steps
from support.interrupting import Interrupting

if TYPE_CHECKING:
    from pathlib import Path

WEIGHT = "model/model.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_steps(tmp_path / "run", 10, 20, 30)
    return tmp_path / "run"


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} - {".safepoint"}


def steps(root: Path) -> list[int]:
    return [one["step"] for one in run("ls", root, "--json").json["steps"]]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def record(root: Path, step: int) -> CommitRecord:
    return CommitRecord.from_bytes((root / str(step) / "commit.json").read_bytes(), path="")


# copy


def test_a_copy_of_a_root_is_the_same_steps_byte_for_byte_in_the_same_order(root: Path, tmp_path: Path) -> None:
    save_steps(root, 15)
    pair = root, tmp_path / "copy"

    copied, again = run("copy", *pair, "--json"), run("copy", *pair, "--json")

    assert (copied.code, again.code) == (0, 0)
    assert copied.json["copied"] == again.json["present"] == [10, 20, 30, 15]
    assert again.json["copied"] == []
    assert steps(tmp_path / "copy") == [10, 20, 30, 15]
    for step in (10, 20, 30, 15):
        assert contents(root / str(step)) == contents(tmp_path / "copy" / str(step))
    with CheckpointManager(tmp_path / "copy") as manager:
        restored = manager.restore_latest()
        assert restored is not None
        assert restored.step == 15


def test_a_single_step_is_copied_behind_what_is_there(root: Path, tmp_path: Path) -> None:
    save_steps(tmp_path / "other", 40, 50)

    copied = run("copy", root / "20", tmp_path / "other")

    assert copied.out == "step 20 copied and verified"
    assert steps(tmp_path / "other") == [40, 50, 20]
    assert record(tmp_path / "other", 20).attempt == record(root, 20).attempt
    assert run("verify", tmp_path / "other").code == 0


def test_a_copy_interrupted_at_any_block_shows_whole_steps_only_and_goes_on(tmp_path: Path) -> None:
    for step in (1, 2):
        commit_sharded(tmp_path / "run", step, example_state(step))
    source = LocalStorage(tmp_path / "run")
    for at in range(8):
        destination = tmp_path / f"copy-{at}"
        with pytest.raises(KeyboardInterrupt):
            copy_steps(source, destination, progress=Interrupting(at))

        assert verify_steps(LocalStorage(destination)) == []
        done = len(steps(destination))
        result = copy_steps(source, destination)

        assert (len(result.present), len(result.copied)) == (done, 2 - done)
        assert len(result.resumed) == 1
        assert names(destination) == {"1", "2"}
        assert verify_steps(LocalStorage(destination)) == []


def test_a_copy_goes_on_with_whole_files_and_writes_torn_ones_anew(tmp_path: Path) -> None:
    commit_sharded(tmp_path / "run", 1, example_state(1))
    attempt = record(tmp_path / "run", 1).attempt
    begun = tmp_path / "copy" / f"1.tmp-{attempt}"
    shutil.copytree(tmp_path / "run" / "1", begun)
    whole, torn = sorted(begun.glob("shard-*"))
    torn.write_bytes(torn.read_bytes()[:100])
    kept = whole.stat().st_ino

    copied = run("copy", tmp_path / "run", tmp_path / "copy", "--json")

    assert copied.json["resumed"] == [1]
    assert (tmp_path / "copy" / "1" / whole.name).stat().st_ino == kept
    assert contents(tmp_path / "run" / "1") == contents(tmp_path / "copy" / "1")


def test_a_damaged_step_is_named_and_not_copied_and_the_others_are(root: Path, tmp_path: Path) -> None:
    flip_byte(root / "20" / WEIGHT)
    (root / "30" / "commit.json").write_text("{")

    copied = run("copy", root, tmp_path / "copy")

    assert copied.code == 1
    assert copied.out == "step 10 copied and verified"
    assert "step 20" in copied.err
    assert "step 30" in copied.err
    assert names(tmp_path / "copy") == {"10"}


def test_another_step_of_the_same_number_stops_a_copy_before_it_begins(root: Path, tmp_path: Path) -> None:
    save_steps(tmp_path / "copy", 30)

    copied = run("copy", root, tmp_path / "copy")

    assert copied.code == 3
    assert "step 30 is there already" in copied.err
    assert steps(tmp_path / "copy") == [30]


def test_a_root_that_a_job_writes_to_is_not_changed_by_others(root: Path, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "busy") as manager:
        manager.save(1, example_state(1))
        (tmp_path / "busy" / ("2.tmp-" + "a" * 16)).mkdir()

        refused = [
            run("copy", root, tmp_path / "busy"),
            run("consolidate", root, tmp_path / "busy"),
            run("rm", tmp_path / "busy" / "1", "--yes"),
            run("gc", tmp_path / "busy", "--yes"),
        ]
        planned = run("gc", tmp_path / "busy")
        looked = run("verify", tmp_path / "busy")

        assert [one.code for one in refused] == [3] * 4
        assert all("the root is owned by process" in one.err for one in refused)
        assert "may be under way" in planned.out
        assert looked.code == 0
        assert names(tmp_path / "busy") == {"1", "2.tmp-" + "a" * 16}


# consolidate


def test_a_sharded_step_becomes_whole_leaves_that_other_tools_and_a_restore_read(tmp_path: Path) -> None:
    state = example_state(5)
    commit_sharded(tmp_path / "run", 5, state, process_count=3)

    done = run("consolidate", tmp_path / "run" / "5", tmp_path / "export", "--json")

    assert done.code == 0
    assert done.json["files"] == [WEIGHT]
    loaded = load_file(tmp_path / "export" / "5" / WEIGHT)
    assert torch.equal(loaded["weight"], state["model"]["weight"])
    assert torch.equal(loaded["bias"], state["model"]["bias"])
    assert run("diff", tmp_path / "run", tmp_path / "export").code == 0
    with CheckpointManager(tmp_path / "export") as manager:
        restored = manager.restore(5).state
        assert restored is not None
        assert restored["model"]["tied"] is restored["model"]["weight"]
        assert restored["tokens"] == 500
    made, old = record(tmp_path / "export", 5), record(tmp_path / "run", 5)
    assert (made.mode, made.process_count, made.parent) == ("consolidated", 3, old.attempt)
    assert made.extra == {"consolidated_from": old.attempt}


def test_consolidating_a_damaged_step_leaves_nothing(root: Path, tmp_path: Path) -> None:
    flip_byte(root / "30" / WEIGHT)

    done = run("consolidate", root, tmp_path / "export")

    assert done.code == 1
    assert "their digest differs" in done.err
    assert names(tmp_path / "export") == set()


def test_consolidating_to_where_the_step_is_already_is_refused(root: Path) -> None:
    done = run("consolidate", root / "30", root)

    assert done.code == 3
    assert names(root) == {"10", "20", "30"}


def test_a_step_of_a_private_root_is_copied_as_it_is_and_consolidated_where_it_is_whole(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", root_scope="per_process") as manager:
        manager.save(1, example_state(1))

    whole = run("consolidate", tmp_path / "run", tmp_path / "export")
    copied = run("copy", tmp_path / "run", tmp_path / "copy")

    assert (whole.code, copied.code) == (0, 0)  # of one process the part is the whole
    assert record(tmp_path / "export", 1).scope == "shared"
    assert record(tmp_path / "copy", 1).scope == "per_process"
    with CheckpointManager(tmp_path / "export") as manager:
        assert manager.latest_step() == 1


# rm, gc, pin


def test_rm_asks_and_without_anybody_to_ask_does_nothing(root: Path) -> None:
    unasked = run("rm", root / "20")

    assert unasked.code == 2
    assert "Say --yes" in unasked.err
    assert names(root) == {"10", "20", "30"}


def test_rm_deletes_one_step_damaged_or_not(root: Path) -> None:
    (root / "20" / "commit.json").write_text("{}")

    removed = [run("rm", root / str(step), "--yes") for step in (20, 30)]

    assert [one.code for one in removed] == [0, 0]
    assert names(root) == {"10"}
    assert run("rm", root / "20", "--yes").code == 2
    assert run("rm", root, "--yes").code == 2


def test_a_pinned_step_survives_rm_and_gc_until_it_is_unpinned(root: Path) -> None:
    assert run("pin", root / "10", "--note", "the one in the paper").out == "step 10 pinned"
    assert run("pin", root / "10", "--json").json["changed"] is False
    assert pinned_steps(LocalStorage(root)) == {10}

    refused = run("rm", root / "10", "--yes")
    run("gc", root, "--keep-last", 1, "--yes")

    assert refused.code == 2
    assert "pinned" in refused.err
    assert names(root) == {"10", "30"}
    assert run("unpin", root / "10", "--json").json["changed"] is True
    assert run("unpin", root / "10").out == "step 10 was not pinned"
    assert run("rm", root / "10", "--yes").code == 0


def test_only_what_is_committed_can_be_pinned(root: Path) -> None:
    assert run("pin", root / "31").code == 2
    assert run("pin", root).code == 2
    assert pinned_steps(LocalStorage(root)) == frozenset()


def leave_debris(root: Path) -> None:
    (root / ("40.tmp-" + "a" * 16)).mkdir()
    (root / ("40.tmp-" + "a" * 16) / "half").write_bytes(b"1234")
    (root / (".trash-" + "b" * 16)).mkdir()
    shutil.copytree(root / "30", root / ("30.old-" + "c" * 16))
    (root / "notes").mkdir()


def test_gc_tells_first_and_deletes_only_when_told(root: Path) -> None:
    leave_debris(root)
    before = names(root)

    planned = run("gc", root, "--keep-every", 20, "--json")
    assert names(root) == before
    done = run("gc", root, "--keep-every", 20, "--yes", "--json")

    kinds = {one["name"]: one["kind"] for one in planned.json["leftovers"]}
    assert kinds == {
        "10": "unkept",
        "40.tmp-" + "a" * 16: "unfinished",
        ".trash-" + "b" * 16: "deleted",
        "30.old-" + "c" * 16: "replaced",
    }
    assert (planned.json["deleted"], done.json["deleted"]) == (False, True)
    assert {one["name"] for one in done.json["leftovers"]} == kinds.keys()
    assert names(root) == {"20", "30", "notes"}
    assert run("gc", root).out == "nothing to delete"


def test_gc_without_a_policy_deletes_no_step(root: Path) -> None:
    leave_debris(root)

    assert run("gc", root, "--yes").code == 0
    assert names(root) == {"10", "20", "30", "notes"}


# doctor


def test_doctor_finds_a_root_fit_and_leaves_nothing_there(root: Path) -> None:
    before = contents(root)

    found = run("doctor", root, "--json")

    by_name = {one["name"]: one for one in found.json["findings"]}
    assert found.code == 0
    assert found.json["ok"] is True
    assert by_name["root"]["data"] == {"steps": 3, "problems": 0}
    assert by_name["a save"]["data"] is True
    assert by_name["write speed"]["data"] > 0
    assert contents(root) == before
    assert names(root) == {"10", "20", "30"}


def test_doctor_of_a_root_that_is_not_there_makes_none(tmp_path: Path) -> None:
    found = run("doctor", tmp_path / "a" / "b")

    assert found.code == 0
    assert f"it would be made in {tmp_path}" in found.out
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_when_a_save_would_fail(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    nowhere, file = run("doctor", "/proc/nothing"), run("doctor", tmp_path / "file")

    assert (nowhere.code, file.code) == (1, 1)
    assert "problem" in nowhere.out
    assert "is not a directory" in file.out


def test_doctor_names_who_owns_the_root_and_what_is_damaged(root: Path) -> None:
    (root / "20" / "commit.json").write_text("{}")
    with CheckpointManager(root) as manager:
        manager.save(40, example_state(40))

        found = run("doctor", root, "--json")

    by_name = {one["name"]: one for one in found.json["findings"]}
    assert found.code == 1
    assert by_name["owner"]["data"]["state"] == "running"
    assert by_name["root"]["data"]["problems"] == 1
