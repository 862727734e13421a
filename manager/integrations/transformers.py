"""Hugging Face transformers: a callback that saves a Trainer into a root of ours, and lets it go on from there.

Owns when a Trainer is saved, and what of it. A save is made where a restore sets in again: at the beginning of the next
step, when all that follows a step (logs, evaluation, best metric) is done, or at the beginning of the next epoch.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import tempfile
from typing import TYPE_CHECKING, Any

from safepoint.manager.checkpoint_manager import CheckpointManager
from safepoint.manager.errors import InvalidArgumentError
from safepoint.manager.integrations.requiring import missing_package
from safepoint.manager.per_process import PerProcess
from safepoint.manager.rng import RNGState

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState, TrainerState
except ModuleNotFoundError as error:
    raise missing_package(error, extra="huggingface") from error

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from safepoint.manager.preemption import Preemption
    from safepoint.manager.results import RestoreResult

__all__ = ["SafepointCallback"]

logger = logging.getLogger("safepoint")

_EXIT_STATUS = 128 + signal.SIGTERM  # as of a process that the signal ended
_PER_PROCESS_FIELDS = ("is_local_process_zero", "is_world_process_zero")


class SafepointCallback(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
    """Saves a `transformers.Trainer` into a root, and ends all processes at one step when preempted.

    Give the Trainer `save_strategy="no"`, so that it writes no checkpoints of its own, and start it with

        trainer.train(resume_from_checkpoint=safepoint.resume(trainer))

    Model, optimizer, scheduler, loss scaler, the Trainer's state and random generators are saved; the Trainer finds its
    place in the data by itself, from the number of the step. A run that was killed and is started again goes on as if
    it had not been. Steps are numbered by `state.global_step`.

    Args:
        root: directory of the run.
        save_every: save when this many steps were taken.
        save_after_evaluation: save after each evaluation; only these saves have metrics, for `KeepBest`.
        blocking: whether a save waits for its commit.
        signals: that preempt the run; () where it does not run on the main thread.
        options: of `CheckpointManager`: `keep`, `mode`, `format`, `deadline_secs`, …

    Attributes:
        manager: the open manager, from `resume` to the end of the training.
        restored: what the training went on from; None when it began anew.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_every: int | None = None,
        save_after_evaluation: bool = True,
        blocking: bool = True,
        signals: Collection[int] = (signal.SIGTERM,),
        **options: Any,
    ) -> None:
        if save_every is not None and (type(save_every) is not int or save_every < 1):
            raise InvalidArgumentError(f"save_every must be an int of at least 1, or None, got {save_every!r}")
        self.manager: CheckpointManager | None = None
        self.restored: RestoreResult | None = None
        self._root = root
        self._save_every = save_every
        self._save_after_evaluation = save_after_evaluation
        self._blocking = blocking
        self._signals = tuple(signals)
        self._options = options
        self._trainer: Any = None
        self._preemption: Preemption | None = None
        self._metrics: dict[str, float] | None = None
        self._is_due = False
        self._is_ending = False
        self._saved: int | None = None
        self._random: dict[str, Any] | None = None
        self._place: tempfile.TemporaryDirectory[str] | None = None

    # -- resuming ----------------------------------------------------------------------------------------------------

    def resume(self, trainer: Any, *, step: int | None = None) -> str | None:
        """Restore the model, and return what `train(resume_from_checkpoint=...)` wants. Called by all processes.

        Args:
            trainer: which has this callback.
            step: to go on from; None for the latest.

        Returns:
            A directory that tells the Trainer its place; None when nothing was committed yet.

        Raises:
            StepNotFoundError: the step asked for is not committed.
            StructureMismatchError: the model is another one; nothing was changed.
            InvalidArgumentError: the Trainer loads its parts itself (FSDP, DeepSpeed), or has not this callback.
        """
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise InvalidArgumentError(
                "the Trainer loads models of FSDP and DeepSpeed from files of its own",
                hint="Shard the model yourself, and use a CheckpointManager in a loop of yours.",
            )
        if self not in trainer.callback_handler.callbacks:
            raise InvalidArgumentError("this callback is not the Trainer's", hint="Trainer(..., callbacks=[it])")
        self._trainer = trainer
        self.manager = CheckpointManager(self._root, **self._options)
        found = _Progress(trainer)
        target = {"model": trainer.model, "trainer": PerProcess(found, merge=_first)}
        items = list(target)
        if step is None:
            self.restored = self.manager.restore_latest(target, items=items)
        else:
            self.restored = self.manager.restore(step, target, items=items)
        if self.restored is None:
            return None
        self._place = tempfile.TemporaryDirectory(prefix="safepoint-resume-")
        _leave_place(self._place.name, trainer, found.state)
        return self._place.name

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore what the Trainer has made meanwhile; begin to watch for a preemption."""
        del args, control, kwargs
        if self.manager is None:
            raise InvalidArgumentError(
                "the Trainer was not introduced to SafepointCallback",
                hint="trainer.train(resume_from_checkpoint=safepoint.resume(trainer))",
            )
        if self.restored is not None:
            if state.global_step != self.restored.step:
                raise InvalidArgumentError(
                    f"the Trainer is at step {state.global_step}, and step {self.restored.step} was restored",
                    hint="Pass what resume() returned: trainer.train(resume_from_checkpoint=safepoint.resume(trainer))",
                )
            into = self._parts()
            into["rng"] = PerProcess(RNGState(), merge=_first)
            self.manager.restore(self.restored.step, into, items=list(into))
            self._random = RNGState().state_dict()
        self._is_due = False
        if self._signals:
            self._preemption = self.manager.preemption(signals=self._signals)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save what the end of the last epoch owes; go on with the random numbers of a step at the end of one."""
        del args, control, kwargs
        self._save_if_due(state)
        if self._random is not None:
            RNGState().load_state_dict(self._random)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save what the last step owes; go on with the random numbers of a step inside an epoch."""
        del args, control, kwargs
        self._save_if_due(state)
        if self._random is not None:
            if state.epoch is not None and state.epoch % 1:  # the data's iterator was made before, and has drawn
                RNGState().load_state_dict(self._random)
            self._random = None

    # -- saving ------------------------------------------------------------------------------------------------------

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note whether the step is due; where the run is preempted, save at once, or after the step's log, and end."""
        del args, kwargs
        self._metrics = None
        self._is_ending = self._preemption is not None and self._preemption.should_stop(state.global_step)
        if self._is_ending and not control.should_log:
            self._end(state)
        if self._save_every is not None and state.global_step % self._save_every == 0:
            self._is_due = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End where the run is preempted."""
        del args, control, kwargs
        if self._is_ending:
            self._end(state)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        """Note the metrics of the step."""
        del args, state, control, kwargs
        self._metrics = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        self._is_due = self._is_due or self._save_after_evaluation

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the end, if it is not saved yet, and let go of the root."""
        del args, control, kwargs
        self._is_due = self._is_due or (self._save_every is not None and self._saved != state.global_step)
        self._save_if_due(state)
        assert self.manager is not None
        self.manager.close()
        self.manager = self._preemption = None
        if self._place is not None:
            self._place.cleanup()

    def _save_if_due(self, state: Any) -> None:
        if self._is_due and self._trainer is not None:
            self._save(state)

    def _save(self, state: Any) -> None:
        assert self.manager is not None
        self._is_due = False
        self._saved = state.global_step
        self._trainer.store_flos()
        saved = {
            "model": self._trainer.model,
            **self._parts(),
            "trainer": PerProcess(_Progress(self._trainer), merge=_first),
            "rng": PerProcess(RNGState(), merge=_first),
        }
        self.manager.save(state.global_step, saved, metrics=self._metrics, force=True, blocking=self._blocking)

    def _parts(self) -> dict[str, Any]:
        trainer = self._trainer
        parts = {"optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer)}  # inside accelerate's
        parts["scheduler"] = trainer.lr_scheduler
        if trainer.accelerator.scaler is not None:
            parts["scaler"] = trainer.accelerator.scaler
        return parts

    def _end(self, state: Any) -> None:
        assert self.manager is not None
        assert self._preemption is not None
        reason = self._preemption.reason
        self._save(state)
        self.manager.close()
        logger.warning("the training ends at step %d, which is saved: %s", state.global_step, reason)
        raise SystemExit(_EXIT_STATUS)


class _Progress:
    """The Trainer's own state, as it would write it to `trainer_state.json`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {name: value for name, value in vars(trainer.state).items() if name not in _PER_PROCESS_FIELDS}
        callbacks: dict[str, list[Any]] = {}
        for one in (*trainer.callback_handler.callbacks, trainer.control):
            if isinstance(one, ExportableState):
                callbacks.setdefault(type(one).__name__, []).append(one.state())
        known = {field.name for field in dataclasses.fields(trainer.state)}
        return {**{name: value for name, value in state.items() if name in known}, "stateful_callbacks": callbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)


def _first(parts: Sequence[Any], process_index: int, process_count: int) -> Any:
    """Return the part of a process, among another number of them than saved."""
    del process_count
    return parts[process_index % len(parts)]


def _leave_place(folder: str, trainer: Any, state: Mapping[str, Any]) -> None:
    """Fill a directory from which the Trainer reads its place, and no weights: those are in the model already."""
    from safetensors.torch import save_file  # noqa: PLC0415 - transformers has it
    from transformers.trainer import TRAINER_STATE_NAME  # noqa: PLC0415 - as above
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME  # noqa: PLC0415 - as above

    TrainerState(**state).save_to_json(os.path.join(folder, TRAINER_STATE_NAME))
    save_file({}, os.path.join(folder, "none.safetensors"))
    index = {"weight_map": dict.fromkeys(trainer.model.state_dict(), "none.safetensors")}
    with open(os.path.join(folder, SAFE_WEIGHTS_INDEX_NAME), "w", encoding="utf-8") as file:
        json.dump(index, file)
