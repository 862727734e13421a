"""How large a run is, and where it writes."""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Settings", "Workspace", "drop_from_cache"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Sizes of a run.

    Attributes:
        state_bytes: of the state of the large tensors.
        rounds: timed rounds of a race.
        small_leaves: counts of 1 KiB leaves.
        steps: counts of committed steps in a root.
        processes: process counts.
        is_quick: leaves out what takes long and belongs to no goal.
    """

    state_bytes: int
    rounds: int
    small_leaves: tuple[int, ...]
    steps: tuple[int, ...]
    processes: tuple[int, ...]
    is_quick: bool

    @classmethod
    def full(cls) -> Settings:
        """Return the sizes behind the published figures."""
        return cls(
            state_bytes=512 << 20,
            rounds=5,
            small_leaves=(10_000, 30_000),
            steps=(1_000, 10_000),
            processes=(1, 2, 4),
            is_quick=False,
        )

    @classmethod
    def quick(cls) -> Settings:
        """Return the sizes of a run that ends within 45 seconds on idle cores."""
        return cls(
            state_bytes=64 << 20, rounds=2, small_leaves=(10_000,), steps=(1_000,), processes=(2,), is_quick=True
        )


@dataclass(kw_only=True)
class Workspace:
    """A directory on a real disk; everything in it is removed at the end."""

    root: Path
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def fresh(self, name: str) -> Path:
        """Return a path that does not exist yet."""
        return self.root / f"{name}-{next(self._numbers)}"

    def remove(self, path: Path) -> None:
        """Remove a file or a tree."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def drop_from_cache(path: Path) -> None:
    """Make the next read of these files come from the disk."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
