# SPDX-License-Identifier: Apache-2.0
"""A caller that changes things without pause, and knows what must be there after each kill."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from enginekit import MBIT, Bench, Worker, entry, wait_until

from shapeagent.client.address import parse_address
from shapeagent.client.remote import RemoteEngine
from shapeagent.model.errors import ShapeError
from shapeagent.model.reports import AttachRequest

SECOND = "second0"
#: What a call gets whose agent is killed, is not there yet, or has just begun.
_CUT = ("agent-unreachable", "agent-timeout")
_MOST_HOSTS = 64

_T = TypeVar("_T")


@dataclass
class Known:
    """What was acknowledged, and what may have been done besides."""

    ceilings: set[int] = field(default_factory=set)  # one of them
    attached: set[bool] = field(default_factory=lambda: {False})  # of the second device, as above
    hosts: set[str] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)  # there or not


class Updater(Worker):
    """Changes ceilings, whitelist and attachments, and compares after each cut what there is."""

    def __init__(self, one: Bench, seed: int) -> None:
        super().__init__()
        self._one = one
        self._random = random.Random(seed)
        self._remote = self._dial()
        self._was_cut = threading.Event()
        self.known = Known()
        self.acknowledged: Counter[str] = Counter()
        self.cut = self.made_all_the_same = self.compared = 0
        self.lost: list[str] = []

    def _dial(self) -> RemoteEngine:
        address = parse_address(f"unix:{self._one.engine.run_dir}/admin.sock")
        return RemoteEngine(address, timeout_s=20.0)

    def work(self) -> None:
        changes = (self._set_ceiling, *(self._change_host,) * 6, self._attach_or_detach)
        while not self.stop.is_set():
            if self._was_cut.is_set() and not self.compare():
                time.sleep(0.01)
                continue
            self._random.choice(changes)()
        wait_until(self.compare, "an answer to the last comparison", timeout_s=30.0)

    def _try(self, what: str, change: Callable[[], _T]) -> bool:
        """Return whether a change was acknowledged; False: it was cut off."""
        try:
            change()
        except ShapeError as error:
            if error.reference not in _CUT:
                raise
            self.cut += 1
            self._was_cut.set()
            self._redial()
            return False
        self.acknowledged[what] += 1
        return True

    def _set_ceiling(self) -> None:
        value = self._random.randrange(40, 90) * MBIT
        done = self._try(
            "class set", lambda: self._remote.class_set(self._one.device, "bulk", value)
        )
        self.known.ceilings = {value} if done else self.known.ceilings | {value}

    def _change_host(self) -> None:
        known, device = self.known, self._one.device
        if len(known.hosts) < self._random.randrange(1, _MOST_HOSTS):
            host = f"203.0.113.{self._random.randrange(1, 255)}"
            if host in known.hosts:
                return
            hosts = [entry(host, "bulk")]
            if self._try("whitelist add", lambda: self._remote.whitelist_add(device, hosts)):
                known.hosts.add(host)
            else:
                known.unsure.add(host)
            return
        host = self._random.choice(sorted(known.hosts))
        hosts = [entry(host, "bulk")]
        known.hosts.discard(host)
        if not self._try("whitelist remove", lambda: self._remote.whitelist_remove(device, hosts)):
            known.unsure.add(host)

    def _attach_or_detach(self) -> None:
        (is_attached,) = self.known.attached
        wanted = AttachRequest(SECOND, link_rate_bits_per_s=100 * MBIT)
        if is_attached:
            done = self._try("detach", lambda: self._remote.detach(SECOND))
        else:
            done = self._try("attach", lambda: self._remote.attach(wanted))
        self.known.attached = {not is_attached} if done else {True, False}

    def compare(self) -> bool:
        """Compare what there is with what was acknowledged. Returns False where nobody answers."""
        if not self._listens():
            return False
        device, known = self._one.device, self.known
        try:
            statuses = {one.device: one for one in self._remote.status()}
            rows = self._remote.whitelist_list(device)
        except ShapeError as error:
            if error.reference not in _CUT:
                raise
            self._redial()
            return False
        self._was_cut.clear()
        self.compared += 1
        found = {row.destination for row in rows if row.traffic_class == "bulk"}
        hosts = {host for host in found if host is not None}
        ceiling = next(
            row.ceiling_bits_per_s or 0
            for row in statuses[device].classes
            if (row.name, row.direction) == ("bulk", "egress")
        )
        self.lost += [f"entry {host}" for host in sorted(known.hosts - hosts)]
        self.lost += [f"removal of {host}" for host in sorted(hosts - known.hosts - known.unsure)]
        if known.ceilings and ceiling not in known.ceilings:
            self.lost.append(f"ceiling {ceiling}, want one of {known.ceilings}")
        if (SECOND in statuses) not in known.attached:
            self.lost.append(f"{SECOND} attached: {SECOND in statuses}, want {known.attached}")
        problems = [text for one in statuses.values() for text in one.problems]
        self.lost += [f"problem {text}" for text in problems]
        self.made_all_the_same += len(known.unsure & hosts)
        self.known = Known({ceiling}, {SECOND in statuses}, hosts)
        return True

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as one:
            return one.connect_ex(f"{self._one.engine.run_dir}/admin.sock") == 0

    def _redial(self) -> None:
        """Begin anew: gRPC waits for a second and longer before it tries the same channel again."""
        self._remote.close()
        self._remote = self._dial()

    def close(self) -> None:
        self.thread.join(40)
        self._remote.close()
