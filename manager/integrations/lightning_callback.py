"""`SafepointCallback`: a Lightning Trainer that saves into a root of ours, resumes from it and ends at a preemption.

Owns when a Trainer is saved and when it is restored, in the order of Lightning's hooks. What of it, is
`lightning_state`'s.
"""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING, Any, Literal

from safepoint.manager.checkpoint_manager import CheckpointManager
from safepoint.manager.errors import InvalidArgumentError
from safepoint.manager.integrations.lightning_state import owed_metrics, pay, trainer_state
from safepoint.manager.integrations.requiring import missing_package
from safepoint.manager.rng import RNGState

try:
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.utilities.exceptions import SIGTERMException
except ModuleNotFoundError as error:
    raise missing_package(error, extra="lightning") from error

if TYPE_CHECKING:
    import os
    from collections.abc import Collection

    from safepoint.manager.preemption import Preemption
    from safepoint.manager.results import RestoreResult

__all__ = ["SafepointCallback"]

logger = logging.getLogger("safepoint")

_EXIT_STATUS = 128 + signal.SIGTERM  # as of a process that the signal ended
_UNSUPPORTED = ("FSDPStrategy", "DeepSpeedStrategy")


class SafepointCallback(Checkpoint):  # type: ignore[misc]  # lightning's types are not followed
    """Saves a Trainer into a root, resumes from its latest step, and ends all processes at one step when preempted.

    Steps are numbered by `trainer.global_step`. Model, optimizers, schedulers, loops, callbacks, data module, precision
    and random generators are saved; a run that was killed and is started again goes on as if it had not been.

    One is for one Trainer. `Trainer(callbacks=[SafepointCallback(...)], enable_checkpointing=...)`: being a
    `Checkpoint`, it takes the place of Lightning's own `ModelCheckpoint`.

    Args:
        root: directory of the run.
        save_every: save when this many optimizer steps were taken. Where a validation follows, after it.
        save_after_validation: save after each validation in the fit; only these saves have metrics, all of
            `trainer.callback_metrics`, for `KeepBest`.
        resume: "latest": go on from the latest step, if there is one. A number: from that step. None: begin anew.
        blocking: whether a save waits for its commit.
        signals: that preempt the run; () where it does not run on the main thread.
        options: of `CheckpointManager`: `keep`, `mode`, `format`, `deadline_secs`, …

    Attributes:
        manager: the open manager, during a fit.
        restored: what the fit went on from; None when it began anew.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_every: int | None = None,
        save_after_validation: bool = True,
        resume: Literal["latest"] | int | None = "latest",
        blocking: bool = True,
        signals: Collection[int] = (signal.SIGTERM,),
        **options: Any,
    ) -> None:
        super().__init__()
        if save_every is not None and (type(save_every) is not int or save_every < 1):
            raise InvalidArgumentError(f"save_every must be an int of at least 1, or None, got {save_every!r}")
        self.manager: CheckpointManager | None = None
        self.restored: RestoreResult | None = None
        self._root = root
        self._save_every = save_every
        self._save_after_validation = save_after_validation
        self._resume = resume
        self._blocking = blocking
        self._signals = tuple(signals)
        self._options = options
        self._preemption: Preemption | None = None
        self._handlers: dict[int, Any] = {}
        self._random: dict[str, Any] | None = None
        self._step = 0
        self._saved: int | None = None
        self._metrics: dict[str, Any] | None = None
        self._is_due = False
        self._is_ending = False

    # -- opening and resuming ----------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Open the root. The processes can meet from here on."""
        del pl_module
        if stage != "fit":
            return
        for kind in type(trainer.strategy).__mro__:
            if kind.__name__ in _UNSUPPORTED:
                raise InvalidArgumentError(
                    f"SafepointCallback does not work with {kind.__name__}",
                    hint="Its modules hide their parameters. Use ModelParallelStrategy, which is FSDP2.",
                )
        # Lightning replaces these later by ones that broadcast inside a signal handler.
        self._handlers = {number: signal.getsignal(number) for number in self._signals}
        self.manager = CheckpointManager(self._root, **self._options)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore: strategy, model and optimizers are set up, and no loop has begun."""
        del pl_module
        assert self.manager is not None
        if trainer.ckpt_path is not None and self._resume is not None:
            raise InvalidArgumentError(
                "both `fit(ckpt_path=...)` and SafepointCallback would restore this Trainer",
                hint="Give one of them: SafepointCallback(..., resume=None), or no ckpt_path.",
            )
        state = trainer_state(trainer, is_target=True)
        if self._resume == "latest":
            self.restored = self.manager.restore_latest(state)
        elif self._resume is not None:
            self.restored = self.manager.restore(self._resume, state)
        self._step = trainer.global_step
        if self.restored is not None and _is_inside_epoch(trainer):
            self._random = RNGState().state_dict()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch for a preemption; go on with the random numbers."""
        del pl_module
        assert self.manager is not None
        if self._random is not None:  # the loop has made the iterators of an epoch that was begun before, and drawn
            RNGState().load_state_dict(self._random)
            self._random = None
        if self._signals:
            if threading.current_thread() is threading.main_thread():
                for number, handler in self._handlers.items():
                    if handler is not None:  # of C code: it cannot be put back
                        signal.signal(number, handler)
            self._preemption = self.manager.preemption(signals=self._signals)
        del trainer

    # -- saving ------------------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if a step was taken and is due; later, where a validation or the end of the epoch comes first."""
        del pl_module, outputs, batch, batch_idx
        step, former = trainer.global_step, self._step
        if step == former:
            return  # gradients are being accumulated
        self._step = step
        self._metrics = None
        every = self._save_every
        self._is_due = self._is_due or (every is not None and step // every != former // every)
        self._is_ending = self._preemption is not None and self._preemption.should_stop(step)
        # Lightning loses an epoch that it resumes at its last batch, and takes a validation that was due for done.
        if not trainer.is_last_batch and (self._is_ending or not _validation_follows(trainer)):
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Save after a validation in the fit."""
        del pl_module
        if trainer.sanity_checking or trainer.state.fn != "fit" or self.manager is None:
            return
        self._metrics = {name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        self._is_due = self._is_due or self._save_after_validation
        if not trainer.is_last_batch:
            self._save_if_due(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save what was due at the last batch, or after the validation that followed it."""
        del pl_module
        self._save_if_due(trainer)
        if trainer.fit_loop.restarting:  # in an epoch that was gone on with, Lightning leaves this out
            pay(trainer, owed_metrics(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the end of the fit, if it is not saved yet."""
        del pl_module
        if self._preemption is not None:
            self._preemption.close()
            self._preemption = None
        if self._save_every is not None and self._step and self._saved != self._step:
            self._save(trainer_state(trainer, is_target=False))

    def _save_if_due(self, trainer: Any) -> None:
        if self._is_due or self._is_ending:
            self._is_due = False
            self._save(trainer_state(trainer, is_target=False, owed=owed_metrics(trainer)))
        if self._is_ending:
            self._end(trainer)

    def _save(self, state: dict[str, Any]) -> None:
        assert self.manager is not None
        self.manager.save(self._step, state, metrics=self._metrics, force=True, blocking=self._blocking)
        self._saved = self._step

    # -- ending ------------------------------------------------------------------------------------------------------

    def _end(self, trainer: Any) -> None:
        assert self.manager is not None
        assert self._preemption is not None
        self.manager.wait()
        logger.warning("the fit ends at step %d, which is saved: %s", trainer.global_step, self._preemption.reason)
        raise SIGTERMException(_EXIT_STATUS)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let go of the root, after the last save is committed."""
        del trainer, pl_module, stage
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let go of the root."""
        del trainer, pl_module
        self._close(exception)

    def _close(self, exception: BaseException | None = None) -> None:
        manager, self.manager = self.manager, None
        self._preemption = None
        if manager is not None:
            manager.__exit__(None if exception is None else type(exception), exception, None)


def _is_inside_epoch(trainer: Any) -> bool:
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.current.ready) and not progress.is_last_batch


def _validation_follows(trainer: Any) -> bool:
    """Say whether the loop validates after this batch.

    A save before that would not be one to go on from exactly: Lightning takes a validation that was due as done.
    """
    if trainer._val_check_time_interval is not None:  # noqa: SLF001  # by the clock: not the same on all processes
        return False
    loop = trainer.fit_loop
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))  # noqa: SLF001  # it has no public name
