"""A pool of processes with torch.distributed on gloo, in which many cases run.

Owns starting, addressing, signalling and replacing its members. Importing torch takes seconds on a small machine, so
one server process imports it once and forks the members; a case on n of them makes a new process group of the first
n, which takes milliseconds. A member that died, hangs or was stopped is replaced before the next case.

A case is a function of a test module, `case(rank, *args)`; arguments and results are plain values.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import inspect
import multiprocessing
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.connection import Connection

__all__ = ["CaseFailedError", "PoolView", "ProcessPool", "Run", "after_case"]

_START_SECS = 60.0
_GROUP_SECS = 30.0
_RUN_SECS = 60.0
_QUIT_SECS = 5.0


class CaseFailedError(Exception):
    """A case failed on a member in a way that cannot be raised again here; holds its traceback as text."""


@dataclass
class _Member:
    process: Any
    connection: Connection
    busy_with: int | None = None
    in_group: int | None = None
    must_be_replaced: bool = False


class Run:
    """A case that is running on some members."""

    def __init__(self, pool: ProcessPool, number: int, ranks: Sequence[int]) -> None:
        self._pool = pool
        self._number = number
        self._ranks = list(ranks)

    def outcomes(self, *, ranks: Iterable[int] | None = None, timeout_secs: float = _RUN_SECS) -> dict[int, Any]:
        """Return, by rank, what the case returned, or the exception that it raised there."""
        return self._pool.collect(self._number, self._ranks if ranks is None else list(ranks), timeout_secs)

    def results(self, *, ranks: Iterable[int] | None = None, timeout_secs: float = _RUN_SECS) -> list[Any]:
        """Return what the case returned, in the order of ranks; raise what it raised on the lowest."""
        outcomes = self.outcomes(ranks=ranks, timeout_secs=timeout_secs)
        failed = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, BaseException)}
        for rank, error in failed.items():
            error.add_note(f"on rank {rank}" + (f"; failed on ranks {sorted(failed)}" if len(failed) > 1 else ""))
            raise error
        return list(outcomes.values())


class ProcessPool:
    """Processes that are started when first needed.

    Args:
        size: how many at most.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed"])
        self._members: dict[int, _Member] = {}
        self._number = 0
        self._group = 0
        self._group_size = 0

    def view(self, num_processes: int) -> PoolView:
        """Return the pool as if it had this many members."""
        return PoolView(self, num_processes)

    def run(
        self,
        case: Callable[..., Any],
        *args: Any,
        num_processes: int | None = None,
        ranks: Iterable[int] | None = None,
        timeout_secs: float = _RUN_SECS,
    ) -> list[Any]:
        """Run a case in a group of `num_processes`, on all of them or on some ranks, and return its results."""
        run = self.start(case, *args, num_processes=num_processes, ranks=ranks)
        return run.results(timeout_secs=timeout_secs)

    def start(
        self,
        case: Callable[..., Any],
        *args: Any,
        num_processes: int | None = None,
        ranks: Iterable[int] | None = None,
    ) -> Run:
        """Start a case and return at once; other ranks than those named stay free for another one."""
        count = self.size if num_processes is None else num_processes
        chosen = list(range(count) if ranks is None else ranks)
        self._ensure_group(count)
        self._number += 1
        source = str(Path(inspect.getsourcefile(case) or "").resolve())
        for rank in chosen:
            member = self._members[rank]
            member.busy_with = self._number
            member.connection.send(("run", self._number, (source, case.__module__, case.__qualname__, rank, args)))
        return Run(self, self._number, chosen)

    def pause(self, rank: int) -> None:
        """Stop a member (SIGSTOP); it goes on with `resume`, or when the next case needs it."""
        os.kill(self._members[rank].process.pid, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """Let a member go on (SIGCONT)."""
        os.kill(self._members[rank].process.pid, signal.SIGCONT)

    def kill(self, rank: int) -> None:
        """Kill a member (SIGKILL) and wait until it is gone."""
        self._members[rank].process.kill()
        self._members[rank].process.join()

    def replace(self) -> None:
        """Start the next case in new processes."""
        for member in self._members.values():
            member.must_be_replaced = True

    def close(self) -> None:
        """End all members."""
        for member in self._members.values():
            with contextlib.suppress(OSError, ValueError):
                member.connection.send(("quit", 0, ()))
        until = time.monotonic() + _QUIT_SECS
        for member in self._members.values():
            member.process.join(max(0.0, until - time.monotonic()))
            _end(member)
        self._members.clear()

    def collect(self, number: int, ranks: Sequence[int], timeout_secs: float) -> dict[int, Any]:
        """Return what these members replied to a request; a timeout replaces those that did not."""
        until = time.monotonic() + timeout_secs
        outcomes: dict[int, Any] = {}
        while missing := [rank for rank in ranks if rank not in outcomes]:
            connections = {self._members[rank].connection: rank for rank in missing}
            ready = wait(list(connections), max(0.0, until - time.monotonic()))
            if not ready:
                self.replace()
                raise TimeoutError(f"ranks {missing} did not return within {timeout_secs:g} s")
            for connection in ready:
                rank = connections[connection]  # type: ignore[index]  # typeshed: wait takes sockets too
                reply = self._receive(rank)
                if reply is not None and reply[0] == number:
                    outcomes[rank] = reply[1]
        return {rank: outcomes[rank] for rank in ranks}

    def _receive(self, rank: int) -> tuple[int, Any] | None:
        member = self._members[rank]
        try:
            number, outcome, text = member.connection.recv()
        except (EOFError, OSError):
            member.must_be_replaced = True
            member.process.join()
            number = -1 if member.busy_with is None else member.busy_with
            return number, CaseFailedError(f"the process of rank {rank} died ({member.process.exitcode})")
        if number == member.busy_with:
            member.busy_with = None
        if text is not None:
            member.in_group = None  # a case that failed may have left its group in any state
            outcome = outcome if outcome is not None else CaseFailedError(text)
            outcome.__cause__ = None if isinstance(outcome, CaseFailedError) else CaseFailedError(text)
        return number, outcome

    def _ensure_group(self, count: int) -> None:
        if not 1 <= count <= self.size:
            raise ValueError(f"a group of {count} in a pool of {self.size}")
        free = [self._members.get(rank) for rank in range(count)]
        # Other ranks of the same group may be in a case already; then this one joins them.
        if self._group_size == count and all(m is not None and m.in_group == self._group and _usable(m) for m in free):
            return
        started = [rank for rank in range(count) if self._replace_if_needed(rank)]
        for rank in started:
            self.collect(0, [rank], _START_SECS)
        self._group += 1
        self._group_size = count
        self._ask([0], "serve")
        port = self.collect(self._number, [0], _GROUP_SECS)[0]
        self._ask(range(count), "join", port, count)
        for rank, outcome in self.collect(self._number, range(count), _GROUP_SECS).items():
            if isinstance(outcome, BaseException):
                raise outcome
            self._members[rank].in_group = self._group

    def _ask(self, ranks: Iterable[int], what: str, *args: Any) -> None:
        self._number += 1
        for rank in ranks:
            self._members[rank].busy_with = self._number
            self._members[rank].connection.send((what, self._number, (rank, *args)))

    def _replace_if_needed(self, rank: int) -> bool:
        member = self._members.get(rank)
        if member is not None:
            if _usable(member) and member.busy_with is None:
                return False
            _end(member)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True, name=f"pool-{rank}")
        process.start()
        theirs.close()
        self._members[rank] = _Member(process, ours, busy_with=0)
        return True


class PoolView:
    """The first n members of a pool."""

    def __init__(self, pool: ProcessPool, num_processes: int) -> None:
        self.pool = pool
        self.num_processes = num_processes

    def run(
        self,
        case: Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout_secs: float = _RUN_SECS,
    ) -> list[Any]:
        """See `ProcessPool.run`."""
        return self.start(case, *args, ranks=ranks).results(timeout_secs=timeout_secs)

    def start(self, case: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None) -> Run:
        """See `ProcessPool.start`."""
        return self.pool.start(case, *args, num_processes=self.num_processes, ranks=ranks)

    def pause(self, rank: int) -> None:
        """See `ProcessPool.pause`."""
        self.pool.pause(rank)

    def resume(self, rank: int) -> None:
        """See `ProcessPool.resume`."""
        self.pool.resume(rank)

    def kill(self, rank: int) -> None:
        """See `ProcessPool.kill`."""
        self.pool.kill(rank)

    def replace(self) -> None:
        """See `ProcessPool.replace`."""
        self.pool.replace()


def _usable(member: _Member) -> bool:
    return not member.must_be_replaced and bool(member.process.is_alive())


def _end(member: _Member) -> None:
    member.process.kill()
    member.process.join()
    member.connection.close()


# From here on: what runs in a member.

_PR_SET_PDEATHSIG = 1


class _Group:
    """The process group that this member is in, and the store that it serves for it."""

    def __init__(self) -> None:
        self.store: Any = None

    def serve(self, rank: int) -> int:
        from torch.distributed import TCPStore  # noqa: PLC0415 - only members need it

        del rank
        self.leave()
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return int(self.store.port)

    def join(self, rank: int, port: int, count: int) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        if rank != 0:
            self.leave()
            self.store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group(
            "gloo", store=self.store, rank=rank, world_size=count, timeout=timedelta(seconds=_GROUP_SECS)
        )

    def leave(self) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        if dist.is_initialized():
            dist.destroy_process_group()
        self.store = None


def _serve(connection: Connection) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # torch looks up the name of every address that it connects to; where nobody answers, not for five seconds each.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    import torch  # noqa: PLC0415 - imported already, by the server that forked this

    torch.set_num_threads(1)
    group = _Group()
    requests: dict[str, Callable[..., Any]] = {"run": _run_case, "serve": group.serve, "join": group.join}
    connection.send((0, None, None))
    while True:
        try:
            what, number, args = connection.recv()
        except EOFError:
            return
        if what == "quit":
            group.leave()
            return
        _reply(connection, number, requests[what], args)


def _reply(connection: Connection, number: int, request: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        outcome, text = request(*args), None
    except Exception as error:  # noqa: BLE001 - raised again by whoever asked
        outcome, text = error, traceback.format_exc()
    try:
        connection.send((number, outcome, text))
    except Exception:  # noqa: BLE001 - it does not pickle: the text has to do
        connection.send((number, None, text or f"the case returned a {type(outcome).__name__}, which does not pickle"))


def _run_case(source: str, module: str, name: str, rank: int, args: tuple[Any, ...]) -> Any:
    loaded = sys.modules.get(module)
    if loaded is None or str(Path(getattr(loaded, "__file__", None) or "").resolve()) != source:
        spec = importlib.util.spec_from_file_location(module, source)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded
        spec.loader.exec_module(loaded)
    try:
        return getattr(loaded, name)(rank, *args)
    finally:
        while _to_undo:
            _to_undo.pop()()


_to_undo: list[Callable[[], None]] = []


def after_case(undo: Callable[[], None]) -> None:
    """Have this done when the case that is running here has ended: other cases run in the same process.

    Called by: a case, in a member.
    """
    _to_undo.append(undo)
