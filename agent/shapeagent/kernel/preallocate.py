# SPDX-License-Identifier: Apache-2.0
"""Room on a disk that nobody else can take: fallocate beyond a file's end."""

from __future__ import annotations

import ctypes
import errno
import os

_FALLOC_FL_KEEP_SIZE = 0x01  # linux/uapi falloc.h

_libc = ctypes.CDLL(None, use_errno=True)
# fallocate64: the same function where off_t has 64 bits, and the right one where it has 32.
_libc.fallocate64.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def preallocate(descriptor: int, offset: int, length: int) -> bool:
    """Return True where `length` bytes from `offset` on are the file's own from now on.

    The size of the file does not change; writing there cannot fail for want of room.
    Python's `posix_fallocate` would write zeros and move the end.

    Returns: False where the file system cannot promise it (NFS before 4.2, some FUSE).
    Raises: OSError: ENOSPC, EDQUOT, EFBIG.
    Undo: `os.ftruncate` to the size it has.
    """
    while True:
        if _libc.fallocate64(descriptor, _FALLOC_FL_KEEP_SIZE, offset, length) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
