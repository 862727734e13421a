"""The arguments and options that several commands share, and what they mean."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

import typer

from safepoint.formats.manifest import display_path
from safepoint.manager.errors import CheckpointError, InvalidArgumentError
from safepoint.manager.nodes import ARRAYS
from safepoint.manager.policies import KeepBest, KeepEvery, KeepLast, Policy
from safepoint.manager.step_paths import StepPath, open_step, parse_step_path

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AsJson",
    "DeadlineSecs",
    "KeepBestOption",
    "KeepEveryOption",
    "KeepLastOption",
    "Leaf",
    "Root",
    "Step",
    "Steps",
    "Yes",
    "exact_step",
    "policy_of",
]


def _leaf_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the leaves of the step on the command line that begin like this, for the shell."""
    try:
        step = open_step(ctx.params["step"])
    except (CheckpointError, KeyError, TypeError):
        return []
    leaves = (path for path, node in step.manifest.structure.items() if node.kind in (*ARRAYS, "value"))
    names = map(display_path, leaves)
    return [name for name in names if name.startswith(incomplete)]


# For verify and copy, where a root alone is all of its steps.
Steps = Annotated[
    str,
    typer.Argument(
        metavar="STEPS",
        help="A step, as runs/gpt/1000; or a root, as runs/gpt, for all of its steps.",
        show_default=False,
    ),
]
Root = Annotated[
    str,
    typer.Argument(metavar="ROOT", help="Root: directory or URL of a run, as runs/gpt.", show_default=False),
]
Step = Annotated[
    str,
    typer.Argument(
        metavar="STEP",
        help="Step: a root and a number, as runs/gpt/1000; a root alone is its latest.",
        show_default=False,
    ),
]
Leaf = Annotated[
    str,
    typer.Argument(
        metavar="LEAF",
        help="Leaf: its dotted path, as model.weight; or its keys as a JSON list.",
        autocompletion=_leaf_names,
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
DeadlineSecs = Annotated[
    float, typer.Option("--deadline", metavar="SECS", min=0.001, help="For each answer of another library.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it, without asking.")]
KeepLastOption = Annotated[
    int | None, typer.Option("--keep-last", metavar="N", min=1, help="A policy: the N steps committed last.")
]
KeepEveryOption = Annotated[
    int | None, typer.Option("--keep-every", metavar="N", min=1, help="A policy: the multiples of N.")
]
KeepBestOption = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-best", metavar="N:METRIC:ORDER", help="A policy: the N best by a metric; ORDER is min or max."
    ),
]


def policy_of(last: int | None, every: int | None, best: Sequence[str] | None) -> Policy | None:
    """Return the policy that the options make together; None where none is given.

    Raises:
        InvalidArgumentError: a --keep-best is malformed.
    """
    policies: list[Policy] = []
    if last is not None:
        policies.append(KeepLast(last))
    if every is not None:
        policies.append(KeepEvery(every))
    policies += map(_best, best or ())
    return reduce(or_, policies) if policies else None


def _best(text: str) -> KeepBest:
    count, _, rest = text.partition(":")
    metric, _, order = rest.rpartition(":")
    if not count.isdecimal() or not metric or order not in ("min", "max"):
        raise InvalidArgumentError(f"--keep-best {text!r} is not N:METRIC:ORDER", hint="Such as 2:val_loss:min.")
    return KeepBest(int(count), metric=metric, order="min" if order == "min" else "max")


def exact_step(path: str) -> tuple[StepPath, int]:
    """Return what a path names, which has to be a step by its number: what changes something guesses nothing.

    Raises:
        InvalidArgumentError: it names a root.
    """
    named = parse_step_path(path)
    if named.step is None:
        raise InvalidArgumentError(
            "this names a root, and a step is wanted", path=named.root, hint="Add the number, as in runs/gpt/1000."
        )
    return named, named.step
