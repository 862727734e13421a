"""A root with a past, for `safepoint report`: three runs, a slow save, restores, failures, and what was removed since.

By hand, to make the picture in the documents: `python tests/support/report_root.py docs/images/report.png`.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from support.command import commit_sharded

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["make_root"]

_START = datetime(2026, 1, 5, 8, 0, tzinfo=UTC)
_EVERY = timedelta(minutes=11)
_POLICY = "KeepLast(3) | KeepEvery(10000) | KeepBest(2, metric='loss', order='min')"
_DIM = 64


def make_root(
    root: Path, num_steps: int, *, process_count: int = 8, state: Mapping[str, Any] | None = None, item: str = "ema"
) -> None:
    """Commit steps 1000, 2000, … by hand, and leave a history beside them.

    Args:
        root: made.
        num_steps: how many.
        process_count: how many processes wrote each.
        state: of each step; None for a small transformer's.
        item: name of one more item of that.
    """
    root.mkdir(parents=True)
    state = _transformer(item) if state is None else state
    rng = random.Random(1)  # noqa: S311 - numbers that look real
    history: list[dict[str, Any]] = []
    parent: str | None = None
    for index in range(num_steps):
        number = index * 3 // num_steps
        is_first = index * 3 // num_steps != (index - 1) * 3 // num_steps
        created = _START + index * _EVERY
        if index and is_first:
            history += _restore(created, number, step=1000 * index, attempt=parent or "")
        begin, stage, wait = rng.uniform(0.05, 0.2), rng.uniform(0.9, 1.4), rng.uniform(0.2, 0.9)
        write = rng.uniform(4, 6) * (1 + 0.4 * math.sin(index / 5)) * (9 if index == 17 else 1)
        commit_sharded(
            root,
            1000 * (index + 1),
            state,
            process_count=process_count,
            metrics={"loss": round(2 + 3 * math.exp(-index / 12) + rng.uniform(-0.05, 0.05), 4)},
            created=created.isoformat(),
            run=f"{number + 1:016x}",
            parent=parent,
            timings={
                "begin_secs": begin,
                "stage_secs": stage,
                "write_secs": write,
                "elapsed_secs": begin + stage + write + wait,
            },
            extra={"blocking": index % 7 == 0, "keep": _POLICY},
        )
        parent = json.loads((root / str(1000 * (index + 1)) / "commit.json").read_text())["attempt"]
    history += _past()
    history.sort(key=lambda line: line["time"])
    (root / ".safepoint").mkdir(exist_ok=True)
    (root / ".safepoint" / "history.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in history))
    (root / f"{1000 * num_steps + 1000}.tmp-0123456789abcdef").mkdir()


def _transformer(item: str) -> dict[str, Any]:
    shapes = {
        "attention.qkv": (3 * _DIM, _DIM),
        "mlp.up": (4 * _DIM, _DIM),
        "mlp.down": (_DIM, 4 * _DIM),
        "norm": (_DIM,),
    }
    layers = {f"layers.{index}.{name}": shape for index in range(6) for name, shape in shapes.items()}
    model = {"embed": (500, _DIM), **layers, "head": (500, _DIM)}

    def tree(names: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, shape in names.items():
            *above, last = name.split(".")
            inner = out
            for key in above:
                inner = inner.setdefault(key, {})
            inner[last] = torch.zeros(shape)
        return out

    optimizer = {"exp_avg": tree(model), "exp_avg_sq": tree(model)}
    return {"model": tree(model), "optimizer": optimizer, item: tree(layers), "scheduler": {"last": torch.tensor(1)}}


def _restore(created: datetime, number: int, *, step: int, attempt: str) -> list[dict[str, Any]]:
    run = {"run": f"{number + 1:016x}"}
    when = created.timestamp() - 300
    done = {"event": "RestoreDone", "time": when, "step": step, "attempt": attempt, "num_bytes": 8_400_000_000}
    lines = [{**done, **run, "secs": 9.3, "passed_over": number - 1}]
    if number > 1:
        problem = "bytes 8,388,608 to 16,777,216 are not those that were committed: their digest differs"
        where = f"[step {step + 500}, leaf model.layers.3.mlp.up, file shard-00003-of-00008.safetensors]"
        told = {"event": "StepPassedOver", "time": when - 20, "step": step + 500, "problem": f"{problem} {where}"}
        lines.append({**told, **run})
    return lines


def _past() -> list[dict[str, Any]]:
    start, run = _START.timestamp(), f"{1:016x}"
    full = "Process 3 failed: StorageError: cannot write the file: No space left on device"
    failed = {"event": "SaveFailed", "time": start + 9000, "step": 7500, "error": "PeerFailedError", "message": full}
    stopped = {"event": "Preempted", "time": start + 8700, "step": 14000, "reason": "SIGTERM on process 5"}
    timed = {"blocking": False, "begin_secs": 0.1, "stage_secs": 1.1, "write_secs": 5.0, "secs": 6.7}
    removed = [
        {"event": "SaveCommitted", "time": start + 400 + 3300 * index, "step": 500 + 5000 * index, **timed}
        for index in range(3)
    ]
    return [
        {**failed, "run": run, "outcome": "not_committed"},
        {**stopped, "run": run},
        *({**line, "run": run, "attempt": f"{index + 7:016x}"} for index, line in enumerate(removed)),
    ]


def _main(picture: Path) -> None:
    """Take the picture of the page."""
    from safepoint.formats.storage import LocalStorage  # noqa: PLC0415 - by hand only
    from safepoint.manager.report import collect, render  # noqa: PLC0415

    from support.browser import Browser  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs" / "gpt-7b"
        make_root(root, 40)
        facts = collect(LocalStorage(root))
        facts.root = "/data/runs/gpt-7b"
        page = Path(folder) / "report.html"
        page.write_text(render(facts))
        with Browser() as browser:
            browser.open(page, width=1100, height=1400)
            picture.write_bytes(browser.screenshot())


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
