"""What a URL, the options and the clouds' environment make of a root on an object store."""

from __future__ import annotations

import pytest

from safepoint.formats.errors import InvalidArgumentError
from safepoint.formats.storage import StorageOptions
from safepoint.formats.storage.object_urls import parse_object_url

VARIABLES = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "TENSORSTORE_GCS_HTTP_URL",
)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "bucket", "path", "location"),
    [
        ("s3://bucket", "bucket", "", "s3://bucket"),
        ("s3://bucket/", "bucket", "", "s3://bucket"),
        ("s3://bucket/run", "bucket", "run/", "s3://bucket/run"),
        ("gs://bucket/a/b/", "bucket", "a/b/", "gs://bucket/a/b"),
        ("gs://bucket/实验 é?#%20", "bucket", "实验 é?#%20/", "gs://bucket/实验 é?#%20"),
    ],
)
def test_bucket_and_prefix_are_taken_as_they_stand(url: str, bucket: str, path: str, location: str) -> None:
    root = parse_object_url(url, StorageOptions())
    assert root is not None
    assert (root.spec["bucket"], root.spec["path"], root.location) == (bucket, path, location)


def test_s3_asks_for_conditional_writes_always() -> None:
    root = parse_object_url("s3://bucket/run", StorageOptions())
    assert root is not None
    assert root.spec["use_conditional_write"] is True
    assert "endpoint" not in root.spec
    assert "aws_region" not in root.spec


def test_endpoint_and_region_come_from_the_options_else_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def spec(**options: str) -> tuple[object, object]:
        root = parse_object_url("s3://bucket", StorageOptions(**options))  # type: ignore[arg-type]
        assert root is not None
        return root.spec.get("endpoint"), root.spec.get("aws_region")

    assert spec(endpoint="http://h:1/", region="r") == ("http://h:1", "r")
    assert spec(endpoint="http://h:1") == ("http://h:1", "us-east-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "d")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all:1")
    assert spec() == ("http://all:1", "d")
    monkeypatch.setenv("AWS_REGION", "e")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3:1")
    assert spec() == ("http://s3:1", "e")
    assert spec(endpoint="http://h:1", region="r") == ("http://h:1", "r")


def test_a_profile_is_handed_on() -> None:
    root = parse_object_url("s3://bucket", StorageOptions(profile="train"))
    assert root is not None
    assert root.spec["aws_credentials"] == {"type": "profile", "profile": "train"}


def test_other_urls_are_not_ours() -> None:
    for url in ("/local", "memory://x", "http://bucket/x", "s3a://bucket/x", "S3://bucket"):
        assert parse_object_url(url, StorageOptions()) is None


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///run",
        "gs:///run",
        "s3://Bad_Bucket?/x",
        "gs://Bad_Bucket/x",
        "s3://a/x",
        "gs://x y/z",
        "s3://192.168.0.1/x",
        "s3://bucket/a//b",
        "s3://bucket/../x",
        "gs://bucket/a/./b",
        "gs://bucket/nul\0",
    ],
)
def test_what_no_store_can_have_is_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_object_url(url, StorageOptions())
    assert caught.value.hint


@pytest.mark.parametrize("name", ["endpoint", "region", "profile"])
def test_options_of_s3_are_refused_for_google(name: str) -> None:
    options = StorageOptions(**{name: "http://x"})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=name) as caught:
        parse_object_url("gs://bucket/x", options)
    assert "TENSORSTORE_GCS_HTTP_URL" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "options",
    [
        {"deadline_secs": 0},
        {"deadline_secs": -1},
        {"deadline_secs": float("nan")},
        {"deadline_secs": float("inf")},
        {"max_in_flight_bytes": 0},
        {"num_streams": 0},
        {"endpoint": "localhost:9000"},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError):
        StorageOptions(**options)  # type: ignore[arg-type]
