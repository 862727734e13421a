"""moto's server with conditions that hold in a race: it looks, and then writes, and does not keep the two together.

Run as a script: `python moto_server.py PORT`.
"""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

_CONDITIONS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")


class OneConditionAtATime:
    """Answers requests that write under a condition one after the other."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] != "PUT" or not any(name in environ for name in _CONDITIONS):
            return self._application(environ, start_response)
        content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))  # the client may stall
        environ["wsgi.input"] = io.BytesIO(content)
        with self._lock:
            return list(self._application(environ, start_response))


if __name__ == "__main__":
    application = OneConditionAtATime(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=True, request_handler=MotoRequestHandler)
