"""Pinned steps: those that no policy deletes. One file a step, `.safepoint/pins/<step>`, its content for people only.

Needs no ownership of the root: who evaluates a step may pin it while another job trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from safepoint.manager.step_listing import CONTROL_DIR, parse_step

if TYPE_CHECKING:
    from safepoint.formats.storage import Storage

__all__ = ["CONTROL_DIR", "pin", "pinned_steps", "unpin"]

_PINS_DIR = f"{CONTROL_DIR}/pins"


def pinned_steps(storage: Storage) -> frozenset[int]:
    """Return the pinned steps, whether they are committed or not."""
    steps = (parse_step(entry.name) for entry in storage.list(_PINS_DIR) if not entry.is_dir)
    return frozenset(step for step in steps if step is not None)


def pin(storage: Storage, step: int, *, note: str = "") -> bool:
    """Pin a step; return False when it was pinned before. In force from the owner's next look at its policies.

    Args:
        storage: of the root.
        step: the step; it need not be there yet.
        note: why, for people.
    """
    storage.make_dir(CONTROL_DIR)
    storage.make_dir(_PINS_DIR)
    return storage.put_if_absent(f"{_PINS_DIR}/{step}", note.encode("utf-8", "backslashreplace"))


def unpin(storage: Storage, step: int) -> bool:
    """Undo `pin`; return False when the step was not pinned."""
    path = f"{_PINS_DIR}/{step}"
    if storage.size(path) is None:
        return False
    storage.delete(path)
    return True
