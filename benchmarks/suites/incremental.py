"""Saves of a state of which one twentieth changed since the last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.measuring import Contender, Goal, Report, run_race
from benchmarks.ours import KEEPS, OpenRoot
from benchmarks.states import num_bytes_of, transformer_state

if TYPE_CHECKING:
    from benchmarks.settings import Settings, Workspace

__all__ = ["measure"]


def measure(settings: Settings, workspace: Workspace) -> Report:
    """Race an incremental save against a full one."""
    report = Report(suite="incremental")
    state = transformer_state(settings.state_bytes)
    full = OpenRoot(workspace.fresh("full"))
    linked = OpenRoot(workspace.fresh("incremental"), unchanged="link")
    at_once = OpenRoot(workspace.fresh("incremental"), unchanged="link")
    names = [name for name in state if name.endswith(".weight") and state[name].ndim == 2]  # noqa: PLR2004
    changed: list[str] = []
    total = 0
    for name in names:
        size = state[name].numel() * 4
        if total + size <= num_bytes_of(state) // 20:
            changed.append(name)
            total += size

    def change() -> None:
        for name in changed:
            state[name].add_(1.0)

    def save_and_settle() -> None:
        at_once.save(state)
        at_once.settle()

    for root in (linked, at_once):
        root.save(state)
        root.settle()
    contenders = [
        Contender(name="incremental", run=lambda: linked.save(state), before=change, after=linked.settle, keeps=KEEPS),
        Contender(name="incremental, and read again", run=save_and_settle, before=change, keeps=KEEPS),
        Contender(name="full", run=lambda: full.save(state), before=change, after=full.forget, keeps=KEEPS),
    ]
    race = run_race(
        f"Save of {num_bytes_of(state) >> 20} MiB, {total >> 20} changed", contenders, rounds=settings.rounds
    )
    for root in (linked, at_once, full):
        root.close()
    report.races.append(race)
    ratio = race.speedup("incremental", "full")
    report.goals.append(
        Goal(
            name="incremental save / full save", target=0.2, measured=None if ratio is None else 1 / ratio, at_most=True
        )
    )
    return report
