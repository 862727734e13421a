"""From `gs://bucket/prefix` and `s3://bucket/prefix` to what TensorStore must be told.

Owns where endpoint, region and credentials come from. Touches nothing but the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safepoint.formats.errors import InvalidArgumentError
from safepoint.formats.storage.base import split_path
from safepoint.formats.storage.object_client import refusal_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from safepoint.formats.storage.options import StorageOptions

__all__ = ["ObjectRoot", "parse_object_url"]

_MAX_S3_BYTES = 5 << 30  # of one PUT
_MAX_GS_BYTES = 5 << 40
_GOOGLE = "https://storage.googleapis.com"
_ANY_REGION = "us-east-1"  # servers that are not Amazon's want some


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectRoot:
    """A prefix of a bucket.

    Attributes:
        location: its URL, without "/" at the end.
        spec: of TensorStore's key-value store.
        max_object_bytes: what the store takes in one piece.
        bucket_url: where Google's service tells about the bucket itself; None elsewhere.
    """

    location: str
    spec: Mapping[str, Any]
    max_object_bytes: int
    bucket_url: str | None = None


def parse_object_url(url: str, options: StorageOptions) -> ObjectRoot | None:
    """Return what a URL names, None when it is of no object store.

    The prefix is taken as it stands: nothing in it is percent-decoded, as with the clouds' own tools.

    Raises:
        InvalidArgumentError: a prefix with empty, "." or ".." parts; a bucket name that the service cannot have; an
            option that this store does not take.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in ("gs", "s3"):
        return None
    bucket, _, prefix = rest.rstrip("/").partition("/")
    split_path(prefix)
    if not bucket:
        raise InvalidArgumentError(f"no bucket in {url!r}", hint=f"Give it as {scheme}://bucket/prefix.")
    spec = _s3_spec(options) if scheme == "s3" else _gs_spec(options)
    spec |= {"bucket": bucket, "path": f"{prefix}/" if prefix else ""}
    _check(spec, url)
    location = f"{scheme}://{bucket}/{prefix}".rstrip("/")
    if scheme == "s3":
        return ObjectRoot(location=location, spec=spec, max_object_bytes=_MAX_S3_BYTES)
    service = os.environ.get("TENSORSTORE_GCS_HTTP_URL") or _GOOGLE  # as TensorStore decides it
    bucket_url = f"{service.rstrip('/')}/storage/v1/b/{bucket}"
    return ObjectRoot(location=location, spec=spec, max_object_bytes=_MAX_GS_BYTES, bucket_url=bucket_url)


def _s3_spec(options: StorageOptions) -> dict[str, Any]:
    endpoint = options.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = options.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    # Without the last, TensorStore looks and then writes where the endpoint is not Amazon's: two would win.
    spec: dict[str, Any] = {"driver": "s3", "use_conditional_write": True}
    if endpoint:
        spec["endpoint"] = endpoint.rstrip("/")
        region = region or _ANY_REGION
    if region:
        spec["aws_region"] = region
    if options.profile is not None:
        spec["aws_credentials"] = {"type": "profile", "profile": options.profile}
    return spec


def _gs_spec(options: StorageOptions) -> dict[str, Any]:
    for name in ("endpoint", "region", "profile"):
        if getattr(options, name) is not None:
            raise InvalidArgumentError(
                f"`{name}` is not for gs:// roots",
                hint="TensorStore takes another endpoint from the environment only, TENSORSTORE_GCS_HTTP_URL, and "
                "credentials from GOOGLE_APPLICATION_CREDENTIALS, gcloud's own file or the machine.",
            )
    return {"driver": "gcs"}


def _check(spec: Mapping[str, Any], url: str) -> None:
    refusal = refusal_of(spec)
    if refusal is not None:
        raise InvalidArgumentError(
            f"{url!r} names nothing that this store could have: {refusal}",
            hint="Bucket names have 3 to 63 lowercase letters, digits, dots and hyphens.",
        )
