# SPDX-License-Identifier: Apache-2.0
"""Offloads and ring sizes of a device, asked of its driver. Changes nothing."""

from __future__ import annotations

import array
import fcntl
import struct

from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.hostfacts import Offloads, Ring

_SIOCETHTOOL = 0x8946
_GET_RING = 0x10
_GET_TSO = 0x1E
_GET_GSO = 0x23
_GET_FLAGS = 0x25
_GET_GRO = 0x2B
_FLAG_LRO = 1 << 15
_RING = struct.Struct("=9I")  # command, most rx, mini, jumbo and tx, then the same in use


def read_offloads(rtnl: Rtnl, name: str) -> Offloads | None:
    """Return the segmentation offloads of a device, None where it does not say."""
    tso, gso, gro, flags = (
        _read_value(rtnl, name, command) for command in (_GET_TSO, _GET_GSO, _GET_GRO, _GET_FLAGS)
    )
    if gso is None or gro is None:
        return None
    return Offloads(tso=bool(tso), gso=bool(gso), gro=bool(gro), lro=bool((flags or 0) & _FLAG_LRO))


def read_ring(rtnl: Rtnl, name: str) -> Ring | None:
    """Return the ring sizes of a device in descriptors, None where it has no rings."""
    answer = _ask(rtnl, name, _RING.pack(_GET_RING, *[0] * 8))
    if answer is None:
        return None
    _, rx_max, _, _, tx_max, rx, _, _, tx = _RING.unpack(answer)
    return Ring(rx=rx, rx_max=rx_max, tx=tx, tx_max=tx_max)


def _read_value(rtnl: Rtnl, name: str, command: int) -> int | None:
    answer = _ask(rtnl, name, struct.pack("=II", command, 0))
    return None if answer is None else int(struct.unpack("=II", answer)[1])


def _ask(rtnl: Rtnl, name: str, question: bytes) -> bytes | None:
    """Return the answer of the driver; the ioctl goes to the namespace of the socket."""
    data = array.array("B", question)
    address, _ = data.buffer_info()
    try:
        fcntl.ioctl(
            rtnl.raw.fileno(), _SIOCETHTOOL, struct.pack("@16sP16x", name.encode(), address)
        )
    except OSError:
        return None
    return data.tobytes()
