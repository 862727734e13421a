"""A small save and restore through the public API, in a root of its own that is removed again."""

from __future__ import annotations

import logging
import os
import secrets
import time
from pathlib import Path

import torch

from safepoint.formats.storage import open_storage
from safepoint.formats.storage.opening import is_url
from safepoint.manager.checkpoint_manager import CheckpointManager
from safepoint.manager.diagnosing import Finding
from safepoint.manager.errors import CheckpointError

__all__ = ["try_save"]


def try_save(root: str) -> Finding:
    """Save to a directory beside the steps of a root (or where the root would be made), restore, and compare."""
    place = root if is_url(root) else _existing(Path(root))
    name = f".safepoint-doctor-{secrets.token_hex(8)}"
    started = time.monotonic()
    state = {"weights": torch.arange(1000, dtype=torch.float32)}
    found = {"weights": torch.zeros(1000)}
    try:
        with CheckpointManager(f"{place}/{name}") as manager:
            manager.save(0, state)
            manager.restore(0, found)
    except CheckpointError as error:
        return Finding(name="a save", level="problem", text=str(error), data=False)
    finally:
        _remove(place, name)
    if not torch.equal(state["weights"], found["weights"]):
        return Finding(name="a save", level="problem", text="came back as something else", data=False)
    secs = time.monotonic() - started
    return Finding(name="a save", level="ok", text=f"works, restore included: {secs:.2f} s", data=True)


def _existing(place: Path) -> str:
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return str(place)


def _remove(place: str, name: str) -> None:
    try:
        open_storage(place).delete_tree(name)
    except CheckpointError as error:
        logging.getLogger("safepoint").debug("cannot remove %s: %s", name, error)
