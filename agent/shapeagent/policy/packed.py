# SPDX-License-Identifier: Apache-2.0
"""Whitelist entries as packed keys: laid end to end, taken apart, checked, and as text.

A key is what `model.types.EntryKind` says. Where there are many, the work is done by what
Python runs in C over a whole batch; only what is wrong is looked at one by one.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence

from shapeagent.model.errors import InputError
from shapeagent.model.reports import WhitelistRow
from shapeagent.model.types import EntryKind, Match, PackedBatch, WhitelistEntry
from shapeagent.policy.whitelist import format_prefix

Place = tuple[Match, EntryKind]  # which table an entry is in

MAX_NAMED_BAD_ITEMS = 20

_CHUNK = 4096
_MAPPED = bytes(10) + b"\xff\xff"  # ::ffff:0:0/96, RFC 4291 section 2.5.5.2
_HOST_BITS = [(1 << (32 - min(length, 32))) - 1 for length in range(256)]
_HIGH_HOST_BITS = [(1 << (64 - min(length, 64))) - 1 for length in range(256)]
_LOW_HOST_BITS = [(1 << (128 - min(max(length, 64), 128))) - 1 for length in range(256)]
_PREFIX4 = struct.Struct(">BI")
_PREFIX6 = struct.Struct(">BQQ")


@functools.lru_cache(maxsize=64)
def _parts(width: int, count: int) -> struct.Struct:
    return struct.Struct(f"{width}s" * count)


def split_keys(data: bytes | memoryview, width: int) -> list[bytes]:
    """Return the keys of `width` bytes that lie end to end in `data`."""
    whole = len(data) - len(data) % (width * _CHUNK)
    found: list[bytes] = []
    if whole:
        step = _parts(width, _CHUNK)
        for offset in range(0, whole, step.size):
            found += step.unpack_from(data, offset)
    rest = (len(data) - whole) // width
    if rest == 1:
        found.append(bytes(data[whole:]))
    elif rest:
        found += struct.unpack_from(f"{width}s" * rest, data, whole)
    return found


def kind_of(address_bytes: int, *, is_pair: bool, is_host: bool) -> EntryKind:
    """Return the kind of an entry by what its addresses are."""
    name = "pairs" if is_pair else "hosts" if is_host else "prefixes"
    return EntryKind(f"{name}{'4' if address_bytes == 4 else '6'}")


def key_of(entry: WhitelistEntry) -> tuple[Place, bytes]:
    """Return the place and key of an entry: what makes two entries the same."""
    if entry.match is Match.PAIR:
        assert entry.source is not None
        assert entry.destination is not None
        near, far = entry.source[0], entry.destination[0]
        return (entry.match, kind_of(len(near), is_pair=True, is_host=True)), near + far
    end = entry.source if entry.match is Match.SOURCE else entry.destination
    assert end is not None
    address, bits = end
    is_host = bits == 8 * len(address)
    key = address if is_host else bytes((bits,)) + address
    return (entry.match, kind_of(len(address), is_pair=False, is_host=is_host)), key


def ends_of(place: Place, key: bytes) -> tuple[tuple[bytes, int] | None, tuple[bytes, int] | None]:
    """Return (source, destination) of a key, as `WhitelistEntry` has them."""
    match, kind = place
    size = kind.address_bytes
    if kind.is_pair:
        return (key[:size], 8 * size), (key[size:], 8 * size)
    end = (key[1:], key[0]) if kind.is_prefix else (key, 8 * size)
    return (end, None) if match is Match.SOURCE else (None, end)


def text_of(place: Place, key: bytes) -> str:
    """Return a key as people write it: an address, a prefix, or SOURCE>DESTINATION."""
    return ">".join(format_prefix(end) for end in ends_of(place, key) if end is not None)


def entry_of(place: Place, key: bytes, batch: PackedBatch) -> WhitelistEntry:
    """Return one entry of a batch as an object."""
    source, destination = ends_of(place, key)
    return WhitelistEntry(
        match=place[0],
        traffic_class=batch.traffic_class,
        source=source,
        destination=destination,
        owner=batch.owner,
        reason=batch.reason,
        expires_unix_s=batch.expires_unix_s,
    )


def row_of(entry: WhitelistEntry) -> WhitelistRow:
    """Return an entry as the command line prints it."""
    return WhitelistRow(
        match=entry.match.value,
        source=format_prefix(entry.source) if entry.source else None,
        destination=format_prefix(entry.destination) if entry.destination else None,
        traffic_class=entry.traffic_class,
        owner=entry.owner,
        reason=entry.reason,
        expires_unix_s=entry.expires_unix_s,
    )


def pack_entries(entries: Iterable[WhitelistEntry]) -> list[PackedBatch]:
    """Return entries as batches, in the order in which each batch's first entry came."""
    found: dict[tuple[Place, str, str, str, float | None], list[bytes]] = {}
    for entry in entries:
        place, key = key_of(entry)
        group = (place, entry.traffic_class, entry.owner, entry.reason, entry.expires_unix_s)
        found.setdefault(group, []).append(key)
    return [
        PackedBatch(match, kind, b"".join(keys), name, owner, reason, expires)
        for ((match, kind), name, owner, reason, expires), keys in found.items()
    ]


def is_everything(batch: PackedBatch) -> bool:
    """Return whether a batch holds 0.0.0.0/0 or ::/0."""
    return batch.kind.is_prefix and 0 in batch.keys[:: batch.kind.key_bytes]


def check_batches(batches: Sequence[PackedBatch], now_unix_s: float) -> None:
    """Return where every batch can be used as it is; else all of them are refused.

    Raises:
        InputError: "whitelist-invalid", which names the first 20 bad items by batch and place.
    """
    bad: list[str] = []
    count = 0
    for number, batch in enumerate(batches, 1):
        for text in _problems(batch, now_unix_s):
            count += 1
            if len(bad) < MAX_NAMED_BAD_ITEMS:
                bad.append(f"batch {number} {text}")
    if count:
        raise invalid(bad, count)


def invalid(bad: Sequence[str], count: int) -> InputError:
    """Return the error of `count` items that cannot be used, the first of them in words."""
    more = [f"... and {count - len(bad)} more"] if count > len(bad) else []
    return InputError(
        "whitelist-invalid",
        f"{count} {'item' if count == 1 else 'items'} cannot be used, nothing was changed",
        hint="correct them and send the whole change again",
        details=[*bad, *more],
    )


def _problems(batch: PackedBatch, now_unix_s: float) -> Iterator[str]:
    if (batch.match is Match.PAIR) != batch.kind.is_pair:
        yield f"has match={batch.match.value}, which {batch.kind.value} cannot have"
        return
    width = batch.kind.key_bytes
    if len(batch.keys) % width:
        yield f"has {len(batch.keys)} bytes, not a multiple of {width}"
        return
    expires = batch.expires_unix_s
    if expires is not None and not math.isfinite(expires):
        yield f"expires at {expires}, which is no time"
    elif expires is not None and expires <= now_unix_s:
        yield "has expired already"
    for index, why in _bad_keys(batch):
        yield f"item {index}: {why(batch.keys[index * width : (index + 1) * width])}"


def _bad_keys(batch: PackedBatch) -> Iterator[tuple[int, Callable[[bytes], str]]]:
    keys, kind = batch.keys, batch.kind
    bad: list[int] = []
    if kind is EntryKind.PREFIXES4:
        bad = [
            index
            for index, (bits, address) in enumerate(_PREFIX4.iter_unpack(keys))
            if bits > 32 or address & _HOST_BITS[bits]
        ]
    elif kind is EntryKind.PREFIXES6:
        bad = [
            index
            for index, (bits, high, low) in enumerate(_PREFIX6.iter_unpack(keys))
            if bits > 128 or high & _HIGH_HOST_BITS[bits] or low & _LOW_HOST_BITS[bits]
        ]
    for index in bad:
        yield index, _why_prefix
    if kind.address_bytes == 16 and _MAPPED in keys:
        known = set(bad)
        for index in _mapped(batch):
            if index not in known:
                yield index, _why_mapped


def _mapped(batch: PackedBatch) -> Iterator[int]:
    """Yield the places of keys with an IPv4-mapped address (C63)."""
    kind, last = batch.kind, -1
    first = int(kind.is_prefix)
    at = batch.keys.find(_MAPPED)
    while at >= 0:
        index, within = divmod(at, kind.key_bytes)
        if within >= first and (within - first) % 16 == 0 and index != last:
            last = index
            yield index
        at = batch.keys.find(_MAPPED, at + 1)


def _why_prefix(key: bytes) -> str:
    bits, address = key[0], key[1:]
    width = 8 * len(address)
    if bits > width:
        shown = format_prefix((address, width))
        return f"{shown}/{bits}: the prefix length is not a number from 0 to {width}"
    network = int.from_bytes(address) >> (width - bits) << (width - bits)
    right = format_prefix((network.to_bytes(len(address)), bits))
    return f"{format_prefix((address, width))}/{bits} has host bits: write {right}"


def _why_mapped(key: bytes) -> str:
    addresses = [key] if len(key) == 16 else [key[1:]] if len(key) == 17 else [key[:16], key[16:]]
    shown = ">".join(format_prefix((one, 128)) for one in addresses)
    bits = f"/{key[0]}" if len(key) == 17 else ""
    return f"{shown}{bits} is IPv4 in IPv6: send it in a batch of IPv4"
