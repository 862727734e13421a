"""Where the primary's store can be reached, as several candidates, and which of them works from here.

Owns guessing addresses and proving that the right server answers. Must not know what is kept in the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Self

import torch.distributed as dist

from safepoint.manager.coordination.store import TCPStore, connect_tcp
from safepoint.manager.coordination.worker import StuckError, Worker
from safepoint.manager.errors import RendezvousTimeoutError

__all__ = ["Address", "Server", "boot_id", "find_server", "open_server"]

_NONCE_KEY = "safepoint/nonce"
_FIRST_TRY_SECS = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """What a process must know to reach the primary's store.

    Attributes:
        hosts: names and numbers of the primary's host, most likely first; not the loopback.
        port: of the store.
        boot_id: of the primary's running kernel; equal here means that the loopback may lead there.
        nonce: what the right server answers.
    """

    hosts: tuple[str, ...]
    port: int
    boot_id: str
    nonce: str

    def to_bytes(self) -> bytes:
        """Return JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return what `to_bytes` was made from."""
        value = json.loads(data)
        return cls(**{**value, "hosts": tuple(value["hosts"])})

    def candidates(self) -> list[str]:
        """Return the hosts to try from here, in order."""
        local = ["127.0.0.1"] if self.boot_id and self.boot_id == boot_id() else []
        return list(dict.fromkeys([*local, *self.hosts]))


class Server:
    """The primary's store; it lives as long as this object.

    Attributes:
        address: where others find it.
    """

    def __init__(self, store: TCPStore, address: Address) -> None:
        self._store: TCPStore | None = store
        self.address = address

    def close(self) -> None:
        """Stop serving."""
        self._store = None


def open_server() -> Server:
    """Serve a new store on a free port of all interfaces.

    *Called by* the primary only.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=10))
    nonce = secrets.token_hex(16)
    store.set(_NONCE_KEY, nonce)
    return Server(store, Address(hosts=_own_hosts(), port=store.port, boot_id=boot_id(), nonce=nonce))


def find_server(address: Address, *, deadline_secs: float) -> str:
    """Return the host under which the primary's store answers from here.

    Raises:
        RendezvousTimeoutError: none of the candidates leads to it.
    """
    until = time.monotonic() + deadline_secs
    failures: dict[str, str] = {}
    patience_secs = _FIRST_TRY_SECS
    while True:
        for host in address.candidates():
            worker: Worker[None] = Worker("safepoint-find", lambda: None)
            limit = min(until, time.monotonic() + patience_secs)
            try:
                if worker.run(lambda _, host=host: _answers(host, address), until=limit):  # type: ignore[misc]
                    return host
                failures[host] = "another server answers there"
            except StuckError:
                failures.setdefault(host, "no answer")  # what it said before tells more than a try that was cut short
            except (OSError, dist.DistError) as error:
                failures[host] = str(error).split("\n", maxsplit=1)[0]
            finally:
                worker.renew()
        patience_secs *= 2
        if time.monotonic() + 0.1 >= until:
            break
        time.sleep(0.1)
    tried = "; ".join(f"{host}: {reason}" for host, reason in failures.items())
    raise RendezvousTimeoutError(
        f"The store of process 0 cannot be reached on port {address.port} ({tried}).",
        absent=(0,),
        deadline_secs=deadline_secs,
        hint="The hosts of a job must reach each other on any port; see firewall and host names, or set MASTER_ADDR.",
    )


def _answers(host: str, address: Address) -> bool:
    store = connect_tcp(host, address.port)
    return bool(store.check([_NONCE_KEY])) and store.get(_NONCE_KEY) == address.nonce.encode()


def _own_hosts() -> tuple[str, ...]:
    name = socket.gethostname()
    hosts = [os.environ["MASTER_ADDR"]] if "MASTER_ADDR" in os.environ else []
    hosts.append(name)
    with contextlib.suppress(OSError):  # no directory knows this host: the others may still know it by MASTER_ADDR
        hosts += [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    loopback = ("127.", "::1", "localhost")
    return tuple(host for host in dict.fromkeys(hosts) if not host.startswith(loopback))


def boot_id() -> str:
    """Return the name of the kernel that runs here, the same for all processes of a host; "" where it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
