# SPDX-License-Identifier: Apache-2.0
"""Whitelists as the kernel holds them: keys and values, and how they change.

A replacement fills fresh inner maps in the half that nobody reads and is then
one write of the control word, so readers see the old lists or the new, never
a mix. A single exact host or pair changes in place and bumps the epoch; a
single prefix changes in place and bumps the generation.

Many prefixes of few lengths lie, per family, in one hash for both ends (nets4,
nets6; net_lengths names the lengths), others in one trie per end. Only a
replacement chooses; what is added in place goes where the others are.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from shapeagent.kernel import abi, bpf
from shapeagent.kernel.maps import LIST_KINDS, ListKind, PinnedMaps, read_array, write_array
from shapeagent.model.errors import FailedError, PrivilegeError
from shapeagent.model.types import Match, WhitelistEntry

MAX_ENTRIES = 4_000_000  # per inner map; bounded so that a typo cannot eat the host's memory

NO_CLASS = abi.SHP_NO_CLASS
HOST = struct.Struct("=BBHIQQ")
LISTED = struct.Struct("=QII")
LOCAL, REMOTE = 0, 1
ADDRESS_BYTES: Mapping[str, int] = {"4": 4, "6": 16}
NET_FLAGS: Mapping[str, int] = {"4": abi.SHP_F_NET4, "6": abi.SHP_F_NET6}

# (kind, role or pair) -> flag of the control word; prefixes in nets have the tries' flags, too
FLAGS: Mapping[tuple[str, int], int] = {
    ("pairs4", 0): abi.SHP_F_PAIR4,
    ("pairs6", 0): abi.SHP_F_PAIR6,
    ("hosts4", LOCAL): abi.SHP_F_HOST4_LOCAL,
    ("hosts4", REMOTE): abi.SHP_F_HOST4_REMOTE,
    ("hosts6", LOCAL): abi.SHP_F_HOST6_LOCAL,
    ("hosts6", REMOTE): abi.SHP_F_HOST6_REMOTE,
    ("lpm4", LOCAL): abi.SHP_F_LPM4_LOCAL,
    ("lpm4", REMOTE): abi.SHP_F_LPM4_REMOTE,
    ("lpm6", LOCAL): abi.SHP_F_LPM6_LOCAL,
    ("lpm6", REMOTE): abi.SHP_F_LPM6_REMOTE,
}
ALL_FLAGS = sum(FLAGS.values()) + sum(NET_FLAGS.values())


# A hash costs one look-up per length and end also where nothing is listed, a trie as many nodes as
# it is deep: measured, new flows are cheaper by hash from about this many prefixes per length.
NETS_MIN_PREFIXES_PER_LENGTH = 4_096


@dataclass(slots=True)
class ListPart:
    """What one inner map will hold: blocks of many entries, then those that override them.

    blocks: each call gives (keys, values, count) anew, laid end to end; nothing is kept.
    count: of entries in blocks, at least; `late` comes on top unless it overrides.
    """

    count: int = 0
    blocks: list[Callable[[], Iterable[tuple[bytes, bytes, int]]]] = field(default_factory=list)
    late: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def entries(self) -> int:
        """How many entries the inner map must have room for."""
        return self.count or len(self.late)


@dataclass(slots=True)
class ListTables:
    """Entries by inner map: (kind, half) → what it holds. Half is 0 but for tries: the role.

    lengths: family → prefix lengths of its entries in nets.
    """

    tables: dict[tuple[str, int], ListPart] = field(default_factory=dict)
    lengths: dict[str, frozenset[int]] = field(default_factory=dict)
    flags: int = 0

    def part(self, kind: str, half: int) -> ListPart:
        """Return the part of one inner map, made when it is missing."""
        return self.tables.setdefault((kind, half), ListPart())

    def of(self, kind: str, half: int) -> dict[bytes, bytes]:
        """Return the single entries of one inner map, to be written to."""
        return self.part(kind, half).late


def roles_of(entry: WhitelistEntry) -> tuple[int, ...]:
    """Return the ends that an entry names: local 0 (source), remote 1 (destination)."""
    if entry.match is Match.SOURCE:
        return (LOCAL,)
    if entry.match is Match.DESTINATION:
        return (REMOTE,)
    return (LOCAL, REMOTE)


def kinds_in(flags: int) -> list[tuple[str, int]]:
    """Return (kind, half) of each list that these flags of a control word name."""
    found = set()
    for (kind, role), flag in FLAGS.items():
        if not flags & flag:
            continue
        if not kind.startswith("lpm"):
            found.add((kind, 0))
        elif flags & NET_FLAGS[kind[-1]]:
            found.add(("nets" + kind[-1], 0))
        else:
            found.add((kind, role))
    return sorted(found)


def pair_key(entry: WhitelistEntry) -> tuple[bytes, str]:
    """Return the key of a pair and the kind of list that it belongs to."""
    if entry.source is None or entry.destination is None:
        raise ValueError("a pair has two ends")
    kind = "pairs4" if len(entry.source[0]) == 4 else "pairs6"
    return entry.source[0] + entry.destination[0], kind


def prefix_key(address: bytes, bits: int) -> bytes:
    """Return a key of tries and nets: length, then the address in network order."""
    return bits.to_bytes(4, "little") + address


def merge_host(old: bytes | None, roles: Iterable[int], number: int | None, expires: int) -> bytes:
    """Return a host's value with some roles set (or, with number None, taken away)."""
    classes = [NO_CLASS, NO_CLASS]
    ends = [0, 0]
    if old is not None:
        classes[0], classes[1], _, _, ends[0], ends[1] = HOST.unpack(old)
    for role in roles:
        classes[role] = NO_CLASS if number is None else number
        ends[role] = 0 if number is None else expires
    return HOST.pack(classes[0], classes[1], 0, 0, ends[0], ends[1])


def host_is_empty(value: bytes) -> bool:
    """Return whether a host's value names it in no role."""
    return value[0] == NO_CLASS and value[1] == NO_CLASS


def capacity_for(count: int) -> int:
    """Return how many entries an inner map is made for: a quarter and 1,024 to spare."""
    return min(MAX_ENTRIES, count + count // 4 + 1024)


def inner_fd(maps: Mapping[str, int], kind: str, slot: int) -> int | None:
    """Return a descriptor of the inner map in a slot of an array of maps, None if it is empty.

    Raises: FailedError inner-map-closed, without CAP_SYS_ADMIN, where this process has not
        made the map: a replacement of the whole list is what is left.
    """
    raw = bpf.lookup(maps[kind], slot.to_bytes(4, "little"), 4)
    if raw is None:
        return None
    number = int.from_bytes(raw, "little")
    kept = maps.kept_inner(kind, slot, number) if isinstance(maps, PinnedMaps) else None
    if kept is not None:
        return kept
    try:
        return bpf.map_by_id(number)
    except PrivilegeError as error:
        raise FailedError(
            "inner-map-closed",
            f"The list {kind} was made by another process, and opening it needs CAP_SYS_ADMIN.",
            hint="sudo shapectl whitelist list, with the agent stopped",
        ) from error


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
    for (kind, half), part in tables.tables.items():
        if not part.entries:
            continue
        if part.entries > MAX_ENTRIES:
            raise FailedError(
                "map-full", f"{part.entries} entries in {kind}: at most {MAX_ENTRIES} fit."
            )
        fd = bpf.create_map(kind, LIST_KINDS[kind].inner_shape(capacity_for(part.entries)))
        try:
            _fill(fd, LIST_KINDS[kind], part)
            _install(maps, kind, 2 * half + active, fd)
        finally:
            os.close(fd)
    for family, lengths in tables.lengths.items():
        _write_lengths(maps, family, active, lengths)


def _fill(fd: int, kind: ListKind, part: ListPart) -> None:
    """Write a part into an inner map that no reader sees yet."""
    late = b"".join(part.late.keys()), b"".join(part.late.values()), len(part.late)
    for blocks in (*(block() for block in part.blocks), (late,)):
        for keys, values, count in blocks:
            bpf.update_batch(
                fd, keys, values, count, key_bytes=kind.key_bytes, value_bytes=kind.value_bytes
            )


def _first_length(family: str, active: int) -> int:
    return abi.SHP_NET_LENGTHS * (2 * active + (family == "6"))


def _write_lengths(
    maps: Mapping[str, int], family: str, active: int, lengths: Iterable[int]
) -> None:
    """Name the lengths in use, the longest first, in a half where nobody reads this family's."""
    width = 8 * ADDRESS_BYTES[family]
    wanted = [(bits, (1 << width) - (1 << width - bits)) for bits in sorted(lengths, reverse=True)]
    wanted += [(abi.SHP_NO_LENGTH, 0)] * (abi.SHP_NET_LENGTHS - len(wanted))
    for number, (bits, mask) in enumerate(wanted):
        value = bits.to_bytes(4, "little") + mask.to_bytes(width // 8, "big").ljust(16, b"\0")
        write_array(maps["net_lengths"], _first_length(family, active) + number, value)


def lengths_in_use(maps: Mapping[str, int], family: str, active: int) -> tuple[int, ...]:
    """Return the lengths that a family's nets in the half `active` are looked up by."""
    found = []
    for number in range(abi.SHP_NET_LENGTHS):
        slot = _first_length(family, active) + number
        length = read_array(maps["net_lengths"], slot, abi.NetLength)
        bits = int(length.prefix_bits)
        if bits == abi.SHP_NO_LENGTH:
            break
        found.append(bits)
    return tuple(found)


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
        slot = 2 * half + active
        bpf.delete(maps[kind], slot.to_bytes(4, "little"))
        if isinstance(maps, PinnedMaps):
            maps.drop_inner(kind, slot)


def _install(maps: Mapping[str, int], kind: str, slot: int, fd: int) -> None:
    bpf.update(maps[kind], slot.to_bytes(4, "little"), fd.to_bytes(4, "little"))
    if isinstance(maps, PinnedMaps):
        maps.keep_inner(kind, slot, fd)


def add_in_place(
    maps: Mapping[str, int],
    entry: WhitelistEntry,
    active: int,
    list_flags: int,
    number: int,
    expires: int,
) -> tuple[int, bool]:
    """Write one entry into the lists in force. Returns (flags to set, is a prefix).

    Args:
        list_flags: of the control word in force.

    Raises:
        FailedError: "map-full", nothing changed: the caller replaces the whole list instead. Also
            for a prefix of a length that the nets in force do not have.
    """
    if entry.match is Match.PAIR:
        key, kind = pair_key(entry)
        _write(maps, kind, active, key, LISTED.pack(expires, number, 0))
        return FLAGS[(kind, 0)], False
    address, bits = entry.destination or entry.source or (b"", 0)
    family = "4" if len(address) == 4 else "6"
    flags = 0
    if bits == len(address) * 8:
        kind = "hosts" + family
        _set_roles(maps, kind, active, address, entry, number, expires)
        for role in roles_of(entry):
            flags |= FLAGS[(kind, role)]
        return flags, False
    kind = "lpm" + family
    if list_flags & NET_FLAGS[family]:
        if bits not in lengths_in_use(maps, family, active):
            raise FailedError("map-full", f"No prefix in force has {bits} bits.")
        key = prefix_key(address, bits)
        _set_roles(maps, "nets" + family, active, key, entry, number, expires)
        for role in roles_of(entry):
            flags |= FLAGS[(kind, role)]
        return flags, True
    key, value = prefix_key(address, bits), LISTED.pack(expires, number, bits)
    undo: list[tuple[int, bytes | None]] = []
    try:
        for role in roles_of(entry):
            slot = 2 * role + active
            old = _prefix_value(maps, kind, slot, key)
            _write(maps, kind, slot, key, value)
            undo.append((slot, old))
            flags |= FLAGS[(kind, role)]
    except FailedError:  # the other end's list is full: neither end keeps the entry
        for slot, old in undo:
            if old is None:
                _erase(maps, kind, slot, key)
            else:
                _write(maps, kind, slot, key, old)
        raise
    return flags, True


def _set_roles(
    maps: Mapping[str, int],
    kind: str,
    slot: int,
    key: bytes,
    entry: WhitelistEntry,
    number: int,
    expires: int,
) -> None:
    fd = _inner_or_new(maps, kind, slot)
    try:
        old = bpf.lookup(fd, key, HOST.size)
        bpf.update(fd, key, merge_host(old, roles_of(entry), number, expires))
    finally:
        os.close(fd)


def _prefix_value(maps: Mapping[str, int], kind: str, slot: int, key: bytes) -> bytes | None:
    """Return the value of exactly this prefix: a trie answers with a shorter one too."""
    fd = inner_fd(maps, kind, slot)
    if fd is None:
        return None
    try:
        value = bpf.lookup(fd, key, LISTED.size)
    finally:
        os.close(fd)
    bits = int.from_bytes(key[:4], "little")
    return value if value is not None and LISTED.unpack(value)[2] == bits else None


def _write(maps: Mapping[str, int], kind: str, slot: int, key: bytes, value: bytes) -> None:
    fd = _inner_or_new(maps, kind, slot)
    try:
        bpf.update(fd, key, value)
    finally:
        os.close(fd)


def remove_in_place(
    maps: Mapping[str, int], entry: WhitelistEntry, active: int, list_flags: int
) -> bool:
    """Take one entry out of the lists in force. Returns whether it is a prefix.

    Args:
        list_flags: of the control word in force.
    """
    if entry.match is Match.PAIR:
        key, kind = pair_key(entry)
        _erase(maps, kind, active, key)
        return False
    address, bits = entry.destination or entry.source or (b"", 0)
    family = "4" if len(address) == 4 else "6"
    if bits == len(address) * 8:
        _unset_roles(maps, "hosts" + family, active, address, entry)
        return False
    if list_flags & NET_FLAGS[family]:
        _unset_roles(maps, "nets" + family, active, prefix_key(address, bits), entry)
        return True
    for role in roles_of(entry):
        _erase(maps, "lpm" + family, 2 * role + active, prefix_key(address, bits))
    return True


def _unset_roles(
    maps: Mapping[str, int], kind: str, slot: int, key: bytes, entry: WhitelistEntry
) -> None:
    fd = inner_fd(maps, kind, slot)
    if fd is None:
        return
    try:
        old = bpf.lookup(fd, key, HOST.size)
        if old is not None:
            value = merge_host(old, roles_of(entry), None, 0)
            if host_is_empty(value):
                bpf.delete(fd, key)
            else:
                bpf.update(fd, key, value)
    finally:
        os.close(fd)


def _erase(maps: Mapping[str, int], kind: str, slot: int, key: bytes) -> None:
    fd = inner_fd(maps, kind, slot)
    if fd is None:
        return
    try:
        bpf.delete(fd, key)
    finally:
        os.close(fd)


assert HOST.size == ctypes.sizeof(abi.Host)
assert LISTED.size == ctypes.sizeof(abi.Listed)
