"""Wrong arguments where a program asked for JSON: typer finds them before any command runs, and draws a box of them."""

from __future__ import annotations

import sys
from typing import Any, cast

import typer
from typer.core import TyperGroup
from typing_extensions import override

from safepoint.manager.cli.output import PROBLEM, USAGE, print_error
from safepoint.manager.errors import InvalidArgumentError

__all__ = ["Commands"]

_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])  # has no public name


class Commands(TyperGroup):
    """All commands. With `--json` wrong arguments are a document as every other error is."""

    @override
    def main(self, *given: Any, **options: Any) -> Any:
        """Run what the arguments say, and end the process."""
        arguments = given[0] if given else options.get("args")
        words = list(sys.argv[1:] if arguments is None else arguments)
        wants_json = "--json" in (words[: words.index("--")] if "--" in words else words)
        if not (wants_json and options.get("standalone_mode", True)):
            return super().main(*given, **options)
        try:
            code = super().main(*given, **options | {"standalone_mode": False})
        except _UsageError as error:
            message = getattr(error, "format_message", error.__str__)()
            hint = "`safepoint COMMAND --help` explains each argument."
            print_error(InvalidArgumentError(message, hint=hint), as_json=True)
            sys.exit(USAGE)
        except typer.Abort:
            sys.exit(PROBLEM)
        sys.exit(code or 0)
