"""Restores: into tensors that are there, warm and cold; into fresh ones; mapped; a part. Onto shards: `processes`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.limits import RawFile, touched_memory
from benchmarks.measuring import Contender, Goal, Race, Report, run_race
from benchmarks.ours import OpenRoot
from benchmarks.peers import Dcp, Orbax, Peer, Safetensors, TensorStore, TorchSave, available
from benchmarks.settings import drop_from_cache
from benchmarks.states import num_bytes_of, transformer_state, zeros_like
from benchmarks.torch_checkpointing_peer import TorchCheckpointing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.settings import Settings, Workspace

__all__ = ["measure"]

State = dict[str, torch.Tensor]

_LEAST_BYTES = 128 << 20
"""What a restore of less takes is the same for any size."""


def measure(settings: Settings, workspace: Workspace) -> Report:
    """Save once with each, then race."""
    state = transformer_state(max(settings.state_bytes, _LEAST_BYTES))
    root = OpenRoot(workspace.fresh("restore"))
    root.save(state)
    raw_path = workspace.fresh("raw")
    RawFile(num_bytes_of(state)).write(raw_path)
    kinds: list[type[Peer]] = [TorchSave, Safetensors, Dcp]
    peers, absent = available(kinds if settings.is_quick else [*kinds, TorchCheckpointing, TensorStore, Orbax])
    paths: dict[str, Path] = {}
    for peer in peers:
        paths[peer.name] = workspace.fresh(peer.needs)
        peer.save(state, paths[peer.name])
    bench = _Bench(settings, root, raw_path, peers, paths, state)
    warm = bench.existing(cold=False)
    cold = bench.existing(cold=True)
    fresh = bench.fresh()
    races = [warm, cold, fresh]
    if not settings.is_quick:
        races.append(bench.part())
    for race in (warm, cold):
        race.absent.update(absent)
    root.close()
    for peer in peers:
        workspace.remove(paths[peer.name])
        peer.close()
    workspace.remove(raw_path)
    ours = "safepoint"
    goals = [
        Goal(name="restore, warm / DCP", target=8.0, measured=warm.speedup(ours, "DCP")),
        Goal(name="restore, warm / torch.load", target=8.0, measured=warm.speedup(ours, "torch.save")),
        # safetensors 0.8 maps the file and copies once, without a digest: on idle cores it is the faster one.
        Goal(name="restore, warm / safetensors", target=5.0, measured=warm.speedup(ours, "safetensors"), usual=0.6),
        Goal(
            name="restore, cold / the best peer",
            target=1.5,
            measured=cold.least_speedup(ours, [peer.name for peer in peers if peer.name != "TensorStore"]),
        ),
        Goal(name="restore, fresh, both mapped / safetensors", target=2.0, measured=fresh.speedup(_MAPPED, _SAFE)),
        Goal(
            name="restore, fresh, mapped / safetensors, own memory",
            target=2.0,
            measured=fresh.speedup(_MAPPED, _SAFE_OWNED),
        ),
        Goal(
            name="restore, fresh, verified / safetensors, own memory",
            target=1.0,
            measured=fresh.speedup(ours, _SAFE_OWNED),
        ),
    ]
    return Report(suite="restore", races=races, goals=goals)


_MAPPED = "safepoint, mapped"
_SAFE = "safetensors"
_SAFE_OWNED = "safetensors, own memory"


class _Bench:
    def __init__(
        self,
        settings: Settings,
        root: OpenRoot,
        raw_path: Path,
        peers: list[Peer],
        paths: dict[str, Path],
        state: State,
    ) -> None:
        self.settings = settings
        self.root = root
        self.raw_path = raw_path
        self.peers = peers
        self.paths = paths
        self.num_bytes = num_bytes_of(state)
        self.target = zeros_like(state)
        self.memory = touched_memory(self.num_bytes)

    def existing(self, *, cold: bool) -> Race:
        """Into tensors that are there."""
        root, raw = self.root, RawFile(self.num_bytes)

        def before(path: Path) -> Callable[[], None]:
            return lambda: drop_from_cache(path) if cold else None

        contenders = [
            Contender(
                name="safepoint",
                run=lambda: _restore(root, self.target),
                before=before(root.root),
                keeps="every byte verified",
                num_bytes=self.num_bytes,
            ),
            Contender(
                name="raw preadv, 2 threads",
                run=lambda: raw.read(self.raw_path, self.memory),
                before=before(self.raw_path),
                keeps="no digests",
                num_bytes=self.num_bytes,
            ),
        ]
        contenders.extend(
            Contender(
                name=peer.name,
                run=self._load_into(peer),
                before=before(self.paths[peer.name]),
                keeps="crc32c" if peer.name == "TensorStore" else "no digests",
                num_bytes=self.num_bytes,
            )
            for peer in self.peers
        )
        # Warm ones take so little that more rounds cost nothing, and say more.
        rounds = self.settings.rounds if cold else max(3, self.settings.rounds)
        what = "cold" if cold else "warm"
        return run_race(f"Restore into existing tensors, {what}", contenders, rounds=rounds, warm_up=not cold)

    def _load_into(self, peer: Peer) -> Callable[[], None]:
        return lambda: peer.load_into(self.paths[peer.name], self.target)

    def fresh(self) -> Race:
        """Into new tensors, each page of which is then looked at once."""
        contenders = [
            self._fresh("safepoint", lambda: _model(self.root.manager.restore(self.root.step)), "every byte verified"),
            self._fresh(
                _MAPPED,
                lambda: _model(self.root.manager.restore(self.root.step, host_memory="mapped")),
                "sizes only",
            ),
        ]
        for peer in self.peers:
            if isinstance(peer, (TorchSave, Safetensors)):
                kind = "mapped, no digests" if isinstance(peer, Safetensors) else "no digests"
                contenders.append(self._fresh(peer.name, self._load(peer), kind))
                if isinstance(peer, Safetensors):
                    contenders.append(self._fresh(_SAFE_OWNED, self._load_owned(peer), "memory of its own, no digests"))
        return run_race("Restore into fresh tensors, warm", contenders, rounds=self.settings.rounds)

    def _load(self, peer: Peer) -> Callable[[], State]:
        return lambda: peer.load(self.paths[peer.name])

    def _load_owned(self, peer: Peer) -> Callable[[], State]:
        load = self._load(peer)
        return lambda: {name: tensor.clone() for name, tensor in load().items()}

    def _fresh(self, name: str, load: Callable[[], State], keeps: str) -> Contender:
        def run() -> None:
            for tensor in load().values():
                tensor.reshape(-1)[::1024].sum()

        return Contender(name=name, run=run, keeps=keeps, num_bytes=self.num_bytes)

    def part(self) -> Race:
        """One kind of tensor, a third of the bytes, beside everything."""
        some = {name: tensor for name, tensor in self.target.items() if name.endswith("mlp.up.weight")}
        keys = ["model.*mlp.up.weight"]
        root = self.root
        num_bytes = num_bytes_of(some)
        contenders = [
            Contender(
                name="safepoint",
                run=lambda: _restore(root, some, keys=keys),
                keeps="whole blocks verified",
                num_bytes=num_bytes,
            ),
            *(
                Contender(
                    name=peer.name,
                    run=functools.partial(peer.load_part, self.paths[peer.name], some),
                    keeps="no digests",
                    num_bytes=num_bytes,
                )
                for peer in self.peers
                if isinstance(peer, (Safetensors, Dcp))
            ),
            Contender(
                name="safepoint, everything",
                run=lambda: _restore(root, self.target),
                keeps="every byte verified",
                num_bytes=self.num_bytes,
            ),
        ]
        return run_race(
            f"Restore of a part, {num_bytes >> 20} of {self.num_bytes >> 20} MiB, warm",
            contenders,
            rounds=self.settings.rounds,
        )


def _restore(root: OpenRoot, target: State, **selection: Any) -> None:
    root.manager.restore(root.step, {"model": target}, **selection)


def _model(result: Any) -> State:
    model: State = result.state["model"]
    return model
