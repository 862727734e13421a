"""A proxy that lets requests fail as networks and services do: refused, cut off, done without an answer, stalled.

Faults are taken by the requests that they fit, each as often as it says, in the order in which they were given.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from support.http_proxy import Exchange, HttpProxy, Reply

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FaultProxy", "Kind", "reads", "s3_error", "writes"]

Kind = Literal["busy", "reset", "lost reply", "stall", "silence", "expired"]
"""`busy`: 503. `reset`: cut off before the server hears of it. `lost reply`: after it did. `stall`: nothing, for ever.
`silence`: nothing, for ever, after the server did it. `expired`: refused since the credentials are no longer valid."""


def writes(exchange: Exchange) -> bool:
    return exchange.method in ("PUT", "POST")


def reads(exchange: Exchange) -> bool:
    return exchange.method in ("GET", "HEAD")


@dataclass(kw_only=True)
class _Fault:
    kind: Kind | Reply
    fits: Callable[[Exchange], bool]
    left: int


class FaultProxy(HttpProxy):
    """Passes everything on until it is told otherwise."""

    def __init__(self, server: str) -> None:
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._over = threading.Event()
        self.seen: list[tuple[str, str]] = []
        super().__init__(server)

    def fail(self, kind: Kind | Reply, fits: Callable[[Exchange], bool] = lambda _: True, *, times: int = 1) -> None:
        """Let the next `times` requests that fit fail, or be answered so."""
        with self._lock:
            self._faults.append(_Fault(kind=kind, fits=fits, left=times))

    def heal(self) -> None:
        """Forget all faults; what is stalled now is cut off."""
        with self._lock:
            self._faults.clear()
            self._over.set()
            self._over = threading.Event()

    @override
    def close(self) -> None:
        self.heal()
        super().close()

    @override
    def answer(self, exchange: Exchange) -> Reply | None:
        kind, over = self._take(exchange)
        if isinstance(kind, Reply):
            return kind
        if kind is None:
            return exchange.forward()
        if kind == "busy":
            return Reply(status=503)
        if kind == "expired":
            return _expired(exchange)
        if kind in ("lost reply", "silence"):
            exchange.forward()
        if kind in ("stall", "silence"):
            over.wait()
        return None

    def _take(self, exchange: Exchange) -> tuple[Kind | Reply | None, threading.Event]:
        with self._lock:
            self.seen.append((exchange.method, exchange.target))
            for fault in self._faults:
                if fault.left > 0 and fault.fits(exchange):
                    fault.left -= 1
                    return fault.kind, self._over
            return None, self._over


def s3_error(status: int, code: str) -> Reply:
    """Return what S3 answers."""
    return Reply(status=status, body=f"<Error><Code>{code}</Code><Message>No.</Message></Error>".encode())


def _expired(exchange: Exchange) -> Reply:
    if exchange.path.startswith(("/storage", "/upload")):
        return Reply(status=401, body=b'{"error": {"code": 401, "message": "Invalid Credentials"}}')
    return s3_error(400, "ExpiredToken")
