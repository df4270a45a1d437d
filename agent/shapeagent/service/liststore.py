# SPDX-License-Identifier: Apache-2.0
"""Where a whitelist's table comes from: its log, an older version's text, or the kernel's lists.

And how it goes into the kernel's maps. `whitelisting` decides which.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shapeagent.kernel.datapath import Datapath
from shapeagent.kernel.listbuild import build_lists
from shapeagent.kernel.listread import read_lists
from shapeagent.kernel.lists import ListTables
from shapeagent.kernel.maps import PinnedMaps
from shapeagent.model.errors import FailedError, InputError, ShapeError
from shapeagent.model.types import WhitelistEntry
from shapeagent.policy import packed
from shapeagent.policy.entrychange import Group
from shapeagent.policy.entrytable import EntryTable
from shapeagent.policy.whitelist import LineDefaults, parse_list
from shapeagent.service import whitelistlog
from shapeagent.service.listfacts import LAYOUT
from shapeagent.service.state import StateDir, put_aside
from shapeagent.service.whitelistlog import Loaded, Marks, WhitelistLog, record_all, record_mark

if TYPE_CHECKING:
    from shapeagent.service.engine import Attached

UNKNOWN_MARK = (1 << 64) - 1  # that no lists have: the table is put in force at once
_MOST_NOTES = 8
# More changes than fit into a log before it is written anew, and the state with it: a generation
# that somebody has seen never comes again for another list.
_UNSEEN_GENERATIONS = 1 << 20
_TRIES = 3
_TRY_AGAIN_S = 0.01


# --- reading


def load_or_none(store: StateDir) -> Loaded | None:
    """Return what the log says, None where there is none. Raises: ConflictError."""
    try:
        return whitelistlog.load(store.whitelist_path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Loaded(why=f"it cannot be read: {error.strerror}")


def read_table(store: StateDir) -> tuple[EntryTable, int]:
    """Return the entries and their generation, for who only reads: without the lock.

    Raises: FailedError state-damaged, also where the kernel has other lists in force;
        ConflictError state-other-version.
    """
    why = ""
    for number in range(_TRIES):
        if number:
            time.sleep(_TRY_AGAIN_S)  # a change may be under way
        loaded = load_or_none(store)
        if loaded is None:
            return table_of_text(store.read_old_whitelist() or ""), 0
        why = loaded.why
        mark = _mark_in_force(store)
        if not why and mark is not None and not loaded.agrees_with(mark):
            why = "the kernel has changes that it lacks"
        if not why:
            return loaded.table, loaded.generation
    raise _damaged(store, why)


def _damaged(store: StateDir, why: str) -> FailedError:
    return FailedError(
        "state-damaged",
        f"{store.whitelist_path}: {why}.",
        hint="the next change of the whitelist puts it right",
    )


def _mark_in_force(store: StateDir) -> int | None:
    """Return the mark of the lists in force, None where nothing is pinned."""
    if store.pins is None:
        return None
    maps = PinnedMaps(store.pins)
    try:
        return Datapath(maps, 0).read_control().lists_mark
    except (OSError, ShapeError):
        return None
    finally:
        maps.close()


def table_of_text(text: str, *, lenient: bool = False) -> EntryTable:
    """Return the table of a list as `parse_list` reads it. Raises: InputError."""
    table = EntryTable()
    if text.strip():
        # without a time, since a list of which all has expired is no error here
        entries = parse_list(text, LineDefaults(), lenient=lenient).entries
        table.apply(table.plan(packed.pack_entries(entries)))
    return table


# --- into the kernel


def list_tables(attached: Attached, table: EntryTable) -> ListTables:
    """Return what the inner maps will hold for a table. Raises: InputError no-such-class."""
    return build_lists(table.columns, words(attached, table.live_groups()))


def words(attached: Attached, groups: Mapping[int, Group]) -> dict[int, tuple[int, int]]:
    """Return group number → class number and expiry in jiffies, 0 = never."""
    numbers = {one.name: one.number for one in attached.policy.classes}
    gone = sorted({group.traffic_class for group in groups.values()} - numbers.keys())
    if gone:
        raise InputError(
            "no-such-class",
            f"The whitelist has entries of {', '.join(map(repr, gone))}, which the policy lacks.",
            hint="shapectl whitelist replace with classes that it has",
        )
    now_jiffies, now_unix_s = attached.clock.read(), time.time()
    jiffy_s = attached.state.kernel.jiffy_ns / 1e9

    def deadline(expires_unix_s: float | None) -> int:
        if expires_unix_s is None:
            return 0
        left_s = max(0.0, expires_unix_s - now_unix_s)
        return now_jiffies + max(1, round(left_s / jiffy_s))

    return {
        number: (numbers[group.traffic_class], deadline(group.expires_unix_s))
        for number, group in groups.items()
    }


def fill_new_maps(attached: Attached) -> None:
    """Put the remembered whitelist into maps that are not in force yet, and say so in the log.

    Whichever maps are in force in the end: the log names the marks of both.

    Raises: FailedError state-damaged, state-unwritable.
    """
    store = attached.store
    loaded = load_or_none(store)
    if loaded is None:
        table = table_of_text(store.read_old_whitelist() or "")
    elif loaded.why:  # what the old maps have in force is not asked: their layout is another's
        raise _damaged(store, loaded.why)
    else:
        table = loaded.table
    if len(table):
        attached.datapath.replace_lists(list_tables(attached, table))
    if loaded is None:
        return  # the text of an older version, which the next change takes over, or nothing
    mark = attached.datapath.read_control().lists_mark
    marks = Marks(loaded.marks.after, mark, _clock_offset(attached))
    log = WhitelistLog(store.whitelist_path, loaded.end, loaded.live_bytes)
    try:
        log.append(record_mark(len(table), loaded.generation, marks))
    finally:
        log.close()


def _clock_offset(attached: Attached) -> float:
    return time.time() - attached.clock.read() * attached.state.kernel.jiffy_ns / 1e9


# --- what is put right


def take_over_text(attached: Attached, mark: int) -> Loaded:
    """Return the table of the text that an earlier version wrote, now in a log.

    Effects: a log that says that it is not in force; the text stays until that is done.
    """
    store = attached.store
    try:
        text = store.read_old_whitelist() or ""
        table = table_of_text(text)
    except (FailedError, InputError) as error:
        lines = store.old_whitelist_path.read_bytes().replace(b"\0", b"").decode(errors="ignore")
        try:
            left = table_of_text(lines, lenient=True)
        except InputError:
            left = EntryTable()
        found = rebuild(attached, error.message, Loaded(table=left), mark)
        store.quarantine(store.old_whitelist_path.name)
        return found
    generation, marks = attached.state.whitelist_generation, Marks(mark, UNKNOWN_MARK)
    record = record_all(table.columns, table.groups, generation, marks)
    return _created(attached, record, table, generation, marks)


def rebuild(attached: Attached, why: str, left: Loaded, mark: int) -> Loaded:
    """Return a whitelist made again from the kernel's lists, which were in force all the time.

    Owners and reasons are kept where `left` still names what the kernel holds.

    Effects: the damaged log is put aside; the state notes it for `status`.
    """
    store, state = attached.store, attached.state
    known = {_role(entry): entry for entry in left.table.entries()}
    entries, lost = [], 0
    for entry in _entries_in_force(attached):
        old = known.get(_role(entry))
        if old is not None and (old.expires_unix_s is None) == (entry.expires_unix_s is None):
            entries.append(old)
            continue
        lost += 1
        entries.append(entry)
    note = f"whitelist was damaged: {len(entries)} entries read from the kernel"
    if lost:
        note += f", of {lost} owner and reason are lost"
    attached.engine.warn(f"{store.whitelist_path} ({why}): {note}")
    table = EntryTable()
    table.apply(table.plan(packed.pack_entries(entries)))
    generation = max(state.whitelist_generation, left.generation) + _UNSEEN_GENERATIONS
    marks = Marks(mark, mark, left.marks.clock_offset_s)
    record = record_all(table.columns, table.groups, generation, marks)
    state = dataclasses.replace(
        state,
        whitelist_entries=len(table),
        whitelist_generation=generation,
        recovered=(*state.recovered, note)[-_MOST_NOTES:],
    )
    with attached.saving(state):
        return _created(attached, record, table, generation, marks)


def _created(
    attached: Attached, record: bytes, table: EntryTable, generation: int, marks: Marks
) -> Loaded:
    path = attached.store.whitelist_path
    WhitelistLog.create(path, record, functools.partial(put_aside, path)).close()
    return Loaded(table, generation, marks, len(LAYOUT) + len(record), len(record))


def _role(entry: WhitelistEntry) -> tuple[object, ...]:
    return entry.match, entry.source, entry.destination, entry.traffic_class


def _entries_in_force(attached: Attached) -> list[WhitelistEntry]:
    """Return what the kernel's lists hold and has not expired, without owners and reasons."""
    names = {one.number: one.name for one in attached.policy.classes}
    now_jiffies, now_unix_s = attached.clock.read(), time.time()
    entries = []
    datapath = attached.datapath
    for found in read_lists(datapath.maps, datapath.read_control().active_lists):
        expires = None
        if found.expires_jiffies:
            if found.expires_jiffies <= now_jiffies:
                continue
            left_s = (found.expires_jiffies - now_jiffies) * attached.state.kernel.jiffy_ns / 1e9
            expires = now_unix_s + left_s
        entries.append(
            WhitelistEntry(
                match=found.match,
                traffic_class=names[found.class_number],
                source=found.source,
                destination=found.destination,
                expires_unix_s=expires,
            )
        )
    return entries
