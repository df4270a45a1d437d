# SPDX-License-Identifier: Apache-2.0
"""Whitelists as the kernel holds them: keys and values, and how they change.

A replacement fills fresh inner maps in the half that nobody reads and is then
one write of the control word, so readers see the old lists or the new, never
a mix. A single exact host or pair changes in place and bumps the epoch; a
single prefix changes in place and bumps the generation.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from shapeagent.kernel import abi, bpf
from shapeagent.kernel.maps import LIST_KINDS
from shapeagent.model.errors import FailedError
from shapeagent.model.types import Match, WhitelistEntry

MAX_ENTRIES = 4_000_000  # per inner map; bounded so that a typo cannot eat the host's memory

_NONE = abi.SHP_NO_CLASS
_HOST = struct.Struct("=BBHIQQ")
_LISTED = struct.Struct("=QII")
_LOCAL, _REMOTE = 0, 1

# (family bytes, role or pair) -> flag of the control word
_FLAGS: Mapping[tuple[str, int], int] = {
    ("pairs4", 0): abi.SHP_F_PAIR4,
    ("pairs6", 0): abi.SHP_F_PAIR6,
    ("hosts4", _LOCAL): abi.SHP_F_HOST4_LOCAL,
    ("hosts4", _REMOTE): abi.SHP_F_HOST4_REMOTE,
    ("hosts6", _LOCAL): abi.SHP_F_HOST6_LOCAL,
    ("hosts6", _REMOTE): abi.SHP_F_HOST6_REMOTE,
    ("lpm4", _LOCAL): abi.SHP_F_LPM4_LOCAL,
    ("lpm4", _REMOTE): abi.SHP_F_LPM4_REMOTE,
    ("lpm6", _LOCAL): abi.SHP_F_LPM6_LOCAL,
    ("lpm6", _REMOTE): abi.SHP_F_LPM6_REMOTE,
}
ALL_FLAGS = sum(_FLAGS.values())


@dataclass(slots=True)
class ListTables:
    """Entries by inner map: (kind, half) → key → value. Half is 0 but for tries: the role."""

    tables: dict[tuple[str, int], dict[bytes, bytes]] = field(default_factory=dict)
    flags: int = 0

    def of(self, kind: str, half: int) -> dict[bytes, bytes]:
        """Return the table of one inner map, made when it is missing."""
        return self.tables.setdefault((kind, half), {})


def roles_of(entry: WhitelistEntry) -> tuple[int, ...]:
    """Return the ends that an entry names: local 0 (source), remote 1 (destination)."""
    if entry.match is Match.SOURCE:
        return (_LOCAL,)
    if entry.match is Match.DESTINATION:
        return (_REMOTE,)
    return (_LOCAL, _REMOTE)


def build_tables(
    entries: Iterable[WhitelistEntry],
    class_numbers: Mapping[str, int],
    expiry_jiffies: Callable[[float | None], int],
) -> ListTables:
    """Return the tables of a whole whitelist.

    Args:
        entries: canonical, without two of the same key.
        class_numbers: class name → number.
        expiry_jiffies: Unix seconds (or None) → jiffies, 0 = never.
    """
    result = ListTables()
    for entry in entries:
        number = class_numbers[entry.traffic_class]
        expires = expiry_jiffies(entry.expires_unix_s) if entry.expires_unix_s is not None else 0
        _put(result, entry, number, expires)
    return result


def _put(result: ListTables, entry: WhitelistEntry, number: int, expires: int) -> None:
    if entry.match is Match.PAIR:
        key, kind = pair_key(entry)
        result.of(kind, 0)[key] = _LISTED.pack(expires, number, 0)
        result.flags |= _FLAGS[(kind, 0)]
        return
    address, bits = entry.destination or entry.source or (b"", 0)
    family = "4" if len(address) == 4 else "6"
    if bits == len(address) * 8:
        kind = "hosts" + family
        table = result.of(kind, 0)
        table[address] = merge_host(table.get(address), roles_of(entry), number, expires)
        for role in roles_of(entry):
            result.flags |= _FLAGS[(kind, role)]
        return
    kind = "lpm" + family
    for role in roles_of(entry):
        result.of(kind, role)[prefix_key(address, bits)] = _LISTED.pack(expires, number, bits)
        result.flags |= _FLAGS[(kind, role)]


def pair_key(entry: WhitelistEntry) -> tuple[bytes, str]:
    """Return the key of a pair and the kind of list that it belongs to."""
    if entry.source is None or entry.destination is None:
        raise ValueError("a pair has two ends")
    kind = "pairs4" if len(entry.source[0]) == 4 else "pairs6"
    return entry.source[0] + entry.destination[0], kind


def prefix_key(address: bytes, bits: int) -> bytes:
    """Return a trie key: length, then the address in network order."""
    return bits.to_bytes(4, "little") + address


def merge_host(old: bytes | None, roles: Iterable[int], number: int | None, expires: int) -> bytes:
    """Return a host's value with some roles set (or, with number None, taken away)."""
    classes = [_NONE, _NONE]
    ends = [0, 0]
    if old is not None:
        classes[0], classes[1], _, _, ends[0], ends[1] = _HOST.unpack(old)
    for role in roles:
        classes[role] = _NONE if number is None else number
        ends[role] = 0 if number is None else expires
    return _HOST.pack(classes[0], classes[1], 0, 0, ends[0], ends[1])


def host_is_empty(value: bytes) -> bool:
    """Return whether a host's value names it in no role."""
    return value[0] == _NONE and value[1] == _NONE


def capacity_for(count: int) -> int:
    """Return how many entries an inner map is made for: a quarter and 1,024 to spare."""
    return min(MAX_ENTRIES, count + count // 4 + 1024)


def inner_fd(maps: Mapping[str, int], kind: str, slot: int) -> int | None:
    """Return a descriptor of the inner map in a slot of an array of maps, None if it is empty."""
    raw = bpf.lookup(maps[kind], slot.to_bytes(4, "little"), 4)
    return None if raw is None else bpf.map_by_id(int.from_bytes(raw, "little"))


def _inner_or_new(maps: Mapping[str, int], kind: str, slot: int) -> int:
    """Return a descriptor of the inner map in a slot; an empty slot gets a map with room."""
    fd = inner_fd(maps, kind, slot)
    if fd is None:
        fd = bpf.create_map(kind, LIST_KINDS[kind].inner_shape(capacity_for(0)))
        _install(maps, kind, slot, fd)
    return fd


def fill_half(maps: Mapping[str, int], tables: ListTables, active: int) -> None:
    """Put fresh inner maps with these tables into the half `active` (0 or 1).

    Every other slot of that half is empty: `clear_half` left it so. An empty
    slot costs a look-up nothing, and each write waits for an RCU grace period
    (about 10 ms), so only lists with entries are written.

    Raises:
        FailedError: "map-full"; nothing that readers see has changed.
    """
    for (kind, half), table in tables.tables.items():
        if not table:
            continue
        shape = LIST_KINDS[kind]
        if len(table) > MAX_ENTRIES:
            raise FailedError(
                "map-full", f"{len(table)} entries in {kind}: at most {MAX_ENTRIES} fit."
            )
        fd = bpf.create_map(kind, shape.inner_shape(capacity_for(len(table))))
        try:
            bpf.update_batch(
                fd,
                b"".join(table.keys()),
                b"".join(table.values()),
                len(table),
                key_bytes=shape.key_bytes,
                value_bytes=shape.value_bytes,
            )
            _install(maps, kind, 2 * half + active, fd)
        finally:
            os.close(fd)


def filled_slots(maps: Mapping[str, int], active: int) -> list[tuple[str, int]]:
    """Return (kind, half) of each list that the half `active` holds."""
    found = []
    for kind in LIST_KINDS.values():
        for half in range(kind.slots // 2):
            slot = (2 * half + active).to_bytes(4, "little")
            if bpf.lookup(maps[kind.name], slot, 4) is not None:
                found.append((kind.name, half))
    return found


def clear_half(maps: Mapping[str, int], kinds: Iterable[tuple[str, int]], active: int) -> None:
    """Empty the slots of the given lists in the half `active`, which no reader uses any more.

    The old maps are freed by the kernel, off the packet path.
    """
    for kind, half in kinds:
        bpf.delete(maps[kind], (2 * half + active).to_bytes(4, "little"))


def _install(maps: Mapping[str, int], kind: str, slot: int, fd: int) -> None:
    bpf.update(maps[kind], slot.to_bytes(4, "little"), fd.to_bytes(4, "little"))


def add_in_place(
    maps: Mapping[str, int],
    entry: WhitelistEntry,
    active: int,
    number: int,
    expires: int,
) -> tuple[int, bool]:
    """Write one entry into the lists in force. Returns (flags to set, is a prefix).

    Raises:
        FailedError: "map-full", nothing changed: the caller replaces the whole list instead.
    """
    if entry.match is Match.PAIR:
        key, kind = pair_key(entry)
        _write(maps, kind, active, key, _LISTED.pack(expires, number, 0))
        return _FLAGS[(kind, 0)], False
    address, bits = entry.destination or entry.source or (b"", 0)
    family = "4" if len(address) == 4 else "6"
    flags = 0
    if bits == len(address) * 8:
        kind = "hosts" + family
        fd = _inner_or_new(maps, kind, active)
        try:
            old = bpf.lookup(fd, address, _HOST.size)
            bpf.update(fd, address, merge_host(old, roles_of(entry), number, expires))
        finally:
            os.close(fd)
        for role in roles_of(entry):
            flags |= _FLAGS[(kind, role)]
        return flags, False
    kind = "lpm" + family
    key, value = prefix_key(address, bits), _LISTED.pack(expires, number, bits)
    undo: list[tuple[int, bytes | None]] = []
    try:
        for role in roles_of(entry):
            slot = 2 * role + active
            old = _prefix_value(maps, kind, slot, key)
            _write(maps, kind, slot, key, value)
            undo.append((slot, old))
            flags |= _FLAGS[(kind, role)]
    except FailedError:  # the other end's list is full: neither end keeps the entry
        for slot, old in undo:
            if old is None:
                _erase(maps, kind, slot, key)
            else:
                _write(maps, kind, slot, key, old)
        raise
    return flags, True


def _prefix_value(maps: Mapping[str, int], kind: str, slot: int, key: bytes) -> bytes | None:
    """Return the value of exactly this prefix: a trie answers with a shorter one too."""
    fd = inner_fd(maps, kind, slot)
    if fd is None:
        return None
    try:
        value = bpf.lookup(fd, key, _LISTED.size)
    finally:
        os.close(fd)
    bits = int.from_bytes(key[:4], "little")
    return value if value is not None and _LISTED.unpack(value)[2] == bits else None


def _write(maps: Mapping[str, int], kind: str, slot: int, key: bytes, value: bytes) -> None:
    fd = _inner_or_new(maps, kind, slot)
    try:
        bpf.update(fd, key, value)
    finally:
        os.close(fd)


def remove_in_place(maps: Mapping[str, int], entry: WhitelistEntry, active: int) -> bool:
    """Take one entry out of the lists in force. Returns whether it is a prefix."""
    if entry.match is Match.PAIR:
        key, kind = pair_key(entry)
        _erase(maps, kind, active, key)
        return False
    address, bits = entry.destination or entry.source or (b"", 0)
    family = "4" if len(address) == 4 else "6"
    if bits == len(address) * 8:
        fd = inner_fd(maps, "hosts" + family, active)
        if fd is None:
            return False
        try:
            old = bpf.lookup(fd, address, _HOST.size)
            if old is not None:
                value = merge_host(old, roles_of(entry), None, 0)
                if host_is_empty(value):
                    bpf.delete(fd, address)
                else:
                    bpf.update(fd, address, value)
        finally:
            os.close(fd)
        return False
    for role in roles_of(entry):
        _erase(maps, "lpm" + family, 2 * role + active, prefix_key(address, bits))
    return True


def _erase(maps: Mapping[str, int], kind: str, slot: int, key: bytes) -> None:
    fd = inner_fd(maps, kind, slot)
    if fd is None:
        return
    try:
        bpf.delete(fd, key)
    finally:
        os.close(fd)


assert _HOST.size == ctypes.sizeof(abi.Host)
assert _LISTED.size == ctypes.sizeof(abi.Listed)
