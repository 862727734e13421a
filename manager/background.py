"""The part of a save that runs behind the training loop: one thread for one save, joined before the next begins.

The thread is not a daemon, so that a program whose last statement is a save ends only when that save has: every wait
in it has a deadline.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from safepoint.manager.errors import AsyncSaveError

if TYPE_CHECKING:
    from safepoint.manager.coordination import Coordinator
    from safepoint.manager.saving import SaveOperation

__all__ = ["BackgroundSave"]

logger = logging.getLogger("safepoint")


class BackgroundSave:
    """A save in flight."""

    def __init__(self, operation: SaveOperation, coordinator: Coordinator) -> None:
        self.step: int = operation.step
        self.error: BaseException | None = None
        # The thread alone holds the operation, and with it the state: both go when the save has ended.
        self._thread = threading.Thread(
            target=self._run, args=(operation, coordinator), name=f"safepoint-save-{self.step}", daemon=False
        )
        self._thread.start()

    def join(self) -> None:
        """Wait until the save has ended, one way or the other."""
        self._thread.join()

    def raise_failure(self) -> None:
        """Raise what became of a save that has ended badly.

        Raises:
            AsyncSaveError: it failed; `__cause__` says why.
        """
        if self.error is not None:
            raise AsyncSaveError(
                f"the save of step {self.step} behind the training loop failed: {self.error}",
                step=self.step,
                outcome=getattr(self.error, "outcome", None),
                hint="Later saves are not affected; the step of this call was not saved.",
            ) from self.error

    def _run(self, operation: SaveOperation, coordinator: Coordinator) -> None:
        try:
            operation.complete(coordinator)
        except BaseException as error:  # noqa: BLE001 - raised by the next save, wait or close
            self.error = error
            logger.warning("the save of step %d behind the training loop failed: %s", self.step, error)
