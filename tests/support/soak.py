"""Saves a small state again and again, and prints what the process holds: run by tests, and by hand with 2000.

python tests/support/soak.py ROOT 2000
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import threading
from pathlib import Path

import torch

from safepoint.manager import CheckpointManager, KeepLast


def held(root: Path) -> dict[str, int]:
    """Return what may grow."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_bytes": pages * resource.getpagesize(),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "entries": len(os.listdir(root)),
        "control_entries": len(os.listdir(root / ".safepoint")),
    }


def main(root: Path, num_steps: int) -> None:
    """Save, and look ten times on the way."""
    model = torch.nn.Linear(8, 8)
    seen = []
    with CheckpointManager(root, keep=KeepLast(3), deadline_secs=20.0) as manager:
        for step in range(num_steps):
            manager.save(step, {"model": model, "step": step}, blocking=False)
            if (step + 1) % (num_steps // 10) == 0:
                manager.wait()
                seen.append(held(root))
    seen.append(held(root))
    print(json.dumps(seen))  # noqa: T201 - its answer


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
