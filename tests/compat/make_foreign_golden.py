"""Write checkpoints with the tools of others, once: `python tests/compat/make_foreign_golden.py`.

Needs torch_xla, lightning and transformers. `foreign/versions.json` says which versions wrote what is there. Values
follow from names and shapes (`filled`), so that the tests know them without the tools.
"""

# ruff: noqa: PLC0415, TID251 - each kind needs a library of its own, and the peers' are banned elsewhere

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

FOREIGN = Path(__file__).parent / "foreign"
STEP = 12
TOOLS = ("torch", "torch_xla", "lightning", "transformers", "safetensors")


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    """Return eighths, from `start` eighths on."""
    count = torch.Size(shape).numel()
    return (torch.arange(start, start + count).reshape(shape) / 8).to(dtype)


def fill(module: torch.nn.Module) -> None:
    """Set each parameter and buffer to eighths that begin with its place in the state dict."""
    with torch.no_grad():
        for index, value in enumerate(module.state_dict().values()):
            value.copy_(filled(tuple(value.shape), value.dtype, index))


def net() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    fill(model)
    return model


def make_torch(folder: Path) -> None:
    """torch.save, with zip and as before it; xm.save of tensors on an XLA device."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    state = {"model": net().state_dict(), "epoch": 3, "betas": (0.5, 0.75), "half": filled((3,), torch.bfloat16)}
    torch.save(state, folder / "zip.pt")
    torch.save(state, folder / "before-zip.pt", _use_new_zipfile_serialization=False)
    model = net().to(torch_xla.device())
    xm.save({**state, "model": model.state_dict()}, folder / "xm-save.pt")


def make_lightning(folder: Path) -> None:
    """A Trainer's checkpoint after two steps, with hyper-parameters, an optimizer and a callback's state."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, width: int, names: tuple[str, ...] = ("a", "b")) -> None:  # noqa: ARG002
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Linear(5, width)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch).sum()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.5)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    module = Module(3)
    trainer = lightning.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(monitor=None, save_top_k=0)],
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(8, 5), batch_size=2))
    fill(module)
    for state in trainer.optimizers[0].state.values():
        state["exp_avg"].copy_(filled(tuple(state["exp_avg"].shape), start=100))
        state["exp_avg_sq"].copy_(filled(tuple(state["exp_avg_sq"].shape), start=200))
    trainer.save_checkpoint(folder / "trainer.ckpt")


def make_xlafsdp(folder: Path) -> None:
    """What Lightning's XLAFSDPStrategy writes on two ranks: flattened, by parameter, and by rows of each parameter."""
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    options: dict[str, dict[str, Any]] = {
        "flattened": {"flatten_parameters": True},
        "parameters": {"flatten_parameters": False},
        "rows": {"flatten_parameters": False, "shard_param_on_dim_0": True},
    }
    for kind, chosen in options.items():
        (folder / kind).mkdir()
        for rank in range(2):
            # A rank's shards follow from its number alone: no collective runs before the first forward.
            sharding = {"sharding_groups": [[0, 1]], "sharding_rank": rank, "sharding_world_size": 2}
            inner = XlaFullyShardedDataParallel(net()[0], **chosen, **sharding)
            model = XlaFullyShardedDataParallel(
                torch.nn.Sequential(inner, *list(net())[1:]), buffer_dtype=torch.bfloat16, **chosen, **sharding
            )
            state = {
                "model": model.state_dict(),
                "shard_metadata": model.get_shard_metadata(),
                "optimizer": torch.optim.AdamW(model.parameters(), lr=0.5).state_dict(),
                "epoch": 3,
                "rank_seed": 100 + rank,
            }
            from lightning.fabric.plugins.io.xla import XLACheckpointIO

            path = folder / kind / f"checkpoint_rank-{rank:08d}-of-{2:08d}.pth"
            XLACheckpointIO().save_checkpoint(state, path)


def make_xla_manager(folder: Path) -> None:
    """torch_xla's experimental CheckpointManager, on a mesh of eight CPU devices."""
    import numpy as np
    import torch.distributed as dist
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from torch_xla.experimental.distributed_checkpoint import CheckpointManager

    xr.use_spmd()
    dist.init_process_group("gloo", init_method=f"file://{folder}/.group", rank=0, world_size=1)
    mesh = xs.Mesh(np.arange(8), (4, 2), ("a", "b"))
    leaves = {"even": filled((8, 4)), "uneven": filled((7, 5), torch.bfloat16), "replicated": filled((3,))}
    state: dict[str, Any] = {"leaves": {name: value.to(torch_xla.device()) for name, value in leaves.items()}}
    xs.mark_sharding(state["leaves"]["even"], mesh, ("a", "b"))
    xs.mark_sharding(state["leaves"]["uneven"], mesh, ("a", "b"))
    state["host"] = filled((2, 2))
    state["epoch"] = 3
    CheckpointManager(str(folder), save_interval=1, chkpt_on_preemption=False).save(STEP, state, force=True)
    dist.destroy_process_group()
    (folder / ".group").unlink(missing_ok=True)


def _dcp_rank(rank: int, folder: str) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{folder}/.group", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "model": {"rows": distribute_tensor(filled((5, 3)), mesh, [Shard(0)]), "whole": filled((3,), torch.bfloat16)},
        "nested": [{"x": "text", "n": 5}],
        "epoch": 3,
    }
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    dist.destroy_process_group()


def make_dcp(folder: Path) -> None:
    """torch.distributed.checkpoint, two processes."""
    torch.multiprocessing.spawn(_dcp_rank, (str(folder),), nprocs=2)
    (folder / ".group").unlink(missing_ok=True)


def make_huggingface(folder: Path) -> None:
    """A tiny GPT-2 with tied weights, by `save_pretrained`: one file, and several with an index."""
    import transformers

    config = transformers.GPT2Config(vocab_size=11, n_positions=4, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    fill(model)
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "several", max_shard_size="2KB")


KINDS = {name.removeprefix("make_"): made for name, made in list(globals().items()) if name.startswith("make_")}


def main() -> None:
    if len(sys.argv) > 1:
        KINDS[sys.argv[1]](Path(sys.argv[2]))
        return
    for kind in KINDS:
        folder = FOREIGN / kind
        if folder.exists():
            continue  # never written again
        environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8" if kind == "xla_manager" else "1"}
        with tempfile.TemporaryDirectory() as made:  # some write down where they were
            subprocess.run([sys.executable, __file__, kind, made], env=environment, check=True)
            shutil.copytree(made, folder)
        (folder / "versions.json").write_text(json.dumps({tool: version(tool) for tool in TOOLS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
