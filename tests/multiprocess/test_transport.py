"""Connections that cannot be made say who is missing, and where they can be done without, all do without.

The other ends of a mesh are stores without a process behind; circles are of processes.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from safepoint.manager.coordination import connections, detect_coordinator
from safepoint.manager.coordination.address import open_server
from safepoint.manager.coordination.store import connect_tcp
from safepoint.manager.coordination.transport import GlooTransport
from safepoint.manager.errors import RendezvousTimeoutError

if TYPE_CHECKING:
    from safepoint.manager.coordination.store import Store

    from support.process_pool import ProcessPool

HOST = "127.0.0.1"


def test_a_mesh_that_cannot_be_made_names_those_who_did_not_come() -> None:
    server = open_server()
    try:
        with pytest.raises(RendezvousTimeoutError, match=r"without processes \[1, 2\]") as caught:
            GlooTransport(
                lambda: connect_tcp(HOST, server.address.port), process_index=0, members=range(3), deadline_secs=1.0
            )
    finally:
        server.close()
    assert caught.value.absent == (1, 2)


def test_a_mesh_whose_store_goes_away_names_the_process_that_served_it() -> None:
    server = open_server()
    watching = connect_tcp(HOST, server.address.port)

    def leave() -> None:
        while not watching.check(["came/1"]):
            time.sleep(0.01)
        server.close()

    thread = threading.Thread(target=leave)
    thread.start()
    try:
        with pytest.raises(RendezvousTimeoutError, match=r"without processes \[0\]") as caught:
            GlooTransport(
                lambda: connect_tcp(HOST, server.address.port), process_index=1, members=range(2), deadline_secs=20.0
            )
    finally:
        thread.join()
    assert caught.value.absent == (0,)


def test_a_mesh_whose_store_is_gone_before_names_the_process_that_served_it() -> None:
    def connect() -> Store:
        return connect_tcp(HOST, port)

    server = open_server()
    port = server.address.port
    server.close()
    with pytest.raises(RendezvousTimeoutError, match=r"without processes \[0\]") as caught:
        GlooTransport(connect, process_index=1, members=range(2), deadline_secs=5.0)
    assert caught.value.absent == (0,)


def circle_case(rank: int, members: list[list[int]], failing: int) -> list[int | None]:
    """Return what was received from the other of each circle; None where there is none."""
    received: list[int | None] = []

    def connect(*_: object, **__: object) -> GlooTransport:
        raise RendezvousTimeoutError("no way", absent=(), deadline_secs=1.0)

    with detect_coordinator(deadline_secs=20) as coordinator:
        for is_broken in (True, False, False):
            connections.GlooTransport = connect if is_broken and rank == failing else GlooTransport  # type: ignore[misc, assignment, attr-defined]
            transport = coordinator.open_circle(members[rank], 8)
            if transport is None:
                received.append(None)
                continue
            (other,) = set(members[rank]) - {rank}
            data = torch.zeros(1, dtype=torch.uint8)
            for is_own in (True, False) if rank < other else (False, True):
                if is_own:
                    transport.send(torch.tensor([rank], dtype=torch.uint8), other, 10)
                else:
                    transport.receive(data, other, 10)
            received.append(int(data))
    return received


def test_a_circle_connects_its_members_and_none_where_some_cannot_be(process_pool: ProcessPool) -> None:
    members = [[0, 3], [1, 2], [1, 2], [0, 3]]
    assert process_pool.run(circle_case, members, 3, num_processes=4) == [[None, n, n] for n in (3, 2, 1, 0)]


def test_who_is_in_no_circle_meets_and_is_not_connected(process_pool: ProcessPool) -> None:
    found = process_pool.run(circle_case, [[0, 2], [], [0, 2]], -1, num_processes=3)
    assert found == [[2, 2, 2], [None] * 3, [0, 0, 0]]
