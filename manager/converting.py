"""From any checkpoint that can be read to steps in any format, or to directories that other libraries load.

Owns what a conversion is asked for and what it tells; `rewriting` and `exporting` do it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from safepoint.formats.foreign.huggingface import MAX_FILE_BYTES
from safepoint.formats.registry import format_names
from safepoint.formats.storage.opening import is_url
from safepoint.manager.errors import (
    CheckpointError,
    CorruptDataError,
    IncompleteCoverageError,
    InvalidArgumentError,
    StepNotFoundError,
    UnsupportedValueError,
)
from safepoint.manager.exporting import EXPORT_FORMATS, Exporting, export
from safepoint.manager.opened import Opened, list_checkpoints, open_checkpoint
from safepoint.manager.options import full_root
from safepoint.manager.progress import QUIET, Progress
from safepoint.manager.rewriting import Rewriting, chosen_mode

if TYPE_CHECKING:
    from safepoint.formats.layout import Mode
    from safepoint.manager.options import RequestedMode
    from safepoint.manager.rewriting import Outcome

__all__ = ["ConvertResult", "ConvertedStep", "convert", "target_formats"]

_OF_ONE_STEP = (CorruptDataError, IncompleteCoverageError, StepNotFoundError, UnsupportedValueError)
"""What is wrong with one step of many, and not with all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedStep:
    """One checkpoint that was converted.

    Attributes:
        step: its number in the destination; None for a directory of others.
        path: of the step, or of the directory.
        files: their names in it.
        num_bytes: of data.
        outcome: "written" from the start, "resumed" where an interrupted conversion had begun, "present" where it was
            done already.
    """

    step: int | None
    path: str
    files: tuple[str, ...]
    num_bytes: int
    outcome: Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertResult:
    """What was converted.

    Attributes:
        steps: in the order in which they were.
        errors: what is wrong with steps that could not be converted, where all of a root were asked for.
    """

    steps: tuple[ConvertedStep, ...]
    errors: tuple[CheckpointError, ...] = ()


def target_formats() -> tuple[str, ...]:
    """Return the formats that `convert` writes: those of steps, and those of directories of others."""
    return tuple(sorted({*format_names(), *EXPORT_FORMATS}))


def convert(  # noqa: PLR0913 - options, by name
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    format: str = "safetensors",  # noqa: A002 - the field's word for it
    mode: RequestedMode = "auto",
    step: int | Literal["all"] | None = None,
    to_step: int | None = None,
    item: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: Progress = QUIET,
) -> ConvertResult:
    """Write a checkpoint of any kind in another format. Called by one process; needs neither JAX nor Orbax.

    A step of ours keeps everything in our formats: tree, values, metrics, objects' states. What others wrote becomes a
    step with their tree. The formats `dcp` and `huggingface` are directories for others: the first holds all tensors
    and plain values, the second the tensors of one item.

    It streams: no more than one leaf is in memory, or one batch of small ones. An interrupted conversion shows nothing,
    and goes on with the next file when it is started again; what is done already is left alone. At the end everything
    is read back, and each leaf compared by its digest.

    Args:
        source: a step or a root of ours, by path or URL; anything that `restore_foreign` reads; or a directory of such
            by step number.
        destination: a root, made if need be, by path or URL; or, for `dcp` and `huggingface`, a new directory.
        format: one of `target_formats()`.
        mode: of the files of a step; "auto" is whole leaves.
        step: which step of a root; None for the latest; "all" for all of them, where a directory of others becomes one
            with a directory for each step.
        to_step: number of the new step; None keeps the old one, and is 0 where there was none.
        item: for `huggingface`: the item; None for "model" where there is one, else for all of the tree.
        max_file_bytes: for `dcp` and `huggingface`: of tensors in one file; one tensor is never cut.
        progress: told of the bytes written, then of those read back, for each step.

    Raises:
        InvalidArgumentError: nothing that can be read is there, something else has the destination's name, or the
            options do not go together.
        StepNotFoundError: the root has no such step.
        StepExistsError: the destination has another step of this number.
        IncompleteCoverageError: the step is one process's part of one.
        CorruptDataError: the source is damaged, or what was written came back as something else.
        UnsupportedValueError: the format cannot hold something in it; names it.
        RootInUseError: another manager saves to the destination.
        StorageError: the source cannot be read, or the destination not be written.
    """
    if format not in target_formats():
        raise InvalidArgumentError(f"there is no format {format!r}", hint=f"Formats: {', '.join(target_formats())}.")
    if to_step is not None and (step == "all" or format in EXPORT_FORMATS):
        raise InvalidArgumentError("`to_step` is for one step that becomes one of a root", hint="Leave it away.")
    target = full_root(os.fspath(destination))
    if format in EXPORT_FORMATS:
        if is_url(target):
            raise InvalidArgumentError(
                f"the format {format} is written to a local directory", path=target, hint="Upload it from there."
            )
        if mode != "auto":
            raise InvalidArgumentError(f"the format {format} has no modes", hint="Leave `mode` away.")
        chosen = Exporting(format=format, item=item, max_file_bytes=max_file_bytes)
        work: _Work = _Export(path=target, is_one_of_many=step == "all", chosen=chosen)
    else:
        if item is not None:
            raise InvalidArgumentError("`item` is for `huggingface`: a step holds all items", hint="Leave it away.")
        work = _Step(root=target, format=format, mode=chosen_mode(format, mode), number=to_step)
    if step != "all":
        return ConvertResult(steps=(work(open_checkpoint(source, step=step), progress),))
    done: list[ConvertedStep] = []
    errors: list[CheckpointError] = []
    for number in list_checkpoints(source):
        try:
            done.append(work(open_checkpoint(source, step=number), progress))
        except _OF_ONE_STEP as error:
            errors.append(error.with_context(step=number))
    return ConvertResult(steps=tuple(done), errors=tuple(errors))


_Work = Callable[[Opened, Progress], ConvertedStep]


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Makes a checkpoint a step of a root."""

    root: str
    format: str
    mode: Mode
    number: int | None

    def __call__(self, opened: Opened, progress: Progress) -> ConvertedStep:
        number = self.number if self.number is not None else opened.step or 0
        origin = opened.checkpoint.kind if opened.own is None else opened.own.committed.record.attempt
        work = Rewriting(
            opened=opened, step=number, format=self.format, mode=self.mode, extra={"converted_from": origin}
        )
        made = work.run(self.root, progress)
        return ConvertedStep(
            step=number,
            path=f"{self.root}/{number}",
            files=made.files,
            num_bytes=made.record.num_bytes,
            outcome=made.outcome,
        )


@dataclass(frozen=True, kw_only=True)
class _Export:
    """Makes a checkpoint a directory of others."""

    path: str
    is_one_of_many: bool
    chosen: Exporting

    def __call__(self, opened: Opened, progress: Progress) -> ConvertedStep:
        path = os.path.join(self.path, str(opened.step)) if self.is_one_of_many else self.path
        made = export(opened, path, self.chosen, progress)
        return ConvertedStep(step=None, path=path, files=made.files, num_bytes=made.num_bytes, outcome=made.outcome)
