"""Which steps are saved, and which committed steps are kept.

Pure functions of numbers that the commit records carry: no clock, no file system, no process. Order is the commit
`sequence` and nothing else, so steps of an abandoned branch age out before those of the branch that goes on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from safepoint.formats.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

__all__ = [
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "OnExists",
    "Policy",
    "StepInfo",
    "Union",
    "decide_existing",
    "is_due",
    "steps_to_delete",
]

OnExists = Literal["auto", "error", "skip", "replace"]
"""What a save does about a step that is committed already."""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What policies may know of a committed step.

    Attributes:
        step: the user's number.
        sequence: place in the order of commits; decides what is latest.
        attempt: id of the save that made it; unlike `step`, never used twice.
        metrics: as given to that save.
        num_bytes: size of its data.
        run: id of the manager that committed it.
    """

    step: int
    sequence: int
    attempt: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_bytes: int = 0
    run: str = ""


class Policy(ABC):
    """Says which committed steps are worth their disk space; `|` keeps what either side keeps."""

    __slots__ = ()

    @abstractmethod
    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Return the steps to keep, each with the reason, of all those committed (in any order)."""

    def __or__(self, other: Policy) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        return Union((*_parts(self), *_parts(other)))


def _parts(policy: Policy) -> tuple[Policy, ...]:
    return policy.policies if isinstance(policy, Union) else (policy,)


@dataclass(frozen=True, slots=True, repr=False)
class Union(Policy):
    """Keeps what any of its policies keeps; made by `|`."""

    policies: tuple[Policy, ...]

    def __post_init__(self) -> None:
        if not self.policies or not all(isinstance(policy, Policy) for policy in self.policies):
            raise InvalidArgumentError(f"Union needs policies, got {self.policies!r}")

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Return the union, with all the reasons of a step joined."""
        kept: dict[int, str] = {}
        for policy in self.policies:
            for step, reason in policy.keep(steps).items():
                kept[step] = f"{kept[step]}; {reason}" if step in kept else reason
        return kept


@dataclass(frozen=True, slots=True, repr=False)
class KeepLast(Policy):
    """Keeps the `n` steps committed last."""

    n: int

    def __post_init__(self) -> None:
        _check_count("KeepLast", "n", self.n)

    def __repr__(self) -> str:
        return f"KeepLast({self.n})"

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Return the `n` steps of the highest sequences."""
        newest = sorted(steps, key=_sequence, reverse=True)[: self.n]
        return {info.step: f"last {self.n}" for info in newest}


@dataclass(frozen=True, slots=True, repr=False)
class KeepEvery(Policy):
    """Keeps for good each step that is a multiple of `steps`; 0 is one."""

    steps: int

    def __post_init__(self) -> None:
        _check_count("KeepEvery", "steps", self.steps)

    def __repr__(self) -> str:
        return f"KeepEvery({self.steps})"

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Return the multiples."""
        return {info.step: f"every {self.steps}" for info in steps if info.step % self.steps == 0}


@dataclass(frozen=True, slots=True, repr=False)
class KeepBest(Policy):
    """Keeps the `n` best steps by one metric.

    A step whose metric is NaN is worse than any number, one that has no such metric is worse still; they are kept
    only while fewer than `n` steps are better. Of equals the newer is the better one.
    """

    n: int
    metric: str = field(kw_only=True)
    order: Literal["min", "max"] = field(kw_only=True)

    def __post_init__(self) -> None:
        _check_count("KeepBest", "n", self.n)
        _check_name("KeepBest", self.metric)
        if self.order not in ("min", "max"):
            raise InvalidArgumentError(f'KeepBest has order "min" or "max", got {self.order!r}')

    def __repr__(self) -> str:
        return f"KeepBest({self.n}, metric={self.metric!r}, order={self.order!r})"

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Return the `n` best."""
        best = sorted(steps, key=self._badness)[: self.n]
        return {info.step: f"best {self.n} by {self.metric}" for info in best}

    def _badness(self, info: StepInfo) -> tuple[int, float, int]:
        value = info.metrics.get(self.metric)
        if value is None:
            return 2, 0.0, -info.sequence
        if math.isnan(value):
            return 1, 0.0, -info.sequence
        return 0, value if self.order == "min" else -value, -info.sequence


@dataclass(frozen=True, slots=True)
class KeepAll(Policy):
    """Keeps every step."""

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Return all of them."""
        return {info.step: "all" for info in steps}


def steps_to_delete(steps: Sequence[StepInfo], policy: Policy, *, protected: Collection[str] = ()) -> list[StepInfo]:
    """Return the committed steps that nothing keeps, oldest commit first.

    Args:
        steps: all that are committed.
        policy: what the user wants kept.
        protected: attempts that stay whatever the policy says: the one just written, the one this run was restored
            from until it has committed a newer one, one that is being restored, pinned ones.

    The step committed last is never returned: no policy may leave a root without its latest.
    """
    kept = policy.keep(steps)
    latest = max((info.sequence for info in steps), default=-1)
    spared = frozenset(protected)
    return [
        info
        for info in sorted(steps, key=_sequence)
        if info.step not in kept and info.attempt not in spared and info.sequence != latest
    ]


def decide_existing(
    on_exists: OnExists, existing: StepInfo, *, run: str, restored: StepInfo | None
) -> Literal["skip", "replace", "error"]:
    """Decide what a save does about a step that is committed already.

    With "auto": a step that this run committed is skipped (the final save of a loop often repeats its last one). One
    that lies after the step that this run was restored from, in number or in the order of commits, belongs to a branch
    that was left by that restore, and is replaced. Any other is an error.

    Args:
        on_exists: the user's choice.
        existing: the committed step.
        run: id of this run.
        restored: the step that this run was restored from, None when it started anew.
    """
    if on_exists not in get_args(OnExists):
        raise InvalidArgumentError(
            f"on_exists is one of {', '.join(map(repr, get_args(OnExists)))}, got {on_exists!r}", step=existing.step
        )
    if on_exists != "auto":
        return on_exists
    if existing.run == run:
        return "skip"
    if restored is not None and (existing.step > restored.step or existing.sequence > restored.sequence):
        return "replace"
    return "error"


def is_due(step: int, save_every: int, force: bool) -> bool:  # noqa: FBT001 all three are what it is a function of
    """Say whether this step is to be saved; from its arguments alone, so that all processes say the same.

    Args:
        step: the step at hand, checked before.
        save_every: save the multiples of this many steps; 0 is one.
        force: save it anyway.
    """
    return force or step % save_every == 0


def _check_count(owner: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{owner} needs {name} to be a whole number above 0, got {value!r}")


def _check_name(owner: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidArgumentError(f"{owner} needs the name of a metric, got {value!r}")


def _sequence(info: StepInfo) -> int:
    return info.sequence
