# SPDX-License-Identifier: Apache-2.0
"""A rtnetlink socket: requests, dumps and attributes, and nothing else.

Our own because it must be exact and quick: pyroute2 0.9.7 does not know the
link attributes 59 to 64, rounds bursts, refuses TBF above 34 Gbit/s, takes
0.5 to 0.9 ms for a class change that costs 0.013 ms here (bpf-facts rows 7
and 8), and takes 120 to 200 ms to import.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from shapeagent.model.errors import (
    ConflictError,
    FailedError,
    PrivilegeError,
    ShapeError,
    UnsupportedError,
)

NLM_F_REQUEST = 0x001
NLM_F_ACK = 0x004
NLM_F_DUMP = 0x300
NLM_F_REPLACE = 0x100
NLM_F_EXCL = 0x200
NLM_F_CREATE = 0x400
NLM_F_DUMP_INTR = 0x010

NLMSG_ERROR = 2
NLMSG_DONE = 3

RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK = 16, 17, 18
RTM_NEWADDR, RTM_GETADDR = 20, 22
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 24, 25, 26
RTM_NEWQDISC, RTM_DELQDISC, RTM_GETQDISC = 36, 37, 38
RTM_NEWTCLASS, RTM_DELTCLASS, RTM_GETTCLASS = 40, 41, 42
RTM_NEWTFILTER, RTM_DELTFILTER, RTM_GETTFILTER = 44, 45, 46

TC_H_ROOT = 0xFFFFFFFF
TC_H_CLSACT = 0xFFFFFFF1
TC_H_CLSACT_HANDLE = 0xFFFF0000
TC_H_MIN_INGRESS = 0xFFFFFFF2
TC_H_MIN_EGRESS = 0xFFFFFFF3

TCA_KIND = 1
TCA_OPTIONS = 2
TCA_STATS2 = 7

_SOL_NETLINK = 270
_NETLINK_CAP_ACK = 10
_NETLINK_EXT_ACK = 11
_NLMSG_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ATTRIBUTE_HEADER = struct.Struct("=HH")  # length with header, type
_TCMSG = struct.Struct("=BxxxiIII")  # family, ifindex, handle, parent, info
_TC_INDEX = struct.Struct("=4xi")
_TYPE_MASK = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER
_NESTED = 0x8000
_RECEIVE_BYTES = 1 << 18
_DUMP_TRIES = 5

_T = TypeVar("_T")


class NetlinkRefusal(OSError):
    """What the kernel answered instead of doing it: errno and, where it gave one, its words."""


def attribute(kind: int, payload: bytes) -> bytes:
    """Return one netlink attribute, padded to four bytes."""
    return (
        _ATTRIBUTE_HEADER.pack(_ATTRIBUTE_HEADER.size + len(payload), kind)
        + payload
        + bytes(-len(payload) % 4)
    )


def attribute_text(kind: int, text: str) -> bytes:
    """Return an attribute that holds a NUL-terminated string."""
    return attribute(kind, text.encode() + b"\0")


def attribute_u32(kind: int, value: int) -> bytes:
    """Return an attribute that holds a u32."""
    return attribute(kind, struct.pack("=I", value))


def attribute_u64(kind: int, value: int) -> bytes:
    """Return an attribute that holds a u64."""
    return attribute(kind, struct.pack("=Q", value))


def nested(kind: int, *parts: bytes) -> bytes:
    """Return an attribute that holds other attributes."""
    return attribute(kind | _NESTED, b"".join(parts))


def parse_attributes(data: bytes) -> dict[int, bytes]:
    """Return type → payload; of a repeated type the last one."""
    return dict(iterate_attributes(data))


def iterate_attributes(data: bytes) -> list[tuple[int, bytes]]:
    """Return (type, payload) of each attribute in `data`, up to a malformed one.

    A status of eight interfaces parses ten thousand: no generator, no attribute lookups.
    """
    found = []
    offset, end, unpack = 0, len(data), _ATTRIBUTE_HEADER.unpack_from
    while offset + 4 <= end:
        length, kind = unpack(data, offset)
        if length < 4 or offset + length > end:
            break
        found.append((kind & _TYPE_MASK, data[offset + 4 : offset + length]))
        offset += (length + 3) & ~3
    return found


def parse_text(payload: bytes) -> str:
    """Return the string of a NUL-terminated attribute."""
    return payload.split(b"\0", 1)[0].decode(errors="replace")


@dataclass(frozen=True, slots=True)
class TcMessage:
    """The head of a traffic-control message and its attributes."""

    index: int
    handle: int
    parent: int
    info: int
    attributes: dict[int, bytes]

    @property
    def kind(self) -> str:
        """The kind of qdisc, class or filter, e.g. "htb"."""
        return parse_text(self.attributes.get(TCA_KIND, b""))

    @property
    def options(self) -> bytes:
        """The options as the kernel wrote them."""
        return self.attributes.get(TCA_OPTIONS, b"")


def build_tc(
    index: int, *attributes: bytes, handle: int = 0, parent: int = 0, info: int = 0
) -> bytes:
    """Return the body of a traffic-control request."""
    return _TCMSG.pack(socket.AF_UNSPEC, index, handle, parent, info) + b"".join(attributes)


def qdisc_bodies(rtnl: Rtnl, index: int) -> list[bytes]:
    """Return the bodies of a device's qdiscs. Raises: NetlinkRefusal.

    The kernel gives those of all devices, whichever is asked about
    (tc_dump_qdisc(), net/sched/sch_api.c).
    """

    def by_index() -> dict[int, list[bytes]]:
        found: dict[int, list[bytes]] = {}
        for body in rtnl.dump(RTM_GETQDISC, build_tc(0)):
            found.setdefault(_TC_INDEX.unpack_from(body)[0], []).append(body)
        return found

    return rtnl.once("qdiscs", by_index).get(index, [])


def parse_tc(body: bytes) -> TcMessage:
    """Return the parsed body of a traffic-control message."""
    _, index, handle, parent, info = _TCMSG.unpack_from(body)
    return TcMessage(index, handle, parent, info, parse_attributes(body[_TCMSG.size :]))


class Rtnl:
    """One rtnetlink socket, or one of another netlink protocol that speaks the same way.

    It belongs to the namespace of the thread that opened it.

    Not for use by two threads at once. Use as a context manager, or `close()`.
    """

    def __init__(self, protocol: int = socket.NETLINK_ROUTE) -> None:
        self._known: dict[object, Any] | None = None  # what `looking` has heard
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol
        )
        try:
            self._socket.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
            self._socket.setsockopt(_SOL_NETLINK, _NETLINK_EXT_ACK, 1)
            self._socket.settimeout(10.0)
            self._socket.bind((0, 0))
        except OSError:
            self._socket.close()
            raise
        self._sequence = 0

    def __enter__(self) -> Rtnl:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def raw(self) -> socket.socket:
        """The socket itself, for ioctl and getsockopt in its namespace."""
        return self._socket

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        self._socket.close()

    def request(self, kind: int, flags: int, body: bytes) -> None:
        """Return once the kernel has done what was asked.

        Raises: NetlinkRefusal with the kernel's errno and words.
        """
        sequence = self._send(kind, flags | NLM_F_ACK, body)
        for answer, _, payload in self._receive(sequence):
            if answer == NLMSG_ERROR:
                _raise_on_error(payload)
                return

    def get(self, kind: int, body: bytes) -> bytes:
        """Return the body of the one answer to a question about one object.

        Raises: NetlinkRefusal with the kernel's errno and words.
        """
        return self.once((kind, 0, body), lambda: self._get(kind, body))

    def _get(self, kind: int, body: bytes) -> bytes:
        sequence = self._send(kind, 0, body)
        for answer, _, payload in self._receive(sequence):
            if answer == NLMSG_ERROR:
                _raise_on_error(payload)
            return payload
        raise NetlinkRefusal(errno.ENODATA, "the kernel gave no answer")

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """While the body runs, what is asked twice is asked of the kernel once.

        For a look at many things that belong together and only reads: the
        kernel dumps the qdiscs of all devices whichever is asked about, and
        eight interfaces ask three times each.
        """
        outer, self._known = self._known, {} if self._known is None else self._known
        try:
            yield
        finally:
            self._known = outer

    def once(self, key: object, ask: Callable[[], _T]) -> _T:
        """Return what `ask` returns; within `looking` the first answer under that key."""
        if self._known is None:
            return ask()
        if key not in self._known:
            self._known[key] = ask()
        found: _T = self._known[key]
        return found

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """Return the bodies of all objects of one kind, in the kernel's order.

        Raises: NetlinkRefusal with the kernel's errno and words; EAGAIN where
            five dumps in a row were disturbed by changes.
        """
        return self.once((kind, body), lambda: self._dump(kind, body))

    def _dump(self, kind: int, body: bytes) -> list[bytes]:
        for _ in range(_DUMP_TRIES):
            bodies: list[bytes] = []
            disturbed = False
            sequence = self._send(kind, NLM_F_DUMP, body)
            for answer, flags, payload in self._receive(sequence):
                disturbed |= bool(flags & NLM_F_DUMP_INTR)
                if answer == NLMSG_ERROR:
                    _raise_on_error(payload)
                if answer == NLMSG_DONE:
                    if len(payload) >= 4:
                        _raise_on_error(payload)
                    break
                bodies.append(payload)
            if not disturbed:
                return bodies
        raise NetlinkRefusal(errno.EAGAIN, f"{_DUMP_TRIES} dumps were disturbed by changes")

    def _send(self, kind: int, flags: int, body: bytes) -> int:
        self._sequence = self._sequence % 0xFFFFFFFF + 1
        header = _NLMSG_HEADER.pack(
            _NLMSG_HEADER.size + len(body), kind, flags | NLM_F_REQUEST, self._sequence, 0
        )
        self._socket.send(header + body)
        return self._sequence

    def _receive(self, sequence: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield (type, flags, body) of the answers to one request, until the caller stops."""
        while True:
            data = self._socket.recv(_RECEIVE_BYTES)
            offset = 0
            while offset + _NLMSG_HEADER.size <= len(data):
                length, kind, flags, number, _ = _NLMSG_HEADER.unpack_from(data, offset)
                if length < _NLMSG_HEADER.size:
                    break
                if number == sequence:
                    yield kind, flags, data[offset + _NLMSG_HEADER.size : offset + length]
                offset += (length + 3) & ~3


def _raise_on_error(payload: bytes) -> None:
    """Raise the refusal in an NLMSG_ERROR or NLMSG_DONE body; 0 is an acknowledgement.

    With NETLINK_CAP_ACK the failed request is not repeated: after errno and
    the request's header follow the extended attributes (1 = the words).
    """
    code = -struct.unpack_from("=i", payload)[0]
    if code <= 0:
        return
    words = parse_attributes(payload[4 + _NLMSG_HEADER.size :]).get(1, b"")
    raise NetlinkRefusal(code, parse_text(words) or os.strerror(code))


def named_error(error: OSError, what: str, device: str = "") -> ShapeError:
    """Return the named error for a refusal; the kernel's words stand in its message.

    Args:
        what: what could not be done, e.g. "add the root qdisc".
        device: name or index for the message.
    """
    code = error.errno or 0
    place = f" on {device}" if device else ""
    message = f"Cannot {what}{place}: {error.strerror or os.strerror(code)}."
    if code in (errno.ENODEV, errno.ENXIO, errno.ENOLINK):
        return FailedError(
            "interface-gone", message, hint="The interface went away: see `ip link` and try again."
        )
    if code in (errno.EPERM, errno.EACCES):
        return PrivilegeError(
            "missing-capability", message, hint="Run it with sudo, or give CAP_NET_ADMIN."
        )
    if code in (errno.EBUSY, errno.EEXIST):
        return ConflictError(
            "qdisc-busy", message, hint="See what is there: tc qdisc show; tc filter show."
        )
    if code in (errno.EOPNOTSUPP, errno.ENOENT, errno.EPROTONOSUPPORT):
        return UnsupportedError(
            "qdisc-missing", message, hint="This kernel lacks it; choose another --profile."
        )
    return FailedError(
        "kernel-refused",
        f"{message[:-1]} ({errno.errorcode.get(code, code)}).",
        hint="Nothing more is known: see `dmesg | tail`.",
    )
