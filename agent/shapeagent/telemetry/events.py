# SPDX-License-Identifier: Apache-2.0
"""What happened, in order: kept for a while, and told to everyone who waits."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

KEPT = 4_096


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened."""

    sequence: int  # 1, 2, … of this run of the agent
    unix_s: float
    kind: str  # kebab-case, stable: "attached", "put-back", "yielded", …
    device: str  # "" where it concerns no interface
    text: str
    details: dict[str, str] = field(default_factory=dict)


class EventLog:
    """The last events; writers never wait for readers."""

    def __init__(
        self,
        on_event: Callable[[Event], None] = lambda _: None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._on_event = on_event
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._changed = threading.Condition()
        self._clock = clock
        self._last = 0
        self._closed = False

    def add(self, kind: str, device: str, text: str, **details: str) -> Event:
        """Return the event that was added."""
        with self._changed:
            self._last += 1
            event = Event(self._last, self._clock(), kind, device, text, details)
            self._events.append(event)
            self._changed.notify_all()
        self._on_event(event)
        return event

    def close(self) -> None:
        """Let everyone who waits go on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def last(self) -> int:
        """The sequence number of the newest event, 0 before the first."""
        return self._last

    def wake(self) -> None:
        """Let everyone who waits look whether they still want to."""
        with self._changed:
            self._changed.notify_all()

    def after(
        self,
        sequence: int,
        timeout_s: float = 0.0,
        *,
        wanted: Callable[[], bool] = lambda: True,
    ) -> tuple[tuple[Event, ...], int]:
        """Return (events after a sequence number, how many of them are no longer kept).

        Waits at most `timeout_s` for the first; returns none at its end or at `close`.

        Args:
            wanted: asked at each event and `wake`; False ends the waiting.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._last > sequence or self._closed or not wanted(), timeout_s
            )
            found = tuple(one for one in self._events if one.sequence > sequence)
            first = found[0].sequence if found else self._last + 1
            return found, max(0, first - 1 - max(0, sequence))
