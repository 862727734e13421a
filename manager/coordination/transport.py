"""Host memory from process to process, over gloo.

Owns a process group of its own, made over our store: not one of the training's, with which its messages would mix and
whose timeouts it would share. Must not know what is sent.
"""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING, Any

from safepoint.manager.coordination.base import Transport
from safepoint.manager.coordination.store import ProcessGroupGloo, Store
from safepoint.manager.coordination.worker import StuckError, Worker
from safepoint.manager.errors import PeerFailedError, RendezvousTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

__all__ = ["GlooTransport"]

_EXTRA_SECS = 0.5


class GlooTransport(Transport):
    """A full mesh of connections between some processes.

    After an error gloo's connections are of no use any more: `is_sound` turns False and a new one has to be opened.

    Args:
        connect: makes a connection to a store that was opened for this transport; not needed afterwards.
        process_index: of this process.
        members: indices of all that are to be connected, this one included; the same on each of them.
        deadline_secs: until all must be connected.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        *,
        process_index: int,
        members: Sequence[int],
        deadline_secs: float,
    ) -> None:
        self.is_sound = True
        self._places = {member: place for place, member in enumerate(members)}
        timeout = datetime.timedelta(seconds=deadline_secs)

        absent: list[int] = []

        def make() -> Any:
            store: Any = connect()
            store.set_timeout(timeout)
            store.set(f"came/{process_index}", "")
            try:
                return ProcessGroupGloo(store, self._places[process_index], len(members), timeout)
            except (RuntimeError, OSError):
                absent.extend(_absent(store, members))
                raise

        self._worker: Worker[Any] = Worker("safepoint-transport", make)
        try:
            # gloo gives up by itself at the deadline, and then it can be seen who did not come.
            self._worker.run(lambda _: None, until=time.monotonic() + deadline_secs + _EXTRA_SECS)
        except (StuckError, RuntimeError, OSError) as error:
            self.close()
            if not absent and process_index != 0 and isinstance(error, (StuckError, OSError)):
                absent.append(0)  # it serves the store that does not answer, or is there no more
            missing = f", without processes {absent}" if absent else ""
            raise RendezvousTimeoutError(
                f"The processes could not be connected with each other{missing}: {_first_line(error) or 'no answer'}.",
                absent=tuple(absent),
                deadline_secs=deadline_secs,
                hint="gloo must find a network interface that all hosts share; GLOO_SOCKET_IFNAME names one.",
            ) from error

    def send(self, buffer: torch.Tensor, to: int, deadline_secs: float) -> None:
        """See `Transport.send`."""
        self._move(lambda group: group.send([buffer], self._places[to], 0), to, deadline_secs, "take")

    def receive(self, buffer: torch.Tensor, source: int, deadline_secs: float) -> None:
        """See `Transport.receive`."""
        self._move(lambda group: group.recv([buffer], self._places[source], 0), source, deadline_secs, "send")

    def close(self) -> None:
        """Let go of the connections."""
        self.is_sound = False
        self._worker.close(within_secs=_EXTRA_SECS)

    def _move(self, start: Callable[[Any], Any], other: int, deadline_secs: float, verb: str) -> None:
        began = time.monotonic()
        if not self.is_sound:
            raise PeerFailedError(
                f"The connection to process {other} was lost in an earlier transfer.", process_index=other
            )
        timeout = datetime.timedelta(seconds=deadline_secs)
        try:
            # gloo's own timeout works in general; ours holds whatever it does.
            self._worker.run(lambda group: start(group).wait(timeout), until=began + deadline_secs + _EXTRA_SECS)
        except (StuckError, RuntimeError) as error:
            self.is_sound = False
            if isinstance(error, StuckError) or time.monotonic() - began >= deadline_secs:
                raise RendezvousTimeoutError(
                    f"Process {other} did not {verb} what it should within {deadline_secs:g} s.",
                    absent=(other,),
                    deadline_secs=deadline_secs,
                ) from error
            raise PeerFailedError(
                f"The connection to process {other} broke: {_first_line(error)}", process_index=other
            ) from error
        except BaseException:
            self.is_sound = False
            raise


def _absent(store: Store, members: Sequence[int]) -> list[int]:
    """Return the processes that did not come; the one that serves the store, where that is no more."""
    try:
        return [each for each in members if not store.check([f"came/{each}"])]
    except (RuntimeError, OSError):
        return [0]


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", maxsplit=1)[0]
