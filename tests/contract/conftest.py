"""A root of every kind: what a manager promises, it promises on each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.roots import KINDS, make_root

if TYPE_CHECKING:
    from pathlib import Path

    from support.roots import Root


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path, unused_prefix: str) -> Root:
    return make_root(request, tmp_path, unused_prefix)
