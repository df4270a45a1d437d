# SPDX-License-Identifier: Apache-2.0
"""Says that something about links, queues or filters of a namespace has changed.

It does not say what: who listens reads all that it cares for anew, so a lost
message (ENOBUFS in a flood) costs nothing but that one look.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from shapeagent.kernel import netns as namespaces
from shapeagent.kernel.rtnl import Rtnl

_SOL_NETLINK, _ADD_MEMBERSHIP = 270, 1
_RTNLGRP_LINK, _RTNLGRP_TC = 1, 4  # linux/rtnetlink.h; tcx links send no message
_RECEIVE_BYTES = 1 << 16
_DRAIN_MOST = 256  # messages for one call: a flood must not keep us reading for ever


def _subscribed(netns: str | None, *groups: int) -> Rtnl:
    """Return a socket, never waited for, that hears of these groups."""
    netlink = namespaces.run_in_netns(netns, Rtnl)
    netlink.raw.setblocking(False)
    for group in groups:
        netlink.raw.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)
    return netlink


class Watch:
    """Tells whether the links of a namespace are as they were when it was asked last.

    The kernel queues a message before the call returns that changed a link (also one that
    removes, renames or moves it), so that no change is missed. For one thread.
    """

    def __init__(self, netns: str | None, *, traffic_control: bool = False) -> None:
        """Args: traffic_control: qdiscs, classes and filters too; tcx links send no message."""
        groups = (_RTNLGRP_LINK, _RTNLGRP_TC) if traffic_control else (_RTNLGRP_LINK,)
        self._netlink = _subscribed(netns, *groups)

    def has_changed(self) -> bool:
        """Return whether anything happened since the last call; what was told is forgotten."""
        found = False
        while True:
            try:
                self._netlink.raw.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return found
            except OSError as error:  # ENOBUFS: there was more than it kept for us
                if error.errno != errno.ENOBUFS:
                    raise
            found = True

    def close(self) -> None:
        """Close the socket."""
        self._netlink.close()


class Monitor:
    """A thread that calls `on_change` after changes, at most once per `quiet_s`."""

    def __init__(
        self, netns: str | None, on_change: Callable[[], None], *, quiet_s: float = 0.2
    ) -> None:
        self._on_change = on_change
        self._quiet_s = quiet_s
        self._netlink = _subscribed(netns, _RTNLGRP_LINK, _RTNLGRP_TC)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._loop, name="monitor", daemon=True)
        self.overruns = 0  # how often the kernel had to drop messages

    def start(self) -> None:
        """Start to listen."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the socket."""
        os.write(self._wake_write, b"x")
        if self._thread.ident is not None:
            self._thread.join(5.0)
        self._netlink.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _loop(self) -> None:
        poll = select.poll()
        poll.register(self._netlink.raw, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wake_read in ready:
                return
            self._drain(self._netlink.raw)
            self._on_change()
            # what comes meanwhile is told together with the next message
            end_s = time.monotonic() + self._quiet_s
            if select.select([self._wake_read], [], [], max(0.0, end_s - time.monotonic()))[0]:
                return

    def _drain(self, raw: socket.socket) -> None:
        for _ in range(_DRAIN_MOST):
            try:
                raw.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                self.overruns += 1
