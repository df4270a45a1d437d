# SPDX-License-Identifier: Apache-2.0
"""The answers that were given, by request id: a call that is repeated gets its answer again.

SQLite, with one commit for each answer that does not wait for the disk: it
outlasts the agent, killed or not. A crash of the whole machine may lose the
newest ones; then the change is done again, and the engine's changes are such
that this changes nothing. What a full disk does not take is kept in memory until
it does: the change is made by then, and an error would say the contrary.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path

from shapeagent.model.errors import FailedError, InputError
from shapeagent.service.state import put_aside

_log = logging.getLogger("shapectl.agent.rpc")

FILE_NAME = "requests.sqlite"
MOST_KEPT = 16_384
MOST_BYTES = 32 << 20  # of all answers together
MOST_UNWRITTEN = 4_096  # answers that a full disk does not take
_TRIM_EVERY = 256  # answers
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY,
    who TEXT NOT NULL,
    request_id TEXT NOT NULL,
    digest BLOB NOT NULL,
    answer BLOB NOT NULL,
    UNIQUE (who, request_id)
)
"""


def check_request_id(text: str) -> None:
    """Raise InputError where a text is no request id."""
    if not text:
        raise InputError(
            "request-id-missing",
            "A change needs a request_id, so that it can be repeated safely.",
            hint="a fresh UUID for each change, the same one when it is tried again",
        )
    if _REQUEST_ID.fullmatch(text) is None:
        raise InputError(
            "bad-request-id",
            f"{text[:80]!a} is no request id: 1 to 64 letters, digits and ._:- of ASCII.",
            hint="a UUID is good",
        )


def digest_of(method: str, *parts: bytes) -> bytes:
    """Return what makes two requests the same."""
    digest = hashlib.sha256(method.encode())
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered, to which request."""

    digest: bytes
    message: bytes


class RequestIds:
    """The answers by (who, request id). For any thread."""

    def __init__(self, folder: Path, *, most_kept: int = MOST_KEPT) -> None:
        """Open them.

        Raises: FailedError state-unwritable.
        Effects: a file in the folder, 0600; a damaged one is put aside as `.corrupt-TIME`.
        """
        self._path = folder / FILE_NAME
        self._most_kept = most_kept
        self._lock = threading.Lock()
        self._since_trim = 0
        self._unwritten: dict[tuple[str, str], Answer] = {}
        self._is_stuck = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._connection = self._open()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                self._put_aside()
                self._connection = self._open()
        except (OSError, sqlite3.Error) as error:
            raise _unwritable(self._path, error) from error

    def _open(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute(_SCHEMA)
            if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("quick_check")
        except BaseException:
            connection.close()
            raise
        return connection

    def _put_aside(self) -> None:
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self._path}{suffix}").unlink()
        put_aside(self._path)

    def find(self, who: str, request_id: str) -> Answer | None:
        """Return what was answered, None where nothing was. Raises: FailedError state-damaged."""
        try:
            with self._lock:
                unwritten = self._unwritten.get((who, request_id))
                if unwritten is not None:
                    return unwritten
                row = self._connection.execute(
                    "SELECT digest, answer FROM answers WHERE who = ? AND request_id = ?",
                    (who, request_id),
                ).fetchone()
        except sqlite3.Error as error:
            raise FailedError(
                "state-damaged",
                f"Cannot read {self._path}: {error}.",
                hint="restart the agent: it puts the file aside and begins another",
            ) from error
        return None if row is None else Answer(*row)

    def remember(self, who: str, request_id: str, answer: Answer) -> None:
        """Keep an answer; the oldest make room."""
        with self._lock:
            self._unwritten[who, request_id] = answer
            try:
                self._write_out()
            except sqlite3.Error as error:
                if not self._is_stuck:
                    _log.error("%s", _unwritable(self._path, error).message)
                self._is_stuck = True
                while len(self._unwritten) > MOST_UNWRITTEN:
                    del self._unwritten[next(iter(self._unwritten))]
            else:
                self._is_stuck = False

    def _write_out(self) -> None:
        for (who, request_id), answer in list(self._unwritten.items()):
            self._connection.execute(
                "INSERT OR REPLACE INTO answers (who, request_id, digest, answer) "
                "VALUES (?, ?, ?, ?)",
                (who, request_id, answer.digest, answer.message),
            )
            del self._unwritten[who, request_id]
            self._since_trim += 1
        if self._since_trim >= _TRIM_EVERY:
            self._trim()

    def _trim(self) -> None:
        self._since_trim = 0
        self._connection.execute(
            "DELETE FROM answers WHERE number <= (SELECT max(number) FROM answers) - ?",
            (self._most_kept,),
        )
        size = "SELECT coalesce(sum(length(answer)), 0), count(*) FROM answers"
        size_bytes, count = self._connection.execute(size).fetchone()
        while size_bytes > MOST_BYTES:
            self._connection.execute(
                "DELETE FROM answers WHERE number IN "
                "(SELECT number FROM answers ORDER BY number LIMIT ?)",
                (max(1, count // 2),),
            )
            size_bytes, count = self._connection.execute(size).fetchone()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()


def _unwritable(path: Path, error: Exception) -> FailedError:
    return FailedError(
        "state-unwritable",
        f"Cannot write {path}: {getattr(error, 'strerror', None) or error}.",
        hint=f"is its file system full or read-only? df {path.parent}",
    )
