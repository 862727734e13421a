"""One writer a root: promises of safepoint.manager.owner. Other hosts are owner files written by hand."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from safepoint.manager.errors import AttemptLostError, RootInUseError, StorageError
from safepoint.manager.owner import Acquired, Holder, Owner, Refused, Wait
from safepoint.manager.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEADLINE_SECS = 100.0


class Clock:
    """A clock that tests wind."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "实验 1"


def open_owner(root: Path, clock: Clock | None = None, *, deadline_secs: float = DEADLINE_SECS) -> Owner:
    return Owner(root, deadline_secs=deadline_secs, clock=clock or time.monotonic)


def owner_file(root: Path) -> Path:
    return root / ".safepoint" / "owner"


def write_owner_file(root: Path, **changes: object) -> None:
    """Leave the owner file of this process, but for some changes."""
    owner_file(root).parent.mkdir(parents=True, exist_ok=True)
    process = replace(ProcessIdentity.current(), **changes)  # type: ignore[arg-type]
    holder = Holder(process=process, since="2026-01-01T00:00:00Z", beat_secs=10.0, nonce="theirs")
    owner_file(root).write_bytes(holder.to_bytes())


def beat(root: Path) -> None:
    found = owner_file(root).stat()
    os.utime(owner_file(root), ns=(found.st_atime_ns, found.st_mtime_ns + 1))


@pytest.fixture
def other_process(root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that owns the root, and verifies it when it gets a line."""
    script = (
        "import sys\n"
        "from safepoint.manager.owner import Owner\n"
        "owner = Owner(sys.argv[1], deadline_secs=100)\n"
        "print(type(owner.acquire()).__name__, flush=True)\n"
        "sys.stdin.readline()\n"
        "try:\n"
        "    owner.verify()\n"
        "    print('verified', flush=True)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"Acquired\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_first_to_come_owns_the_root_and_is_told_so_again(root: Path) -> None:
    owner = open_owner(root)
    assert owner.acquire() == Acquired(is_new=True)
    assert owner.acquire() == Acquired(is_new=False)
    owner.verify()
    owner.release()
    owner.release()
    assert not owner_file(root).exists()
    assert owner.acquire() == Acquired(is_new=True)
    owner.release()


def test_a_second_manager_of_the_same_process_is_refused_until_the_first_is_closed(root: Path) -> None:
    first, second = open_owner(root), open_owner(root)
    first.acquire()
    answer = second.acquire()
    assert isinstance(answer, Refused)
    assert answer.holder.process == ProcessIdentity.current()
    error = answer.to_error(str(root), step=7)
    assert isinstance(error, RootInUseError)
    assert (error.step, error.outcome, error.path) == (7, "not_committed", str(root))
    assert f"process {os.getpid()} on host" in str(error)
    with pytest.raises(AttemptLostError):
        second.verify()
    second.release()
    first.verify()
    first.release()
    assert second.acquire() == Acquired(is_new=True)
    second.release()


def test_a_manager_that_nobody_holds_any_more_lets_go(root: Path) -> None:
    owner = open_owner(root)
    owner.acquire()
    del owner
    gc.collect()
    assert not owner_file(root).exists()


def test_a_living_process_is_refused_and_a_killed_one_replaced_at_once(
    root: Path, other_process: subprocess.Popen[bytes]
) -> None:
    owner = open_owner(root)
    answer = owner.acquire()
    assert isinstance(answer, Refused)
    assert answer.holder.process is not None
    assert answer.holder.process.pid == other_process.pid
    other_process.kill()
    while other_process.poll() is None:  # a zombie is gone, too
        answer = owner.acquire()
        if isinstance(answer, Acquired):
            break
    assert isinstance(answer if isinstance(answer, Acquired) else owner.acquire(), Acquired)
    owner.verify()
    owner.release()


def test_a_stopped_process_is_replaced_after_twice_the_deadline_and_cannot_publish_when_it_wakes(
    root: Path, clock: Clock, other_process: subprocess.Popen[bytes]
) -> None:
    other_process.send_signal(signal.SIGSTOP)
    owner = open_owner(root, clock)
    give_up = time.monotonic() + 10
    while isinstance(answer := owner.acquire(), Refused) and time.monotonic() < give_up:
        time.sleep(0.01)  # the signal is on its way
    assert isinstance(answer, Wait)
    clock.now += 2 * DEADLINE_SECS - 1
    assert isinstance(owner.acquire(), Wait)
    clock.now += 1
    assert owner.acquire() == Acquired(is_new=True)
    other_process.send_signal(signal.SIGCONT)
    out, _ = other_process.communicate(b"\n", timeout=30)
    assert out == b"AttemptLostError\n"
    owner.verify()  # and its exit took nothing away
    owner.release()


@pytest.mark.parametrize("elsewhere", [{"host": "other"}, {"boot_id": "other"}, {"pid_space": "other"}])
def test_an_owner_that_cannot_be_seen_from_here_is_watched_for_twice_the_deadline(
    root: Path, clock: Clock, elsewhere: dict[str, str]
) -> None:
    write_owner_file(root, pid=1 << 22, **elsewhere)  # no such process, but who knows over there
    owner = open_owner(root, clock)
    answer = owner.acquire()
    assert isinstance(answer, Wait)
    assert (answer.secs, answer.remaining_secs) == (20.0, 200.0)
    clock.now += 190
    answer = owner.acquire()
    assert isinstance(answer, Wait)
    assert answer.secs == answer.remaining_secs == 10.0
    clock.now += 10
    assert owner.acquire() == Acquired(is_new=True)
    owner.release()


def test_a_heartbeat_from_elsewhere_is_enough_to_be_refused(root: Path, clock: Clock) -> None:
    write_owner_file(root, host="other")
    owner = open_owner(root, clock)
    assert isinstance(owner.acquire(), Wait)
    clock.now += 20
    beat(root)
    answer = owner.acquire()
    assert isinstance(answer, Refused)
    assert "on host other, since 2026" in str(answer.holder)
    # it dies after that: the watch begins anew
    clock.now += 2 * DEADLINE_SECS - 1
    assert isinstance(owner.acquire(), Wait)
    clock.now += 1
    assert isinstance(owner.acquire(), Acquired)
    owner.release()


def test_times_of_other_hosts_are_never_compared_with_ours(root: Path, clock: Clock) -> None:
    for age in (0, 4_000_000_000):  # long ago, and in the future
        write_owner_file(root, host="other")
        os.utime(owner_file(root), (age, age))
        assert isinstance(open_owner(root, clock).acquire(), Wait)


def test_a_pid_that_was_given_to_another_process_since_is_no_owner(root: Path) -> None:
    write_owner_file(root, start_ticks=1)
    owner = open_owner(root)
    assert owner.acquire() == Acquired(is_new=True)
    owner.release()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"process": {"pid": "1"}}', b"\xff\xfe", b"null", b"9" * 9999]
)
def test_an_owner_file_that_cannot_be_read_is_waited_for_like_any_other(
    root: Path, clock: Clock, content: bytes
) -> None:
    owner_file(root).parent.mkdir(parents=True)
    owner_file(root).write_bytes(content)
    owner = open_owner(root, clock)
    answer = owner.acquire()
    assert isinstance(answer, Wait)
    assert "unknown process" in str(answer.holder)
    clock.now += 2 * DEADLINE_SECS
    assert isinstance(owner.acquire(), Acquired)
    owner.release()


def test_the_heart_beats_while_the_root_is_owned(root: Path) -> None:
    owner = open_owner(root, deadline_secs=0.2)
    owner.acquire()
    seen = {owner_file(root).stat().st_mtime_ns}
    give_up = time.monotonic() + 10
    while len(seen) < 3 and time.monotonic() < give_up:
        time.sleep(0.01)
        seen.add(owner_file(root).stat().st_mtime_ns)
    owner.release()
    assert len(seen) >= 3
    assert not [thread for thread in threading.enumerate() if thread.name == "safepoint-owner"]


def test_an_owner_that_was_replaced_knows_it_and_leaves_its_successor_alone(root: Path) -> None:
    owner = open_owner(root, deadline_secs=0.2)
    owner.acquire()
    content = json.loads(owner_file(root).read_bytes()) | {"nonce": "another"}
    owner_file(root).with_name("new").write_text(json.dumps(content))
    owner_file(root).with_name("new").rename(owner_file(root))
    found = owner_file(root).stat()
    with pytest.raises(AttemptLostError) as caught:
        owner.verify()
    assert caught.value.outcome == "not_committed"
    time.sleep(0.1)
    assert owner_file(root).stat().st_mtime_ns == found.st_mtime_ns
    assert isinstance(owner.acquire(), Refused)
    owner.release()
    assert json.loads(owner_file(root).read_bytes())["nonce"] == "another"


def test_an_owner_whose_root_went_away_has_lost_it(root: Path) -> None:
    owner = open_owner(root)
    owner.acquire()
    root.rename(root.with_name("elsewhere"))
    with pytest.raises(AttemptLostError, match="nobody"):
        owner.verify()
    owner.release()
    assert not root.exists()


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


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_that_come_at_once_one_gets_the_root(root: Path, *, stale: bool) -> None:
    for _ in range(10):
        if stale:
            write_owner_file(root, start_ticks=1)
        owners = [open_owner(root) for _ in range(4)]
        start = threading.Barrier(len(owners))
        answers: list[object] = []

        def come(owner: Owner, start: threading.Barrier = start, answers: list[object] = answers) -> None:
            start.wait()
            answers.append(owner.acquire())

        threads = [threading.Thread(target=come, args=(owner,)) for owner in owners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(isinstance(answer, Acquired) for answer in answers) == 1
        assert all(isinstance(answer, Acquired | Refused) for answer in answers)
        for owner in owners:
            owner.release()
        assert sorted(entry.name for entry in owner_file(root).parent.iterdir()) == ["lock"]


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
