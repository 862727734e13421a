"""Runs contenders in turns and compares them pair by pair.

Times on a shared machine say little; what holds is the ratio of two runs that followed each other. So all contenders
of a race run interleaved, round after round, each round beginning with another one, and a comparison is the median of
the rounds' ratios. Knows nothing of checkpoints.
"""

from __future__ import annotations

import gc
import resource
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Contender", "Goal", "Race", "Report", "Sample", "measure_once", "run_race"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the job.

    Attributes:
        name: for tables and comparisons.
        run: the timed part; may return its own seconds where only a part of it counts.
        before: puts everything in place; not timed.
        after: clears up; not timed.
        keeps: what is durable, or verified, when `run` returns.
        num_bytes: that it moves; 0 where speed makes no sense.
    """

    name: str
    run: Callable[[], float | None]
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing
    keeps: str = ""
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One timed run.

    Attributes:
        secs: wall time.
        cpu_secs: user and system time of the process, all threads.
        extra_bytes: how far resident memory rose above what it was before.
    """

    secs: float
    cpu_secs: float
    extra_bytes: int


@dataclass(kw_only=True)
class Race:
    """The samples of all contenders, round by round.

    Attributes:
        title: of its table.
        samples: by contender; the i-th samples of all belong to one round.
        keeps: by contender.
        num_bytes: by contender.
        absent: contenders that did not run, and why.
    """

    title: str
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    keeps: dict[str, str] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def ratios(self, name: str, other: str) -> list[float]:
        """Return, round by round, how many times as fast `name` was as `other`."""
        return [b.secs / a.secs for a, b in zip(self.samples[name], self.samples[other], strict=True)]

    def speedup(self, name: str, other: str) -> float | None:
        """Return the median of `ratios`; None where one of the two did not run."""
        if name not in self.samples or other not in self.samples:
            return None
        return statistics.median(self.ratios(name, other))

    def least_speedup(self, name: str, others: Sequence[str]) -> float | None:
        """Return the speedup over the best of `others`, of those that ran."""
        found = [ratio for other in others if (ratio := self.speedup(name, other)) is not None]
        return min(found, default=None)

    def median_secs(self, name: str) -> float:
        """Return the median time of a contender."""
        return statistics.median(sample.secs for sample in self.samples[name])

    def to_json(self) -> dict[str, Any]:
        """Return everything, as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Race:
        """Return what `to_json` described."""
        samples = {name: [Sample(**sample) for sample in found] for name, found in value["samples"].items()}
        return cls(**{**value, "samples": samples})


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A measured ratio beside the one that it should have.

    Attributes:
        name: what is compared.
        target: the ratio asked for.
        measured: the median; None where the peer is not installed.
        at_most: whether the ratio should be small.
        unit: appended to both numbers.
        usual: what is reached on idle cores, where that is far short of the target and known not to be a regression.
    """

    name: str
    target: float
    measured: float | None
    at_most: bool = False
    unit: str = "×"
    usual: float | None = None

    @property
    def is_reached(self) -> bool | None:
        """Whether the goal is reached; None when nothing was measured."""
        if self.measured is None:
            return None
        return self.measured <= self.target if self.at_most else self.measured >= self.target

    def is_far_off(self, factor: float) -> bool:
        """Say whether a ratio misses what is usual, or its goal, by more than `factor`: no noise, but a regression."""
        if self.measured is None or self.unit != "×":
            return False
        expected = self.target if self.usual is None else self.usual
        return self.measured > expected * factor if self.at_most else self.measured < expected / factor


@dataclass(kw_only=True)
class Report:
    """What a suite found.

    Attributes:
        suite: its name.
        races: the tables.
        goals: in the order of the issue.
        notes: what a reader has to know.
    """

    suite: str
    races: list[Race] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return everything, as JSON."""
        return {
            "suite": self.suite,
            "races": [race.to_json() for race in self.races],
            "goals": [{**asdict(goal), "is_reached": goal.is_reached} for goal in self.goals],
            "notes": self.notes,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Report:
        """Return what `to_json` described."""
        goals = [{name: item for name, item in goal.items() if name != "is_reached"} for goal in value["goals"]]
        return cls(
            suite=value["suite"],
            races=[Race.from_json(race) for race in value["races"]],
            goals=[Goal(**goal) for goal in goals],
            notes=value["notes"],
        )


def run_race(title: str, contenders: Sequence[Contender], *, rounds: int, warm_up: bool = True) -> Race:
    """Run all contenders `rounds` times, interleaved, after one round that does not count."""
    race = Race(
        title=title,
        samples={contender.name: [] for contender in contenders},
        keeps={contender.name: contender.keeps for contender in contenders},
        num_bytes={contender.name: contender.num_bytes for contender in contenders},
    )
    for number in range(-1 if warm_up else 0, rounds):
        turn = number % len(contenders)
        for contender in [*contenders[turn:], *contenders[:turn]]:
            sample = measure_once(contender)
            if number >= 0:
                race.samples[contender.name].append(sample)
    return race


def measure_once(contender: Contender) -> Sample:
    """Run a contender once."""
    contender.before()
    gc.collect()
    try:
        resident = _reset_peak()
        cpu = _cpu_secs()
        started = time.perf_counter()
        own_secs = contender.run()
        secs = time.perf_counter() - started
        cpu_secs = _cpu_secs() - cpu
        extra = _peak_bytes() - resident
    finally:
        contender.after()
    return Sample(secs=secs if own_secs is None else own_secs, cpu_secs=cpu_secs, extra_bytes=max(0, extra))


def _cpu_secs() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _reset_peak() -> int:
    """Let the kernel forget the peak of resident memory; return what is resident now."""
    try:
        _CLEAR.write_text("5")
    except OSError:  # not Linux, or not allowed: the peak is then that of the whole run
        return _peak_bytes()
    return _status_bytes("VmRSS:")


def _peak_bytes() -> int:
    return _status_bytes("VmHWM:")


def _status_bytes(name: str) -> int:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), 0)
