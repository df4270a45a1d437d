# SPDX-License-Identifier: Apache-2.0
"""Files that are read again when they change, and kept when the new ones are no good.

A certificate and its key are two files, and nobody writes two files at once: in
between they do not belong together. So a set of files is taken over only as a
whole and only where its loader accepts it; until then the last good one stays.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from shapeagent.model.errors import FailedError, InputError, ShapeError

T = TypeVar("T")

MOST_FILE_BYTES = 1 << 20

# Kernels stamp files by the tick (1 to 10 ms), some file systems by the second: a file that
# changed so lately can change again under the same stamps, and is read again.
_SETTLED_AFTER_NS = 2_000_000_000

_Stamp = tuple[int, int, int, int, int]


class WatchedFiles(Generic[T]):
    """The last good content of some files.

    Args:
        paths: read in this order, at most 1 MiB each.
        load: the contents, in the order of `paths`, to what they mean; raises ShapeError
            where they mean nothing.

    Raises: ShapeError of `load`, InputError file-unreadable: nothing good to begin with.
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[Sequence[bytes]], T]) -> None:
        self._paths = tuple(paths)
        self._load = load
        self._lock = threading.Lock()
        self._stamps: tuple[_Stamp, ...] | None = None
        contents, self._stamps = self._read()
        self._value = load(contents)
        self._digest = _digest(contents)
        self._loaded_unix_s = time.time()
        self._generation = 1
        self._refusals = 0
        self._refused_digest: bytes | None = None
        self._error: ShapeError | None = None

    @property
    def value(self) -> T:
        """What is in use."""
        return self._value

    @property
    def generation(self) -> int:
        """1 at the start, one more with each new content in use."""
        return self._generation

    @property
    def refusals(self) -> int:
        """How many different contents were refused, unreadable ones too."""
        return self._refusals

    @property
    def error(self) -> ShapeError | None:
        """Why what is on disk now is not in use; None where it is."""
        return self._error

    @property
    def loaded_unix_s(self) -> float:
        """When what is in use was read."""
        return self._loaded_unix_s

    def refresh(self) -> bool:
        """Return True where new content was taken into use; asks three stamps where not.

        Never raises for what is on disk: `error` says what is wrong with it.
        """
        with self._lock:
            if self._stamps is not None and self._stamps == self._stat():
                return False
            try:
                contents, self._stamps = self._read()
            except ShapeError as error:
                self._refuse(error, None)
                return False
            digest = _digest(contents)
            if digest == self._digest:
                self._error = None
                self._refused_digest = None
                return False
            try:
                value = self._load(contents)
            except ShapeError as error:
                self._refuse(error, digest)
                return False
            self._value = value
            self._digest = digest
            self._loaded_unix_s = time.time()
            self._error = None
            self._refused_digest = None
            self._generation += 1
            return True

    def _refuse(self, error: ShapeError, digest: bytes | None) -> None:
        # What is refused now may be whole, or valid, the next time: no stamps are remembered.
        self._stamps = None
        same = self._error is not None and (self._refused_digest, self._error.reference) == (
            digest,
            error.reference,
        )
        self._error = error
        self._refused_digest = digest
        if not same:
            self._refusals += 1

    def _stat(self) -> tuple[_Stamp, ...] | None:
        try:
            return tuple(_stamp(os.stat(path)) for path in self._paths)
        except OSError:
            return None

    def _read(self) -> tuple[tuple[bytes, ...], tuple[_Stamp, ...] | None]:
        """Return the contents, and the stamps where they can be trusted to name them."""
        pairs = [_read_file(path) for path in self._paths]
        contents = tuple(content for content, _ in pairs)
        stamps = tuple(stamp for _, stamp in pairs)
        now_ns = time.time_ns()
        settled = all(abs(now_ns - stamp[4]) > _SETTLED_AFTER_NS for stamp in stamps)
        return contents, stamps if settled else None


def _read_file(path: Path) -> tuple[bytes, _Stamp]:
    try:
        # Not blocking: a FIFO in place of the file must not hold up a handshake.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                raise _unreadable(path, "it is no regular file")
            content = file.read(MOST_FILE_BYTES + 1)
            after = os.fstat(descriptor)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    if len(content) > MOST_FILE_BYTES:
        raise _unreadable(path, f"it is larger than {MOST_FILE_BYTES} bytes")
    if _stamp(before) != _stamp(after):
        raise FailedError("file-changing", f"{path} was being written while it was read.")
    return content, _stamp(after)


def _unreadable(path: Path, why: str) -> InputError:
    return InputError(
        "file-unreadable",
        f"Cannot read {path}: {why}.",
        hint=f"sudo ls -l {path}",
    )


def _stamp(found: os.stat_result) -> _Stamp:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _digest(contents: Sequence[bytes]) -> bytes:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.digest()
