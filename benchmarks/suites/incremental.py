"""Saves of a state of which one twentieth changed since the last."""

from __future__ import annotations

import os
from threading import Thread
from typing import TYPE_CHECKING

from benchmarks.measuring import Contender, Goal, Report, run_race
from benchmarks.ours import KEEPS, OpenRoot
from benchmarks.states import num_bytes_of, transformer_state
from safepoint.formats.checksum import digest

if TYPE_CHECKING:
    import torch

    from benchmarks.settings import Settings, Workspace

__all__ = ["measure"]

_TIMES = 4
"""How many times the size of other suites' states: what a save costs whatever its size counts for less here."""


def measure(settings: Settings, workspace: Workspace) -> Report:
    """Race an incremental save against a full one."""
    report = Report(suite="incremental")
    state = transformer_state(settings.state_bytes * (1 if settings.is_quick else _TIMES))
    full = OpenRoot(workspace.fresh("full"))
    linked = OpenRoot(workspace.fresh("incremental"), unchanged="link")
    at_once = OpenRoot(workspace.fresh("incremental"), unchanged="link")
    changed = _some_of(state)
    total = num_bytes_of(changed)

    def change() -> None:
        for tensor in changed.values():
            tensor.add_(1.0)

    def save_and_settle() -> None:
        at_once.save(state)
        at_once.settle()

    for root in (linked, at_once):
        root.save(state)
        root.settle()
    contenders = [
        Contender(name="incremental", run=lambda: linked.save(state), before=change, after=linked.settle, keeps=KEEPS),
        Contender(name="incremental, and read again", run=save_and_settle, before=change, keeps=KEEPS),
        Contender(name="limit: the state's digests", run=lambda: _digest_all(state), keeps="nothing is written"),
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


def _some_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return matrices of at most a twentieth of the state."""
    chosen: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        is_matrix = name.endswith(".weight") and tensor.ndim == 2  # noqa: PLR2004
        if is_matrix and num_bytes_of({**chosen, name: tensor}) <= num_bytes_of(state) // 20:
            chosen[name] = tensor
    return chosen


def _digest_all(state: dict[str, torch.Tensor]) -> None:
    tensors, cores = list(state.values()), os.cpu_count() or 1
    threads = [Thread(target=_digest_each, args=(tensors[index::cores],)) for index in range(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _digest_each(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        digest(tensor.numpy().data)
