"""The commands that look: ls, show, cat, verify, diff. None of them changes anything or needs to own the root."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer looks the types of arguments up
from typing import Annotated, Any

import numpy as np
import typer
from rich.filesize import decimal

from safepoint.formats.storage import open_storage
from safepoint.manager.cli.arguments import (
    AsJson,
    DeadlineSecs,
    KeepBestOption,
    KeepEveryOption,
    KeepLastOption,
    Leaf,
    Root,
    Step,
    Steps,
    policy_of,
)
from safepoint.manager.cli.describing import file_table, leaf_table, step_document, step_lines, value_table
from safepoint.manager.cli.differing import comparison_document, comparison_tables, summary
from safepoint.manager.cli.listing import listing_document, other_table, step_table
from safepoint.manager.cli.output import (
    PROBLEM,
    error_document,
    print_error,
    print_json,
    print_line,
    print_table,
    reporting,
)
from safepoint.manager.cli.progress import shown_progress
from safepoint.manager.comparing import compare_steps
from safepoint.manager.errors import CheckpointError, CorruptDataError, InvalidArgumentError, StorageError
from safepoint.manager.leaf_values import as_numbers, read_leaf
from safepoint.manager.root_overview import overview
from safepoint.manager.second_opinion import StepVerifier, verify_with
from safepoint.manager.step_paths import OpenStep, open_root, open_step, parse_step_path
from safepoint.manager.step_reading import StepReader

__all__ = ["cat_command", "diff_command", "ls_command", "show_command", "verify_command"]

_MAX_JSON_ELEMENTS = 100_000
_MAX_PRINTED_ELEMENTS = 1000


@reporting
def ls_command(
    root: Root,
    *,
    keep_last: KeepLastOption = None,
    keep_every: KeepEveryOption = None,
    keep_best: KeepBestOption = None,
    as_json: AsJson = False,
) -> None:
    """List the steps of a root, in the order of their commits, and whatever else lies there.

    The last column says why a step stays: it is the latest, somebody pinned it, or a policy keeps it: the one that you
    give here, else the one under which the latest step was saved. A step of a branch that was left by going back is
    marked.

    Examples:
        safepoint ls runs/gpt

        safepoint ls runs/gpt --keep-last 3 --keep-every 1000

        safepoint ls runs/gpt --json | jq '.steps[].step'
    """
    policy = policy_of(keep_last, keep_every, keep_best)
    shown = overview(open_root(root), policy)
    if as_json:
        print_json(listing_document(shown))
        return
    if shown.steps:
        print_table(step_table(shown, with_policy=policy is not None))
        if shown.shares_files:
            print_line(f"{decimal(sum(entry.own_bytes for entry in shown.steps))} on disk: steps share files")
    else:
        print_line(f"no step is committed in {shown.root}")
    others = other_table(shown)
    if others is not None:
        print_line("")
        print_table(others)
    if shown.pinned_absent:
        print_line(f"pinned, and not there: {', '.join(map(str, shown.pinned_absent))}")


@reporting
def show_command(
    step: Step,
    *,
    keys: Annotated[str, typer.Option(help="Only leaves and values whose path matches, as model.*.")] = "*",
    regions: Annotated[bool, typer.Option(help="List each stored region, too.")] = False,
    as_json: AsJson = False,
) -> int | None:
    """Show what is in a step: leaves, shapes, dtypes, plain values, files. Reads its records, and none of its data.

    Examples:
        safepoint show runs/gpt/1000

        safepoint show runs/gpt --keys 'model.*' --regions
    """
    opened = open_step(step)
    problem = _missing(opened)
    if as_json:
        print_json(step_document(opened, keys, problem))
        return None if problem is None else PROBLEM
    for line in step_lines(opened):
        print_line(line)
    for table in (leaf_table(opened, keys, regions=regions), value_table(opened, keys), file_table(opened)):
        if table is not None and table.row_count:
            print_line("")
            print_table(table)
    if problem is not None:
        print_error(problem, as_json=False)
        return PROBLEM
    return None


def _missing(step: OpenStep) -> CheckpointError | None:
    try:
        StepReader(step.storage).check_files(step.committed, step.manifest)
    except CorruptDataError as error:
        return error
    return None


@reporting
def cat_command(
    step: Step,
    leaf: Leaf,
    *,
    picked: Annotated[str, typer.Option("--slice", metavar="SLICE", help="A part, as 0:2,:,-1.")] = "",
    npy: Annotated[Path | None, typer.Option(help="Write it to this file, new, as numpy's .npy.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the numbers of a leaf, or of a slice of it; only what the slice touches is read, and verified.

    Types that numpy lacks are shown, and written, in the next wider one: bfloat16 and float8 as float32.

    Examples:
        safepoint cat runs/gpt/1000 model.weight --slice 0:2,:8

        safepoint cat runs/gpt optimizer.state.0.exp_avg --npy exp_avg.npy
    """
    opened = open_step(step)
    value = read_leaf(opened, leaf, picked=picked)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        _cat_value(opened, leaf, value, npy, as_json=as_json)
        return
    dtype = str(value.dtype).removeprefix("torch.")
    array = as_numbers(value)
    about = {"root": opened.storage.location, "step": opened.step, "leaf": leaf, "dtype": dtype}
    about["shape"] = list(value.shape)
    if npy is not None:
        _write_npy(npy, array)
        if as_json:
            print_json(about | {"npy": str(npy)})
        else:
            print_line(f"wrote {dtype} {list(value.shape)} as {array.dtype} to {npy}")
    elif as_json:
        if array.size > _MAX_JSON_ELEMENTS:
            raise InvalidArgumentError(
                f"{array.size:,} elements are too many for JSON", hint="Give a --slice, or write them with --npy."
            )
        print_json(about | {"values": _json_values(array)})
    else:
        print_line(f"{dtype} {list(value.shape)}")
        with np.printoptions(threshold=_MAX_PRINTED_ELEMENTS, linewidth=100):
            for line in str(array).splitlines():
                print_line(line)


def _cat_value(step: OpenStep, leaf: str, value: Any, npy: Path | None, *, as_json: bool) -> None:
    if npy is not None:
        raise InvalidArgumentError(f"{leaf} is a plain value, not an array", step=step.step, hint="Leave --npy away.")
    if as_json:
        plain = value if isinstance(value, str | int | float | bool | None) else repr(value)
        print_json({"root": step.storage.location, "step": step.step, "leaf": leaf, "value": plain})
    else:
        print_line(repr(value))


def _json_values(array: Any) -> Any:
    if array.dtype.kind == "c":
        return [_json_values(array.real), _json_values(array.imag)]
    return array.tolist() if array.dtype.kind in "biufUS" else array.astype(str).tolist()


def _write_npy(path: Path, array: Any) -> None:
    try:
        with path.open("xb") as file:
            np.save(file, array, allow_pickle=False)
    except OSError as error:
        raise StorageError(
            f"cannot write the file: {error.strerror}", path=str(path), errno=error.errno, hint="Name a new file."
        ) from error


@reporting
def verify_command(
    steps: Steps,
    *,
    reader: Annotated[
        StepVerifier, typer.Option(help="Whose: safepoint's with digests, or that of the real Orbax for its format.")
    ] = "safepoint",
    deadline_secs: DeadlineSecs = 600.0,
    as_json: AsJson = False,
) -> int | None:
    """Read every byte of a step, or of all steps of a root, and compare it with the digests of the commit.

    A job that trains there is not disturbed. The exit status is 1 where anything is wrong. With `--reader orbax`, Orbax
    restores the step in a process of its own, with JAX on the CPU, and each leaf is compared with ours.

    Examples:
        safepoint verify runs/gpt

        safepoint verify runs/gpt/1000 --json

        safepoint verify runs/orbax/1000 --reader orbax
    """
    named = parse_step_path(steps)
    storage = open_root(steps) if named.step is None else open_storage(named.root)
    checked = [known.record for known in StepReader(storage).list_steps() if named.step in (None, known.record.step)]
    with shown_progress(quiet=as_json) as progress:
        errors = verify_with(reader, storage, step=named.step, deadline_secs=deadline_secs, progress=progress)
    wrong = {error.step for error in errors}
    if as_json:
        sound = [{"step": record.step, "sound": record.step not in wrong} for record in checked]
        print_json({"root": named.root, "steps": sound, "problems": [error_document(error) for error in errors]})
        return PROBLEM if errors else None
    for record in checked:
        state = "has problems" if record.step in wrong else f"is sound ({record.num_bytes:,} bytes)"
        print_line(f"step {record.step} {state}")
    if not checked and not errors:
        print_line(f"no step is committed in {named.root}")
    for error in errors:
        print_error(error, as_json=False)
    return PROBLEM if errors else None


@reporting
def diff_command(
    a: Step,
    b: Step,
    *,
    values: Annotated[bool, typer.Option(help="Compare the elements, too.")] = True,
    as_json: AsJson = False,
) -> int | None:
    """Compare two steps: their trees, and every element of the leaves that both have, in bounded memory.

    Elements are equal when their bits are. The steps may differ in mode and in the number of processes, and be of two
    roots. The exit status is 1 where they differ.

    Examples:
        safepoint diff runs/gpt/1000 runs/gpt/2000

        safepoint diff runs/gpt/1000 backup/gpt/1000 --no-values
    """
    left, right = open_step(a), open_step(b)
    with shown_progress(quiet=as_json) as progress:
        found = compare_steps(left, right, values=values, progress=progress)
    code = None if found.is_equal else PROBLEM
    if as_json:
        print_json(comparison_document(left, right, found, values=values))
        return code
    for table in comparison_tables(found):
        print_table(table)
        print_line("")
    print_line(summary(found, values=values))
    return code
