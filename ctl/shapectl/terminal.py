# SPDX-License-Identifier: Apache-2.0
"""Keys and signals of a full-screen command, and the terminal put back whatever ends it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import tty
from collections import deque
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SEEN = (*_ENDING, signal.SIGWINCH, signal.SIGTSTP)
_READ_BYTES = 64
# What keys beyond characters send: CSI, SS3, or Alt and a character (ECMA-48 §5.4).
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.)?", re.DOTALL)


class Keyboard:
    """Single keys from stdin, without echo, and signals as events, while the block runs.

    Nothing is thrown into the code that runs when a signal comes: `wait` tells.
    Only SIGKILL leaves the terminal as it is.

    Effects: the terminal's mode, the handlers of SIGINT, TERM, HUP, WINCH, TSTP.
    Undo: the end of the block.
    """

    def __init__(self) -> None:
        self._stdin = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._saved: list[Any] | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._wake = (-1, -1)
        self._pending: set[int] = set()
        self._keys: deque[str] = deque()

    def __enter__(self) -> Self:
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            for one in _SEEN:
                self._handlers[one] = signal.signal(one, self._note)
            self._set_raw()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._set_back()
        for one, handler in self._handlers.items():
            signal.signal(one, handler)
        self._handlers.clear()
        for descriptor in self._wake:
            if descriptor >= 0:
                os.close(descriptor)
        self._wake = (-1, -1)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending.add(number)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake[1], b"\0")

    def _set_raw(self) -> None:
        if self._stdin < 0:
            return
        self._saved = termios.tcgetattr(self._stdin)
        with _allowed_in_background():
            tty.setcbreak(self._stdin, termios.TCSADRAIN)

    def _set_back(self) -> None:
        saved, self._saved = self._saved, None
        if saved is None:
            return
        with _allowed_in_background(), contextlib.suppress(termios.error):  # it is gone
            # what was typed meanwhile is not for the shell
            termios.tcsetattr(self._stdin, termios.TCSAFLUSH, saved)

    def wait(self, timeout_s: float) -> str:
        """Return a key, "" after the timeout or a resize, else the name of the signal.

        A key that sends more than one character (an arrow) counts as none.
        Ending signals are "SIGINT", "SIGTERM", "SIGHUP" (also: the terminal is
        gone); "SIGTSTP" asks for `stop`.
        """
        if not self._pending:
            if self._keys:
                return self._keys.popleft()
            sources = [self._wake[0], *([self._stdin] if self._stdin >= 0 else [])]
            ready, _, _ = select.select(sources, [], [], max(0.0, timeout_s))
            if self._wake[0] in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake[0], _READ_BYTES)
            elif ready:
                return self._read_key()
        found = min(self._pending, key=_SEEN.index, default=None)
        if found is None:
            return ""
        self._pending.discard(found)
        return "" if found == signal.SIGWINCH else signal.Signals(found).name

    def _read_key(self) -> str:
        try:
            data = os.read(self._stdin, _READ_BYTES)
        except OSError:
            data = b""
        if not data:
            return "SIGHUP"
        self._keys.extend(_SEQUENCE.sub("", data.decode(errors="replace")))
        return self._keys.popleft() if self._keys else ""

    def stop(self) -> None:
        """Stop this process as Ctrl-Z does; returns when it was told to go on."""
        self._set_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._note)
        self._set_raw()


@contextlib.contextmanager
def _allowed_in_background() -> Iterator[None]:
    """Let a process that is not in the foreground set the terminal's mode too."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTTOU, before)
