# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
import time

from shapeagent.telemetry.events import KEPT, Event, EventLog


def test_events_come_in_order_to_whoever_asks_later() -> None:
    log = EventLog(clock=lambda: 5.0)
    for name in ("a", "b", "c"):
        log.add("kind", "d0", name, why=name)
    found, lost = log.after(1)
    assert [one.text for one in found] == ["b", "c"]
    assert (found[0].unix_s, found[0].details, lost) == (5.0, {"why": "b"}, 0)


def test_a_reader_waits_for_the_next() -> None:
    log = EventLog()
    got: list[Event] = []
    reader = threading.Thread(target=lambda: got.extend(log.after(0, 10.0)[0]))
    reader.start()
    log.add("kind", "", "text")
    reader.join(5)
    assert [one.text for one in got] == ["text"], f"got {got}"


def test_a_slow_reader_is_told_how_many_it_missed() -> None:
    log = EventLog()
    for _ in range(KEPT + 10):
        log.add("kind", "", "x")
    found, lost = log.after(3)
    assert (len(found), lost) == (KEPT, 7), f"got {len(found)} and {lost} lost"


def test_the_end_lets_readers_go() -> None:
    log = EventLog()
    reader = threading.Thread(target=lambda: log.after(0, 30.0))
    reader.start()
    began_s = time.monotonic()
    log.close()
    reader.join(5)
    assert not reader.is_alive()
    assert time.monotonic() - began_s < 5


def test_each_event_is_told_to_the_listener() -> None:
    seen: list[str] = []
    log = EventLog(lambda event: seen.append(event.text))
    log.add("kind", "", "one")
    assert seen == ["one"]
