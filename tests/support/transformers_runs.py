"""A tiny language model and its Trainer; its losses are in `trainer.state.log_history`."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

if TYPE_CHECKING:
    from pathlib import Path

    from safepoint.manager.integrations.transformers import SafepointCallback

__all__ = ["CONFIG", "losses_of", "make_model", "train"]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # else accelerate gives each process as many threads as there are cores
CONFIG = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class _Texts(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self._ids = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


class _Ending(transformers.TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
    """Sends the process a signal in a step."""

    def __init__(self, at: int, by: int) -> None:
        self._at = at
        self._by = by

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        if state.global_step == self._at:
            os.kill(os.getpid(), self._by)
        if 0 <= self._at <= state.global_step:
            time.sleep(0.05)  # a step of a usual length: to agree where to stop takes 0.2 s


def make_model(seed: int = 0) -> GPT2LMHeadModel:
    """Return the model, with dropout."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(CONFIG)


def train(
    output: Path,
    callback: SafepointCallback | None,
    *,
    step: int | None = None,
    ends_at: int = -1,
    ends_by: int = signal.SIGKILL,
    **choices: Any,
) -> Trainer:
    """Train two epochs of five steps (or as `choices` say), from the same start."""
    settings = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_find_unused_parameters": False,
    }
    arguments = TrainingArguments(str(output / "unused"), **{**settings, **choices})
    callbacks = [_Ending(ends_at, ends_by), *([callback] if callback else [])]
    trainer = Trainer(make_model(), arguments, train_dataset=_Texts(20), eval_dataset=_Texts(4), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=callback.resume(trainer, step=step) if callback else None)
    return trainer


def losses_of(trainer: Trainer) -> list[tuple[Any, ...]]:
    """Return step, loss and learning rate (or the evaluation's loss) of each entry of the log but the summary."""
    log = trainer.state.log_history[:-1]
    return [(one["step"], one.get("loss"), one.get("learning_rate"), one.get("eval_loss")) for one in log]
