# SPDX-License-Identifier: Apache-2.0
"""Counters that are there before the metrics are, which take as long to load as all the rest."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from shapeagent.service.reconciler import Counters

_MOST_OWED = 1_000  # counts


class AgentCounters(Counters, Protocol):
    """Where the agent counts; telemetry.metrics.AgentMetrics is one."""

    def config_reload(self, *, accepted: bool) -> None: ...


class LateCounters:
    """Keeps what happened before there are metrics: those are loaded once interfaces are adopted.

    Any thread may count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: AgentCounters | None = None
        self._owed: deque[Callable[[AgentCounters], None]] = deque(maxlen=_MOST_OWED)

    def use(self, counters: AgentCounters) -> None:
        """Count there, also what has happened so far."""
        with self._lock:
            self._counters = counters
            while self._owed:
                self._owed.popleft()(counters)

    def reconcile_action(self, action: str) -> None:
        """Count something that the reconciler put right."""
        self._count(lambda to: to.reconcile_action(action))

    def conflict(self, kind: str) -> None:
        """Count a time at which the reconciler gave way."""
        self._count(lambda to: to.conflict(kind))

    def config_reload(self, *, accepted: bool) -> None:
        """Count a configuration that was read again."""
        self._count(lambda to: to.config_reload(accepted=accepted))

    def _count(self, count: Callable[[AgentCounters], None]) -> None:
        with self._lock:
            if self._counters is None:
                self._owed.append(count)
            else:
                count(self._counters)
