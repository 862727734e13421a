"""How processes meet through a store: the protocol, and what both sides of it share.

Owns the words of the protocol (keys, messages, verdicts) and the patience of a caller. The two sides are in
`primary_side` and `peer_side`. Must not know what a payload means.

The primary numbers the meetings; every number is a *turn*. Keys, under the run's prefix and a namespace:

    turn          "<turn> open" or "<turn> closed": written by the primary alone, and only upwards
    <turn>/open   a bell: look at `turn` again
    <turn>/in/<p> what process p brings: name, count of the meetings it entered, payload
    <turn>/come   how many peers have brought theirs
    <turn>/ready  a bell for the primary: all have come, or the turn has been ended
    <turn>/end    how the turn ended, written once, by whoever is first (compare and set); holds a short answer
    <turn>/out    a long answer, written before `end` says that there is one; <turn>/out/<p> for answers one a process
    <turn>/read   how many peers have read the verdict
    here/<p>      the name under which peer p waits for a turn to be opened; absent peers are known by its absence

A *bell* is a key that is waited for and means nothing else than: look again. It may be rung for nothing (a peer whose
connection broke counts itself twice; whoever gives up rings to free its own waiting thread), and a peer may miss it (it
was deleted before a process that was stopped came to wait for it); so who wakes looks, and every half second a peer
looks unasked.

A meeting:

1. The primary opens the next turn and rings `open`. A peer looks for an open turn that it has not taken part in, and
   waits for the bell of the one after the latest. Then it posts `in` and waits for `end`; the last one rings `ready`.
2. The primary waits for `ready`, reads everybody's `in`, decides, and claims `end` for the answer.
3. Whoever reaches its deadline first, primary or peer, claims `end` with the error that names the absent. Everybody in
   the turn finds the one verdict: an answer for all, or the same error for all, never some of each. A peer that is
   interrupted (KeyboardInterrupt, SystemExit) claims `end` too, and rings, so that nobody waits for it.
4. The keys of a turn are deleted when the next but one has been closed; so the store does not grow.

Nobody polls: a thread of each process sleeps in the store until its key is there, while the caller's thread keeps the
deadline, speaks of the absent and hears signals. What the caller's thread asks meanwhile goes over a line of its own.

Why the primary numbers them. Were turns counted by each process, one that was absent from a failed meeting would be
misaligned for ever. Here a peer that comes late finds the turn closed, leaves no trace and joins whichever turn is
opened next; and since a payload is posted only once its turn is open, what a process that gave up has left behind is
never taken for a part in a later meeting, even when it lands late (a primary that was stopped and wakes up).

So N = 3 and only process 1 calls: it sees no open turn, and at its deadline raises, naming 0 and 2. Later all three
call: the turn is process 1's second meeting and the others' first, and they meet.

Being behind. A process that missed a meeting which the others entered (and survived) would bring its step 10 to their
step 20, then 20 to their 30, and disagree for ever. Therefore everyone counts the meetings it *entered* and brings the
count. A meeting that succeeds sets all counts to the highest. When names or payloads disagree (`DisagreementError`) and
the counts differ, only those with lower counts get the error; the others stay in the same call and meet again in a new
turn, so that those behind catch up, one error for each meeting that they missed. `decide` then runs again.

What peers conclude when the store fails them. Connection refused or reset: process 0 left, at once. No answer at all
(its process is stopped, its host is gone): at their own deadline, naming 0 and everybody not heard from.
A primary that wakes up after its deadline gives its meeting up, whatever has arrived meanwhile.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from typing import TYPE_CHECKING, Any, Literal, Self

from safepoint.manager.errors import CheckpointError, PeerFailedError, RendezvousTimeoutError, error_from_json

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

__all__ = [
    "Message",
    "Patience",
    "Verdict",
    "absent_error",
    "left_error",
    "processes_text",
    "read_turn",
]

logger = logging.getLogger("safepoint.coordination")

_LOOK_UP_SECS = 0.1
_LONGEST_ERROR_CHARS = 1 << 20
_SHORT_ANSWER_BYTES = 4096
_LET_GO_SECS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What one process brings to a turn."""

    name: str
    entered: int
    payload: bytes

    def to_bytes(self) -> bytes:
        """Return a line of JSON and the payload."""
        return _with_header({"name": self.name, "entered": self.entered}, self.payload)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return what `to_bytes` was made from."""
        header, payload = _split_header(data)
        return cls(name=header["name"], entered=header["entered"], payload=payload)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How a turn ended.

    Attributes:
        kind: "answer": one for all; "each": one a process; "failed": the error is everybody's; "behind": it is theirs
            whose count is below `entered`, and the others meet again.
        entered: the highest count of meetings entered.
        error: JSON of the error of the last two kinds.
        answer: the one for all, a character a byte, if it is short.
    """

    kind: Literal["answer", "each", "failed", "behind"]
    entered: int
    error: dict[str, Any] | None = None
    answer: str | None = None

    @classmethod
    def answering(cls, answer: bytes | Sequence[bytes], *, entered: int) -> Self:
        """Return the verdict of a meeting that succeeded."""
        if not isinstance(answer, bytes):
            return cls(kind="each", entered=entered)
        short = answer.decode("latin-1") if len(answer) <= _SHORT_ANSWER_BYTES else None
        return cls(kind="answer", entered=entered, answer=short)

    @classmethod
    def failure(cls, error: CheckpointError, *, entered: int, kind: Literal["failed", "behind"] = "failed") -> Self:
        """Return the verdict that carries this error."""
        described = error.to_json()
        if len(json.dumps(described)) > _LONGEST_ERROR_CHARS:
            short = {
                name: described["fields"].get(name) for name in ("step", "leaf", "path", "process_index", "outcome")
            }
            fields = {name: value for name, value in short.items() if value is not None}
            described = {**described, "message": error.message[:_LONGEST_ERROR_CHARS] + " …", "fields": fields}
        return cls(kind=kind, entered=entered, error=described)

    def to_bytes(self) -> bytes:
        """Return ASCII JSON: it is claimed by compare and set, which takes text."""
        return json.dumps(dataclasses.asdict(self)).encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return what `to_bytes` was made from."""
        return cls(**json.loads(data))

    def raised(self) -> CheckpointError:
        """Return the error to raise."""
        assert self.error is not None, f"a verdict of kind {self.kind} has no error"
        return error_from_json(self.error)


class Patience:
    """One caller's deadline on its own monotonic clock, and its warnings.

    Args:
        name: of the meeting.
        deadline_secs: how long to wait in all.
        warn_every_secs: how often to say who is missing.
    """

    def __init__(self, name: str, deadline_secs: float, warn_every_secs: float) -> None:
        self.name = name
        self.deadline_secs = deadline_secs
        self._began = time.monotonic()
        self._warn_every_secs = warn_every_secs
        self._warn_at = self._began + warn_every_secs
        self._slack_secs = min(1.5, 0.25 * deadline_secs)

    @property
    def ended(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self._began + self.deadline_secs

    @property
    def nearly_ended(self) -> bool:
        """Whether most of the time is gone: those who came at about the same time have not given up yet."""
        return time.monotonic() >= self._began + 0.8 * self.deadline_secs

    @property
    def overdue(self) -> bool:
        """Whether it passed so long ago that nobody can be waiting for this process any more."""
        return time.monotonic() >= self._began + self.deadline_secs + self._slack_secs

    @property
    def grace_ended(self) -> bool:
        """Whether the primary, if it came at about the same time, has had its moment to say who was absent."""
        return time.monotonic() >= self._began + self.deadline_secs + self._slack_secs / 3

    def until(self) -> float:
        """Return when a call to the store has to come back: at the deadline, or a moment from now if that is later."""
        return max(self._began + self.deadline_secs, time.monotonic() + self._slack_secs / 3)

    def to_sleep(self) -> float:
        """Return after how many seconds the caller's thread should look at the clock again: soon, or at a limit."""
        now, deadline = time.monotonic(), self._began + self.deadline_secs
        limits = (deadline, deadline + self._slack_secs / 3, deadline + self._slack_secs)
        return min([_LOOK_UP_SECS, *(limit - now for limit in limits if limit > now)])

    def let_go(self) -> float:
        """Return until when (monotonic clock) a thread may sleep that the caller could not free."""
        return max(self._began + self.deadline_secs, time.monotonic()) + _LET_GO_SECS

    def warn_if_due(self, missing: Callable[[], Collection[int]]) -> None:
        """Log who is missing, every now and then."""
        now = time.monotonic()
        if now < self._warn_at:
            return
        self._warn_at = now + self._warn_every_secs
        logger.warning(
            "Meeting %r has waited %.0f s for %s (deadline %g s).",
            self.name,
            now - self._began,
            processes_text(missing()),
            self.deadline_secs,
        )


def read_turn(value: bytes | None) -> tuple[int, bool]:
    """Return the number of the latest turn, and whether it is open."""
    if value is None:
        return 0, False
    number, state = value.split()
    return int(number), state == b"open"


def absent_error(patience: Patience, absent: Sequence[int], *, because: str = "") -> RendezvousTimeoutError:
    """Return the error of a meeting that ended at its deadline."""
    return RendezvousTimeoutError(
        f"Meeting {patience.name!r} ended at its deadline of {patience.deadline_secs:g} s: "
        f"{processes_text(absent)} did not {'come' if not because else 'answer'}{because}.",
        absent=tuple(absent),
        deadline_secs=patience.deadline_secs,
        hint="All processes must make this call, at about the same time. See whether the absent ones still run, "
        "skip the call, or need a longer deadline_secs.",
    )


def left_error(process_index: int, name: str, cause: BaseException) -> PeerFailedError:
    """Return the error for the others when one process breaks a meeting off."""
    text = f": {cause}" if str(cause) else ""
    return PeerFailedError(
        f"Process {process_index} left the meeting {name!r}: {type(cause).__name__}{text}",
        process_index=process_index,
    )


def processes_text(indices: Iterable[int]) -> str:
    """Return "process 3", or "processes 1, 2"."""
    listed = list(indices)
    return f"{'process' if len(listed) == 1 else 'processes'} {', '.join(map(str, listed))}"


def _with_header(header: dict[str, Any], payload: bytes) -> bytes:
    return json.dumps(header).encode() + b"\n" + payload


def _split_header(data: bytes) -> tuple[dict[str, Any], bytes]:
    header, _, payload = data.partition(b"\n")
    value: dict[str, Any] = json.loads(header)
    return value, payload
