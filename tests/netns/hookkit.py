# SPDX-License-Identifier: Apache-2.0
"""Other people's things at the ingress hook: filters, tcx programs, nftables chains."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from enginekit import add_bpf_filter, index_of
from netlab import load_program, note_change, tc

from shapeagent.kernel import bpf, tcx
from shapeagent.kernel.netns import run_in_netns
from shapeagent.kernel.rtnl import attribute, attribute_text, nested
from shapeagent.model.types import Direction

TABLE, CHAIN = "others", "early"
_PROG_ATTACH, _PROG_DETACH = 8, 9
_F_BEFORE, _F_AFTER = 1 << 3, 1 << 4
_NEWTABLE, _DELTABLE, _NEWCHAIN, _NEWFLOWTABLE = 0, 2, 3, 22
_CREATE, _EXCL, _REQUEST, _ACK = 0x400, 0x200, 1, 4


def add_filter(netns: str, device: str) -> Callable[[], object]:
    """Add a clsact filter, with clsact where there is none; returns what removes the filter."""
    if "clsact" not in tc("qdisc", "show", "dev", device, netns=netns):
        tc("qdisc", "add", "dev", device, "clsact", netns=netns)
    descriptor = load_program()
    add_bpf_filter(netns, device, Direction.INGRESS, descriptor, pref=9)
    os.close(descriptor)
    return lambda: tc("filter", "del", "dev", device, "ingress", "pref", "9", netns=netns)


@contextlib.contextmanager
def attach_tcx(
    netns: str, device: str, direction: Direction, descriptor: int, *, first: bool
) -> Iterator[int]:
    """Have a program of someone else's at a tcx hook, before all others or behind; gives its id.

    The descriptor is closed. Skips where the kernel has no tcx.
    """
    note_change(netns)
    index, hook = index_of(netns, device), tcx.HOOKS[direction]
    number = bpf.program_facts(descriptor).id

    def call(command: int, flags: int) -> None:
        attr = bytearray(struct.pack("=6I", index, descriptor, hook, flags, 0, 0).ljust(64, b"\0"))
        bpf.bpf_call(command, attr)

    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        try:
            run_in_netns(netns, lambda: call(_PROG_ATTACH, _F_BEFORE if first else _F_AFTER))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            pytest.skip(f"kernel {os.uname().release} has no tcx")
        stack.callback(run_in_netns, netns, lambda: call(_PROG_DETACH, 0))
        stack.callback(note_change, netns)
        yield number


def add_tcx(netns: str, device: str) -> Callable[[], object]:
    """Attach a tcx program that answers NEXT; skips where the kernel has no tcx."""
    stack = contextlib.ExitStack()
    stack.enter_context(attach_tcx(netns, device, Direction.INGRESS, load_program(), first=False))
    return stack.close


def _add_nftables(netns: str, family: int, *objects: tuple[int, bytes]) -> Callable[[], object]:
    table = attribute_text(1, TABLE)
    batch(netns, family, (_NEWTABLE, table), *objects)
    return lambda: batch(netns, family, (_DELTABLE, table))


def _chain(number: int, *place: bytes) -> bytes:
    hook = (attribute(1, struct.pack(">I", number)), attribute(2, struct.pack(">i", 0)), *place)
    return b"".join(
        (
            attribute_text(1, TABLE),
            attribute_text(3, CHAIN),
            nested(4, *hook),
            attribute_text(7, "filter"),
        )
    )


def add_netdev_chain(netns: str, device: str) -> Callable[[], object]:
    """Add `chain early { type filter hook ingress device DEVICE priority 0; }` to family netdev."""
    return _add_nftables(netns, 5, (_NEWCHAIN, _chain(0, attribute_text(3, device))))


def add_netdev_chain_of_many(netns: str, device: str) -> Callable[[], object]:
    """Add the same with `devices = { lo, DEVICE }`."""
    devices = nested(4, attribute_text(1, "lo"), attribute_text(1, device))
    return _add_nftables(netns, 5, (_NEWCHAIN, _chain(0, devices)))


def add_inet_chain(netns: str, device: str) -> Callable[[], object]:
    """Add the ingress chain of family inet."""
    return _add_nftables(netns, 1, (_NEWCHAIN, _chain(5, attribute_text(3, device))))


def add_other_chains(netns: str, device: str) -> Callable[[], object]:
    """Add chains that do not stand in the way: ingress of lo, and input of all devices."""
    removes = [
        _add_nftables(netns, 5, (_NEWCHAIN, _chain(0, attribute_text(3, "lo")))),
        _add_nftables(netns, 1, (_NEWCHAIN, _chain(1))),
    ]
    return lambda: [remove() for remove in removes]


def batch(netns: str, family: int, *messages: tuple[int, bytes]) -> None:
    """Do nftables requests in one transaction. Raises OSError with the kernel's errno."""

    def message(kind: int, flags: int, group: int, resource: int, body: bytes = b"") -> bytes:
        body = struct.pack(">BBH", group, 0, resource) + body
        return struct.pack("=IHHII", 16 + len(body), kind, flags | _REQUEST, 1, 0) + body

    data = message(0x10, 0, 0, 10)  # NFNL_MSG_BATCH_BEGIN, NFNL_SUBSYS_NFTABLES
    for kind, body in messages:
        flags = _ACK | (0 if kind == _DELTABLE else _CREATE)
        data += message(10 << 8 | kind, flags, family, 0, body)
    data += message(0x11, 0, 0, 10)

    def send() -> None:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) as one:
            one.settimeout(10)
            one.bind((0, 0))
            one.send(data)
            acknowledged = 0
            while acknowledged < len(messages):
                answer = one.recv(65536)
                while answer:
                    (length,) = struct.unpack_from("=I", answer)
                    code = -struct.unpack_from("=i", answer, 16)[0]
                    if code:
                        raise OSError(code, os.strerror(code))
                    acknowledged += 1
                    answer = answer[(length + 3) & ~3 :]

    run_in_netns(netns, send)


SHARERS: dict[str, tuple[Any, str]] = {
    "filter": (add_filter, "filter ingress bpf pref 9"),
    "tcx": (add_tcx, "tcx program"),
    "netdev chain": (add_netdev_chain, f"nftables chain {TABLE} {CHAIN}"),
    "netdev chain of many": (add_netdev_chain_of_many, f"nftables chain {TABLE} {CHAIN}"),
    "inet chain": (add_inet_chain, f"nftables chain {TABLE} {CHAIN}"),
}
