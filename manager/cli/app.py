"""The commands of `safepoint` and their arguments. What they do is in modules of their own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from safepoint.manager.errors import CheckpointError

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def describe() -> None:
    """Look at checkpoints, and see them work."""


@app.command("ls")
def list_command(
    root: Annotated[Path, typer.Argument(help="A directory with checkpoints.", show_default=False)],
) -> None:
    """Show what lies in a directory with checkpoints. Reads only; a running job is not disturbed."""
    from safepoint.manager.cli.listing import list_root, root_table  # noqa: PLC0415  # keeps --help quick

    console = Console()
    if not root.is_dir():
        console.print(f"{root} is not a directory", style="red", markup=False)
        raise typer.Exit(2)
    try:
        rows = list_root(root)
    except CheckpointError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from error
    console.print(root_table(rows, str(root)) if rows else f"{root} holds nothing")


@app.command("demo")
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
) -> None:
    """Train, be killed in the middle of a save, go on, and compare with a run that was left alone.

    One process trains on torch_xla's CPU device, several on torch.distributed with a sharded model.
    """
    from safepoint.manager.cli.demo import Demo  # noqa: PLC0415  # keeps --help quick
    from safepoint.manager.cli.demo_processes import DemoError  # noqa: PLC0415

    console = Console()
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
            shown = demo.run()
        except DemoError as error:
            console.print(str(error), style="red", markup=False)
            raise typer.Exit(1) from error
    raise typer.Exit(0 if shown else 1)


def _check_demo(processes: int, restore_processes: int, steps: int, save_every: int, folder: Path | None) -> None:
    if (processes == 1) != (restore_processes == 1):
        raise typer.BadParameter("one process trains on another device than several: both counts are 1, or neither is")
    if steps < 3 * save_every:
        raise typer.BadParameter(f"{steps} steps leave no room for three saves, one every {save_every}")
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise typer.BadParameter(f"{folder} is not an empty directory")
