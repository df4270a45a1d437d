# SPDX-License-Identifier: Apache-2.0
"""Refusals that repeat, folded into a count.

Whoever may be refused may be refused a million times, and a log that is rotated
by size forgets what stood in it before. So of one caller, method and reason only
some lines are written in a while; the others are counted, and the count is
written.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from shapeagent.service.identity.auditline import AuditEntry

LINES_PER_WINDOW = 20
WINDOW_S = 60.0
_MOST_KINDS = 1024

_Kind = tuple[str, str, str]


@dataclass(slots=True)
class _Window:
    began_s: float
    last: AuditEntry
    written: int = 0
    folded: int = 0


class Folding:
    """Decides which refusals are written; not for several threads at once.

    Times are of a clock that never goes back.
    """

    def __init__(self) -> None:
        self._windows: OrderedDict[_Kind, _Window] = OrderedDict()

    def admit(self, entry: AuditEntry, now_s: float) -> bool:
        """Return True where the entry's own line is to be written, False where it was counted."""
        kind = (entry.who, entry.method, entry.result)
        window = self._windows.get(kind)
        if window is None:
            window = self._windows[kind] = _Window(now_s, entry)
        window.last = entry
        if window.written < LINES_PER_WINDOW:
            window.written += 1
            return True
        window.folded += 1
        return False

    def take_due(self, now_s: float, *, everything: bool = False) -> list[tuple[AuditEntry, int]]:
        """Return the counts whose time has come: the last entry of each, and how many.

        Callers' names are theirs to choose within the trust domain: what has more kinds than
        are kept at once is closed early, the oldest first.
        """
        due = []
        while self._windows:
            kind, window = next(iter(self._windows.items()))
            over = len(self._windows) > _MOST_KINDS
            if not (everything or over or now_s - window.began_s >= WINDOW_S):
                break
            del self._windows[kind]
            if window.folded:
                due.append((window.last, window.folded))
        return due
