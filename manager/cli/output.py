"""How the commands speak: tables and lines for people, one JSON document for programs, errors on the other stream.

Owns the exit codes. Text that comes from a root (names, metrics, notes) is printed so that it cannot steer a terminal.
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import logging
import math
import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from safepoint.manager.errors import (
    AttemptLostError,
    CheckpointError,
    CorruptDataError,
    IncompleteCoverageError,
    InvalidArgumentError,
    NoRestorableStepError,
    RootInUseError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
    UnsupportedValueError,
    UnsupportedVersionError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "FAILED",
    "PROBLEM",
    "REFUSED",
    "USAGE",
    "counted",
    "error_document",
    "exit_code",
    "new_table",
    "print_error",
    "print_failure",
    "print_json",
    "print_line",
    "print_table",
    "reporting",
    "safe",
]

PROBLEM, USAGE, REFUSED, FAILED, INTERRUPTED = 1, 2, 3, 4, 130
BROKEN_PIPE = 128 + signal.SIGPIPE  # as of a program that the signal ends

_WIDTH = 200
"""Columns where there is no terminal: whoever reads the output, it should not be folded."""

_CODES: tuple[tuple[int, tuple[type[CheckpointError], ...]], ...] = (
    (PROBLEM, (CorruptDataError, IncompleteCoverageError, UnsupportedVersionError, NoRestorableStepError)),
    (USAGE, (InvalidArgumentError, StepNotFoundError, UnsupportedValueError)),
    (REFUSED, (RootInUseError, StepExistsError, AttemptLostError)),
)

_NO_LOG = logging.NullHandler()
"""Keeps log lines off the standard error on which a program expects one document or nothing."""

P = ParamSpec("P")


def exit_code(error: CheckpointError) -> int:
    """Return the exit status that stands for an error."""
    return next((code for code, types in _CODES if isinstance(error, types)), FAILED)


def reporting(command: Callable[P, int | None]) -> Callable[P, None]:
    """Make a command of a function that returns its exit status: errors become a message, a hint and a status."""
    command.__doc__ = _reflowed(command.__doc__ or "")

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("as_json"))
        if as_json:
            logging.getLogger("safepoint").addHandler(_NO_LOG)
        try:
            code = command(*args, **kwargs)
            with _to_output():
                sys.stdout.flush()
        except _OutputError as error:
            raise typer.Exit(_told(error, as_json=as_json)) from None
        except CheckpointError as error:
            print_error(error, as_json=as_json)
            raise typer.Exit(exit_code(error)) from None
        except KeyboardInterrupt:
            print_failure("Interrupted", "interrupted", as_json=as_json)
            raise typer.Exit(INTERRUPTED) from None
        finally:
            logging.getLogger("safepoint").removeHandler(_NO_LOG)
        if code:
            raise typer.Exit(code)

    return run


class _OutputError(Exception):
    """Standard output takes no more: its reader is gone, or its disk full."""


@contextmanager
def _to_output() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _OutputError(error.errno, error.strerror) from error


def _told(error: _OutputError, *, as_json: bool) -> int:
    """Say that not all was printed, unless whoever reads it wanted no more; return the exit status."""
    number, reason = error.args
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - what is left in the old one goes nowhere
    if number == errno.EPIPE:
        return BROKEN_PIPE
    print_error(StorageError(f"cannot write the output: {reason}", errno=number), as_json=as_json)
    return FAILED


def _reflowed(text: str) -> str:
    """Return a docstring with its paragraphs in one line each, to be folded where the terminal ends; examples stay."""
    prose, _, examples = inspect.cleandoc(text).partition("Examples:\n")
    paragraphs = [part.replace("\n", " ") for part in prose.strip().split("\n\n")]
    if examples:
        # To click, a paragraph that begins with a backspace is one that is not to be folded.
        paragraphs.append("\b\nExamples:\n" + "\n".join(line for line in examples.splitlines() if line.strip()))
    return "\n\n".join(paragraphs)


def counted(number: int, what: str) -> str:
    """Return a number of things: `1 leaf`, `2 leaves`."""
    plural = what.removesuffix("f") + "ves" if what.endswith("f") else what + "s"
    return f"{number:,} {what if number == 1 else plural}"


class _Console(Console):
    """A console that leaves it to `reporting` what a broken pipe means."""

    @override
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _console(stream: Any) -> Console:
    wide = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH
    return _Console(file=stream, width=wide, markup=False, highlight=False, emoji=False)


def safe(text: str) -> str:
    """Return text in which what is not printable is escaped: it may be from anywhere."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def print_line(text: str, *, style: str = "") -> None:
    """Print one line for people."""
    with _to_output():
        _console(sys.stdout).print(Text(safe(text), style=style), soft_wrap=True)


def print_json(value: Any) -> None:
    """Print the one document of a command with `--json`."""
    document = json.dumps(_finite(value), indent=2, allow_nan=False)
    with _to_output():
        sys.stdout.write(document + "\n")


def _finite(value: Any) -> Any:
    """Return the value with texts for what JSON has no number for, as in a commit record."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def new_table(*headings: str, right: Iterable[str] = ()) -> Table:
    """Return a table without lines but the one below its headings."""
    numbers = frozenset(right)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Print a table for people."""
    with _to_output():
        _console(sys.stdout).print(table)


def error_document(error: CheckpointError) -> dict[str, Any]:
    """Return an error as documented: type, message and hint, and what it is about where that is known."""
    fields = error.fields()
    about: dict[str, Any] = {
        name: fields[name] for name in ("step", "leaf", "path", "process_index", "outcome") if name in fields
    }
    return {
        "type": type(error).__name__,
        "message": error.message,
        **about,
        "hint": error.hint,
        "section": error.section,
    }


def print_failure(kind: str, message: str, *, as_json: bool) -> None:
    """Say on stderr why a command ended early that no error of the package ended."""
    if as_json:
        sys.stderr.write(json.dumps({"error": {"type": kind, "message": message, "hint": None}}, indent=2) + "\n")
    else:
        _console(sys.stderr).print(Text(safe(message)), soft_wrap=True)


def print_error(error: CheckpointError, *, as_json: bool) -> None:
    """Say on stderr what went wrong and what to do."""
    if as_json:
        sys.stderr.write(json.dumps({"error": error_document(error)}, indent=2) + "\n")
        return
    console = _console(sys.stderr)
    for number, line in enumerate(str(error).splitlines()):
        console.print(Text(f"error: {safe(line)}", style="red") if number == 0 else Text(safe(line)), soft_wrap=True)
    console.print(Text(f"  See {error.section}", style="dim"), soft_wrap=True)
