"""The commands that write: copy, consolidate, rm, gc, pin, unpin. All but the pins own the root that they change."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from safepoint.formats.storage import open_storage
from safepoint.manager import pins
from safepoint.manager.cli.arguments import (
    AsJson,
    KeepBestOption,
    KeepEveryOption,
    KeepLastOption,
    Root,
    Step,
    Steps,
    Yes,
    exact_step,
    policy_of,
)
from safepoint.manager.cli.output import (
    PROBLEM,
    error_document,
    new_table,
    print_error,
    print_json,
    print_line,
    print_table,
    reporting,
    safe,
)
from safepoint.manager.cli.progress import shown_progress
from safepoint.manager.consolidating import consolidate_step
from safepoint.manager.copying import copy_steps
from safepoint.manager.errors import InvalidArgumentError
from safepoint.manager.options import full_root
from safepoint.manager.removing import plan_sweep, remove_step, sweep
from safepoint.manager.step_paths import find_step, open_root, open_step, parse_step_path
from safepoint.manager.step_reading import StepReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safepoint.manager.removing import Leftover

__all__ = ["consolidate_command", "copy_command", "gc_command", "pin_command", "rm_command", "unpin_command"]

Destination = Annotated[
    str, typer.Argument(metavar="ROOT", help="Root that is written to; made if need be.", show_default=False)
]


@reporting
def copy_command(source: Steps, destination: Destination, *, as_json: AsJson = False) -> int | None:
    """Copy a step, or all steps of a root, to another root, byte for byte; verified on the way, and read back.

    Each step appears there at once, when all of it is durable. A copy that was interrupted goes on where it
    was: run it again. Steps that are there already are left alone. The exit status is 1 where a step is damaged: it
    is not copied, the others are.

    Examples:
        safepoint copy runs/gpt /backup/gpt

        safepoint copy runs/gpt/1000 gs://backup/gpt
    """
    named = parse_step_path(source)
    storage = open_root(source) if named.step is None else open_storage(named.root)
    with shown_progress(quiet=as_json) as progress:
        result = copy_steps(storage, destination, step=named.step, progress=progress)
    if as_json:
        print_json(
            {
                "source": named.root,
                "destination": full_root(destination),
                "copied": list(result.copied),
                "resumed": list(result.resumed),
                "present": list(result.present),
                "num_bytes": result.num_bytes,
                "problems": [error_document(error) for error in result.errors],
            }
        )
        return PROBLEM if result.errors else None
    for step in result.copied:
        print_line(f"step {step} copied and verified{', begun earlier' if step in result.resumed else ''}")
    for step in result.present:
        print_line(f"step {step} was there")
    if not (result.copied or result.present or result.errors):
        print_line(f"no step is committed in {named.root}")
    for error in result.errors:
        print_error(error, as_json=False)
    return PROBLEM if result.errors else None


@reporting
def consolidate_command(step: Step, destination: Destination, *, as_json: AsJson = False) -> None:
    """Write a step to another root as whole leaves, one safetensors file an item, as other tools read them.

    Streams: no more than one leaf is in memory. The result is a step like any other, of the same number: restore reads
    it. It is read back before it is committed.

    Examples:
        safepoint consolidate runs/gpt/1000 export

        safepoint consolidate runs/gpt export        (the latest step)
    """
    opened = open_step(step)
    with shown_progress(quiet=as_json) as progress:
        record = consolidate_step(opened, destination, progress=progress)
    path = f"{full_root(destination)}/{record.step}"
    files = [file.path for file in open_step(path).manifest.files]
    if as_json:
        document = {"source": opened.storage.location, "destination": full_root(destination)}
        print_json(document | {"step": record.step, "num_bytes": record.num_bytes, "files": files})
        return
    print_line(f"step {record.step} written to {path} and verified: {decimal(record.num_bytes)}")
    for file in files:
        print_line(f"  {file}")


@reporting
def rm_command(step: Step, *, yes: Yes = False, as_json: AsJson = False) -> int | None:
    """Delete one step, named by its number. Asks first; a script says --yes.

    A pinned step stays, and so does every step of a root that a job is writing to.

    Examples:
        safepoint rm runs/gpt/1000
    """
    named, number = exact_step(step)
    storage = open_storage(named.root)
    if not yes:
        _ask(f"Delete step {number} of {named.root}?")
    remaining = remove_step(storage, number)
    if as_json:
        print_json({"root": named.root, "step": number, "removed": True, "remaining": list(remaining)})
    else:
        print_line(f"step {number} deleted")
        _tell_remaining(remaining)
    return PROBLEM if remaining else None


def _ask(question: str) -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidArgumentError("nobody can be asked here", hint="Say --yes to delete without being asked.")
    if not typer.confirm(safe(question)):
        raise KeyboardInterrupt


def _tell_remaining(names: Sequence[str]) -> None:
    for name in names:
        print_line(f"{name} is hidden but could not be deleted now: run `safepoint gc --yes` later", style="yellow")


@reporting
def gc_command(
    root: Root,
    *,
    keep_last: KeepLastOption = None,
    keep_every: KeepEveryOption = None,
    keep_best: KeepBestOption = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int | None:
    """Tell what could be deleted: what saves left unfinished, and, with a policy, the steps that it does not keep.

    Nothing is deleted without --yes. The latest step and pinned ones stay whatever the policy says. A root that a job
    is writing to is refused.

    Examples:
        safepoint gc runs/gpt

        safepoint gc runs/gpt --keep-last 3 --keep-best 1:val_loss:min --yes
    """
    storage = open_root(root)
    policy = policy_of(keep_last, keep_every, keep_best)
    remaining: tuple[str, ...] = ()
    holder = None
    if yes:
        leftovers, remaining = sweep(storage, policy)
    else:
        plan = plan_sweep(storage, policy)
        leftovers, holder = plan.leftovers, plan.holder
    if as_json:
        print_json(
            {
                "root": storage.location,
                "deleted": yes,
                "leftovers": [
                    {"name": one.name, "kind": one.kind, "step": one.step, "num_bytes": one.num_bytes}
                    for one in leftovers
                ],
                "num_bytes": sum(one.num_bytes for one in leftovers),
                "owner": None if holder is None else str(holder),
                "remaining": list(remaining),
            }
        )
    else:
        _print_sweep(leftovers, deleted=yes)
        if holder is not None:
            print_line(f"the root is owned by {holder}: what is unfinished may be under way", style="yellow")
        _tell_remaining(remaining)
    return PROBLEM if remaining else None


def _print_sweep(leftovers: Sequence[Leftover], *, deleted: bool) -> None:
    if not leftovers:
        print_line("nothing to delete")
        return
    words = {
        "unfinished": "a save that did not commit",
        "replaced": "replaced by another save",
        "deleted": "deleted before, and left over",
        "unkept": "no policy keeps it",
    }
    table = new_table("directory", "size", "why", right=("size",))
    for one in leftovers:
        table.add_row(safe(one.name), decimal(one.num_bytes), words[one.kind])
    print_table(table)
    size = decimal(sum(one.num_bytes for one in leftovers))
    print_line(f"deleted {size}" if deleted else f"would free {size}; nothing was deleted: say --yes")


@reporting
def pin_command(
    step: Step, *, note: Annotated[str, typer.Option(help="Why, for people.")] = "", as_json: AsJson = False
) -> None:
    """Keep a step whatever the policies say, also while a job is writing to the root.

    Examples:
        safepoint pin runs/gpt/1000 --note "the one in the paper"
    """
    named, number = exact_step(step)
    storage = open_storage(named.root)
    find_step(StepReader(storage), number)
    changed = pins.pin(storage, number, note=note)
    if as_json:
        print_json({"root": named.root, "step": number, "pinned": True, "changed": changed})
    else:
        print_line(f"step {number} {'pinned' if changed else 'was pinned already'}")


@reporting
def unpin_command(step: Step, *, as_json: AsJson = False) -> None:
    """Take a pin off: the policies decide again.

    Examples:
        safepoint unpin runs/gpt/1000
    """
    named, number = exact_step(step)
    changed = pins.unpin(open_storage(named.root), number)
    if as_json:
        print_json({"root": named.root, "step": number, "pinned": False, "changed": changed})
    else:
        print_line(f"step {number} {'is not pinned any more' if changed else 'was not pinned'}")
