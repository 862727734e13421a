"""A save that blocks: durable ones among themselves, and ours beside those that sync nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from benchmarks.limits import RawFile
from benchmarks.measuring import Contender, Goal, Report, run_race
from benchmarks.ours import KEEPS, OpenRoot
from benchmarks.peers import Dcp, Orbax, Peer, Safetensors, TensorStore, TorchSave, available, sync_tree
from benchmarks.states import num_bytes_of, transformer_state
from benchmarks.torch_checkpointing_peer import TorchCheckpointing

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from benchmarks.settings import Settings, Workspace

__all__ = ["measure", "peer_saves"]


def measure(settings: Settings, workspace: Workspace) -> Report:
    """Race all against each other."""
    state = transformer_state(settings.state_bytes)
    num_bytes = num_bytes_of(state)
    root = OpenRoot(workspace.fresh("save"))
    raw = RawFile(num_bytes)
    kinds: list[type[Peer]] = [TorchSave, Safetensors, Dcp, Orbax]
    peers, absent = available(kinds if settings.is_quick else [*kinds, TorchCheckpointing, TensorStore])
    contenders = [
        Contender(name="safepoint", run=lambda: root.save(state), after=root.forget, keeps=KEEPS, num_bytes=num_bytes),
        _raw(raw, workspace, "raw O_DIRECT + fsync", os.O_DIRECT),
        _raw(raw, workspace, "raw buffered + fsync", 0),
    ]
    for peer in peers:
        contenders.extend(peer_saves(peer, state, workspace))
    race = run_race(f"Save of {num_bytes >> 20} MiB in {len(state)} tensors", contenders, rounds=settings.rounds)
    race.absent.update(absent)
    root.close()
    for peer in peers:
        peer.close()
    ours = "safepoint"
    goals = [
        Goal(name="durable save / raw O_DIRECT + fsync", target=0.9, measured=race.speedup(ours, contenders[1].name)),
        Goal(name="durable save / DCP (2 threads, sync)", target=1.5, measured=race.speedup(ours, "DCP")),
        Goal(name="durable save / safetensors + fsync", target=1.5, measured=race.speedup(ours, "safetensors + fsync")),
        Goal(name="durable save / torch.save + fsync", target=2.0, measured=race.speedup(ours, "torch.save + fsync")),
        Goal(name="durable save / Orbax", target=7.0, measured=race.speedup(ours, "Orbax")),
        Goal(name="durable save / torch.save, not synced", target=1.0, measured=race.speedup(ours, "torch.save")),
        Goal(name="durable save / safetensors, not synced", target=1.0, measured=race.speedup(ours, "safetensors")),
        Goal(
            name="extra memory of a blocking save",
            target=64.0,
            measured=max(sample.extra_bytes for sample in race.samples[ours]) / 2**20,
            at_most=True,
            unit=" MiB",
        ),
    ]
    return Report(suite="save", races=[race], goals=goals)


def _raw(raw: RawFile, workspace: Workspace, name: str, flags: int) -> Contender:
    path = workspace.fresh("raw")
    return Contender(
        name=name,
        run=lambda: raw.write(path, flags=flags),
        after=lambda: workspace.remove(path),
        keeps="the file is synced; no digests",
        num_bytes=raw.num_bytes,
    )


def peer_saves(peer: Peer, state: dict[str, torch.Tensor], workspace: Workspace) -> list[Contender]:
    """Return a peer as it is, and with an fsync of everything where it has none."""
    path = workspace.fresh(peer.needs)
    num_bytes = num_bytes_of(state)

    def save_and_sync(path: Path) -> None:
        peer.save(state, path)
        sync_tree(path)

    plain = Contender(
        name=peer.name,
        run=lambda: peer.save(state, path),
        after=lambda: workspace.remove(path),
        keeps=peer.keeps,
        num_bytes=num_bytes,
    )
    if not isinstance(peer, (TorchSave, Safetensors)):
        return [plain]
    synced = Contender(
        name=f"{peer.name} + fsync",
        run=lambda: save_and_sync(path),
        after=lambda: workspace.remove(path),
        keeps="file and directory are synced",
        num_bytes=num_bytes,
    )
    return [plain, synced]
