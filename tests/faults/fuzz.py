"""A coverage-guided fuzzer of everything that is read from a step, by hand; not a dependency, and no part of CI.

    pip install atheris
    python -m tests.faults.fuzz -max_total_time=600 CORPUS

Starts from a real step. A finding is any exception that is none of safepoint's own, an input that takes more than
seconds, and one that takes more than 2 GiB. What it found stands as tests in `test_hostile_steps.py`.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import atheris  # type: ignore[import-not-found, unused-ignore]

with atheris.instrument_imports(include=["safepoint"]):
    from safepoint.formats.commit_record import CommitRecord
    from safepoint.formats.manifest import Manifest
    from safepoint.formats.safetensors import read_header
    from safepoint.manager import CheckpointManager
    from safepoint.manager.errors import CheckpointError

from support.hostile_steps import HostileStep, make_state

TEXTS = (
    "dict",
    "list",
    "tuple",
    "array",
    "value",
    "stateful",
    "alias",
    "per_process",
    "float32",
    "int8",
    "",
    "..",
    "/x",
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every part of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in ((*path, key), *places(item, (*path, key)))]


def draw(data: Any, depth: int = 0) -> Any:
    """Return a JSON value made of the fuzzer's bytes."""
    choice = data.ConsumeIntInRange(0, 8 if depth < 3 else 6)
    if choice == 0:
        return data.ConsumeInt(9)
    if choice == 1:
        return data.ConsumeRegularFloat()
    if choice == 2:
        return data.PickValueInList([True, False, None])
    if choice == 3:
        return TEXTS[data.ConsumeIntInRange(0, len(TEXTS) - 1)]
    if choice == 4:
        return data.ConsumeUnicode(8)
    if choice == 5:
        return data.ConsumeIntInRange(-2, 20)
    if choice == 6:
        return "0x" + data.ConsumeBytes(4).hex()
    if choice == 7:
        return [draw(data, depth + 1) for _ in range(data.ConsumeIntInRange(0, 3))]
    keys = ("length", "int", "float", "bytes", "set", "class", "form", "metadata", "decimal", "enum", "path", "x")
    return {keys[data.ConsumeIntInRange(0, len(keys) - 1)]: draw(data, depth + 1)}


class Target:
    """One root that is rewritten again and again."""

    def __init__(self, root: Path) -> None:
        self.step = HostileStep(root)
        self.places = places(self.step.manifest)
        self.record = (self.step.folder / "commit.json").read_bytes()
        self.manager = CheckpointManager(root)
        self.into = make_state(7)

    def __call__(self, raw: bytes) -> None:
        """Try one input."""
        data = atheris.FuzzedDataProvider(raw)
        kind = data.ConsumeIntInRange(0, 7)
        try:
            if kind == 0:
                Manifest.from_bytes(data.ConsumeBytes(1 << 16), path="fuzz")
            elif kind == 1:
                CommitRecord.from_bytes(data.ConsumeBytes(1 << 12), path="fuzz")
            elif kind == 2:
                content = data.ConsumeBytes(1 << 12)
                read_header(content, path="fuzz", file_bytes=len(content))
            else:
                self.restore(data)
        except CheckpointError:
            pass

    def restore(self, data: Any) -> None:
        """Change the manifest in a few places, sign it, and restore it."""
        manifest = copy.deepcopy(self.step.manifest)
        for _ in range(data.ConsumeIntInRange(1, 4)):
            path = self.places[data.ConsumeIntInRange(0, len(self.places) - 1)]
            place = manifest
            try:
                for key in path[:-1]:
                    place = place[key]
                if data.ConsumeBool():
                    place[path[-1]] = draw(data)
                elif isinstance(place, list):
                    place.insert(path[-1], draw(data))
                else:
                    del place[path[-1]]
            except (LookupError, TypeError):
                continue
        self.step.rewrite(json.dumps(manifest).encode())
        self.manager._session.committer._cache.keep_only(())
        self.manager.restore(2, self.into if data.ConsumeBool() else None)


def main() -> None:
    """Fuzz until told to stop."""
    logging.disable()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        target = Target(Path(directory) / "root")
        atheris.Setup([*sys.argv, "-rss_limit_mb=3000", "-timeout=20"], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
