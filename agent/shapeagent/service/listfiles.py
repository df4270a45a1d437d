# SPDX-License-Identifier: Apache-2.0
"""Whitelists as files: reads and writes them. `policy/whitelist.py` decides what a line means."""

from __future__ import annotations

from collections.abc import Iterable

from shapeagent.model.errors import InputError
from shapeagent.model.reports import WhitelistRow
from shapeagent.model.types import Match, WhitelistEntry
from shapeagent.policy.whitelist import (
    LineDefaults,
    canonical_prefix,
    export_list,
    parse_entry,
    parse_list,
)
from shapeagent.service.documents import read_document_bytes

__all__ = ["LineDefaults", "export_whitelist", "parse_whitelist_entry", "parse_whitelist_file"]


def parse_whitelist_entry(
    text: str, defaults: LineDefaults
) -> tuple[WhitelistEntry, tuple[str, ...]]:
    """Return the entry that `text` names, and notices about how it is stored.

    Raises: as `whitelist.parse_entry`.
    """
    return parse_entry(text, defaults)


def parse_whitelist_file(
    path: str, defaults: LineDefaults, *, lenient: bool = False
) -> tuple[tuple[WhitelistEntry, ...], tuple[str, ...]]:
    """Return the entries of the list at `path` (`-` for stdin), and notices about them.

    Args:
        lenient: leave bad lines out, with a notice that counts them.
    Raises: as `read_document_bytes`; InputError whitelist-invalid, which names each bad line.
    """
    data = read_document_bytes(path)
    name = "stdin" if path == "-" else path
    try:
        found = parse_list(data, defaults, lenient=lenient)
    except InputError as error:
        raise InputError(
            error.reference, f"{name}: {error.message}", hint=error.hint, details=error.details
        ) from error
    notices = list(found.notices)
    for count, what in (
        (found.bad_lines, "cannot be used and was left out"),
        (found.duplicates, "repeats an entry and counts once"),
        (found.expired, "has expired and was left out"),
    ):
        if count:
            notices.append(f"{name}: {_counted(count, what)}")
    return found.entries, tuple(notices)


def _counted(count: int, what: str) -> str:
    if count == 1:
        return f"1 line {what}"
    plural = what.replace("was ", "were ").replace("repeats", "repeat").replace("has ", "have ")
    return f"{count:,} lines {plural.replace('counts', 'count')}"


def export_whitelist(rows: Iterable[WhitelistRow]) -> str:
    """Return a list file that `parse_whitelist_file` reads back as the same entries."""
    return export_list(_entry_of(row) for row in rows)


def _entry_of(row: WhitelistRow) -> WhitelistEntry:
    source = canonical_prefix(row.source)[0] if row.source else None
    destination = canonical_prefix(row.destination)[0] if row.destination else None
    return WhitelistEntry(
        match=Match(row.match),
        traffic_class=row.traffic_class,
        source=source,
        destination=destination,
        owner=row.owner,
        reason=row.reason,
        expires_unix_s=row.expires_unix_s,
    )
