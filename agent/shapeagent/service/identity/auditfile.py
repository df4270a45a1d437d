# SPDX-License-Identifier: Apache-2.0
"""The audit log on disk: appended to, rotated by size, whole after a crash.

`audit.jsonl` is written, `audit.jsonl.1` the one before it, and so on. Room for the
lines of changes that are under way is set aside beforehand, so that a disk that
fills in the meantime refuses the next change and not the line of this one.

One thread at a time, but for `sync`, which others may call `reserve` beside.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import stat
from pathlib import Path

from shapeagent.kernel.preallocate import preallocate

_MODE = 0o640
_FOLDER_MODE = 0o750
_GROUP = "adm"  # who reads logs on Debian
_RESERVE_BYTES = 1 << 20
_TAIL_BYTES = 64 << 10
_NEW_SUFFIX = ".new"
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


class AuditFile:
    """An open audit log.

    Args:
        path: the log; its folder is there (`make_folder`).
        most_bytes: a file is not made longer, but for one batch of lines.
        kept: how many older files stay.

    Raises: OSError, also where the path is a link or no regular file (ELOOP, EINVAL).
    Effects: a line that a crash cut off is taken out of the log; `cut` has it.
    """

    def __init__(self, path: Path, *, most_bytes: int, kept: int) -> None:
        if kept < 1 or most_bytes < 1:
            raise ValueError("an audit log keeps at least one older file")
        self.path = path
        self.cut = b""
        self.rotations = 0
        self.rotate_error: OSError | None = None
        self._most_bytes = most_bytes
        self._kept = kept
        self._descriptor = -1
        self._size = 0
        self._reserved = 0
        self._promised = 0
        self._open()

    @property
    def size_bytes(self) -> int:
        """How long the log is."""
        return self._size

    def reserve(self, wanted_bytes: int) -> None:
        """Set aside room for this much after the end; the most that was asked follows rotations.

        Raises: OSError: ENOSPC, EDQUOT, EIO; what was set aside before stays.
        """
        self._set_aside(self._descriptor, wanted_bytes)
        self._promised = max(self._promised, wanted_bytes)

    def write(self, lines: bytes) -> None:
        """Append lines, in a new file where this one is full; durable only after `sync`.

        Raises: OSError; nothing of `lines` is then in the log.
        """
        self._follow()
        if self._size and self._size + len(lines) > self._most_bytes:
            self._rotate()
        view = memoryview(lines)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            self._take_back()
            raise
        self._size += len(lines)
        self._reserved = max(0, self._reserved - len(lines))

    def sync(self) -> None:
        """Return when what was written is on the disk. Raises: OSError; `undo` must follow."""
        os.fdatasync(self._descriptor)

    def undo(self, lines_bytes: int) -> None:
        """Take the last `lines_bytes`, which could not be synced, out of the log again.

        The kernel forgets what it could not write, and a second sync would succeed without it
        (fsync(2)): so begin anew behind what is known to be there, with a descriptor that
        knows of no error.
        """
        self._size -= lines_bytes
        self._take_back()
        with contextlib.suppress(OSError):
            self._reopen()

    def close(self) -> None:
        """Close it, and give back the room that was set aside."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self._size)
        os.close(self._descriptor)
        self._descriptor = -1

    def holds(self, marker: bytes) -> bool:
        """Return True where the log, or the file before it, holds these bytes."""
        for path in (self.path, self._numbered(1)):
            try:
                if marker in path.read_bytes():
                    return True
            except FileNotFoundError:
                continue
        return False

    def _open(self) -> None:
        try:
            # Not blocking: a FIFO in its place must not hold up the agent.
            descriptor = os.open(self.path, _FLAGS | os.O_NONBLOCK)
        except FileNotFoundError:
            descriptor = _create(self.path)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file", str(self.path))
            self.cut, size = _repair(descriptor, found.st_size)
        except BaseException:
            os.close(descriptor)
            raise
        _sync_folder(self.path.parent)
        self._descriptor, self._size, self._reserved = descriptor, size, 0

    def _reopen(self) -> None:
        old = self._descriptor
        self._open()
        os.close(old)

    def _follow(self) -> None:
        """Open the log anew where someone has moved or deleted it, or written to it."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            found = None
        mine = os.fstat(self._descriptor)
        if found is None or (found.st_dev, found.st_ino) != (mine.st_dev, mine.st_ino):
            self._reopen()
            with contextlib.suppress(OSError):
                self._set_aside(self._descriptor, self._promised)
        elif mine.st_size != self._size:
            self._size, self._reserved = mine.st_size, 0

    def _set_aside(self, descriptor: int, wanted_bytes: int) -> None:
        if wanted_bytes <= self._reserved:
            return
        for length in dict.fromkeys((max(wanted_bytes, _RESERVE_BYTES), wanted_bytes)):
            try:
                if preallocate(descriptor, self._size, length):
                    self._reserved = length
                    return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or length == wanted_bytes:
                    raise
                continue
            free = os.fstatvfs(descriptor)
            if free.f_bavail * free.f_frsize >= wanted_bytes:
                return  # nobody promises it, and it is there now
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _take_back(self) -> None:
        # Where truncating is forbidden (chattr +a) the half line stays, and is closed off.
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, b"\n")
            self._size = os.fstat(self._descriptor).st_size
        self._reserved = 0
        with contextlib.suppress(OSError):
            self._set_aside(self._descriptor, self._promised)

    def _rotate(self) -> None:
        """Begin a new file; where that fails go on in the old one, and say so."""
        fresh = Path(f"{self.path}{_NEW_SUFFIX}")
        size, reserved = self._size, self._reserved
        descriptor = -1
        try:
            # The oldest first: on a full disk it is what makes room.
            self._numbered(self._kept).unlink(missing_ok=True)
            fresh.unlink(missing_ok=True)
            descriptor = _create(fresh)
            self._size = self._reserved = 0
            self._set_aside(descriptor, self._promised)
            for number in range(self._kept - 1, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    self._numbered(number).replace(self._numbered(number + 1))
            self.path.replace(self._numbered(1))
            fresh.replace(self.path)
        except OSError as error:
            self.rotate_error = error
            self._size, self._reserved = size, reserved
            if descriptor >= 0:
                os.close(descriptor)
            if not self.path.exists():  # moved away, and nothing came in its place
                with contextlib.suppress(OSError):
                    self._numbered(1).replace(self.path)
            return
        self.rotate_error = None
        self.rotations += 1
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, size)
        os.close(self._descriptor)
        self._descriptor = descriptor
        _sync_folder(self.path.parent)

    def _numbered(self, number: int) -> Path:
        return Path(f"{self.path}.{number}")


def make_folder(folder: Path) -> None:
    """Make the log's folder where it is missing, for root and the group that reads logs."""
    if not folder.is_dir():
        folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        _give_to_readers(folder)


def _create(path: Path) -> int:
    descriptor = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, _MODE)
    _give_to_readers(descriptor)
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, _MODE)  # whatever the umask
    return descriptor


def _give_to_readers(target: int | Path) -> None:
    """Hand a new file to the group that reads logs, where there is one and we may."""
    with contextlib.suppress(KeyError, OSError):
        os.chown(target, -1, grp.getgrnam(_GROUP).gr_gid)


def _repair(descriptor: int, size: int) -> tuple[bytes, int]:
    """Return the bytes behind the last line feed, now taken out of the file, and its size."""
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return b"", size
    end = size
    whole = 0
    while end and not whole:
        begin = max(0, end - _TAIL_BYTES)
        whole = begin + os.pread(descriptor, end - begin, begin).rfind(b"\n") + 1
        if whole == begin:
            whole, end = 0, begin
    cut = os.pread(descriptor, _TAIL_BYTES, whole)
    try:
        os.ftruncate(descriptor, whole)
    except PermissionError:  # chattr +a
        os.write(descriptor, b"\n")
        return cut, size + 1
    return cut, whole


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
