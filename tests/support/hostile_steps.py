"""Steps that somebody changed who knows the format: every digest fits, and only the content is a lie."""

from __future__ import annotations

import collections
import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from safepoint.formats.checksum import digest
from safepoint.formats.fields import canonical_json
from safepoint.manager import CheckpointManager, PerProcess
from safepoint.manager.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["HostileStep", "make_state", "restore_in_every_way"]


def make_state(version: int) -> dict[str, Any]:
    """Return a small state with a node of every kind that a manifest may hold."""
    torch.manual_seed(version)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    shared = torch.arange(12.0)
    return {
        "model": model,
        "optimizer": optimizer,
        "views": {"whole": shared, "same": shared, "row": shared.reshape(3, 4)[1]},
        "numbers": np.arange(6, dtype=np.int16).reshape(2, 3) + version,
        "complex": torch.ones(2, dtype=torch.complex128) * version,
        "values": [1, 2**100, -0.0, float("nan"), None, True, b"bytes", "text", {1, 2}, (1, "two"), 1 + 2j],
        "ordered": collections.OrderedDict(a=1, b=torch.zeros(0, 3)),
        "keys": {1: "int", "1": "str", None: "none", 1.5: "float", b"k": "bytes", (1, 2): "tuple"},
        "own": PerProcess({"position": version}),
    }


class HostileStep:
    """A root with steps 1 and 2, of which 2 can be rewritten at will."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "2"
        with CheckpointManager(root) as manager:
            for step in (1, 2):
                manager.save(step, make_state(step))
        self.manifest: dict[str, Any] = json.loads((self.folder / "manifest.json").read_bytes())
        self.record: dict[str, Any] = json.loads((self.folder / "commit.json").read_bytes())

    def rewrite(self, manifest: bytes | Any, **record: Any) -> None:
        """Write another manifest, and a record that vouches for it.

        Args:
            manifest: its bytes, or a JSON value.
            record: fields of the record to change.
        """
        data = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode("utf-8", "surrogatepass")
        (self.folder / "manifest.json").write_bytes(data)
        value = {**self.record, "manifest_bytes": len(data), "manifest_digest": digest(data), **record}
        value.pop("digest")
        value["digest"] = digest(canonical_json(value))
        (self.folder / "commit.json").write_bytes(canonical_json(value))

    def rewrite_file(self, index: int, data: bytes) -> dict[str, Any]:
        """Write another data file and return the manifest that vouches for it, not yet written."""
        manifest: dict[str, Any] = json.loads(json.dumps(self.manifest))
        entry = manifest["files"][index]
        (self.folder / entry["path"]).write_bytes(data)
        blocks = range(0, len(data), entry["block_bytes"])
        entry["num_bytes"] = len(data)
        entry["digests"] = [digest(data[start : start + entry["block_bytes"]]) for start in blocks]
        return manifest


def restore_in_every_way(root: Path) -> list[CheckpointError | None]:
    """Restore step 2 without a target, into one, and verify it; return what was raised, each within seconds."""
    raised: list[CheckpointError | None] = []
    with CheckpointManager(root) as manager:
        for into in (None, make_state(7)):
            started = time.monotonic()
            try:
                manager.restore(2, into)
                raised.append(None)
            except CheckpointError as error:
                raised.append(error)
            assert time.monotonic() - started < 10
        manager.verify(2)
    return raised
