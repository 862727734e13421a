"""The whole fault sweep, or a part of it: every scenario, kind of fault, process and call.

    python -m tests.faults.sweep --jobs 8             everything: much waiting, little work, so several at a time
    python -m tests.faults.sweep --every 7 --jobs 8   every seventh point
    python -m tests.faults.sweep --one-each --jobs 6  one call for each scenario, process and kind: what CI runs
    python -m tests.faults.sweep --only save-sharded  scenarios whose name contains this

Prints one line for each point that went wrong, and in the end how many were tried. Exit status 1 if any went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from support.fault_runner import COUNT, Point, Verdict, Workshop
from support.fault_scenarios import SCENARIOS
from support.fault_trigger import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def points(calls: dict[str, list[list[str]]], kinds: Sequence[str], every: int) -> Iterator[Point]:
    """Return every n-th point, in an order in which each kind meets each scenario early."""
    number = 0
    for at in range(1, 1 + max(len(log) for logs in calls.values() for log in logs)):
        for scenario, logs in calls.items():
            for process in range(COUNT):
                for kind in kinds:
                    if at <= len(logs[process]) and can_fire(kind, logs[process][at - 1]):
                        number += 1
                        if number % every == 0:
                            yield Point(scenario=scenario, kind=kind, process=process, at=at)


def one_each(chosen: Sequence[Point]) -> list[Point]:
    """Return one point for each scenario, process and kind, at a call that differs from combination to combination."""
    groups: dict[tuple[str, int, str], list[Point]] = {}
    for point in chosen:
        groups.setdefault((point.scenario, point.process, point.kind), []).append(point)
    return [group[zlib.crc32(repr(name).encode()) % len(group)] for name, group in groups.items()]


def can_fire(kind: str, call: str) -> bool:
    """Say whether a fault of this kind is possible at this call: an errno is the storage's; some calls only count."""
    if kind in ("stall", "stop", "kill"):
        return True
    if call.startswith("storage."):
        return not call.startswith(("storage.writer.abort", "storage.reader.close", "storage.free_bytes"))
    return kind in ("ETIMEDOUT", "lost") and not call.endswith("sync_devices")


def say(text: str) -> None:
    """Print, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def sweep(workshop: Workshop, chosen: Sequence[Point]) -> Iterator[Verdict]:
    """Run points one after another."""
    for point in chosen:
        yield workshop.run(point)


def main(arguments: Sequence[str]) -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--one-each", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--keep", type=Path, help="keep the roots of points that went wrong in this directory")
    options = parser.parse_args(arguments)
    _check(parser, options)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sweep-") as temporary:
        directory = Path(options.keep or temporary)
        directory.mkdir(parents=True, exist_ok=True)
        workshop = Workshop(directory)
        calls = {name: workshop.count_calls(name) for name in SCENARIOS if options.only in name}
        chosen = list(points(calls, options.kinds.split(","), options.every))
        if options.one_each:
            chosen = one_each(chosen)
        say(f"{len(chosen)} points in {len(calls)} scenarios")
        return report(directory, chosen, options.jobs)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    unknown = set(options.kinds.split(",")) - set(KINDS)
    if unknown:
        parser.error(f"--kinds: there is no {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if not any(options.only in name for name in SCENARIOS):
        parser.error(f"--only: no scenario's name contains {options.only!r}")
    if options.every < 1 or options.jobs < 1:
        parser.error("--every and --jobs count from 1")
    if (
        options.keep is not None
        and options.keep.exists()
        and (not options.keep.is_dir() or any(options.keep.iterdir()))
    ):
        parser.error(f"--keep: {options.keep} is not an empty directory, and what lies there would be counted, too")


def report(directory: Path, chosen: Sequence[Point], jobs: int) -> int:
    """Run the points in several processes and print what came of them."""
    started = time.monotonic()
    pids = []
    for job in range(jobs):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _work(directory, job, chosen[job::jobs])
                status = 0
            finally:
                sys.stdout.flush()
                os._exit(status)
        pids.append(pid)
    crashed = sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
    done = [json.loads(line) for job in range(jobs) for line in (directory / f"job{job}.log").read_text().splitlines()]
    failed = [one for one in done if one["problems"]]
    fired = Counter(one["kind"] for one in done if one["fired"])
    ends = Counter(one["end"] for one in done)
    say(f"{sum(fired.values())} faults met in {len(done)} points: {dict(fired)}")
    say(f"after them: {dict(ends)}")
    say(f"{len(failed)} points went wrong, {crashed} jobs crashed, {time.monotonic() - started:.0f} s")
    return int(bool(failed) or bool(crashed) or len(done) != len(chosen))


def _work(directory: Path, job: int, chosen: Sequence[Point]) -> None:
    own = directory / f"job{job}"
    own.mkdir(exist_ok=True)
    for template in directory.glob("template-*"):
        (own / template.name).symlink_to(template)
    with (directory / f"job{job}.log").open("w") as log:
        for verdict in sweep(Workshop(own), chosen):
            end = "the old step" if verdict.found == 2 else "the new step" if verdict.found else "nothing"
            line = {**vars(verdict.point), "fired": verdict.fired, "problems": verdict.problems, "end": end}
            log.write(json.dumps(line) + "\n")
            log.flush()
            if verdict.problems:
                say("\n    ".join([f"{verdict.point} at {verdict.fired!r}:", *verdict.problems]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
