"""Object stores keep the contract: TensorStore's own in memory, S3 and Google's on servers of this machine."""

from __future__ import annotations

import errno
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.storage import Entry, ObjectStorage, Storage, StorageOptions, open_storage
from safepoint.formats.storage.object_urls import ObjectRoot

from support.object_servers import BUCKET
from support.storage_contract import StorageContract, failed_with, names

if TYPE_CHECKING:
    from support.object_servers import ObjectServer

OPTIONS = StorageOptions(deadline_secs=30)


class TestKeyValueStoreInMemory(StorageContract):
    @pytest.fixture
    def rootless(self) -> Storage:
        root = ObjectRoot(location="memory", spec={"driver": "memory", "path": "p/"}, max_object_bytes=1 << 40)
        return ObjectStorage(root)


class TestS3(StorageContract):
    @pytest.fixture
    def rootless(self, s3: ObjectServer, unused_prefix: str) -> Storage:
        return open_storage(s3.url(unused_prefix), OPTIONS)


class TestGoogle(StorageContract):
    @pytest.fixture
    def rootless(self, gs: ObjectServer, unused_prefix: str) -> Storage:
        return open_storage(gs.url(unused_prefix), OPTIONS)


def test_directories_are_only_what_keys_have_in_front(object_server: ObjectServer, unused_prefix: str) -> None:
    storage = open_storage(object_server.url(unused_prefix))
    assert not storage.renames
    assert storage.is_remote
    storage.make_dir("gone/item")
    assert storage.list("") == []
    storage.put("a/b/f", b"1")
    assert names(storage, "a") == {"b"}
    failed_with(errno.EOPNOTSUPP, lambda: storage.rename_dir("a", "z"))
    failed_with(errno.EEXIST, lambda: storage.make_dir("a", exist_ok=False))
    assert names(storage) == {"a"}


def test_a_root_ends_at_its_own_prefix(object_server: ObjectServer, unused_prefix: str) -> None:
    root = object_server.url(unused_prefix)
    storage, neighbour = open_storage(root), open_storage(f"{root}0")
    storage.put("1/f", b"")
    storage.put("10/f", b"")
    neighbour.put("1/f", b"")
    storage.delete_tree("1")
    assert names(storage) == {"10"}
    assert names(neighbour) == {"1"}


def test_placeholders_of_other_tools_are_neither_listed_nor_left(
    object_server: ObjectServer, unused_prefix: str
) -> None:
    root = object_server.url(unused_prefix)
    storage = open_storage(root)
    storage.make_dir("")
    assert isinstance(storage, ObjectStorage)
    for key in ("1/",) if object_server.scheme == "s3" else ("1/", "1//", "1//x"):  # as consoles make them for folders
        storage._client.written(storage._client.start_write(key, b""))
    storage.put("1/f", b"")
    assert storage.list("") == [Entry("1", is_dir=True)]
    assert storage.list("1") == [Entry("f", is_dir=False)]
    storage.delete_tree("1")
    assert storage.list("") == []


@pytest.mark.parametrize("name", ["line\nbreak", "tab\t", "\x01", "half \ud800"])
def test_a_name_that_is_not_plain_is_refused(object_server: ObjectServer, unused_prefix: str, name: str) -> None:
    storage = open_storage(object_server.url(unused_prefix))
    for call in (
        lambda: storage.put(name, b""),
        lambda: storage.get(name, max_bytes=1),
        lambda: storage.open_writer(name, num_bytes=1),
        lambda: storage.delete_tree(name),
    ):
        failed_with(errno.EINVAL, call)
    failed_with(errno.ENAMETOOLONG, lambda: storage.put("é" * 520, b""))


def test_more_objects_than_fit_on_a_page_are_all_listed(gs: ObjectServer, unused_prefix: str) -> None:
    storage = open_storage(gs.url(unused_prefix))

    def put(number: int) -> None:  # past the proxy, which is slow
        key = urllib.parse.quote(f"{unused_prefix}/{number}/commit.json", safe="")
        url = f"http://{gs.bare_address}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={key}"
        urllib.request.urlopen(urllib.request.Request(url, data=b"{}", method="POST")).close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, range(1001)))
    assert names(storage) == {str(number) for number in range(1001)}
