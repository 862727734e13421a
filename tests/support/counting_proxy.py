"""A proxy that counts the bytes of files that clients get through it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from typing_extensions import override

from support.http_proxy import Exchange, HttpProxy, Reply

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CountingProxy"]

_SMALL_BYTES = 4096
"""What is smaller is no data: answers about sizes, records."""


class CountingProxy(HttpProxy):
    """Passes everything on, and notes what was fetched."""

    def __init__(self, server: str) -> None:
        """Start; see `HttpProxy`."""
        self._lock = threading.Lock()
        self.fetched: Counter[str] = Counter()
        self.spoil: Callable[[str, Reply], Reply] = lambda _, reply: reply
        """What is sent in place of a reply with data, by its path."""
        super().__init__(server)

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return self.fetched.total()

    def forget(self) -> None:
        """Count from zero again."""
        with self._lock:
            self.fetched.clear()

    @override
    def answer(self, exchange: Exchange) -> Reply | None:
        reply = exchange.forward()
        is_listing = "list-type" in exchange.query or exchange.path.endswith("/o")
        if exchange.method != "GET" or is_listing or len(reply.body) < _SMALL_BYTES or exchange.path.endswith(".json"):
            return reply
        with self._lock:
            self.fetched[exchange.path] += len(reply.body)
        return self.spoil(exchange.path, reply)
