# SPDX-License-Identifier: Apache-2.0
"""When to put back what someone took away, and when to yield. Pure: time is an argument.

Peers fight for ever (two shapers, each undoing the other's qdisc a hundred times a
day) or not at all. We put ours back a few times, each time waiting longer, and
then leave the place to the other and say who has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

MOST_TRIES = 5
FIRST_WAIT_S = 1.0  # before the second try; then 2, 4, 8
FORGET_S = 600.0  # quiet for so long: the next one is a new dispute
RETRY_WAIT_S = 2.0  # after a failed attach; doubled up to
MOST_RETRY_WAIT_S = 60.0


class Choice(StrEnum):
    """What to do about something of ours that is not as we left it."""

    APPLY = "apply"
    WAIT = "wait"
    YIELD = "yield"


@dataclass(slots=True)
class Dispute:
    """One thing of one interface that others changed: how often, and what follows."""

    tries: list[float] = field(default_factory=list)  # when ours was put back
    yielded: bool = False

    def choose(self, now_s: float) -> tuple[Choice, float]:
        """Return what to do now, and when to look again (seconds of the same clock)."""
        self._forget(now_s)
        if self.yielded or len(self.tries) >= MOST_TRIES:
            self.yielded = True
            return Choice.YIELD, now_s + FORGET_S
        if not self.tries:
            return Choice.APPLY, now_s
        due_s = self.tries[-1] + FIRST_WAIT_S * 2 ** (len(self.tries) - 1)
        return (Choice.APPLY, now_s) if now_s >= due_s else (Choice.WAIT, due_s)

    def applied(self, now_s: float) -> None:
        """Note that ours was put back."""
        self.tries.append(now_s)

    def settled(self, now_s: float) -> bool:
        """Note that all is as we left it; return whether a yielded dispute ended by that."""
        ended, self.yielded = self.yielded, False
        if ended:
            self.tries.clear()
        self._forget(now_s)
        return ended

    def _forget(self, now_s: float) -> None:
        if self.tries and not self.yielded and now_s - self.tries[-1] >= FORGET_S:
            self.tries.clear()


@dataclass(slots=True)
class Retry:
    """When to try again what failed: soon, then less and less often."""

    failures: int = 0
    due_s: float = 0.0

    def failed(self, now_s: float) -> float:
        """Note a failure; returns when to try again."""
        wait_s = min(MOST_RETRY_WAIT_S, RETRY_WAIT_S * 2.0 ** min(self.failures, 10))
        self.failures += 1
        self.due_s = now_s + wait_s
        return self.due_s

    def succeeded(self) -> None:
        """Note that it worked."""
        self.failures, self.due_s = 0, 0.0
