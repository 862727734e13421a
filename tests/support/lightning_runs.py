"""Small Lightning fits: a module that writes down its losses, and a data loader that goes on inside an epoch."""

from __future__ import annotations

import logging
import os
import signal
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from safepoint.manager.integrations.lightning import SafepointCallback

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["ResumableLoader", "Told", "fit"]

NUM_BATCHES = 6
BATCH = 4

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.WARNING)  # it tells at length what hardware it sees


class ResumableLoader(DataLoader[Any]):
    """Draws the order of an epoch again, and leaves out what was had of it."""

    order: torch.Tensor | None = None
    num_had = 0
    num_to_skip = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        now = torch.get_rng_state()
        num_to_skip, self.num_to_skip = self.num_to_skip, 0
        if num_to_skip and self.order is not None:
            torch.set_rng_state(self.order)
        else:
            self.order = now
        batches = super().__iter__()
        for _ in range(num_to_skip):
            next(batches)
        if num_to_skip:
            torch.set_rng_state(now)
        self.num_had = num_to_skip
        for batch in batches:
            self.num_had += 1
            yield batch
        self.num_had = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "num_had": self.num_had}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.num_to_skip = state["order"], state["num_had"]


class Told(pl.LightningModule):  # type: ignore[misc]  # lightning's types are not followed
    """Dropout, batch statistics and a schedule: all that a resumed run can get wrong shows in its losses.

    Args:
        ends_at: batch (counted over the fit) before which the process gets the signal.
        plateau: interval of a scheduler that follows the validation's loss, "" for one by the step.
    """

    def __init__(self, *, ends_at: int = -1, ends_by: int = signal.SIGKILL, plateau: str = "") -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        self.losses: list[tuple[int, float, float]] = []
        self.note = ""
        self._ends_at = ends_at
        self._ends_by = ends_by
        self._plateau = plateau

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        del batch_idx
        if self._trainer.fit_loop.total_batch_idx == self._ends_at:
            os.kill(os.getpid(), self._ends_by)
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.losses.append((self.global_step, loss.item(), self.optimizers().param_groups[0]["lr"]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        del batch_idx
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedulers = torch.optim.lr_scheduler
        if self._plateau:
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            how = {"scheduler": plateau, "interval": self._plateau, "monitor": "val_loss"}
        else:
            how = {"scheduler": schedulers.CosineAnnealingLR(optimizer, 50), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": how}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = f"saved at {self.global_step}"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]


def _data(num_batches: int, seed: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(num_batches * BATCH, 4, generator=drawn), torch.randn(num_batches * BATCH, 1, generator=drawn)
    )


def fit(
    root: Path | str | None,
    *,
    kind: type[Told] = Told,
    told: dict[str, Any] | None = None,
    safepoint: dict[str, Any] | None = None,
    **choices: Any,
) -> tuple[Told, pl.Trainer, SafepointCallback | None]:
    """Fit a model from the same start, with a callback of ours or none."""
    pl.seed_everything(7, verbose=False)
    model = kind(**(told or {}))
    callback = None if root is None else SafepointCallback(root, **(safepoint or {}))
    others = choices.pop("callbacks", [])
    ckpt_path = choices.pop("ckpt_path", None)
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 3,
        "logger": False,
        "enable_checkpointing": callback is not None or bool(others),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [*others, *([callback] if callback else [])],
    }
    trainer = pl.Trainer(**{**settings, **choices})
    world = trainer.world_size
    loader = ResumableLoader(_data(NUM_BATCHES * world, 0), batch_size=BATCH, shuffle=world == 1)
    trainer.fit(model, loader, DataLoader(_data(2 * world, 1), batch_size=BATCH), ckpt_path=ckpt_path)
    return model, trainer, callback
