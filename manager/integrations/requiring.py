"""The error of an integration whose package is not installed."""

from __future__ import annotations

from safepoint.manager.errors import MissingPackageError

__all__ = ["missing_package"]


def missing_package(error: ModuleNotFoundError, *, extra: str) -> MissingPackageError:
    """Return the error of a failed import.

    Args:
        error: what Python raised.
        extra: of safepoint, that installs the package.
    """
    missing: MissingPackageError = MissingPackageError(
        f"this integration needs the package {error.name!r}, which is not installed",
        hint=f"pip install 'safepoint[{extra}]'",
    )
    return missing
