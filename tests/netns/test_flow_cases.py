# SPDX-License-Identifier: Apache-2.0
"""Cases about payload and about several writers, end to end.

The program reads no payload: no cut header, lucky byte pattern or TLS record can change a class,
and these tests hold that down for the parsers that are to come.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from enginekit import BULK, SIGNAL_TCP, Bench, TcpFlow, entry, open_socket, wait_until

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

HTTP2_FRAME = bytes.fromhex("000004010400000001")
TLS_RECORDS = b"\x17\x03\x03\x00\x40" + bytes(range(64))


@contextlib.contextmanager
def connection(one: Bench, port: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give both ends of a TCP connection to the peer; each send is a segment."""
    pair = one.pair
    nodelay = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    flow = TcpFlow(pair.netns, pair.peer_netns, pair.peer_address4, port, options=nodelay)
    flow.receiver.settimeout(5)
    try:
        yield flow.sender, flow.receiver
    finally:
        flow.sender.close()
        flow.receiver.close()


def talk(ends: tuple[socket.socket, socket.socket], *parts: bytes) -> None:
    """Send each part in a segment of its own, and read it at the other end."""
    sender, receiver = ends
    for part in parts:
        sender.sendall(part)
        left = len(part)
        while left:
            left -= len(receiver.recv(left))


def grown(one: Bench, before: dict[str, int]) -> Counter[str]:
    """Return how much each class grew; 0 for one that no packet was in."""
    return Counter(one.packets()) - Counter(before)


@pytest.mark.parametrize(
    "parts",
    [
        (b"AIRC\x01", bytes(11)),
        (b"da", b'ta: {"token": "x"}\n\n'),
        (HTTP2_FRAME[:4], HTTP2_FRAME[4:]),
    ],
    ids=["airc-5+11", "sse", "http2-4+5"],
)
def test_a_header_cut_by_segmentation_changes_no_class(
    bench: Callable[..., Bench], parts: tuple[bytes, ...]
) -> None:
    """C13: a half header never demotes a known signalling flow."""
    one = bench()
    one.attach()
    with connection(one, SIGNAL_TCP) as ends:
        talk(ends, b"hello")
        before = one.packets()
        talk(ends, *parts * 10)
        got = grown(one, before)
    assert got["signal"] >= 20, f"got {got}, want every segment in signal"
    assert got["normal"] == got["bulk"] == got["stream"] == 0, f"got {got}, want signal alone"


def test_a_connection_older_than_attach_is_known_by_its_port(bench: Callable[..., Bench]) -> None:
    """C14: its preface was never seen."""
    one = bench()
    with connection(one, SIGNAL_TCP) as ends:
        talk(ends, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", HTTP2_FRAME)
        one.attach()
        before = one.packets()
        talk(ends, *[HTTP2_FRAME] * 10)
        got = grown(one, before)
    assert got["signal"] >= 10, f"got {got}, want the old connection in signal"
    assert got["normal"] == got["bulk"] == 0, f"got {got}, want signal alone"


def test_no_byte_pattern_promotes_bulk(bench: Callable[..., Bench]) -> None:
    """C14: frame headers of HTTP/2 and AIRC inside bulk, and random payloads."""
    one = bench()
    one.attach()
    generator = random.Random(14)
    payloads = [HTTP2_FRAME + bytes(40), b"AIRC\x01" + bytes(40), b"data: x\n\n"]
    payloads += [generator.randbytes(generator.randrange(16, 1200)) for _ in range(2000)]
    pair = one.pair
    with connection(one, BULK) as ends:
        talk(ends, b"first")
        before = one.packets()
        talk(ends, *payloads[:300])
        got = grown(one, before)
    assert got["bulk"] >= 300, f"got {got}, want all in bulk"
    assert got["stream"] == 0, f"got {got}, want none promoted"
    assert got["signal"] <= 2, f"got {got}, want no more than what ARP and ND send meanwhile"
    with (
        contextlib.closing(open_socket(pair.peer_netns)) as sink,
        contextlib.closing(open_socket(pair.netns)) as source,
    ):
        sink.bind(("0.0.0.0", BULK))
        source.connect((pair.peer_address4, BULK))
        before = one.packets()
        for payload in payloads:
            source.send(payload)
        got = grown(one, before)
    assert got["bulk"] == len(payloads), f"got {got}, want {len(payloads)} in bulk"
    assert got["signal"] == got["stream"] == 0, f"got {got}, want none promoted"


def test_tls_is_decided_by_port_and_whitelist(bench: Callable[..., Bench]) -> None:
    """C15: what lies in TLS records says nothing about the flow."""
    one = bench()
    one.attach()
    with connection(one, 8443) as ends:
        before = one.packets()
        talk(ends, *[TLS_RECORDS] * 10)
        got = grown(one, before)
        assert got["normal"] >= 10, f"got {got}, want the default class"
        one.engine.whitelist_add(one.device, [entry(one.pair.peer_address4, "stream")])
        before = one.packets()
        talk(ends, *[TLS_RECORDS] * 10)
        got = grown(one, before)
        assert got["stream"] >= 10, f"got {got}, want the whitelist's class"
        assert got["normal"] == 0, f"got {got}, want the running flow to follow"


@pytest.mark.parametrize("kind", ["hosts", "prefixes"])
def test_four_writers_lose_none_of_each_others_entries(
    bench: Callable[..., Bench], kind: str
) -> None:
    """C73: updates of the tries take turns; the runner of VMs looks for splats."""
    one = bench()
    one.attach()
    writers, each = 4, 12
    failures: list[BaseException] = []
    texts = [
        [
            f"198.51.{writer}.{number}"
            if kind == "hosts"
            else f"10.{writer}.{number}.0/{17 + number}"
            for number in range(each)
        ]
        for writer in range(writers)
    ]

    def write(own: list[str]) -> None:
        try:
            for text in own:
                one.engine.whitelist_add(one.device, [entry(text, "bulk")])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(own,)) for own in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, f"got {failures}, want every addition to succeed"
    assert not any(thread.is_alive() for thread in threads), "got a writer that hangs"
    listed = one.engine.whitelist_list(one.device)
    assert len(listed) == writers * each, f"got {len(listed)} entries, want {writers * each}"
    wait_until(lambda: one.status().problems == (), "no problems in status")
