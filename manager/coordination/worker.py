"""Calls that may never return, made so that their caller always does.

Owns the daemon thread on which such calls run. Must not know what they do.

A C++ call on a socket cannot be interrupted, and the timeouts of torch's stores do not hold while the other side is
stopped. So a call runs on a thread of its own, the caller waits as long as *it* wants to, and then leaves the thread
behind: the next call gets a new one. A thread that was left behind ends by itself once its call returns.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StuckError", "Worker"]

R = TypeVar("R")
T = TypeVar("T")
_FIRST_SECS, _SLICE_SECS = 0.1, 1.0


class StuckError(Exception):
    """The call had not returned when the deadline came; its thread was left behind."""


class _Job:
    def __init__(self, call: Callable[[Any], Any]) -> None:
        self.call = call
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class Worker(Generic[R]):
    """Runs calls one after the other, each with the resource that only their thread uses.

    Args:
        name: of the thread.
        make: makes the resource, on the thread, when it is first needed and again after `renew`.
    """

    def __init__(self, name: str, make: Callable[[], R]) -> None:
        self._name = name
        self._make = make
        self._jobs: queue.SimpleQueue[_Job | None] | None = None
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[R], T], *, until: float, meanwhile: Callable[[], float] | None = None) -> T:
        """Return what `call` returns.

        Args:
            call: gets the resource.
            until: deadline on the monotonic clock.
            meanwhile: called on the caller's thread while it waits; returns after how many seconds to call it again.
                What it raises ends the wait, and the call is left behind.

        Raises:
            StuckError: the deadline came first.
        """
        job = self._enqueue(call)
        wait_secs = _FIRST_SECS
        try:
            while not job.done.wait(max(0.0, min(wait_secs, until - time.monotonic()))):
                if time.monotonic() >= until:
                    raise StuckError(self._name)
                wait_secs = _SLICE_SECS if meanwhile is None else meanwhile()
        except BaseException:
            # Also when the caller is interrupted: what the thread is doing now belongs to nobody any more.
            self.renew()
            raise
        if job.error is not None:
            raise job.error
        result: T = job.result
        return result

    def post(self, call: Callable[[R], object]) -> None:
        """Have this done before any later call, whenever that can be, and do not wait."""
        self._enqueue(call)

    def _enqueue(self, call: Callable[[R], object]) -> _Job:
        if self._jobs is None:
            jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
            thread = threading.Thread(target=_serve, args=(jobs, self._make), name=self._name, daemon=True)
            thread.start()  # before it is known: whoever closes meanwhile may wait for it
            self._jobs, self._thread = jobs, thread
        job = _Job(call)
        self._jobs.put(job)
        return job

    def renew(self) -> None:
        """Let the thread end once it is free; the next call gets a new one with a new resource."""
        if self._jobs is not None:
            self._jobs.put(None)
        self._jobs = None
        self._thread = None

    def close(self, *, within_secs: float) -> None:
        """End the thread, waiting a bounded time for the call in flight."""
        thread = self._thread
        self.renew()
        if thread is not None:
            thread.join(within_secs)

    def __del__(self) -> None:
        self.renew()


def _serve(jobs: queue.SimpleQueue[_Job | None], make: Callable[[], Any]) -> None:
    resource: Any = None
    while (job := jobs.get()) is not None:
        try:
            if resource is None:
                resource = make()
            job.result = job.call(resource)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller, on its thread
            job.error = error
        job.done.set()
        del job
