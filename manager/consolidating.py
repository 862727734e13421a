"""A step laid out anew: whole leaves, one file an item, as other tools read them.

The step keeps its number, tree, values and metrics; it is another attempt, and says in its record which one it is from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from safepoint.manager.opened import opened_step
from safepoint.manager.progress import QUIET
from safepoint.manager.rewriting import Rewriting

if TYPE_CHECKING:
    import os

    from safepoint.formats.commit_record import CommitRecord
    from safepoint.manager.progress import Progress
    from safepoint.manager.step_paths import OpenStep

__all__ = ["consolidate_step"]

FORMAT = "safetensors"


def consolidate_step(
    step: OpenStep, destination: str | os.PathLike[str], *, progress: Progress = QUIET
) -> CommitRecord:
    """Write a step in consolidated mode to another root; return its record there.

    It goes through `rewriting`: streamed, gone on with where it was interrupted, and read back before it is committed.

    Args:
        step: any step, in any mode.
        destination: a root, made if need be.
        progress: told of the bytes written, then of those read back.

    Raises:
        StepExistsError: the root has another step of this number.
        IncompleteCoverageError: the step is one process's part of one, so that nobody has whole leaves here.
        CorruptDataError: the step is damaged, or what was written came back as something else.
        RootInUseError: a manager owns the root.
        StorageError: the root cannot be written to.
    """
    work = Rewriting(
        opened=opened_step(step),
        step=step.step,
        format=FORMAT,
        mode="consolidated",
        extra={"consolidated_from": step.committed.record.attempt},
    )
    return work.run(destination, progress).record
