"""The `safepoint` command: what a person types. It uses the public API and owns no rule of its own."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from safepoint.manager.cli.app import app

__all__ = ["main"]


def main() -> None:
    """Run the `safepoint` command."""
    sys.stdout, sys.stderr = _usable(sys.stdout), _usable(sys.stderr)
    app()


def _usable(stream: TextIO | None) -> TextIO:
    """Return a stream that takes any text: escaped where its encoding has not all of it, dropped where it is closed."""
    if stream is None:  # the shell's `>&-`
        return open(os.devnull, "w", encoding="utf-8")
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
    return stream
