"""What is closed at the end of a `with` block, whether that ends well or not. Knows nothing of what it closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

from safepoint.manager.errors import CheckpointError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Closing"]


class Closing(ABC):
    """A context manager that closes itself; an error of the block counts more than one of closing, which it notes."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as failed:
            error.add_note(f"While closing the checkpoint manager: {failed}")
