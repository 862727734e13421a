"""One restore: choose a step that is sound for every process, check everything, read it, apply it, meet.

Nothing of the target is changed before every process has found that the step fits it; and no process returns before
all are done. `restore_latest` falls back past unsound steps, together.
"""

from __future__ import annotations

import errno
import json
import logging
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from safepoint.manager.adapters import wrap_array
from safepoint.manager.adapting import AdaptationReport, Adapting
from safepoint.manager.agreement import require_same
from safepoint.manager.allocating import allocate_leaves
from safepoint.manager.choosing import Candidate, Offer, choose_step, own_offer
from safepoint.manager.collecting import paused_collection
from safepoint.manager.coordination import run_together
from safepoint.manager.errors import (
    CheckpointError,
    CorruptDataError,
    IncompleteCoverageError,
    StepNotFoundError,
    StorageError,
    UnsupportedVersionError,
    error_from_json,
)
from safepoint.manager.fetching import Fetch, fetch_leaves, plan_fetches
from safepoint.manager.host_sharing import HostReading, arrange
from safepoint.manager.host_tensors import HostMemory, mapped_tensors
from safepoint.manager.options import check_step
from safepoint.manager.policies import StepInfo
from safepoint.manager.results import RestoreResult
from safepoint.manager.targets import RestoreTarget, match, refuse_extra
from safepoint.manager.unflatten import array_paths, select_structure, unflatten
from safepoint.manager.wire import path_from_json, path_to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

    from safepoint.formats.manifest import Manifest, Node, TreePath
    from safepoint.manager.adapters import ArrayLeaf
    from safepoint.manager.adapting import Adaptation
    from safepoint.manager.commit import CommittedStep
    from safepoint.manager.session import Session

__all__ = ["Latest", "Prepared", "RestoreOperation"]

logger = logging.getLogger("safepoint")

_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})


class Latest(Enum):
    """In place of a step: the one committed last. None is no step, as where nothing was committed yet."""

    STEP = "latest"


@dataclass(kw_only=True)
class RestoreOperation:
    """One restore of one process.

    Attributes:
        session: the open manager.
        step: the step asked for.
        into: the target; None returns host tensors.
        items: top-level keys to restore; None for all.
        keys: patterns of dotted paths to restore; None for all.
        adapt: how the step may differ from the target.
        host_memory: of a restore without a target.
    """

    session: Session
    step: int | Latest
    into: Mapping[str, Any] | None
    items: Collection[str] | None = None
    keys: Collection[str] | None = None
    adapt: Collection[Adaptation] = ()
    host_memory: HostMemory = "owned"
    _target_modified: bool = False
    _problems: list[str] = field(default_factory=list)
    """Directories that should be steps and are not, as the primary found them."""
    _unsound: dict[str, str] = field(default_factory=dict)
    """Attempts that some process found unsound, and why; the same on every process."""

    def run(self) -> RestoreResult | None:
        """Restore; return None where nothing was ever committed and the latest was asked for.

        Called by: all processes.
        """
        try:
            with paused_collection():  # until all that is made for each leaf is gone again
                return self._run()
        except CheckpointError as error:
            if self._target_modified:
                error.add_note("The target holds parts of a damaged step: restore a sound one before it is used.")
            raise

    def _run(self) -> RestoreResult | None:
        while True:
            chosen = self._choose()
            if chosen is None:
                return None
            prepared = Prepared(candidate=chosen)
            error = self._together("restore-check", lambda: self._prepare(prepared))  # noqa: B023 - called at once
            if error is None:
                prepared.sharing = arrange(self.session, prepared.required_manifest.files, prepared.fetches)
                error = self._together("restore-read", lambda: self._read(prepared))  # noqa: B023 - called at once
            if error is None:
                self._target_modified = False
                return self._apply(prepared)
            self._target_modified |= isinstance(error, CorruptDataError) and bool(error.target_modified)
            if not isinstance(self.step, Latest):
                raise error
            self._pass_over(chosen, error)

    def _pass_over(self, chosen: Candidate, problem: CheckpointError) -> None:
        self._unsound[chosen.attempt] = f"step {chosen.step}: {problem}"
        logger.warning("step %d is not sound, falling back to an older one: %s", chosen.step, problem)

    # -- choose ------------------------------------------------------------------------------------------------------

    def _choose(self) -> Candidate | None:
        session = self.session
        options = session.options
        private = options.root_scope == "per_process"

        def look() -> bytes:
            session.coordinator.sync_devices()
            step = None if isinstance(self.step, Latest) else check_step(self.step)
            offer = own_offer(session.committer) if session.owns_root else Offer()
            return json.dumps({"step": step, "root": "" if private else options.root, **offer.to_json()}).encode()

        def decide(payloads: Sequence[bytes]) -> bytes:
            values = [json.loads(payload) for payload in payloads]
            for name in ("step", "root"):
                require_same(name, [value[name] for value in values], doing="restore")
            offers = [Offer.from_json(value) for value in values]
            choice = choose_step(
                offers if private else offers[:1],
                step=values[0]["step"],
                unsound=self._unsound,
                root=options.root,
            )
            problems = [str(error) for error in offers[0].problems]
            return json.dumps([None if choice is None else choice.to_json(), problems]).encode()

        answer = run_together(session.coordinator, "restore-choose", options.deadline_secs, look, decide)
        choice, problems = json.loads(answer)
        if choice is not None and isinstance(self.step, Latest):
            for problem in problems:
                if problem not in self._problems:
                    logger.warning("passing over what should be a step: %s", problem)
        self._problems = problems
        return None if choice is None else Candidate.from_json(choice)

    # -- check, then read --------------------------------------------------------------------------------------------

    def _prepare(self, prepared: Prepared) -> bytes:
        session = self.session
        found = self._find(prepared.candidate)
        prepared.prefix = found.files_prefix
        prepared.manifest = session.committer.load_manifest(found)
        session.committer.check_files(found, prepared.manifest)
        coordinator = session.coordinator
        if self.into is None:
            Adapting.of(self.adapt, has_target=False)
            prepared.structure = select_structure(
                prepared.manifest.structure,
                items=self.items,
                keys=self.keys,
                process_index=coordinator.process_index,
                process_count=coordinator.process_count,
            )
            wanted = self._allocate(prepared)
            prepared.leaves = {path: leaf for path, leaf in wanted.items() if leaf is not None}
        else:
            prepared.target = match(
                prepared.manifest.structure,
                prepared.manifest.leaves,
                self.into,
                process_index=coordinator.process_index,
                process_count=coordinator.process_count,
                items=self.items,
                keys=self.keys,
                adapt=self.adapt,
            )
            prepared.leaves = dict(prepared.target.wanted)
            prepared.target.check_shared(lambda leaves: self._fetch(prepared, leaves))
        prepared.fetches = plan_fetches(prepared.manifest, prepared.leaves)
        extra = {} if prepared.target is None else prepared.target.extra
        if session.options.root_scope == "per_process":
            refuse_extra([extra])
            extra = {}
        return json.dumps([[path_to_json(path), text] for path, text in extra.items()]).encode()

    def _allocate(self, prepared: Prepared) -> dict[TreePath, ArrayLeaf | None]:
        """Make the host tensors of a restore without a target; return the leaves that are to be read."""
        manifest = prepared.required_manifest
        paths = array_paths(prepared.structure)
        entries = [entry for entry in manifest.leaves if entry.path in paths]
        mapped: dict[TreePath, torch.Tensor] = {}
        if self.host_memory == "mapped":
            mapped = mapped_tensors(self.session.storage, prepared.prefix, manifest, entries)
        fresh = allocate_leaves(manifest, [entry for entry in entries if entry.path not in mapped])
        prepared.host = {**mapped, **fresh}
        return {path: wrap_array(tensor, path) for path, tensor in fresh.items()}

    def _find(self, candidate: Candidate) -> CommittedStep:
        """Return the chosen step as this process sees it."""
        committer = self.session.committer
        for committed in committer.list_steps():
            if committed.record.attempt == candidate.attempt:
                return committed
        raise StepNotFoundError(
            f"process {self.session.coordinator.process_index} does not see this step, which process 0 does",
            step=candidate.step,
            path=self.session.options.root,
            available=tuple(sorted(item.record.step for item in committer.list_steps())),
            hint="It was deleted meanwhile, or the processes do not share one root.",
        )

    def _fetch(self, prepared: Prepared, leaves: Mapping[TreePath, ArrayLeaf]) -> None:
        manifest = prepared.required_manifest
        fetch_leaves(self.session.storage, prepared.prefix, manifest, plan_fetches(manifest, leaves))

    def _read(self, prepared: Prepared) -> bytes:
        try:
            fetch = fetch_leaves if prepared.sharing is None else prepared.sharing.fetch
            prepared.num_bytes = fetch(
                self.session.storage,
                prepared.prefix,
                prepared.required_manifest,
                prepared.fetches,
                progress=self._advance,
            )
        except StorageError as error:
            if error.errno in _GONE:  # between the check and this: the root's owner lets steps go while others read
                self._find(prepared.candidate)
            raise
        return b"[]"

    def _advance(self, num_bytes: int) -> None:
        """Learn that so many more bytes are read, here or by another process of the host; see `observed`."""

    def _together(self, name: str, work: Callable[[], bytes]) -> CheckpointError | None:
        """Do work on every process; return an error about unsound data, the same one everywhere, for the caller.

        Any other failure is raised: here as it is, elsewhere as `PeerFailedError`. `work` returns what the step has and
        this process's target has not, as JSON: an error if no other process's target has it.
        """
        unsound: list[CheckpointError] = []

        def bring() -> bytes:
            try:
                return work()
            except (
                CorruptDataError,
                IncompleteCoverageError,
                StepNotFoundError,
                StorageError,
                UnsupportedVersionError,
            ) as error:
                error.with_context(process_index=self.session.coordinator.process_index)
                unsound.append(error)
                return json.dumps(error.to_json()).encode()

        def decide(payloads: Sequence[bytes]) -> bytes:
            brought = [json.loads(payload) for payload in payloads]
            error = next((value for value in brought if isinstance(value, dict)), None)
            if error is not None:
                return json.dumps(error).encode()
            refuse_extra([{path_from_json(path): text for path, text in extra} for extra in brought])
            return b""

        answer = run_together(self.session.coordinator, name, self.session.options.deadline_secs, bring, decide)
        if not answer:
            return None
        error = unsound[0] if unsound else error_from_json(json.loads(answer))
        if name == "restore-read" and isinstance(error, CorruptDataError):
            error.target_modified = True
        return error

    # -- apply -------------------------------------------------------------------------------------------------------

    def _apply(self, prepared: Prepared) -> RestoreResult:
        session = self.session
        chosen = prepared.candidate
        state: dict[str, Any] | None = None

        def apply() -> bytes:
            nonlocal state
            if prepared.target is not None:
                prepared.target.apply()
            else:
                state = unflatten(
                    prepared.structure,
                    prepared.host,
                    process_index=session.coordinator.process_index,
                    process_count=session.coordinator.process_count,
                )
            return b""

        run_together(session.coordinator, "restore-done", session.options.deadline_secs, apply)
        info = StepInfo(step=chosen.step, sequence=chosen.sequence, attempt=chosen.attempt)
        session.remember_restore(info, prepared.required_manifest)
        return RestoreResult(
            step=chosen.step,
            metrics=chosen.metrics,
            mode=prepared.required_manifest.mode,
            num_bytes=prepared.num_bytes,
            state=state,
            skipped=(*self._problems, *self._unsound.values()),
            abandoned=chosen.abandoned,
            adapted=AdaptationReport() if prepared.target is None else prepared.target.report(),
        )


@dataclass(kw_only=True)
class Prepared:
    """What one process has looked up and made ready for the step that was chosen."""

    candidate: Candidate
    prefix: str = ""
    manifest: Manifest | None = None
    target: RestoreTarget | None = None
    structure: Mapping[TreePath, Node] = field(default_factory=dict)
    host: dict[TreePath, torch.Tensor] = field(default_factory=dict)
    leaves: dict[TreePath, ArrayLeaf] = field(default_factory=dict)
    fetches: list[Fetch] = field(default_factory=list)
    sharing: HostReading | None = None
    num_bytes: int = 0

    @property
    def required_manifest(self) -> Manifest:
        """The manifest, once it was looked up."""
        if self.manifest is None:
            raise RuntimeError("read before prepare")
        return self.manifest
