# SPDX-License-Identifier: Apache-2.0
"""The one thread of the agent that owns the engine: every change and every look goes through it.

Calls wait their turn in order of arrival, and the reconciler between them. A
caller waits at most as long as it says: a call that has not begun by then
never will; one that has begun goes on, since half a change is worse than an
answer that nobody reads.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from shapeagent.model.errors import ConflictError, FailedError
from shapeagent.service.engine import Engine

_T = TypeVar("_T")

MAX_WAITING = 1_000  # calls; the gRPC server admits fewer


@dataclass(slots=True)
class _Job:
    work: Callable[[Engine], Any]
    done: Future[Any] = field(default_factory=Future)


class Writer:
    """Runs work on the engine, one at a time, in a thread of its own."""

    def __init__(self, engine: Engine, *, idle: Callable[[], float | None] | None = None) -> None:
        """Make a writer; `start` begins.

        Args:
            idle: called in the thread between calls; returns the seconds until it wants to
                be called again, None for not before the next `wake`. It must not raise.
        """
        self.engine = engine
        self._idle = idle or (lambda: None)
        self._jobs: queue.Queue[_Job | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._loop, name="writer", daemon=True)
        self._stopping = False
        self._idle_due_s = 0.0  # CLOCK_MONOTONIC
        self._began_s: float | None = None  # CLOCK_MONOTONIC; None = nothing runs

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the thread after what runs; what waits is refused. Raises: writer-hangs."""
        self._stopping = True
        self.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise FailedError(
                "writer-hangs", f"A change did not end within {timeout_s:g} s.", hint="kill -9 it"
            )

    def wake(self) -> None:
        """Make the thread call `idle` next; from any thread."""
        self._idle_due_s = 0.0
        with contextlib.suppress(queue.Full):  # then it is awake
            self._jobs.put_nowait(None)

    @property
    def busy_s(self) -> float:
        """How long what runs has run, 0 where nothing does: what a watchdog looks at."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    @property
    def waiting(self) -> int:
        """How many calls have not begun."""
        return self._jobs.qsize()

    @property
    def is_stopping(self) -> bool:
        """True from `stop` on."""
        return self._stopping

    def run(self, work: Callable[[Engine], _T], *, timeout_s: float) -> _T:
        """Return what `work` returns, called in the writer's thread.

        Raises:
            ShapeError: of the work.
            ConflictError: "agent-busy", the work did not begin in time, nothing was
                done; "agent-stopping".
            FailedError: "still-running", it began and has not ended in time.
        """
        if self._stopping:
            raise ConflictError("agent-stopping", "The agent is stopping.", hint="try again")
        job = _Job(work)
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise _busy(f"{MAX_WAITING} calls wait") from None
        try:
            result: _T = job.done.result(timeout_s)
        except FutureTimeout:
            if job.done.cancel():
                raise _busy(f"the call waited {timeout_s:g} s") from None
            if job.done.done():  # ended while we looked
                last: _T = job.done.result(0)
                return last
            raise FailedError(
                "still-running",
                f"The change has begun and did not end within {timeout_s:g} s; it goes on.",
                hint="shapectl status shows what came of it",
            ) from None
        except CancelledError:
            raise ConflictError(
                "agent-stopping", "The agent stopped before the call began.", hint="try again"
            ) from None
        return result

    def _loop(self) -> None:
        while not self._stopping:
            left_s = self._idle_due_s - time.monotonic()
            if left_s <= 0:  # also while calls wait: a flood of them must not keep it away
                self._timed(self._look)
                continue
            try:
                job = self._jobs.get(timeout=None if math.isinf(left_s) else left_s)
            except queue.Empty:
                continue
            if job is not None and job.done.set_running_or_notify_cancel():
                self._timed(partial(self._do, job))
        self._refuse_rest()

    def _look(self) -> None:
        self._idle_due_s = math.inf  # a wake that comes while it looks makes it look again
        wait_s = self._idle()
        if wait_s is not None:
            self._idle_due_s = min(self._idle_due_s, time.monotonic() + wait_s)

    def _do(self, job: _Job) -> None:
        try:
            job.done.set_result(job.work(self.engine))
        except BaseException as error:
            job.done.set_exception(error)

    def _timed(self, what: Callable[[], None]) -> None:
        self._began_s = time.monotonic()
        try:
            what()
        finally:
            self._began_s = None

    def _refuse_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.done.cancel()


def _busy(why: str) -> ConflictError:
    return ConflictError("agent-busy", f"The agent is busy: {why}.", hint="try again")
