"""What is particular to the owner file of a directory, and to stores that cannot have one.

What is promised of owners on a root of any kind is in tests/contract/test_root_owners.py. Here are times of files,
places that are no directories, and forks: a forked child has none of the threads of an object store's client.
"""

from __future__ import annotations

import errno
import fcntl
import os
import warnings
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.storage import MemoryObjects
from safepoint.manager.errors import AttemptLostError, StorageError
from safepoint.manager.owner import Acquired, Owner, Refused, Wait
from safepoint.manager.process_identity import ProcessIdentity

from support.owners import OWNER, Clock, OwnedRoot
from support.roots import Root

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "实验 1"


def open_owner(root: Path | MemoryObjects) -> Owner:
    return Owner(root, deadline_secs=100.0)


def test_times_of_other_hosts_are_never_compared_with_ours(root: Path) -> None:
    owned = OwnedRoot(Root(kind="directory", url=str(root)))
    for age in (0, 4_000_000_000):  # long ago, and in the future
        owned.leave_file(host="other")
        os.utime(root / OWNER, (age, age))
        assert isinstance(owned.open(Clock()).acquire(), Wait)


def test_an_owner_whose_root_went_away_has_lost_it(root: Path) -> None:
    owner = open_owner(root)
    owner.acquire()
    root.rename(root.with_name("elsewhere"))
    with pytest.raises(AttemptLostError, match="nobody"):
        owner.verify()
    owner.release()
    assert not root.exists()


def test_a_process_that_is_stopped_with_the_lock_in_its_hands_is_waited_for_no_longer_than_an_owner(root: Path) -> None:
    clock = Clock()
    owner = Owner(root, deadline_secs=0.1, clock=clock)
    (root / OWNER).parent.mkdir(parents=True)
    with ((root / OWNER).parent / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for elapsed, remaining in ((0.0, 0.2), (0.15, 0.05)):
            clock.now += elapsed
            answer = owner.acquire()
            assert isinstance(answer, Wait)
            assert answer.remaining_secs == pytest.approx(remaining)
        clock.now += 0.06
        assert owner.acquire() == Acquired(is_new=True)
    owner.release()


def test_a_forked_child_neither_owns_nor_releases_the_root(root: Path) -> None:
    owner = open_owner(root)
    owner.acquire()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child does next to nothing
        child = os.fork()
    if child == 0:
        try:
            refused = isinstance(owner.acquire(), Refused)
            owner.release()
            os._exit(0 if refused else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    owner.verify()
    owner.release()


def test_a_root_that_cannot_be_one_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        open_owner(tmp_path / "file").acquire()
    with pytest.raises(StorageError):
        open_owner(tmp_path / "file" / "below").acquire()
    (tmp_path / "outside").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / ".safepoint").symlink_to(tmp_path / "outside")
    with pytest.raises(StorageError):
        open_owner(tmp_path / "root").acquire()
    assert list((tmp_path / "outside").iterdir()) == []


def test_identities_survive_json_and_junk_is_refused() -> None:
    here = ProcessIdentity.current()
    assert ProcessIdentity.from_json(here.to_json()) == here
    assert here.state() == "running"
    for junk in (
        {},
        here.to_json() | {"pid": 0},
        here.to_json() | {"pid": True},
        here.to_json() | {"start_ticks": "1"},
    ):
        with pytest.raises(ValueError, match="not the"):
            ProcessIdentity.from_json(junk)


def test_files_that_killed_processes_left_in_the_control_directory_go_when_they_are_old(tmp_path: Path) -> None:
    control = tmp_path / ".safepoint"
    (control / "pins").mkdir(parents=True)
    left = [control / f"nonce-{'a' * 16}", control / f".tmp-{'b' * 16}", control / "pins" / f".tmp-{'c' * 16}"]
    young = control / f"nonce-{'d' * 16}"
    others = [control / "nonce-of-mine", control / "notes", control / "pins" / "7", control / f"nonce-{'e' * 17}"]
    for path in (*left, young, *others):
        path.write_text("")
        os.utime(path, (0, 0))
    os.utime(young)
    owner = Owner(tmp_path, deadline_secs=5.0)
    assert isinstance(owner.acquire(), Acquired)
    owner.release()
    assert [path for path in left if path.exists()] == []
    assert [path for path in (young, *others) if not path.exists()] == []


def test_a_store_that_keeps_no_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = MemoryObjects()

    def put_always(path: str, data: bytes) -> bool:
        objects.replace(path, data)
        return True

    monkeypatch.setattr(objects, "put_if_absent", put_always)
    with pytest.raises(StorageError, match="conditions") as caught:
        open_owner(objects).acquire()
    assert caught.value.errno == errno.EOPNOTSUPP
