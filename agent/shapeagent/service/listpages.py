# SPDX-License-Identifier: Apache-2.0
"""A whitelist as rows, whole or page by page."""

from __future__ import annotations

import time

from shapeagent.model.errors import InputError
from shapeagent.model.reports import WhitelistPage, WhitelistRow
from shapeagent.policy import packed
from shapeagent.policy.entrytable import PLACES, EntryTable
from shapeagent.policy.packed import Place

MOST_PAGE_ROWS = 10_000


def rows_of(table: EntryTable) -> tuple[WhitelistRow, ...]:
    """Return the entries that have not expired, in the order of a listing."""
    return tuple(map(packed.row_of, table.entries(time.time())))


def page_of(table: EntryTable, generation: int, after: str | None, limit: int) -> WhitelistPage:
    """Return a page; see `Whitelist.page`. Raises: InputError bad-page."""
    if not 1 <= limit <= MOST_PAGE_ROWS:
        raise InputError(
            "bad-page", f"A page of {limit} rows is not between 1 and {MOST_PAGE_ROWS}."
        )
    begin = None if after is None else _parse_token(after)
    entries, last = table.page(begin, limit, time.time())
    token = None
    if last is not None:
        (match, kind), key = last
        token = f"{match.value}.{kind.value}.{key.hex()}"
    return WhitelistPage(tuple(map(packed.row_of, entries)), token, len(table), generation)


def _parse_token(text: str) -> tuple[Place, bytes]:
    places = {f"{match.value}.{kind.value}": (match, kind) for match, kind in PLACES}
    name, _, digits = text.rpartition(".")
    try:
        place, key = places[name], bytes.fromhex(digits)
    except (KeyError, ValueError):
        key = b""
    if not key or len(key) != place[1].key_bytes:
        raise InputError(
            "bad-page", f"{text[:60]!r} begins no page.", hint="take it from the page before"
        )
    return place, key
