"""StorageOptions: what a URL and the clouds' own environment do not say about a storage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from safepoint.formats.errors import InvalidArgumentError

__all__ = ["StorageOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageOptions:
    """How to reach an object store, and how much to ask of it. Local storages take none of it.

    Attributes:
        endpoint: `http(s)://host:port` of a server that speaks S3; None for `$AWS_ENDPOINT_URL_S3`, `$AWS_ENDPOINT_URL`
            or Amazon's own. For S3 only.
        region: of the bucket; None for `$AWS_REGION`, `$AWS_DEFAULT_REGION`, or to ask the service. For S3 only.
        profile: of the AWS configuration files, whose credentials are used; None for the usual chain of sources. For S3
            only.
        deadline_secs: for each request, with its retries and the waits between them. A listing counts as ten.
        max_in_flight_bytes: of files under way to the store, in all threads of one storage.
        num_streams: files, or ranges of them, that are worth moving at once.
    """

    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    deadline_secs: float = 60.0
    max_in_flight_bytes: int = 256 << 20
    num_streams: int = 8

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            InvalidArgumentError: a number that is not above zero, or an endpoint that is no URL of a server.
        """
        if not (self.deadline_secs > 0 and math.isfinite(self.deadline_secs)):
            raise InvalidArgumentError(f"a deadline of {self.deadline_secs} seconds makes no sense")
        if self.max_in_flight_bytes < 1 or self.num_streams < 1:
            raise InvalidArgumentError(
                f"{self.max_in_flight_bytes} bytes in flight in {self.num_streams} streams move nothing",
                hint="Both must be at least 1.",
            )
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise InvalidArgumentError(
                f"not an endpoint: {self.endpoint!r}", hint="Give it as http://host:port or https://host:port."
            )
