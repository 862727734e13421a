"""Data put once for all processes and found by its digest.

Owns the keys of blobs and their bounded number. Must not know what a blob holds.

The store keeps the newest blobs only: every blob has a place in a log, and who puts number n deletes number
n - capacity. A blob that is shared again while in the older half of the log moves to its end; so one that was shared
before a meeting is there until the processes have shared half the capacity of others, which is more than one save can.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict

from safepoint.manager.coordination.store import Line, StoreGoneError, StoreStuckError, Values
from safepoint.manager.errors import RendezvousTimeoutError

__all__ = ["Blobs", "blob_digest"]

_SMALLEST_CAPACITY = 64
_PER_PROCESS = 8
_LOCAL_BYTES = 64 << 20
_PAUSE_SECS = 0.01


def blob_digest(data: bytes) -> str:
    """Return the name under which data is shared."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Blobs:
    """The blobs of one run.

    Args:
        line: to the store.
        process_count: of the run; more processes share more blobs.
    """

    def __init__(self, line: Line, process_count: int) -> None:
        self._line = line
        self._capacity = max(_SMALLEST_CAPACITY, _PER_PROCESS * process_count)
        self._local: OrderedDict[str, bytes] = OrderedDict()
        self._local_bytes = 0

    def share(self, data: bytes, *, deadline_secs: float) -> str:
        """See `Coordinator.share_blob`."""
        digest = blob_digest(data)

        def put(values: Values) -> None:
            place = values.read(f"blob/{digest}/place")
            newest = values.add("blob/count", 0)
            if place is not None and newest - int(place) < self._capacity // 2:
                return
            if place is None:
                values.write(f"blob/{digest}", data)
            number = values.add("blob/count", 1)
            values.write(f"blob/{digest}/place", str(number).encode())
            values.write(f"blob/log/{number}", digest.encode())
            self._evict(values, number - self._capacity)

        try:
            self._line.call(put, until=time.monotonic() + deadline_secs)
        except (StoreStuckError, StoreGoneError) as error:
            raise self._unreachable(error, deadline_secs) from error
        self._keep(digest, data)
        return digest

    def fetch(self, digest: str, *, deadline_secs: float) -> bytes:
        """See `Coordinator.fetch_blob`."""
        if digest in self._local:
            self._local.move_to_end(digest)
            return self._local[digest]
        until = time.monotonic() + deadline_secs
        try:
            while (data := self._line.call(lambda values: values.read(f"blob/{digest}"), until=until)) is None:
                if time.monotonic() >= until:
                    raise RendezvousTimeoutError(
                        f"Nobody has shared the blob {digest} within {deadline_secs:g} s.",
                        absent=(),
                        deadline_secs=deadline_secs,
                    )
                time.sleep(_PAUSE_SECS)
        except (StoreStuckError, StoreGoneError) as error:
            raise self._unreachable(error, deadline_secs) from error
        assert blob_digest(data) == digest, f"the store gave back other bytes than those of {digest}"
        self._keep(digest, data)
        return data

    def close(self) -> None:
        """Let go of the connection."""
        self._line.close()

    def _evict(self, values: Values, number: int) -> None:
        logged = values.read(f"blob/log/{number}") if number > 0 else None
        if logged is None:
            return
        values.erase(f"blob/log/{number}")
        digest = logged.decode()
        if values.read(f"blob/{digest}/place") == str(number).encode():
            values.erase(f"blob/{digest}/place")
            values.erase(f"blob/{digest}")

    def _keep(self, digest: str, data: bytes) -> None:
        if digest in self._local:
            self._local.move_to_end(digest)
            return
        self._local[digest] = data
        self._local_bytes += len(data)
        while len(self._local) > self._capacity or (self._local_bytes > _LOCAL_BYTES and len(self._local) > 1):
            _, dropped = self._local.popitem(last=False)
            self._local_bytes -= len(dropped)

    def _unreachable(self, error: Exception, deadline_secs: float) -> RendezvousTimeoutError:
        what = "left" if isinstance(error, StoreGoneError) else "did not answer"
        return RendezvousTimeoutError(
            f"Process 0, which holds what processes share, {what}.", absent=(0,), deadline_secs=deadline_secs
        )
