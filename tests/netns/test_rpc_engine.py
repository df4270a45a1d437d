# SPDX-License-Identifier: Apache-2.0
"""The API with the real engine behind it: what a call changes is in the kernel, or nothing is."""

from __future__ import annotations

import dataclasses
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from enginekit import MBIT, Bench
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rpckit import Service, code_of, refusal, serving

from shapeagent.client.remote import RemoteEngine
from shapeagent.model.errors import ConflictError, InputError
from shapeagent.model.reports import AttachRequest, ExplainRequest
from shapeagent.policy.builtin import default_policy_text
from shapeagent.policy.whitelist import LineDefaults, parse_entry
from shapeagent.proto.shapectl.v1 import shaper_pb2
from shapeagent.service.frames import build_frame
from shapeagent.service.rpc.contracts import Role

pytestmark = [
    pytest.mark.host,
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]


@dataclasses.dataclass
class Host:
    """An attached device, the servers before its engine, and a client of each role."""

    one: Bench
    service: Service
    admin: RemoteEngine
    operator: RemoteEngine

    @property
    def device(self) -> str:
        return self.one.device

    def attach(self, **options: Any) -> Any:
        self.one.before = self.one.before or self.one.glance()
        options.setdefault("link_rate_bits_per_s", 100 * MBIT)
        options.setdefault("hook", self.one.hook)
        return self.admin.attach(AttachRequest(self.device, **options))

    def class_of(self, remote: str, port: int = 7777) -> str:
        """Return the class that the loaded program gives a packet to there."""
        request = ExplainRequest(self.one.pair.address4, remote, "tcp", 40_000, port)
        return self.operator.explain(self.device, request).traffic_class


@pytest.fixture
def host(bench: Callable[..., Bench], tmp_path: Path) -> Iterator[Host]:
    one = bench()
    with (
        serving(tmp_path, one.engine) as service,
        service.remote(Role.ADMIN) as admin,
        service.remote(Role.OPERATOR) as operator,
    ):
        yield Host(one, service, admin, operator)


def entries(*texts: str, name: str = "bulk") -> list[Any]:
    return [parse_entry(text, LineDefaults(traffic_class=name))[0] for text in texts]


def refused(call: Callable[[], Any]) -> Any:
    """Return the named error of a call."""
    with pytest.raises((InputError, ConflictError)) as caught:
        call()
    return caught.value


# --- good


def test_a_life_over_the_api(host: Host, tmp_path: Path) -> None:
    device = host.device
    plan = host.operator.plan_attach(
        AttachRequest(device, link_rate_bits_per_s=100 * MBIT, hook=host.one.hook)
    )
    assert not host.admin.status(), "got an attachment after a plan"
    report = host.attach()
    assert report.changed
    assert report.plan.classes == plan.classes
    assert not host.attach().changed, "got a change by the same attach again"

    (ours,) = host.one.engine.status()
    (theirs,) = host.operator.status()
    assert dataclasses.replace(theirs, classes=(), reasons={}) == dataclasses.replace(
        ours, classes=(), reasons={}
    )
    row = host.operator.class_set(device, "bulk", 20 * MBIT, lease_s=30)
    assert row.ceiling_in_force_bits_per_s == 20 * MBIT
    kernel = host.one.classes()["bulk"]
    assert kernel.ceiling_in_force_bits_per_s == 20 * MBIT
    assert 25 < (kernel.lease_s_left or 0) <= 30

    assert host.class_of("203.0.113.7") == "normal"
    change = host.operator.whitelist_add(device, entries("203.0.113.0/24", name="signal"))
    assert (change.added, change.generation) == (1, 1)
    assert host.class_of("203.0.113.7") == "signal"
    assert [row.destination for row in host.operator.whitelist_list(device)] == ["203.0.113.0/24"]
    host.operator.whitelist_remove(device, entries("203.0.113.0/24"))
    assert host.class_of("203.0.113.7") == "normal"

    assert host.admin.detach(device).changed
    assert not host.admin.status()
    assert not host.admin.detach(device).changed
    lines = [(one.method.rpartition("/")[2], one.result) for one in host.service.audit.lines]
    assert ("Attach", "ok") in lines
    assert ("UpdateWhitelist", "ok") in lines
    host.one.check_put_back()
    host.one.check_programs_gone()


def test_a_policy_comes_as_text_and_goes_in_place(host: Host, tmp_path: Path) -> None:
    """The file is the client's; the agent's host has none of that name."""
    path = tmp_path / "mine.toml"
    path.write_text("# mine\n" + default_policy_text())
    host.attach(policy_path=str(path))
    path.unlink()
    found = host.operator.policy(host.device)
    assert found.source == str(path)
    assert found.text.startswith("# mine\n")
    assert host.one.state()["request"].get("policy_text") is None

    programs = host.one.status().programs
    text = found.text.replace("# mine", "# yours").replace("10250-10259", "10251-10259")
    report = host.admin.set_policy(host.device, text, "yours", expected_digest=found.digest)
    assert report.changed
    again = host.operator.policy(host.device)
    assert (again.text, again.source) == (text, "yours")
    assert host.one.status().programs == programs, "got other programs, want them kept"

    error = refused(lambda: host.admin.set_policy(host.device, "", "", expected_digest="00"))
    assert error.reference == "policy-differs"
    error = refused(lambda: host.admin.set_policy(host.device, "[class.x]\nceiling = 3\n", "bad"))
    assert error.reference == "policy-invalid", f"got {error.reference}: {error.message}"
    assert error.details, "got no detail, want each error"
    assert host.operator.policy(host.device).text == text, "got another policy after a refusal"
    assert host.operator.policy().source == "built-in"


def test_a_capture_is_explained(host: Host, tmp_path: Path) -> None:
    host.attach()
    frame = build_frame(ExplainRequest("10.0.0.5", "10.0.0.9", "tcp", 40_000, 2379))
    path = tmp_path / "one.pcap"
    head = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65_535, 1)
    record = struct.pack("<IIII", 0, 0, len(frame), len(frame)) + frame
    path.write_bytes(head + 150 * record)
    found = list(host.operator.explain_pcap(host.device, path, "egress"))
    assert len(found) == 150
    assert {one.traffic_class for one in found} == {"signal"}
    path.write_bytes(head + record[:20])
    error = refused(lambda: list(host.operator.explain_pcap(host.device, path, "egress")))
    assert error.reference == "bad-capture"


def test_a_hundred_thousand_entries_by_a_stream(host: Host) -> None:
    """C103. What the API itself takes of it: see docs/performance.md."""
    host.attach()
    template = entries("10.0.0.0", name="signal")[0]
    many = [
        dataclasses.replace(template, destination=((0x0B000000 + n).to_bytes(4, "big"), 32))
        for n in range(100_000)
    ]
    began_s = time.monotonic()
    change = host.operator.whitelist_replace(host.device, many, expected_generation=0)
    took_s = time.monotonic() - began_s
    print(f"100,000 entries in {took_s:.2f} s")
    assert (change.added, change.total) == (100_000, 100_000)
    assert host.class_of("11.1.134.159") == "signal"  # the last of them
    assert host.class_of("11.1.134.160") == "normal"
    error = refused(
        lambda: host.operator.whitelist_replace(host.device, many[:1], expected_generation=0)
    )
    assert error.reference == "generation-differs"
    assert host.class_of("11.1.134.159") == "signal"


def test_an_attach_that_waits_for_its_confirmation(host: Host) -> None:
    host.attach(confirm_s=60.0)
    assert host.operator.status()[0].unconfirmed_s is not None
    assert 0 < host.admin.confirm(host.device) <= 60
    assert refused(lambda: host.admin.confirm(host.device)).reference == "nothing-to-confirm"
    assert host.operator.status()[0].unconfirmed_s is None


def test_residue_is_none_while_attached(host: Host) -> None:
    host.attach()
    found = host.operator.residue(wait_s=0.5)
    ours = [one for one in found.items if one.netns == host.one.netns]
    assert found.attached == 1
    assert not ours, f"got {ours}"


# --- bad


@pytest.mark.parametrize(
    ("call", "reference"),
    [
        (lambda h: h.admin.attach(AttachRequest("none7")), "no-such-device"),
        (lambda h: h.admin.attach(AttachRequest(h.device)), "link-rate-unknown"),
        (lambda h: h.admin.detach("none7"), "no-such-device"),
        (lambda h: h.operator.status(h.device), "not-attached"),
        (lambda h: h.operator.policy(h.device), "not-attached"),
        (lambda h: h.operator.class_set(h.device, "bulk", MBIT), "not-attached"),
        (lambda h: h.operator.whitelist_list(h.device), "not-attached"),
        (lambda h: h.operator.whitelist_add(h.device, entries("10.0.0.1")), "not-attached"),
        (lambda h: h.admin.confirm(h.device), "not-attached"),
        (
            lambda h: h.operator.explain(h.device, ExplainRequest("10.0.0.1", "10.0.0.2")),
            "not-attached",
        ),
    ],
)
def test_before_an_attach(host: Host, call: Callable[[Host], Any], reference: str) -> None:
    found = refused(lambda: call(host))
    assert found.reference == reference, f"got {found.reference}: {found.message}"


def test_bad_requests_change_nothing(host: Host) -> None:
    host.attach()
    before = host.one.host_state()
    for call, reference in (
        (lambda: host.operator.class_set(host.device, "none", MBIT), "no-such-class"),
        (lambda: host.operator.class_set(host.device, "bulk", 1), "ceiling-out-of-range"),
        (lambda: host.operator.class_set(host.device, "bulk", 1 << 63), "ceiling-out-of-range"),
        (
            lambda: host.operator.class_set(host.device, "bulk", 20 * MBIT, lease_s=float("nan")),
            "bad-lease",
        ),
        (
            lambda: host.operator.class_set(host.device, "bulk", 20 * MBIT, direction="ingress"),
            "not-shaped",
        ),
        (
            lambda: host.operator.whitelist_add(host.device, entries("10.0.0.1", name="x")),
            "no-such-class",
        ),
        (
            lambda: host.operator.whitelist_add(host.device, entries("0.0.0.0/0")),
            "whitelist-everything",
        ),
        (
            lambda: host.operator.explain(host.device, ExplainRequest("10.0.0.1", "::1")),
            "address-families-differ",
        ),
        (
            lambda: host.admin.attach(AttachRequest(host.device, confirm_s=10.0)),
            "link-rate-unknown",
        ),
    ):
        found = refused(call)
        assert found.reference == reference, f"got {found.reference}: {found.message}"
    assert host.one.host_state() == before
    assert host.one.status().whitelist_generation == 0


_FEW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def test_nothing_that_a_client_says_is_a_fault_of_the_engine(host: Host) -> None:
    """A fuzz against the real engine: each request gets an answer or a name, never INTERNAL."""
    host.attach()
    addresses = st.one_of(st.ip_addresses().map(str), st.text(max_size=20), st.just("fe80::1%eth0"))
    numbers = st.integers(0, (1 << 32) - 1)

    def send(method: str, request: Any) -> None:
        with host.service.channel() as channel:
            multi = channel.unary_unary(f"/shapectl.v1.ShaperService/{method}")
            try:
                multi(request.SerializeToString(), timeout=20)
                return
            except grpc.RpcError as error:
                code, named = code_of(error), refusal(error)
        assert code not in {"INTERNAL", "UNKNOWN"}, f"got {named.reference}: {named.message}"

    @_FEW
    @given(addresses, addresses, st.text(max_size=8), numbers, numbers, numbers, numbers)
    def explain(
        src: str, dst: str, protocol: str, sport: int, dport: int, dscp: int, m: int
    ) -> None:
        request = shaper_pb2.ExplainRequest(
            device=host.device, source=src, destination=dst, protocol=protocol,
            source_port=sport % 70_000, destination_port=dport % 70_000, dscp=dscp % 70, mark=m,
        )  # fmt: skip
        send("Explain", request)

    @_FEW
    @given(
        st.sampled_from(["bulk", "signal", "", "x"]),
        st.one_of(st.integers(0, (1 << 64) - 1), st.integers(60_000, 200 * MBIT)),
        st.one_of(st.none(), st.floats()),
        st.integers(0, 3),
    )
    def set_class(name: str, bits_per_s: int, lease_s: float | None, direction: int) -> None:
        request = shaper_pb2.SetClassRequest(
            request_id=os.urandom(8).hex(), device=host.device, class_name=name,
            ceiling_bits_per_s=bits_per_s, lease_s=lease_s,
            direction=direction,  # type: ignore[arg-type]
        )  # fmt: skip
        send("SetClass", request)

    @_FEW
    @given(
        st.one_of(st.none(), st.text(max_size=60), st.just(default_policy_text())),
        st.one_of(st.none(), st.integers(0, (1 << 64) - 1), st.just(100 * MBIT)),
        st.one_of(st.none(), st.floats()),
        st.one_of(st.none(), st.text(max_size=8), st.sampled_from(["auto", "off", "3028"])),
        numbers,
        st.integers(0, 4),
    )
    def plan(
        text: str | None, rate: int | None, confirm_s: float | None, limit: str | None,
        mask: int, profile: int,
    ) -> None:  # fmt: skip
        spec = shaper_pb2.AttachSpec(
            device=host.device, policy_text=text, link_rate_bits_per_s=rate, confirm_s=confirm_s,
            segment_limit=limit, egress_mark_mask=mask,
            profile=profile,  # type: ignore[arg-type]
        )  # fmt: skip
        send("PlanAttach", shaper_pb2.PlanAttachRequest(spec=spec))

    explain()
    set_class()
    plan()
    assert host.operator.status()[0].problems == (), f"got {host.operator.status()[0].problems}"


# --- many at once


def test_one_attach_for_many_who_ask_at_once(host: Host) -> None:
    host.one.before = host.one.glance()
    spec = shaper_pb2.AttachSpec(device=host.device, link_rate_bits_per_s=100 * MBIT)
    request = shaper_pb2.AttachRequest(request_id="the-one", spec=spec)
    with host.service.channel() as channel, ThreadPoolExecutor(8) as pool:
        method = channel.unary_unary(
            "/shapectl.v1.ShaperService/Attach",
            request_serializer=shaper_pb2.AttachRequest.SerializeToString,
            response_deserializer=shaper_pb2.AttachResponse.FromString,
        )
        pending = [pool.submit(method, request, timeout=60) for _ in range(8)]
        answers = {one.result().SerializeToString(deterministic=True) for one in pending}
    assert len(answers) == 1, f"got {len(answers)} answers, want one"
    assert len(host.service.audit.lines) == 1


@pytest.mark.slow
@pytest.mark.host
def test_five_thousand_calls_of_sixty_four_clients(host: Host) -> None:
    """Each with a channel of its own; reads and changes, and no call fails."""
    host.attach()
    threads_before = threading.active_count()
    failures: list[str] = []
    kinds = ("status", "class", "whitelist", "explain", "policy")
    began_s = time.monotonic()

    def client(number: int) -> int:
        done = 0
        with host.service.remote(Role.OPERATOR, timeout_s=60.0) as remote:
            for turn in range(5_000 // 64 + 1):
                try:
                    match kinds[(number + turn) % len(kinds)]:
                        case "status":
                            assert remote.status()[0].device == host.device
                        case "class":
                            remote.class_set(host.device, "bulk", (20 + number) * MBIT, lease_s=60)
                        case "whitelist":
                            remote.whitelist_add(host.device, entries(f"10.{number}.{turn}.1"))
                        case "explain":
                            request = ExplainRequest("10.0.0.1", "10.0.0.2", "tcp", 5, 6)
                            remote.explain(host.device, request)
                        case "policy":
                            remote.policy(host.device)
                    done += 1
                except Exception as error:
                    failures.append(f"{number}.{turn}: {error!r}")
        return done

    with ThreadPoolExecutor(64) as pool:
        total = sum(pool.map(client, range(64)))
    took_s = time.monotonic() - began_s
    print(f"{total} calls of 64 clients in {took_s:.1f} s: {total / took_s:.0f} calls/s")
    assert not failures, f"got {len(failures)} failures: {failures[:3]}"
    assert total >= 5_000
    assert host.operator.status()[0].problems == ()
    listed = host.operator.whitelist_list(host.device)
    assert len(listed) == sum((n + t) % 5 == 2 for n in range(64) for t in range(79))
    assert threading.active_count() < threads_before + 120
