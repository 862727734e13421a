"""The `safepoint` command: what a person types. It uses the public API and owns no rule of its own."""

from __future__ import annotations

from safepoint.manager.cli.app import app

__all__ = ["main"]


def main() -> None:
    """Run the `safepoint` command."""
    app()
