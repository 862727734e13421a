"""What an SPMD mesh of torch_xla saved, as the real Orbax restores it, on another mesh too; and the other way round."""

# ruff: noqa: PLC0415 - a case imports XLA in its own process, and this file is read where XLA is not installed

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.matrix import cases
from support.orbax_process import digest_of, needs_any_orbax, run_orbax

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
    needs_any_orbax,
]

FOREIGN = Path(__file__).parents[1] / "compat" / "foreign" / "orbax"
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype, tuple[str | None, ...]]] = {
    "even": ((8, 16), torch.float32, ("a", "b")),
    "uneven": ((7, 5), torch.bfloat16, ("a", "b")),
    "swapped": ((6, 8), torch.float16, ("b", "a")),
    "thin": ((2, 4), torch.int32, ("a", None)),
    "vector": ((13,), torch.uint8, ("b",)),
    "small": ((4, 4), torch.float8_e4m3fn, ("a", None)),
    "flags": ((8,), torch.bool, ("a",)),
    "replicated": ((4, 4), torch.float32, (None, None)),
}
CASES = cases("tests/xla/test_orbax_xla.py::test_orbax_restores_what_a_mesh_of_torch_xla_saved")


def expected(name: str) -> torch.Tensor:
    shape, dtype, _ = SHAPES[name]
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) % 120
    return values % 2 == 0 if dtype == torch.bool else values.to(dtype)


def leaf_of(tensor: torch.Tensor) -> tuple[str, list[int], str]:
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest_of(data)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with a root of each case, all saved by one process."""
    folder = tmp_path_factory.mktemp("mesh")
    found = filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
    ended = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "PYTHONPATH": os.pathsep.join(found)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


@pytest.mark.parametrize(("file_format", "mode", "count"), CASES)
def test_orbax_restores_what_a_mesh_of_torch_xla_saved(root: Path, file_format: str, mode: str, count: int) -> None:
    assert count == 1
    step = root / f"{file_format}-{mode}" / "5"
    path = str(step / "leaves")
    names = [name for name in SHAPES if name != "uneven"]
    shapes = {name: list(SHAPES[name][0]) for name in SHAPES}
    dtypes = {name: str(SHAPES[name][1]).removeprefix("torch.") for name in SHAPES}
    answers = run_orbax(
        {"do": "standard", "path": path},
        {"do": "pytree", "path": path},
        {"do": "v1", "path": str(step)},
        {"do": "manager", "root": str(step.parent)},
        {"do": "mesh", "path": path, "shapes": shapes, "dtypes": dtypes},
    )
    wanted = {name: leaf_of(expected(name)) for name in SHAPES}
    for found in (answers[0], answers[1], answers[2]["leaves"], answers[3]["items"]["leaves"], answers[4]):
        assert {name: (leaf["dtype"], leaf["shape"], leaf["digest"]) for name, leaf in found.items()} == wanted
    assert {answers[4][name]["num_devices"] for name in names} == {8}


def test_a_mesh_of_torch_xla_restores_what_orbax_saved(root: Path) -> None:
    """Which the process of the fixture did, and looked at."""
    assert (root / "restored").read_text() == "bit for bit"


# From here on: what runs in a process with eight devices.


def save_all(folder: Path) -> None:
    import numpy as np
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    from safepoint.manager import CheckpointManager
    from safepoint.manager.foreign import restore_foreign

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(8), (4, 2), ("a", "b"))
    leaves: dict[str, Any] = {}
    for name, (_, _, spec) in SHAPES.items():
        leaves[name] = expected(name).to(torch_xla.device())
        xs.mark_sharding(leaves[name], mesh, spec)
    for file_format, mode, _ in CASES:
        with CheckpointManager(folder / f"{file_format}-{mode}", format=file_format, mode=mode) as manager:
            manager.save(5, {"leaves": leaves}, metrics={"loss": 1.0})
    target = {"params": {"w": torch.zeros(8, 600, device=torch_xla.device())}, "step": 0}
    xs.mark_sharding(target["params"]["w"], mesh, ("b", "a"))
    restore_foreign(FOREIGN / "two-processes" / "3", target)
    assert torch.equal(target["params"]["w"].cpu(), torch.arange(8 * 600).reshape(8, 600) / 8)
    assert target["step"] == 7
    assert not {"jax", "orbax"} & set(sys.modules)
    (folder / "restored").write_text("bit for bit")


if __name__ == "__main__":
    save_all(Path(sys.argv[1]))
