"""Pauses Python's cycle collector while many objects are made at once.

Making a hundred objects a leaf sets off full collections, each of which looks at everything the program has: for
30,000 leaves that was more than half of a save's time. Nothing that is made meanwhile is a cycle.
"""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["paused_collection"]

_lock = threading.Lock()
_pauses = 0
_ours = False


@contextmanager
def paused_collection() -> Iterator[None]:
    """Keep the collector from running by itself, in all threads; the last of several pauses that overlap ends it.

    Does nothing where the program has switched it off itself.
    """
    global _pauses, _ours  # noqa: PLW0603 - the collector is one for the process
    with _lock:
        _pauses += 1
        if gc.isenabled():
            _ours = True
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _ours:
                _ours = False
                gc.enable()
