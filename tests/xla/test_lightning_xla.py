"""Lightning's real XLA strategies on the CPU device: the graph is cut everywhere, one process writes, none runs ahead.

Stood in for: Lightning looks for TPUs only, so `XLAAccelerator` is told that there is one device. `XLAStrategy` refuses
to set up one device; so its own `save_checkpoint` is called without that, inside `xmp.spawn`. That a replica is not
global zero is told to it, since replicas in threads cannot meet on a CPU. Forwards, backwards, saves and restores are
real.
"""

# ruff: noqa: PLC0415 - a case imports XLA in its own process, and this file is read where XLA is not installed

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torch_xla") is None or importlib.util.find_spec("lightning") is None,
        reason="torch_xla or lightning is not installed",
    ),
    pytest.mark.timeout(240),
]


def run(case: str, root: Path) -> Any:
    ended = subprocess.run(
        [sys.executable, __file__, case, str(root)],
        env={**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout[-1000:]}\n{ended.stderr[-4000:]}"
    return json.loads(ended.stdout.splitlines()[-1])


def test_trainer_and_strategies_on_an_xla_device(tmp_path: Path) -> None:
    told = run("all", tmp_path)

    assert told["strategy"] == "SingleDeviceXLAStrategy"
    assert told["resumed_from"] == 8
    assert told["resumed"] == told["whole"][8:], "the resumed run goes on bit for bit"
    steps_and_rates = [(step, rate) for step, _, rate in told["whole"][6:]]  # Lightning keeps no random state
    assert [(step, rate) for step, _, rate in told["from_checkpoint"]] == steps_and_rates
    for kind in ("fabric", "trainer"):
        assert told[kind] == {
            "pending before": True,
            "global zero": {"pending": False, "written": True, "exact": True},
            "another": {"pending": False, "written": False},
        }
    assert told["launcher"] == {"0 0": True, "1 1": False, "4 0": True, "5 1": False, "4 0, in use": False}


# -- in a process of its own -------------------------------------------------------------------------------------------


def case_all(root: str) -> dict[str, Any]:
    from lightning.fabric.accelerators.xla import XLAAccelerator

    XLAAccelerator.auto_device_count = staticmethod(lambda: 1)
    XLAAccelerator.is_available = staticmethod(lambda: True)
    told = fits(root)
    import torch_xla.distributed.xla_multiprocessing as xmp

    def inside(index: int) -> None:
        del index
        from lightning.fabric.strategies import XLAStrategy as OfFabric
        from lightning.pytorch.strategies import XLAStrategy as OfTrainer

        told["fabric"] = saves(OfFabric, f"{root}/fabric", state_first=False)
        told["trainer"] = saves(OfTrainer, f"{root}/trainer", state_first=True)
        told["launcher"] = hand_over(f"{root}/hand-over")

    xmp.spawn(inside, nprocs=1)
    return told


def fits(root: str) -> dict[str, Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from safepoint.manager.integrations.lightning import SafepointXLACheckpointIO

    from support.lightning_runs import fit

    on_xla: dict[str, Any] = {"accelerator": "tpu", "devices": 1, "max_epochs": 2}
    saver = ModelCheckpoint(f"{root}/own", save_top_k=-1, every_n_epochs=1)
    whole, trainer, _ = fit(
        f"{root}/run",
        safepoint={"save_every": 4},
        callbacks=[saver],
        plugins=[SafepointXLACheckpointIO()],
        **on_xla,
    )
    resumed, _, callback = fit(f"{root}/run", safepoint={"resume": 8}, **on_xla)
    assert callback is not None
    assert callback.restored is not None
    (path,) = [str(path) for path in Path(f"{root}/own").iterdir() if path.name.startswith("epoch=0")]
    again, _, _ = fit(None, plugins=[SafepointXLACheckpointIO()], ckpt_path=path, **on_xla)
    return {
        "strategy": type(trainer.strategy).__name__,
        "resumed_from": callback.restored.step,
        "whole": whole.losses,
        "resumed": resumed.losses,
        "from_checkpoint": again.losses,
    }


def saves(kind: Any, path: str, *, state_first: bool) -> dict[str, Any]:
    """Save by a strategy's own method, as global zero and as another replica, with a graph that is pending."""
    import torch_xla

    from safepoint.manager import CheckpointManager
    from safepoint.manager.integrations.lightning import SafepointXLACheckpointIO

    strategy = kind(checkpoint_io=SafepointXLACheckpointIO())
    strategy._launched = True
    lazy = torch.ones(4, 4, device=torch_xla.device()) * 2 + 1

    def save(name: str) -> None:
        state = {"lazy": lazy, "global_step": 3}
        strategy.save_checkpoint(*((state, name) if state_first else (name, state)))

    told: dict[str, Any] = {"pending before": is_pending(lazy)}
    save(f"{path}.zero")
    with CheckpointManager(f"{path}.zero") as manager:
        found = manager.restore(3).state
    assert found is not None
    told["global zero"] = {
        "pending": is_pending(lazy),
        "written": manager.root == f"{path}.zero",
        "exact": bool(torch.equal(found["lazy"], torch.full((4, 4), 3.0))),
    }
    lazy = lazy + 1
    assert is_pending(lazy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "is_global_zero", property(lambda _: False))
        save(f"{path}.another")
    told["another"] = {"pending": is_pending(lazy), "written": os.path.exists(f"{path}.another")}
    return told


def is_pending(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a graph that was not executed yet."""
    import torch_xla

    return "aten::" in torch_xla._XLAC._get_xla_tensors_text([tensor])


def hand_over(path: str) -> dict[str, bool]:
    """Call the plugin as the launcher does, on replicas whose global and local ordinals are told."""
    import torch_xla.runtime as xr

    from safepoint.manager import CheckpointManager
    from safepoint.manager.integrations.lightning import SafepointXLACheckpointIO

    def call(at: str, global_ordinal: int, local_ordinal: int) -> bool:
        before = os.listdir(at) if os.path.isdir(at) else []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(xr, "global_ordinal", lambda: global_ordinal)
            patch.setattr(xr, "local_ordinal", lambda: local_ordinal)
            SafepointXLACheckpointIO().save_checkpoint({"weight": torch.ones(2)}, at)
        return "0" in (os.listdir(at) if os.path.isdir(at) else []) and "0" not in before

    told = {f"{g} {n}": call(f"{path}/{g}-{n}/.temp.ckpt", g, n) for g, n in ((0, 0), (1, 1), (4, 0), (5, 1))}
    with CheckpointManager(f"{path}/used/.temp.ckpt") as manager:
        manager.save(1, {"x": 1})  # from here on it owns the root
        told["4 0, in use"] = call(f"{path}/used/.temp.ckpt", 4, 0)
    return told


if __name__ == "__main__":
    print(json.dumps(globals()[f"case_{sys.argv[1]}"](*sys.argv[2:])))  # noqa: T201
