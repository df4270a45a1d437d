# SPDX-License-Identifier: Apache-2.0
"""How the API asks the engine for whitelists: one change, one page.

An engine without `whitelist_apply` and `whitelist_page` is asked by its older
methods; that half goes with them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from shapeagent.model.errors import ConflictError, InputError
from shapeagent.model.reports import WhitelistChange, WhitelistPage, WhitelistRow
from shapeagent.model.types import Match, PackedBatch, WhitelistEntry
from shapeagent.policy.packed import check_batches, entry_of, key_of, split_keys
from shapeagent.policy.whitelist import canonical_prefix
from shapeagent.service.engine import Engine


def apply(
    engine: Engine,
    device: str,
    add: Sequence[PackedBatch],
    remove: Sequence[PackedBatch],
    *,
    replace: bool,
    expected_generation: int | None,
    yes_everything: bool,
) -> WhitelistChange:
    """Return what one change came to. Raises: as Engine.whitelist_apply."""
    packed: Any = getattr(engine, "whitelist_apply", None)
    if packed is not None:
        found: WhitelistChange = packed(
            device,
            add,
            remove,
            replace=replace,
            expected_generation=expected_generation,
            yes_everything=yes_everything,
        )
        return found
    check_batches(remove, float("-inf"))
    check_batches(add, time.time())
    added, removed = _entries(add), _entries(remove)
    if replace:
        return engine.whitelist_replace(
            device,
            added,
            yes_everything=yes_everything,
            expected_generation=expected_generation,
        )
    if expected_generation is not None:
        generation = engine.status(device)[0].whitelist_generation
        if generation != expected_generation:
            raise ConflictError(
                "generation-differs",
                f"The whitelist is at generation {generation}, not {expected_generation}.",
                hint="list it, and try again with the new generation",
            )
    if not removed:
        return engine.whitelist_add(device, added, yes_everything=yes_everything)
    if not added:
        return engine.whitelist_remove(device, removed)
    wanted = {key_of(one): one for one in map(_entry_of_row, engine.whitelist_list(device))}
    for one in removed:
        wanted.pop(key_of(one), None)
    wanted.update((key_of(one), one) for one in added)
    return engine.whitelist_replace(device, list(wanted.values()), yes_everything=yes_everything)


def page(engine: Engine, device: str, after: str | None, limit: int) -> WhitelistPage:
    """Return some entries. Raises: as Engine.whitelist_page."""
    paged: Any = getattr(engine, "whitelist_page", None)
    if paged is not None:
        found: WhitelistPage = paged(device, after, limit)
        return found
    if after is not None and not (after.isascii() and after.isdigit() and len(after) < 10):
        raise InputError("bad-page", f"{after[:60]!r} begins no page.")
    start = int(after or 0)
    generation = engine.status(device)[0].whitelist_generation
    rows = engine.whitelist_list(device)
    end = start + limit
    return WhitelistPage(
        rows[start:end], str(end) if end < len(rows) else None, len(rows), generation
    )


def _entries(batches: Sequence[PackedBatch]) -> list[WhitelistEntry]:
    return [
        entry_of((batch.match, batch.kind), key, batch)
        for batch in batches
        for key in split_keys(batch.keys, batch.kind.key_bytes)
    ]


def _entry_of_row(row: WhitelistRow) -> WhitelistEntry:
    return WhitelistEntry(
        Match(row.match),
        row.traffic_class,
        canonical_prefix(row.source)[0] if row.source else None,
        canonical_prefix(row.destination)[0] if row.destination else None,
        row.owner,
        row.reason,
        row.expires_unix_s,
    )
