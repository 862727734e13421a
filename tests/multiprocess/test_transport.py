"""A mesh of connections that cannot be made says who is missing. The other ends are stores without a process behind."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from safepoint.manager.coordination.address import open_server
from safepoint.manager.coordination.store import connect_tcp
from safepoint.manager.coordination.transport import GlooTransport
from safepoint.manager.errors import RendezvousTimeoutError

if TYPE_CHECKING:
    from safepoint.manager.coordination.store import Store

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
