# SPDX-License-Identifier: Apache-2.0
"""What Engine and Session offer for whitelists. Light: the work is loaded when it is asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from shapeagent.model.errors import FailedError
from shapeagent.model.reports import (
    WhitelistChange,
    WhitelistExpiry,
    WhitelistPage,
    WhitelistRow,
)
from shapeagent.model.types import PackedBatch, WhitelistEntry

if TYPE_CHECKING:
    from shapeagent.policy.entrytable import EntryTable
    from shapeagent.service.engine import Attached
    from shapeagent.service.state import StateDir


class WhitelistSession:
    """Changes of one attachment's whitelist while the lock is held; it stays in memory."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached

    def whitelist_add(
        self, entries: Sequence[WhitelistEntry], *, yes_everything: bool = False
    ) -> WhitelistChange:
        """Add entries; see Engine.whitelist_add."""
        batches, notices = _packed(entries)
        done = self.whitelist_apply(batches, yes_everything=yes_everything)
        return dataclasses.replace(done, notices=(*done.notices, *notices))

    def whitelist_import(
        self, entries: Sequence[WhitelistEntry], *, yes_everything: bool = False
    ) -> WhitelistChange:
        """Add many entries at once; see Engine.whitelist_import."""
        return self.whitelist_add(entries, yes_everything=yes_everything)

    def whitelist_remove(self, entries: Sequence[WhitelistEntry]) -> WhitelistChange:
        """Remove entries; see Engine.whitelist_remove."""
        from shapeagent.policy.packed import pack_entries

        return self._attached.whitelist.apply(remove=pack_entries(entries))

    def whitelist_replace(
        self,
        entries: Sequence[WhitelistEntry],
        *,
        yes_everything: bool = False,
        expected_generation: int | None = None,
    ) -> WhitelistChange:
        """Replace the whole list; see Engine.whitelist_replace."""
        batches, notices = _packed(entries)
        done = self._attached.whitelist.replace(
            batches, yes_everything=yes_everything, expected_generation=expected_generation
        )
        return dataclasses.replace(done, notices=(*done.notices, *notices))

    def whitelist_apply(
        self,
        add: Sequence[PackedBatch] = (),
        remove: Sequence[PackedBatch] = (),
        *,
        replace: bool = False,
        expected_generation: int | None = None,
        yes_everything: bool = False,
    ) -> WhitelistChange:
        """Make one change of packed batches; see Engine.whitelist_apply."""
        whitelist = self._attached.whitelist
        if replace:
            done = whitelist.replace(
                add, yes_everything=yes_everything, expected_generation=expected_generation
            )
        else:
            done = whitelist.apply(
                add,
                remove,
                yes_everything=yes_everything,
                expected_generation=expected_generation,
            )
        return dataclasses.replace(done, warnings=self._warnings(add))

    def _warnings(self, batches: Iterable[PackedBatch]) -> tuple[str, ...]:
        from shapeagent.policy.whitelist import warn_deciding_first

        found = [WhitelistEntry(batch.match, batch.traffic_class) for batch in batches]
        return warn_deciding_first(self._attached.policy, found)

    def whitelist_expire(self, now_unix_s: float | None = None) -> WhitelistExpiry:
        """Remove what is over; see Engine.whitelist_expire."""
        return self._attached.whitelist.expire(now_unix_s)

    def whitelist_list(self) -> tuple[WhitelistRow, ...]:
        """Return the entries that have not expired, in the order of a listing."""
        return self._attached.whitelist.rows()

    def whitelist_table(self) -> tuple[EntryTable, int]:
        """Return the table in memory and its generation: to look into, not to change."""
        whitelist = self._attached.whitelist
        return whitelist.table, whitelist.generation

    def whitelist_page(self, after: str | None = None, limit: int = 1000) -> WhitelistPage:
        """Return some entries; see Engine.whitelist_page."""
        return self._attached.whitelist.page(after, limit)


def _packed(entries: Sequence[WhitelistEntry]) -> tuple[list[PackedBatch], tuple[str, ...]]:
    """Return entries as batches, and a notice about those that ended since somebody read them."""
    from shapeagent.policy.packed import pack_entries

    now_unix_s = time.time()
    batches, left_out = [], 0
    for batch in pack_entries(entries):
        if batch.expires_unix_s is not None and batch.expires_unix_s <= now_unix_s:
            left_out += batch.count
        else:
            batches.append(batch)
    notices = (f"{left_out:,} of the entries have expired and were left out",) if left_out else ()
    return batches, notices


class WhitelistCalls:
    """The whitelist methods of Engine: each opens the attachment, and closes it again."""

    def whitelist_add(
        self, device: str, entries: Sequence[WhitelistEntry], *, yes_everything: bool = False
    ) -> WhitelistChange:
        """Add entries; one that is there already with another class is changed.

        Raises:
            InputError: "no-such-class", "whitelist-everything", "whitelist-invalid".
            FailedError: "map-full", "state-unwritable"; the old list stays in use.
        """
        with self._whitelisting(device) as session:
            return session.whitelist_add(entries, yes_everything=yes_everything)

    def whitelist_import(
        self, device: str, entries: Sequence[WhitelistEntry], *, yes_everything: bool = False
    ) -> WhitelistChange:
        """Add many entries at once: readers see none of them or all."""
        return self.whitelist_add(device, entries, yes_everything=yes_everything)

    def whitelist_remove(self, device: str, entries: Sequence[WhitelistEntry]) -> WhitelistChange:
        """Remove entries by address and match; class, owner and reason do not matter."""
        with self._whitelisting(device) as session:
            return session.whitelist_remove(entries)

    def whitelist_replace(
        self,
        device: str,
        entries: Sequence[WhitelistEntry],
        *,
        yes_everything: bool = False,
        expected_generation: int | None = None,
    ) -> WhitelistChange:
        """Replace the whole whitelist: readers see the old one or the new.

        Raises:
            ConflictError: "generation-differs" where someone changed it meanwhile.
        """
        with self._whitelisting(device) as session:
            return session.whitelist_replace(
                entries, yes_everything=yes_everything, expected_generation=expected_generation
            )

    def whitelist_apply(
        self,
        device: str,
        add: Sequence[PackedBatch] = (),
        remove: Sequence[PackedBatch] = (),
        *,
        replace: bool = False,
        expected_generation: int | None = None,
        yes_everything: bool = False,
    ) -> WhitelistChange:
        """Make one change of packed batches: readers see the old list or the new.

        Entries that are removed and added stay, as `add` has them.

        Args:
            replace: `add` is then the whole list, and `remove` does not matter.
            expected_generation: refuse where the list has another.

        Raises:
            InputError: "whitelist-invalid", which names the first 20 bad items;
                "no-such-class", "whitelist-everything".
            ConflictError: "generation-differs".
            FailedError: "map-full", "state-unwritable"; the old list stays in use.
        """
        with self._whitelisting(device) as session:
            return session.whitelist_apply(
                add,
                remove,
                replace=replace,
                expected_generation=expected_generation,
                yes_everything=yes_everything,
            )

    def whitelist_expire(self, device: str, now_unix_s: float | None = None) -> WhitelistExpiry:
        """Remove what is over. The kernel has not used it since; the generation stays."""
        with self._whitelisting(device) as session:
            return session.whitelist_expire(now_unix_s)

    def whitelist_list(self, device: str) -> tuple[WhitelistRow, ...]:
        """Return the entries that have not expired."""
        from shapeagent.service.listpages import rows_of

        return rows_of(self._whitelist_table(device)[0])

    def whitelist_page(
        self, device: str, after: str | None = None, limit: int = 1000
    ) -> WhitelistPage:
        """Return up to `limit` entries, sorted by match, kind and address.

        Args:
            after: what the page before gave; None: the first page.

        Raises: InputError bad-page.
        """
        from shapeagent.service.listpages import page_of

        return page_of(*self._whitelist_table(device), after, limit)

    def _whitelist_table(self, device: str) -> tuple[EntryTable, int]:
        """Return the entries without the lock; a damaged list is put right first, with it."""
        from shapeagent.service.liststore import read_table

        store = self._store_of(device)
        with contextlib.suppress(FailedError):  # it is damaged
            if not store.lacks_whitelist(store.read()):
                return read_table(store)
        with self._whitelisting(device) as session:
            return session.whitelist_table()

    # --- what the engine has

    def _whitelisting(self, device: str) -> AbstractContextManager[WhitelistSession]:
        """Hold the lock and open the attachment for one change."""
        raise NotImplementedError

    def _store_of(self, device: str) -> StateDir:
        """Return the state folder of a device's attachment. Raises: ConflictError not-attached."""
        raise NotImplementedError
