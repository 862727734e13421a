"""The command `convert`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.filesize import decimal

from safepoint.formats.foreign.huggingface import MAX_FILE_BYTES
from safepoint.manager.cli.arguments import AsJson  # noqa: TC001 - typer reads it
from safepoint.manager.cli.output import PROBLEM, error_document, print_error, print_json, print_line, reporting
from safepoint.manager.cli.progress import shown_progress
from safepoint.manager.converting import convert, target_formats
from safepoint.manager.errors import InvalidArgumentError
from safepoint.manager.options import full_root

if TYPE_CHECKING:
    from safepoint.manager.converting import ConvertedStep, ConvertResult

__all__ = ["convert_command"]

Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A step or root of safepoint, or a checkpoint of Orbax, torch.distributed.checkpoint, torch.save, "
        "Lightning, torch_xla, safetensors or Hugging Face.",
        show_default=False,
    ),
]
Destination = Annotated[
    str,
    typer.Argument(
        metavar="DST",
        help="Root that gets the step, made if need be; for dcp and huggingface, a new directory.",
        show_default=False,
    ),
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        "-f",
        metavar="FORMAT",
        help="dcp, huggingface, orbax, safetensors, torch, or one that is installed.",
    ),
]
ModeOption = Annotated[
    Literal["auto", "consolidated", "sharded"],
    typer.Option("--mode", help="Of a step's files: whole leaves, or as one process's shards."),
]
StepOption = Annotated[
    int | None, typer.Option("--step", metavar="N", min=0, help="Which step of a root; by default the latest.")
]
AllOption = Annotated[bool, typer.Option("--all", help="All steps of a root, each under its number.")]
ToStepOption = Annotated[
    int | None, typer.Option("--to-step", metavar="N", min=0, help="Another number for the step that is made.")
]
ItemOption = Annotated[
    str | None,
    typer.Option("--item", metavar="NAME", help="For huggingface: the item; by default model, or all where none is."),
]
SizeOption = Annotated[
    int,
    typer.Option("--max-file-bytes", metavar="BYTES", min=1, help="For dcp and huggingface: of tensors in one file."),
]


@reporting
def convert_command(  # noqa: PLR0913 - its options
    source: Source,
    destination: Destination,
    *,
    file_format: FormatOption = "safetensors",
    mode: ModeOption = "auto",
    step: StepOption = None,
    all_steps: AllOption = False,
    to_step: ToStepOption = None,
    item: ItemOption = None,
    max_file_bytes: SizeOption = MAX_FILE_BYTES,
    as_json: AsJson = False,
) -> int | None:
    """Write a checkpoint of any kind in another format: a step of a root, or a directory that other libraries load.

    Streams: no more than one leaf is in memory. What appears is whole, and was read back and compared. A conversion
    that was interrupted goes on with the next file: run it again. The exit status is 1 where a step is damaged; with
    --all the others are converted.

    Examples:
        safepoint convert runs/gpt/1000 exported --format huggingface

        safepoint convert /old/orbax/run runs/gpt --all

        safepoint convert lightning.ckpt runs/gpt --to-step 1000

        safepoint convert runs/gpt for-jax --format orbax --all
    """
    if all_steps and step is not None:
        raise InvalidArgumentError("--all and --step exclude each other")
    if file_format not in target_formats():
        raise InvalidArgumentError(
            f"there is no format {file_format!r}", hint=f"Formats: {', '.join(target_formats())}."
        )
    with shown_progress(quiet=as_json) as progress:
        result = convert(
            source,
            destination,
            format=file_format,
            mode=mode,
            step="all" if all_steps else step,
            to_step=to_step,
            item=item,
            max_file_bytes=max_file_bytes,
            progress=progress,
        )
    if as_json:
        print_json(_document(source, file_format, result))
    else:
        for made in result.steps:
            _print_step(made, files=not all_steps)
        for error in result.errors:
            print_error(error, as_json=False)
    return PROBLEM if result.errors else None


def _document(source: str, file_format: str, result: ConvertResult) -> dict[str, object]:
    return {
        "source": full_root(source),
        "format": file_format,
        "steps": [
            {
                "step": made.step,
                "path": made.path,
                "outcome": made.outcome,
                "num_bytes": made.num_bytes,
                "files": list(made.files),
            }
            for made in result.steps
        ],
        "problems": [error_document(error) for error in result.errors],
    }


_MAX_FILES = 8


def _print_step(made: ConvertedStep, *, files: bool) -> None:
    if made.outcome == "present":
        print_line(f"{made.path} was there")
        return
    resumed = ", begun earlier" if made.outcome == "resumed" else ""
    print_line(f"{made.path} written and verified: {decimal(made.num_bytes)}{resumed}")
    if not files:
        return
    for file in made.files[:_MAX_FILES]:
        print_line(f"  {file}")
    if len(made.files) > _MAX_FILES:
        print_line(f"  and {len(made.files) - _MAX_FILES} more files")
