from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from safepoint.manager import CheckpointManager

from support.command import example_state, flip_byte, run, save_steps

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_steps(tmp_path / "run", 10, 20)
    return tmp_path / "run"


def test_a_step_becomes_a_directory_of_others_and_comes_back(root: Path, tmp_path: Path) -> None:
    made = run("convert", root / "10", tmp_path / "hf", "--format", "huggingface")
    back = run("convert", tmp_path / "hf", tmp_path / "back", "--to-step", 5, "--json")

    assert made.code == back.code == 0
    assert made.out.splitlines()[1:] == ["  model.safetensors"]
    (step,) = back.json["steps"]
    assert (step["step"], step["outcome"], step["path"]) == (5, "written", str(tmp_path / "back" / "5"))
    with CheckpointManager(tmp_path / "back") as manager:
        state = manager.restore(5).state
    assert state is not None
    assert torch.equal(state["weight"], example_state(10)["model"]["weight"])


def test_all_steps_are_converted_and_those_that_are_there_are_left_alone(root: Path, tmp_path: Path) -> None:
    first = run("convert", root, tmp_path / "torch", "-f", "torch", "--all", "--json")
    second = run("convert", root, tmp_path / "torch", "-f", "torch", "--all")

    assert [step["step"] for step in first.json["steps"]] == [10, 20]
    assert second.out.splitlines() == [f"{tmp_path / 'torch' / str(step)} was there" for step in (10, 20)]
    assert run("diff", root / "10", tmp_path / "torch" / "10").code == 0


def test_a_damaged_step_is_a_problem_and_the_others_are_converted(root: Path, tmp_path: Path) -> None:
    flip_byte(root / "10" / "model" / "model.safetensors")

    done = run("convert", root, tmp_path / "orbax", "--format", "orbax", "--all", "--json")
    alone = run("convert", root / "10", tmp_path / "orbax", "--format", "orbax")

    assert done.code == alone.code == 1
    assert [step["step"] for step in done.json["steps"]] == [20]
    assert [problem["step"] for problem in done.json["problems"]] == [10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "nope"], "Formats: dcp, huggingface"),
        (["--all", "--step", "10"], "exclude each other"),
        (["--step", "11"], "step 11 is not committed"),
        (["--format", "torch", "--mode", "sharded"], "no mode 'sharded'"),
    ],
)
def test_what_makes_no_sense_is_named(root: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    done = run("convert", root, tmp_path / "to", *arguments)

    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "to").exists()
