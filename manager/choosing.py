"""Which committed step a restore takes: the one asked for, or the newest that every process has and none found unsound.

Pure over what the processes list; whether a step is sound is found out by checking it, on every process (`restoring`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from safepoint.manager.errors import CheckpointError, NoRestorableStepError, StepNotFoundError, error_from_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safepoint.manager.commit import Committer

__all__ = ["Candidate", "Offer", "choose_step", "own_offer"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A committed step."""

    step: int
    attempt: str
    sequence: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    abandoned: tuple[int, ...] = ()
    """Higher steps that were committed before this one: a branch that was left."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value."""
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "metrics": dict(self.metrics)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Candidate:
        """Return the candidate that `to_json` described."""
        return cls(**{**value, "abandoned": tuple(value["abandoned"])})


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What one process lists: committed steps in the order of their commits, and directories that should be steps."""

    candidates: tuple[Candidate, ...] = ()
    problems: tuple[CheckpointError, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value."""
        return {
            "candidates": [item.to_json() for item in self.candidates],
            "problems": [error.to_json() for error in self.problems],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Offer:
        """Return the offer that `to_json` described."""
        return cls(
            candidates=tuple(map(Candidate.from_json, value["candidates"])),
            problems=tuple(map(error_from_json, value["problems"])),
        )


def own_offer(committer: Committer) -> Offer:
    """Return what this process lists."""
    listing = committer.listing()  # one look: of two, the first may fail to read a record and the second not
    candidates = tuple(
        Candidate(
            step=item.record.step,
            attempt=item.record.attempt,
            sequence=item.record.sequence,
            metrics=item.record.metrics,
        )
        for item in listing.steps
    )
    problems = tuple(problem.error.with_context(step=problem.step) for problem in listing.problems)
    return Offer(candidates=candidates, problems=problems)


def choose_step(
    offers: Sequence[Offer], *, step: int | None, unsound: Mapping[str, str], root: str
) -> Candidate | None:
    """Return the step to restore; None when the latest is asked for and nothing was ever committed.

    Args:
        offers: the primary's; or, with roots of their own, one of every process.
        step: the step asked for; None for the latest.
        unsound: attempts found unsound during this restore, and why.
        root: for messages.

    Raises:
        StepNotFoundError: the step asked for is not committed everywhere; lists those that are.
        NoRestorableStepError: steps are committed, but none of them can be restored.
        CheckpointError: what is wrong with the record of the step asked for.
    """
    everywhere = _common(offers)
    if step is not None:
        return _choose_exactly(step, everywhere, offers, root)
    sound = [candidate for candidate in everywhere if candidate.attempt not in unsound]
    if sound:
        chosen = max(sound, key=lambda candidate: candidate.sequence)
        earlier = (c.step for c in everywhere if c.sequence < chosen.sequence and c.step > chosen.step)
        return replace(chosen, abandoned=tuple(sorted(earlier)))
    found = [str(error) for offer in offers for error in offer.problems] + list(unsound.values())
    incomplete = {candidate.step for offer in offers for candidate in offer.candidates} - {c.step for c in everywhere}
    found += [f"step {number} is not committed in the root of every process" for number in sorted(incomplete)]
    if not found:
        return None
    raise NoRestorableStepError(
        f"steps are committed here, but none of them can be restored: {'; '.join(found)}",
        path=root,
        problems=tuple(found),
        hint="Nothing was deleted. Start anew in another root, or mend a step from a copy.",
    )


def _common(offers: Sequence[Offer]) -> list[Candidate]:
    """Return the primary's candidates that all others list too."""
    others = [{candidate.attempt for candidate in offer.candidates} for offer in offers[1:]]
    return [candidate for candidate in offers[0].candidates if all(candidate.attempt in held for held in others)]


def _choose_exactly(step: int, everywhere: Sequence[Candidate], offers: Sequence[Offer], root: str) -> Candidate:
    for candidate in everywhere:
        if candidate.step == step:
            return candidate
    for offer in offers:
        for error in offer.problems:
            if error.step == step:
                raise error
    available = tuple(sorted(candidate.step for candidate in everywhere))
    listed = ", ".join(map(str, available)) if available else "none"
    raise StepNotFoundError(
        f"step {step} is not committed here; committed are: {listed}",
        step=step,
        path=root,
        available=available,
        hint="Restore one of these, or use restore_latest().",
    )
