"""What every test shares: how hard hypothesis tries, one pool of processes, and XLA on the CPU by default."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from support.object_fixtures import gs, object_server, s3, unused_prefix  # noqa: F401 - fixtures for all tests
from support.process_pool import PoolView, ProcessPool

if TYPE_CHECKING:
    from collections.abc import Iterator

settings.register_profile(
    "short",
    max_examples=100,
    deadline=None,  # a busy machine is not a failure
    derandomize=True,  # what passed once passes again; new examples are for the long profile
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", parent=settings.get_profile("short"), max_examples=5000, derandomize=False)
settings.load_profile("short")  # by hand: --hypothesis-profile=long

# The C library reads this when a process, or the one that it was forked from, first looks up a name. torch looks up
# that of whatever it connects to, which takes five seconds where no name server answers: longer than many deadlines.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:0")
os.environ.setdefault("PJRT_DEVICE", "CPU")  # read when torch_xla is first imported, here or in a process of a test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--s3-address", help="host:port of a server of S3 with a bucket `contract`, to be used instead of moto's"
    )


@pytest.fixture(scope="session")
def process_pool() -> Iterator[ProcessPool]:
    """Four processes, started when a case first needs them; cases on one to four run in it."""
    pool = ProcessPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool2(process_pool: ProcessPool) -> PoolView:
    return process_pool.view(2)


@pytest.fixture(scope="session")
def pool3(process_pool: ProcessPool) -> PoolView:
    return process_pool.view(3)


@pytest.fixture(scope="session")
def pool4(process_pool: ProcessPool) -> PoolView:
    return process_pool.view(4)
