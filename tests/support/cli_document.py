"""`docs/cli.md`, with the output of its commands as they print it now. By hand, to write it: run this file.

Every line `$ safepoint …` in a console block is run, in order, on one root that is made for it; what stands below it
is replaced by what it prints. What is never the same twice (paths, times, ids, speeds, versions) becomes an example.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from support.command import commit_sharded, run
from support.source_tree import ROOT

__all__ = ["DOCUMENT", "rendered"]

DOCUMENT = ROOT / "docs" / "cli.md"
HOME = "/home/me"
_BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)
_IDS = re.compile(r"\b[0-9a-f]{16}\b")
_DIGESTS = re.compile(r"\b[0-9a-f]{32}\b")
_TIMES = re.compile(r"\b20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)")
_MANIFEST_BYTES = re.compile(r'(?<="manifest_bytes": )\d+')
_FOUND = {
    "python": "3.11.7",
    "safepoint": "0.1.0",
    "torch": "2.9.1",
    "torch_xla": "2.9.0",
    "numpy": "2.3.5",
    "xxhash": "3.6.0",
    "safetensors": "0.7.0",
    "tensorstore": "0.1.86",
    "device": "XLA, PJRT_DEVICE=TPU",
    "file system": "ext4",
    "free space": "512,000,000,000 bytes",
    "direct I/O": "yes",
    "write speed": "1,500 MB/s, 64 MiB, durably",
    "a save": "works, restore included: 0.05 s",
}
"""What `doctor` finds on the example's machine."""


def rendered(text: str) -> str:
    """Return the document with the output of all of its commands."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        home = str(Path.cwd())
        _make_root(Path("runs/gpt"))
        return _BLOCK.sub(lambda match: _rerun(match[0], home), text)


def _make_root(root: Path) -> None:
    """Make the root of the examples: three steps of two processes, and a save that was killed."""
    for number, step in enumerate((1000, 2000, 3000)):
        state = {
            "model": {
                "embed.weight": torch.arange(48, dtype=torch.bfloat16).reshape(8, 6) + step,
                "norm.weight": torch.full((6,), 1 + step / 4000),
            },
            "tokens": 4096 * step,
        }
        created = datetime.now(UTC) - timedelta(hours=5 - number, minutes=1)
        commit_sharded(
            root,
            step,
            state,
            metrics={"loss": round(2.5 - step / 2000, 3)},
            created=created.isoformat("T", "seconds"),
            run="0123456789abcdef",
        )
    (root / "4000.tmp-0123456789abcdef").mkdir()
    (root / "4000.tmp-0123456789abcdef" / "shard-00000-of-00002.safetensors").write_bytes(bytes(4096))


def _rerun(block: str, home: str) -> str:
    lines = []
    for line in block.splitlines():
        if line.startswith("$ safepoint "):
            lines += [line, *_output(line.removeprefix("$ safepoint "), home)]
    return "".join(f"{line}\n" for line in lines)


def _output(command: str, home: str) -> list[str]:
    done = run(*shlex.split(command, comments=True), columns=110)
    text = done.out + ("\n" if done.out and done.err else "") + done.err.rstrip()
    text = text.replace(home, HOME)
    for pattern, example in (
        (_DIGESTS, "00112233445566778899aabbccddeeff"),
        (_IDS, "0123456789abcdef"),
        (_TIMES, "2026-01-01T12:00:00+00:00"),
        (_MANIFEST_BYTES, "2048"),
    ):
        text = pattern.sub(example, text)
    lines = [_example_finding(line) if command.startswith("doctor") else line.rstrip() for line in text.splitlines()]
    return lines if not done.code else [*lines, f"(exit status {done.code})"]


def _example_finding(line: str) -> str:
    for name, example in _FOUND.items():
        found = re.match(rf"\w+ +{name}  +", line)
        if found is not None:
            return re.sub(r"^\w+ ", lambda level: "ok".ljust(len(level[0])), found[0]) + example
    return line.rstrip()


if __name__ == "__main__":
    DOCUMENT.write_text(rendered(DOCUMENT.read_text()))
