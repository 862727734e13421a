"""Errors about steps, processes and saves; the base and the errors about data are in `safepoint.formats.errors`.

CheckpointError
├── steps
│   ├── StepNotFoundError (FileNotFoundError)  lists the steps that are there
│   ├── StepExistsError (FileExistsError)
│   ├── StructureMismatchError (ValueError)    every difference between target and step at once
│   └── NoRestorableStepError (RuntimeError)   steps are committed, none of them is sound
├── ownership
│   ├── RootInUseError (RuntimeError)          another manager writes to this root
│   └── AttemptLostError (RuntimeError)        this save was abandoned by others before it was published
├── others
│   ├── MissingPackageError (ModuleNotFoundError)  an optional package is not installed; names the extra
│   └── ReaderFailedError (RuntimeError)       another library, asked what it reads, gave no answer
└── processes
    ├── RendezvousTimeoutError (TimeoutError)  names the processes that did not come
    ├── DisagreementError (ValueError)         names who brought what
    ├── PeerFailedError (RuntimeError)         another process failed; names it and its cause
    └── AsyncSaveError (RuntimeError)          a save behind the training loop failed earlier
"""

from __future__ import annotations

from safepoint.formats.errors import (
    CheckpointError,
    CorruptDataError,
    IncompleteCoverageError,
    InvalidArgumentError,
    Outcome,
    StorageError,
    UnsupportedValueError,
    UnsupportedVersionError,
    error_from_json,
)

__all__ = [
    "AsyncSaveError",
    "AttemptLostError",
    "CheckpointError",
    "CorruptDataError",
    "DisagreementError",
    "IncompleteCoverageError",
    "InvalidArgumentError",
    "MissingPackageError",
    "NoRestorableStepError",
    "Outcome",
    "PeerFailedError",
    "ReaderFailedError",
    "RendezvousTimeoutError",
    "RootInUseError",
    "StepExistsError",
    "StepNotFoundError",
    "StorageError",
    "StructureMismatchError",
    "UnsupportedValueError",
    "UnsupportedVersionError",
    "error_from_json",
]


class StepNotFoundError(CheckpointError, FileNotFoundError):
    """The step asked for is not committed here.

    Attributes:
        available: the committed steps, ascending.
    """

    extra_fields = ("available",)
    available: tuple[int, ...] | None

    def __str__(self) -> str:
        return CheckpointError.__str__(self)


class StepExistsError(CheckpointError, FileExistsError):
    """The step to be saved is committed already, and `on_exists` does not say what to do about it."""

    def __str__(self) -> str:
        return CheckpointError.__str__(self)


class StructureMismatchError(CheckpointError, ValueError):
    """The target and the step differ; nothing was changed.

    Attributes:
        mismatches: one text per difference, each beginning with the dotted path.
    """

    extra_fields = ("mismatches",)
    mismatches: tuple[str, ...] | None


class NoRestorableStepError(CheckpointError, RuntimeError):
    """Steps are committed here, but none of them is sound for every process.

    Attributes:
        problems: one text per step, newest first.
    """

    extra_fields = ("problems",)
    problems: tuple[str, ...] | None


class RootInUseError(CheckpointError, RuntimeError):
    """Another live manager owns this root."""


class AttemptLostError(CheckpointError, RuntimeError):
    """The attempt was abandoned, or the root taken over, before it could be published."""


class MissingPackageError(CheckpointError, ModuleNotFoundError):
    """A package that only an extra of safepoint asks for is not installed; the hint says how to."""

    __init__ = CheckpointError.__init__
    __str__ = CheckpointError.__str__


class ReaderFailedError(CheckpointError, RuntimeError):
    """The process of another library's reader ended early or took too long: nothing is known of the step."""


class RendezvousTimeoutError(CheckpointError, TimeoutError):
    """A meeting ended at its deadline.

    Attributes:
        absent: indices of the processes that did not come, or did not answer.
        deadline_secs: how long was waited, in seconds.
    """

    extra_fields = ("absent", "deadline_secs")
    absent: tuple[int, ...] | None
    deadline_secs: float | None

    def __str__(self) -> str:
        return CheckpointError.__str__(self)


class DisagreementError(CheckpointError, ValueError):
    """Processes came to one meeting with different things.

    Attributes:
        brought: pairs (what, indices of the processes that brought it).
    """

    extra_fields = ("brought",)
    brought: tuple[tuple[str, tuple[int, ...]], ...] | None


class PeerFailedError(CheckpointError, RuntimeError):
    """Another process failed (`process_index`), so nobody continues; the message carries its cause."""


class AsyncSaveError(CheckpointError, RuntimeError):
    """An earlier `save(blocking=False)` failed; `__cause__` is its error and `step` its step."""
