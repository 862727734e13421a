"""A running Trainer as a state: live objects where they are large, and the rest as plain values.

Owns what of a Trainer is saved, under which names, and how it gets back into one that was just set up. Model and
optimizers are in the state themselves, so that they are saved and restored in the placements that they have. What each
process has for itself (positions in the data, timers) is kept per process.
"""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from safepoint.manager.per_process import PerProcess
from safepoint.manager.rng import RNGState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["owed_metrics", "pay", "trainer_state"]

logger = logging.getLogger("safepoint")


def trainer_state(
    trainer: Any, *, is_target: bool, owed: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the state of a Trainer whose strategy is set up: to be saved, or to be restored into.

    Args:
        trainer: during a fit.
        is_target: whether it is restored into. Then no `on_save_checkpoint` of the user's is called for it.
        owed: as of `owed_metrics`; where it is saved.
    """
    hooks = _Hooks(trainer, is_target=is_target)
    state: dict[str, Any] = {
        "model": trainer.lightning_module,
        "optimizers": list(trainer.optimizers),
        "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
        "precision": trainer.precision_plugin,
        "trainer": PerProcess(_Progress(trainer, hooks, owed), merge=_part_of),
        "hooks": hooks,  # after the model, which hooks may read
        "rng": PerProcess(RNGState(), merge=_part_of),
    }
    return state


def owed_metrics(trainer: Any) -> dict[str, torch.Tensor]:
    """Return what schedulers of the kind of ReduceLROnPlateau are to be told next, by their number.

    Lightning tells them after the hooks in which one saves, and never again after a restore.
    """
    interval, index = (
        ("epoch", trainer.current_epoch) if trainer.is_last_batch else ("step", trainer.fit_loop.batch_idx)
    )
    return {
        str(number): trainer.callback_metrics[config.monitor]
        for number, config in enumerate(trainer.lr_scheduler_configs)
        if config.reduce_on_plateau
        and config.interval == interval
        and (index + 1) % config.frequency == 0
        and config.monitor in trainer.callback_metrics
    }


def pay(trainer: Any, owed: Mapping[str, torch.Tensor]) -> None:
    """Tell schedulers what they are owed."""
    for number, metric in owed.items():
        scheduler = trainer.lr_scheduler_configs[int(number)].scheduler
        trainer.lightning_module.lr_scheduler_step(scheduler, metric)


def _part_of(parts: Sequence[Any], process_index: int, process_count: int) -> Any:
    """Return the part of a process, among another number of them than saved."""
    del process_count
    return parts[process_index % len(parts)]


class _Progress:
    """What a process of a Trainer has for itself: loops with their data loaders, callbacks, the data module."""

    def __init__(self, trainer: Any, hooks: _Hooks, owed: Mapping[str, torch.Tensor]) -> None:
        self._trainer = trainer
        self._hooks = hooks
        self._owed = owed

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        states = ((callback.state_key, callback.state_dict()) for callback in trainer.callbacks)
        return {
            "loop": trainer.fit_loop.state_dict(),
            "callbacks": {key: state for key, state in states if state},
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "hooks": self._hooks.plain(),
            "owed": dict(self._owed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(state["loop"])
        callbacks = dict(state["callbacks"])
        for callback in trainer.callbacks:
            saved = callbacks.pop(callback.state_key, None)
            if saved is not None:
                callback.load_state_dict(saved)
        if callbacks:
            logger.warning("the step has states of callbacks that this Trainer has not: %s", ", ".join(callbacks))
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        self._hooks.remember(state["hooks"])
        pay(trainer, state["owed"])


class _Hooks:
    """What `on_save_checkpoint` of the module and of callbacks put into Lightning's checkpoint.

    They are called with a checkpoint as Lightning makes it. What they add to it, or put in the place of an entry, is
    kept: tensors once, plain values for each process (by `_Progress`).
    """

    def __init__(self, trainer: Any, *, is_target: bool) -> None:
        self._trainer = trainer
        self._is_target = is_target
        self._own: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self._added().items() if _holds_tensors(value)}

    def plain(self) -> dict[str, Any]:
        """Return what holds no tensors."""
        return {name: value for name, value in self._added().items() if not _holds_tensors(value)}

    def remember(self, plain: Mapping[str, Any]) -> None:
        """Note what `plain` had returned; `load_state_dict`, which comes after it, hands it on."""
        self._own = dict(plain)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        added = {**(self._own or {}), **state}
        checkpoint = {**self._checkpoint(), **added}
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
        trainer.lightning_module.on_load_checkpoint(checkpoint)

    def _added(self) -> dict[str, Any]:
        if self._is_target:
            return {}
        if self._own is None:
            trainer = self._trainer
            before = self._checkpoint()
            checkpoint = dict(before)
            for callback in trainer.callbacks:
                callback.on_save_checkpoint(trainer, trainer.lightning_module, checkpoint)
            trainer.lightning_module.on_save_checkpoint(checkpoint)
            absent = object()
            self._own = {name: value for name, value in checkpoint.items() if before.get(name, absent) is not value}
        return self._own

    def _checkpoint(self) -> dict[str, Any]:
        import lightning  # noqa: PLC0415 - whoever has a Trainer has imported it

        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": trainer.lightning_module.state_dict(),
            "loops": {"fit_loop": trainer.fit_loop.state_dict()},
            "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in _pytree.tree_leaves(value))
