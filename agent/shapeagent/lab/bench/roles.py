# SPDX-License-Identifier: Apache-2.0
"""Traffic of the benchmark, one process per role: `python -m …lab.bench.roles ROLE CONFIG`.

The probes disturb as little as they can: the source wakes once per probe, the
sink not at all until the end. The kernel stamps each probe on arrival, and the
stamps wait in the socket's buffer, so no delay contains a reader's wake-up.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import sys
import time
from typing import Any, NoReturn

from shapeagent.lab.bench.leases import lease_client
from shapeagent.lab.worker import (
    ROLES,
    Control,
    connect,
    family,
    listen,
    main,
    raise_priority,
    wait_readable,
)

PROBE = struct.Struct("!QQ")  # sequence, sent at (CLOCK_REALTIME, ns)
PROBE_PAYLOAD_BYTES = 50  # 92 bytes on Ethernet
# asm-generic/socket.h; Python names none of the three.
SO_RCVBUFFORCE = 33
SO_TIMESTAMPNS = 35
UDP_SEGMENT = 103  # linux/udp.h
PROBE_BUFFER_BYTES = 128 << 20
FLOOD_SEGMENTS = 4
RR_TIMEOUT_S = 5.0


def probe_source(control: Control, config: dict[str, Any]) -> NoReturn:
    """Send one datagram in every interval, at a random time within it.

    A fixed grid would meet the shaper's own period at the same few phases.
    """
    raise_priority()
    sock = socket.socket(family(config["address"]), socket.SOCK_DGRAM)
    sock.connect((config["address"], config["port"]))
    timetable = control.ready()
    interval_ns = int(config["interval_us"]) * 1000
    spread = random.Random(config["seed"])  # noqa: S311  (no secret)
    padding = bytes(PROBE_PAYLOAD_BYTES - PROBE.size)
    sent: list[tuple[int, int]] = []
    refused = 0
    slot_ns = timetable.start_ns
    sequence = 0
    while slot_ns < timetable.to_ns:
        when_ns = slot_ns + int(spread.random() * interval_ns)
        time.sleep(max(0, when_ns - time.monotonic_ns()) / 1e9)
        payload = PROBE.pack(sequence, time.clock_gettime_ns(time.CLOCK_REALTIME)) + padding
        try:
            sock.send(payload)
        except OSError:  # ENOBUFS: the queue dropped it
            refused += 1
        if timetable.from_ns <= when_ns < timetable.to_ns:
            sent.append((sequence, when_ns - timetable.from_ns))
        sequence += 1
        slot_ns += interval_ns
    control.finish({"sent": sent, "refused": refused})


def probe_sink(control: Control, config: dict[str, Any]) -> NoReturn:
    """Leave the probes in the socket until the end, then read each with its time of arrival."""
    sock = socket.socket(family(config["address"]), socket.SOCK_DGRAM)
    with contextlib.suppress(PermissionError):
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, PROBE_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    sock.bind((config["address"], config["port"]))
    sock.setblocking(False)
    timetable = control.ready()
    time.sleep(max(0, timetable.stop_ns - time.monotonic_ns()) / 1e9)
    samples = []
    with contextlib.suppress(BlockingIOError):
        while True:
            data, ancillary, _, _ = sock.recvmsg(2048, 64)
            sequence, sent_ns = PROBE.unpack_from(data)
            seconds, nanoseconds = struct.unpack("@qq", ancillary[0][2][:16])
            samples.append((sequence, seconds * 1_000_000_000 + nanoseconds - sent_ns))
    control.finish({"samples": samples})


def rr_server(control: Control, config: dict[str, Any]) -> NoReturn:
    """Answer each request on one TCP connection at once."""
    raise_priority()
    listener = listen(config["address"], config["port"])
    timetable = control.ready()
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answer = bytes(config["response_bytes"])
    unread = 0
    while time.monotonic_ns() < timetable.stop_ns:
        if wait_readable([sock], timetable.stop_ns):
            data = sock.recv(65536)
            if not data:
                break
            unread += len(data)
            while unread >= config["request_bytes"]:
                unread -= config["request_bytes"]
                sock.sendall(answer)
    control.finish({})


def rr_client(control: Control, config: dict[str, Any]) -> NoReturn:
    """Send a request every interval, or when the last answer came if that is later."""
    raise_priority()
    sock, congestion_control = connect(config["address"], config["port"])
    sock.settimeout(RR_TIMEOUT_S)
    timetable = control.ready(congestion_control=congestion_control)
    spread = random.Random(config["seed"])  # noqa: S311  (no secret)
    interval_ns = int(config["interval_us"]) * 1000
    request = bytes(config["request_bytes"])
    samples: list[tuple[int, int | None]] = []
    slot_ns = timetable.start_ns
    while slot_ns < timetable.to_ns:
        when_ns = slot_ns + int(spread.random() * interval_ns)
        time.sleep(max(0, when_ns - time.monotonic_ns()) / 1e9)
        sent_ns = time.monotonic_ns()
        delay_ns: int | None = None
        with contextlib.suppress(TimeoutError):
            sock.sendall(request)
            left = config["response_bytes"]
            while left:
                data = sock.recv(left)
                if not data:
                    raise ConnectionError("the server went away")
                left -= len(data)
            delay_ns = time.monotonic_ns() - sent_ns
        if timetable.from_ns <= sent_ns < timetable.to_ns:
            samples.append((sent_ns - timetable.from_ns, delay_ns))
        if delay_ns is None:
            break  # the connection is stuck; what follows would measure our timeout
        slot_ns = max(slot_ns + interval_ns, time.monotonic_ns())
    control.finish({"samples": samples})


def flood_source(control: Control, config: dict[str, Any]) -> NoReturn:
    """Send datagrams of a whole frame at a rate, whatever becomes of them."""
    sock = socket.socket(family(config["address"]), socket.SOCK_DGRAM)
    sock.connect((config["address"], config["port"]))
    payload_bytes = int(config["payload_bytes"])
    sock.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, payload_bytes)
    sock.setblocking(False)
    burst = bytes(payload_bytes * FLOOD_SEGMENTS)
    interval_ns = int(FLOOD_SEGMENTS * config["frame_bits"] * 1e9 / config["bits_per_s"])
    timetable = control.ready()
    next_ns = timetable.start_ns
    refused = 0
    while next_ns < timetable.stop_ns:
        time.sleep(max(0, next_ns - time.monotonic_ns()) / 1e9)
        try:
            sock.send(burst)
        except OSError:
            refused += 1
        next_ns += interval_ns
    control.finish({"refused": refused})


def flood_sink(control: Control, config: dict[str, Any]) -> NoReturn:
    """Hold the port open, so that nobody answers with ICMP errors, and read nothing."""
    sock = socket.socket(family(config["address"]), socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.bind((config["address"], config["port"]))
    timetable = control.ready()
    time.sleep(max(0, timetable.stop_ns - time.monotonic_ns()) / 1e9)
    control.finish({"pid": os.getpid()})


BENCH_ROLES = {
    **ROLES,
    "probe-source": probe_source,
    "probe-sink": probe_sink,
    "rr-server": rr_server,
    "rr-client": rr_client,
    "flood-source": flood_source,
    "flood-sink": flood_sink,
    "lease-client": lease_client,
}


if __name__ == "__main__":
    main(sys.argv, BENCH_ROLES)
