"""Object stores: `python -m benchmarks.object_store [--mib N] [--rounds N] [--json FILE] [--s3-address HOST:PORT]`.

Starts moto's server for S3 and fake-gcs-server for Google's on this machine, and has each contender store and read
back the same bytes, in turns, each time in a process of its own. Server and client share the machine: the speeds say
little about a real service, the client's CPU time and memory say a lot.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from benchmarks.measuring import Race, Report, Sample
from benchmarks.object_peers import CLIENTS, missing
from benchmarks.tables import print_report

from support.object_servers import ObjectServer, gcs_server, s3_elsewhere, s3_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

_WORKER_SECS = 600
_CHECKPOINT_NEEDS = {
    "safepoint": {"s3": "tensorstore", "gs": "tensorstore"},
    "DCP through fsspec": {"s3": "s3fs", "gs": "gcsfs"},
}
_CHECKPOINT_KEEPS = {
    "safepoint": "data, manifest and commit are stored; digests of blocks",
    "DCP through fsspec": "data, then metadata, are stored",
}


def main() -> None:
    """Run both servers, one after the other, and print a table for each direction."""
    options = _parser().parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    servers: list[Callable[[], AbstractContextManager[ObjectServer]]] = [s3_server, gcs_server]
    if options.s3_address:
        servers = [lambda: nullcontext(s3_elsewhere(options.s3_address))]
    reports = []
    for start in servers:
        with start() as server:
            report = _measure(server, options.mib << 20, options.rounds)
        print_report(report, console)
        reports.append(report)
    console.print(f"load {os.getloadavg()[0]:.1f} at the end", highlight=False)
    if options.json:
        options.json.write_text(json.dumps([report.to_json() for report in reports], indent=1) + "\n")


def _measure(server: ObjectServer, num_bytes: int, rounds: int) -> Report:
    files, absent = _installed({name: kind.needs for name, kind in CLIENTS.items() if server.scheme in kind.schemes})
    checkpoints, without = _installed({name: needs[server.scheme] for name, needs in _CHECKPOINT_NEEDS.items()})
    absent |= without
    keeps = {name: CLIENTS[name].keeps for name in files} | _CHECKPOINT_KEEPS
    races = {
        (what, direction): Race(title=f"{server.scheme}://: {num_bytes >> 20} MiB {title}")
        for what, direction, title in (
            ("files", "put", "to the store, in objects of 64 MiB"),
            ("files", "get", "from the store, into memory that is there"),
            ("checkpoint", "put", "of a model's parameters saved"),
            ("checkpoint", "get", "of a model's parameters restored in place"),
        )
    }
    runs = itertools.count()
    for number in range(rounds):
        for what, names in (("files", files), ("checkpoint", checkpoints)):
            for name in _turned(names, number):
                found = (
                    {} if name in absent else _run(server, name, f"run-{secrets.token_hex(4)}-{next(runs)}", num_bytes)
                )
                if not found:
                    absent.setdefault(name, "it failed, see above")
                for direction, sample in found.items():
                    race = races[what, direction]
                    race.samples.setdefault(name, []).append(Sample(**sample))
                    race.keeps[name] = keeps[name] if direction == "put" else ""
                    race.num_bytes[name] = num_bytes
    for race in races.values():  # the first is what the others are compared with
        race.samples = {name: race.samples[name] for name in (*files, *checkpoints) if name in race.samples}
        race.absent = absent
    return Report(suite=server.scheme, races=[race for race in races.values() if race.samples])


def _installed(needs: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    absent = {name: f"{module} is not installed" for name, module in needs.items() if missing(module)}
    return [name for name in needs if name not in absent], absent


def _turned(names: list[str], number: int) -> Iterator[str]:
    turn = number % len(names)
    return itertools.chain(names[turn:], names[:turn])


def _run(server: ObjectServer, name: str, prefix: str, num_bytes: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.object_worker", name, server.url(prefix), str(num_bytes)]
    environment = {**os.environ, **server.environment, "STORAGE_EMULATOR_HOST": f"http://{server.address}"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, timeout=_WORKER_SECS, check=False, text=True
    )
    if done.returncode:
        return {}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="of data")
    parser.add_argument("--s3-address", help="host:port of a server that runs, with a bucket `contract`, instead")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to put all samples")
    return parser


if __name__ == "__main__":
    main()
