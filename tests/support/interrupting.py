"""Progress that ends the work which tells of itself."""

from __future__ import annotations

__all__ = ["Interrupting"]


class Interrupting:
    """Interrupts at the k-th piece of work."""

    def __init__(self, at: int) -> None:
        self.left = at

    def begin(self, what: str, total_bytes: int) -> None:
        """Wait."""
        del what, total_bytes

    def advance(self, num_bytes: int) -> None:
        """Count, and interrupt."""
        del num_bytes
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
