"""A proxy between a client and a server on this machine, for tests: a subclass says what happens to a request."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qs, unquote, urlsplit

from typing_extensions import override

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Exchange", "HttpProxy", "Reply"]

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "expect", "date", "server"})
_SERVER_SECS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What goes back to the client."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Exchange:
    """One request, of which the body is read from the client only when it is asked for."""

    def __init__(self, handler: BaseHTTPRequestHandler, target: str) -> None:
        self.method = handler.command
        self.target = handler.path
        found = {name.lower(): value for name, value in handler.headers.items()}
        self.headers = {name: value for name, value in found.items() if name not in _HOP_BY_HOP}
        self._handler = handler
        self._server = target
        self._body: bytes | None = None

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.target).query).items()}

    @property
    def body(self) -> bytes:
        if self._body is None:
            self._body = self._handler.rfile.read(int(self._handler.headers.get("content-length") or 0))
        return self._body

    def forward(self, *, method: str | None = None, target: str | None = None) -> Reply:
        """Have the server carry out this request, or another by the same client."""
        connection = http.client.HTTPConnection(self._server, timeout=_SERVER_SECS)
        try:
            body = self.body if method is None else None
            connection.request(method or self.method, target or self.target, body=body, headers=self.headers)
            response = connection.getresponse()
            headers = {name: value for name, value in response.getheaders() if name.lower() not in _HOP_BY_HOP}
            return Reply(status=response.status, headers=headers, body=response.read())
        finally:
            connection.close()


class HttpProxy:
    """Listens on a port of its own; every connection has a thread."""

    def __init__(self, server: str) -> None:
        """Start.

        Args:
            server: `host:port` to which requests go.
        """
        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self, server))
        self._listener.daemon_threads = True
        self.address = f"127.0.0.1:{self._listener.server_address[1]}"
        self.url = f"http://{self.address}"
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def answer(self, exchange: Exchange) -> Reply | None:
        """Return what the client gets, None to break the connection."""
        return exchange.forward()

    def close(self) -> None:
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _handler_of(proxy: HttpProxy, server: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _answer(self) -> None:
            exchange = Exchange(self, server)
            try:
                reply = proxy.answer(exchange)
                if reply is None:
                    self._break()
                    return
                _ = exchange.body  # else the rest of it would be taken for the next request
                self._send(reply)
            except OSError:  # the client gave up
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer  # noqa: N815 - names that the base class looks for

        def _send(self, reply: Reply) -> None:
            self.send_response_only(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            length = reply.headers.get("x-length") or str(len(reply.body))
            self.send_header("content-length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.body)

        def _break(self) -> None:
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            self.connection.close()

        @override
        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
