# SPDX-License-Identifier: Apache-2.0
"""The kernel's jiffies, which the datapath uses for every deadline.

A jiffies read costs the program nothing where a clock call costs 30 ns. User
space has no call for it, so four instructions are run by BPF_PROG_TEST_RUN.
Jiffies stand still while the machine sleeps; so do the packets.
"""

from __future__ import annotations

import os
import struct

from shapeagent.kernel import bpf

# r6 = r1; r0 = bpf_jiffies64(); *(u32 *)(r6 + cb[0]) = r0; r0 >>= 32;
# *(u32 *)(r6 + cb[1]) = r0; r0 = 0; exit
_CB = 48  # offset of cb[] in struct __sk_buff
_CODE = b"".join(
    struct.pack("=BBhi", opcode, registers, offset, immediate)
    for opcode, registers, offset, immediate in (
        (0xBF, 0x16, 0, 0),
        (0x85, 0, 0, 118),
        (0x63, 0x06, _CB, 0),
        (0x77, 0, 0, 32),
        (0x63, 0x06, _CB + 4, 0),
        (0xB7, 0, 0, 0),
        (0x95, 0, 0, 0),
    )
)
_FRAME = bytes(14)
_CONTEXT_BYTES = 192


class JiffiesClock:
    """Reads jiffies; holds one program descriptor from the first read until it is closed."""

    def __init__(self) -> None:
        self._fd: int | None = None

    def read(self) -> int:
        """Return the jiffies now."""
        if self._fd is None:  # 0.5 ms, and most looks at an attachment need no clock
            self._fd, _log = bpf.load_program("shp_clock", _CODE)
        run = bpf.run_program(self._fd, _FRAME, context=bytes(_CONTEXT_BYTES))
        jiffies: int = struct.unpack_from("=Q", run.context, _CB)[0]
        return jiffies

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
