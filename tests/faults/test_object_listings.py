"""Listings of object stores that come in pages: whole, or an error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.errors import StorageError
from safepoint.formats.storage import open_storage

from support.fault_proxy import FaultProxy, reads
from support.http_proxy import Exchange, Reply
from support.storage_contract import names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.object_servers import ObjectServer


class SmallPages(FaultProxy):
    """Lists ten objects on a page, and may refuse all pages but the first."""

    refusal: Reply | None = None

    def answer(self, exchange: Exchange) -> Reply | None:
        query = exchange.query
        if not (reads(exchange) and ("list-type" in query or exchange.path.endswith("/o"))):
            return super().answer(exchange)
        if self.refusal is not None and ("pageToken" in query or "continuation-token" in query):
            return self.refusal
        return exchange.forward(method="GET", target=f"{exchange.target}&maxResults=10&max-keys=10")


@pytest.fixture
def paged(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallPages]:
    with SmallPages(object_server.address) as proxy:
        for name, value in object_server.through(proxy.address).items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.mark.usefixtures("paged")
def test_listings_of_several_pages_are_whole(object_server: ObjectServer, unused_prefix: str) -> None:
    storage = open_storage(object_server.url(unused_prefix))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: storage.put(f"{number % 40}/é {number}", b""), range(55)))
    assert names(storage) == {str(number) for number in range(40)}
    assert names(storage, "3") == {"é 3", "é 43"}
    storage.delete_tree("3")
    assert names(storage) == {str(number) for number in range(40)} - {"3"}


def test_no_listing_ends_silently_at_a_page_that_was_refused(
    object_server: ObjectServer, unused_prefix: str, paged: SmallPages
) -> None:
    storage = open_storage(object_server.url(unused_prefix))
    for number in range(25):
        storage.put(f"{number}/f", b"")
    for status in (401, 403):
        paged.refusal = Reply(status=status, body=b'{"error": {"code": 401}}')
        found = None
        with suppress(StorageError):
            found = names(storage)
        assert found in (None, {str(number) for number in range(25)})
