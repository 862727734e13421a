"""safepoint, as the suites use it: one root that stays open, as in a training run."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from safepoint.manager import CheckpointManager

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["KEEPS", "OpenRoot"]

KEEPS = "data, manifest, commit and directories are synced; digests"


class OpenRoot:
    """A manager, and a step number that goes up."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.manager = CheckpointManager(root, **options)
        self.step = 0

    def save(self, state: Any) -> None:
        """Commit the next step."""
        self.step += 1
        self.manager.save(self.step, {"model": state})

    def save_behind(self, state: Any) -> None:
        """Begin to save the next step."""
        self.step += 1
        self.manager.save(self.step, {"model": state}, blocking=False)

    def settle(self) -> None:
        """Wait until the last step's files are read again, as incremental saves do between steps."""
        links = self.manager._session.links  # noqa: SLF001 - nobody else wants to wait for it
        if links is not None and not links.settle(timeout_secs=600.0):
            raise TimeoutError("the files of the last step are still being read")

    def forget(self) -> None:
        """Remove the last step as no manager would: at once, and outside the clock."""
        shutil.rmtree(self.root / str(self.step))

    def close(self) -> None:
        """Close the manager and remove the root."""
        self.manager.close()
        shutil.rmtree(self.root)
