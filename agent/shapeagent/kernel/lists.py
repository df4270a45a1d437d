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
from shapeagent.kernel.maps import LIST_KINDS, read_array, write_array
from shapeagent.model.errors import FailedError
from shapeagent.model.types import Match, WhitelistEntry

MAX_ENTRIES = 4_000_000  # per inner map; bounded so that a typo cannot eat the host's memory

_NONE = abi.SHP_NO_CLASS
_HOST = struct.Struct("=BBHIQQ")
_LISTED = struct.Struct("=QII")
_LOCAL, _REMOTE = 0, 1
_ADDRESS_BYTES: Mapping[str, int] = {"4": 4, "6": 16}
_NET_FLAGS: Mapping[str, int] = {"4": abi.SHP_F_NET4, "6": abi.SHP_F_NET6}

# (kind, role or pair) -> flag of the control word; prefixes in nets have the tries' flags, too
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
ALL_FLAGS = sum(_FLAGS.values()) + sum(_NET_FLAGS.values())


# A hash costs one look-up per length and end also where nothing is listed, a trie as many nodes as
# it is deep: measured, new flows are cheaper by hash from about this many prefixes per length.
NETS_MIN_PREFIXES_PER_LENGTH = 4_096

# network address, length, roles, class number, expiry in jiffies
_Prefix = tuple[bytes, int, tuple[int, ...], int, int]


@dataclass(slots=True)
class ListTables:
    """Entries by inner map: (kind, half) → key → value. Half is 0 but for tries: the role.

    lengths: family → prefix lengths of its entries in nets.
    """

    tables: dict[tuple[str, int], dict[bytes, bytes]] = field(default_factory=dict)
    lengths: dict[str, frozenset[int]] = field(default_factory=dict)
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
    prefixes: dict[str, list[_Prefix]] = {"4": [], "6": []}
    for entry in entries:
        number = class_numbers[entry.traffic_class]
        expires = expiry_jiffies(entry.expires_unix_s) if entry.expires_unix_s is not None else 0
        _put(result, prefixes, entry, number, expires)
    for family, found in prefixes.items():
        lengths = frozenset(bits for _, bits, _, _, _ in found)
        least = NETS_MIN_PREFIXES_PER_LENGTH * len(lengths)
        if 0 < len(lengths) <= abi.SHP_NET_LENGTHS and len(found) >= least:
            _put_nets(result, family, lengths, found)
        else:
            _put_tries(result, family, found)
    return result


def _put(
    result: ListTables,
    prefixes: Mapping[str, list[_Prefix]],
    entry: WhitelistEntry,
    number: int,
    expires: int,
) -> None:
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
    prefixes[family].append((address, bits, roles_of(entry), number, expires))


def _put_nets(
    result: ListTables, family: str, lengths: frozenset[int], prefixes: Iterable[_Prefix]
) -> None:
    result.lengths[family] = lengths
    result.flags |= _NET_FLAGS[family]
    table = result.of("nets" + family, 0)
    for address, bits, roles, number, expires in prefixes:
        key = prefix_key(address, bits)
        table[key] = merge_host(table.get(key), roles, number, expires)
        for role in roles:
            result.flags |= _FLAGS[("lpm" + family, role)]


def _put_tries(result: ListTables, family: str, prefixes: Iterable[_Prefix]) -> None:
    kind = "lpm" + family
    for address, bits, roles, number, expires in prefixes:
        for role in roles:
            result.of(kind, role)[prefix_key(address, bits)] = _LISTED.pack(expires, number, bits)
            result.flags |= _FLAGS[(kind, role)]


def kinds_in(flags: int) -> list[tuple[str, int]]:
    """Return (kind, half) of each list that these flags of a control word name."""
    found = set()
    for (kind, role), flag in _FLAGS.items():
        if not flags & flag:
            continue
        if not kind.startswith("lpm"):
            found.add((kind, 0))
        elif flags & _NET_FLAGS[kind[-1]]:
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
    for family, lengths in tables.lengths.items():
        _write_lengths(maps, family, active, lengths)


def _first_length(family: str, active: int) -> int:
    return abi.SHP_NET_LENGTHS * (2 * active + (family == "6"))


def _write_lengths(
    maps: Mapping[str, int], family: str, active: int, lengths: Iterable[int]
) -> None:
    """Name the lengths in use, the longest first, in a half where nobody reads this family's."""
    width = 8 * _ADDRESS_BYTES[family]
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
        bpf.delete(maps[kind], (2 * half + active).to_bytes(4, "little"))


def _install(maps: Mapping[str, int], kind: str, slot: int, fd: int) -> None:
    bpf.update(maps[kind], slot.to_bytes(4, "little"), fd.to_bytes(4, "little"))


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
        _write(maps, kind, active, key, _LISTED.pack(expires, number, 0))
        return _FLAGS[(kind, 0)], False
    address, bits = entry.destination or entry.source or (b"", 0)
    family = "4" if len(address) == 4 else "6"
    flags = 0
    if bits == len(address) * 8:
        kind = "hosts" + family
        _set_roles(maps, kind, active, address, entry, number, expires)
        for role in roles_of(entry):
            flags |= _FLAGS[(kind, role)]
        return flags, False
    kind = "lpm" + family
    if list_flags & _NET_FLAGS[family]:
        if bits not in lengths_in_use(maps, family, active):
            raise FailedError("map-full", f"No prefix in force has {bits} bits.")
        key = prefix_key(address, bits)
        _set_roles(maps, "nets" + family, active, key, entry, number, expires)
        for role in roles_of(entry):
            flags |= _FLAGS[(kind, role)]
        return flags, True
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
        old = bpf.lookup(fd, key, _HOST.size)
        bpf.update(fd, key, merge_host(old, roles_of(entry), number, expires))
    finally:
        os.close(fd)


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
    if list_flags & _NET_FLAGS[family]:
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
        old = bpf.lookup(fd, key, _HOST.size)
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


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry as the kernel holds it; addresses as in `WhitelistEntry`."""

    match: Match
    source: tuple[bytes, int] | None
    destination: tuple[bytes, int] | None
    class_number: int
    expires_jiffies: int


def read_lists(maps: Mapping[str, int], active: int) -> list[Listed]:
    """Return every entry of the half `active`: what `build_tables` was given, in another order.

    An entry for either end is one where both ends have the same class and expiry; a host
    that was listed once for each end looks the same.
    """
    ends: dict[tuple[bytes, int], list[tuple[int, int] | None]] = {}
    found = []
    for kind, half in filled_slots(maps, active):
        for key, value in _read_inner(maps, kind, 2 * half + active):
            if kind.startswith("pairs"):
                middle = len(key) // 2
                bits = 8 * middle
                expires, number, _ = _LISTED.unpack(value)
                near, far = (key[:middle], bits), (key[middle:], bits)
                found.append(Listed(Match.PAIR, near, far, number, expires))
            elif kind.startswith("lpm"):
                expires, number, bits = _LISTED.unpack(value)
                ends.setdefault((key[4:], bits), [None, None])[half] = (number, expires)
            else:
                place = (key, 8 * len(key))
                if kind.startswith("nets"):
                    place = (key[4:], int.from_bytes(key[:4], "little"))
                local, remote, _, _, *expiries = _HOST.unpack(value)
                ends[place] = [
                    None if number == _NONE else (number, expires)
                    for number, expires in zip((local, remote), expiries, strict=True)
                ]
    for place, (local_end, remote_end) in ends.items():
        if local_end is not None and local_end == remote_end:
            found.append(Listed(Match.EITHER, None, place, *local_end))
            continue
        if local_end is not None:
            found.append(Listed(Match.SOURCE, place, None, *local_end))
        if remote_end is not None:
            found.append(Listed(Match.DESTINATION, None, place, *remote_end))
    return found


def _read_inner(maps: Mapping[str, int], kind: str, slot: int) -> list[tuple[bytes, bytes]]:
    fd = inner_fd(maps, kind, slot)
    if fd is None:
        return []
    try:
        shape = LIST_KINDS[kind]
        return list(bpf.iterate(fd, shape.key_bytes, shape.value_bytes))
    finally:
        os.close(fd)


assert _HOST.size == ctypes.sizeof(abi.Host)
assert _LISTED.size == ctypes.sizeof(abi.Listed)
