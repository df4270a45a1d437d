# SPDX-License-Identifier: Apache-2.0
"""The audit log: who did what, durable before the answer leaves.

Each call that changes something, and each that was refused, is one line. Many
callers share one sync: while the first waits for the disk the others gather, and
the next sync is for all of them. What changes something asks for its room
first: where no line could be written, nothing is changed (`audit-unwritable`).

An error of the disk that comes after the change is told to the caller, and the
line goes to the process's own log, which is the journal.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shapeagent.model.errors import FailedError, ShapeError
from shapeagent.service.identity.auditfile import AuditFile, make_folder
from shapeagent.service.identity.auditfold import Folding
from shapeagent.service.identity.auditgroup import GroupCommit
from shapeagent.service.identity.auditline import (
    INTERRUPTED,
    MOST_LINE_BYTES,
    AuditEntry,
    encode_line,
    id_marker,
)
from shapeagent.service.identity.auditpending import PendingLines

__all__ = ["Audit", "AuditEntry", "AuditFacts", "Ticket"]

_LOG = logging.getLogger(__name__)

AUDIT_PATH = Path("/var/log/shapectl/audit.jsonl")
MOST_FILE_BYTES = 64 << 20
KEPT_FILES = 8
_SELF = "shapectl-agent"
_CLOSE_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class AuditFacts:
    """What metrics show of the audit log."""

    size_bytes: int
    lines: int
    folded: int  # refusals that were counted and not written on their own
    syncs: int
    rotations: int
    failures: int  # lines that could not be written, or changes refused for want of room
    error: str | None  # of the last failure, until a line is written again


class Ticket:
    """A change that was let through; `end` must come, whatever came of it."""

    def __init__(self, audit: Audit, identifier: str, slot: int) -> None:
        self._audit = audit
        self._identifier = identifier
        self._slot = slot
        self._ended = False

    def end(self, entry: AuditEntry) -> None:
        """Return when the change's line is durable; once only.

        Args:
            entry: with the result, and what was old and new.

        Raises: FailedError audit-unwritable: the disk failed, after the change.
        """
        if self._ended:
            raise RuntimeError("this ticket has ended before")
        self._ended = True
        self._audit.end(entry, self._identifier, self._slot)


class Audit:
    """The audit log of this process; for any number of threads.

    Args:
        clock: seconds since the epoch, for the lines.

    Raises: FailedError audit-unwritable; ConflictError audit-in-use.
    Effects: closes off what a crash left: a cut line, and changes without a line. A disk that
        is full is no error here: changes are refused until it is not.
    """

    def __init__(
        self,
        path: Path = AUDIT_PATH,
        *,
        most_bytes: int = MOST_FILE_BYTES,
        kept: int = KEPT_FILES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._clock = clock
        self._changed = threading.Condition()
        self._open_lines = 0
        self._folded = 0
        self._closed = False
        self._folding = Folding()
        try:
            make_folder(path.parent)
            # The lock first: opening the log takes a cut line out of it, and it must be ours.
            self._pending = PendingLines(path)
            try:
                self._file = AuditFile(path, most_bytes=most_bytes, kept=kept)
                try:
                    self._owed = self._find_owed()[::-1]
                except BaseException:
                    self._file.close()
                    raise
            except BaseException:
                self._pending.close()
                raise
        except OSError as error:
            raise self._unwritable(error) from error
        self._group = GroupCommit(self._file, self._changed)
        self._write_owed()

    def record(self, entry: AuditEntry) -> None:
        """Return when the entry's line is durable.

        Raises: FailedError audit-unwritable.
        """
        self._set_aside_line()
        try:
            self._commit(self._encode(entry), entry)
        finally:
            self._give_back_line()

    def begin(self, entry: AuditEntry) -> Ticket:
        """Return a ticket for a change, whose line has its room from now on.

        Where the process dies before the ticket's end, the next start writes the line as
        `entry` has it, with the result "interrupted": no change is without a line.

        Raises: FailedError audit-unwritable: make no change.
        """
        self._set_aside_line()
        try:
            identifier = _new_identifier()
            line = encode_line(entry, identifier, self._clock(), result=INTERRUPTED)
            with self._changed:
                slot = self._pending.note(line)
        except BaseException as error:
            self._give_back_line()
            if isinstance(error, OSError):
                raise self._failed(error) from error
            raise
        return Ticket(self, identifier, slot)

    def end(self, entry: AuditEntry, identifier: str, slot: int) -> None:
        """Return when the line of a ticket is durable; `Ticket.end` is for callers."""
        line = self._encode(entry, identifier)
        try:
            self._commit(line, entry)
        except BaseException:
            with self._changed:
                self._pending.amend(slot, line)  # the next start tries again
            raise
        else:
            with self._changed:
                self._pending.drop(slot)
        finally:
            self._give_back_line()

    def record_denied(self, entry: AuditEntry) -> None:
        """As `record`, of a call that was refused; many of one kind become one count.

        At most 20 lines a minute for each caller, method and reason: nobody can push older
        lines out of the log by being refused. A count is written with the next line after its
        minute, by `tick`, or by `close`.
        """
        now_s = time.monotonic()
        with self._changed:
            admitted = self._folding.admit(entry, now_s)
            self._folded += not admitted
        if admitted:
            self.record(entry)
        self.tick()

    def tick(self) -> None:
        """Write the counts of refusals whose minute is over, and what a full disk kept back.

        For the daemon's tick; never raises for the disk.
        """
        self._write_owed()
        self._write_folded(everything=False)

    def facts(self) -> AuditFacts:
        """Return what the log has done since the start."""
        with self._changed:
            group = self._group
            error = group.error
            if error is None and self._file.rotate_error is not None:
                error = f"cannot rotate: {self._file.rotate_error}"
            return AuditFacts(
                size_bytes=self._file.size_bytes,
                lines=group.lines,
                folded=self._folded,
                syncs=group.syncs,
                rotations=self._file.rotations,
                failures=group.failures,
                error=error,
            )

    def close(self) -> None:
        """Write what was counted, wait for what is being written, and let go of the log.

        Changes that hang for more than 5 s are left to the next start, as interrupted.
        """
        if self._closed:
            return
        self._write_folded(everything=True)
        with self._changed:
            if not self._changed.wait_for(self._is_idle, _CLOSE_WAIT_S):
                _LOG.warning("audit: %d changes are still under way", self._open_lines)
                return
            self._closed = True
            self._pending.close()
            self._file.close()

    def _is_idle(self) -> bool:
        return not self._group.is_writing and not self._open_lines

    def _find_owed(self) -> list[tuple[bytes, int | None]]:
        """Return the lines that a crash left to be written, each with its slot, where it has one.

        They are written now or, on a full disk, by a later tick: the agent starts all the same.
        """
        owed: list[tuple[bytes, int | None]] = []
        if self._file.cut:
            _LOG.warning("audit: the last line of %s was cut off by a crash", self.path)
            found = AuditEntry(
                who=_SELF,
                role="none",
                peer="",
                method="audit.recover",
                object=str(self.path),
                old=self._file.cut.decode("latin-1"),
                why="a line that a crash had cut off; nobody was answered for it",
            )
            owed.append((self._encode(found), None))
        for slot, line in self._pending.left:
            # Where both its line and its slot are there, the crash came between the two.
            if self._file.holds(id_marker(json.loads(line)["id"])):
                self._pending.drop(slot)
            else:
                owed.append((line, slot))
        return owed

    def _write_owed(self) -> None:
        while self._owed:
            with self._changed:
                if not self._owed:
                    return
                line, slot = self._owed.pop()
            try:
                self._set_aside_line()
                try:
                    self._commit(line, None)
                finally:
                    self._give_back_line()
            except FailedError as error:
                _LOG.warning("audit: what a crash left is not written yet: %s", error.message)
                with self._changed:
                    self._owed.append((line, slot))
                return
            if slot is not None:
                with self._changed:
                    self._pending.drop(slot)

    def _write_folded(self, *, everything: bool) -> None:
        with self._changed:
            due = self._folding.take_due(time.monotonic(), everything=everything)
        for entry, count in due:
            line = self._encode(entry, repeated=count)
            try:
                self._set_aside_line()
                try:
                    self._commit(line, entry)
                finally:
                    self._give_back_line()
            except ShapeError as error:
                _LOG.warning("audit: %d refusals of %s: %s", count, entry.method, error.message)

    def _encode(
        self, entry: AuditEntry, identifier: str | None = None, *, repeated: int = 0
    ) -> bytes:
        return encode_line(entry, identifier or _new_identifier(), self._clock(), repeated=repeated)

    def _set_aside_line(self) -> None:
        """Make sure that one more line has room, whatever else fills the disk."""
        try:
            with self._changed:
                self._open_lines += 1
                try:
                    self._file.reserve(self._open_lines * MOST_LINE_BYTES)
                except BaseException:
                    self._open_lines -= 1
                    raise
        except OSError as error:
            raise self._failed(error) from error

    def _give_back_line(self) -> None:
        with self._changed:
            self._open_lines -= 1
            self._changed.notify_all()

    def _commit(self, line: bytes, entry: AuditEntry | None) -> None:
        """Return when `line` is durable, together with whatever else gathered meanwhile."""
        error = self._group.commit(line)
        if error is None:
            return
        if entry is not None:
            _LOG.critical("audit: a line is not on the disk: %s", line.decode("ascii").rstrip())
        raise self._unwritable(error) from error

    def _failed(self, error: OSError) -> FailedError:
        with self._changed:
            self._group.failures += 1
            self._group.error = str(error)
        return self._unwritable(error)

    def _unwritable(self, error: BaseException) -> FailedError:
        return FailedError(
            "audit-unwritable",
            f"Cannot write the audit log {self.path}: {getattr(error, 'strerror', None) or error}. "
            "What is not in it is not done.",
            hint=f"df -h {self.path.parent}; sudo ls -l {self.path.parent}",
        )


def _new_identifier() -> str:
    return secrets.token_hex(8)
