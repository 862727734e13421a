"""What an open manager tells of its root without meeting anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safepoint.manager.options import check_step

if TYPE_CHECKING:
    from safepoint.manager.errors import CheckpointError
    from safepoint.manager.options import ManagerOptions
    from safepoint.manager.policies import StepInfo
    from safepoint.manager.second_opinion import StepVerifier
    from safepoint.manager.session import Session

__all__ = ["LookingAtSteps"]


class LookingAtSteps:
    """The part of `CheckpointManager` that only looks."""

    _session: Session
    _options: ManagerOptions

    def steps(self) -> list[StepInfo]:
        """Return the committed steps in the order of their commits. Local: meets nobody.

        Raises:
            StorageError: the root cannot be listed.
        """
        self._check_open()
        return [item.info for item in self._session.committer.list_steps()]

    def latest_step(self) -> int | None:
        """Return the step committed last, None if there is none. Local: meets nobody."""
        self._check_open()
        return self._session.committer.latest_step()

    def verify(self, step: int | None = None, *, reader: StepVerifier = "safepoint") -> list[CheckpointError]:
        """Read every byte of a step, or of all; return an error for each damaged file. Local: meets nobody.

        With `reader="orbax"`, return one for each leaf that Orbax itself restores otherwise, in a process of its own.
        """
        self._check_open()
        number, secs = None if step is None else check_step(step), self._options.deadline_secs
        with self._session.telling.reported("verify", number) as progress:
            return self._session.committer.verify(number, reader=reader, deadline_secs=secs, progress=progress)

    @property
    def root(self) -> str:
        """Absolute path of the root, or its URL."""
        return self._options.root

    def _check_open(self) -> None:
        raise NotImplementedError
