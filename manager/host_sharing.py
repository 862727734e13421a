"""Restores of the processes of one host from a storage that is far away: what several want is read once, by one.

Owns finding out who is on one host and wants the same, and the order in which groups are served. Who reads what:
`host_plan`; how it is handed on: `handing_on`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.formats.run_reading import RunReader
from safepoint.manager.coordination import run_together
from safepoint.manager.fetching import fetch_leaves, fill_leaves, num_fetched_bytes
from safepoint.manager.handing_on import Exchange, Sharing
from safepoint.manager.host_plan import (
    WORTH_BYTES,
    blocks_touched,
    groups_of,
    split_fetches,
    wants_from_bytes,
    wants_to_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from safepoint.formats.entries import FileEntry
    from safepoint.formats.manifest import Manifest
    from safepoint.formats.run_reading import LeafAt
    from safepoint.formats.storage import Storage
    from safepoint.manager.coordination import Transport
    from safepoint.manager.fetching import Fetch
    from safepoint.manager.host_plan import Group
    from safepoint.manager.session import Session

__all__ = ["HostReading", "arrange"]

_PATIENCE_SECS = 60.0


@dataclass(frozen=True, kw_only=True)
class HostReading:
    """How a process reads a step together with others of its host.

    Attributes:
        transport: to them.
        process_index: of this process.
        groups: that this process is a member of, in the order in which they are served; with each, how long to wait
            until all of it have come.
        patience_secs: how long to wait for one of them after that.
    """

    transport: Transport
    process_index: int
    groups: tuple[tuple[Group, float], ...]
    patience_secs: float

    def fetch(
        self,
        storage: Storage,
        prefix: str,
        manifest: Manifest,
        fetches: Sequence[Fetch],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Do as `fetch_leaves` does: first what others want, too, which they must not wait for, then the rest.

        Called by: all processes of the host that are in a group.

        Returns:
            The bytes that this process read from the storage itself; `progress` is told of those that others read, too.
        """
        shared, alone = split_fetches(fetches, [group for group, _ in self.groups], manifest.files)
        reader = RunReader(storage, prefix, manifest.files, _leaf_names(fetches, manifest.files))
        sharing = Sharing(
            transport=self.transport,
            process_index=self.process_index,
            files=manifest.files,
            reader=reader,
            request_bytes=storage.read_bytes,
            num_threads=storage.num_streams,
            patience_secs=self.patience_secs,
            progress=progress,
        )
        num_bytes = 0
        failure: Exception | None = None
        try:
            for (group, first_patience_secs), wanted in zip(self.groups, shared, strict=True):
                exchange = Exchange(group, sharing, first_patience_secs=first_patience_secs)
                try:
                    if failure is None:
                        num_bytes += fill_leaves(wanted, exchange.read) + exchange.finish()
                    else:
                        exchange.tell(failure)
                except Exception as error:  # noqa: BLE001 - raised below, once the members of all groups know
                    failure = error
                    exchange.tell(error)
                finally:
                    exchange.close()
        finally:
            reader.close()
        if failure is not None:
            raise failure
        return num_bytes + fetch_leaves(storage, prefix, manifest, alone, progress=progress)


def arrange(session: Session, files: Sequence[FileEntry], fetches: Sequence[Fetch]) -> HostReading | None:
    """Agree on what the processes of each host read together; None where this one reads for itself.

    Called by: all processes, once all have found that the step can be restored.

    Raises:
        RendezvousTimeoutError: names who did not come.
        PeerFailedError: another process failed.
    """
    coordinator, options = session.coordinator, session.options
    if not session.storage.is_remote or options.root_scope != "shared" or coordinator.process_count == 1:
        return None

    def bring() -> bytes:
        is_worth_it = coordinator.host and num_fetched_bytes(fetches) >= WORTH_BYTES
        wants = wants_to_bytes(fetches, files) if is_worth_it else b""
        digest = coordinator.share_blob(wants, deadline_secs=options.deadline_secs) if wants else ""
        return json.dumps([coordinator.host, digest]).encode()

    told = run_together(coordinator, "restore-hosts", options.deadline_secs, bring, _mates)
    if not told:
        return None
    mates: dict[int, str] = dict(json.loads(told))
    groups: list[tuple[Group, float]] = []
    own, patience_secs = coordinator.process_index, min(_PATIENCE_SECS, options.deadline_secs / 2)

    def plan() -> bytes:
        wants = {
            index: wants_from_bytes(coordinator.fetch_blob(digest, deadline_secs=options.deadline_secs))
            for index, digest in mates.items()
        }
        found = groups_of(wants, files)
        for number, group in enumerate(found):
            if own in group.members:
                is_late = group.may_be_late(own, found[:number])
                groups.append((group, options.deadline_secs if is_late else patience_secs))
        return b"shares" if groups else b""

    if not run_together(coordinator, "restore-groups", options.deadline_secs, plan, b"".join):
        return None
    transport = coordinator.open_circle(sorted(mates), options.deadline_secs)
    if transport is None:
        return None
    return HostReading(
        transport=transport,
        process_index=own,
        groups=tuple(groups),
        patience_secs=patience_secs,
    )


def _mates(payloads: Sequence[bytes]) -> bytes | list[bytes]:
    """Tell each process who is on its host, and the digest of what each of these wants; b"" if all are alone."""
    brought = [json.loads(payload) for payload in payloads]
    on_host: dict[str, list[tuple[int, str]]] = {}
    for index, (host, digest) in enumerate(brought):
        if digest:
            on_host.setdefault(host, []).append((index, digest))
    if all(len(mates) < 2 for mates in on_host.values()):  # noqa: PLR2004 - one is alone
        return b""
    company = {host: mates if len(mates) > 1 else [] for host, mates in on_host.items()}
    return [json.dumps(company.get(host, []) if digest else []).encode() for host, digest in brought]


def _leaf_names(fetches: Sequence[Fetch], files: Sequence[FileEntry]) -> LeafAt:
    def leaf_at(file: int, number: int) -> str:
        for fetch in fetches:
            run = blocks_touched(fetch, files)
            if run is not None and run.file == file and run.first <= number <= run.last:
                return fetch.leaf.name
        return ""

    return leaf_at
