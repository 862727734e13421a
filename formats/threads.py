"""Threads that help with work which their starter does, too: as many as there are to be had."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["start_helpers"]


def start_helpers(work: Callable[[], None], *, count: int, name: str) -> Iterator[threading.Thread]:
    """Start daemon threads and yield each, `count` at most; fewer, or none, where there are no more to be had.

    Args:
        work: what each does, once.
        count: how many; nothing is started where that is not above 0.
        name: of each.
    """
    for _ in range(count):
        helper = threading.Thread(target=work, name=name, daemon=True)
        try:
            helper.start()
        except RuntimeError:  # no more threads to be had, or the interpreter is shutting down
            return
        yield helper
