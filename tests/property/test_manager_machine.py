"""A state machine on the real manager: save, overwrite, crash, restore, retention, reopen, against a dict.

A crash is a storage that does nothing more from some call on, as if the process had been killed there; then a new run
opens the root. Whatever it finds must be what some save had been given, whole; and nothing that was committed before
and that the policy keeps may be gone.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from safepoint.formats.storage import MemoryObjects
from safepoint.formats.storage.local import LocalStorage
from safepoint.manager import CheckpointManager, KeepEvery, KeepLast, session
from safepoint.manager.commit import Committer
from safepoint.manager.errors import AsyncSaveError, CheckpointError, StepExistsError
from safepoint.manager.owner import Owner
from safepoint.manager.unsettled import read_marks

from support.faulty_storage import Fail, FaultyStorage
from support.strategies import same_content

if TYPE_CHECKING:
    from safepoint.formats.storage import Storage

KEEP_LAST = 2
KEEP_EVERY = 4
POLICY = KeepLast(KEEP_LAST) | KeepEvery(KEEP_EVERY)

steps = st.integers(0, 9)
calls = st.integers(1, 40)
modes = st.sampled_from(["consolidated", "sharded"])


def state_of(seed: int) -> dict[str, Any]:
    """Return a state that tells by each of its parts which save it belongs to."""
    weight = torch.full((3, 2), float(seed))
    return {
        "model": {"weight": weight, "tied": weight, "row": weight[1], "of.its.own": torch.tensor(seed)},
        "frozen": torch.arange(3000.0),  # larger than a header, so that its file is worth a link
        "names": [f"save {seed}"] * (seed % 3),
        "seed": seed,
    }


class Checkpoints(RuleBasedStateMachine):
    unchanged: Any = "write"

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.mkdtemp()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(session, "LocalStorage", self.make_storage)
        self.storage: Any = None
        self.manager: Any = None
        self.committed: dict[int, int] = {}  # step → seed
        self.order: list[int] = []  # steps by their commits, the last one last
        self.restored: int | None = None  # kept until this run commits
        self.behind: tuple[int, int] | None = None  # step and seed of a save in flight
        self.num_saves = 0

    def make_storage(self, root: Any) -> Storage:
        self.storage = FaultyStorage(self.make_inner(root), at=None, times=1, fault=Fail())
        return self.storage

    def make_inner(self, root: Any) -> Storage:
        return LocalStorage(root)

    def teardown(self) -> None:
        self.quiet()
        if self.manager is not None:
            self.manager.close()
        self.patch.undo()
        shutil.rmtree(self.root, ignore_errors=True)  # a thread may still be deleting

    # -- the oracle ----------------------------------------------------------------------------------------------------

    def note_commit(self, step: int, seed: int) -> None:
        self.committed[step] = seed
        self.order = [other for other in self.order if other != step] + [step]
        self.restored = None

    def must_be_there(self) -> list[int]:
        kept = {*self.order[-KEEP_LAST:], self.restored}
        return [step for step in self.order if step % KEEP_EVERY == 0 or step in kept]

    def one_of_those_there(self, which: int) -> int | None:
        # Not drawn from the list: which call a fault meets depends on the thread that deletes, so the list may differ
        # when hypothesis replays an example.
        there = self.must_be_there()
        return there[which % len(there)] if there else None

    def learn(self, step: int, seed: int) -> None:
        """See whether a save that failed was committed all the same; both are right, but nothing in between."""
        found = self.manager.latest_step()
        if found == step and self.content(step)["seed"] == seed:
            self.note_commit(step, seed)

    def content(self, step: int) -> dict[str, Any]:
        state = self.manager.restore(step).state
        assert same_content(state, state_of(state["seed"]))  # whole, of one save
        return dict(state)

    def quiet(self) -> None:
        self.storage._at = None

    # -- rules ---------------------------------------------------------------------------------------------------------

    @initialize(mode=modes)
    def open(self, mode: Any) -> None:
        self.manager = CheckpointManager(self.root, keep=POLICY, mode=mode, unchanged=self.unchanged)

    def settle(self) -> None:
        if self.behind is not None:
            self.manager.wait()
            self.note_commit(*self.behind)
            self.behind = None

    @rule(step=steps, blocking=st.booleans())
    def save(self, step: int, *, blocking: bool) -> None:
        self.settle()
        self.num_saves += 1
        assert self.manager.save(step, state_of(self.num_saves), on_exists="replace", blocking=blocking).saved
        if blocking:
            self.note_commit(step, self.num_saves)
        else:
            self.behind = step, self.num_saves

    @rule(which=steps)
    def save_what_is_there(self, which: int) -> None:
        self.settle()
        step = self.one_of_those_there(which)
        if step is None:
            return
        with pytest.raises(StepExistsError):
            self.manager.save(step, state_of(0), on_exists="error")
        assert not self.manager.save(step, state_of(0), on_exists="skip").saved

    @rule(step=steps, call=calls, blocking=st.booleans())
    def save_and_meet_an_error(self, step: int, call: int, *, blocking: bool) -> None:
        self.settle()
        self.num_saves += 1
        seed = self.num_saves
        self.storage._at, self.storage._times = self.storage.num_calls + call, 1
        try:
            self.manager.save(step, state_of(seed), on_exists="replace", blocking=blocking)
            self.manager.wait()
        except CheckpointError as error:
            self.quiet()
            told = error.__cause__ if isinstance(error, AsyncSaveError) else error
            outcome = getattr(told, "outcome", None)
            self.learn(step, seed)
            event(f"an error, {outcome}")
            is_there = self.committed.get(step) == seed
            assert outcome in (("committed", "unknown") if is_there else ("not_committed", "unknown"))
        else:
            self.quiet()
            self.note_commit(step, seed)

    @rule(step=steps, call=calls, mode=modes)
    def save_and_crash(self, step: int, call: int, mode: Any) -> None:
        self.settle()
        self.num_saves += 1
        seed = self.num_saves
        self.storage._at, self.storage._times = self.storage.num_calls + call, None
        finished = False
        try:
            self.manager.save(step, state_of(seed), on_exists="replace")
            finished = True
        except CheckpointError:
            pass
        self.manager.close()  # its storage does nothing any more; but a root has one owner in a process
        self.manager = CheckpointManager(self.root, keep=POLICY, mode=mode, unchanged=self.unchanged)
        event("a crash after the save" if finished else "a crash in the save")
        if finished:
            self.note_commit(step, seed)
        else:
            self.learn(step, seed)

    @rule(mode=modes)
    def reopen(self, mode: Any) -> None:
        self.settle()
        self.manager.close()
        self.manager = CheckpointManager(self.root, keep=POLICY, mode=mode, unchanged=self.unchanged)
        self.restored = None

    @rule()
    def restore_latest(self) -> None:
        self.settle()
        live = state_of(0)
        live["names"] = []
        result = self.manager.restore_latest(live)
        if not self.order:
            assert result is None
            return
        assert result.step == self.order[-1]
        assert same_content(live, state_of(self.committed[result.step]))
        assert live["model"]["row"].data_ptr() == live["model"]["weight"][1].data_ptr()
        self.restored = result.step

    @rule(which=steps)
    def restore_one(self, which: int) -> None:
        self.settle()
        step = self.one_of_those_there(which)
        if step is None:
            return
        assert self.content(step)["seed"] == self.committed[step]
        self.restored = step

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def what_is_listed_is_what_was_committed(self) -> None:
        if self.manager is None or self.behind is not None:
            return
        listed = [info.step for info in self.manager.steps()]
        assert [step for step in self.order if step in listed] == listed
        assert set(self.must_be_there()) <= set(listed)
        assert self.manager.latest_step() == (self.order[-1] if self.order else None)


TestCheckpoints = Checkpoints.TestCase
TestCheckpoints.settings = settings(max_examples=30, stateful_step_count=20)


class LinkedCheckpoints(Checkpoints):
    """The same where steps share files."""

    unchanged = "link"


TestLinkedCheckpoints = LinkedCheckpoints.TestCase
TestLinkedCheckpoints.settings = settings(max_examples=10, stateful_step_count=20)


class ObjectCheckpoints(Checkpoints):
    """The same on an object store. The owner's file is kept past the faults: a crashed owner is gone, as elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.root = "memory://machine"
        objects = MemoryObjects(self.root)
        self.objects = objects
        self.patch.setattr(session, "open_storage", lambda *_: self.make_storage(self.root))
        self.patch.setattr(session, "Owner", lambda _, **named: Owner(objects, **named))

    def make_inner(self, root: Any) -> Storage:
        del root
        return self.objects

    def teardown(self) -> None:
        super().teardown()
        committer = Committer(self.objects)
        committer.recover()
        assert committer.delete_hidden() == []
        assert read_marks(self.objects) == []
        steps = {step.prefix: step.record.files for step in committer.list_steps()}
        assert {entry.name for entry in self.objects.list("")} - {".safepoint"} == set(steps)
        for prefix, files in steps.items():  # and nothing of any other attempt
            assert {entry.name for entry in self.objects.list(prefix)} == {"commit.json", files}


TestObjectCheckpoints = ObjectCheckpoints.TestCase
TestObjectCheckpoints.settings = settings(max_examples=30, stateful_step_count=20)
