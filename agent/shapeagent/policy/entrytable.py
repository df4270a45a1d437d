# SPDX-License-Identifier: Apache-2.0
"""A whitelist as columns: a million entries in some 100 MB, changed a batch at a time.

Entries that share all but their addresses share a group; per match and kind a
dict leads from packed key to group number. A change is planned first (`plan`,
`plan_replace`, `plan_expiry`), which changes nothing, and is then applied; its
inverse takes it back.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from array import array
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from shapeagent.model.types import EntryKind, Match, PackedBatch, WhitelistEntry
from shapeagent.policy import packed
from shapeagent.policy.entrychange import EMPTY, Delta, Group, group_of, placed
from shapeagent.policy.packed import MAX_NAMED_BAD_ITEMS, Place

#: The order of a listing; an entry for either end comes first, for the others override it.
PLACES: tuple[Place, ...] = tuple(
    (match, kind)
    for match in (Match.EITHER, Match.SOURCE, Match.DESTINATION, Match.PAIR)
    for kind in EntryKind
    if kind.is_pair == (match is Match.PAIR)
)
_PLACE_NUMBERS = {place: number for number, place in enumerate(PLACES)}
_MOST_INSORTS = 64  # at once into a sorted column: beyond, it is sorted anew
_MOST_DEAD_GROUPS = 1024


class EntryTable:
    """The entries of one whitelist."""

    def __init__(self) -> None:
        self.columns: dict[Place, dict[bytes, int]] = {place: {} for place in PLACES}
        self.groups: dict[int, Group] = {}
        self._numbers: dict[Group, int] = {}
        self._counts: Counter[int] = Counter()
        self._next_number = 1
        self._due: list[tuple[float, int]] = []  # a heap of (expiry, group), with stale ones
        self._sorted: dict[Place, list[bytes]] = {}
        self._tidy_beyond = _MOST_DEAD_GROUPS

    def __len__(self) -> int:
        return sum(map(len, self.columns.values()))

    # --- groups

    def intern(self, group: Group) -> int:
        """Return the number of a group, a new one where it has none yet."""
        number = self._numbers.get(group)
        if number is None:
            number = self._next_number
            self.define(number, group)
        return number

    def define(self, number: int, group: Group) -> None:
        """Give a group the number that it had in another table."""
        self.groups[number] = group
        self._numbers[group] = number
        self._next_number = max(self._next_number, number + 1)

    def live_groups(self) -> dict[int, Group]:
        """Return the groups that have entries."""
        return {number: self.groups[number] for number, count in self._counts.items() if count}

    def has_expiring(self) -> bool:
        """Return whether any entry ends some time."""
        return self.next_due() is not None

    def next_due(self) -> float | None:
        """Return when the next entry ends, in Unix seconds; None: never."""
        while self._due:
            expires_unix_s, number = self._due[0]
            if self._counts[number]:
                return expires_unix_s
            heapq.heappop(self._due)
        return None

    def tidy(self) -> None:
        """Forget groups without entries, where they are many; no planned change may be open."""
        if len(self.groups) <= self._tidy_beyond:
            return
        live = self.live_groups()
        self.groups = live
        self._numbers = {group: number for number, group in live.items()}
        self._counts = Counter({number: self._counts[number] for number in live})
        self._tidy_beyond = 2 * len(live) + _MOST_DEAD_GROUPS

    # --- planning

    def plan(self, add: Sequence[PackedBatch] = (), remove: Sequence[PackedBatch] = ()) -> Delta:
        """Return what changes where some entries go and others come; those that come win.

        Raises: InputError whitelist-invalid, where two of them contradict each other.
        """
        delta = Delta()
        wanted = self._wanted(add, delta)
        for batch in remove:
            place = (batch.match, batch.kind)
            column = self.columns[place]
            keys = set(packed.split_keys(batch.keys, batch.kind.key_bytes))
            gone = (keys & column.keys()) - wanted.get(place, EMPTY).keys()
            gone.difference_update(delta.deletes.get(place, ()))
            delta.unchanged += len(keys) - len(gone)
            self._delete(delta, place, gone)
        for place, fresh in wanted.items():
            self._put(delta, place, fresh)
        return delta

    def plan_replace(self, batches: Sequence[PackedBatch]) -> Delta:
        """Return what changes where exactly these entries are wanted. Raises: as `plan`."""
        delta = Delta()
        wanted = self._wanted(batches, delta)
        delta.unchanged = 0  # entries that are named twice count once
        delta.columns, delta.old = {}, dict(self.columns)
        for place, column in self.columns.items():
            fresh = delta.columns[place] = wanted.get(place, {})
            before = list(map(column.get, fresh))
            added = before.count(None)
            same = sum(map(operator.eq, before, fresh.values()))
            delta.added += added
            delta.unchanged += same
            delta.changed += len(fresh) - added - same
            delta.removed += len(column) - (len(fresh) - added)
        return delta

    def plan_expiry(self, now_unix_s: float) -> Delta:
        """Return what changes where all goes whose time is over."""
        delta = Delta()
        due = self.next_due()
        if due is None or due > now_unix_s:
            return delta
        over = {
            number
            for number, group in self.live_groups().items()
            if group.expires_unix_s is not None and group.expires_unix_s <= now_unix_s
        }
        for place, column in self.columns.items():
            gone = [key for key, number in column.items() if number in over]
            self._delete(delta, place, gone)
        return delta

    def _wanted(
        self, batches: Sequence[PackedBatch], delta: Delta
    ) -> dict[Place, dict[bytes, int]]:
        """Return the batches' entries by place; of those that agree the first stays."""
        wanted: dict[Place, dict[bytes, int]] = {}
        bad: list[str] = []
        count = 0
        for number, batch in enumerate(batches, 1):
            group = self.intern(group_of(batch))
            for place, keys in placed(batch):
                fresh = dict.fromkeys(keys, group)
                delta.unchanged += len(keys) - len(fresh)
                known = wanted.setdefault(place, {})
                if not known:
                    known.update(fresh)
                    continue
                for key in fresh.keys() & known.keys():
                    delta.unchanged += 1
                    if not self._agree(known[key], group):
                        count += 1
                        if len(bad) < MAX_NAMED_BAD_ITEMS:
                            text = packed.text_of(place, key)
                            bad.append(f"batch {number} {text}: an earlier batch says otherwise")
                    del fresh[key]
                known.update(fresh)
        if count:
            raise packed.invalid(bad, count)
        return wanted

    def _agree(self, first: int, second: int) -> bool:
        """Return whether two groups differ in owner or reason alone."""
        one, other = self.groups[first], self.groups[second]
        return (one.traffic_class, one.expires_unix_s) == (
            other.traffic_class,
            other.expires_unix_s,
        )

    def _put(self, delta: Delta, place: Place, fresh: dict[bytes, int]) -> None:
        column = self.columns[place]
        if not fresh:
            return
        if not column or (len(fresh) > 1 and column.keys().isdisjoint(fresh)):
            delta.puts[place] = fresh
            delta.added += len(fresh)
            return
        before = list(map(column.get, fresh))
        same = sum(map(operator.eq, before, fresh.values()))
        if same:
            pairs = zip(fresh.items(), before, strict=True)
            fresh = {key: number for (key, number), known in pairs if known != number}
            before = list(map(column.get, fresh))
        pairs_before = zip(fresh, before, strict=True)
        old = {key: known for key, known in pairs_before if known is not None}
        delta.unchanged += same
        delta.changed += len(old)
        delta.added += len(fresh) - len(old)
        if old:
            delta.old.setdefault(place, {}).update(old)
        if fresh:
            delta.puts[place] = fresh

    def _delete(self, delta: Delta, place: Place, keys: Collection[bytes]) -> None:
        if not keys:
            return
        column = self.columns[place]
        known = delta.deletes.get(place)
        delta.deletes[place] = [*known, *keys] if known else keys
        delta.old.setdefault(place, {}).update((key, column[key]) for key in keys)
        delta.removed += len(keys)

    # --- changing

    def apply(self, delta: Delta) -> None:
        """Make a planned change, once: its dicts may become the table's own."""
        if delta.columns is not None:
            self.columns = dict(delta.columns)
            self._sorted.clear()
            self._counts = Counter()
            for column in self.columns.values():
                self._count(column)
            return
        for place, gone in delta.deletes.items():
            column = self.columns[place]
            self._note(place, gone, is_gone=True)
            if len(gone) == len(column):
                self.columns[place] = {}  # a large dict that is emptied keeps its memory
            else:
                for key in gone:
                    del column[key]
        for old in delta.old.values():
            self._counts.subtract(Counter(old.values()))
        for place, fresh in delta.puts.items():
            if place in self._sorted:
                new = fresh.keys() - delta.old.get(place, EMPTY).keys()
                self._note(place, new, is_gone=False)
            column = self.columns[place]
            if column:
                column.update(fresh)
            else:
                self.columns[place] = fresh
            self._count(fresh)

    def _count(self, fresh: Mapping[bytes, int]) -> None:
        counts = self._counts
        for number, count in Counter(fresh.values()).items():
            expires = self.groups[number].expires_unix_s
            if expires is not None and not counts[number]:
                heapq.heappush(self._due, (expires, number))
            counts[number] += count

    def _note(self, place: Place, keys: Collection[bytes], *, is_gone: bool) -> None:
        """Keep a sorted column right where that is little work, else forget it."""
        known = self._sorted.get(place)
        if known is None:
            return
        if len(keys) > _MOST_INSORTS:
            del self._sorted[place]
            return
        for key in keys:
            if is_gone:
                del known[bisect_right(known, key) - 1]
            else:
                insort(known, key)

    def load(self, place: Place, keys: Sequence[bytes], numbers: Iterable[int]) -> None:
        """Write entries whose groups are defined, without asking what stands there."""
        self.apply(_loading(self.columns[place], place, dict(zip(keys, numbers, strict=False))))

    def unload(self, place: Place, keys: Iterable[bytes]) -> None:
        """Delete entries; those that are not there do not matter."""
        column = self.columns[place]
        delta = Delta()
        self._delete(delta, place, {key for key in keys if key in column})
        self.apply(delta)

    # --- reading

    def get(self, place: Place, key: bytes) -> Group | None:
        """Return the group of an entry, None where it is not listed."""
        number = self.columns[place].get(key)
        return None if number is None else self.groups[number]

    def entry(self, place: Place, key: bytes) -> WhitelistEntry:
        """Return an entry of the table as an object."""
        group = self.groups[self.columns[place][key]]
        return _entry(place, key, group)

    def keys(self, place: Place) -> list[bytes]:
        """Return the keys of a place in the order of a listing; they are the table's own."""
        found = self._sorted.get(place)
        if found is None:
            found = self._sorted[place] = sorted(self.columns[place])
        return found

    def forget_order(self) -> None:
        """Give back the memory of the order, until somebody lists again."""
        self._sorted.clear()

    def items(self, after: tuple[Place, bytes] | None = None) -> Iterator[tuple[Place, bytes]]:
        """Yield every entry in the order of a listing, or all behind one, listed still or not."""
        first = 0 if after is None else _PLACE_NUMBERS[after[0]]
        for place in PLACES[first:]:
            if not self.columns[place]:
                continue
            keys = self.keys(place)
            begin = 0 if after is None or after[0] != place else bisect_right(keys, after[1])
            for key in itertools.islice(keys, begin, None):
                yield place, key

    def entries(self, now_unix_s: float | None = None) -> Iterator[WhitelistEntry]:
        """Yield every entry in the order of a listing, without what is over by then."""
        for place, key in self.items():
            group = self.groups[self.columns[place][key]]
            if not _is_over(group, now_unix_s):
                yield _entry(place, key, group)

    def page(
        self, after: tuple[Place, bytes] | None, limit: int, now_unix_s: float
    ) -> tuple[list[WhitelistEntry], tuple[Place, bytes] | None]:
        """Return up to `limit` entries behind one, and behind which the next page begins.

        Whoever goes on from page to page sees each entry that is there all the time, once.
        """
        found: list[WhitelistEntry] = []
        last: tuple[Place, bytes] | None = None
        for place, key in self.items(after):
            group = self.groups[self.columns[place][key]]
            if _is_over(group, now_unix_s):
                continue
            if len(found) == limit:
                return found, last
            last = (place, key)
            found.append(_entry(place, key, group))
        return found, None

    def numbers(self, place: Place) -> array[int]:
        """Return the group numbers of a column, in the order of its keys."""
        return array("I", self.columns[place].values())


def _entry(place: Place, key: bytes, group: Group) -> WhitelistEntry:
    source, destination = packed.ends_of(place, key)
    name, owner, reason, expires = group
    return WhitelistEntry(place[0], name, source, destination, owner, reason, expires)


def _is_over(group: Group, now_unix_s: float | None) -> bool:
    expires = group.expires_unix_s
    return now_unix_s is not None and expires is not None and expires <= now_unix_s


def _loading(column: Mapping[bytes, int], place: Place, fresh: dict[bytes, int]) -> Delta:
    delta = Delta(puts={place: fresh})
    if column:
        old = {key: column[key] for key in fresh.keys() & column.keys()}
        delta.old[place] = old
    return delta
