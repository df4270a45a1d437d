# SPDX-License-Identifier: Apache-2.0
"""Many threads' lines with one sync: while the disk works for the first, the others gather."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from shapeagent.service.identity.auditfile import AuditFile


@dataclass(slots=True)
class _Batch:
    lines: list[bytes] = field(default_factory=list)
    done: bool = False
    error: BaseException | None = None


class GroupCommit:
    """Writes lines to an audit file.

    There is no thread for it: whoever comes first writes for all who gathered.

    Args:
        changed: guards the file and this object, but for the sync itself.
    """

    def __init__(self, file: AuditFile, changed: threading.Condition) -> None:
        self.lines = 0
        self.syncs = 0
        self.failures = 0
        self.error: str | None = None  # of the last failure, until a line is written again
        self.is_writing = False
        self.gathering = _Batch()
        self._file = file
        self._changed = changed

    def commit(self, line: bytes) -> BaseException | None:
        """Return None once `line` is durable, or why it is not in the log."""
        with self._changed:
            batch = self.gathering
            batch.lines.append(line)
            while self.is_writing and not batch.done:
                self._changed.wait()
            if batch.done:
                return batch.error
            self.is_writing = True
            self.gathering = _Batch()
        self._write(batch)
        return batch.error

    def _write(self, batch: _Batch) -> None:
        lines = b"".join(batch.lines)
        written = False
        try:
            with self._changed:
                self._file.write(lines)
                written = True
            self._file.sync()
        except BaseException as error:
            batch.error = error
            if not isinstance(error, OSError):
                raise
        finally:
            with self._changed:
                if batch.error is None:
                    self.lines += len(batch.lines)
                    self.syncs += 1
                    self.error = None
                else:
                    if written:
                        self._file.undo(len(lines))
                    self.failures += len(batch.lines)
                    self.error = str(batch.error)
                batch.done = True
                self.is_writing = False
                self._changed.notify_all()
