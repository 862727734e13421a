"""Saves behind the training loop: how long the loop stops, and how much slower it runs meanwhile."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from benchmarks.limits import touched_memory
from benchmarks.measuring import Contender, Goal, Race, Report, run_race
from benchmarks.ours import KEEPS, OpenRoot
from benchmarks.peers import Dcp, Orbax, Peer, available
from benchmarks.states import num_bytes_of, transformer_state
from benchmarks.torch_checkpointing_peer import TorchCheckpointing

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.settings import Settings, Workspace

__all__ = ["measure"]

_OURS = "safepoint"
_MEMCPY = "one thread copying into touched memory"
_CLONE = "clone() of every tensor"


def measure(settings: Settings, workspace: Workspace) -> Report:
    """Race the blocked times, then the loops."""
    state = transformer_state(settings.state_bytes)
    root = OpenRoot(workspace.fresh("async"))
    peers, absent = available([Dcp, Orbax] if settings.is_quick else [Dcp, TorchCheckpointing, Orbax])
    blocked = _blocked(settings, workspace, state, root, peers)
    blocked.absent.update(absent)
    loops = [
        _loop(settings, state, root, "matmul loop, all threads", _matmul()),
        _loop(settings, state, root, "Python loop", _count),
    ]
    capacity = root.manager._slab.capacity_bytes  # noqa: SLF001 - what an async save keeps
    root.close()
    for peer in peers:
        peer.close()
    goals = [
        Goal(
            name="blocked time of an async save / one-thread memcpy",
            target=1.2,
            measured=_inverse(blocked, _MEMCPY),
            at_most=True,
        ),
        Goal(name="blocked time / clone()", target=0.3, measured=_inverse(blocked, _CLONE), at_most=True),
        Goal(name="blocked time / DCP async", target=0.3, measured=_inverse(blocked, "DCP"), at_most=True),
        Goal(name="blocked time / Orbax async", target=0.3, measured=_inverse(blocked, "Orbax"), at_most=True),
        *(
            Goal(name=f"{race.title}: speed during a save", target=0.9, measured=race.speedup("during a save", "alone"))
            for race in loops
        ),
        Goal(
            name="memory kept for async saves / state",
            target=1.05,
            measured=capacity / num_bytes_of(state),
            at_most=True,
        ),
    ]
    return Report(suite="async", races=[blocked, *loops], goals=goals)


def _inverse(race: Race, other: str) -> float | None:
    speedup = race.speedup(_OURS, other)
    return None if speedup is None else 1 / speedup


def _blocked(
    settings: Settings, workspace: Workspace, state: dict[str, torch.Tensor], root: OpenRoot, peers: list[Peer]
) -> Race:
    num_bytes = num_bytes_of(state)
    flat = [touched_memory(num_bytes), touched_memory(num_bytes)]

    def memcpy() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            flat[0].copy_(flat[1])
        finally:
            torch.set_num_threads(threads)

    def finish() -> None:
        root.manager.wait()
        root.forget()

    def ours() -> float:
        started = time.perf_counter()
        root.save_behind(state)
        return time.perf_counter() - started

    copies: list[torch.Tensor] = []
    contenders = [
        Contender(name=_OURS, run=ours, after=finish, keeps=KEEPS, num_bytes=num_bytes),
        Contender(name=_MEMCPY, run=memcpy, num_bytes=num_bytes),
        Contender(
            name=_CLONE,
            run=lambda: copies.extend(tensor.clone() for tensor in state.values()),
            after=copies.clear,
            num_bytes=num_bytes,
        ),
    ]
    contenders.extend(_peer_behind(peer, state, workspace) for peer in peers)
    return run_race(f"Blocked time of an async save of {num_bytes >> 20} MiB", contenders, rounds=settings.rounds)


def _peer_behind(peer: Peer, state: dict[str, torch.Tensor], workspace: Workspace) -> Contender:
    path = workspace.fresh(peer.needs)
    handles = []

    def run() -> None:
        handles.append(peer.save_behind(state, path))

    def after() -> None:
        handles.pop().result()
        workspace.remove(path)

    return Contender(name=peer.name, run=run, after=after, keeps=peer.keeps, num_bytes=num_bytes_of(state))


def _matmul() -> Callable[[], None]:
    one, other, out = torch.randn(768, 768), torch.randn(768, 768), torch.empty(768, 768)

    def turn() -> None:
        torch.mm(one, other, out=out)

    return turn


def _count() -> None:
    total = 0
    for number in range(20_000):
        total += number


def _loop(
    settings: Settings, state: dict[str, torch.Tensor], root: OpenRoot, title: str, turn: Callable[[], None]
) -> Race:
    """Compare the seconds of a turn while a save is in flight with those of the same number of turns alone."""
    turns = 0

    def during() -> float:
        nonlocal turns
        root.save_behind(state)
        in_flight = root.manager._in_flight  # noqa: SLF001 - the thread, to see when it ends
        assert in_flight is not None
        turns = 0
        started = time.perf_counter()
        while in_flight._thread.is_alive():  # noqa: SLF001
            turn()
            turns += 1
        return (time.perf_counter() - started) / max(1, turns)

    def alone() -> float:
        started = time.perf_counter()
        for _ in range(max(1, turns)):
            turn()
        return (time.perf_counter() - started) / max(1, turns)

    def finish() -> None:
        root.manager.wait()
        root.forget()

    contenders = [
        Contender(name="during a save", run=during, after=finish),
        Contender(name="alone", run=alone),
    ]
    return run_race(
        f"{title}, seconds a turn", contenders, rounds=settings.rounds if settings.is_quick else 2 * settings.rounds
    )
