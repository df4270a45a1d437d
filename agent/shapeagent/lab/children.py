# SPDX-License-Identifier: Apache-2.0
"""The parent's side of the traffic generators: start them, speak to them, watch the clock."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from typing import Any

from shapeagent.lab.topology import Lab
from shapeagent.model.errors import FailedError

READY_TIMEOUT_S = 60.0
DEMO_ROLES = "shapeagent.lab.worker"


class WorkerProcess:
    """One generator process and the lines it has printed."""

    def __init__(
        self,
        lab: Lab,
        namespace: str,
        role: str,
        config: dict[str, object],
        *,
        module: str = DEMO_ROLES,
    ) -> None:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        self.role = role
        self.child: subprocess.Popen[bytes] = lab.spawn(
            namespace,
            [sys.executable, "-m", module, role, json.dumps(config)],
            environment,
        )
        self._unread = b""

    def send(self, message: dict[str, object]) -> None:
        """Write one line to it. Raises FailedError (lab-worker-failed)."""
        assert self.child.stdin is not None
        try:
            self.child.stdin.write(json.dumps(message).encode() + b"\n")
            self.child.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure("ended early") from error

    def read_message(self, deadline_ns: int) -> dict[str, Any]:
        """Return the next line it printed, decoded. Raises FailedError (lab-worker-failed)."""
        assert self.child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left_s = (deadline_ns - time.monotonic_ns()) / 1e9
                if left_s <= 0 or not selector.select(left_s):
                    raise self._failure("did not answer in time")
                data = os.read(self.child.stdout.fileno(), 1 << 16)
                if not data:
                    raise self._failure("ended early")
                self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _failure(self, what: str) -> FailedError:
        self.child.kill()
        assert self.child.stderr is not None
        words = self.child.stderr.read().decode(errors="replace").strip()
        return FailedError(
            "lab-worker-failed", f"Traffic worker {self.role} {what}.", details=words.splitlines()
        )


def start_workers(
    lab: Lab, *plans: tuple[str, str, dict[str, object]], module: str = DEMO_ROLES
) -> list[tuple[WorkerProcess, dict[str, Any]]]:
    """Return the workers of `plans` (namespace, role, config), each with what it said when ready.

    Raises: FailedError (lab-worker-failed).
    """
    workers = [
        WorkerProcess(lab, namespace, role, config, module=module)
        for namespace, role, config in plans
    ]
    deadline_ns = time.monotonic_ns() + int(READY_TIMEOUT_S * 1e9)
    return [(worker, worker.read_message(deadline_ns)) for worker in workers]


def sleep_until(when_ns: int) -> None:
    """Return at `when_ns` of CLOCK_MONOTONIC."""
    time.sleep(max(0, when_ns - time.monotonic_ns()) / 1e9)


def cpu_ticks() -> tuple[int, int]:
    """Return (idle, all) ticks of all CPUs since boot. Source: proc(5), /proc/stat."""
    with open("/proc/stat", encoding="utf-8") as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
