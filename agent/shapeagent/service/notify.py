# SPDX-License-Identifier: Apache-2.0
"""Tells systemd how the agent is: sd_notify(3), without its library."""

from __future__ import annotations

import contextlib
import os
import socket


class Notifier:
    """Sends states to the socket that systemd names; does nothing where it names none."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        found = os.environ if environment is None else environment
        self._path = found.get("NOTIFY_SOCKET", "")
        try:
            watchdog_us = int(found.get("WATCHDOG_USEC", "0"))
        except ValueError:
            watchdog_us = 0
        pid = found.get("WATCHDOG_PID", "")
        mine = not pid or pid == str(os.getpid())
        self.watchdog_s = watchdog_us / 1e6 if mine else 0.0  # 0 = none wanted

    def send(self, *states: str) -> None:
        """Send states such as "READY=1"; a socket that is gone is no error."""
        if not self._path:
            return
        address = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out,
        ):
            out.sendto("\n".join(states).encode(), address)
