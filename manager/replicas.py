"""Whether processes that hold the same region of a leaf hold the same bytes there; asked for by an option.

Costs one read of everything that more than one process holds, so it is off unless asked for. Regions that overlap
without being equal are not compared.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from safepoint.formats.checksum import digest
from safepoint.formats.manifest import display_path
from safepoint.manager.adapters import prefetch
from safepoint.manager.coordination import run_together
from safepoint.manager.errors import DisagreementError
from safepoint.manager.planner import WriteAssignment
from safepoint.manager.sources import batches, byte_view, region_bytes
from safepoint.manager.wire import path_from_json, path_to_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safepoint.formats.manifest import TreePath
    from safepoint.manager.adapters import ArrayLeaf, ArraySpec
    from safepoint.manager.coordination import Coordinator

__all__ = ["compare_replicas", "shared_regions"]


def shared_regions(tables: Sequence[Mapping[TreePath, ArraySpec]]) -> list[list[WriteAssignment]]:
    """Return, per process, the regions that another process holds as well, as if each wrote its own.

    Called by: the primary only.
    """
    held = [[(path, region) for path, spec in table.items() for region in spec.regions] for table in tables]
    holders = Counter(key for keys in held for key in keys)
    return [
        [WriteAssignment(*key, source=process, writer=process) for key in keys if holders[key] > 1]
        for process, keys in enumerate(held)
    ]


def compare_replicas(
    coordinator: Coordinator,
    arrays: Mapping[TreePath, ArrayLeaf],
    shared: Sequence[WriteAssignment],
    *,
    deadline_secs: float,
) -> None:
    """Digest what this process shares with others and compare.

    Called by: all processes.

    Raises:
        DisagreementError: copies differ; names the first leaf, and which processes hold the same.
    """

    def work() -> bytes:
        digests = []
        for batch in batches(shared, lambda part: region_bytes(arrays[part.path].spec, part.region)):
            prefetch([arrays[path] for path in dict.fromkeys(part.path for part in batch)])
            for part in batch:
                found = digest(byte_view(arrays[part.path].read(part.region)))
                digests.append([path_to_json(part.path), part.region.to_json(), found])
        return json.dumps(digests).encode()

    def decide(payloads: Sequence[bytes]) -> bytes:
        brought: dict[str, dict[str, list[int]]] = {}
        for process, payload in enumerate(payloads):
            for path, region, found in json.loads(payload):
                brought.setdefault(json.dumps([path, region]), {}).setdefault(found, []).append(process)
        differing = {key: found for key, found in brought.items() if len(found) > 1}
        if differing:
            raise _differ(differing)
        return b""

    run_together(coordinator, "save-replicas", deadline_secs, work, decide)


def _differ(differing: Mapping[str, Mapping[str, Sequence[int]]]) -> DisagreementError:
    key, found = next(iter(differing.items()))
    path, region = json.loads(key)
    groups: list[Any] = [tuple(processes) for processes in found.values()]
    told = " differ from those of ".join(f"process(es) {', '.join(map(str, group))}" for group in groups)
    more = f" (and {len(differing) - 1} more regions)" if len(differing) > 1 else ""
    return DisagreementError(
        f"replicas differ in the region {region}: the bytes of {told}{more}",
        leaf=display_path(path_from_json(path)),
        brought=tuple((f"digest {text}", tuple(processes)) for text, processes in found.items()),
        hint="If they may differ (buffers under DistributedDataParallel, say), open the manager with "
        'check_replicas="trust": the writer\'s copy is then the truth.',
    )
