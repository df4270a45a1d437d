# SPDX-License-Identifier: Apache-2.0
"""Limits: sizes, deadlines, streams that stall, readers that do not read, health and reflection."""

from __future__ import annotations

import dataclasses
import functools
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from rpckit import DEVICE, FakeEngine, Service, code_of, refusal, serving, wait_for

from shapeagent.client import channel as client_channel
from shapeagent.client.remote import RemoteEngine
from shapeagent.model.errors import PrivilegeError
from shapeagent.proto.shapectl.v1 import event_pb2, shaper_pb2, whitelist_pb2
from shapeagent.service.rpc import events as rpc_events
from shapeagent.service.rpc import guard, server
from shapeagent.service.rpc.contracts import Caller, FixedRole, Role
from shapeagent.service.rpc.server import SERVICE_NAMES
from shapeagent.service.rpc.watchdog import Watchdog
from shapeagent.telemetry.events import EventLog

STATUS = "/shapectl.v1.ShaperService/GetStatus"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def seen() -> list[tuple[str, str, float]]:
    return []


@pytest.fixture
def service(
    tmp_path: Path, engine: FakeEngine, seen: list[tuple[str, str, float]]
) -> Iterator[Service]:
    def observe(method: str, code: str, seconds: float) -> None:
        seen.append((method, code, seconds))

    with serving(tmp_path, engine, observe=observe) as one:
        yield one


def watch(service: Service, channel: Any, **options: Any) -> Any:
    method = channel.unary_stream(
        "/shapectl.v1.EventService/WatchEvents",
        request_serializer=event_pb2.WatchEventsRequest.SerializeToString,
        response_deserializer=event_pb2.WatchEventsResponse.FromString,
    )
    return method(event_pb2.WatchEventsRequest(**options), timeout=60)


# --- one request


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x02\xc3\x28"])
def test_bytes_that_are_no_message(service: Service, engine: FakeEngine, data: bytes) -> None:
    with service.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(STATUS)(data, timeout=5)
    assert code_of(caught.value) == "INVALID_ARGUMENT"
    assert refusal(caught.value).reference == "malformed-request"
    assert not engine.calls


def test_no_request_at_all(service: Service) -> None:
    with service.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(STATUS)(iter(()), timeout=5)
    assert refusal(caught.value).reference == "request-missing"


def test_an_oversized_message_is_refused(service: Service, engine: FakeEngine) -> None:
    request = shaper_pb2.ExplainCaptureRequest(device=DEVICE, capture=bytes(5 << 20))
    with service.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        next(
            channel.unary_stream("/shapectl.v1.ShaperService/ExplainCapture")(
                request.SerializeToString(), timeout=10
            )
        )
    assert code_of(caught.value) == "RESOURCE_EXHAUSTED"
    found = refusal(caught.value)
    assert (found.reference, found.exit_code) == ("message-too-large", 2), f"got {found.message}"
    assert not engine.calls
    with service.remote() as remote:
        remote.status()  # and it goes on


def test_oversized_metadata_is_refused(service: Service) -> None:
    with service.channel() as channel:
        with pytest.raises(grpc.RpcError):
            channel.unary_unary(STATUS)(b"", timeout=5, metadata=(("x", "y" * 100_000),))
        channel.unary_unary(STATUS)(b"", timeout=5)


def test_a_deadline_ends_a_call(service: Service, engine: FakeEngine) -> None:
    engine.hold.clear()
    began_s = time.monotonic()
    with service.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(STATUS)(b"", timeout=0.3)
    took_s = time.monotonic() - began_s
    engine.hold.set()
    assert code_of(caught.value) == "DEADLINE_EXCEEDED"
    assert took_s < 5, f"got {took_s} s"


def test_a_call_without_a_deadline_gets_one(
    service: Service, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "DEFAULT_TIMEOUT_S", 0.4)
    engine.hold.clear()
    with service.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(STATUS)(b"")
    engine.hold.set()
    assert code_of(caught.value) in {"CANCELLED", "DEADLINE_EXCEEDED"}


def test_an_upload_that_stalls_is_cut_off(
    service: Service, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "/shapectl.v1.WhitelistService/StreamWhitelist"
    monkeypatch.setattr(guard, "TIMEOUTS_S", {method: 0.4})
    stalled = threading.Event()

    def parts() -> Iterator[bytes]:
        begin = whitelist_pb2.StreamWhitelistRequest.Begin(
            request_id="s", device=DEVICE, mode=whitelist_pb2.WHITELIST_MODE_MERGE
        )
        yield whitelist_pb2.StreamWhitelistRequest(begin=begin).SerializeToString()
        stalled.wait(20)

    with service.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(method)(parts())
    stalled.set()
    assert code_of(caught.value) == "CANCELLED"
    assert not engine.calls


def test_calls_are_observed(service: Service, seen: list[tuple[str, str, float]]) -> None:
    with service.channel(Role.OBSERVER) as channel:
        channel.unary_unary(STATUS)(b"", timeout=5)
        for path in ("/shapectl.v1.ShaperService/Attach", "/a/random-name-1"):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(path)(b"", timeout=5)
    wait_for(lambda: len(seen) == 3, "three calls to be observed")
    assert [one[:2] for one in seen] == [
        (STATUS, "OK"),
        ("/shapectl.v1.ShaperService/Attach", "PERMISSION_DENIED"),
        ("unknown", "UNIMPLEMENTED"),  # a name that a caller makes up is no label
    ]
    assert all(0 < seconds < 5 for _, _, seconds in seen)


def test_a_flood_of_connections_costs_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F27: each socket has a limit of its own, and silence keeps nobody waiting."""
    limits = dict(server.OPTIONS) | {"grpc.max_allowed_incoming_connections": 64}
    monkeypatch.setattr(server, "OPTIONS", tuple(limits.items()))
    silent: list[socket.socket] = []
    with serving(tmp_path, FakeEngine()) as service:
        path = service.address(Role.OBSERVER).target.removeprefix("unix:")
        before = len(list(Path("/proc/self/fd").iterdir()))
        try:
            for _ in range(200):
                one = socket.socket(socket.AF_UNIX)
                silent.append(one)
                one.connect(path)

            def held() -> int:
                return len(list(Path("/proc/self/fd").iterdir())) - before - len(silent)

            wait_for(lambda: held() >= 60, "the first connections to be taken")
            with service.remote(Role.ADMIN) as remote:
                began_s = time.monotonic()
                remote.hello()
                remote.status()
                assert time.monotonic() - began_s < 2
                assert held() < 64 + 20, f"got {held()} descriptors for 200 connections"
        finally:
            for one in silent:
                one.close()


def test_garbage_on_the_socket(service: Service) -> None:
    path = service.address().target.removeprefix("unix:")
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 40,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n",
    ):
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(path)
            one.sendall(data)
    with service.remote() as remote:
        remote.status()


# --- streams


def test_events_come_as_they_happen_and_go_on_where_they_were(service: Service) -> None:
    service.events.add("attached", "eth1", "before")
    with service.channel(Role.OBSERVER) as channel:
        stream = watch(service, channel)
        first = next(stream)
        assert first.run_id
        assert not first.HasField("event"), f"got {first}"
        service.events.add("attached", "eth2", "one", generation="3")
        service.events.add("detached", "eth2", "two")
        found = [next(stream).event for _ in range(2)]
        stream.cancel()
        assert [one.text for one in found] == ["one", "two"]
        assert dict(found[0].details) == {"generation": "3"}
        again = watch(service, channel, after_sequence=found[0].sequence, run_id=first.run_id)
        assert next(again).lost == 0
        assert next(again).event.text == "two"
        again.cancel()
        other_run = watch(service, channel, after_sequence=99, run_id="another")
        next(other_run)
        assert next(other_run).event.text == "before"
        other_run.cancel()
        some = watch(service, channel, kinds=["detached"], device="eth2", after_sequence=0)
        next(some)
        assert next(some).event.text == "two"
        some.cancel()


def test_what_is_no_longer_kept_is_counted(service: Service) -> None:
    with service.channel(Role.OBSERVER) as channel:
        stream = watch(service, channel)
        run_id = next(stream).run_id
        stream.cancel()
        for number in range(5_000):
            service.events.add("x", "", str(number))
        again = watch(service, channel, after_sequence=100, run_id=run_id)
        assert next(again).lost == 5_000 - 4_096 - 100
        assert next(again).event.text == str(5_000 - 4_096)
        again.cancel()


def test_a_reader_that_is_overtaken_is_cut_off_with_a_status(service: Service) -> None:
    text = "x" * 20_000
    with service.channel(Role.OBSERVER) as channel:
        stream = watch(service, channel)
        next(stream)
        ended = threading.Event()

        def write() -> None:
            while not ended.is_set():
                service.events.add("x", "", text)
                time.sleep(0.00005)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            # the pipe between us is full long before the log has overtaken the reader
            wait_for(lambda: service.events.last > 12_000, "many events", 60)
            with pytest.raises(grpc.RpcError) as caught:
                for _ in stream:
                    pass
        finally:
            ended.set()
            writer.join()
    assert code_of(caught.value) == "RESOURCE_EXHAUSTED"
    assert refusal(caught.value).reference == "slow-client"
    with service.remote(Role.OBSERVER) as remote:
        remote.status()


def test_a_reader_that_never_reads_frees_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = functools.partial(guard.Guard, stall_s=0.5, max_streams=1)
    monkeypatch.setattr(server, "Guard", short)
    events = EventLog()
    with serving(tmp_path, FakeEngine(), events=events) as service:
        with service.channel(Role.OBSERVER) as channel:
            stream = watch(service, channel)
            next(stream)

            def other_is_admitted() -> bool:
                for _ in range(20):  # until no buffer between us takes any more
                    events.add("x", "", "y" * 20_000)
                with service.channel(Role.OBSERVER) as other:
                    second = watch(service, other)
                    try:
                        next(second)
                    except grpc.RpcError as error:
                        refused.add(refusal(error).reference)
                        return False
                    second.cancel()
                    return True

            refused: set[str] = set()
            assert not other_is_admitted(), "got two streams, want the place to be taken"
            wait_for(other_is_admitted, "the place of the reader that never reads", 15)
            assert refused == {"too-many-streams"}, f"got {refused}"
            with pytest.raises(grpc.RpcError) as caught:
                for _ in stream:
                    pass
        assert code_of(caught.value) in {"CANCELLED", "RESOURCE_EXHAUSTED"}


def test_streams_are_limited_and_calls_are_not(service: Service) -> None:
    with service.channel(Role.OBSERVER) as channel:
        streams = [watch(service, channel) for _ in range(guard.MAX_STREAMS)]
        for one in streams:
            next(one)
        with pytest.raises(grpc.RpcError) as caught:
            next(watch(service, channel))
        assert code_of(caught.value) == "RESOURCE_EXHAUSTED"
        assert refusal(caught.value).reference == "too-many-streams"
        channel.unary_unary(STATUS)(b"", timeout=5)
        for one in streams:
            one.cancel()

        def has_room() -> bool:
            one = watch(service, channel)
            try:
                next(one)
            except grpc.RpcError:
                return False
            one.cancel()
            return True

        wait_for(has_room, "the places of streams that were cancelled")


def test_a_stream_ends_when_its_caller_may_no_longer(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate that ends, or a role that is taken away, while a stream lasts."""
    monkeypatch.setattr(rpc_events, "ASK_EVERY_S", 0.1)
    is_trusted = True
    trusted = FixedRole.authenticate

    def authenticate(self: FixedRole, context: Any) -> Caller:
        if not is_trusted:
            raise PrivilegeError("client-certificate-expired", "It has ended.")
        return trusted(self, context)

    monkeypatch.setattr(FixedRole, "authenticate", authenticate)
    with service.channel(Role.OBSERVER) as channel:
        stream = watch(service, channel)
        next(stream)
        is_trusted = False
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
    assert code_of(caught.value) == "PERMISSION_DENIED"
    assert refusal(caught.value).reference == "client-certificate-expired"
    assert service.audit.denials[-1].result == "client-certificate-expired"


def test_the_whitelist_is_watched_by_generation(service: Service) -> None:
    with service.channel(Role.OBSERVER) as channel, service.remote() as remote:
        method = channel.unary_stream(
            "/shapectl.v1.WhitelistService/WatchWhitelist",
            request_serializer=whitelist_pb2.WatchWhitelistRequest.SerializeToString,
            response_deserializer=whitelist_pb2.WatchWhitelistResponse.FromString,
        )
        stream = method(whitelist_pb2.WatchWhitelistRequest(device=DEVICE), timeout=20)
        assert next(stream).generation == 0
        remote.whitelist_replace(DEVICE, [])
        service.events.add("whitelist-changed", "other", "", generation="9", total="9")
        remote.whitelist_replace(DEVICE, [])
        assert [next(stream).generation for _ in range(2)] == [1, 2]
        stream.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            next(method(whitelist_pb2.WatchWhitelistRequest(device="gone"), timeout=5))
        assert refusal(caught.value).reference == "not-attached"


# --- health and reflection


def test_health_answers_and_is_watched(service: Service) -> None:
    words = health_pb2.HealthCheckResponse
    with service.channel(Role.OBSERVER) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        name = "shapectl.v1.ShaperService"
        for one in ("", name):
            assert stub.Check(health_pb2.HealthCheckRequest(service=one), timeout=5).status == (
                words.SERVING
            )
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="x"), timeout=5)
        assert code_of(caught.value) == "NOT_FOUND"
        stream = stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=20)
        assert next(stream).status == words.SERVING
        service.servers.set_serving(False)
        assert next(stream).status == words.NOT_SERVING
        service.servers.set_serving(True)
        assert next(stream).status == words.SERVING
        stream.cancel()


def test_reflection_names_every_service_and_its_file(service: Service) -> None:
    with service.channel(Role.OBSERVER) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert set(database.get_services()) == set(SERVICE_NAMES)
        found = database.FindFileContainingSymbol("shapectl.v1.WhitelistService")
        assert found.name == "shapectl/v1/whitelist.proto"
        methods = {one.name for one in found.service[0].method}
        assert "StreamWhitelist" in methods


def test_an_agent_that_hangs_is_named_with_its_pid(service: Service, engine: FakeEngine) -> None:
    """F36: the servers answer, the writer does not: the daemon then says NOT_SERVING."""
    service.servers.set_serving(False)
    with service.remote() as remote, pytest.raises(Exception, match="does not answer") as caught:
        remote.hello()
    assert getattr(caught.value, "exit_code", None) == 1
    local = dataclasses.replace(service.address(), pid=4711)
    one = RemoteEngine(local)
    with pytest.raises(Exception, match="4711") as caught:
        one.hello()
    one.close()
    assert getattr(caught.value, "exit_code", None) == 5


# --- keep-alive


def test_a_client_may_ping_more_often_than_ours_does() -> None:
    """C110: the server's least interval is below that of our client, and of others' 10 s."""
    ours, theirs = dict(server.OPTIONS), dict(client_channel.OPTIONS)
    assert ours["grpc.http2.min_ping_interval_without_data_ms"] < 10_000
    assert theirs["grpc.keepalive_time_ms"] > 10_000


@pytest.mark.slow
@pytest.mark.host
def test_a_client_that_pings_every_ten_seconds_is_not_cut_off(service: Service) -> None:
    """C110: the default would end the connection at the third ping, with GOAWAY."""
    options = (
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit, as in clients of other languages
    )
    states: list[grpc.ChannelConnectivity] = []
    with grpc.insecure_channel(service.address().target, options=options) as channel:
        channel.unary_unary(STATUS)(b"", timeout=5)
        stream = watch(service, channel)  # nothing is sent on it: only pings are
        next(stream)
        channel.subscribe(states.append)
        ended = threading.Event()
        stream.add_done_callback(lambda _: ended.set())
        assert not ended.wait(45), f"got {stream.code()} after pings, want the stream to last"
        channel.unary_unary(STATUS)(b"", timeout=5)
        stream.cancel()
    lost = [one for one in states if one is grpc.ChannelConnectivity.TRANSIENT_FAILURE]
    assert not lost, f"got {states}"


# --- the watchdog


def test_the_watchdog_calls_back_in_order_and_forgets_what_ended() -> None:
    dog = Watchdog()
    called: list[int] = []
    events = [threading.Event() for _ in range(3)]

    def ring(number: int) -> None:
        called.append(number)
        events[number].set()

    with dog.limit(0.2, lambda: ring(0)), dog.limit(0.05, lambda: ring(1)):
        with dog.limit(0.1, lambda: ring(2)):
            pass
        assert events[0].wait(5)
    assert called == [1, 0], f"got {called}"
    dog.close()


def test_the_watchdog_keeps_little_of_many_calls() -> None:
    dog = Watchdog()
    with ThreadPoolExecutor(4) as pool:

        def many() -> None:
            for _ in range(5_000):
                with dog.limit(60, lambda: None):
                    pass

        for one in [pool.submit(many) for _ in range(4)]:
            one.result()
    assert len(dog._heap) < 200, f"got {len(dog._heap)}"
    assert not dog._callbacks
    dog.close()
