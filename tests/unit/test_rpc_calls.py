# SPDX-License-Identifier: Apache-2.0
"""Every method over a real socket: the good answer, and each bad request with its name."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from rpckit import (
    DEVICE,
    EXPLANATION,
    PLAN,
    FakeEngine,
    Service,
    code_of,
    refusal,
    serving,
    wait_for,
)

from shapeagent.client.remote import RemoteEngine
from shapeagent.model.errors import ConflictError, InputError, PrivilegeError
from shapeagent.model.reports import AttachRequest, ExplainRequest
from shapeagent.policy.packed import row_of
from shapeagent.policy.whitelist import LineDefaults, parse_entry
from shapeagent.proto.shapectl.v1 import policy_pb2, shaper_pb2, whitelist_pb2
from shapeagent.service.rpc.contracts import Role
from shapeagent.service.rpc.whitelist import MOST_UPLOADS

MERGE = whitelist_pb2.WHITELIST_MODE_MERGE
REPLACE = whitelist_pb2.WHITELIST_MODE_REPLACE


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def service(tmp_path: Path, engine: FakeEngine) -> Iterator[Service]:
    with serving(tmp_path, engine) as one:
        yield one


@pytest.fixture
def remote(service: Service) -> Iterator[RemoteEngine]:
    with service.remote(why="ticket 7") as one:
        yield one


def entries(*texts: str, **options: Any) -> list[Any]:
    defaults = LineDefaults(traffic_class="bulk", **options)
    return [parse_entry(text, defaults)[0] for text in texts]


# --- good


def test_looks_say_what_the_engine_says(remote: RemoteEngine, engine: FakeEngine) -> None:
    remote.hello()
    assert remote.status() == engine.status()
    assert remote.status(DEVICE) == engine.status(DEVICE)
    assert remote.class_list(DEVICE) == engine.status()[0].classes
    assert remote.plan_attach(AttachRequest(DEVICE)) == PLAN
    assert remote.residue(wait_s=0.5) == engine.residue()
    assert ("residue", 0.5) in engine.calls
    assert remote.policy() == engine.policy()
    request = ExplainRequest("10.0.0.5", "10.0.0.9", "udp", 5, None, "ingress", 46, 0xFFFFFFFF)
    assert remote.explain(DEVICE, request) == EXPLANATION
    assert ("explain", request) in engine.calls


def test_an_attach_arrives_as_it_was_asked_for(
    remote: RemoteEngine, engine: FakeEngine, service: Service, tmp_path: Path
) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("# ü\n")
    request = AttachRequest(
        DEVICE, str(path), None, "prio", 10_000_000, "police", 60.0, True, "3028", True,
        0xF0, 0x0F, True, 30.0, "clsact", True,
    )  # fmt: skip
    assert remote.attach(request).plan == PLAN
    ((name, found),) = engine.calls
    assert name == "attach"
    assert found.policy_text == "# ü\n", f"got {found}"
    assert found == AttachRequest(**{**_fields(request), "policy_text": "# ü\n"})
    (line,) = service.audit.lines
    assert (line.method, line.object, line.why, line.result) == (
        "/shapectl.v1.ShaperService/Attach", DEVICE, "ticket 7", "ok",
    )  # fmt: skip
    assert service.events.after(0)[0][0].kind == "attached"


def _fields(request: AttachRequest) -> dict[str, Any]:
    return {one.name: getattr(request, one.name) for one in dataclasses.fields(request)}


def test_a_bare_attach_leaves_every_choice_to_the_engine(
    remote: RemoteEngine, engine: FakeEngine
) -> None:
    remote.attach(AttachRequest(DEVICE))
    assert engine.calls == [("attach", AttachRequest(DEVICE))], f"got {engine.calls}"


def test_changes_answer_and_are_written_down(
    remote: RemoteEngine, engine: FakeEngine, service: Service
) -> None:
    assert remote.class_set(DEVICE, "bulk", 5_000_000, lease_s=2.5).name == "bulk"
    assert ("set_ceiling", (5_000_000, 2.5, "egress")) in engine.calls
    assert remote.confirm(DEVICE) == 12.5
    assert remote.set_policy(DEVICE, "x = 1", "mine.toml").plan == PLAN
    assert remote.detach(DEVICE, dry_run=True).steps == ("remove the filter",)
    assert remote.detach(DEVICE).changed
    lines = service.audit.lines
    assert [one.method.rpartition("/")[2] for one in lines] == [
        "SetClass", "Confirm", "SetPolicy", "Detach", "Detach",
    ]  # fmt: skip
    assert lines[0].object == f"{DEVICE} egress bulk", f"got {lines[0]}"
    assert (lines[0].old, lines[0].new) == ("20000000 bit/s", "5000000 bit/s for 2.5 s")
    assert lines[2].old.startswith("built-in"), f"got {lines[2]}"
    kinds = [one.kind for one in service.events.after(0)[0]]
    assert kinds == ["class-set", "confirmed", "policy-changed", "detached"], f"got {kinds}"


def test_whitelist_there_and_back(remote: RemoteEngine, engine: FakeEngine) -> None:
    wanted = [
        *entries("192.0.2.7", "192.0.2.0/24", "2001:db8::7", "2001:db8::/32", owner="o"),
        *entries("198.51.100.1,198.51.100.2", "2001:db8::1>2001:db8::2", reason="ü"),
        *entries("203.0.113.0/25 match=source expires=@99999999999"),
        *entries("203.0.113.128/25 match=either class=signal"),
    ]
    change = remote.whitelist_add(DEVICE, wanted)
    assert (change.added, change.total, change.generation) == (8, 8, 1)
    assert set(engine.rows()) == {row_of(one) for one in wanted}
    assert remote.whitelist_list(DEVICE) == tuple(engine.rows())
    assert remote.whitelist_remove(DEVICE, wanted[:2]).removed == 2
    change = remote.whitelist_replace(DEVICE, wanted[:3], expected_generation=2)
    assert (change.total, change.generation) == (3, 3)
    with pytest.raises(ConflictError) as caught:
        remote.whitelist_replace(DEVICE, [], expected_generation=2)
    assert caught.value.reference == "generation-differs"


def hosts(count: int, **fields: Any) -> list[Any]:
    template = entries("10.0.0.0")[0]
    return [
        dataclasses.replace(
            template, destination=((0x0A000000 + n).to_bytes(4, "big"), 32), **fields
        )
        for n in range(count)
    ]


def test_many_entries_go_as_a_stream(
    remote: RemoteEngine, engine: FakeEngine, service: Service
) -> None:
    """C103: a list that no single message holds."""
    count = 70_000
    change = remote.whitelist_import(DEVICE, hosts(count))
    assert change.total == count
    assert engine.names() == ["whitelist_apply"], f"got {engine.names()}, want one change"
    (line,) = service.audit.lines
    assert line.method.endswith("StreamWhitelist")
    assert line.entries == count
    assert len(line.digest) == 64
    listed = remote.whitelist_list(DEVICE)
    assert len(listed) == count
    assert len({row.destination for row in listed}) == count


def test_many_small_groups_go_as_a_stream(remote: RemoteEngine, engine: FakeEngine) -> None:
    """A reason of its own for each of few entries is more than a message holds."""
    many = [dataclasses.replace(one, reason=f"{n:0>400}") for n, one in enumerate(hosts(9_000))]
    assert remote.whitelist_add(DEVICE, many).total == 9_000
    assert engine.names() == ["whitelist_apply"], f"got {engine.names()}"
    assert {row.reason for row in engine.rows()} == {one.reason for one in many}


def test_adding_and_removing_is_one_change(service: Service, engine: FakeEngine) -> None:
    with service.remote() as remote:
        remote.whitelist_add(DEVICE, entries("10.0.0.1", "10.0.0.2"))
    request = update(
        add_texts=[whitelist_pb2.WhitelistTexts(group=group(), entries=["10.0.0.3"])],
        remove_texts=[
            whitelist_pb2.WhitelistTexts(
                group=whitelist_pb2.WhitelistGroup(), entries=["10.0.0.1/32"]
            )
        ],
    )
    call(
        service, "WhitelistService/UpdateWhitelist", request, whitelist_pb2.UpdateWhitelistResponse
    )
    assert engine.names() == ["whitelist_apply"] * 2
    left = sorted(row.destination or "" for row in engine.rows())
    assert left == ["10.0.0.2", "10.0.0.3"], f"got {left}"


def test_captures_are_explained_packet_by_packet(
    remote: RemoteEngine, engine: FakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "one.pcap"
    path.write_bytes(b"capture")
    found = list(remote.explain_pcap(DEVICE, path, "egress"))
    assert found == [EXPLANATION] * 250, f"got {len(found)}"
    assert ("explain_pcap", b"capture") in engine.calls


def test_a_text_with_host_bits_gives_a_notice(service: Service) -> None:
    request = whitelist_pb2.UpdateWhitelistRequest(
        request_id="a", device=DEVICE, mode=MERGE,
        add_texts=[whitelist_pb2.WhitelistTexts(group=group(), entries=["192.0.2.67/24"])],
    )  # fmt: skip
    answer = call(
        service, "WhitelistService/UpdateWhitelist", request, whitelist_pb2.UpdateWhitelistResponse
    )
    assert list(answer.change.notices) == ["192.0.2.67/24 has host bits: stored as 192.0.2.0/24"]


# --- bad


def group(**options: Any) -> whitelist_pb2.WhitelistGroup:
    return whitelist_pb2.WhitelistGroup(traffic_class="bulk", **options)


def call(service: Service, method: str, request: Any, answer: Any, *, role: Any = None) -> Any:
    with service.channel(role or Role.ADMIN) as channel:
        multi = channel.unary_unary(
            f"/shapectl.v1.{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return multi(request, timeout=10)


def update(**options: Any) -> Any:
    fields = {"request_id": "a", "device": DEVICE, "mode": MERGE, **options}
    return whitelist_pb2.UpdateWhitelistRequest(**fields)


def batch(**options: Any) -> whitelist_pb2.WhitelistBatch:
    options.setdefault("group", group())
    return whitelist_pb2.WhitelistBatch(**options)


def attach(**options: Any) -> Any:
    spec = shaper_pb2.AttachSpec(**{"device": DEVICE, **options})
    return shaper_pb2.AttachRequest(request_id="a", spec=spec)


PAIR = whitelist_pb2.WhitelistGroup(traffic_class="bulk", match=4)  # type: ignore[arg-type]
NAN = float("nan")
BAD = [
    ("ShaperService/Attach", attach(device=""), "device-missing"),
    ("ShaperService/Attach", attach(device="a/../b"), "no-such-device"),
    ("ShaperService/Attach", attach(device="x" * 16), "no-such-device"),
    ("ShaperService/Attach", attach(profile=99), "bad-request"),
    ("ShaperService/Attach", attach(ingress=99), "bad-request"),
    ("ShaperService/Attach", attach(hook=99), "bad-request"),
    ("ShaperService/Attach", attach(link_rate_bits_per_s=0), "link-rate-out-of-range"),
    ("ShaperService/Attach", attach(link_rate_bits_per_s=1 << 63), "link-rate-out-of-range"),
    ("ShaperService/Attach", attach(ingress_lease_s=NAN), "bad-lease"),
    ("ShaperService/Attach", attach(segment_limit="12"), "segment-limit"),
    ("ShaperService/Attach", attach(policy_text="#" * ((1 << 20) + 1)), "policy-too-large"),
    ("ShaperService/Attach", shaper_pb2.AttachRequest(spec=attach().spec), "request-id-missing"),
    (
        "ShaperService/Attach",
        shaper_pb2.AttachRequest(request_id="a b", spec=attach().spec),
        "bad-request-id",
    ),
    (
        "ShaperService/Attach",
        shaper_pb2.AttachRequest(request_id="x" * 65, spec=attach().spec),
        "bad-request-id",
    ),
    (
        "ShaperService/Attach",
        shaper_pb2.AttachRequest(request_id="a", spec=attach().spec, why="w" * 501),
        "why-too-long",
    ),
    ("ShaperService/PlanAttach", shaper_pb2.PlanAttachRequest(), "device-missing"),
    ("ShaperService/Detach", shaper_pb2.DetachRequest(request_id="a"), "device-missing"),
    ("ShaperService/Detach", shaper_pb2.DetachRequest(device=DEVICE), "request-id-missing"),
    ("ShaperService/Confirm", shaper_pb2.ConfirmRequest(request_id="a"), "device-missing"),
    ("ShaperService/GetStatus", shaper_pb2.GetStatusRequest(device="gone"), "not-attached"),
    ("ShaperService/GetStatus", shaper_pb2.GetStatusRequest(netns="other"), "needs-root-cli"),
    ("ShaperService/Explain", shaper_pb2.ExplainRequest(), "device-missing"),
    ("ShaperService/Explain", shaper_pb2.ExplainRequest(device=DEVICE, dscp=64), "dscp-range"),
    (
        "ShaperService/Explain",
        shaper_pb2.ExplainRequest(device=DEVICE, source_port=65_536),
        "bad-port",
    ),
    (
        "ShaperService/Explain",
        shaper_pb2.ExplainRequest(device=DEVICE, direction=7),  # type: ignore[arg-type]
        "bad-request",
    ),
    (
        "ShaperService/SetClass",
        shaper_pb2.SetClassRequest(request_id="a", device=DEVICE, class_name="none"),
        "no-such-class",
    ),
    ("ShaperService/GetResidue", shaper_pb2.GetResidueRequest(wait_s=NAN), "bad-wait"),
    ("ShaperService/GetResidue", shaper_pb2.GetResidueRequest(wait_s=11), "bad-wait"),
    ("PolicyService/GetPolicy", policy_pb2.GetPolicyRequest(device="gone"), "not-attached"),
    ("PolicyService/SetPolicy", policy_pb2.SetPolicyRequest(request_id="a"), "device-missing"),
    (
        "PolicyService/SetPolicy",
        policy_pb2.SetPolicyRequest(request_id="a", device=DEVICE, source="s" * 201),
        "bad-request",
    ),
    ("WhitelistService/UpdateWhitelist", update(mode=0), "mode-missing"),
    ("WhitelistService/UpdateWhitelist", update(device=""), "device-missing"),
    ("WhitelistService/UpdateWhitelist", update(request_id=""), "request-id-missing"),
    ("WhitelistService/UpdateWhitelist", update(add=[batch(hosts4=b"12345")]), "whitelist-invalid"),
    ("WhitelistService/UpdateWhitelist", update(add=[batch(pairs4=bytes(8))]), "whitelist-invalid"),
    (
        "WhitelistService/UpdateWhitelist",
        update(add=[batch(group=PAIR, hosts4=bytes(4))]),
        "whitelist-invalid",
    ),
    (
        "WhitelistService/UpdateWhitelist",
        update(add=[whitelist_pb2.WhitelistBatch(hosts4=bytes(4))]),
        "bad-group",
    ),
    (
        "WhitelistService/UpdateWhitelist",
        update(add=[batch(group=group(owner="o" * 501), hosts4=bytes(4))]),
        "bad-group",
    ),
    (
        "WhitelistService/UpdateWhitelist",
        update(add=[batch(group=group(expires_unix_s=NAN), hosts4=bytes(4))]),
        "bad-group",
    ),
    (
        "WhitelistService/UpdateWhitelist",
        update(add=[batch(group=group(expires_unix_s=1.0), hosts4=bytes(4))]),
        "whitelist-invalid",
    ),
    (
        "WhitelistService/UpdateWhitelist",
        update(mode=REPLACE, remove=[batch(hosts4=bytes(4))]),
        "bad-request",
    ),
    (
        "WhitelistService/ListWhitelist",
        whitelist_pb2.ListWhitelistRequest(device=DEVICE, page_size=10_001),
        "bad-page",
    ),
    (
        "WhitelistService/UpdateWhitelist",
        update(add_texts=[whitelist_pb2.WhitelistTexts(group=group(), entries=["x"])]),
        "whitelist-invalid",
    ),
]


@pytest.mark.parametrize(
    ("method", "request_", "reference"),
    BAD,
    ids=[f"{method.partition('/')[2]}-{reference}" for method, _, reference in BAD],
)
def test_bad_requests_are_named_and_change_nothing(
    service: Service, engine: FakeEngine, method: str, request_: Any, reference: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(service, method, request_, shaper_pb2.AttachResponse)
    found = refusal(caught.value)
    assert found.reference == reference, f"got {found.reference}: {found.message}"
    assert code_of(caught.value) in {
        "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "ABORTED",
    }  # fmt: skip
    changed = {"attach", "detach", "confirm", "set_policy", "set_ceiling"}
    assert not changed & set(engine.names()), f"got {engine.names()}"
    assert engine.generation == 0, f"got a whitelist of {engine.generation} changes"
    assert service.audit.open == 0, "got a ticket that never ended"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"prefixes4": b"\x18\xc0\x00\x02\x43"}, "192.0.2.67/24 has host bits"),  # C61
        ({"prefixes4": b"\x21\xc0\x00\x02\x00"}, "192.0.2.0/33: the prefix length"),  # C71
        ({"prefixes6": b"\x81" + bytes(16)}, "::/129: the prefix length"),
        ({"hosts6": bytes(10) + b"\xff\xff\xc0\x00\x02\x05"}, "is IPv4"),  # C63
        ({"prefixes6": b"\x78" + bytes(10) + b"\xff\xff\xc0\x00\x02\x00"}, "is IPv4"),
    ],
)
def test_items_that_are_not_canonical_are_named(
    service: Service, engine: FakeEngine, data: dict[str, bytes], words: str
) -> None:
    good = batch(hosts4=bytes(400))
    with pytest.raises(grpc.RpcError) as caught:
        call(
            service,
            "WhitelistService/UpdateWhitelist",
            update(add=[good, batch(**data)]),
            whitelist_pb2.UpdateWhitelistResponse,
        )
    found = refusal(caught.value)
    assert found.reference == "whitelist-invalid"
    assert found.details[0].startswith("batch 2 item 0: "), f"got {found.details}"
    assert words in found.details[0], f"got {found.details}"
    assert engine.generation == 0, f"got {engine.names()}"


def test_the_first_twenty_bad_items_of_many(service: Service, engine: FakeEngine) -> None:
    bad = b"".join(b"\x18\xc0\x00" + bytes((n, 1)) for n in range(100))
    with pytest.raises(grpc.RpcError) as caught:
        call(
            service,
            "WhitelistService/UpdateWhitelist",
            update(add=[batch(prefixes4=bad)]),
            whitelist_pb2.UpdateWhitelistResponse,
        )
    found = refusal(caught.value)
    assert found.message.startswith("100 items"), f"got {found.message}"
    assert len(found.details) == 21, f"got {len(found.details)}"
    assert found.details[-1] == "... and 80 more"
    assert engine.generation == 0, f"got {engine.names()}"


# --- streams of batches


def stream(service: Service, *parts: Any) -> Any:
    with service.channel(Role.OPERATOR) as channel:
        multi = channel.stream_unary(
            "/shapectl.v1.WhitelistService/StreamWhitelist",
            request_serializer=whitelist_pb2.StreamWhitelistRequest.SerializeToString,
            response_deserializer=whitelist_pb2.StreamWhitelistResponse.FromString,
        )
        return multi(iter(parts), timeout=20)


Part = whitelist_pb2.StreamWhitelistRequest
BEGIN = Part(begin=Part.Begin(request_id="s", device=DEVICE, mode=REPLACE))
HOSTS = Part(batches=Part.Batches(add=[batch(hosts4=bytes(range(8)))]))


def commit(entries: int) -> Any:
    return Part(commit=Part.Commit(entries=entries))


@pytest.mark.parametrize(
    ("parts", "reference"),
    [
        ((), "commit-missing"),
        ((HOSTS,), "begin-missing"),
        ((BEGIN, HOSTS), "commit-missing"),
        ((BEGIN, HOSTS, BEGIN, commit(2)), "bad-request"),
        ((BEGIN, HOSTS, Part(), commit(2)), "bad-request"),
        ((BEGIN, HOSTS, commit(3)), "entries-differ"),
        ((BEGIN, HOSTS, commit(2), HOSTS), "bad-request"),
        ((Part(begin=Part.Begin(device=DEVICE, mode=REPLACE)),), "request-id-missing"),
    ],
    ids=lambda one: one if isinstance(one, str) else str(len(one)),
)
def test_streams_that_are_not_whole_change_nothing(
    service: Service, engine: FakeEngine, parts: tuple[Any, ...], reference: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stream(service, *parts)
    assert refusal(caught.value).reference == reference
    assert not engine.names(), f"got {engine.names()}"


def test_a_stream_is_bounded_in_bytes_and_in_entries(service: Service, engine: FakeEngine) -> None:
    wide = Part(batches=Part.Batches(add=[batch(hosts6=bytes(4_000_000))]))
    narrow = Part(batches=Part.Batches(add=[batch(hosts4=bytes(4_000_000))]))
    with pytest.raises(grpc.RpcError) as caught:
        stream(service, BEGIN, *[narrow] * 3)
    assert refusal(caught.value).reference == "stream-too-large"
    with pytest.raises(grpc.RpcError) as caught:
        stream(service, BEGIN, *[wide] * 17)
    assert refusal(caught.value).reference == "stream-too-large"
    assert code_of(caught.value) == "RESOURCE_EXHAUSTED"
    assert not engine.names()


def test_a_stream_that_is_cut_off_changes_nothing(service: Service, engine: FakeEngine) -> None:
    reached = threading.Event()

    def parts() -> Iterator[Any]:
        yield BEGIN
        yield HOSTS
        reached.set()
        threading.Event().wait(10)

    with service.channel() as channel:
        multi = channel.stream_unary(
            "/shapectl.v1.WhitelistService/StreamWhitelist",
            request_serializer=Part.SerializeToString,
        )
        pending = multi.future(parts(), timeout=20)
        assert reached.wait(5)
        pending.cancel()
        with pytest.raises(grpc.FutureCancelledError):
            pending.result(5)
    answer = stream(service, BEGIN, HOSTS, commit(2))
    assert answer.change.total == 2
    assert engine.names() == ["whitelist_apply"], f"got {engine.names()}"


def test_streams_beyond_a_few_wait_for_their_turn(service: Service, engine: FakeEngine) -> None:
    """What is held in memory is bounded; whoever waits is served once another has ended."""
    go_on = threading.Event()

    def slow(number: int) -> Iterator[Any]:
        yield Part(begin=Part.Begin(request_id=f"slow-{number}", device=DEVICE, mode=REPLACE))
        go_on.wait(20)
        yield HOSTS
        yield commit(2)

    with service.channel(Role.OPERATOR) as channel:
        multi = channel.stream_unary(
            "/shapectl.v1.WhitelistService/StreamWhitelist",
            request_serializer=Part.SerializeToString,
            response_deserializer=whitelist_pb2.StreamWhitelistResponse.FromString,
        )
        held = [multi.future(slow(n), timeout=30) for n in range(MOST_UPLOADS)]
        uploads = service.servers._whitelist._uploads
        wait_for(lambda: uploads._value == 0, "every place to be taken")
        with pytest.raises(grpc.RpcError) as caught:
            multi(iter([BEGIN, HOSTS, commit(2)]), timeout=0.5)
        assert code_of(caught.value) in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
        waiting = multi.future(iter([BEGIN, HOSTS, commit(2)]), timeout=30)
        assert engine.generation == 0
        go_on.set()
        for one in (*held, waiting):
            one.result(30)
    assert engine.generation == MOST_UPLOADS + 1


# --- privileges


def test_what_the_agent_may_not_needs_root(remote: RemoteEngine, engine: FakeEngine) -> None:
    engine.raises = PrivilegeError("missing-capability", "CAP_SYS_ADMIN is missing.")
    with pytest.raises(PrivilegeError) as caught:
        remote.residue()
    assert caught.value.reference == "needs-root-cli"
    assert "CAP_SYS_ADMIN" in caught.value.message
    with pytest.raises(PrivilegeError) as caught:
        remote.attach(AttachRequest(DEVICE))
    assert caught.value.reference == "needs-root-cli"


def test_errors_of_the_engine_arrive_whole(remote: RemoteEngine, engine: FakeEngine) -> None:
    engine.raises = InputError("policy-invalid", "Two errors.", hint="h", details=("a", "b"))
    with pytest.raises(InputError) as caught:
        remote.attach(AttachRequest(DEVICE))
    assert caught.value.as_dict() == engine.raises.as_dict()


def test_a_fault_shows_no_traceback(
    remote: RemoteEngine, engine: FakeEngine, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    engine.raises = ZeroDivisionError("secret /path")
    with pytest.raises(Exception, match="A fault in the agent") as caught:
        remote.status()
    assert "secret" not in str(caught.value), f"got {caught.value}"
    assert "secret" in caplog.text, "got nothing in the log, want the traceback"
    with pytest.raises(Exception, match="A fault in the agent"):
        remote.detach(DEVICE)
    assert service.audit.lines[-1].result == "internal", f"got {service.audit.lines[-1]}"


def test_digest_names_what_was_streamed(service: Service) -> None:
    stream(service, BEGIN, HOSTS, commit(2))
    (line,) = service.audit.lines
    inner = hashlib.sha256(HOSTS.batches.add[0].SerializeToString(deterministic=True)).digest()
    assert line.digest == hashlib.sha256(b"+" + inner).hexdigest()
    assert line.object == f"{DEVICE} whitelist"
