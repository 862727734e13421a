"""A root of every kind that several processes can share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.roots import SHARED_KINDS, make_root

if TYPE_CHECKING:
    from pathlib import Path

    from support.roots import Root


@pytest.fixture(params=SHARED_KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path, unused_prefix: str) -> Root:
    return make_root(request, tmp_path, unused_prefix)
