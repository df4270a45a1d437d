# SPDX-License-Identifier: Apache-2.0
"""Leases of the lease-storm: which are lost, and how etcd's answers are cut apart."""

from __future__ import annotations

import json
import socket

import pytest

from shapeagent.lab.bench.leases import Pipeline, count_lost, is_alive, split_answer

S = 1_000_000_000
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'2b\r\n{"result":{"header":{},"ID":"7","TTL":"2"}}\r\n0\r\n\r\n'
)
PLAIN = b'HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"ID":"7"}'


@pytest.mark.parametrize("answer", [CHUNKED, PLAIN])
def test_an_answer_is_taken_only_when_it_is_whole(answer: bytes) -> None:
    for end in range(len(answer)):
        assert split_answer(answer[:end]) is None, f"got an answer after {end} bytes"
    whole = split_answer(answer + b"HTTP/1.1 ")
    assert whole is not None
    status, body, rest = whole
    assert (status, rest) == (200, b"HTTP/1.1 ")
    assert "7" in str(json.loads(body))


def test_pipelined_answers_come_in_order() -> None:
    here, there = socket.socketpair()
    with here, there:
        pipeline = Pipeline(here, "host")
        pipeline.post("/v3/lease/keepalive", {"ID": 7})
        assert there.recv(1000).endswith(b'Content-Length: 8\r\n\r\n{"ID":7}')
        there.sendall(CHUNKED + PLAIN + CHUNKED[:20])
        answers = pipeline.answers(10**18)
        assert [("result" in answer) for answer in answers] == [True, False]
        there.sendall(CHUNKED[20:])
        assert len(pipeline.answers(10**18)) == 1


def test_an_error_of_etcd_is_no_answer() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"HTTP/1.1 503 no\r\nContent-Length: 2\r\n\r\nno")
        with pytest.raises(ConnectionError, match="503: no"):
            Pipeline(here, "host").answers(10**18)


def test_ttl_zero_is_left_out_and_means_lost() -> None:
    assert is_alive({"result": {"ID": "7", "TTL": "2"}})
    assert not is_alive({"result": {"ID": "7"}})
    assert not is_alive({"result": {"ID": "7", "TTL": "0"}})


def test_a_lease_is_lost_by_etcds_word_or_by_silence() -> None:
    answered = {
        1: [(0, True), (1 * S, True), (2 * S, True)],
        2: [(0, True), (1 * S, False), (2 * S, True)],  # etcd says so
        3: [(0, True), (2 * S + 1, True), (3 * S, True)],  # no answer for more than its TTL
        4: [(0, True)],  # never answered again
    }
    assert count_lost(answered, until_ns=4 * S, ttl_ns=2 * S) == 3
    assert count_lost({1: answered[1]}, until_ns=4 * S, ttl_ns=2 * S) == 0
    assert count_lost({1: answered[1]}, until_ns=4 * S + 1, ttl_ns=2 * S) == 1
