from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager
from safepoint.manager.cli.app import app
from safepoint.manager.pins import pin

from support.command import commit_sharded, example_state, flip_byte, run, save_steps

if TYPE_CHECKING:
    from pathlib import Path

WEIGHT = "model/model.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_steps(tmp_path / "run", 10, 20, 30)
    return tmp_path / "run"


# ls


def test_ls_tells_why_each_step_stays(root: Path) -> None:
    pin(LocalStorage(root), 10)

    kept = {one["step"]: one["kept"] for one in run("ls", root, "--json").json["steps"]}
    by_policy = run("ls", root, "--keep-every", 20, "--keep-best", "1:loss:max", "--json").json["steps"]
    shown = run("ls", root, "--keep-last", 1)

    assert kept == {10: ["pinned", "all"], 20: ["all"], 30: ["latest", "all"]}  # the policy that the run had
    assert [one["kept"] for one in by_policy] == [["pinned", "best 1 by loss"], ["every 20"], ["latest"]]
    assert [line.split("  ")[-1] for line in shown.out.splitlines()[1:]] == [
        "pinned",
        "no policy keeps it",
        "latest, last 1",
    ]


def test_ls_names_damaged_half_written_and_foreign_things_and_what_was_left_by_going_back(root: Path) -> None:
    (root / "30" / "commit.json").write_text("{}")
    save_steps(root, 15)
    (root / ("40.tmp-" + "a" * 16)).mkdir()
    (root / "007").mkdir()
    (root / "50").mkdir()

    listed = run("ls", root, "--json")
    shown = run("ls", root)

    assert listed.code == shown.code == 0
    assert [(one["step"], one["left_by"]) for one in listed.json["steps"]] == [(10, None), (20, 15), (15, None)]
    assert {one["name"]: one["kind"] for one in listed.json["others"]} == {
        "007": "not ours",
        "30": "problem",
        "40.tmp-" + "a" * 16: "unfinished",
        "50": "no record",
    }
    assert "left by going back to 15" in shown.out
    assert "the commit record" in shown.out


def test_ls_of_an_empty_root_and_of_pins_without_steps_says_so(tmp_path: Path) -> None:
    pin(LocalStorage(tmp_path), 7)

    shown = run("ls", tmp_path)

    assert shown.code == 0
    assert "no step is committed" in shown.out
    assert "pinned, and not there: 7" in shown.out


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_what_is_no_directory_is_refused_without_a_traceback(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    absent, file = run(command, tmp_path / "nothing"), run(command, tmp_path / "file")

    assert (absent.code, file.code) == (2, 2)
    assert "there is no such directory" in absent.err
    assert "not a directory" in file.err
    assert "Traceback" not in absent.err + file.err
    assert absent.out == ""


@pytest.mark.parametrize("best", ["loss", "1:loss", "1:loss:least", "x:loss:min"])
def test_a_policy_that_makes_no_sense_is_refused(best: str, root: Path) -> None:
    shown = run("ls", root, "--keep-best", best)

    assert shown.code == 2
    assert "N:METRIC:ORDER" in shown.err


def test_names_that_would_steer_a_terminal_are_escaped(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "größe") as manager:
        manager.save(1, {"日本": {"a\x1b[31mb": torch.zeros(1)}}, metrics={"\x1b]0;x\x07": 1.0, "[b]": 2})
    (tmp_path / "größe" / os.fsdecode(b"\xff")).touch()

    listed, shown = run("ls", tmp_path / "größe"), run("show", tmp_path / "größe")

    assert "\x1b" not in listed.out + shown.out
    assert "\\x1b]0;x" in listed.out
    assert "[b] 2" in listed.out
    assert "\\udcff" in listed.out
    assert "a\\x1b[31mb" in shown.out
    assert "größe" in shown.out
    assert run("ls", tmp_path / "größe", "--json").json["others"][0]["name"] == os.fsdecode(b"\xff")


# show


def test_show_reads_no_data_and_lists_leaves_values_and_files(root: Path) -> None:
    flip_byte(root / "30" / WEIGHT)

    shown = run("show", root / "30")
    document = run("show", root, "--json").json

    assert shown.code == 0
    assert "model.weight" in shown.out
    assert "shares memory with model.weight" in shown.out
    assert document["step"] == 30
    assert document["leaves"][0] == {
        "path": "model.weight",
        "keys": ["model", "weight"],
        "dtype": "float32",
        "shape": [4, 3],
        "num_bytes": 48,
        "regions": [{"offsets": [0, 0], "shape": [4, 3], "file": WEIGHT, "offset": 4096, "num_bytes": 48}],
    }
    assert document["values"] == [{"path": "tokens", "value": 3000}]
    assert document["record"]["metrics"] == {"loss": 1 / 31}


def test_show_picks_leaves_by_pattern_and_lists_regions(tmp_path: Path) -> None:
    commit_sharded(tmp_path, 5, example_state(5))

    shown = run("show", tmp_path, "--keys", "*.weight", "--regions")

    assert "2 regions in 2 files" in shown.out
    assert "[2:4, 0:3]" in shown.out
    assert "bias" not in shown.out


def test_show_of_a_step_with_a_missing_file_is_a_problem(root: Path) -> None:
    (root / "30" / WEIGHT).unlink()

    shown = run("show", root)

    assert shown.code == 1
    assert "the file is missing" in shown.err
    assert run("show", root, "--json").json["problem"] == "the file is missing"


def test_a_step_that_is_not_there_lists_those_that_are(root: Path) -> None:
    shown = run("show", root / "31")

    assert shown.code == 2
    assert "committed are: 10, 20, 30" in shown.err


def test_errors_are_documents_where_json_is_asked_for(root: Path) -> None:
    shown = run("show", root / "31", "--json")

    error = json.loads(shown.err)["error"]
    assert shown.out == ""
    assert (error["type"], error["step"]) == ("StepNotFoundError", 31)
    assert {"message", "hint"} <= error.keys()


def test_a_root_whose_name_is_a_number_is_a_root(tmp_path: Path) -> None:
    save_steps(tmp_path / "7", 3)

    assert run("ls", tmp_path / "7", "--json").json["latest"] == 3
    assert run("show", tmp_path / "7" / "3", "--json").json["step"] == 3


# cat


def test_cat_prints_a_slice_of_a_sharded_leaf(tmp_path: Path) -> None:
    state = example_state(5)
    commit_sharded(tmp_path, 5, state)

    shown = run("cat", tmp_path, "model.weight", "--slice", "1:3,-1")
    document = run("cat", tmp_path, "model.weight", "--slice", "1:3, -1", "--json").json

    assert shown.out.splitlines() == ["float32 [2, 1]", "[[10.]", " [13.]]"]
    assert document["values"] == state["model"]["weight"][1:3, -1:].tolist()
    assert (document["dtype"], document["shape"]) == ("float32", [2, 1])


def test_cat_reads_aliases_values_and_types_that_numpy_lacks(root: Path) -> None:
    assert run("cat", root, "model.tied", "--json").json["values"] == example_state(30)["model"]["weight"].tolist()
    assert run("cat", root, "tokens").out == "3000"
    assert run("cat", root, "model.bias", "--json").json["values"] == [30.0, 30.0, 30.0]
    assert run("cat", root, '["model", "bias"]').out.splitlines() == ["bfloat16 [3]", "[30. 30. 30.]"]


def test_cat_reads_views_of_shared_memory_and_numpy_arrays_kept_as_bytes(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    days = np.array(["2026-01-01", "2026-01-02"], dtype="datetime64[D]")
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"base": base, "part": base[2:8:2], "days": days})

    assert run("cat", tmp_path, "part", "--slice", "1:", "--json").json["values"] == [4.0, 6.0]
    assert run("cat", tmp_path, "days", "--slice", "0", "--json").json["values"] == ["2026-01-01"]


def test_cat_writes_numpy_files_and_no_existing_one(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "weight.npy"

    shown = run("cat", root, "model.weight", "--npy", out)
    again = run("cat", root, "model.weight", "--npy", out)

    assert shown.code == 0
    assert np.array_equal(np.load(out), example_state(30)["model"]["weight"].numpy())
    assert again.code == 4
    assert "File exists" in again.err


def test_cat_reads_only_the_blocks_that_it_needs_and_verifies_those(root: Path) -> None:
    flip_byte(root / "30" / WEIGHT)

    shown = run("cat", root, "model.weight")

    assert shown.code == 1
    assert "their digest differs" in shown.err
    assert "model.weight" in shown.err


@pytest.mark.parametrize(
    ("leaf", "picked", "message"),
    [
        ("model.wieght", "", "there is no leaf"),
        ("model", "", "not a leaf"),
        ("weight", "", "Did you mean model.weight"),
        ("model.weight", "1,2,3", "3 parts for 2 dimensions"),
        ("model.weight", "9", "outside a dimension of 4"),
        ("model.weight", "a:b", "no part of a slice"),
        ("tokens", "0", "nothing to slice"),
    ],
)
def test_leaves_and_slices_that_are_not_there_are_refused(leaf: str, picked: str, message: str, root: Path) -> None:
    shown = run("cat", root, leaf, "--slice", picked)

    assert shown.code == 2
    assert message in shown.err


def test_infinities_and_nan_are_texts_in_json(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": torch.tensor([1.0, float("nan"), float("-inf")])}, metrics={"loss": float("nan")})

    assert run("cat", tmp_path, "x", "--json").json["values"] == [1.0, "nan", "-inf"]
    assert run("ls", tmp_path, "--json").json["steps"][0]["record"]["metrics"] == {"loss": "nan"}


# verify


def test_verify_finds_a_flipped_bit_and_leaves_the_other_steps_sound(root: Path) -> None:
    assert run("verify", root).code == 0
    flip_byte(root / "20" / WEIGHT)

    shown, document = run("verify", root), run("verify", root, "--json")

    assert shown.code == document.code == 1
    assert "step 20 has problems" in shown.out
    assert "step 30 is sound" in shown.out
    assert document.json["steps"] == [
        {"step": 10, "sound": True},
        {"step": 20, "sound": False},
        {"step": 30, "sound": True},
    ]
    assert document.json["problems"][0]["path"].endswith(WEIGHT)
    assert run("verify", root / "30").code == 0
    assert run("verify", root / "31").code == 2


# diff


def test_diff_of_the_same_values_in_two_layouts_finds_none(tmp_path: Path) -> None:
    save_steps(tmp_path / "a", 5)
    commit_sharded(tmp_path / "b", 5, example_state(5), process_count=3)

    shown = run("diff", tmp_path / "a", tmp_path / "b")

    assert shown.code == 0
    assert shown.out == "no difference: 2 leaves equal in every bit"


def test_diff_tells_what_changed_and_by_how_much(root: Path, tmp_path: Path) -> None:
    state = example_state(30)
    state["model"]["weight"] = state["model"]["weight"].clone()
    state["model"]["weight"][1, 2] += 0.5
    state["model"]["bias"][:2] = float("nan")
    state["extra"] = torch.zeros(2)
    with CheckpointManager(tmp_path / "other") as manager:
        manager.save(1, state)

    found = run("diff", root, tmp_path / "other", "--json")

    assert found.code == 1
    structure = {one["path"]: one["difference"] for one in found.json["structure"]}
    assert structure == {"model.tied": "kind", "extra": "only_b"}
    assert found.json["leaves"] == [
        {"path": "model.weight", "num_changed": 1, "num_elements": 12, "max_difference": 0.5},
        {"path": "model.bias", "num_changed": 2, "num_elements": 3, "max_difference": "inf"},
    ]
    assert "model.bias" in run("diff", root, tmp_path / "other").out


def test_diff_of_the_trees_alone_reads_no_data(root: Path) -> None:
    flip_byte(root / "30" / WEIGHT)

    assert run("diff", root / "20", root / "30").code == 1
    found = run("diff", root / "20", root / "30", "--no-values", "--json").json
    assert [one["path"] for one in found["structure"]] == ["tokens"]
    assert found["leaves"] == []


# the command itself


@pytest.mark.parametrize("command", [command.name for command in app.registered_commands])
def test_every_command_explains_itself_with_an_example(command: str) -> None:
    shown = run(command, "--help", columns=120)

    assert shown.code == 0
    assert f"safepoint {command} " in shown.out.split("Examples:")[1]
    assert "--json" in shown.out


def test_the_installed_command_prints_a_message_and_no_stack(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from safepoint.manager.cli import main; main()", "show", str(tmp_path)]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: no step is committed here")
    assert "Traceback" not in ended.stderr
