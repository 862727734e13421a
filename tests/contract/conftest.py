"""A root of every kind: what a manager promises, it promises on each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.roots import KINDS, Root

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path, unused_prefix: str) -> Root:
    """A root where nothing is yet; the servers skip what they are not installed for."""
    kind = request.param
    if kind in ("s3", "gs"):
        return Root(kind=kind, url=request.getfixturevalue(kind).url(unused_prefix))
    if kind == "memory":
        return Root(kind=kind, url=f"memory://{unused_prefix}")
    return Root(kind=kind, url=str(tmp_path / "runs 实验" / "é 1"))
