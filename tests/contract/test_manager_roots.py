"""The manager keeps its promises on every kind of root."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.root_contract import RootContract

if TYPE_CHECKING:
    from pathlib import Path

    from support.object_servers import ObjectServer


class TestDirectory(RootContract):
    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path / "run é 1")


class TestDirectoryWithoutRenames(RootContract):
    options: dict[str, Any] = {"commit": "marker"}  # noqa: RUF012 - never changed

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path / "run é 1")


class TestMemory(RootContract):
    @pytest.fixture
    def root(self, request: pytest.FixtureRequest) -> str:
        return f"memory://roots/{request.node.name}"


class TestS3(RootContract):
    @pytest.fixture
    def root(self, s3: ObjectServer, unused_prefix: str) -> str:
        return s3.url(unused_prefix)


class TestGoogle(RootContract):
    @pytest.fixture
    def root(self, gs: ObjectServer, unused_prefix: str) -> str:
        return gs.url(unused_prefix)
