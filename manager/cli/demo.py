"""The demonstration: training is killed in the middle of a save, goes on, and ends as if nothing had happened.

Tells the story and judges it; a claim is printed only if it was checked. The training runs in processes of its own.
"""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from safepoint.formats.storage import LocalStorage
from safepoint.manager.cli.demo_plan import Event, Plan
from safepoint.manager.cli.demo_processes import run_training
from safepoint.manager.cli.listing import root_table
from safepoint.manager.root_overview import RootEntry, overview

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from rich.console import Console

    from safepoint.manager.cli.demo_plan import DeviceKind
    from safepoint.manager.cli.demo_processes import Run

__all__ = ["Claim", "Demo"]

CLOSE = 1e-4  # relative; another number of processes adds up in another order


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Something that the demonstration has checked."""

    text: str
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Demo:
    """One demonstration.

    Attributes:
        folder: an empty directory for it. The run that is killed and resumed saves to `run` in it, the one that is
            left alone to `alone`.
        process_count: how many processes train.
        restore_process_count: how many go on after the kill.
        steps: how long to train.
        save_every: steps between two saves.
        console: where it is told.
    """

    folder: Path
    process_count: int
    restore_process_count: int
    steps: int
    save_every: int
    console: Console

    @property
    def root(self) -> Path:
        """The directory with the checkpoints of the killed run."""
        return self.folder / "run"

    @property
    def kill_in_step(self) -> int:
        """The step whose save is cut short: a save near the middle, with at least one before it."""
        return self.save_every * max(2, (self.steps // self.save_every + 1) // 2 + 1)

    def run(self) -> list[Claim]:
        """Run it and return what was found.

        Raises:
            DemoError: a training process ended in a way that was not planned.
        """
        say = self.console.print
        if self.process_count == 1 and self._device == "cpu":
            say("torch_xla is not installed: the demonstration runs on plain torch, on the CPU.")
        reference = self._train("uninterrupted", None, process_count=self.process_count)
        say(f"trained on {reference.description}")
        killed = self._train("killed", "run", process_count=self.process_count, kill_in_step=self.kill_in_step)
        before = overview(LocalStorage(self.root)).entries
        say(root_table(before, f"{self.root} after SIGKILL in the middle of saving step {self.kill_in_step}"))
        resumed = self._train("resumed", "run", process_count=self.restore_process_count)
        after = overview(LocalStorage(self.root)).entries
        say(root_table(after, f"{self.root} at the end"))
        gone = sorted({row.name for row in before} - {row.name for row in after})
        say(f"swept or retired since: {', '.join(gone)}")
        claims = [
            *check_kill(killed, self.kill_in_step, before, after),
            *self.check_resumed(reference, killed, resumed),
        ]
        for claim in claims:
            say(f"[green]✓[/] {claim.text}" if claim.holds else f"[red]✗ NOT SO:[/] {claim.text}")
        return claims

    @property
    def _device(self) -> DeviceKind:
        return "xla" if self.process_count == 1 and importlib.util.find_spec("torch_xla") else "cpu"

    def _train(self, title: str, root: str | None, *, process_count: int, kill_in_step: int | None = None) -> Run:
        plan = Plan(
            root=None if root is None else str(self.folder / root),
            device=self._device,
            process_count=process_count,
            steps=self.steps,
            save_every=self.save_every,
            kill_in_step=kill_in_step,
        )
        with progress_of(title, self.steps, self.console) as on_event:
            return run_training(plan, self.folder / f"{title}.log", on_event)

    def check_resumed(self, reference: Run, killed: Run, resumed: Run) -> list[Claim]:
        """Return what can be said of the run that went on, beside the one left alone."""
        restored = resumed.restored_step
        claims = [
            Claim(
                text=f"the restart went on from step {restored}, the newest that was committed before the kill",
                holds=restored == self.kill_in_step - self.save_every,
            ),
            Claim(
                text=f"model and optimizer were restored bit for bit (digest {resumed.digests.get(restored or 0)})",
                holds=restored is not None and resumed.digests[restored] == killed.digests.get(restored),
            ),
        ]
        complete = (
            [*reference.losses] == [*range(1, self.steps + 1)]
            and [*killed.losses] == [*range(1, self.kill_in_step + 1)]
            and [*resumed.losses] == [*range((restored or 0) + 1, self.steps + 1)]
        )
        same_before = all(reference.losses.get(step) == loss for step, loss in killed.losses.items())
        claims.append(
            Claim(
                text=f"until the kill, all {len(killed.losses)} losses are those of the uninterrupted run, bit for bit",
                holds=complete and same_before,
            )
        )
        pairs = [(reference.losses.get(step, float("nan")), loss) for step, loss in resumed.losses.items()]
        last = f"the last is {pairs[-1][1]!r}"
        if self.process_count == self.restore_process_count:
            text = f"after the restart, all {len(pairs)} losses are those of the uninterrupted run, bit for bit; {last}"
            return [*claims, Claim(text=text, holds=complete and all(one == other for one, other in pairs))]
        error = max(abs(one - other) / abs(one) for one, other in pairs)
        text = (
            f"after the restart on {self.restore_process_count} processes, all {len(pairs)} losses are those of the"
            f" uninterrupted run to {error:.1e}: sums are taken in another order; {last}"
        )
        return [*claims, Claim(text=text, holds=complete and error < CLOSE)]


def check_kill(killed: Run, step: int, before: Sequence[RootEntry], after: Sequence[RootEntry]) -> list[Claim]:
    """Return what can be said of the kill and of what it left."""
    left = [row for row in before if row.name.startswith(f"{step}.tmp-")]
    num_bytes = sum(row.num_bytes for row in left)
    remaining = [row.name for row in after if row.committed is None]
    return [
        Claim(
            text=f"the processes died by SIGKILL while writing step {step}, {num_bytes:,} bytes of which lay there",
            holds=killed.was_killed and len(left) == 1 and num_bytes > 0,
        ),
        Claim(
            text=f"no half-written step was ever listed as committed, and the restart swept {len(left)} of them",
            holds=not any(row.committed for row in left) and not remaining,
        ),
    ]


@contextmanager
def progress_of(title: str, steps: int, console: Console) -> Iterator[Callable[[Event], None]]:
    """Show a progress bar, and give what moves it."""
    columns = (TextColumn(f"{title:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[news]}"), console=console) as progress:
        task = progress.add_task(title, total=steps, news="starting")

        def on_event(event: Event) -> None:
            if event.kind == "started" and event.step is not None:
                progress.update(task, completed=event.step, news=f"restored step {event.step}")
            elif event.kind == "trained":
                progress.update(task, completed=event.step, news=f"loss {event.loss:.4f}")
            elif event.kind == "saved":
                progress.update(task, news=f"saved step {event.step} ({event.text})")

        yield on_event
