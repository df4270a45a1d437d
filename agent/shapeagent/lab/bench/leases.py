# SPDX-License-Identifier: Apache-2.0
"""The role `lease-client`: keeps leases of a real etcd alive over one connection.

It speaks to etcd's JSON gateway in HTTP/1.1 and pipelines: a keep-alive goes out
when it is due, whatever has come back, as on the one stream that etcd's own
client uses. The answers come in the order of the requests.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import random
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from shapeagent.lab.worker import Control, connect, raise_priority, wait_readable

# The shortest that etcd grants with its default election timeout of 1 s (lease.NewLessor:
# 3/2 of the election ticks, rounded up to seconds). Short, so that starvation loses leases.
TTL_S = 2
SPREAD_SEED = 1


class Pipeline:
    """One HTTP/1.1 connection with many requests under way."""

    def __init__(self, sock: socket.socket, host: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._host = host
        self._unsent = b""
        self._unread = b""

    def post(self, path: str, fields: Mapping[str, object]) -> None:
        """Send a request now, or as soon as the socket takes it."""
        body = json.dumps(fields, separators=(",", ":"))
        self._unsent += (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body)}\r\n\r\n"
            f"{body}"
        ).encode()
        self._flush()

    def answers(self, until_ns: int) -> list[dict[str, Any]]:
        """Return the answers that came, waiting for one at most until then (CLOCK_MONOTONIC).

        Raises: ConnectionError where etcd went away or answered with an error.
        """
        if not wait_readable([self._sock], until_ns):
            self._flush()
            return []
        data = self._sock.recv(65536)
        if not data:
            raise ConnectionError("etcd closed the connection")
        self._unread += data
        self._flush()
        found = []
        while (one := split_answer(self._unread)) is not None:
            status, body, self._unread = one
            if status != 200:
                raise ConnectionError(f"etcd answered {status}: {body.decode(errors='replace')}")
            found.append(json.loads(body))
        return found

    def _flush(self) -> None:
        if self._unsent:
            with contextlib.suppress(BlockingIOError):
                self._unsent = self._unsent[self._sock.send(self._unsent) :]


def split_answer(data: bytes) -> tuple[int, bytes, bytes] | None:
    """Return (status, body, what follows) of the first HTTP answer in `data`, None if not whole."""
    head, separator, rest = data.partition(b"\r\n\r\n")
    if not separator:
        return None
    status_line, *lines = head.split(b"\r\n")
    headers = {
        name.strip().lower(): value.strip().lower()
        for name, _, value in (line.partition(b":") for line in lines)
    }
    status = int(status_line.split(b" ", 2)[1])
    if headers.get(b"transfer-encoding") != b"chunked":
        size = int(headers.get(b"content-length", b"0"))
        return None if len(rest) < size else (status, rest[:size], rest[size:])
    body = b""
    while True:
        line, separator, rest = rest.partition(b"\r\n")
        if not separator:
            return None
        size = int(line.split(b";")[0], 16)
        if len(rest) < size + 2:
            return None
        body, rest = body + rest[:size], rest[size + 2 :]
        if not size:
            return status, body, rest


def is_alive(answer: Mapping[str, Any]) -> bool:
    """Return whether a keep-alive's answer says that the lease still lives. TTL 0 is left out."""
    return int(answer.get("result", {}).get("TTL", 0)) > 0


def count_lost(
    answered: Mapping[int, Sequence[tuple[int, bool]]], *, until_ns: int, ttl_ns: int
) -> int:
    """Return how many leases were lost to their holder.

    A lease is lost where etcd says so, and where no answer came for the length of
    its TTL: that is when etcd's own client gives it up (clientv3 lessor.deadlineLoop).

    Args:
        answered: lease → (time of the answer, alive), its grant first.
        until_ns: when the last keep-alives were sent.
    """
    lost = 0
    for answers in answered.values():
        times = [at for at, _ in answers]
        times.append(max(until_ns, times[-1]))
        gap_ns = max(b - a for a, b in itertools.pairwise(times))
        lost += gap_ns > ttl_ns or not all(alive for _, alive in answers)
    return lost


def lease_client(control: Control, config: dict[str, Any]) -> NoReturn:
    """Grant leases of 2 s, then send one keep-alive in every interval, the leases in turn.

    The samples are (send time in the window, round trip or None) in nanoseconds.
    """
    raise_priority()
    sock, congestion_control = connect(config["address"], config["port"])
    timetable = control.ready(congestion_control=congestion_control)
    leases = range(1, config["leases"] + 1)
    pipeline = Pipeline(sock, config["address"])
    for lease in leases:  # now, not before: they would expire while the others connect
        pipeline.post("/v3/lease/grant", {"TTL": TTL_S, "ID": lease})
    answered: dict[int, list[tuple[int, bool]]] = {}
    while len(answered) < len(leases):
        for grant in pipeline.answers(timetable.from_ns):
            answered[int(grant["ID"])] = [(time.monotonic_ns(), True)]
        if time.monotonic_ns() >= timetable.from_ns:
            raise TimeoutError(f"{len(answered)} of {len(leases)} leases granted in the warm-up")
    spread = random.Random(SPREAD_SEED)  # noqa: S311  (no secret)
    interval_ns = int(config["interval_us"]) * 1000
    waiting: collections.deque[tuple[int, int]] = collections.deque()  # lease, sent at
    samples: list[tuple[int, int | None]] = []

    def take_answers(until_ns: int) -> None:
        for answer in pipeline.answers(until_ns):
            got_ns = time.monotonic_ns()
            lease, sent_ns = waiting.popleft()
            answered[lease].append((got_ns, is_alive(answer)))
            if timetable.from_ns <= sent_ns < timetable.to_ns:
                samples.append((sent_ns - timetable.from_ns, got_ns - sent_ns))

    slot_ns = max(timetable.start_ns, time.monotonic_ns())
    sequence = 0
    while slot_ns < timetable.to_ns:
        when_ns = slot_ns + int(spread.random() * interval_ns)
        while time.monotonic_ns() < when_ns:
            take_answers(when_ns)
        lease = leases[sequence % len(leases)]
        waiting.append((lease, time.monotonic_ns()))
        pipeline.post("/v3/lease/keepalive", {"ID": lease})
        sequence += 1
        slot_ns += interval_ns
    while waiting and time.monotonic_ns() < timetable.stop_ns:
        take_answers(timetable.stop_ns)
    samples += [
        (sent_ns - timetable.from_ns, None)
        for _, sent_ns in waiting
        if timetable.from_ns <= sent_ns < timetable.to_ns
    ]
    lost = count_lost(answered, until_ns=timetable.to_ns, ttl_ns=TTL_S * 1_000_000_000)
    control.finish({"samples": samples, "leases": len(leases), "leases_lost": lost})
