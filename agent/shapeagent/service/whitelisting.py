# SPDX-License-Identifier: Apache-2.0
"""The whitelist of one attachment: what is remembered and what the kernel holds.

A change is planned on the table, written to the log, made in the table and put
in force, in this order. A single entry changes in place; anything else is one
switch. The kernel holds class and expiry and checks the expiry itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shapeagent.model.errors import ConflictError, FailedError, InputError, ShapeError
from shapeagent.model.reports import WhitelistChange, WhitelistExpiry, WhitelistPage, WhitelistRow
from shapeagent.model.types import Match, PackedBatch, WhitelistEntry
from shapeagent.policy import packed
from shapeagent.policy.entrychange import Delta
from shapeagent.policy.entrytable import PLACES, EntryTable
from shapeagent.policy.packed import Place
from shapeagent.service import listpages, listplace, liststore
from shapeagent.service.state import AttachState
from shapeagent.service.whitelistlog import (
    Loaded,
    Marks,
    WhitelistLog,
    record_all,
    record_change,
    record_mark,
)

if TYPE_CHECKING:
    from shapeagent.service.engine import Attached

_MOST_EXPIRED_ROWS = 1_000
_MOST_IN_PLACE = 1_000  # expired entries that are removed one by one: nobody sees them any more
_CLOCK_STEP_S = 2.0  # less is drift, which the kernel's deadlines need not follow

#: Why an entry cannot be changed where it lies; nothing of it was, and the list is switched.
_NOT_IN_PLACE = ("map-full", "inner-map-closed")


class Whitelist:
    """The whitelist of an open attachment, kept in memory. Hold the lock.

    Opening one ends what a kill left half done: afterwards kernel and log agree.
    """

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._log: WhitelistLog | None = None
        self.table = EntryTable()
        self.generation = 0
        self._mark = 0
        self._clock_offset_s = 0.0
        self._load()

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()
            self._log = None

    # --- what callers ask for

    def apply(
        self,
        add: Sequence[PackedBatch] = (),
        remove: Sequence[PackedBatch] = (),
        *,
        yes_everything: bool = False,
        expected_generation: int | None = None,
    ) -> WhitelistChange:
        """Remove some entries and add others: a single one in place, several as one switch.

        An entry that is in both stays, as `add` has it.

        Raises:
            InputError: "whitelist-invalid", "no-such-class", "whitelist-everything".
            ConflictError: "generation-differs".
            FailedError: "map-full", "state-unwritable"; the old list stays in use.
        """
        self._begin(add, yes_everything, expected_generation)
        packed.check_batches(remove, float("-inf"))
        return self._change(self.table.plan(add, remove))

    def replace(
        self,
        batches: Sequence[PackedBatch],
        *,
        yes_everything: bool = False,
        expected_generation: int | None = None,
    ) -> WhitelistChange:
        """Replace the whole list by one switch. Raises: as `apply`."""
        self._begin(batches, yes_everything, expected_generation)
        return self._change(self.table.plan_replace(batches))

    def expire(self, now_unix_s: float | None = None) -> WhitelistExpiry:
        """Remove what is over; the kernel has not used it since. The generation stays.

        Where the clock was set, the kernel gets new deadlines, by the time that is right now.

        Raises: FailedError, as `apply`.
        """
        self._refresh()
        now = time.time() if now_unix_s is None else now_unix_s
        delta = self.table.plan_expiry(now)
        rows: list[WhitelistRow] = []
        for place, keys in delta.deletes.items():
            some = itertools.islice(keys, _MOST_EXPIRED_ROWS - len(rows))
            rows += [packed.row_of(self.table.entry(place, key)) for key in some]
        if not delta.is_empty:
            self._expire(delta)
        elif self.table.has_expiring() and self._clock_was_set():
            self.put_in_force()
        return WhitelistExpiry(delta.removed, tuple(rows), len(self.table), self.table.next_due())

    def page(self, after: str | None, limit: int) -> WhitelistPage:
        """Return up to `limit` entries behind `after`, which the page before gave; None: the first.

        Who goes on to the last page sees each entry that is there all the time, once.

        Raises: InputError bad-page.
        """
        self._refresh()
        return listpages.page_of(self.table, self.generation, after, limit)

    def rows(self) -> tuple[WhitelistRow, ...]:
        """Return the entries that have not expired, in the order of a listing."""
        self._refresh()
        return listpages.rows_of(self.table)

    # --- changing

    def _begin(
        self,
        batches: Sequence[PackedBatch],
        yes_everything: bool,
        expected_generation: int | None,
    ) -> None:
        """Check what was asked for; the table is then what the kernel uses now."""
        self._refresh()
        self._check(batches, yes_everything)
        if expected_generation is not None and expected_generation != self.generation:
            raise ConflictError(
                "generation-differs",
                f"The whitelist is at generation {self.generation}, not {expected_generation}.",
                hint="shapectl whitelist export, merge, and try again with the new generation",
            )
        now = time.time()
        due = self.table.next_due()
        if due is not None and due <= now:
            self.expire(now)

    def _check(self, batches: Sequence[PackedBatch], yes_everything: bool) -> None:
        names = {one.name for one in self._attached.policy.classes}
        unknown = sorted({batch.traffic_class for batch in batches} - names)
        if unknown:
            raise InputError(
                "no-such-class",
                f"The policy has no class {', '.join(map(repr, unknown))}.",
                hint=f"one of {', '.join(sorted(names))}",
            )
        packed.check_batches(batches, time.time())
        if not yes_everything and any(map(packed.is_everything, batches)):
            raise InputError(
                "whitelist-everything",
                "A prefix of length 0 whitelists every address.",
                hint="add --yes-everything if that is what you want",
            )

    def _change(self, delta: Delta) -> WhitelistChange:
        if not delta.is_empty:
            self._commit(delta, self.generation + 1)
        return self._result(delta)

    def _result(self, delta: Delta) -> WhitelistChange:
        return WhitelistChange(
            added=delta.added,
            removed=delta.removed,
            unchanged=delta.unchanged,
            total=len(self.table),
            generation=self.generation,
            notices=(),
            warnings=(),
            changed=delta.changed,
        )

    def _commit(self, delta: Delta, generation: int) -> None:
        is_new = self._log is None
        log = self._open_log()
        single = self._in_place(delta)
        if single is None or not self._commit_in_place(log, delta, generation, single, is_new):
            self._commit_switching(log, delta, generation)
        self._tidy(log)

    def _expire(self, delta: Delta) -> None:
        log = self._open_log()
        gone = [(place, key) for place, keys in delta.deletes.items() for key in keys]
        few = len(gone) <= _MOST_IN_PLACE
        if (
            not few
            or any(self._shares_address(place, key) for place, key in gone)
            or not self._expire_in_place(log, delta, gone)
        ):
            self._commit_switching(log, delta, self.generation)
        self._tidy(log)

    def _expire_in_place(
        self, log: WhitelistLog, delta: Delta, gone: Sequence[tuple[Place, bytes]]
    ) -> bool:
        entries = [self.table.entry(place, key) for place, key in gone]
        is_prefix = any(kind.is_prefix for _, kind in delta.deletes)
        try:
            with self._changing(log, delta, self.generation, is_prefix=is_prefix):
                self._attached.datapath.remove_entries(entries)
        except FailedError as error:
            if error.reference not in _NOT_IN_PLACE:
                raise
            return False
        return True

    def _in_place(self, delta: Delta) -> tuple[Place, bytes, int | None] | None:
        """Return the one entry that a change is about, where it can be made in place."""
        found = delta.single()
        return None if found is None or self._shares_address(*found[:2]) else found

    def _shares_address(self, place: Place, key: bytes) -> bool:
        """Return whether another entry names the same address in another role."""
        match, kind = place
        return match is not Match.PAIR and any(
            key in self.table.columns[one]
            for one in PLACES
            if one[1] is kind and one[0] is not match
        )

    def _commit_in_place(
        self,
        log: WhitelistLog,
        delta: Delta,
        generation: int,
        single: tuple[Place, bytes, int | None],
        is_new: bool,
    ) -> bool:
        """Change one entry. Returns False where the whole list must be switched: it has no room."""
        place, key, number = single
        datapath, table = self._attached.datapath, self.table
        if number is None:
            gone = table.entry(place, key)
            try:
                with self._changing(log, delta, generation, is_prefix=place[1].is_prefix):
                    datapath.remove_entry(gone)
            except FailedError as error:
                if error.reference not in _NOT_IN_PLACE:
                    raise
                return False
            return True
        group = table.groups[number]
        source, destination = packed.ends_of(place, key)
        entry = WhitelistEntry(place[0], group.traffic_class, source, destination)
        if group.expires_unix_s is not None and not table.has_expiring():
            self._clock_offset_s = self._read_clock_offset()
        class_number, expires = liststore.words(self._attached, {number: group})[number]
        state = self._state(len(table) + delta.added, generation)
        try:
            # the first change makes the log, and the state says from then on that there is one
            with (
                self._attached.saving(state) if is_new else contextlib.nullcontext(),
                self._changing(log, delta, generation, is_prefix=place[1].is_prefix),
            ):
                datapath.add_entry(entry, class_number, expires)
        except FailedError as error:
            if error.reference not in _NOT_IN_PLACE:
                raise
            return False
        return True

    @contextlib.contextmanager
    def _changing(
        self, log: WhitelistLog, delta: Delta, generation: int, *, is_prefix: bool
    ) -> Iterator[None]:
        """Change the kernel's lists in place in the body; log and table have it before."""
        control = self._attached.datapath.read_control()
        after = control.after_changing(is_prefix=is_prefix).lists_mark
        marks = Marks(control.lists_mark, after, self._clock_offset_s)
        total = len(self.table) + delta.added - delta.removed
        log.append(record_change(delta, self.table.groups, total, generation, marks))
        self.table.apply(delta)
        try:
            yield
        except BaseException as error:
            clean = isinstance(error, FailedError) and error.reference in _NOT_IN_PLACE
            self._take_back(log, delta, generation, marks, is_clean=clean)
            raise
        self._settle(generation, marks)

    def _commit_switching(self, log: WhitelistLog, delta: Delta, generation: int) -> None:
        """Make a change and put the whole list in force by one switch."""
        marks = self._switching_marks()
        total = len(self.table) + delta.added - delta.removed
        groups = self.table.groups
        if delta.columns is not None:
            record = record_all(delta.columns, groups, generation, marks)
        else:
            record = record_change(delta, groups, total, generation, marks)
        with self._attached.saving(self._state(total, generation)):
            log.append(record)
            self.table.apply(delta)
            try:
                self._attached.datapath.replace_lists(
                    liststore.list_tables(self._attached, self.table)
                )
            except BaseException:
                self._take_back(log, delta, generation, marks, is_clean=True)
                raise
            self._settle(generation, marks)
        if delta.columns is not None:
            log.note_whole(record)

    def _take_back(
        self, log: WhitelistLog, delta: Delta, generation: int, marks: Marks, *, is_clean: bool
    ) -> None:
        """Undo a change that failed; where it is in force all the same, let it stand.

        Args:
            is_clean: the kernel's lists are surely as they were.
        """
        if self._read_mark() == marks.after:
            self._settle(generation, marks)
            return
        self.table.apply(delta.inverse())
        with contextlib.suppress(ShapeError):
            log.undo()
            if not is_clean:
                self.put_in_force()

    def _settle(self, generation: int, marks: Marks) -> None:
        self.generation = generation
        self._mark = marks.after
        self._clock_offset_s = marks.clock_offset_s
        # not written: the log has it, and the state follows at the next switch
        self._attached.state = self._state(len(self.table), generation)

    def _state(self, entries: int, generation: int) -> AttachState:
        return dataclasses.replace(
            self._attached.state, whitelist_entries=entries, whitelist_generation=generation
        )

    def _tidy(self, log: WhitelistLog) -> None:
        self.table.tidy()
        if log.is_overgrown:
            marks = Marks(self._mark, self._mark, self._clock_offset_s)
            # a full disk stops the next append, and this change is safe as it is
            with contextlib.suppress(FailedError):
                log.rewrite(self._record_all(marks))
                self._attached.save(self._attached.state)

    # --- the kernel

    def put_in_force(self) -> None:
        """Put the table in force as it is, by one switch, with deadlines by the present time."""
        log = self._open_log()
        marks = self._switching_marks()
        log.append(record_mark(len(self.table), self.generation, marks))
        self._attached.datapath.replace_lists(liststore.list_tables(self._attached, self.table))
        self._settle(self.generation, marks)

    def _switching_marks(self) -> Marks:
        control = self._attached.datapath.read_control()
        after = control.after_replacing(control.list_flags).lists_mark
        return Marks(control.lists_mark, after, self._read_clock_offset())

    def _read_mark(self) -> int:
        return self._attached.datapath.read_control().lists_mark

    def _read_clock_offset(self) -> float:
        """Return by how much Unix time is ahead of the kernel's jiffies."""
        jiffy_s = self._attached.state.kernel.jiffy_ns / 1e9
        return time.time() - self._attached.clock.read() * jiffy_s

    def _clock_was_set(self) -> bool:
        return abs(self._read_clock_offset() - self._clock_offset_s) > _CLOCK_STEP_S

    # --- the log

    def _open_log(self) -> WhitelistLog:
        if self._log is None:
            marks = Marks(self._mark, self._mark, self._clock_offset_s)
            path = self._attached.store.whitelist_path
            self._log = WhitelistLog.create(path, self._record_all(marks))
        return self._log

    def _record_all(self, marks: Marks) -> bytes:
        return record_all(self.table.columns, self.table.groups, self.generation, marks)

    def _refresh(self) -> None:
        """Read all again where somebody else has changed something since."""
        is_current = self._log.is_current() if self._log is not None else not self._has_file()
        if not is_current or self._read_mark() != self._mark:
            self._load()

    def _has_file(self) -> bool:
        store = self._attached.store
        return store.whitelist_path.exists() or store.old_whitelist_path.exists()

    def _load(self) -> None:
        self.close()
        attached = self._attached
        store = attached.store
        control = attached.datapath.read_control()
        mark = control.lists_mark
        listplace.place(attached, control)
        loaded = liststore.load_or_none(store)
        if store.old_whitelist_path.exists() and not (loaded and loaded.agrees_with(mark)):
            loaded = liststore.take_over_text(attached, mark)
        if loaded is None:
            if attached.state.whitelist_generation or control.list_flags:
                loaded = liststore.rebuild(attached, "it is missing", Loaded(), mark)
            else:
                self.table, self._mark = EntryTable(), mark
                self.generation = attached.state.whitelist_generation
                return
        elif loaded.why and not (loaded.is_torn and mark == loaded.marks.after):
            loaded = liststore.rebuild(attached, loaded.why, loaded, mark)
        elif not loaded.agrees_with(mark):
            why = "the kernel has changes that it lacks"
            loaded = liststore.rebuild(attached, why, loaded, mark)
        self._take(loaded)
        if mark != loaded.marks.after:
            self.put_in_force()  # killed between log and kernel, or kept over a reboot
            attached.save(attached.state)
        store.old_whitelist_path.unlink(missing_ok=True)

    def _take(self, loaded: Loaded) -> None:
        path = self._attached.store.whitelist_path
        self.table, self.generation = loaded.table, loaded.generation
        self._log = WhitelistLog(path, loaded.end, loaded.live_bytes)
        self._mark = loaded.marks.after
        self._clock_offset_s = loaded.marks.clock_offset_s
        self._attached.state = self._state(len(self.table), self.generation)
