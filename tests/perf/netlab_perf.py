# SPDX-License-Identifier: Apache-2.0
"""A veth pair in two namespaces of its own, and an engine for one end of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from perflib import ROOT

from shapeagent.kernel.netns import run_in_netns
from shapeagent.lab.topology import Lab, Port, private_dirs, set_sysctls, veth_pair
from shapeagent.model.reports import AttachRequest
from shapeagent.service.engine import Engine

SHAPECTL = ROOT / ".venv" / "bin" / "shapectl"
PAYLOAD_BYTES = 1_000
LOAD_PORT = 2_049  # class bulk by the built-in policy
NO_IPV6_NOISE = {"net.ipv6.conf.all.disable_ipv6": "1"}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Pair:
    """`near` is what is attached; `far` answers."""

    lab: Lab
    near: Port
    far: Port
    engine: Engine

    def attach(self, **options: object) -> AttachRequest:
        """Return a request for the near end."""
        return AttachRequest(device=self.near.device, **options)  # type: ignore[arg-type]

    def socket_at(self, port: Port, kind: int) -> socket.socket:
        """Return a socket that belongs to one end's namespace."""
        return run_in_netns(port.namespace, lambda: socket.socket(socket.AF_INET, kind))


@contextlib.contextmanager
def pair() -> Iterator[Pair]:
    """Give a fresh pair; namespaces, pins and state go away with it."""
    with Lab() as lab:
        near = Port(lab.add_namespace(), "d0", "198.18.7.1", "2001:db8:7::1")
        far = Port(lab.add_namespace(), "p0", "198.18.7.2", "2001:db8:7::2")
        veth_pair(near, far)
        for port in (near, far):
            set_sysctls(port.namespace, NO_IPV6_NOISE)
        dirs = private_dirs(near.namespace)
        engine = Engine(netns=near.namespace, run_dir=dirs.run_dir, bpffs_dir=dirs.bpffs_dir)
        yield Pair(lab, near, far, engine)


@contextlib.contextmanager
def attached(ends: Pair, **options: object) -> Iterator[None]:
    """Attach the near end by the engine while the context lasts."""
    ends.engine.attach(ends.attach(**options))
    try:
        yield
    finally:
        ends.engine.detach(ends.near.device)


def shapectl(
    ends: Pair, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line for the near end's namespace. Raises RuntimeError."""
    done = subprocess.run(
        [str(SHAPECTL), "--netns", ends.near.namespace, "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        start_new_session=True,
        env={**os.environ, **(environment or {})},
    )
    if done.returncode:
        raise RuntimeError(f"shapectl {' '.join(arguments)}: {done.returncode}: {done.stderr}")
    return done


def pin_folder(ends: Pair, bpffs_dir: Path) -> Path:
    """Return the folder that holds the near end's pins."""
    found = [path for path in bpffs_dir.iterdir() if (path / "ctl").exists()]
    assert len(found) == 1, f"got {found}, want one pin folder for {ends.near.namespace}"
    return found[0]


# --- load


def _send(out: socket.socket, to: tuple[str, int], per_s: int, stop: Connection) -> None:
    """Send at a steady rate until told to stop; then say how many."""
    payload = bytes(PAYLOAD_BYTES)
    sent = 0
    started = time.perf_counter()
    while not stop.poll():
        due = int((time.perf_counter() - started) * per_s)
        while sent < due:
            out.sendto(payload, to)
            sent += 1
        time.sleep(0.0005)
    stop.send(sent)


class BulkLoad:
    """Datagrams of class bulk from near to far, by a process of its own, while the block lasts.

    To another `port` they are of another class.
    """

    def __init__(self, ends: Pair, per_s: int, *, port: int = LOAD_PORT) -> None:
        self.sent = self.received = 0  # known after the block
        self._receiver = ends.socket_at(ends.far, socket.SOCK_DGRAM)
        self._sender = ends.socket_at(ends.near, socket.SOCK_DGRAM)
        so_rcvbufforce = 33
        self._receiver.setsockopt(socket.SOL_SOCKET, so_rcvbufforce, 512 << 20)
        self._receiver.bind((ends.far.ipv4, port))
        self._receiver.setblocking(False)
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        arguments = (self._sender, (ends.far.ipv4, port), per_s, theirs)
        self._child = context.Process(target=_send, args=arguments, daemon=True)

    def __enter__(self) -> BulkLoad:
        self._child.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.send(None)
        assert self._ours.poll(10), "the sender did not stop"
        self.sent = self._ours.recv()
        self._child.join(10)
        end = time.monotonic() + 1.0
        while self.received < self.sent and time.monotonic() < end:
            try:
                self._receiver.recv(PAYLOAD_BYTES)
                self.received += 1
            except BlockingIOError:
                time.sleep(0.001)
        self._receiver.close()
        self._sender.close()


def bulk_packets(ends: Pair) -> int:
    """Return how many packets the near end has counted in class bulk on egress."""
    return class_packets(ends)["bulk"]


def class_packets(ends: Pair) -> dict[str, int]:
    """Return class → packets that the near end has counted on egress."""
    status = ends.engine.status(ends.near.device)[0]
    return {c.name: c.packets for c in status.classes if c.direction == "egress"}
