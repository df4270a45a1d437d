# SPDX-License-Identifier: Apache-2.0
"""What is said about a root that is back."""

from __future__ import annotations

from shapeagent.kernel.rtnl import TC_H_ROOT
from shapeagent.kernel.snapshot import DeviceSnapshot
from shapeagent.model.types import GsoLimits
from shapeagent.service.restoring import leaf_notes

_GSO = GsoLimits(65536, 65535, 65536)


def test_another_default_of_the_kernel_is_said_and_left() -> None:
    def with_default(*kinds: str) -> DeviceSnapshot:
        return DeviceSnapshot((), tuple((TC_H_ROOT, kind) for kind in kinds), "", _GSO)

    was = with_default("mq", "pfifo_fast", "pfifo_fast")
    assert leaf_notes(with_default("mq", "pfifo_fast"), was) == ()
    assert leaf_notes(with_default("noop"), was) == (), "got a note about a device that is down"
    (note,) = leaf_notes(with_default("mq", "fq_codel"), was)
    for word in ("fq_codel", "pfifo_fast", "net.core.default_qdisc"):
        assert word in note, f"got {note!r}, want {word} in it"
