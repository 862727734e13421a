"""Write checkpoints with the real Orbax, once: `python tests/compat/make_orbax_golden.py`.

`foreign/orbax/versions.json` says with which versions; `leaves.json`, what each leaf is. What is there is never written
again.
"""

# ruff: noqa: PLC0415, TID251 - Orbax is imported where it runs, and nowhere else

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOREIGN = Path(__file__).parent / "foreign" / "orbax"
KINDS = ("ocdbt-zarr3", "ocdbt-zarr2", "files-zarr3", "files-zarr2", "manager", "items", "v1", "two-processes")
TOOLS = ("orbax-checkpoint", "jax", "tensorstore", "numpy")
NUM_DEVICES = 8


def rows(process: int) -> tuple[int, int]:
    """Return the rows of the array `w` that a process of two has, when they are saved together."""
    return 4 * process, 4 * process + 4


def save_together(root: str, port: str, process: str) -> None:
    """Save as one of two processes of JAX."""
    import jax

    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("a",))
    whole = np.arange(8 * 600, dtype=np.float32).reshape(8, 600) / 8  # too large for OCDBT to keep inline
    sharding = NamedSharding(mesh, PartitionSpec("a"))
    w = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
    with ocp.CheckpointManager(root) as manager:
        manager.save(3, args=ocp.args.StandardSave({"params": {"w": w}, "step": 7}))


def make_together(root: Path) -> None:
    """Let two processes save one step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, __file__, "together", str(root), port]
    surroundings = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    started = [subprocess.Popen([*command, str(process)], env=surroundings) for process in range(2)]
    for process in started:
        if process.wait(timeout=120):
            raise SystemExit("a process failed")


def make(kind: str) -> Any:
    """Write one kind, and return what its leaves are."""
    root = FOREIGN / kind
    if kind == "two-processes":
        make_together(root)
        return {}
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.orbax_process import run_orbax

    (answer,) = run_orbax({"do": "write", "root": str(root), "name": kind})
    if "error" in answer:
        raise SystemExit(answer["error"])
    return answer


def main() -> None:
    for kind in KINDS:
        if (FOREIGN / kind).exists():
            continue
        leaves = make(kind)
        (FOREIGN / kind / "leaves.json").write_text(json.dumps(leaves, indent=1, ensure_ascii=False) + "\n")
        for lock in FOREIGN.glob(f"{kind}/**/*.__lock"):
            lock.unlink()
        for sharding in (*FOREIGN.glob(f"{kind}/**/_sharding"), *FOREIGN.glob(f"{kind}/**/array_metadatas")):
            shutil.rmtree(sharding) if sharding.is_dir() else sharding.unlink()  # only JAX reads them
    versions = {name: version(name) for name in TOOLS}
    (FOREIGN / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["together"]:
        save_together(*sys.argv[2:])
    else:
        main()
