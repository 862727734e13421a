from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager
from safepoint.manager.cli.app import app
from safepoint.manager.cli.demo import Demo, check_kill
from safepoint.manager.cli.demo_plan import Event, Plan
from safepoint.manager.cli.demo_processes import Run
from safepoint.manager.root_overview import RootEntry, overview

if TYPE_CHECKING:
    from pathlib import Path

LOSSES = {1: 3.0, 2: 2.5, 3: 2.25, 4: 2.0, 5: 1.75, 6: 1.5}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (9, 10):
            manager.save(step, {"weights": torch.arange(4)}, metrics={"loss": 1 / step})
    (tmp_path / "run" / ("11.tmp-" + "a" * 16)).mkdir()
    (tmp_path / "run" / ("11.tmp-" + "a" * 16) / "weights.safetensors").write_bytes(b"half")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    return tmp_path / "run"


def list_root(root: Path) -> list[RootEntry]:
    return list(overview(LocalStorage(root)).entries)


def test_a_listing_tells_steps_in_order_and_everything_else_by_what_it_is(root: Path) -> None:
    rows = list_root(root)

    assert [(row.name, row.kind) for row in rows] == [
        ("9", "committed"),
        ("10", "committed"),
        ("11.tmp-" + "a" * 16, "unfinished"),
        ("notes.txt", "not ours"),
    ]
    assert [row.num_bytes for row in rows][2:] == [4, 4]
    assert all(row.num_bytes >= 32 for row in rows[:2])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--processes", "2", "--restore-processes", "1"],
        ["--steps", "5", "--save-every", "4"],
        ["--folder", "."],
    ],
)
def test_demonstrations_that_cannot_be_are_refused(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "something").touch()
    monkeypatch.chdir(tmp_path)

    assert CliRunner().invoke(app, ["demo", *arguments]).exit_code == 2


def test_plans_and_events_survive_the_way_between_processes() -> None:
    plan = Plan(root="a b", device="cpu", process_count=2, steps=6, save_every=2, kill_in_step=4)
    event = Event(kind="trained", step=3, loss=math.pi)

    assert Plan.from_json(plan.to_json()) == plan
    assert Event.from_line(event.to_line()) == event


def demo(tmp_path: Path) -> Demo:
    return Demo(
        folder=tmp_path, process_count=1, restore_process_count=1, steps=6, save_every=2, console=Console(quiet=True)
    )


def runs() -> tuple[Run, Run, Run]:
    reference = Run(losses=LOSSES)
    killed = Run(losses=LOSSES, digests={4: "x"}, was_killed=True)
    return reference, killed, Run(losses={5: LOSSES[5], 6: LOSSES[6]}, digests={4: "x"}, restored_step=4)


def test_the_demonstration_claims_what_was_found(tmp_path: Path) -> None:
    assert demo(tmp_path).kill_in_step == 6
    assert [claim.holds for claim in demo(tmp_path).check_resumed(*runs())] == [True] * 4


@pytest.mark.parametrize(
    ("index", "spoiled"),
    [
        (0, Run(losses={**LOSSES, 5: math.nextafter(LOSSES[5], 2)})),
        (1, Run(losses={**LOSSES, 1: 3.5}, digests={4: "x"}, was_killed=True)),
        (1, Run(losses=LOSSES, digests={4: "y"}, was_killed=True)),
        (2, Run(losses={3: 2.25, 4: 2.0, 5: 1.75, 6: 1.5}, digests={2: "x"}, restored_step=2)),
        (2, Run(losses={5: LOSSES[5]}, digests={4: "x"}, restored_step=4)),
        (2, Run(losses=LOSSES)),
    ],
)
def test_the_demonstration_sees_any_difference(index: int, spoiled: Run, tmp_path: Path) -> None:
    found = list(runs())
    found[index] = spoiled

    assert not all(claim.holds for claim in demo(tmp_path).check_resumed(*found))


def test_the_demonstration_wants_to_see_the_half_written_step(root: Path) -> None:
    rows = list_root(root)
    _, killed, _ = runs()
    swept = [row for row in rows if row.committed]

    assert [claim.holds for claim in check_kill(killed, 11, rows, swept)] == [True, True]
    assert [claim.holds for claim in check_kill(killed, 11, swept, swept)] == [False, True]
    assert [claim.holds for claim in check_kill(killed, 11, rows, rows)] == [True, False]
