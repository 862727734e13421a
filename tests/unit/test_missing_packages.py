"""What is told to those who import an integration without its package."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import pytest

from safepoint.manager.errors import MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Iterator

INTEGRATIONS = "safepoint.manager.integrations"


@pytest.fixture(params=[("lightning", "lightning"), ("transformers", "huggingface")], ids=["lightning", "transformers"])
def without(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Nothing of a package is imported, and it cannot be."""
    package = request.param[0]
    hidden = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] == package or name.startswith(f"{INTEGRATIONS}.{package}")
    }
    for name in hidden:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]  # which makes its import fail
    yield request.param
    del sys.modules[package]
    sys.modules.update(hidden)


def test_a_missing_package_is_named_with_the_extra_that_installs_it(without: tuple[str, str]) -> None:
    package, extra = without

    with pytest.raises(MissingPackageError, match=package) as raised:
        importlib.import_module(f"{INTEGRATIONS}.{package}")

    assert raised.value.hint == f"pip install 'safepoint[{extra}]'"
