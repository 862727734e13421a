"""Many leaves of 1 KiB: what each leaf costs beside its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.measuring import Contender, Goal, Race, Report, run_race
from benchmarks.ours import KEEPS, OpenRoot
from benchmarks.peers import Dcp, Orbax, Peer, Safetensors, TorchSave, available
from benchmarks.states import num_bytes_of, small_state, zeros_like
from benchmarks.suites.save import peer_saves

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from benchmarks.settings import Settings, Workspace

__all__ = ["measure"]

_MOST_FOR_ORBAX = 10_000  # 14 seconds each


def measure(settings: Settings, workspace: Workspace) -> Report:
    """Race saves and loads for each count; then show that ours is linear."""
    report = Report(suite="small")
    for count in settings.small_leaves:
        _measure(report, count, settings, workspace)
    if not settings.is_quick:
        _linear(report, workspace)
    return report


def _measure(report: Report, count: int, settings: Settings, workspace: Workspace) -> None:
    state = small_state(count)
    rounds = 2 if settings.is_quick else 3
    fast, absent = available([Safetensors, TorchSave])
    slow, more_absent = available([Dcp, Orbax] if count <= _MOST_FOR_ORBAX and not settings.is_quick else [Dcp])
    root = OpenRoot(workspace.fresh("small"))
    contenders = [
        Contender(
            name="safepoint",
            run=lambda: root.save(state),
            after=root.forget,
            keeps=KEEPS,
            num_bytes=num_bytes_of(state),
        )
    ]
    contenders.extend(peer_saves(peer, state, workspace)[0] for peer in [*fast, *slow])
    rounds_of_slow = 1 if settings.is_quick else rounds
    if settings.is_quick:  # a round that does not count would take the slow ones too long
        root.save(state)
        root.forget()
    save = run_race(
        f"Save of {count:,} leaves of 1 KiB", contenders, rounds=rounds_of_slow, warm_up=not settings.is_quick
    )
    save.absent.update({**absent, **more_absent})
    load = _load(count, settings, workspace, root, [*fast, *slow][: 3 if settings.is_quick else None], rounds_of_slow)
    root.close()
    for peer in [*fast, *slow]:
        peer.close()
    report.races.extend([save, load])
    ours = "safepoint"
    report.goals.extend(
        [
            Goal(name=f"{count:,} leaves, save / safetensors", target=2.0, measured=save.speedup(ours, "safetensors")),
            Goal(name=f"{count:,} leaves, save / DCP", target=10.0, measured=save.speedup(ours, "DCP")),
            Goal(name=f"{count:,} leaves, load / DCP", target=20.0, measured=load.speedup(ours, "DCP")),
        ]
    )
    if count <= _MOST_FOR_ORBAX:
        report.goals.append(
            Goal(name=f"{count:,} leaves, save / Orbax", target=30.0, measured=save.speedup(ours, "Orbax"))
        )


def _load(count: int, settings: Settings, workspace: Workspace, root: OpenRoot, peers: list[Peer], rounds: int) -> Race:
    state = small_state(count)
    target = zeros_like(state)
    root.save(state)
    contenders = [
        Contender(
            name="safepoint",
            run=lambda: _restore(root, target),
            keeps="every byte verified",
            num_bytes=num_bytes_of(state),
        )
    ]
    paths = []
    for peer in peers:
        path = workspace.fresh(peer.needs)
        peer.save(state, path)
        paths.append(path)
        contenders.append(_peer_load(peer, path, target))
    race = run_race(f"Load of {count:,} leaves of 1 KiB", contenders, rounds=rounds, warm_up=not settings.is_quick)
    for path in paths:
        workspace.remove(path)
    return race


def _peer_load(peer: Peer, path: Path, target: dict[str, torch.Tensor]) -> Contender:
    return Contender(
        name=peer.name,
        run=lambda: peer.load_into(path, target),
        keeps="no digests",
        num_bytes=num_bytes_of(target),
    )


def _restore(root: OpenRoot, target: dict[str, torch.Tensor]) -> None:
    root.manager.restore(root.step, {"model": target})


def _linear(report: Report, workspace: Workspace) -> None:
    """Time a save and a load of 10,000 and of 100,000 leaves."""
    for what in ("save", "load"):
        contenders = []
        roots = []
        for count in (10_000, 100_000):
            state = small_state(count)
            root = OpenRoot(workspace.fresh("linear"))
            roots.append(root)
            root.save(state)
            contenders.append(_own(what, root, state, count))
        race = run_race(f"Our own {what}, linear?", contenders, rounds=2)
        for root in roots:
            root.close()
        report.races.append(race)
        report.goals.append(
            Goal(
                name=f"{what} of 100,000 leaves / ten times that of 10,000",
                target=1.3,
                measured=(race.speedup("10,000", "100,000") or 0) / 10,
                at_most=True,
            )
        )


def _own(what: str, root: OpenRoot, state: dict[str, torch.Tensor], count: int) -> Contender:
    name = f"{count:,}"
    if what == "save":
        return Contender(name=name, run=lambda: root.save(state), keeps=KEEPS)
    return Contender(name=name, run=lambda: _restore(root, state), keeps="verified")
