"""A transport between threads of one process, with gloo's habits: a send lasts until it is received."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from typing_extensions import override

from safepoint.manager.coordination import Transport
from safepoint.manager.errors import PeerFailedError, RendezvousTimeoutError

if TYPE_CHECKING:
    import torch

__all__ = ["Switchboard", "ThreadTransport"]

_LOOK_SECS = 0.005


class Switchboard:
    """What connects the transports of several threads."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int], queue.Queue[tuple[torch.Tensor, threading.Event]]] = defaultdict(queue.Queue)
        self.closed: set[int] = set()


class ThreadTransport(Transport):
    """One thread's end."""

    def __init__(self, board: Switchboard, own: int) -> None:
        self._board = board
        self._own = own

    @override
    def send(self, buffer: torch.Tensor, to: int, deadline_secs: float) -> None:
        taken = threading.Event()
        self._board.boxes[self._own, to].put((buffer, taken))
        until = time.monotonic() + deadline_secs
        while not taken.wait(_LOOK_SECS):
            self._check(to, until, deadline_secs)

    @override
    def receive(self, buffer: torch.Tensor, source: int, deadline_secs: float) -> None:
        until = time.monotonic() + deadline_secs
        while True:
            try:
                sent, taken = self._board.boxes[source, self._own].get(timeout=_LOOK_SECS)
                break
            except queue.Empty:
                self._check(source, until, deadline_secs)
        assert sent.numel() == buffer.numel(), "both sides agree on the number of bytes"
        buffer.copy_(sent)
        taken.set()

    @override
    def close(self) -> None:
        self._board.closed.add(self._own)

    def _check(self, other: int, until: float, deadline_secs: float) -> None:
        if {self._own, other} & self._board.closed:
            raise PeerFailedError(f"The connection to process {other} broke.", process_index=other)
        if time.monotonic() >= until:
            raise RendezvousTimeoutError(f"Process {other} did not come.", absent=(other,), deadline_secs=deadline_secs)
