# SPDX-License-Identifier: Apache-2.0
"""Whether our programs are reached: by a frame of our own, and by what the device counts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from shapeagent.kernel import link
from shapeagent.kernel.datapath import ClassCount, Datapath
from shapeagent.kernel.testframe import send_test_frame
from shapeagent.model.types import Direction
from shapeagent.service.hook import Place, hidden_error

_TRIES = 3
_WAIT_S = 0.05
_LEAST_BYTES = 100_000  # before a share means anything
_SEEN_SHARE = 0.5  # we count what a device does, and preamble and gap more


@dataclass(frozen=True, slots=True)
class Reach:
    """How much of what a device has carried since the attach came to our program."""

    direction: Direction
    ahead: tuple[str, ...]  # who runs before it
    seen_bytes: int
    carried_bytes: int

    @property
    def is_hidden(self) -> bool:
        """True where so little came that someone must have ended the hook before us."""
        carried = self.carried_bytes
        return carried >= _LEAST_BYTES and self.seen_bytes < _SEEN_SHARE * carried

    def __str__(self) -> str:
        who = ", ".join(self.ahead)
        ours = f"our {self.direction.value} program"
        if self.is_hidden:
            share = 100 * self.seen_bytes / self.carried_bytes
            by = f"hidden-by {who}" if who else "passed by"
            return f"{by}: {ours} ran for {share:.0f} % of {self.carried_bytes} bytes"
        return f"{who} before {ours}: what it ends, ours never sees"


def reaches(
    place: Place, counts: Sequence[Sequence[ClassCount]], before: tuple[int, int]
) -> list[Reach]:
    """Return the directions in which someone runs before us, or something passes us by.

    Args:
        counts: what our programs counted, egress and ingress, by class.
        before: bytes that the device had sent and received at the attach.
    """
    now = link.read_traffic(place.rtnl, place.index)
    seen = _seen(counts)
    found = []
    for direction in Direction:
        carried = now[direction.number] - before[direction.number]
        reach = Reach(direction, place.ahead(direction), seen[direction.number][1], carried)
        if reach.ahead or reach.is_hidden:
            found.append(reach)
    return found


def run(place: Place, device: str, datapath: Datapath) -> None:
    """Return when our egress program ran for a frame that was sent, or none could be sent.

    Effects: at most three frames of 60 bytes, which no bridge forwards.
    Raises: FailedError hidden.
    """
    before = _seen(datapath.counts())[0]
    for _ in range(_TRIES):  # a queue that is full may refuse one before the hook
        if not send_test_frame(place.netns, device):
            return
        if _seen(datapath.counts())[0] != before:
            return
        time.sleep(_WAIT_S)
    raise hidden_error(place, Direction.EGRESS)


def _seen(counts: Sequence[Sequence[ClassCount]]) -> list[tuple[int, int]]:
    """Return packets and wire bytes that came to our program of each direction."""
    return [
        (
            sum(one.packets + one.drops for one in classes),
            sum(one.wire_bytes + one.drop_wire_bytes for one in classes),
        )
        for classes in counts
    ]
