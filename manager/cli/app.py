"""The commands of `safepoint` and their arguments. What they do is in modules of their own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from safepoint.manager.cli import changing, checking, converting, looking, report
from safepoint.manager.cli.arguments import AsJson  # noqa: TC001 - typer looks the types of arguments up
from safepoint.manager.cli.output import PROBLEM, print_failure, print_json, reporting
from safepoint.manager.cli.usage import Commands

__all__ = ["app"]

app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)

_LOOKING, _CHANGING, _TRYING = "Look", "Change", "Try"


@app.callback(
    epilog="A root is the directory of a run, as runs/gpt; a step is runs/gpt/1000. "
    "Exit status: 0 all is well; 1 a problem or a difference was found; 2 the command makes no sense here; "
    "3 refused, because somebody else owns the root or the step is there; 4 the storage failed."
)
def describe() -> None:
    """Look at checkpoints, check, compare, copy and delete them, and see them work."""


app.command("ls", rich_help_panel=_LOOKING)(looking.ls_command)
app.command("show", rich_help_panel=_LOOKING)(looking.show_command)
app.command("cat", rich_help_panel=_LOOKING)(looking.cat_command)
app.command("verify", rich_help_panel=_LOOKING)(looking.verify_command)
app.command("diff", rich_help_panel=_LOOKING)(looking.diff_command)
app.command("report", rich_help_panel=_LOOKING)(report.report_command)
app.command("copy", rich_help_panel=_CHANGING)(changing.copy_command)
app.command("consolidate", rich_help_panel=_CHANGING)(changing.consolidate_command)
app.command("convert", rich_help_panel=_CHANGING)(converting.convert_command)
app.command("rm", rich_help_panel=_CHANGING)(changing.rm_command)
app.command("gc", rich_help_panel=_CHANGING)(changing.gc_command)
app.command("pin", rich_help_panel=_CHANGING)(changing.pin_command)
app.command("unpin", rich_help_panel=_CHANGING)(changing.unpin_command)
app.command("doctor", rich_help_panel=_TRYING)(checking.doctor_command)


@app.command("demo", rich_help_panel=_TRYING)
@reporting
def demo_command(
    *,
    processes: Annotated[int, typer.Option(min=1, max=4, help="Train on so many, sharded by FSDP2.")] = 1,
    restore_processes: Annotated[
        int | None, typer.Option(min=1, max=4, help="Go on with so many after the kill; by default as many as before.")
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="How long to train.")] = 40,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between two saves.")] = 8,
    folder: Annotated[
        Path | None, typer.Option(help="Keep what it writes here; must be new or empty.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> int | None:
    """Train, be killed in the middle of a save, go on, and compare with a run that was left alone.

    One process trains on torch_xla's CPU device, several on torch.distributed with a sharded model. The exit
    status is 1 where a claim does not hold.

    Examples:
        safepoint demo

        safepoint demo --processes 4 --restore-processes 2

        safepoint demo --json | jq '.claims[].text'
    """
    from safepoint.manager.cli.demo import Demo  # noqa: PLC0415  # keeps --help quick
    from safepoint.manager.cli.demo_processes import DemoError  # noqa: PLC0415

    console = Console(quiet=as_json)
    restore_count = processes if restore_processes is None else restore_processes
    _check_demo(processes, restore_count, steps, save_every, folder)
    with tempfile.TemporaryDirectory(prefix="safepoint-demo-") as temporary:
        place = Path(temporary) if folder is None else folder.absolute()
        place.mkdir(parents=True, exist_ok=True)
        demo = Demo(
            folder=place,
            process_count=processes,
            restore_process_count=restore_count,
            steps=steps,
            save_every=save_every,
            console=console,
        )
        try:
            claims = demo.run()
        except DemoError as error:
            print_failure("DemoError", str(error), as_json=as_json)
            raise typer.Exit(PROBLEM) from error
    if as_json:
        print_json({"claims": [{"text": claim.text, "holds": claim.holds} for claim in claims]})
    return None if all(claim.holds for claim in claims) else PROBLEM


def _check_demo(processes: int, restore_processes: int, steps: int, save_every: int, folder: Path | None) -> None:
    if (processes == 1) != (restore_processes == 1):
        raise typer.BadParameter("one process trains on another device than several: both counts are 1, or neither is")
    if steps < 3 * save_every:
        raise typer.BadParameter(f"{steps} steps leave no room for three saves, one every {save_every}")
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise typer.BadParameter(f"{folder} is not an empty directory")
