"""What two processes do while one of them meets a fault, what may come of it, and what the next run must find.

A scenario is opening a manager, one operation, and closing it. Its root is prepared without faults. Every element of
a state is known from its version, so that a mixture of two versions shows.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager, KeepAll, KeepLast
from safepoint.manager.errors import AsyncSaveError, CheckpointError
from safepoint.manager.step_reading import StepReader
from safepoint.manager.unsettled import read_marks

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SCENARIOS", "Report", "Scenario", "check_aftermath", "operate", "prepare"]

FROZEN = 4096
"""Items of a leaf that never changes: enough for its file to be linked on."""

FOREIGN = ("notes.txt", "007/keep.bin", "3.backup/commit.json", ".hidden/x")


def make_state(version: int, rank: int = 0, count: int = 1) -> dict[str, Any]:
    """Return the state of a process: leaves that all hold, and one that only it holds."""
    shared = {f"w{i}": torch.arange(40 + i, dtype=torch.float32) * version + i for i in range(3)}
    shared["frozen"] = torch.arange(FROZEN, dtype=torch.float32)
    own = {f"p{r}": torch.full((17, 3), float(version * 10 + r)) for r in range(count) if count == 1 or r == rank}
    return {"shared": shared, "own": own, "version": version}


def check_state(state: dict[str, Any], *, owners: int) -> int:
    """Return the version of a whole restored state, every element of which was compared."""
    version = state["version"]
    assert isinstance(version, int)
    wanted = make_state(version)["shared"]
    assert set(state["shared"]) == set(wanted)
    for name, tensor in state["shared"].items():
        assert torch.equal(tensor, wanted[name]), (version, name)
    assert set(state["own"]) == {f"p{r}" for r in range(owners)}
    for r in range(owners):
        assert torch.equal(state["own"][f"p{r}"], torch.full((17, 3), float(version * 10 + r))), (version, r)
    return version


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One operation.

    Attributes:
        mode: of the saves.
        blocking: whether the save is.
        steps: committed before, version = step.
        action: "save" of step 3, "overwrite" of step 2 as version 30, "retain" (step 3, keeping one), "restore".
        unchanged: "link" restores first, so that there is a step to link from.
        commit: of the manager.
    """

    name: str
    mode: Any
    blocking: bool
    action: str
    steps: tuple[int, ...] = (1, 2)
    unchanged: Any = "write"
    commit: Any = "auto"

    @property
    def saves(self) -> tuple[int, int] | None:
        """Step and version that it saves; None where it only restores."""
        return {"save": (3, 3), "overwrite": (2, 30), "retain": (3, 3)}.get(self.action)


SCENARIOS = {
    scenario.name: scenario
    for scenario in [
        *(
            Scenario(name=f"{action}-{mode}-{how}", mode=mode, blocking=how == "blocking", action=action)
            for action in ("save", "overwrite", "retain")
            for mode in ("consolidated", "sharded")
            for how in ("blocking", "async")
        ),
        *(
            Scenario(name=f"restore-{mode}", mode=mode, blocking=True, action="restore")
            for mode in ("consolidated", "sharded")
        ),
        *(
            Scenario(
                name=f"link-{action}-{mode}-{how}",
                mode=mode,
                blocking=how == "blocking",
                action=action,
                unchanged="link",
            )
            for action, mode, how in (
                ("retain", "sharded", "blocking"),
                ("overwrite", "consolidated", "async"),
            )
        ),
        *(
            Scenario(
                name=f"marker-{action}-{mode}-{how}",
                mode=mode,
                blocking=how == "blocking",
                action=action,
                commit="marker",
            )
            for action, mode, how in (
                ("save", "consolidated", "blocking"),
                ("overwrite", "sharded", "async"),
                ("retain", "sharded", "blocking"),
            )
        ),
    ]
}


@dataclass(kw_only=True)
class Report:
    """What came of it on one process.

    Attributes:
        did: "saved", "restored <version>", or "failed".
        error: type of the first error, its text, outcome, and whom it names.
        secs: seconds by phase.
    """

    did: str = ""
    error: tuple[str, str, str | None, list[int]] | None = None
    secs: dict[str, float] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    fired: str = ""


def prepare(scenario: Scenario, root: str, rank: int, count: int, store: str | None) -> None:
    """Commit what was there before. Called by both processes, without faults."""
    options: Any = {"mode": scenario.mode, "unchanged": scenario.unchanged, "commit": scenario.commit}
    with CheckpointManager(root, deadline_secs=20.0, store=store, **options) as manager:
        for step in scenario.steps:
            manager.save(step, make_state(step, rank, count))
    if rank == 0:
        for name in FOREIGN:
            path = Path(root, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text("not a step of anybody")


def operate(scenario: Scenario, root: str, rank: int, count: int, store: str | None, deadline_secs: float) -> Report:
    """Open, do it, close. Called by both processes, one of them with a fault to come."""
    report = Report()
    managers: list[CheckpointManager] = []
    keep = KeepLast(1) if scenario.action == "retain" else KeepAll()

    def open_it() -> None:
        options: Any = {"mode": scenario.mode, "unchanged": scenario.unchanged, "commit": scenario.commit}
        managers.append(CheckpointManager(root, keep=keep, store=store, deadline_secs=deadline_secs, **options))

    def find_base() -> None:
        assert managers[0].restore(scenario.steps[-1]).state is not None

    def save() -> None:
        assert scenario.saves is not None
        step, version = scenario.saves
        managers[0].save(
            step, make_state(version, rank, count), on_exists="replace", blocking=scenario.blocking, force=True
        )

    def wait() -> None:
        managers[0].wait()
        report.did = "saved"

    def restore() -> None:
        target = make_state(0, rank, count)
        result = managers[0].restore_latest({"shared": target["shared"], "version": 0}, items=["shared", "version"])
        assert result is not None
        host = managers[0].restore(result.step).state
        assert host is not None
        version = check_state(host, owners=count)
        for name, tensor in target["shared"].items():
            assert torch.equal(tensor, host["shared"][name]), name
        assert result.skipped or version == scenario.steps[-1]
        report.did = f"restored {version}"

    base = [find_base] if scenario.unchanged == "link" else []
    phases: list[Callable[[], None]] = [open_it, *base, *([restore] if scenario.saves is None else [save, wait])]
    for phase in phases:
        if not _timed(report, phase):
            break
    for manager in managers:
        _timed(report, manager.close)
    return report


def _timed(report: Report, phase: Callable[[], None]) -> bool:
    started = time.monotonic()
    try:
        phase()
    except CheckpointError as raised:
        error: BaseException = raised
        if isinstance(error, AsyncSaveError) and error.__cause__ is not None:
            error = error.__cause__
        report.did = report.did or "failed"
        named = [*(getattr(error, "absent", None) or ()), getattr(error, "process_index", None)]
        outcome = getattr(raised, "outcome", None)
        if report.error is None:
            report.error = type(error).__name__, str(error), outcome, [p for p in named if p is not None]
        return False
    else:
        return True
    finally:
        report.secs[phase.__name__] = time.monotonic() - started


def check_aftermath(scenario: Scenario, root: str, owners: int) -> int:
    """Open the root as the next run, on one process; return the version that it found.

    Then go on over the debris: save the same step again, and another; afterwards nothing is left that does not belong.
    """
    for name in FOREIGN:
        assert Path(root, name).read_text() == "not a step of anybody", name
    for path in Path(root, ".safepoint").iterdir():
        if path.name.startswith(("nonce-", ".tmp-")):
            os.utime(path, (0, 0))  # as if the next run came hours later: younger ones may be in use
    with CheckpointManager(root, deadline_secs=5.0, commit=scenario.commit) as manager:
        result = manager.restore_latest()
        assert result is not None
        assert result.state is not None
        found = check_state(result.state, owners=owners)
        for info in manager.steps():
            state = manager.restore(info.step).state
            assert state is not None
            version = check_state(state, owners=owners)
            assert version in {info.step, 30}
        before = {info.step for info in manager.steps()}
        step, version = scenario.saves or (2, 2)
        manager.save(step, make_state(version), on_exists="replace")
        manager.save(99, make_state(99))
    with CheckpointManager(root, deadline_secs=5.0, commit=scenario.commit) as manager:
        again = manager.restore(step).state
        assert again is not None
        assert check_state(again, owners=1) == version
        assert manager.latest_step() == 99
        expected = {*map(str, before | {step, 99}), ".safepoint", *(name.split("/", maxsplit=1)[0] for name in FOREIGN)}
        present = {path.name for path in Path(root).iterdir()}
        assert present == expected, present ^ expected
    assert {path.name for path in Path(root, ".safepoint").iterdir()} <= {"history.jsonl", "lock", "pins", "unsettled"}
    assert read_marks(LocalStorage(root)) == []
    for known in StepReader(LocalStorage(root)).list_steps():  # and nothing of any other attempt
        if known.record.files:
            assert {path.name for path in Path(root, known.prefix).iterdir()} == {"commit.json", known.record.files}
    return found
