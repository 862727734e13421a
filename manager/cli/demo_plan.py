"""What the demonstration asks of a training process, and what the process tells back: data only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["DeviceKind", "Event", "Plan"]

DeviceKind = Literal["xla", "cpu"]
EventKind = Literal["started", "trained", "saved", "digest", "finished"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run of the training script.

    Attributes:
        root: where its checkpoints go; None trains without a manager.
        device: what it trains on.
        process_index: which process of the run this is.
        process_count: how many there are; with more than one the model is sharded over them.
        port: where the processes of the run find each other.
        steps: the last step.
        save_every: steps between two saves.
        kill_in_step: the save in whose middle each process kills itself; None for none.
        events: the file descriptor to which process 0 writes what happens.
    """

    root: str | None
    device: DeviceKind
    process_index: int = 0
    process_count: int
    port: int = 0
    steps: int
    save_every: int
    kill_in_step: int | None = None
    events: int = -1

    def to_json(self) -> str:
        """Return it as one argument of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` returned."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a training process, in the order in which it did.

    Attributes:
        kind: "started" (step: the one restored, text: the device), "trained" (loss), "saved" (text: the mode),
            "digest" (text: a digest of model and optimizer as they are at this step) or "finished".
        step: the step it belongs to; None where nothing was restored.
        loss: the loss of the step, exactly.
        text: see kind.
    """

    kind: EventKind
    step: int | None = None
    loss: float | None = None
    text: str = ""

    def to_line(self) -> str:
        """Return it as one line; the loss keeps every bit."""
        record: dict[str, Any] = asdict(self)
        if self.loss is not None:
            record["loss"] = self.loss.hex()
        return json.dumps(record) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Event:
        """Read what `to_line` returned."""
        record = json.loads(line)
        if record["loss"] is not None:
            record["loss"] = float.fromhex(record["loss"])
        return cls(**record)
