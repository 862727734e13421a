"""`CheckpointManager`: the facade. Owns the order of operations on one root; how each is done lives elsewhere."""

from __future__ import annotations

import logging
import signal
import time
from typing import TYPE_CHECKING, Any, get_args

from safepoint.manager.background import BackgroundSave
from safepoint.manager.closing import Closing
from safepoint.manager.collecting import paused_collection
from safepoint.manager.coordination import detect_coordinator
from safepoint.manager.errors import InvalidArgumentError
from safepoint.manager.host_tensors import HostMemory
from safepoint.manager.looking import LookingAtSteps
from safepoint.manager.observed import ObservedRestore, ObservedSave
from safepoint.manager.one_at_a_time import OneAtATime, one_at_a_time
from safepoint.manager.options import (
    CheckReplicas,
    CommitChoice,
    RequestedMode,
    RootScope,
    ShowProgress,
    Unchanged,
    check_choice,
    check_metrics,
    check_step,
    is_step,
    make_options,
)
from safepoint.manager.policies import OnExists, Policy, is_due
from safepoint.manager.preemption import Preemption
from safepoint.manager.restoring import Latest
from safepoint.manager.results import RestoreResult, SaveResult
from safepoint.manager.retention import RetentionWorker
from safepoint.manager.session import open_session
from safepoint.manager.staging import HostSlab

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping

    from safepoint.formats.storage import StorageOptions
    from safepoint.manager.adapting import Adaptation
    from safepoint.manager.events import Observer

__all__ = ["CheckpointManager"]

logger = logging.getLogger("safepoint")


class CheckpointManager(LookingAtSteps, Closing):
    """Saves and restores training state in one root directory, on all processes together.

    Opening, saving, restoring and closing are collective: every process calls them, in the same order. One manager
    is used by one thread of each process.

    Example:
        manager = CheckpointManager("runs/gpt", keep=KeepLast(3), save_every=1000)
        state = {"model": model, "optimizer": optimizer, "tokens": 0}
        start = manager.restore_latest(state)
        for step in range(0 if start is None else start.step + 1, num_steps):
            ...
            manager.save(step, state)
        manager.close()
    """

    def __init__(  # noqa: PLR0913 keyword-only, each with a default
        self,
        root: str | os.PathLike[str],
        *,
        keep: Policy | None = None,
        save_every: int = 1,
        mode: RequestedMode = "auto",
        format: str = "safetensors",  # noqa: A002 the field's word for it
        deadline_secs: float = 600.0,
        root_scope: RootScope = "shared",
        check_replicas: CheckReplicas = "trust",
        unchanged: Unchanged = "write",
        commit: CommitChoice = "auto",
        storage: StorageOptions | None = None,
        store: str | None = None,
        progress: ShowProgress = "auto",
        observers: Collection[Observer] = (),
    ) -> None:
        """Open the root, creating it if need be. Called by all processes.

        Args:
            root: directory of the run, whose parents are created too; or `gs://bucket/run`, `s3://bucket/run`.
            keep: which committed steps to keep; None keeps all. Policies combine with `|`.
            save_every: `save` does something on multiples of this many steps only.
            mode: "consolidated": the primary writes whole leaves, one file an item. "sharded": each process writes
                what it holds. "auto": consolidated for one process, and for a state of at most 1 GiB that process 0
                holds as a whole; sharded otherwise.
            format: of the data files.
            deadline_secs: for every meeting of processes, in seconds; longer than one process may lag behind another.
            root_scope: "shared": all processes see the same root, which is proved here. "per_process": each has a
                root on a disk of its own.
            check_replicas: of several copies of a region "trust" saves the planned writer's; "error" compares all.
            unchanged: how a step gets leaves that are the same as in the step before: "write" writes them again, "link"
                makes hard links to that step's files (docs/incremental.md).
            commit: how steps appear. "rename": a directory gets its name. "marker": a record is put last, which suits
                object stores and mounts whose rename copies. "auto": as the root can (docs/reliability.md).
            storage: how to reach an object store, beyond what the clouds' environment says.
            store: "host:port" at which processes meet that have neither torch.distributed nor XLA replicas between
                them; process 0 opens it, with RANK and WORLD_SIZE as torchrun sets them. "alone": meet nobody.
            progress: "auto": what holds the caller up for longer than a second is shown on one line of the terminal, by
                process 0, if standard error is one. "off": never.
            observers: functions told of each event on this process (`safepoint.manager.events`), on a thread of their
                own.

        Raises:
            InvalidArgumentError: an option makes no sense.
            StorageError: the root is a file, or cannot be created.
            DisagreementError: the processes opened it with different options, or see different roots.
            RendezvousTimeoutError: a process did not open it within the deadline; names it.
        """
        options = make_options(
            root,
            keep=keep,
            save_every=save_every,
            mode=mode,
            format=format,
            deadline_secs=deadline_secs,
            root_scope=root_scope,
            check_replicas=check_replicas,
            unchanged=unchanged,
            commit=commit,
            storage=storage,
            progress=progress,
            observers=tuple(observers),
        )
        self._options = options
        self._turn = OneAtATime()
        self._coordinator = detect_coordinator(store=store, deadline_secs=options.deadline_secs)
        try:
            self._session = open_session(options, self._coordinator)
        except BaseException:
            self._coordinator.close()
            raise
        self._retention = RetentionWorker(self._session.committer, options.keep)
        self._slab = HostSlab()
        self._in_flight: BackgroundSave | None = None
        self._preemptions: list[Preemption] = []
        self._closed = False

    # -- saving ------------------------------------------------------------------------------------------------------

    @one_at_a_time
    @paused_collection()  # until all that is made for each leaf is gone again
    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
        blocking: bool = True,
        on_exists: OnExists = "auto",
    ) -> SaveResult:
        """Save `state` as `step`, if it is due. Called by all processes with the same step.

        A step is due when it is a multiple of `save_every`, or forced; that is decided locally, and a step that is
        not due costs nothing. On XLA the pending graph is cut first, on every process, in both modes.

        *Blocks until* the step is committed and every process knows; with `blocking=False` until the state is copied
        to the host, when the caller may change it. One such save is in flight at a time: the next one waits for it,
        and raises its failure, if it failed. Where this process has no memory for the copy it waits for the commit.

        Args:
            step: whole number of at least 0.
            state: by item: modules, optimizers, anything with `state_dict`, tensors, plain values, containers of
                them. It is not changed.
            metrics: numbers for `KeepBest` and for people; those of process 0 count.
            force: save even if the step is not due.
            blocking: whether to wait for the commit.
            on_exists: what to do if the step is committed already. "auto": skip one that this run committed, replace
                one of a branch that was left by restoring an older step, refuse any other.

        Returns:
            What was done, on this process.

        Raises:
            UnsupportedValueError: the state holds something that cannot be kept; named before anything is written.
            InvalidArgumentError: the step is negative, or not a whole number.
            StepExistsError: the step is committed already.
            DisagreementError: the processes brought different steps, modes or leaves; names who brought what.
            RendezvousTimeoutError: a process did not come within the deadline; names it.
            PeerFailedError: another process failed; names it and its cause.
            RootInUseError: another manager saves to this root.
            AsyncSaveError: the save in flight had failed; this step was not saved.
            StorageError: the disk is full, read-only or broken.
            Every error carries `outcome`: whether the step is committed all the same.
        """
        started = time.monotonic()
        self._check_open()
        check_choice("on_exists", on_exists, get_args(OnExists))
        if not force and is_step(step) and not is_due(check_step(step), self._options.save_every, force=False):
            return SaveResult(step=int(step), saved=False, reason=f"not a multiple of {self._options.save_every}")

        def check() -> tuple[int, dict[str, float]]:
            self._finish_in_flight()
            return check_step(step), check_metrics(metrics)

        self._wait_in_flight()
        operation = ObservedSave(
            session=self._session,
            on_exists=on_exists,
            blocking=blocking,
            slab=self._slab,
            retention=self._retention,
            check=check,
        )
        skip_reason = operation.begin(state)
        if skip_reason is not None:
            return SaveResult(
                step=operation.step, saved=False, reason=skip_reason, blocked_secs=time.monotonic() - started
            )
        operation.stage()
        coordinator = self._coordinator if blocking else self._coordinator.background()
        if operation.blocking:
            operation.complete(coordinator)
        else:
            self._in_flight = BackgroundSave(operation, coordinator)
        return operation.result(blocked_secs=time.monotonic() - started)

    @one_at_a_time
    def wait(self) -> None:
        """Wait for the save in flight, if there is one. Called by all processes.

        Raises:
            AsyncSaveError: it failed; `__cause__` says why. Raised once.
        """
        self._check_open()
        self._finish_in_flight()

    def _wait_in_flight(self) -> None:
        if self._in_flight is not None:
            with self._session.telling.attended():
                self._in_flight.join()

    def _finish_in_flight(self) -> None:
        self._wait_in_flight()
        save, self._in_flight = self._in_flight, None
        if save is not None:
            save.raise_failure()

    # -- restoring ---------------------------------------------------------------------------------------------------

    def restore_latest(
        self,
        into: Mapping[str, Any] | None = None,
        *,
        items: Collection[str] | None = None,
        keys: Collection[str] | None = None,
        adapt: Collection[Adaptation] = (),
    ) -> RestoreResult | None:
        """Restore the step committed last that is sound for every process. Called by all processes.

        Steps that are not sound are passed over with a warning that names them. See `restore` for arguments.

        Returns:
            What was restored, or None when nothing was ever committed here.

        Raises:
            NoRestorableStepError: steps are committed, but none is sound. Nothing is deleted.
            StructureMismatchError: target and step differ; lists every difference. Nothing was changed.
        """
        return self._restore(
            ObservedRestore(session=self._session, step=Latest.STEP, into=into, items=items, keys=keys, adapt=adapt)
        )

    def restore(
        self,
        step: int,
        into: Mapping[str, Any] | None = None,
        *,
        items: Collection[str] | None = None,
        keys: Collection[str] | None = None,
        adapt: Collection[Adaptation] = (),
        host_memory: HostMemory = "owned",
    ) -> RestoreResult:
        """Restore one step. Called by all processes.

        Args:
            step: a committed step.
            into: the state to fill in place, on the devices and placements that its tensors have now, whatever wrote
                the step. None returns host tensors and mappings in the result's `state`.
            items: top-level keys to restore; None for all.
            keys: patterns (as in `fnmatch`) of dotted paths to restore, such as "model.layers.*"; None for all.
            adapt: `Cast`, `Partial`, `Rename`: how the step may differ from `into`. The result tells what did.
            host_memory: without `into`. "owned": read and verified. "mapped": the files are mapped where they can be,
                and read, unverified, when a tensor is looked at; a change of a tensor stays in this process.

        Raises:
            StepNotFoundError: not committed; lists the steps that are.
            StructureMismatchError: target and step differ; lists every difference. Nothing was changed.
            CorruptDataError: the step is damaged; `target_modified` says whether parts were written to the target.
            RendezvousTimeoutError, PeerFailedError, DisagreementError: as for `save`.
        """
        check_choice("host_memory", host_memory, get_args(HostMemory))
        result = self._restore(
            ObservedRestore(
                session=self._session,
                step=step,
                into=into,
                items=items,
                keys=keys,
                adapt=adapt,
                host_memory=host_memory,
            )
        )
        if result is None:
            raise RuntimeError("an explicit step is restored or refused")
        return result

    @one_at_a_time
    def _restore(self, operation: ObservedRestore) -> RestoreResult | None:
        self._check_open()
        self._wait_in_flight()
        return operation.run()

    # -- stopping and closing ----------------------------------------------------------------------------------------

    @one_at_a_time
    def preemption(self, *, signals: Collection[int] = (signal.SIGTERM,), deadline_secs: float = 15.0) -> Preemption:
        """Let a signal to any one process stop the loops of all of them at one step. Called by all processes.

        From here to the end of the `with` block (or `close`) the signals are caught; `Preemption.should_stop` tells the
        loop. docs/preemption.md has an example.

        Args:
            signals: which; () where the caller is not the main thread, or the notice comes by `Preemption.request`.
            deadline_secs: for the other processes to answer when one is signalled. If one has died, each of the others
                stops at its next step after this time.

        Raises:
            InvalidArgumentError: a signal cannot be caught, or not on this thread.
            RendezvousTimeoutError: a process did not make this call within the manager's deadline.
        """
        self._check_open()
        made = Preemption(
            self._coordinator,
            name=f"preemption-{len(self._preemptions)}",
            signals=signals,
            deadline_secs=deadline_secs,
            open_secs=self._options.deadline_secs,
            drain=self._wait_in_flight,
            tell=self._session.telling.tell,
        )
        self._preemptions.append(made)
        return made

    @one_at_a_time
    def close(self) -> None:
        """Wait for the save in flight, finish deletions, let go of the root. Idempotent. Called by all processes.

        Raises:
            AsyncSaveError: the save in flight failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._finish_in_flight()
        finally:
            for preemption in self._preemptions:
                preemption.close()
            self._retention.close(timeout_secs=min(30.0, self._options.deadline_secs))
            self._session.close()
            self._coordinator.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError(
                "this checkpoint manager is closed", path=self._options.root, hint="Open a new one."
            )
