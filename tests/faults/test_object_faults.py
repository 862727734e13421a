"""Object stores that fail: every call ends, doubt is settled, and what is raised says what to check."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.errors import CorruptDataError, StorageError
from safepoint.formats.storage import ObjectStorage, Storage, StorageOptions, open_storage
from safepoint.formats.storage.conditions import require_conditional_writes

from support.fault_proxy import FaultProxy, Kind, reads, s3_error, writes
from support.http_proxy import Reply
from support.storage_contract import failed_with, names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.object_servers import ObjectServer


DEADLINE_SECS = 0.5
VERSIONS = {"s3": b'\0"0123"', "gs": b"\0" + b"\1" * 8}  # of nothing


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A root behind a proxy that may fail, and the same root seen without it."""

    proxy: FaultProxy
    url: str
    straight: Storage

    def storage(self, *, deadline_secs: float = 30, max_in_flight_bytes: int = 1 << 28) -> Storage:
        return open_storage(
            self.url, StorageOptions(deadline_secs=deadline_secs, max_in_flight_bytes=max_in_flight_bytes)
        )


@pytest.fixture
def bad(object_server: ObjectServer, unused_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bad]:
    url = object_server.url(unused_prefix)
    straight = open_storage(url)
    straight.make_dir("")  # connects while the environment still leads there
    with FaultProxy(object_server.address) as proxy:
        for name, value in object_server.through(proxy.address).items():
            monkeypatch.setenv(name, value)
        yield Bad(proxy=proxy, url=url, straight=straight)


def write_file(storage: Storage, path: str, data: bytes) -> None:
    with storage.open_writer(path, num_bytes=len(data)) as writer:
        writer.append(data)
        writer.finish()


def version_of(storage: Storage, path: str) -> object:
    found = storage.read_versioned(path, max_bytes=1 << 20)
    assert found is not None
    return found.version


@pytest.mark.parametrize("kind", ["busy", "reset"])
def test_a_failure_that_passes_is_tried_again(bad: Bad, kind: Kind) -> None:
    storage = bad.storage(deadline_secs=10)
    bad.proxy.fail(kind, times=2)
    storage.put("a/f", b"1")
    bad.proxy.fail(kind, times=2)
    write_file(storage, "a/large", bytes(3 << 20))
    bad.proxy.fail(kind, times=2)
    assert names(storage, "a") == {"f", "large"}
    bad.proxy.fail(kind, times=2)
    with storage.open_reader("a/large", num_bytes=3 << 20) as reader:
        bad.proxy.fail(kind, times=2)
        reader.read_into(1, memoryview(bytearray(1 << 20)))
    bad.proxy.fail(kind, times=2)
    storage.delete_tree("a")
    assert bad.straight.list("") == []


def test_whose_answer_was_lost_is_still_told_that_it_won(bad: Bad) -> None:
    storage = bad.storage()
    bad.proxy.fail("lost reply", writes)
    assert storage.put_if_absent("f", b"mine")
    version = version_of(storage, "f")
    bad.proxy.fail("lost reply", writes)
    assert storage.put_if_unchanged("f", b"mine, again", version)
    assert bad.straight.get("f", max_bytes=99) == b"mine, again"
    bad.proxy.fail("lost reply", writes)
    write_file(storage, "large", bytes(2 << 20))
    assert bad.straight.size("large") == 2 << 20
    version = version_of(storage, "f")
    bad.proxy.fail("lost reply", lambda exchange: exchange.method == "DELETE")
    assert storage.delete_if_unchanged("f", version)
    assert names(bad.straight) == {"large"}


def test_who_gets_no_answer_looks_whether_it_was_done(bad: Bad) -> None:
    storage = bad.storage(deadline_secs=DEADLINE_SECS)
    storage.make_dir("")
    bad.proxy.fail("silence", writes)
    assert storage.put_if_absent("f", b"mine")
    bad.proxy.fail("silence", writes)
    write_file(storage, "large", bytes(2 << 20))
    assert names(bad.straight) == {"f", "large"}


def test_a_lost_answer_makes_nobody_win_what_another_has(bad: Bad) -> None:
    storage = bad.storage()
    bad.straight.put("f", b"another's")
    bad.straight.put("large", bytes(8))
    version = version_of(storage, "f")
    bad.proxy.fail("lost reply", writes)
    assert not storage.put_if_absent("f", b"mine")
    bad.straight.replace("f", b"changed")
    bad.proxy.fail("lost reply", writes)
    assert not storage.put_if_unchanged("f", b"mine", version)
    bad.proxy.fail("lost reply", writes)
    failed_with(errno.EEXIST, lambda: write_file(storage, "large", b"87654321"))
    assert bad.straight.get("f", max_bytes=99) == b"changed"
    assert bad.straight.get("large", max_bytes=99) == bytes(8)


def test_every_call_ends_at_its_deadline(bad: Bad) -> None:
    storage = bad.storage(deadline_secs=DEADLINE_SECS)
    bad.straight.put("f", b"1234")
    bad.straight.put("g", b"1234")
    version = version_of(bad.straight, "g")
    with storage.open_reader("f", num_bytes=4) as reader:
        calls: list[Callable[[], object]] = [
            lambda: storage.put("new", b""),
            lambda: storage.put_if_absent("new", b""),
            lambda: storage.put_if_unchanged("g", b"", version),
            lambda: storage.delete_if_unchanged("g", version),
            lambda: storage.replace("g", b""),
            lambda: storage.get("f", max_bytes=4),
            lambda: storage.size("f"),
            lambda: storage.delete("g"),
            lambda: storage.open_reader("f", num_bytes=4),
            lambda: reader.read_into(0, memoryview(bytearray(4))),
            lambda: write_file(storage, "new", bytes(20 << 20)),
        ]
        bad.proxy.fail("stall", times=1000)
        with ThreadPoolExecutor(len(calls)) as pool:
            for error in pool.map(lambda call: failed_with(errno.ETIMEDOUT, call), calls):
                assert "deadline_secs" in (error.hint or "")
    bad.proxy.heal()
    assert storage.get("f", max_bytes=4) == b"1234"
    write_file(storage, "after", b"12")
    assert {"f", "after"} <= names(bad.straight)  # and perhaps what was given up: nobody can call it back


def test_a_deletion_of_many_ends_when_nobody_answers(bad: Bad) -> None:
    storage = bad.storage(deadline_secs=DEADLINE_SECS)
    bad.proxy.fail("stall", lambda exchange: exchange.method == "DELETE", times=1000)
    assert isinstance(storage, ObjectStorage)
    client = storage._client
    failed_with(errno.ETIMEDOUT, lambda: client.delete_all(f"a/{number}" for number in range(4000)))
    asked = sum(method == "DELETE" for method, _ in bad.proxy.seen)
    assert asked < 100  # not all of them, one deadline after the other


def test_a_listing_that_stalls_ends_too(bad: Bad) -> None:
    storage = bad.storage(deadline_secs=0.05)
    bad.proxy.fail("stall", times=1000)
    failed_with(errno.ETIMEDOUT, lambda: storage.list(""))


def test_no_more_bytes_are_in_flight_than_allowed(bad: Bad) -> None:
    storage = bad.storage(max_in_flight_bytes=2 << 20)
    under_way: list[int] = []
    lock = threading.Lock()

    def write(number: int) -> None:
        with storage.open_writer(f"f{number}", num_bytes=1 << 20) as writer:
            with lock:
                under_way.append(storage._budget.taken_bytes)
            writer.append(bytes(1 << 20))
            writer.finish()

    assert isinstance(storage, ObjectStorage)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, range(6)))
    assert max(under_way) <= 2 << 20
    assert storage._budget.taken_bytes == 0
    assert len(names(bad.straight)) == 6


def test_a_writer_that_finds_no_room_gives_up_at_the_deadline(bad: Bad) -> None:
    storage = bad.storage(deadline_secs=0.2, max_in_flight_bytes=100)
    with storage.open_writer("a", num_bytes=60):
        error = failed_with(errno.ETIMEDOUT, lambda: storage.open_writer("b", num_bytes=60))
        assert "60 bytes are in flight" in str(error)
    with storage.open_writer("c", num_bytes=1000):  # more than may be in flight: alone
        pass


def test_a_huge_object_is_refused_before_it_is_read_to_its_end(bad: Bad) -> None:
    storage = bad.storage()
    bad.straight.put("f", bytes(5000))
    bad.proxy.fail("stall", lambda exchange: exchange.method == "GET")  # as if it took for ever
    start = time.monotonic()
    with pytest.raises(CorruptDataError, match="at most 4,096"):
        storage.get("f", max_bytes=4096)
    assert time.monotonic() - start < 30


def test_what_vanishes_or_is_cut_short_while_it_is_read(bad: Bad) -> None:
    storage = bad.straight
    storage.put("f", bytes(100))
    with storage.open_reader("f") as reader:
        storage.replace("f", bytes(10))
        with pytest.raises(CorruptDataError) as caught:
            reader.read_into(5, memoryview(bytearray(10)))
        assert caught.value.path == storage.describe("f")
        storage.delete("f")
        failed_with(errno.ENOENT, lambda: reader.read_into(0, memoryview(bytearray(1))))


def test_credentials_that_expire_in_the_middle_leave_nothing_half_visible(bad: Bad) -> None:
    storage = bad.storage()
    with storage.open_writer("a/large", num_bytes=2 << 20) as writer:
        writer.append(bytes(2 << 20))
        bad.proxy.fail("expired", times=1000)
        error = failed_with(errno.EACCES, writer.finish)
    assert "renew them" in (error.hint or "")
    for call in (
        lambda: storage.get("f", max_bytes=1),
        lambda: storage.put_if_absent("f", b""),
        lambda: storage.list(""),
    ):
        assert "expired" in (failed_with(errno.EACCES, call).hint or "")
    assert bad.straight.list("") == []
    bad.proxy.heal()
    write_file(storage, "a/large", b"renewed")
    assert names(bad.straight, "a") == {"large"}


def test_an_endpoint_where_nobody_answers_is_named_as_that(bad: Bad) -> None:
    storage = bad.storage(deadline_secs=1)
    bad.proxy.close()
    for call in (lambda: storage.make_dir(""), lambda: storage.put("f", b"")):
        error = failed_with(errno.EHOSTUNREACH, call)
        assert "endpoint" in (error.hint or "")


def test_a_missing_bucket_is_named_as_that(object_server: ObjectServer) -> None:
    storage = open_storage(object_server.url("p", bucket="not-there"))
    calls: list[Callable[[], object]] = [
        lambda: storage.make_dir(""),
        lambda: storage.list(""),
        lambda: storage.put("f", b""),
        lambda: storage.put_if_absent("f", b""),
        lambda: storage.put_if_unchanged("f", b"", VERSIONS[object_server.scheme]),
        lambda: storage.replace("f", b""),
        lambda: write_file(storage, "f", b"1"),
    ]
    for call in calls:
        error = failed_with(errno.ENOENT, call)
        assert "no such bucket" in (error.hint or ""), error


@pytest.mark.parametrize(
    ("reply", "number", "hint"),
    [
        (s3_error(403, "AccessDenied"), errno.EACCES, "may list, read"),
        (s3_error(403, "InvalidAccessKeyId"), errno.EACCES, "AWS_ACCESS_KEY_ID"),
        (s3_error(403, "SignatureDoesNotMatch"), errno.EACCES, "secret"),
        (s3_error(403, "RequestTimeTooSkewed"), errno.EACCES, "clock"),
        (s3_error(400, "AuthorizationHeaderMalformed"), errno.EINVAL, "region"),
        (s3_error(400, "EntityTooLarge"), errno.EFBIG, "parts"),
        (s3_error(403, "QuotaExceeded"), errno.EDQUOT, "quota"),
    ],
)
def test_what_s3_refuses_says_what_to_check(
    s3: ObjectServer, monkeypatch: pytest.MonkeyPatch, reply: Reply, number: int, hint: str
) -> None:
    with FaultProxy(s3.address) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.fail(reply, times=1000)
        storage = open_storage(s3.url("p"), StorageOptions(deadline_secs=1))
        error = failed_with(number, lambda: storage.put("f", b""))
    assert hint in (error.hint or "")
    assert "[" not in error.message  # none of the server's answer, which may repeat keys


def test_missing_credentials_say_where_they_are_looked_for(s3: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with FaultProxy(s3.address) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        # moto lets everybody in; Amazon does not.
        proxy.fail(s3_error(403, "AccessDenied"), lambda exchange: "authorization" not in exchange.headers, times=1000)
        for options in (StorageOptions(), StorageOptions(profile="nobody")):
            storage = open_storage(s3.url("p"), options)
            error = failed_with(errno.EACCES, lambda storage=storage: storage.put("f", b""))
            assert "credentials" in (error.hint or "")


def test_of_eight_clients_who_create_one_object_one_wins(object_server: ObjectServer, unused_prefix: str) -> None:
    clients = [open_storage(object_server.url(unused_prefix)) for _ in range(8)]
    for turn in range(5):
        together = threading.Barrier(8)

        def create(number: int, turn: int = turn, together: threading.Barrier = together) -> bool:
            clients[number].make_dir("")
            together.wait(30)
            return clients[number].put_if_absent(f"f{turn}", b"%d" % number)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(8)))
        assert sum(won) == 1
        assert clients[0].get(f"f{turn}", max_bytes=1) == b"%d" % won.index(True)


def test_a_server_that_keeps_no_conditions_is_refused(
    gs: ObjectServer, s3: ObjectServer, unused_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for server in (gs, s3):
        good = open_storage(server.url(unused_prefix))
        for _ in range(3):
            require_conditional_writes(good, "conditions")
        assert names(good) == {"conditions"}
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://{gs.bare_address}")
    careless = open_storage(gs.url(unused_prefix + "/careless"))
    error = failed_with(errno.EOPNOTSUPP, lambda: require_conditional_writes(careless, "conditions"))
    assert "If-None-Match" in (error.hint or "")


def test_a_server_that_refuses_conditions_that_hold_is_refused(s3: ObjectServer, unused_prefix: str) -> None:
    with FaultProxy(s3.address) as proxy:
        storage = open_storage(s3.url(unused_prefix), StorageOptions(endpoint=proxy.url))
        proxy.fail(Reply(status=412), lambda exchange: "if-match" in exchange.headers, times=1000)
        error = failed_with(errno.EOPNOTSUPP, lambda: require_conditional_writes(storage, "conditions"))
    assert "If-Match" in (error.hint or "")


def test_who_may_not_list_sees_no_empty_root(bad: Bad) -> None:
    bad.straight.put("f", b"")
    denied = Reply(status=403, body=b'{"error": {"code": 403, "message": "no access"}}')
    bad.proxy.fail(denied, reads, times=1000)
    error = failed_with(errno.EACCES, lambda: bad.storage().list(""))
    assert "may list, read" in (error.hint or "")


def test_who_may_only_read_can_list_a_root_with_nothing_in_it(bad: Bad) -> None:
    denied = Reply(status=403, body=b'{"error": {"code": 403, "message": "no access"}}')
    bad.proxy.fail(denied, writes, times=1000)
    assert bad.storage().list("") == []


def test_errors_are_those_of_the_one_object(bad: Bad) -> None:
    bad.proxy.fail("expired", lambda exchange: exchange.path.endswith("37"), times=1000)
    storage = bad.storage()
    for number in range(30, 40):
        bad.straight.put(f"a/{number}", b"")
    error = failed_with(errno.EACCES, lambda: storage.delete_tree("a"))
    assert error.path == storage.describe("a/37")
    assert names(bad.straight, "a") == {"37"}  # the others are gone all the same
    with pytest.raises(StorageError):
        storage.delete("a/37")
