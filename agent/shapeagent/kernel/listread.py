# SPDX-License-Identifier: Apache-2.0
"""Whitelists as entries again, read from the inner maps that the kernel holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from shapeagent.kernel import bpf
from shapeagent.kernel.lists import HOST, LISTED, NO_CLASS, filled_slots, inner_fd
from shapeagent.kernel.maps import LIST_KINDS
from shapeagent.model.types import Match


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry as the kernel holds it; addresses as in `WhitelistEntry`."""

    match: Match
    source: tuple[bytes, int] | None
    destination: tuple[bytes, int] | None
    class_number: int
    expires_jiffies: int


def read_lists(maps: Mapping[str, int], active: int) -> list[Listed]:
    """Return every entry of the half `active`: what `build_tables` was given, in another order.

    An entry for either end is one where both ends have the same class and expiry; a host
    that was listed once for each end looks the same.
    """
    ends: dict[tuple[bytes, int], list[tuple[int, int] | None]] = {}
    found = []
    for kind, half in filled_slots(maps, active):
        for key, value in _read_inner(maps, kind, 2 * half + active):
            if kind.startswith("pairs"):
                middle = len(key) // 2
                bits = 8 * middle
                expires, number, _ = LISTED.unpack(value)
                near, far = (key[:middle], bits), (key[middle:], bits)
                found.append(Listed(Match.PAIR, near, far, number, expires))
            elif kind.startswith("lpm"):
                expires, number, bits = LISTED.unpack(value)
                ends.setdefault((key[4:], bits), [None, None])[half] = (number, expires)
            else:
                place = (key, 8 * len(key))
                if kind.startswith("nets"):
                    place = (key[4:], int.from_bytes(key[:4], "little"))
                local, remote, _, _, *expiries = HOST.unpack(value)
                ends[place] = [
                    None if number == NO_CLASS else (number, expires)
                    for number, expires in zip((local, remote), expiries, strict=True)
                ]
    for place, (local_end, remote_end) in ends.items():
        if local_end is not None and local_end == remote_end:
            found.append(Listed(Match.EITHER, None, place, *local_end))
            continue
        if local_end is not None:
            found.append(Listed(Match.SOURCE, place, None, *local_end))
        if remote_end is not None:
            found.append(Listed(Match.DESTINATION, None, place, *remote_end))
    return found


def _read_inner(maps: Mapping[str, int], kind: str, slot: int) -> list[tuple[bytes, bytes]]:
    fd = inner_fd(maps, kind, slot)
    if fd is None:
        return []
    try:
        shape = LIST_KINDS[kind]
        return list(bpf.iterate(fd, shape.key_bytes, shape.value_bytes))
    finally:
        os.close(fd)
