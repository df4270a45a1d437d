# SPDX-License-Identifier: Apache-2.0
"""A modelled wire: the egress of a router namespace that sends one frame at a time.

veth has no wire, so nothing would ever queue behind it. Here TBF serialises,
with 24 bytes of preamble, checksum and gap added to each frame as on Ethernet,
and with a bounded FIFO in front. It is a model: after a lull the first frame
passes at once instead of taking its time on the wire.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from shapeagent.lab.topology import Port, run_command
from shapeagent.model.errors import FailedError

# Preamble and start delimiter 8, frame check sequence 4, inter-frame gap 12 (IEEE 802.3).
WIRE_OVERHEAD_BYTES = 24
ETHERNET_HEADER_BYTES = 14
CATCH_UP_FRAMES = 8  # 1 ms at 100 Mbit/s
CATCH_UP_RATE = 10
SPLIT_SLACK_BYTES = 64  # the overhead, and what tc and the kernel lose by rounding to ticks


@dataclass(frozen=True, slots=True)
class Wire:
    """A wire as it was set up."""

    namespace: str
    device: str
    rate_bits_per_s: int
    queue_ms: float  # what a full queue of full frames takes to drain
    limit_bytes: int
    burst_bytes: int
    kind: str = "tbf"


@dataclass(frozen=True, slots=True)
class WireCounters:
    """What has passed since the wire was set up."""

    frames: int
    wire_bytes: int  # frames with their 24 bytes each
    dropped_frames: int
    backlog_bytes: int


def make_wire(port: Port, *, rate_bits_per_s: int, queue_ms: float, mtu: int = 1500) -> Wire:
    """Return the wire that now stands at the egress of `port`.

    TBF splits a GSO packet that is larger than what its peak bucket holds into
    frames; that is just over one, so two never pass as one. A timer that fires
    late (hundreds of microseconds on a busy machine) must not cost capacity:
    the shaper before the wire makes up for its own lateness, and the queue would
    then grow here. So the wire makes up for eight frames, at ten times its rate.

    Args:
        queue_ms: the most the FIFO may hold, in milliseconds of the wire.

    Effects: replaces the root qdisc of `port`'s device. Undo: goes with the namespace.
    """
    frame_bytes = mtu + ETHERNET_HEADER_BYTES
    burst_bytes = CATCH_UP_FRAMES * frame_bytes
    split_bytes = frame_bytes + SPLIT_SLACK_BYTES
    bytes_per_ms = rate_bits_per_s / 8 / 1000
    # TBF's limit counts frames without the 24 bytes.
    limit_bytes = int(queue_ms * bytes_per_ms * frame_bytes / (frame_bytes + WIRE_OVERHEAD_BYTES))
    run_command(
        [
            *("tc", "-n", port.namespace, "qdisc", "replace", "dev", port.device, "root"),
            *("handle", "1:", "tbf", "rate", f"{rate_bits_per_s}bit"),
            *("burst", str(burst_bytes), "limit", str(limit_bytes)),
            *("peakrate", f"{CATCH_UP_RATE * rate_bits_per_s}bit", "mtu", str(split_bytes)),
            *("overhead", str(WIRE_OVERHEAD_BYTES)),
        ]
    )
    return Wire(
        namespace=port.namespace,
        device=port.device,
        rate_bits_per_s=rate_bits_per_s,
        queue_ms=queue_ms,
        limit_bytes=limit_bytes,
        burst_bytes=burst_bytes,
    )


def read_wire(wire: Wire) -> WireCounters:
    """Return the counters of `wire`. Raises FailedError (wire-gone)."""
    text = run_command(
        ["tc", "-n", wire.namespace, "-s", "-j", "qdisc", "show", "dev", wire.device, "root"]
    )
    rows = [row for row in json.loads(text) if row.get("kind") == wire.kind]
    if not rows:
        raise FailedError("wire-gone", f"No wire on {wire.device} in {wire.namespace}.")
    row = rows[0]
    return WireCounters(
        frames=row["packets"],
        wire_bytes=row["bytes"] + WIRE_OVERHEAD_BYTES * row["packets"],
        dropped_frames=row["drops"],
        backlog_bytes=row["backlog"],
    )
