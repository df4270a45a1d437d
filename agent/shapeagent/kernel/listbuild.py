# SPDX-License-Identifier: Apache-2.0
"""From the columns of a whitelist to what inner maps hold, without an object per entry.

Keys and values are made block by block while the maps are filled, so that a
million entries need a few MB for the moment and no second copy.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from shapeagent.kernel import abi, lists
from shapeagent.kernel.lists import LISTED, LOCAL, REMOTE, ListTables, merge_host
from shapeagent.model.types import EntryKind, Match, WhitelistEntry

#: (match, kind) → packed key → number of the entry's group; the order of keys and values is one.
Columns = Mapping[tuple[Match, EntryKind], Mapping[bytes, int]]
#: Group number → class number, expiry in jiffies (0 = never).
Words = Mapping[int, tuple[int, int]]

_BLOCK = 32_768  # entries; about 1 MB of keys and values
_ROLES: Mapping[Match, tuple[int, ...]] = {
    Match.EITHER: (LOCAL, REMOTE),
    Match.SOURCE: (LOCAL,),
    Match.DESTINATION: (REMOTE,),
}
# An entry for one end is more exact than one for either: it is written last.
_SINGLE_ENDED = (Match.EITHER, Match.SOURCE, Match.DESTINATION)
_FAMILIES: Mapping[str, tuple[EntryKind, EntryKind, EntryKind]] = {
    "4": (EntryKind.HOSTS4, EntryKind.PREFIXES4, EntryKind.PAIRS4),
    "6": (EntryKind.HOSTS6, EntryKind.PREFIXES6, EntryKind.PAIRS6),
}

_Columns = dict[Match, Mapping[bytes, int]]


def build_lists(columns: Columns, words: Words) -> ListTables:
    """Return the tables of a whole whitelist.

    They look into the columns again while the maps are filled: leave those as they are till then.
    """
    result = ListTables()
    for family, (hosts, prefixes, pairs) in _FAMILIES.items():
        column = columns.get((Match.PAIR, pairs))
        if column:
            _put_pairs(result, f"pairs{family}", column, words)
        _put_ends(result, f"hosts{family}", _of(columns, hosts), words)
        _put_prefixes(result, family, _of(columns, prefixes), words)
    return result


def _of(columns: Columns, kind: EntryKind) -> _Columns:
    """Return the columns of one kind that hold anything, in the order of writing."""
    found = ((match, columns.get((match, kind))) for match in _SINGLE_ENDED)
    return {match: column for match, column in found if column}


def _put_pairs(result: ListTables, kind: str, column: Mapping[bytes, int], words: Words) -> None:
    values = {number: LISTED.pack(expires, one, 0) for number, (one, expires) in words.items()}
    part = result.part(kind, 0)
    part.count += len(column)
    part.blocks.append(functools.partial(_blocks, column, values))
    result.flags |= lists.FLAGS[(kind, 0)]


def _put_ends(
    result: ListTables,
    kind: str,
    columns: _Columns,
    words: Words,
    shape: Callable[[bytes], bytes] | None = None,
) -> None:
    """Add entries whose value has both ends: hosts, and prefixes in nets (`shape`: their keys)."""
    flag_kind = kind.replace("nets", "lpm")
    if not columns:
        return
    part = result.part(kind, 0)
    for match, column in columns.items():
        roles = _ROLES[match]
        values = {
            number: merge_host(None, roles, one, expires)
            for number, (one, expires) in words.items()
        }
        part.count += len(column)
        part.blocks.append(functools.partial(_blocks, column, values, shape))
        for role in roles:
            result.flags |= lists.FLAGS[(flag_kind, role)]
    shared = _shared(columns)
    for key in shared:
        value = None
        for match, column in columns.items():
            number = column.get(key)
            if number is not None:
                value = merge_host(value, _ROLES[match], *words[number])
                part.count -= 1
        assert value is not None
        part.count += 1
        part.late[key if shape is None else shape(key)] = value


def _shared(columns: _Columns) -> set[bytes]:
    """Return the keys that are in more than one column."""
    found: set[bytes] = set()
    for one, other in itertools.combinations(columns.values(), 2):
        if not one.keys().isdisjoint(other.keys()):
            found |= one.keys() & other.keys()
    return found


def _put_prefixes(result: ListTables, family: str, columns: _Columns, words: Words) -> None:
    lengths = frozenset(
        itertools.chain.from_iterable({key[0] for key in column} for column in columns.values())
    )
    count = sum(map(len, columns.values()))
    least = lists.NETS_MIN_PREFIXES_PER_LENGTH * len(lengths)
    if 0 < len(lengths) <= abi.SHP_NET_LENGTHS and count >= least:
        result.lengths[family] = lengths
        result.flags |= lists.NET_FLAGS[family]
        _put_ends(result, f"nets{family}", columns, words, _prefix_keys(family))
        return
    kind = f"lpm{family}"
    for match, column in columns.items():
        for role in _ROLES[match]:
            part = result.part(kind, role)
            part.count += len(column)
            part.blocks.append(functools.partial(_trie_blocks, column, words, lengths, family))
            result.flags |= lists.FLAGS[(kind, role)]


def _prefix_keys(family: str) -> Callable[[bytes], bytes]:
    """Return what turns joined prefixes (length, address) into joined keys of tries and nets."""
    size = lists.ADDRESS_BYTES[family]

    def shape(joined: bytes) -> bytes:
        count = len(joined) // (1 + size)
        keys = bytearray((4 + size) * count)
        keys[0 :: 4 + size] = joined[0 :: 1 + size]  # the length, as a little-endian u32
        for place in range(size):
            keys[4 + place :: 4 + size] = joined[1 + place :: 1 + size]
        return bytes(keys)

    return shape


def _blocks(
    column: Mapping[bytes, int],
    values: Mapping[int, bytes],
    shape: Callable[[bytes], bytes] | None = None,
) -> Iterator[tuple[bytes, bytes, int]]:
    keys, numbers = iter(column), iter(column.values())
    while block := tuple(itertools.islice(keys, _BLOCK)):
        joined = b"".join(block)
        found = map(values.__getitem__, itertools.islice(numbers, _BLOCK))
        yield joined if shape is None else shape(joined), b"".join(found), len(block)


def _trie_blocks(
    column: Mapping[bytes, int], words: Words, lengths: Iterable[int], family: str
) -> Iterator[tuple[bytes, bytes, int]]:
    values = {
        (number, bits): LISTED.pack(expires, one, bits)
        for number, (one, expires) in words.items()
        for bits in lengths
    }
    shape = _prefix_keys(family)
    keys, numbers = iter(column), iter(column.values())
    while block := tuple(itertools.islice(keys, _BLOCK)):
        found = zip(itertools.islice(numbers, _BLOCK), (key[0] for key in block), strict=True)
        yield shape(b"".join(block)), b"".join(map(values.__getitem__, found)), len(block)


def build_tables(
    entries: Iterable[WhitelistEntry],
    class_numbers: Mapping[str, int],
    expiry_jiffies: Callable[[float | None], int],
) -> ListTables:
    """Return the tables of entries that are objects: of few, and for tests.

    Args:
        entries: canonical, without two of the same key.
        class_numbers: class name → number.
        expiry_jiffies: Unix seconds (or None) → jiffies, 0 = never.
    """
    columns: dict[tuple[Match, EntryKind], dict[bytes, int]] = {}
    numbers: dict[tuple[int, int], int] = {}
    for entry in entries:
        expires = 0 if entry.expires_unix_s is None else expiry_jiffies(entry.expires_unix_s)
        word = (class_numbers[entry.traffic_class], expires)
        kind, key = _key_of(entry)
        column = columns.setdefault((entry.match, kind), {})
        column[key] = numbers.setdefault(word, len(numbers))
    return build_lists(columns, {number: word for word, number in numbers.items()})


def _key_of(entry: WhitelistEntry) -> tuple[EntryKind, bytes]:
    if entry.match is Match.PAIR:
        key, name = lists.pair_key(entry)
        return EntryKind(name), key
    address, bits = entry.destination or entry.source or (b"", 0)
    hosts, prefixes, _ = _FAMILIES["4" if len(address) == 4 else "6"]
    if bits == 8 * len(address):
        return hosts, address
    return prefixes, bytes((bits,)) + address
