"""What a client of an object store complains about, as typed errors that say what to check.

Owns the reading of TensorStore's messages, `CODE: text [detail='…']`. They are all it gives: every failure is a
ValueError. The details repeat the server's answer, identifiers of keys included, and are left out of our messages.
"""

from __future__ import annotations

import errno
import re
from typing import NamedTuple

from safepoint.formats.errors import StorageError

__all__ = ["deadline_error", "object_error", "size_in_message"]

_DETAILS = re.compile(r"\s*\[[a-z][\w-]*='.*", re.DOTALL)
_SIZES = (re.compile(r"total size (\d+)"), re.compile(r"value of size (\d+)"), re.compile(r"<ActualObjectSize>(\d+)<"))
_MAX_CHARACTERS = 300


class _Kind(NamedTuple):
    pattern: re.Pattern[str]
    errno: int
    hint: str


def _kind(pattern: str, number: int, hint: str) -> _Kind:
    return _Kind(re.compile(pattern, re.IGNORECASE), number, hint)


_KINDS = (
    _kind(
        r"NoSuchBucket|^NOT_FOUND",
        errno.ENOENT,
        "There is no such bucket, or not at this endpoint: check the bucket's name, the endpoint and the project, and "
        "create the bucket first (safepoint never does).",
    ),
    _kind(
        r"Expired|TokenRefreshRequired|InvalidToken|Invalid Credentials|invalid_grant|^UNAUTHENTICATED|code='401'",
        errno.EACCES,
        "The credentials have expired or are not valid (any more): renew them, or let the job use a source that renews "
        "them itself (a role or service account, a profile).",
    ),
    _kind(
        r"RequestTimeTooSkewed",
        errno.EACCES,
        "This machine's clock differs too much from the service's: set it.",
    ),
    _kind(
        r"InvalidAccessKeyId|SignatureDoesNotMatch",
        errno.EACCES,
        "The service does not know this access key, or the secret does not belong to it: check AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY and AWS_PROFILE, and that they are of this endpoint.",
    ),
    _kind(
        r"credentials provider|Failed to get credentials|OAuth|metadata",
        errno.EACCES,
        "No credentials were found where this store's are looked for: for S3 AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, AWS_PROFILE or a role of the machine; for Google GOOGLE_APPLICATION_CREDENTIALS, "
        "`gcloud auth application-default login` or the machine's service account.",
    ),
    _kind(r"QuotaExceeded|InsufficientStorage", errno.EDQUOT, "The quota of this bucket or account is used up."),
    _kind(
        r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint",
        errno.EINVAL,
        "The bucket is in another region, or at another endpoint: give `region` in StorageOptions, or AWS_REGION.",
    ),
    _kind(
        r"AccessDenied|AllAccessDisabled|^PERMISSION_DENIED",
        errno.EACCES,
        "These credentials may not do that, or none were found: check which are in use and that they may list, read, "
        "write and delete objects in this bucket.",
    ),
    _kind(r"EntityTooLarge", errno.EFBIG, "The store takes no object as large as this: cut it into smaller parts."),
    _kind(
        r"Could not resolve|Could not connect|Connection refused|No route|SSL|certificate",
        errno.EHOSTUNREACH,
        "The endpoint cannot be reached: check its name, the network and the proxy, then try again.",
    ),
    _kind(
        r"SlowDown|TooManyRequests|^RESOURCE_EXHAUSTED",
        errno.EBUSY,
        "The service wants fewer requests a second: use fewer streams, or spread the jobs over more prefixes.",
    ),
    _kind(r"Invalid (S3|GCS) object name", errno.EINVAL, "This store does not take such a name: choose a plain one."),
)
_OTHER = "The service failed, also when asked again: look at its status page or log, then try again."


def object_error(error: Exception, action: str, path: str) -> StorageError:
    """Return the typed error for what the client raised.

    Args:
        error: what it raised.
        action: what was tried, to stand after "cannot".
        path: the object, in full.
    """
    text = str(error)
    kind = next((kind for kind in _KINDS if kind.pattern.search(text)), None)
    reason = _DETAILS.sub("", text).strip()[:_MAX_CHARACTERS]
    number, hint = (errno.EIO, _OTHER) if kind is None else (kind.errno, kind.hint)
    return StorageError(f"cannot {action}: {reason}", path=path, errno=number, hint=hint)


def deadline_error(action: str, path: str, *, deadline_secs: float) -> StorageError:
    """Return the error for a request that was not answered within its deadline."""
    return StorageError(
        f"cannot {action}: no answer within {deadline_secs:g} seconds",
        path=path,
        errno=errno.ETIMEDOUT,
        hint="The store or the network is stalled, or too slow for this deadline: check them, or give a longer "
        "`deadline_secs` in StorageOptions.",
    )


def size_in_message(error: Exception) -> int | None:
    """Return the size of the object that a complaint about a range mentions, None where it mentions none."""
    text = str(error)
    found = next((match for pattern in _SIZES if (match := pattern.search(text))), None)
    return None if found is None else int(found[1])
