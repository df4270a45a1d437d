# SPDX-License-Identifier: Apache-2.0
"""Whitelist changes of one attachment: what is remembered and what the kernel holds.

Owners, reasons and expiries are kept as text beside the state; the kernel
holds class and expiry and checks the expiry itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shapeagent.kernel.lists import build_tables
from shapeagent.model.errors import ConflictError, FailedError, InputError
from shapeagent.model.reports import WhitelistChange, WhitelistRow
from shapeagent.model.types import Match, WhitelistEntry
from shapeagent.policy.whitelist import (
    LineDefaults,
    export_list,
    format_prefix,
    is_everything,
    parse_list,
)
from shapeagent.service.state import StateDir

if TYPE_CHECKING:
    from shapeagent.service.engine import Attached

_Key = tuple[Match, tuple[bytes, int] | None, tuple[bytes, int] | None]


def key_of(entry: WhitelistEntry) -> _Key:
    """Return what makes two entries the same: match and addresses."""
    return (entry.match, entry.source, entry.destination)


def read_entries(store: StateDir) -> dict[_Key, WhitelistEntry]:
    """Return the remembered entries that have not expired."""
    text = store.read_whitelist()
    if not text.strip():
        return {}
    now_unix_s = time.time()
    # without a time, since a list of which all has expired is no error here
    return {
        key_of(entry): entry
        for entry in parse_list(text, LineDefaults()).entries
        if entry.expires_unix_s is None or entry.expires_unix_s > now_unix_s
    }


def rows(store: StateDir) -> tuple[WhitelistRow, ...]:
    """Return the remembered entries as the command line prints them."""
    return tuple(
        WhitelistRow(
            match=entry.match.value,
            source=format_prefix(entry.source) if entry.source else None,
            destination=format_prefix(entry.destination) if entry.destination else None,
            traffic_class=entry.traffic_class,
            owner=entry.owner,
            reason=entry.reason,
            expires_unix_s=entry.expires_unix_s,
        )
        for entry in read_entries(store).values()
    )


def add(
    attached: Attached, entries: Sequence[WhitelistEntry], *, yes_everything: bool
) -> WhitelistChange:
    """Add or change entries: a single one in place, several as one swap."""
    _check(attached, entries, yes_everything)
    known = read_entries(attached.store)
    wanted = dict(known)
    for entry in entries:
        wanted[key_of(entry)] = entry
    changed = [entry for key, entry in wanted.items() if known.get(key) != entry]
    fresh = sum(1 for entry in changed if key_of(entry) not in known)
    if changed:
        with _remembering(attached, wanted):
            if len(changed) != 1 or not _add_one(attached, changed[0], known):
                put_in_force(attached, wanted.values())
    return _result(
        attached, added=fresh, removed=0, unchanged=len(entries) - len(changed), total=len(wanted)
    )


def remove(attached: Attached, entries: Sequence[WhitelistEntry]) -> WhitelistChange:
    """Remove entries: a single one in place, several as one swap."""
    known = read_entries(attached.store)
    keys = {key_of(entry) for entry in entries}
    gone = [known[key] for key in keys if key in known]
    left = {key: entry for key, entry in known.items() if key not in keys}
    if gone:
        with _remembering(attached, left):
            if len(gone) == 1 and not _shares_address(gone[0], left):
                attached.datapath.remove_entry(gone[0])
            else:
                put_in_force(attached, left.values())
    return _result(
        attached, added=0, removed=len(gone), unchanged=len(keys) - len(gone), total=len(left)
    )


def replace(
    attached: Attached,
    entries: Sequence[WhitelistEntry],
    *,
    yes_everything: bool,
    expected_generation: int | None,
) -> WhitelistChange:
    """Replace the whole list by one swap."""
    _check(attached, entries, yes_everything)
    found = attached.state.whitelist_generation
    if expected_generation is not None and expected_generation != found:
        raise ConflictError(
            "generation-differs",
            f"The whitelist is at generation {found}, not {expected_generation}.",
            hint="shapectl whitelist export, merge, and try again with the new generation",
        )
    known = read_entries(attached.store)
    wanted = {key_of(entry): entry for entry in entries}
    same = sum(1 for key, entry in wanted.items() if known.get(key) == entry)
    added = sum(1 for key in wanted if key not in known)
    removed = sum(1 for key in known if key not in wanted)
    if wanted != known:
        with _remembering(attached, wanted):
            put_in_force(attached, wanted.values())
    return _result(attached, added=added, removed=removed, unchanged=same, total=len(wanted))


def _check(attached: Attached, entries: Sequence[WhitelistEntry], yes_everything: bool) -> None:
    names = {one.name for one in attached.policy.classes}
    unknown = sorted({entry.traffic_class for entry in entries} - names)
    if unknown:
        raise InputError(
            "no-such-class",
            f"The policy has no class {', '.join(map(repr, unknown))}.",
            hint=f"one of {', '.join(sorted(names))}",
        )
    if not yes_everything and any(is_everything(entry) for entry in entries):
        raise InputError(
            "whitelist-everything",
            "A prefix of length 0 whitelists every address.",
            hint="add --yes-everything if that is what you want",
        )


def _same_address(entry: WhitelistEntry) -> set[tuple[bytes, int]]:
    if entry.match is Match.PAIR:
        return set()
    return {end for end in (entry.source, entry.destination) if end is not None}


def _shares_address(entry: WhitelistEntry, others: dict[_Key, WhitelistEntry]) -> bool:
    """Return whether another entry names the same address in another role."""
    wanted = _same_address(entry)
    if not wanted:
        return False
    own = key_of(entry)
    address = next(iter(wanted))
    candidates = (
        (match, address, None) if match is Match.SOURCE else (match, None, address)
        for match in (Match.SOURCE, Match.DESTINATION, Match.EITHER)
    )
    return any(key != own and key in others for key in candidates)


def _add_one(attached: Attached, entry: WhitelistEntry, known: dict[_Key, WhitelistEntry]) -> bool:
    """Add one entry in place. Returns False where the whole list must be swapped."""
    if _shares_address(entry, known):
        return False
    number = attached.policy.class_named(entry.traffic_class).number
    try:
        attached.datapath.add_entry(entry, number, expiry_jiffies(attached, entry.expires_unix_s))
    except FailedError as error:
        if error.reference != "map-full":
            raise
        return False  # the swap makes a larger map
    return True


def expiry_jiffies(attached: Attached, expires_unix_s: float | None) -> int:
    """Return an expiry as the kernel compares it; 0 = never."""
    if expires_unix_s is None:
        return 0
    left_s = max(0.0, expires_unix_s - time.time())
    return attached.clock.read() + max(1, round(left_s * 1e9 / attached.state.kernel.jiffy_ns))


def put_in_force(attached: Attached, entries: Iterable[WhitelistEntry]) -> None:
    """Put exactly these entries in force by one switch."""
    numbers = {one.name: one.number for one in attached.policy.classes}
    # an entry for one end is more exact than one for either: it is written last
    ordered = sorted(entries, key=lambda entry: entry.match is not Match.EITHER)
    attached.datapath.replace_lists(
        build_tables(ordered, numbers, lambda unix_s: expiry_jiffies(attached, unix_s))
    )


def _remembering(
    attached: Attached, entries: dict[_Key, WhitelistEntry]
) -> contextlib.AbstractContextManager[None]:
    """Change the kernel's lists in the body; the entries are remembered where that did not fail."""
    state = dataclasses.replace(
        attached.state,
        whitelist_entries=len(entries),
        whitelist_generation=attached.state.whitelist_generation + 1,
    )
    return attached.saving(state, export_list(entries.values()))


def unchanged(attached: Attached) -> WhitelistChange:
    """Return that nothing changed: what opening the attachment has put right is enough."""
    known = read_entries(attached.store)
    return _result(attached, added=0, removed=0, unchanged=len(known), total=len(known))


def _result(
    attached: Attached, *, added: int, removed: int, unchanged: int, total: int
) -> WhitelistChange:
    return WhitelistChange(
        added=added,
        removed=removed,
        unchanged=unchanged,
        total=total,
        generation=attached.state.whitelist_generation,
        notices=(),
        warnings=(),
    )
