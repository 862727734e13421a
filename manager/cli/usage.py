"""Wrong arguments where a program asked for JSON: typer finds them before any command runs, and draws a box of them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from safepoint.manager.cli.output import USAGE, print_error
from safepoint.manager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Commands"]

_UsageError = typer.BadParameter.__mro__[1]  # has no public name


class Commands(TyperGroup):
    """All commands. With `--json` wrong arguments are a document as every other error is."""

    @override
    def main(self, args: Sequence[str] | None = None, *more: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run what the arguments say, and end the process."""
        given = list(sys.argv[1:] if args is None else args)
        options = given[: given.index("--")] if "--" in given else given
        if not standalone_mode or "--json" not in options:
            return super().main(args, *more, standalone_mode=standalone_mode, **extra)
        try:
            code = super().main(args, *more, standalone_mode=False, **extra)
        except _UsageError as error:
            message = getattr(error, "format_message", error.__str__)()
            hint = "`safepoint COMMAND --help` explains each argument."
            print_error(InvalidArgumentError(message, hint=hint), as_json=True)
            sys.exit(USAGE)
        except typer.Abort:
            sys.exit(1)
        sys.exit(code or 0)
