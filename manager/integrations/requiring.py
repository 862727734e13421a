"""The error of an integration whose package is not installed."""

from __future__ import annotations

from safepoint.manager.errors import CheckpointError

__all__ = ["MissingPackageError"]


class MissingPackageError(CheckpointError, ModuleNotFoundError):
    """A package that an integration is for is not installed."""

    def __init__(self, message: str, **context: object) -> None:
        CheckpointError.__init__(self, message, **context)  # type: ignore[arg-type]  # its own keyword arguments

    @classmethod
    def of(cls, error: ModuleNotFoundError, *, extra: str) -> MissingPackageError:
        """Return the error of a failed import.

        Args:
            error: what Python raised.
            extra: of safepoint, that installs the package.
        """
        return cls(
            f"safepoint's integration needs the package {error.name!r}, which is not installed",
            hint=f"pip install 'safepoint[{extra}]'",
        )

    def __str__(self) -> str:
        return CheckpointError.__str__(self)
