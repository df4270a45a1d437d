# SPDX-License-Identifier: Apache-2.0
"""One frame through a device's egress hook, to see whether our program runs there."""

from __future__ import annotations

import socket
import threading

from shapeagent.kernel import netns as namespaces
from shapeagent.model.errors import ShapeError

# For experiments on a local network (IEEE 802, Local Experimental EtherType 1).
_ETHERTYPE = 0x88B5
# "Nearest bridge" (IEEE 802.1Q, table 8-1): no bridge forwards it, so it ends at the first switch.
_NEAREST_BRIDGE = bytes.fromhex("0180c200000e")
_TEXT = b"shapectl self-test".ljust(46, b"\0")


def send_test_frame(netns: str | None, device: str) -> bool:
    """Send one frame of 60 bytes out of a device; returns False where it takes none now.

    It passes the egress hook in this thread, so counters have moved on return.
    """

    def send() -> bool:
        one = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM)
        try:
            one.sendto(_TEXT, (device, _ETHERTYPE, 0, 0, _NEAREST_BRIDGE))
        finally:
            # packet_release() waits for an RCU grace period, 8 to 16 ms: nobody else need
            threading.Thread(target=one.close, name="shapectl-close").start()
        return True

    try:
        return namespaces.run_in_netns(netns, send)
    except (OSError, ShapeError):
        return False  # down, gone, or a device without such addresses
