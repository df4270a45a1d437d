# SPDX-License-Identifier: Apache-2.0
"""One traffic generator, run as its own process inside a lab namespace.

`python -m shapeagent.lab.worker ROLE CONFIG` prints one JSON line when it is
connected, waits for one line with the timetable (CLOCK_MONOTONIC nanoseconds,
which all namespaces of a host share), does its traffic and prints one JSON line
with what it saw. It ends at once when its standard input closes, so that it
cannot outlive the process that started it. Standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import select
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

HEARTBEAT = struct.Struct("!QQQ")  # sequence, sent at, arrived at the server at (ns)
HEARTBEAT_BYTES = 64
TCP_PROBE, UDP_PROBE = "tcp", "udp"

# One streamed token of vLLM is one TCP segment of 288 bytes on Ethernet: 222 bytes of SSE
# behind 66 of headers (measured, docs/traffic.md).
TOKEN_BYTES = 222
_CHUNK_HEAD = b'data: {"i":'
_CHUNK_FORMAT = '%03d,"seq":%010d,"t":%020d,"choices":[{"index":0,"delta":{"content":"token"}}]'
_CHUNK_FOOT = b"}\n\n"
_STREAM_AT = len(_CHUNK_HEAD)
_SEQUENCE_AT = _STREAM_AT + 3 + len(',"seq":')
_SENT_AT = _SEQUENCE_AT + 10 + len(',"t":')

# Offsets in struct tcp_info (include/uapi/linux/tcp.h): bytes_received, data_segs_in.
TCP_INFO_BYTES = 160
_BYTES_RECEIVED_AT = 128
_DATA_SEGMENTS_IN_AT = 152

BULK_WRITE_BYTES = 256 * 1024
SINK_LOW_WATER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Timetable:
    """When to begin, which part counts, and when to stop waiting; CLOCK_MONOTONIC ns."""

    start_ns: int
    from_ns: int
    to_ns: int
    stop_ns: int


class Control:
    """The line to the parent: says ready, waits for the timetable, dies with the parent."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str] = queue.Queue()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        for line in sys.stdin:
            self._lines.put(line)
        os._exit(0)

    def finish(self, result: dict[str, object]) -> NoReturn:
        """Print `result` and wait to be ended, from inside the role.

        Its sockets must stay open: the peers may still be at work.
        """
        self.say(result)
        self._watcher.join()
        os._exit(0)

    def ready(self, **facts: object) -> Timetable:
        """Return the timetable, after telling the parent that this worker is connected."""
        self.say({"ready": True, **facts})
        return Timetable(**json.loads(self._lines.get()))

    def say(self, message: dict[str, object]) -> None:
        """Print one JSON line."""
        sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
        sys.stdout.flush()


def token_payload(stream: int, sequence: int, sent_ns: int) -> bytes:
    """Return one token of `TOKEN_BYTES` that looks like a chat completion chunk."""
    body = _CHUNK_HEAD + (_CHUNK_FORMAT % (stream, sequence, sent_ns)).encode()
    return body.ljust(TOKEN_BYTES - len(_CHUNK_FOOT)) + _CHUNK_FOOT


def parse_token(token: bytes) -> tuple[int, int, int]:
    """Return (stream, sequence, sent at ns) of a token that `token_payload` made."""
    return (
        int(token[_STREAM_AT : _STREAM_AT + 3]),
        int(token[_SEQUENCE_AT : _SEQUENCE_AT + 10]),
        int(token[_SENT_AT : _SENT_AT + 20]),
    )


def raise_priority() -> str:
    """Return how this process is scheduled now, after asking for the best there is.

    Probes measure the network, not the scheduler of a busy small machine. It is
    the same in every run that is compared.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
        return "fifo"
    with contextlib.suppress(OSError):
        os.nice(-10)
        return "nice -10"
    return "normal"


def prefer_cubic(sock: socket.socket) -> str:
    """Return the socket's congestion control, cubic wherever the kernel has it."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.split(b"\0", 1)[0].decode()


def family(address: str) -> socket.AddressFamily:
    """Return the address family of a textual address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen(address: str, port: int) -> socket.socket:
    """Return a listening TCP socket whose connections use cubic."""
    listener = socket.socket(family(address), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    prefer_cubic(listener)  # accepted sockets inherit it
    listener.bind((address, port))
    listener.listen(64)
    return listener


def connect(address: str, port: int) -> tuple[socket.socket, str]:
    """Return a connected TCP socket without Nagle, and its congestion control."""
    sock = socket.socket(family(address), socket.SOCK_STREAM)
    congestion_control = prefer_cubic(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(10)
    sock.connect((address, port))
    return sock, congestion_control


def wait_readable(read: list[socket.socket], until_ns: int) -> list[socket.socket]:
    """Return those that can be read, waiting for one at most until then (CLOCK_MONOTONIC)."""
    left_s = max(0, until_ns - time.monotonic_ns()) / 1e9
    return select.select(read, [], [], left_s)[0]


def heartbeat_server(control: Control, config: dict[str, Any]) -> NoReturn:
    """Answer each heartbeat at once, over UDP and one TCP connection."""
    scheduling = raise_priority()
    address = config["address"]
    listener = listen(address, config["tcp_port"])
    udp = socket.socket(family(address), socket.SOCK_DGRAM)
    udp.bind((address, config["udp_port"]))
    timetable = control.ready(scheduling=scheduling)
    tcp, _ = listener.accept()
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answered = 0
    buffer = b""
    while time.monotonic_ns() < timetable.stop_ns:
        for sock in wait_readable([udp, tcp], timetable.stop_ns):
            if sock is udp:
                request, peer = udp.recvfrom(2048)
                udp.sendto(_answer(request, time.monotonic_ns()), peer)
                answered += 1
                continue
            data = tcp.recv(65536)
            now_ns = time.monotonic_ns()
            if not data:
                raise ConnectionError("the heartbeat client went away")
            buffer += data
            whole = len(buffer) // HEARTBEAT_BYTES
            for index in range(whole):
                request = buffer[index * HEARTBEAT_BYTES : (index + 1) * HEARTBEAT_BYTES]
                tcp.sendall(_answer(request, now_ns))
            answered += whole
            buffer = buffer[whole * HEARTBEAT_BYTES :]
    control.finish({"answered": answered})


def _answer(request: bytes, now_ns: int) -> bytes:
    sequence, sent_ns, _ = HEARTBEAT.unpack_from(request)
    return HEARTBEAT.pack(sequence, sent_ns, now_ns).ljust(HEARTBEAT_BYTES, b".")


def heartbeat_client(control: Control, config: dict[str, Any]) -> NoReturn:
    """Send a heartbeat every interval, by turns over TCP and UDP, whatever comes back.

    The loop is open: a late answer delays no later request, so that a full
    queue is met by as many probes as an empty one.
    """
    scheduling = raise_priority()
    address = config["address"]
    tcp, congestion_control = connect(address, config["tcp_port"])
    tcp.setblocking(False)
    udp = socket.socket(family(address), socket.SOCK_DGRAM)
    udp.connect((address, config["udp_port"]))
    udp.setblocking(False)
    timetable = control.ready(scheduling=scheduling, congestion_control=congestion_control)
    interval_ns = int(config["interval_us"]) * 1000
    next_ns = timetable.start_ns
    sequence = 0
    sent: dict[int, tuple[str, int]] = {}
    answers: dict[int, tuple[int, int]] = {}
    unsent = b""
    unread = b""
    while True:
        now_ns = time.monotonic_ns()
        if next_ns <= now_ns and next_ns < timetable.to_ns:
            probe = TCP_PROBE if sequence % 2 == 0 else UDP_PROBE
            sent_ns = time.monotonic_ns()
            request = HEARTBEAT.pack(sequence, sent_ns, 0).ljust(HEARTBEAT_BYTES, b".")
            if probe == TCP_PROBE:
                unsent += request
                unsent = unsent[_send_some(tcp, unsent) :]
            else:
                with contextlib.suppress(BlockingIOError):
                    udp.send(request)
            sent[sequence] = (probe, sent_ns)
            sequence += 1
            next_ns += interval_ns
            continue
        if now_ns >= timetable.stop_ns:
            break
        until_ns = min(next_ns, timetable.stop_ns) if next_ns < timetable.to_ns else None
        for sock in wait_readable([udp, tcp], until_ns or timetable.stop_ns):
            data = sock.recv(65536)
            got_ns = time.monotonic_ns()
            if sock is tcp:
                unread += data
                whole = len(unread) // HEARTBEAT_BYTES * HEARTBEAT_BYTES
                data, unread = unread[:whole], unread[whole:]
                unsent = unsent[_send_some(tcp, unsent) :]
            for at in range(0, len(data), HEARTBEAT_BYTES):
                answered, _, arrived_ns = HEARTBEAT.unpack_from(data, at)
                answers[answered] = (got_ns, arrived_ns)
    samples = []
    for number, (probe, sent_ns) in sent.items():
        if timetable.from_ns <= sent_ns < timetable.to_ns:
            got = answers.get(number)
            samples.append(
                [number, probe, sent_ns - timetable.from_ns]
                + ([None, None] if got is None else [got[0] - sent_ns, got[1] - sent_ns])
            )
    control.finish({"samples": samples})


def _send_some(sock: socket.socket, data: bytes) -> int:
    try:
        return sock.send(data) if data else 0
    except BlockingIOError:
        return 0


def stream_server(control: Control, config: dict[str, Any]) -> NoReturn:
    """Write one token to each client every step, back to back, as a decode step does."""
    scheduling = raise_priority()
    listener = listen(config["address"], config["port"])
    timetable = control.ready(scheduling=scheduling)
    clients = []
    for _ in range(config["streams"]):
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        clients.append(client)
    step_ns = int(1e9 / config["tokens_per_s"])
    next_ns = timetable.start_ns
    sequence = 0
    counted = 0
    while next_ns < timetable.to_ns:
        wait_readable([], next_ns)
        if time.monotonic_ns() < next_ns:
            continue
        for stream, client in enumerate(clients):
            sent_ns = time.monotonic_ns()
            client.sendall(token_payload(stream, sequence, sent_ns))
            counted += timetable.from_ns <= sent_ns < timetable.to_ns
        sequence += 1
        next_ns += step_ns
    # The connections stay open: what is still queued has until `stop` to arrive.
    wait_readable([], timetable.stop_ns)
    control.finish({"sent": counted})


def stream_client(control: Control, config: dict[str, Any]) -> NoReturn:
    """Read the token streams and note each token's one-way delay."""
    scheduling = raise_priority()
    clients = []
    congestion_control = ""
    for _ in range(config["streams"]):
        client, congestion_control = connect(config["address"], config["port"])
        client.setblocking(False)
        clients.append(client)
    timetable = control.ready(scheduling=scheduling, congestion_control=congestion_control)
    unread = dict.fromkeys(clients, b"")
    samples = []
    while time.monotonic_ns() < timetable.stop_ns:
        for client in wait_readable(list(unread), timetable.stop_ns):
            data = client.recv(65536)
            got_ns = time.monotonic_ns()
            if not data:
                del unread[client]
                continue
            data = unread[client] + data
            whole = len(data) // TOKEN_BYTES * TOKEN_BYTES
            unread[client] = data[whole:]
            for at in range(0, whole, TOKEN_BYTES):
                stream, sequence, sent_ns = parse_token(data[at : at + TOKEN_BYTES])
                if timetable.from_ns <= sent_ns < timetable.to_ns:
                    samples.append(
                        [sequence, stream, sent_ns - timetable.from_ns, got_ns - sent_ns]
                    )
    samples.sort(key=lambda sample: sample[2])
    control.finish({"samples": samples})


def bulk_source(control: Control, config: dict[str, Any]) -> NoReturn:
    """Keep every flow's send buffer full until the end.

    `zero_copy` sends from the page cache, so that a small machine has CPU left for the
    network; flows then keep about half as much in an unshaped queue (45 ms of 92, demo).
    """
    flows = []
    congestion_control = ""
    for _ in range(config["flows"]):
        sock, congestion_control = connect(config["address"], config["port"])
        # Enough for the path at 100 ms and more, without megabytes that outlast the run.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, BULK_WRITE_BYTES)
        sock.setblocking(False)
        flows.append(sock)
    timetable = control.ready(congestion_control=congestion_control)
    chunk = memoryview(bytes(BULK_WRITE_BYTES))
    source = os.memfd_create("bulk")
    os.ftruncate(source, BULK_WRITE_BYTES)
    while (left_ns := timetable.stop_ns - time.monotonic_ns()) > 0:
        for sock in select.select([], flows, [], left_ns / 1e9)[1]:
            with contextlib.suppress(BlockingIOError):
                if config["zero_copy"]:
                    os.sendfile(sock.fileno(), source, 0, BULK_WRITE_BYTES)
                else:
                    sock.send(chunk)
    control.finish({})


def bulk_sink(control: Control, config: dict[str, Any]) -> NoReturn:
    """Discard what arrives and count, per flow, bytes and segments of the window."""
    listener = listen(config["address"], config["port"])
    timetable = control.ready()
    flows = []
    for _ in range(config["flows"]):
        sock, _ = listener.accept()
        # Fewer wake-ups on a small machine; the acknowledgements do not wait for us.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, SINK_LOW_WATER_BYTES)
        sock.setblocking(False)
        flows.append(sock)
    buffer = bytearray(1 << 20)
    readings: list[tuple[int, list[tuple[int, int]]]] = []
    for until_ns in (timetable.from_ns, timetable.to_ns, timetable.stop_ns):
        while time.monotonic_ns() < until_ns:
            for sock in wait_readable(flows, until_ns):
                # MSG_TRUNC: TCP drops the data instead of copying it (tcp(7)).
                if not sock.recv_into(buffer, 0, socket.MSG_TRUNC):
                    flows.remove(sock)
        readings.append((time.monotonic_ns(), [_tcp_counts(sock) for sock in flows]))
    (from_ns, begin), (to_ns, end) = readings[0], readings[1]
    if len(begin) != len(end):
        raise RuntimeError("a bulk flow ended inside the window")
    per_flow = [[b[0] - a[0], b[1] - a[1]] for a, b in zip(begin, end, strict=True)]
    control.finish({"elapsed_ns": to_ns - from_ns, "flows": per_flow})


def _tcp_counts(sock: socket.socket) -> tuple[int, int]:
    """Return (payload bytes, data segments) that this socket has received."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    return (
        struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)[0],
        struct.unpack_from("=I", info, _DATA_SEGMENTS_IN_AT)[0],
    )


ROLES: dict[str, Callable[[Control, dict[str, Any]], NoReturn]] = {
    "heartbeat-server": heartbeat_server,
    "heartbeat-client": heartbeat_client,
    "stream-server": stream_server,
    "stream-client": stream_client,
    "bulk-source": bulk_source,
    "bulk-sink": bulk_sink,
}


def main(
    argv: list[str], roles: dict[str, Callable[[Control, dict[str, Any]], NoReturn]] = ROLES
) -> NoReturn:
    """Run one of `roles`, then wait to be ended: the peers may still be at work."""
    role, config = argv[1], json.loads(argv[2])
    gc.disable()  # a collection in the middle of a run would be measured as delay
    control = Control()
    try:
        roles[role](control, config)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # Not sys.exit: the watcher sits in a read of stdin, which an orderly exit waits for.
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv)
