"""ByteBudget: how many bytes may be on their way at once.

Knows nothing about storages. First come, first served, so that a large file does not wait for ever behind small ones.
"""

from __future__ import annotations

import threading
import time
from collections import deque

__all__ = ["ByteBudget"]


class ByteBudget:
    """Bytes that threads take and give back."""

    def __init__(self, capacity_bytes: int) -> None:
        """Start with all of it free.

        Args:
            capacity_bytes: bytes that may be taken at once.
        """
        self._capacity_bytes = capacity_bytes
        self.two_copies = threading.Lock()
        """Held while something exists twice, so that it is one file at a time that takes more than was counted."""
        self._changed = threading.Condition()
        self._taken_bytes = 0
        self._waiting: deque[object] = deque()
        self._last_given = time.monotonic()

    @property
    def taken_bytes(self) -> int:
        """Bytes that are taken now."""
        return self._taken_bytes

    def take(self, num_bytes: int, *, deadline_secs: float) -> int:
        """Take bytes, after all who came before; what is larger than the whole takes the whole.

        Args:
            num_bytes: wanted.
            deadline_secs: wait so long for somebody to give back anything, and again after each time.

        Returns:
            What was taken: to be given back.

        Raises:
            TimeoutError: nobody gave back anything for so long.
        """
        wanted = min(num_bytes, self._capacity_bytes)
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            start = time.monotonic()
            try:
                while self._waiting[0] is not ticket or self._taken_bytes + wanted > self._capacity_bytes:
                    left = max(start, self._last_given) + deadline_secs - time.monotonic()
                    if left <= 0:
                        raise TimeoutError
                    self._changed.wait(left)
                self._taken_bytes += wanted
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        return wanted

    def give(self, num_bytes: int) -> None:
        """Give back what `take` returned."""
        with self._changed:
            self._taken_bytes -= num_bytes
            self._last_given = time.monotonic()
            self._changed.notify_all()
