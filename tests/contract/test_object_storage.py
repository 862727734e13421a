"""Object stores keep the contract: TensorStore's own in memory, S3 and Google's on servers of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from safepoint.formats.storage import ObjectStorage, Storage, StorageOptions, open_storage
from safepoint.formats.storage.object_urls import ObjectRoot

from support.storage_contract import StorageContract

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
