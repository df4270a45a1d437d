# SPDX-License-Identifier: Apache-2.0
"""Changes under way, remembered for the case that the agent does not live to log them.

A change is logged when its result is known, and a `kill -9` can come between the
two. So the line that would have to be written then is noted beforehand, in a
slot of a file of our own. It is not synced: it must outlive the process, not the
machine, whose crash takes the change in the kernel along.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import zlib
from pathlib import Path

from shapeagent.model.errors import ConflictError
from shapeagent.service.identity.auditline import MOST_LINE_BYTES

_SUFFIX = ".pending"
_HEADER = struct.Struct("<II")  # length, CRC-32; a length of 0: free
_SLOT_BYTES = _HEADER.size + MOST_LINE_BYTES
_FREE = _HEADER.pack(0, 0)


class PendingLines:
    """The slots beside one audit log, which also say whose log it is.

    Raises: ConflictError audit-in-use: another process writes this log; OSError.
    Effects: `left` has the lines that an earlier process left, and their slots; each stays
        until it is dropped.
    """

    def __init__(self, log: Path) -> None:
        self.path = Path(f"{log}{_SUFFIX}")
        self._descriptor = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            self._lock(log)
            self.left = self._read()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._slots = max((slot + 1 for slot, _ in self.left), default=0)
        taken = {slot for slot, _ in self.left}
        self._free = [slot for slot in range(self._slots) if slot not in taken]

    def note(self, line: bytes) -> int:
        """Return the slot that now holds `line`. Raises: OSError: no room for it."""
        slot = self._free.pop() if self._free else self._slots
        try:
            self._write(slot, line)
        except OSError:
            if slot < self._slots:
                self._free.append(slot)
            raise
        self._slots = max(self._slots, slot + 1)
        return slot

    def amend(self, slot: int, line: bytes) -> None:
        """Let a slot hold another line, where the disk lets us; it stays taken."""
        with contextlib.suppress(OSError):
            self._write(slot, line)

    def drop(self, slot: int) -> None:
        """Free a slot; its blocks are there, so this needs no room."""
        with contextlib.suppress(OSError):  # the log has the line: at worst it is asked again
            _write_at(self._descriptor, _FREE, slot * _SLOT_BYTES)
        self._free.append(slot)

    def close(self) -> None:
        """Close it; the log is free for another process."""
        os.close(self._descriptor)

    def _write(self, slot: int, line: bytes) -> None:
        offset = slot * _SLOT_BYTES
        # The header last: cut before it, the slot is what it was, or does not agree.
        _write_at(self._descriptor, line, offset + _HEADER.size)
        _write_at(self._descriptor, _HEADER.pack(len(line), zlib.crc32(line)), offset)

    def _lock(self, log: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise
            raise ConflictError(
                "audit-in-use",
                f"Another process writes the audit log {log}.",
                hint=f"sudo fuser -v {self.path}",
            ) from error

    def _read(self) -> list[tuple[int, bytes]]:
        size = os.fstat(self._descriptor).st_size
        lines = []
        for number, offset in enumerate(range(0, size, _SLOT_BYTES)):
            slot = os.pread(self._descriptor, _SLOT_BYTES, offset)
            if len(slot) < _HEADER.size:
                break
            length, crc = _HEADER.unpack_from(slot)
            line = slot[_HEADER.size : _HEADER.size + length]
            # What does not agree was cut while it was noted: its change had not begun.
            if length and zlib.crc32(line) == crc and line.endswith(b"\n"):
                lines.append((number, line))
        return lines


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
