"""A root whose newest step tests rewrite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.hostile_steps import HostileStep

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> HostileStep:
    return HostileStep(tmp_path_factory.mktemp("hostile") / "root")


@pytest.fixture
def step(pristine: HostileStep) -> Iterator[HostileStep]:
    """The same root for every test, put back after it: making one takes a second."""
    saved = {path: path.read_bytes() for path in pristine.folder.rglob("*") if path.is_file()}
    yield pristine
    for path in list(pristine.folder.rglob("*")):
        if path.is_symlink() or (path.is_file() and path not in saved):
            path.unlink()
    for path, data in saved.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
