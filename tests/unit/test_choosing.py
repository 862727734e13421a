"""Which step a restore takes, from what the processes list."""

from __future__ import annotations

import errno

from safepoint.formats.storage import MemoryStorage
from safepoint.manager.choosing import own_offer
from safepoint.manager.commit import Committer

from support.faulty_storage import Fail, FaultyStorage
from support.steps import attempt_id, commit_step


def test_a_record_that_cannot_be_read_once_is_a_problem_and_not_passed_over_in_silence() -> None:
    storage = MemoryStorage()
    committer = Committer(storage)
    for step in (1, 2):
        commit_step(committer, storage, step, attempt_id(step))
    for k in (1, 2):
        faulty = FaultyStorage(storage, at=k, fault=Fail(errno.EIO), only={"get"})
        offer = own_offer(Committer(faulty))
        assert {item.step for item in offer.candidates} | {error.step for error in offer.problems} == {1, 2}
        assert len(offer.problems) == 1
