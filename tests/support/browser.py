"""A real Chromium without a window, driven through its debugging pipe: no driver, no network, no port.

Installed by the system's package manager (Debian: `apt-get install chromium`); `CHROMIUM` is None where it is not.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self

__all__ = ["CHROMIUM", "Browser"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from descriptor 3, and answers on 4."""

_ANSWER_SECS = 30.0
_PROBLEMS = frozenset({"Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"})


class Browser:
    """One browser with one page.

    Attributes:
        problems: what the page's console said, and errors of its scripts.
        requests: what was asked for, by address.
    """

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="safepoint-chromium-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        browser = [CHROMIUM, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _LAUNCH, str(to_read), str(to_write), *browser],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._numbers = itertools.count(1)
        self._pending = b""
        self._session: str | None = None
        self._seen: set[str] = set()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility", "DOM"):
            self.call(f"{domain}.enable")

    def open(
        self, page: Path, *, width: int = 1200, height: int = 900, scheme: str = "light", scripts: bool = True
    ) -> None:
        """Load a page, and forget what an earlier one did."""
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.problems.clear()
        self.requests.clear()
        self._seen.discard("Page.loadEventFired")
        self.call("Page.navigate", url=page.as_uri())
        give_up = time.monotonic() + _ANSWER_SECS
        while "Page.loadEventFired" not in self._seen:
            self._take(give_up)

    def look(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, *, code: int, text: str = "") -> None:
        """Press a key, as a keyboard does."""
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def accessible(self) -> list[tuple[str, str]]:
        """Return role and name of everything that a screen reader is told of."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
        ]

    def screenshot(self) -> bytes:
        """Return what is seen, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def call(self, method: str, **parameters: Any) -> Any:
        """Return the answer to a command."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        give_up = time.monotonic() + _ANSWER_SECS
        while True:
            answer = self._take(give_up)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _take(self, give_up: float) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._read], [], [], max(0.0, give_up - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._pending += data
        message, _, self._pending = self._pending.partition(b"\0")
        value: dict[str, Any] = json.loads(message)
        method = value.get("method", "")
        self._seen.add(method)
        if method in _PROBLEMS:
            self.problems.append(json.dumps(value["params"]))
        if method == "Network.requestWillBeSent":
            self.requests.append(value["params"]["request"]["url"])
        return value

    def close(self) -> None:
        """End the browser."""
        os.close(self._write)
        os.close(self._read)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
