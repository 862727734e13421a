"""ObjectClient: single requests to an object store, each with a deadline of ours.

Owns all calls of TensorStore's key-value store: starting a request, waiting for it no longer than allowed, abandoning
it, and what its answers mean. Knows keys; nothing of directories, nothing of what is stored.

A request that is abandoned may still be carried out by the server, or even be sent once more: TensorStore is told to
retry no more, but keeps a stalled upload, with its memory, until the connection ends.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from safepoint.formats.errors import CorruptDataError, StorageError
from safepoint.formats.storage.object_errors import deadline_error, object_error, size_in_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["MISSING", "ObjectClient", "Request", "Stored", "refusal_of"]

MISSING = b"\2"
"""The version of a key that is not there, as TensorStore writes it."""

_NEVER = ".safepoint/never"  # a key that nobody writes
_LISTING_DEADLINES = 10
_NUM_RETRIES = 8
_NUM_DELETES = 32
_NOBODY_ANSWERS = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH})
_FAR = 1 << 50
_PROBE_SPREAD = 16


class Stored(NamedTuple):
    """An object as it was read: its bytes, and a version that changes with its content."""

    data: bytes
    version: bytes


class Request(NamedTuple):
    """A request under way."""

    future: Any
    action: str
    key: str
    started: float


class _RangeError(Exception):
    """A range that the object does not have in full. `size`: of the object, None when the store did not say."""

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.size = size


class ObjectClient:
    """The requests below one prefix of a bucket; used by several threads."""

    def __init__(
        self, spec: Mapping[str, Any], location: str, *, deadline_secs: float, bucket_url: str | None = None
    ) -> None:
        """Touch nothing; the first request connects.

        Args:
            spec: of TensorStore's key-value store, without retries.
            location: of the prefix, for messages.
            deadline_secs: for each request, with its retries.
            bucket_url: where Google's service tells about the bucket itself.
        """
        self._spec = dict(spec)
        self._location = location
        self._deadline_secs = deadline_secs
        self._bucket_url = bucket_url
        self._lock = Lock()
        self._opened: Any = None

    # Reading

    def read(self, key: str) -> Stored | None:
        """Return an object, None when it is missing."""
        return self.read_result(self.start_read(key))

    def start_read(self, key: str) -> Request:
        """Begin to read a whole object."""
        return self._start("read", key, lambda store: store.read(key))

    def read_result(self, request: Request, *, within_secs: float | None = None) -> Stored | None:
        """Wait for what `start_read` began.

        Args:
            request: under way.
            within_secs: raise TimeoutError, and leave the request alone, when it takes longer.
        """
        if within_secs is not None and within_secs < self._deadline_secs:
            self._peek(request, within_secs)
        found = self._wait(request)
        return None if found.state == "missing" else Stored(found.value, found.stamp.generation)

    def read_range(self, key: str, start: int, end: int) -> bytes | None:
        """Return the bytes from `start` up to `end` of an object, None when it is missing.

        Raises:
            CorruptDataError: it ends before `end`.
        """
        try:
            return self._range(key, start, end)
        except _RangeError as error:
            size = "" if error.size is None else f" at byte {error.size:,}"
            raise CorruptDataError(
                f"the file ends{size}, before byte {end:,}",
                path=self._path(key),
                hint="It was cut short, or replaced by another, after it was written.",
            ) from None

    def size(self, key: str, *, expected: int | None = None) -> int | None:
        """Return the size of an object, None when it is missing.

        There is no request for that. A range that begins inside the object and ends outside is refused by a message
        that tells the size; where it does not, the size is searched for.

        Args:
            key: of the object.
            expected: what it probably is; then one request is enough.
        """
        try:
            if self._range(key, *((_FAR, _FAR + 1) if expected is None else _around(expected))) is None:
                return None
        except _RangeError as error:
            if error.size is not None:
                return error.size
        return self._search_size(key)

    def is_longer(self, key: str, num_bytes: int) -> bool:
        """Say whether an object is there and has more than `num_bytes` bytes."""
        try:
            return self._range(key, num_bytes, num_bytes + 1) is not None
        except _RangeError:
            return False

    def _search_size(self, key: str) -> int | None:
        low, high = 0, 1  # sizes: at least, less than
        while self.is_longer(key, high - 1):
            low, high = high, high * _PROBE_SPREAD
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.is_longer(key, middle - 1) else (low, middle)
        return low if low or self.read(key) is not None else None

    def _range(self, key: str, start: int, end: int) -> bytes | None:
        request = self._start("read", key, lambda store: store.read(key, byte_range=slice(start, end)))
        found = self._wait(request)
        return None if found.state == "missing" else found.value

    # Writing

    def start_write(self, key: str, data: bytes | bytearray | None, *, version: bytes | None = None) -> Request:
        """Begin to write an object, or with None to delete it. `data` has been copied when this returns.

        Args:
            key: of the object.
            data: its content.
            version: only if the object has this version now, `MISSING` for none; None: whatever is there.
        """
        action = "delete" if data is None else "write"
        return self._start(action, key, lambda store: store.write(key, data, if_equal=version))

    def written(self, request: Request) -> bool:
        """Wait for what `start_write` began; return False when it was refused since the version is another.

        TensorStore retries. So False may follow from an earlier try that was carried out, and after an error nothing is
        known. It also says False for a bucket that is not there.
        """
        return bool(self._wait(request).generation)

    def delete_all(self, keys: Iterable[str]) -> None:
        """Delete objects, some at a time; ones that are gone are fine.

        Raises:
            StorageError: the first that could not be deleted; the others have been tried, unless nobody answers.
        """
        waiting: deque[Request] = deque()
        failures: list[StorageError] = []
        for key in keys:
            waiting.append(self.start_write(key, None))
            if len(waiting) >= _NUM_DELETES:
                self._await_deletion(waiting.popleft(), failures)
            if any(failure.errno in _NOBODY_ANSWERS for failure in failures):
                break  # each of the others would take as long
        while waiting:
            self._await_deletion(waiting.popleft(), failures)
        if failures:
            raise failures[0]

    def _await_deletion(self, request: Request, failures: list[StorageError]) -> None:
        try:
            self.written(request)
        except StorageError as error:
            failures.append(error)

    # Listing

    def keys(self, prefix: str) -> list[str]:
        """Return all keys that begin with `prefix`, without it; a request of the store for each 1,000."""
        first = prefix.encode()
        last = first[:-1] + bytes([first[-1] + 1]) if first else b""
        found = self._list(prefix, first, last)
        if self._spec["driver"] == "gcs":
            self._complete(found, prefix, last)
        return [key[len(first) :].decode(errors="surrogateescape") for key in found]

    def _complete(self, found: list[bytes], prefix: str, last: bytes) -> None:
        """Add what a listing of Google's left out, or raise why.

        TensorStore 0.1.86 takes a page that was refused (not allowed, no such bucket) for one without objects, says
        nothing, and ends the listing there. So it is asked what comes after the last key until that is nothing, and
        then requests of other kinds, which it judges rightly, must show that the store answers.
        """
        more = found
        while more:
            more = self._list(prefix, max(more) + b"\0", last)
            found += more
        self.read(_NEVER)  # refused to those who may not list
        if not found:
            self._require_bucket()

    def _require_bucket(self) -> None:
        """Raise where Google says, to anybody, that it has no such bucket.

        Reads, and writes of a version, are answered alike for a bucket and an object that are not there.
        """
        if self._bucket_url is None:
            return
        spec = {"driver": "http", "base_url": self._bucket_url, "context": self._context("http")}
        with suppress(ValueError, TimeoutError):  # that we may not know is an answer too
            store = _tensorstore().KvStore.open(spec).result(timeout=self._deadline_secs)
            if store.read("").result(timeout=self._deadline_secs).state == "missing":
                raise object_error(ValueError("NOT_FOUND: Not Found"), "list", self._location)

    def _list(self, prefix: str, first: bytes, last: bytes) -> list[bytes]:
        request = self._start("list", prefix, lambda store: store.list(_tensorstore().KvStore.KeyRange(first, last)))
        found: list[bytes] = self._wait(request, deadline_secs=_LISTING_DEADLINES * self._deadline_secs)
        return found

    # One request

    def _start(self, action: str, key: str, call: Callable[[Any], Any]) -> Request:
        started = time.monotonic()
        store = self._store()
        with self._typed(action, key):
            return Request(call(store), action, key, started)

    def _wait(self, request: Request, *, deadline_secs: float | None = None) -> Any:
        deadline_secs = self._deadline_secs if deadline_secs is None else deadline_secs
        left = request.started + deadline_secs - time.monotonic()
        try:
            with self._typed(request.action, request.key, deadline_secs):
                return request.future.result(timeout=max(0.0, left))
        except BaseException:
            request.future.cancel()
            raise

    def _peek(self, request: Request, within_secs: float) -> None:
        left = request.started + within_secs - time.monotonic()
        try:
            request.future.result(timeout=max(0.0, left))
        except TimeoutError:
            raise
        except ValueError:  # to be raised by the real wait
            return

    def cancel(self, request: Request) -> None:
        """Give up a request."""
        request.future.cancel()

    def _store(self) -> Any:
        with self._lock:
            if self._opened is None:
                with self._typed("open", ""):
                    opening = _tensorstore().KvStore.open(
                        {**self._spec, "context": self._context(self._spec["driver"])}
                    )
                    self._opened = opening.result(timeout=self._deadline_secs)
            return self._opened

    def _context(self, driver: str) -> dict[str, Any]:
        # The waits between the tries add up to half of the deadline, so that a server that is gone is reported as that.
        retries = {
            "max_retries": _NUM_RETRIES,
            "initial_delay": f"{self._deadline_secs / 240:.6f}s",
            "max_delay": f"{self._deadline_secs / 8:.6f}s",
        }
        return {f"{driver}_request_retries": retries} if driver in ("s3", "gcs", "http") else {}

    @contextmanager
    def _typed(self, action: str, key: str, deadline_secs: float | None = None) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            limit = self._deadline_secs if deadline_secs is None else deadline_secs
            raise deadline_error(action, self._path(key), deadline_secs=limit) from None
        except ValueError as error:
            if str(error).startswith("OUT_OF_RANGE"):
                raise _RangeError(size_in_message(error)) from None
            raise object_error(error, action, self._path(key)) from error

    def _path(self, key: str) -> str:
        return f"{self._location}/{key}" if key else self._location


def refusal_of(spec: Mapping[str, Any]) -> str | None:
    """Return why no store can have this specification, None where one can; touches nothing."""
    try:
        _tensorstore().KvStore.Spec(dict(spec))
    except ValueError as error:
        return str(error)
    return None


def _around(size: int) -> tuple[int, int]:
    return max(0, size - 1), size + 1


def _tensorstore() -> Any:
    import tensorstore  # noqa: PLC0415 - only where it is used: it starts threads

    return tensorstore
