# SPDX-License-Identifier: Apache-2.0
"""Whatever a client sends, it gets a status with a name, and the servers go on.

Requests are made from the descriptors, so a field or method that is added is
tried too. Answers of the API are never UNKNOWN, and INTERNAL only for a fault.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rpckit import DEVICE, FakeEngine, Service, code_of, refusal, serving

from shapeagent.model.types import EntryKind
from shapeagent.proto.shapectl.v1 import whitelist_pb2
from shapeagent.service.rpc.contracts import Role
from shapeagent.service.rpc.server import SERVICES

METHODS = [(service.full_name, method) for service in SERVICES for method in service.methods]
_IDS = [method.name for _, method in METHODS]
_QUIET = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

#: What a request often needs to get past the first check.
_USUAL: dict[str, st.SearchStrategy[str]] = {
    "device": st.just(DEVICE),
    "request_id": st.builds(lambda: secrets.token_hex(8)),
    "class_name": st.just("bulk"),
    "traffic_class": st.just("bulk"),
    "netns": st.just(""),
    "entries": st.just("192.0.2.7"),
}
#: And what else the good ones have.
_NEEDED = {"spec", "mode", "add", "add_texts", "group", "hosts4", "prefixes6"}
_INTS = {  # FieldDescriptor.TYPE_UINT32, TYPE_UINT64
    13: (0, (1 << 32) - 1),
    4: (0, (1 << 64) - 1),
}
_SIZES = {one.value: one.key_bytes for one in EntryKind}


def values(field: Any, tame: bool) -> st.SearchStrategy[Any]:
    """Return a strategy for one value of a field; a tame one could be meant."""
    usual = _USUAL.get(field.name)
    if field.message_type is not None:
        return messages(field.message_type, tame)
    if field.type == field.TYPE_STRING:
        return usual if usual is not None and tame else st.text(max_size=40)
    if field.type == field.TYPE_BYTES:
        size = _SIZES.get(field.name, 1)
        whole = st.lists(st.binary(min_size=size, max_size=size), max_size=4).map(b"".join)
        return whole if tame else st.binary(max_size=70)
    if field.type == field.TYPE_BOOL:
        return st.booleans()
    if field.type == field.TYPE_DOUBLE:
        return st.one_of(st.floats(), st.floats(0, 1e10))
    if field.type == field.TYPE_ENUM:
        return st.integers(1, 2) if tame else st.integers(-1, 8)
    return st.integers(*_INTS[field.type])


def is_set(draw: st.DrawFn, field: Any, tame: bool) -> bool:
    """Return whether a message has a field; a tame one has only what it needs."""
    if not tame:
        return draw(st.booleans())
    return field.name in _USUAL or field.name in _NEEDED


def messages(descriptor: Any, tame: bool) -> st.SearchStrategy[Any]:
    """Return a strategy for messages of a type."""
    message_type = GetMessageClass(descriptor)

    @st.composite
    def build(draw: st.DrawFn) -> Any:
        message = message_type()
        for field in descriptor.fields:
            if field.containing_oneof is not None and len(field.containing_oneof.fields) > 1:
                continue
            if not is_set(draw, field, tame):
                continue
            if field.is_repeated:
                for one in draw(st.lists(values(field, tame), max_size=3)):
                    _append(message, field, one)
            elif field.message_type is not None:
                getattr(message, field.name).CopyFrom(draw(values(field, tame)))
            else:
                setattr(message, field.name, draw(values(field, tame)))
        for choice in descriptor.oneofs:
            if len(choice.fields) > 1:
                field = draw(st.sampled_from(list(choice.fields)))
                getattr(message, field.name).CopyFrom(draw(values(field, tame)))
        return message

    return build()


def requests_of(descriptor: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for requests, tame and wild."""
    return st.one_of(messages(descriptor, True), messages(descriptor, False))


def _append(message: Any, field: Any, value: Any) -> None:
    target = getattr(message, field.name)
    if field.message_type is not None:
        target.add().CopyFrom(value)
    else:
        target.append(value)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, engine: FakeEngine) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("fuzz"), engine) as one:
        yield one


@pytest.fixture(scope="module")
def channel(service: Service) -> Iterator[Any]:
    with service.channel(Role.ADMIN) as one:
        yield one


def send(channel: Any, path: str, method: Any, parts: list[bytes]) -> str:
    """Return the status code of a call with these requests."""
    kind = "stream_" if method.client_streaming else "unary_"
    kind += "stream" if method.server_streaming else "unary"
    multi = getattr(channel, kind)(path)
    argument = iter(parts) if method.client_streaming else parts[0]
    try:
        answer = multi(argument, timeout=10)
        if method.server_streaming:
            next(answer, None)
            answer.cancel()
        return "OK"
    except grpc.RpcError as error:
        code, named = code_of(error), refusal(error)
    assert code not in {"UNKNOWN", "INTERNAL", "DEADLINE_EXCEEDED"}, f"got {code}: {named}"
    assert named.reference not in {"agent-failed", "internal"}, f"got {named.reference}: {named}"
    return code


@pytest.mark.parametrize(("name", "method"), METHODS, ids=_IDS)
def test_messages_of_the_right_type(service: Service, channel: Any, name: str, method: Any) -> None:
    path = f"/{name}/{method.name}"

    @_QUIET
    @given(st.lists(requests_of(method.input_type), min_size=1, max_size=4))
    def run(requests: list[Any]) -> None:
        send(channel, path, method, [one.SerializeToString() for one in requests])

    run()
    assert service.audit.open == 0, "got a ticket that never ended"
    with service.remote() as remote:
        remote.hello()
        remote.status()


@pytest.mark.parametrize(("name", "method"), METHODS, ids=_IDS)
def test_bytes_of_any_kind(service: Service, channel: Any, name: str, method: Any) -> None:
    path = f"/{name}/{method.name}"

    @_QUIET
    @given(st.lists(st.binary(max_size=200), min_size=1, max_size=3))
    def run(parts: list[bytes]) -> None:
        send(channel, path, method, parts)

    run()
    with service.remote() as remote:
        remote.status()


def test_the_fuzz_gets_past_the_first_check(
    service: Service, channel: Any, engine: FakeEngine
) -> None:
    """A fuzz whose every request is refused at the door would show nothing."""
    del engine.calls[:]

    def try_method(path: str, method: Any) -> None:
        @_QUIET
        @given(requests_of(method.input_type))
        def run(request: Any) -> None:
            send(channel, path, method, [request.SerializeToString()])

        run()

    for name, method in METHODS:
        try_method(f"/{name}/{method.name}", method)
    reached = set(engine.names())
    wanted = {"attach", "detach", "confirm", "status", "explain", "session", "policy", "set_policy"}
    wanted |= {"whitelist_apply", "whitelist_page", "residue", "plan_attach", "explain_pcap"}
    assert wanted <= reached, f"got {wanted - reached} never called"


_BATCHES = requests_of(whitelist_pb2.DESCRIPTOR.message_types_by_name["WhitelistBatch"])


@_QUIET
@given(st.lists(_BATCHES, max_size=4), st.booleans(), st.booleans())
def test_streams_that_are_whole(
    channel: Any, engine: FakeEngine, batches: list[Any], replaces: bool, commits: bool
) -> None:
    part = whitelist_pb2.StreamWhitelistRequest
    modes = whitelist_pb2.WhitelistMode
    mode = modes.WHITELIST_MODE_REPLACE if replaces else modes.WHITELIST_MODE_MERGE
    count = sum(len(getattr(one, kind)) // size for one in batches for kind, size in _SIZES.items())
    parts = [
        part(begin=part.Begin(request_id=secrets.token_hex(8), device=DEVICE, mode=mode)),
        part(batches=part.Batches(add=batches)),
    ]
    if commits:
        parts.append(part(commit=part.Commit(entries=count)))
    before = engine.generation
    method = next(one for _, one in METHODS if one.name == "StreamWhitelist")
    path = "/shapectl.v1.WhitelistService/StreamWhitelist"
    code = send(channel, path, method, [one.SerializeToString() for one in parts])
    assert commits or code == "INVALID_ARGUMENT", f"got {code} without a commit"
    assert (engine.generation > before) <= (code == "OK"), f"got a change that ended in {code}"
