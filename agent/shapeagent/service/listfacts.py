# SPDX-License-Identifier: Apache-2.0
"""The frame of a whitelist's log, and what its last record says: all that `status` needs.

A log is one line that names its layout, then records. A record is written by
one change and is whole or does not count:

    +-------+------------+-------+------ ... ------+------------+---------+-------+
    | magic | body bytes | CRC32 | body            | generation | entries | mark  |
    +-------+------------+-------+------ ... ------+------------+---------+-------+
                                                   | body bytes | CRC32 of the tail |
                                                   +------------+-------------------+

The mark is `Control.lists_mark` once the change is in force (kernel/datapath.py).
`whitelistlog` writes and reads the bodies.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

FILE_NAME = "whitelist.log"
LAYOUT_PREFIX = b"shapectl-whitelist "
LAYOUT = LAYOUT_PREFIX + b"1\n"
HEAD = struct.Struct("<4sII")
TAIL = struct.Struct("<QQQI")
CRC = struct.Struct("<I")
MAGIC = b"WLr1"
TAIL_BYTES = TAIL.size + CRC.size


@dataclass(frozen=True, slots=True)
class ListFacts:
    """What the last change of a whitelist left."""

    entries: int
    generation: int
    mark: int


def pack_tail(facts: ListFacts, body_bytes: int) -> bytes:
    """Return what stands behind a body."""
    data = TAIL.pack(facts.generation, facts.entries, facts.mark, body_bytes)
    return data + CRC.pack(zlib.crc32(data))


def unpack_tail(data: bytes) -> tuple[ListFacts, int] | None:
    """Return what a tail says and the bytes of its body, None where it is none."""
    if len(data) != TAIL_BYTES or CRC.unpack_from(data, TAIL.size)[0] != zlib.crc32(data[:-4]):
        return None
    generation, entries, mark, body_bytes = TAIL.unpack_from(data)
    return ListFacts(entries, generation, mark), body_bytes


def read_facts(path: Path) -> ListFacts:
    """Return what the last record of a log says, without reading the rest.

    Raises: FileNotFoundError; OSError; ValueError where it is cut, or no log.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if os.pread(descriptor, len(LAYOUT), 0) != LAYOUT:
            raise ValueError("it is no whitelist of this layout")
        found = unpack_tail(os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES)))
        if found is None:
            raise ValueError("it is cut or changed")
        facts, body_bytes = found
        begin = size - TAIL_BYTES - body_bytes - HEAD.size
        head = os.pread(descriptor, HEAD.size, max(0, begin))
        if begin < len(LAYOUT) or head[:8] != MAGIC + CRC.pack(body_bytes):
            raise ValueError("it is cut or changed")
        return facts
    finally:
        os.close(descriptor)
