"""The commit record: the small file, written last, whose presence makes a directory a committed step.

It owns `commit.json` as `docs/format.md` defines it. Listing and retention read nothing else. It must not know how a
step is published.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safepoint.formats.checksum import digest, is_digest
from safepoint.formats.errors import UnsupportedValueError
from safepoint.formats.fields import INT64_MAX, Fields, canonical_json, known_json, parse_json
from safepoint.formats.layout import LAYOUT_VERSION, MARKER_VERSION, MODES, SCOPES, Mode, Scope, check_header

if TYPE_CHECKING:
    from collections.abc import Mapping

    from safepoint.formats.tree import JSON

__all__ = ["COMMIT_KIND", "COMMIT_MAX_BYTES", "METRICS_MAX_BYTES", "CommitRecord", "check_own_digest", "fenced"]

COMMIT_MAX_BYTES = 1 << 20
"""A larger file is no commit record; ours are below 4 KiB unless a user adds many metrics."""

METRICS_MAX_BYTES = COMMIT_MAX_BYTES // 2
"""What metrics may take of it, as JSON; the rest is far more than everything else needs."""

COMMIT_KIND = "safepoint-commit"
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, kw_only=True)
class CommitRecord:
    """What a listing knows of a committed step.

    Attributes:
        version: of the layout.
        step: the step.
        sequence: one above the highest in the root when it was committed; "latest" goes by it.
        attempt: the attempt that wrote the step.
        run: the run that committed it.
        parent: the attempt that this run last restored or committed before; None for a fresh start.
        mode: who wrote what.
        format: name of the data files' format.
        metrics: by name; NaN and infinities are allowed.
        num_bytes: of all data files.
        num_leaves: how many arrays.
        process_count: how many processes saved.
        scope: whether this record speaks for all processes, or for the one that owns this private root.
        process_index: that process; None when the scope is "shared".
        manifest_bytes: exact size of the manifest.
        manifest_digest: of the manifest's bytes.
        timings: seconds by phase, for people.
        extra: whatever else is worth keeping, for people.
        created: UTC time in ISO form, for people only: nothing is ordered by it.
        linked_bytes: of the data files that an earlier step wrote, and that this one has by a second name.
        files: the directory, in the step's own, in which manifest and data files lie; "" where that is the step's own.
        fence: an attempt to replace the step that was given up; it changes the record so that it cannot succeed.
    """

    step: int
    sequence: int
    attempt: str
    run: str
    mode: Mode
    format: str
    num_bytes: int
    num_leaves: int
    process_count: int
    manifest_bytes: int
    manifest_digest: str
    version: int = LAYOUT_VERSION
    parent: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    scope: Scope = "shared"
    process_index: int | None = None
    timings: Mapping[str, JSON] = field(default_factory=dict)
    extra: Mapping[str, JSON] = field(default_factory=dict)
    created: str = ""
    linked_bytes: int = 0
    files: str = ""
    fence: str | None = None

    def to_bytes(self) -> bytes:
        """Return `commit.json`, with a digest of itself; equal records give equal bytes.

        Raises:
            UnsupportedValueError: a metric is no number, or `extra` or `timings` is not JSON.
        """
        value: dict[str, JSON] = {
            "kind": COMMIT_KIND,
            "version": self.version,
            "step": self.step,
            "sequence": self.sequence,
            "attempt": self.attempt,
            "run": self.run,
            "parent": self.parent,
            "mode": self.mode,
            "format": self.format,
            "metrics": {name: _metric_to_json(name, metric) for name, metric in self.metrics.items()},
            "num_bytes": self.num_bytes,
            "num_leaves": self.num_leaves,
            "process_count": self.process_count,
            "scope": self.scope,
            "process_index": self.process_index,
            "manifest_bytes": self.manifest_bytes,
            "manifest_digest": self.manifest_digest,
            "timings": dict(self.timings),
            "extra": dict(self.extra),
            "created": self.created,
        }
        if self.linked_bytes:
            value["linked_bytes"] = self.linked_bytes
        if self.files:
            value["files"] = self.files
        if self.fence is not None:
            value["fence"] = self.fence
        return canonical_json({**value, "digest": digest(canonical_json(value))})

    @classmethod
    def from_bytes(cls, data: bytes, *, path: str) -> CommitRecord:
        """Return the record that anybody may have written, checked throughout.

        Args:
            data: content of `commit.json`.
            path: where it was read, for errors.

        Raises:
            UnsupportedVersionError: a newer safepoint wrote it.
            CorruptDataError: anything else is wrong with it, its own digest included; names `path`.
        """
        value = parse_json(data, what="the commit record", path=path)
        fields = Fields(value, what="the commit record", path=path)
        check_header(fields, kind=COMMIT_KIND, newest=MARKER_VERSION)
        check_own_digest(data, value, fields)
        process_count = fields.integer("process_count", minimum=1)
        scope = fields.choice("scope", SCOPES)
        single = scope == "shared" and fields.is_null("process_index")
        return cls(
            version=fields.integer("version"),
            step=fields.integer("step"),
            sequence=fields.integer("sequence"),
            attempt=fields.identifier("attempt"),
            run=fields.identifier("run"),
            parent=None if fields.is_null("parent") else fields.identifier("parent"),
            mode=fields.choice("mode", MODES),
            format=fields.identifier("format"),
            metrics={name: _metric_from_json(fields, name, item) for name, item in fields.table("metrics").items()},
            num_bytes=fields.integer("num_bytes"),
            num_leaves=fields.integer("num_leaves"),
            process_count=process_count,
            scope=scope,
            process_index=None if single else fields.integer("process_index", maximum=process_count - 1),
            manifest_bytes=fields.integer("manifest_bytes", minimum=1),
            manifest_digest=_digest_of_manifest(fields),
            timings=fields.table("timings"),
            extra=fields.table("extra"),
            created=fields.text("created"),
            linked_bytes=fields.integer("linked_bytes") if fields.has("linked_bytes") else 0,
            files=_files(fields),
            fence=fields.identifier("fence") if fields.has("fence") else None,
        )


def fenced(data: bytes, attempt: str, *, path: str) -> bytes:
    """Return a record with another `fence`, and all else as it is, fields that are not known here included.

    Each call returns another content: what was there once must not come back, whoever is fenced again.

    Args:
        data: the record.
        attempt: that was to replace it and must not.
        path: where it was read, for errors.

    Raises:
        CorruptDataError: it is no JSON object.
    """
    value = parse_json(data, what="the commit record", path=path)
    fence = {"fence": attempt, "fence_nonce": secrets.token_hex(8)}
    rest = {name: item for name, item in value.items() if name != "digest"} | fence
    return canonical_json({**rest, "digest": digest(canonical_json(rest))})


def check_own_digest(data: bytes, value: dict[str, Any], fields: Fields) -> None:
    """Check the field `digest`, of all others.

    Args:
        data: the text of the object.
        value: the object.
        fields: its fields.

    Raises:
        CorruptDataError: it does not match.
    """
    expected = fields.text("digest")
    own = f'"digest":"{expected}",'.encode()
    if data.count(own) == 1 and expected == digest(data.replace(own, b"")):
        return  # as it was written: the text is canonical already
    rest = {name: item for name, item in value.items() if name != "digest"}
    if expected != digest(known_json(rest).encode("ascii")):
        raise fields.error("does not match its own digest")


def _files(fields: Fields) -> str:
    if not fields.has("files"):
        return ""
    name = fields.identifier("files")
    if name != fields.identifier("attempt"):
        raise fields.error("has files that are not in its attempt's directory")
    return name


def _digest_of_manifest(fields: Fields) -> str:
    text = fields.text("manifest_digest")
    if not is_digest(text):
        raise fields.error("has a manifest_digest that is none")
    return text


def _metric_to_json(name: str, value: float) -> JSON:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnsupportedValueError(f"metric {name!r} is no number: {error}") from error
    if math.isfinite(number):
        return number
    return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"


def _metric_from_json(fields: Fields, name: str, value: object) -> float:
    if type(value) is float:
        return value
    if type(value) is int and abs(value) <= INT64_MAX:
        return float(value)
    if type(value) is str and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    raise fields.error(f"has a metric {name[:40]!r} that is no number")
