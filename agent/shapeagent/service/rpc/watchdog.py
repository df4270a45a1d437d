# SPDX-License-Identifier: Apache-2.0
"""Cuts calls that take too long: one thread for all of them.

gRPC ends a call at the deadline that its client set. A client that sets none,
and then neither sends nor reads, would hold a thread of ours for ever.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator


class Watchdog:
    """Calls back at deadlines that were not taken back before."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int]] = []  # (due, number); due is CLOCK_MONOTONIC
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="rpc-watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def limit(self, seconds: float, callback: Callable[[], None]) -> Iterator[None]:
        """Call back unless the body has ended so many seconds from now."""
        due_s = time.monotonic() + seconds
        with self._changed:
            number = next(self._numbers)
            self._callbacks[number] = callback
            heapq.heappush(self._heap, (due_s, number))
            if self._heap[0][1] == number:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._callbacks.pop(number, None)
                # of calls that ended the heap keeps at most as many as still run, and a few
                if len(self._heap) > 2 * len(self._callbacks) + 64:
                    self._heap = [one for one in self._heap if one[1] in self._callbacks]
                    heapq.heapify(self._heap)

    def close(self) -> None:
        """End the thread; nothing is called back any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(5.0)

    def _loop(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now_s = time.monotonic()
                if not self._heap:
                    self._changed.wait()
                    continue
                due_s, number = self._heap[0]
                if due_s > now_s:
                    self._changed.wait(due_s - now_s)
                    continue
                heapq.heappop(self._heap)
                callback = self._callbacks.pop(number, None)
            if callback is not None:
                callback()
