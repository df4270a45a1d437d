# SPDX-License-Identifier: Apache-2.0
"""Signals that must not leave anything half done: they unwind the stack instead."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class TerminationSignal(SystemExit):
    """SIGTERM or SIGHUP arrived: unwinds like an exit, with the shell's code 128 + signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class InterruptGuard:
    """Context in which SIGINT, SIGTERM and SIGHUP unwind the stack, once.

    The first signal raises (KeyboardInterrupt, or TerminationSignal), later ones are
    ignored until the context ends, so that a second Ctrl-C cannot cut the
    clean-up short. Outside the main thread, where Python delivers no signals,
    it does nothing.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._raised = False
        self._old: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._NUMBERS:
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._old.items():
            # A handler that C code installed reads as None and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._old.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._raised:
            return
        self._raised = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise TerminationSignal(number)
