# SPDX-License-Identifier: Apache-2.0
"""Qdiscs, classes and filters of anybody, kept as the kernel dumps them and made again.

What the kernel dumps is not for every kind what it takes back: some of it are
counters, codel's times lose a microsecond on each way, a size table is left
out. `parse_object` takes the counters out, so that two dumps of one
configuration are equal; `build_request` turns the rest into a request. What
neither can know (see `unknowable`) is refused, and the judge of everything is
a rebuild that is dumped again (kernel/snapshot.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from shapeagent.kernel.rtnl import (
    RTM_NEWQDISC,
    RTM_NEWTCLASS,
    RTM_NEWTFILTER,
    TC_H_ROOT,
    TCA_KIND,
    TCA_OPTIONS,
    TCA_STATS2,
    TcMessage,
    attribute,
    attribute_text,
    attribute_u32,
    build_tc,
    iterate_attributes,
    nested,
    parse_attributes,
)

TCA_STAB = 8
TCA_CHAIN = 11
TCA_INGRESS_BLOCK, TCA_EGRESS_BLOCK = 13, 14
_KEPT = (TCA_STAB, TCA_CHAIN, TCA_INGRESS_BLOCK, TCA_EGRESS_BLOCK)

_TCA_STAB_BASE, _TCA_STAB_DATA = 1, 2
# struct tc_sizespec: cell_log, size_log, cell_align, overhead, linklayer, mpu, mtu, tsize
_SIZESPEC = struct.Struct("=BBhiIIII")
_LINKLAYER_ATM = 2
_U16_MAX = 0xFFFF

_TCA_STATS_RATE_EST, _TCA_STATS_RATE_EST64 = 2, 5
_TCA_HTB_INIT = 2
_HTB_MAJOR_VERSION = 3
_SFQ_STATS_BYTES = 24  # struct tc_sfqred_stats at the end of struct tc_sfq_qopt_v1
_SFQ_V1_BYTES = 72
# struct tc_netem_qopt: latency, limit, loss, gap, duplicate, jitter
_NETEM = struct.Struct("=6I")
_TCA_NETEM_JITTER64 = 11
# Attributes in codel's unit of 1.024 us (net/sched/sch_codel.c, sch_fq_codel.c).
_CODEL_TIMES = {"codel": (1, 3, 5), "fq_codel": (1, 3, 7)}

_U32_HASH, _U32_DIVISOR, _U32_MARK = 2, 4, 10
_U32_OWN_TABLE = 0xFFF00000  # TC_U32_ROOT: the table that its preference makes by itself
_U32_FIRST_AUTOMATIC = 0x800  # tables from here on are numbered by the kernel

_BPF_FD, _BPF_ID, _BPF_TAG = 6, 11, 10

_ACT_KIND, _ACT_OPTIONS, _ACT_COOKIE, _ACT_FLAGS, _ACT_HW_STATS = 1, 2, 6, 7, 8
_ACT_GENERIC = struct.Struct("=5I")  # index, capab, action, refcnt, bindcnt
_MIRRED_IFINDEX_OFFSET = 24
# Kind of action -> (attribute that begins with the generic part, attribute with its times)
_ACTIONS = {
    "gact": (2, 1),
    "mirred": (2, 1),
    "skbedit": (2, 1),
    "vlan": (2, 1),
    "csum": (1, 2),
    "nat": (1, 2),
}
_FLAGS_OF_THE_KERNEL = 0x4 | 0x8  # IN_HW, NOT_IN_HW: it tells them and takes them from nobody

# Class kinds whose classes somebody makes; those of the others come with their qdisc.
CLASSES_ARE_MADE = frozenset({"htb", "hfsc", "drr", "qfq", "cbq"})
# Of these a newer filter of the same preference stands before the older ones.
_NEWEST_FIRST = frozenset({"bpf", "basic"})


@dataclass(frozen=True, slots=True)
class _FilterKind:
    """Which attributes of a filter's options are actions, counters and flags."""

    action: int
    counters: tuple[int, ...] = ()
    flags: int = 0


_FILTERS: Mapping[str, _FilterKind] = {
    "u32": _FilterKind(action=7, counters=(9,), flags=11),
    "bpf": _FilterKind(action=1, counters=(_BPF_TAG,), flags=9),
    "basic": _FilterKind(action=3, counters=(5,)),
    "fw": _FilterKind(action=4),
    "flower": _FilterKind(action=3, flags=22),
    "matchall": _FilterKind(action=2, counters=(4,), flags=3),
    "flow": _FilterKind(action=9),
    "route": _FilterKind(action=6),
    "cgroup": _FilterKind(action=1),
}


class What(StrEnum):
    """The three things that a tree is made of."""

    QDISC = "qdisc"
    CLASS = "class"
    FILTER = "filter"


_NEW = {
    What.QDISC: RTM_NEWQDISC,
    What.CLASS: RTM_NEWTCLASS,
    What.FILTER: RTM_NEWTFILTER,
}


@dataclass(frozen=True, slots=True)
class TcObject:
    """One qdisc, class or filter; equal to another when it is configured in the same way.

    `options` are those of the dump without counters, None where it had none;
    `extra` holds the attributes beside them (size table, chain).
    """

    what: What
    parent: int
    handle: int
    info: int
    kind: str
    options: bytes | None
    extra: bytes = b""
    has_estimator: bool = False

    def __str__(self) -> str:
        if self.what is What.FILTER:
            return f"filter {self.kind} pref {self.info >> 16} {self._filter_handle()} of " + (
                "the root" if self.parent == TC_H_ROOT else handle_text(self.parent)
            )
        return f"{self.what} {self.kind} {handle_text(self.handle)}"

    def _filter_handle(self) -> str:
        if self.kind == "u32":
            return f"fh {u32_handle_text(self.handle)}"
        return f"handle {self.handle:#x}"


def handle_text(handle: int) -> str:
    """Return a handle as tc writes it: "1:", "1:10"."""
    minor = handle & 0xFFFF
    return f"{handle >> 16:x}:{minor:x}" if minor else f"{handle >> 16:x}:"


def u32_handle_text(handle: int) -> str:
    """Return the handle of a u32 filter as tc writes it: "800::800", "2:3:800", "2:"."""
    table, bucket, node = handle >> 20, handle >> 12 & 0xFF, handle & 0xFFF
    if not bucket and not node:
        return f"{table:x}:"
    return f"{table:x}:{bucket:x}:{node:x}" if bucket else f"{table:x}::{node:x}"


def parse_object(message: TcMessage, what: What) -> TcObject:
    """Return what a dump says of one qdisc, class or filter, without its counters."""
    kind = message.kind
    options = message.attributes.get(TCA_OPTIONS)
    if options is not None:
        if what is What.FILTER:
            options = _filter_options(kind, options)
        elif what is What.QDISC:
            options = _qdisc_options(kind, options)
    extra = b"".join(
        attribute(number, message.attributes[number])
        for number in _KEPT
        if number in message.attributes
    )
    stats = parse_attributes(message.attributes.get(TCA_STATS2, b""))
    return TcObject(
        what=what,
        parent=message.parent,
        handle=message.handle,
        info=message.info if what is What.FILTER else 0,  # a class tells its leaf's handle there
        kind=kind,
        options=options,
        extra=extra,
        has_estimator=_TCA_STATS_RATE_EST in stats or _TCA_STATS_RATE_EST64 in stats,
    )


def _qdisc_options(kind: str, options: bytes) -> bytes:
    if kind == "htb":
        parts = []
        for number, payload in iterate_attributes(options):
            if number == _TCA_HTB_INIT:
                payload = payload[:16] + bytes(4)  # direct_pkts
            parts.append(attribute(number, payload))
        return b"".join(parts)
    if kind == "sfq" and len(options) >= _SFQ_V1_BYTES:
        return options[:-_SFQ_STATS_BYTES] + bytes(_SFQ_STATS_BYTES)
    return options


def _filter_options(kind: str, options: bytes) -> bytes:
    found = _FILTERS.get(kind)
    if found is None:
        return options
    parts = []
    for number, payload in iterate_attributes(options):
        if number in found.counters:
            continue
        if number == found.action:
            payload = b"".join(
                nested(position, *_action(one)) for position, one in iterate_attributes(payload)
            )
        elif kind == "u32" and number == _U32_MARK and len(payload) >= 8:
            payload = payload[:8] + bytes(4)  # val, mask, and how often it matched
        elif number == found.flags and len(payload) == 4:
            (flags,) = struct.unpack("=I", payload)
            payload = struct.pack("=I", flags & ~_FLAGS_OF_THE_KERNEL)
        parts.append(attribute(number, payload))
    return b"".join(parts)


def _action(payload: bytes) -> list[bytes]:
    """Return the attributes of one action without counters, times and its automatic index."""
    found = parse_attributes(payload)
    kind = found.get(_ACT_KIND, b"").split(b"\0")[0].decode(errors="replace")
    generic, times = _ACTIONS.get(kind, (0, 0))
    options = []
    for number, part in iterate_attributes(found.get(_ACT_OPTIONS, b"")):
        if number == times:
            continue
        if number == generic and len(part) >= _ACT_GENERIC.size:
            index, capab, action, references, _bound = _ACT_GENERIC.unpack_from(part)
            # one that others refer to as well keeps its index, and stays when we let go of it
            index = index if references > 1 else 0
            part = _ACT_GENERIC.pack(index, capab, action, 0, 0) + part[_ACT_GENERIC.size :]
        options.append(attribute(number, part))
    parts = [attribute(_ACT_KIND, found.get(_ACT_KIND, b"")), nested(_ACT_OPTIONS, *options)]
    parts += [
        attribute(number, found[number])
        for number in (_ACT_COOKIE, _ACT_FLAGS, _ACT_HW_STATS)
        if number in found
    ]
    return parts


def actions_of(one: TcObject) -> list[tuple[str, bytes]]:
    """Return (kind, options) of each action of a filter."""
    found = _FILTERS.get(one.kind)
    if one.what is not What.FILTER or found is None or one.options is None:
        return []
    listed = parse_attributes(one.options).get(found.action, b"")
    actions = []
    for _, payload in iterate_attributes(listed):
        parts = parse_attributes(payload)
        kind = parts.get(_ACT_KIND, b"").split(b"\0")[0].decode(errors="replace")
        actions.append((kind, parts.get(_ACT_OPTIONS, b"")))
    return actions


def redirect_targets(one: TcObject) -> list[int]:
    """Return the indexes of the devices that a filter redirects or mirrors to."""
    targets = []
    for kind, options in actions_of(one):
        parms = parse_attributes(options).get(2, b"")
        if kind == "mirred" and len(parms) >= _MIRRED_IFINDEX_OFFSET + 4:
            targets.append(int(struct.unpack_from("=I", parms, _MIRRED_IFINDEX_OFFSET)[0]))
    return targets


def unknowable(one: TcObject) -> str:
    """Return what the kernel does not tell of an object, "" where it tells everything.

    A rebuild would look equal and behave otherwise, so it cannot be the judge.
    """
    if one.has_estimator:
        return "the times of its rate estimator"
    if one.kind == "netem" and one.options is not None and len(one.options) >= _NETEM.size:
        jitter = _NETEM.unpack_from(one.options)[5]
        attributes = parse_attributes(one.options[_NETEM.size :])
        if jitter or any(attributes.get(_TCA_NETEM_JITTER64, b"")):
            return "the distribution of its jitter"
    for kind, _ in actions_of(one):
        if kind not in _ACTIONS:
            return f"all that its action {kind or 'unnamed'} holds"
    return ""


def program_id_of(one: TcObject) -> int:
    """Return the id of the program of a bpf filter, 0 where it has none."""
    if one.what is not What.FILTER or one.kind != "bpf" or one.options is None:
        return 0
    payload = parse_attributes(one.options).get(_BPF_ID, bytes(4))
    return int(struct.unpack_from("=I", payload)[0])


def is_u32_table(one: TcObject) -> bool:
    """Return whether a u32 object is a hash table, not a key."""
    return one.kind == "u32" and one.handle != 0 and one.handle & 0xFFFFF == 0


def has_automatic_table(one: TcObject) -> bool:
    """Return whether a u32 object is, or lies in, the table that its preference made."""
    return one.kind == "u32" and one.handle >> 20 >= _U32_FIRST_AUTOMATIC


def stands_before_older(one: TcObject) -> bool:
    """Return whether a later filter of this kind and preference is asked first."""
    return one.kind in _NEWEST_FIRST


def build_request(one: TcObject, index: int, program_fd: Callable[[int], int]) -> tuple[int, bytes]:
    """Return (message type, body) that makes an object again on a device.

    Args:
        program_fd: gives a descriptor for the id of a bpf filter's program.
    Raises: whatever `program_fd` raises.
    """
    parts = [attribute_text(TCA_KIND, one.kind)]
    handle = one.handle
    options = one.options
    if options is not None:
        if one.what is What.FILTER:
            handle, options = _filter_request(one, options, program_fd)
        elif one.what is What.QDISC:
            options = _qdisc_request(one.kind, options)
        parts.append(nested(TCA_OPTIONS, options))
    for number, payload in iterate_attributes(one.extra):
        if number == TCA_STAB:
            parts.append(nested(TCA_STAB, *_size_table(payload)))
        else:
            parts.append(attribute(number, payload))
    body = build_tc(index, *parts, handle=handle, parent=one.parent, info=one.info)
    return _NEW[one.what], body


def _qdisc_request(kind: str, options: bytes) -> bytes:
    """Return the options as the kernel takes them where it dumps others."""
    times = _CODEL_TIMES.get(kind, ())
    if kind != "htb" and not times:
        return options
    parts = []
    for number, payload in iterate_attributes(options):
        if kind == "htb" and number == _TCA_HTB_INIT:
            # it shows its whole version, and asks for the upper half (htb_init() in sch_htb.c)
            payload = struct.pack("=I", _HTB_MAJOR_VERSION) + payload[4:]
        if number in times and len(payload) == 4:
            payload = struct.pack("=I", codel_us(*struct.unpack("=I", payload)))
        parts.append(attribute(number, payload))
    return b"".join(parts)


def codel_us(shown_us: int) -> int:
    """Return the microseconds that make codel show `shown_us`.

    It keeps units of 1.024 us and rounds down both ways, so 5 ms are shown as
    4,999 us, and 4,999 us would be kept as 4,998.
    """
    units = -(-shown_us * 1000 // 1024)
    return -(-units * 1024 // 1000)


def _filter_request(
    one: TcObject, options: bytes, program_fd: Callable[[int], int]
) -> tuple[int, bytes]:
    handle = one.handle
    parts = []
    for number, payload in iterate_attributes(options):
        if one.kind == "u32" and number == _U32_HASH and has_automatic_table(one):
            handle &= 0xFFF  # in whatever table its preference gets this time
            payload = struct.pack("=I", _U32_OWN_TABLE)
        if one.kind == "bpf" and number == _BPF_ID:
            parts.append(attribute_u32(_BPF_FD, program_fd(program_id_of(one))))
            continue
        parts.append(attribute(number, payload))
    if is_u32_table(one):  # its own handle is no part of the options
        parts = [part for part in parts if parse_attributes(part).keys() == {_U32_DIVISOR}]
    return handle, b"".join(parts)


def _size_table(payload: bytes) -> list[bytes]:
    """Return a size table's parameters, and the table itself, which the kernel does not dump.

    Computed as tc does it (tc_calc_size_table() in iproute2's tc/tc_core.c).
    """
    base = parse_attributes(payload).get(_TCA_STAB_BASE, b"")
    if len(base) < _SIZESPEC.size:
        return []
    cell_log, size_log, _, _, linklayer, mpu, _, slots = _SIZESPEC.unpack_from(base)
    parts = [attribute(_TCA_STAB_BASE, base)]
    if slots:
        sizes = []
        for slot in range(min(slots, _U16_MAX)):
            size = max((slot + 1) << cell_log, mpu)
            if linklayer == _LINKLAYER_ATM:
                size = -(-size // 48) * 53
            sizes.append(min(size >> size_log, _U16_MAX))
        parts.append(attribute(_TCA_STAB_DATA, struct.pack(f"={len(sizes)}H", *sizes)))
    return parts
