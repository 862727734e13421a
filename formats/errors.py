"""Every error that safepoint raises derives from `CheckpointError`.

    CheckpointError
    ├── the data is not what it should be: restore another step
    │   ├── CorruptDataError (ValueError)          bytes differ from their digest, or are cut short
    │   ├── UnsupportedVersionError (ValueError)   written by a newer safepoint
    │   └── IncompleteCoverageError (ValueError)   some elements of a leaf are held, or stored, nowhere
    ├── the request cannot be met: change the call
    │   ├── InvalidArgumentError (ValueError)      a step, path, mode or option that makes no sense
    │   └── UnsupportedValueError (TypeError)      a value that cannot be kept exactly
    └── StorageError (OSError)                     the file system refused

`safepoint.manager` adds those of processes and of steps (`safepoint.manager.errors`). This module knows
nothing about them; they register themselves by deriving from the base, so that an error raised on one
process can be raised again, typed, on all others (`CheckpointError.to_json`, `error_from_json`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

__all__ = [
    "CheckpointError",
    "CorruptDataError",
    "IncompleteCoverageError",
    "InvalidArgumentError",
    "Outcome",
    "StorageError",
    "UnsupportedValueError",
    "UnsupportedVersionError",
    "error_from_json",
]

Outcome = Literal["not_committed", "committed", "unknown"]
"""What a failed save left behind: nothing, the whole step, or one that only a listing can tell."""


class CheckpointError(Exception):
    """Base of all errors of safepoint.

    Attributes:
        message: what happened, without the context below.
        step: the step concerned, if one is.
        leaf: dotted path of the leaf concerned.
        path: file or directory concerned.
        process_index: the process on which it happened.
        outcome: for errors of a save, what became of the step.
        hint: what to do next.
    """

    registry: ClassVar[dict[str, type[CheckpointError]]] = {}
    extra_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that a subclass adds; their values are JSON values or tuples of them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        CheckpointError.registry[cls.__name__] = cls

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        leaf: str | None = None,
        path: str | None = None,
        process_index: int | None = None,
        outcome: Outcome | None = None,
        hint: str | None = None,
        **extra: Any,
    ) -> None:
        unknown = set(extra) - set(self.extra_fields)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no attribute {sorted(unknown)}")
        super().__init__(message)
        self.message = message
        self.step = step
        self.leaf = leaf
        self.path = path
        self.process_index = process_index
        self.outcome: Outcome | None = outcome
        self.hint = hint
        for name in self.extra_fields:
            setattr(self, name, extra.get(name))
        self.add_note(f"See {self.section}")  # shown by tracebacks, and no part of the message

    @property
    def section(self) -> str:
        """Where the documentation tells why this happens, and what to do."""
        return f"docs/troubleshooting.md#{type(self).__name__.lower()}"

    def __str__(self) -> str:
        context = [
            f"{label} {value}"
            for label, value in (
                ("step", self.step),
                ("leaf", self.leaf),
                ("file", self.path),
                ("process", self.process_index),
                ("outcome", self.outcome),
            )
            if value is not None
        ]
        text = self.message if not context else f"{self.message} [{', '.join(context)}]"
        return text if self.hint is None else f"{text}\n  {self.hint}"

    def fields(self) -> dict[str, Any]:
        """Return the keyword arguments that make an equal error."""
        names = ("step", "leaf", "path", "process_index", "outcome", "hint", *self.extra_fields)
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def with_context(self, **context: Any) -> Self:
        """Fill in attributes that are still None (step, path, …) and return self."""
        for name, value in context.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields())

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value from which `error_from_json` makes an equal error."""
        return {"type": type(self).__name__, "message": self.message, "fields": self.fields()}


CheckpointError.registry["CheckpointError"] = CheckpointError


def _rebuild(cls: type[CheckpointError], message: str, fields: dict[str, Any]) -> CheckpointError:
    return cls(message, **fields)


def error_from_json(value: dict[str, Any]) -> CheckpointError:
    """Return the error that `CheckpointError.to_json` described; an unknown type gives the base class."""
    cls = CheckpointError.registry.get(value["type"], CheckpointError)
    fields = {name: _tuples(item) for name, item in value["fields"].items()}
    if cls is CheckpointError and value["type"] != "CheckpointError":
        known = ("step", "leaf", "path", "process_index", "outcome", "hint")
        fields = {name: item for name, item in fields.items() if name in known}
    return cls(value["message"], **fields)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


class CorruptDataError(CheckpointError, ValueError):
    """Stored bytes are not those that were committed.

    Attributes:
        target_modified: whether the restore target had been written to when this was found.
    """

    extra_fields = ("target_modified",)
    target_modified: bool | None


class UnsupportedVersionError(CheckpointError, ValueError):
    """The step was written in a version of the layout that this release cannot read."""


class IncompleteCoverageError(CheckpointError, ValueError):
    """Regions do not tile a leaf's global shape: some elements have no holder, or no stored copy."""


class InvalidArgumentError(CheckpointError, ValueError):
    """An argument is out of its domain."""


class UnsupportedValueError(CheckpointError, TypeError):
    """A value cannot be kept exactly; refused before anything is written."""


class StorageError(CheckpointError, OSError):
    """The storage refused or failed an operation.

    Attributes:
        errno: the operating system's number, if there is one.
    """

    extra_fields = ("errno",)
    errno: int | None

    def __str__(self) -> str:
        return CheckpointError.__str__(self)
