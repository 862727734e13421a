"""Fixtures for tests on object stores: one server of each kind a session, started by the first test that asks."""

from __future__ import annotations

import itertools
import secrets
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from support.object_servers import ObjectServer, gcs_server, s3_elsewhere, s3_server

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["gs", "object_server", "s3", "unused_prefix"]

_SESSION = secrets.token_hex(4)  # a server that runs already may hold what another session left
_prefixes = itertools.count(1)


@pytest.fixture(scope="session")
def s3(request: pytest.FixtureRequest) -> Iterator[ObjectServer]:
    """A server of S3; this process's environment leads to it."""
    address = request.config.getoption("--s3-address")
    with s3_server() if address is None else nullcontext(s3_elsewhere(address)) as server, _environment(server):
        yield server


@pytest.fixture(scope="session")
def gs() -> Iterator[ObjectServer]:
    """A server of Google's; this process's environment leads to it."""
    with gcs_server() as server, _environment(server):
        yield server


@pytest.fixture(scope="session", params=["s3", "gs"])
def object_server(request: pytest.FixtureRequest) -> ObjectServer:
    """Each of the two."""
    server: ObjectServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def unused_prefix() -> str:
    """A prefix with nothing below, in any bucket."""
    return f"run é {_SESSION}-{next(_prefixes)}/a b"


class _environment(pytest.MonkeyPatch):  # noqa: N801 - reads as the context manager that it is
    def __init__(self, server: ObjectServer) -> None:
        super().__init__()
        self._server = server

    def __enter__(self) -> None:
        for name, value in self._server.environment.items():
            self.setenv(name, value)

    def __exit__(self, *_: object) -> None:
        self.undo()
