# SPDX-License-Identifier: Apache-2.0
"""Ceilings that the program keeps itself: CE before drop, leases, twin leaves, shadow."""

from __future__ import annotations

import time

import pytest

from shapeagent.kernel.abi import SHP_TO_IFB
from shapeagent.model.codes import Code
from shapeagent.model.types import Direction, IngressMode, Profile
from shapeagent.service.records import Ceilings
from tests.bpf.frames import checksum, tcp4, tcp6, udp4
from tests.bpf.kit import (
    BULK,
    CLASS_TABLES,
    EGRESS,
    HEAD,
    INGRESS,
    POLICY,
    PORT_RULES,
    SHOT,
    UNSPEC,
    Outcome,
    Rig,
)

MBIT = 1_000_000
BIG = 60_000  # 480 ms at 1 Mbit/s: CE beyond 554 ms of queue, drop beyond 1,107 ms
ECT0, CE = 2, 3


def meter(rig: Rig, live: int, safe: int | None = None, *, deadline: int = 0) -> None:
    """Put ceilings on class bulk that the program itself keeps."""
    rig.apply(
        POLICY,
        profile=Profile.POLICE,
        ceilings={"bulk": Ceilings(live, live if safe is None else safe, deadline)},
    )


def send_until_dropped(rig: Rig, frame: bytes, way: Direction = EGRESS, **fields: int) -> None:
    """Fill a meter up to where it drops."""
    for _ in range(100_000):
        if rig.send(frame, way, **fields).returned == SHOT:
            return
    raise AssertionError("got 100,000 packets through a meter, want a drop")


def tos_of(done: Outcome) -> int:
    """Return TOS or traffic class of what came out."""
    if done.frame[14] >> 4 == 4:
        return done.frame[15]
    return (done.frame[14] & 15) << 4 | done.frame[15] >> 4


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_ecn_capable_packets_are_marked_before_any_is_dropped(rig: Rig, family: str) -> None:
    meter(rig, MBIT)
    frame = tcp4(1, 9001, tos=ECT0) if family == "v4" else tcp6(1, 9001, traffic_class=ECT0)
    before = rig.data.count(0, BULK), rig.reason(Code.CE), rig.reason(Code.CEILING)
    out = [rig.send(frame, wire_len=BIG) for _ in range(5)]
    got = [done.returned for done in out]
    assert got == [UNSPEC] * 3 + [SHOT] * 2, f"got {got}, want three passed, then drops"
    marks = [tos_of(done) for done in out[:3]]
    assert marks == [ECT0, ECT0, CE], f"got ECN bits {marks}, want the third marked"
    if family == "v4":
        assert checksum(out[2].frame[14:34]) == 0, "got a wrong header checksum after the mark"
    count = rig.data.count(0, BULK)
    assert count.packets - before[0].packets == 3
    assert count.drops - before[0].drops == 2
    assert count.ce_marks - before[0].ce_marks == 1
    wire = 24 + BIG
    assert count.wire_bytes - before[0].wire_bytes == 3 * wire
    assert count.drop_wire_bytes - before[0].drop_wire_bytes == 2 * wire
    assert (rig.reason(Code.CE) - before[1], rig.reason(Code.CEILING) - before[2]) == (1, 2)


def test_packets_without_ecn_are_never_marked(rig: Rig) -> None:
    meter(rig, MBIT)
    frame = tcp4(1, 9001)
    marks = rig.reason(Code.CE)
    out = [rig.send(frame, wire_len=BIG) for _ in range(4)]
    assert [done.returned for done in out] == [UNSPEC] * 3 + [SHOT]
    assert all(done.frame == frame for done in out[:3]), "got a changed packet, want it as it was"
    assert rig.reason(Code.CE) == marks, "got a mark counted that nobody got"


def test_a_ce_mark_survives_the_dscp_rewrite(rig: Rig) -> None:
    text = POLICY.replace("[classes.bulk]", '[classes.bulk]\ndscp = "cs1"')
    rig.apply(text, profile=Profile.POLICE, ceilings={"bulk": Ceilings(MBIT, MBIT)})
    for frame in (tcp4(1, 9001, tos=ECT0), tcp6(1, 9001, traffic_class=ECT0)):
        rig.clear()
        got = [tos_of(rig.send(frame, wire_len=BIG)) for _ in range(3)]
        want = [8 << 2 | ECT0, 8 << 2 | ECT0, 8 << 2 | CE]
        assert got == want, f"got {got}, want DSCP 8 with {want}: the mark must stay"


@pytest.mark.parametrize(
    ("way", "rate"),
    # What arrives counts as its own length, 3.6 KB at most: a slow machine sends no 400 Mbit/s.
    [
        (EGRESS, 20 * MBIT),
        (EGRESS, 400 * MBIT),
        (INGRESS, 20 * MBIT),
        (INGRESS, 100 * MBIT),
    ],
)
def test_a_saturated_ceiling_lets_its_rate_through_within_three_percent(
    rig: Rig, way: Direction, rate: int
) -> None:
    meter(rig, rate)
    fields = {"wire_len": 20_000 if rate > 100 * MBIT else 1500} if way is EGRESS else {}
    frame = udp4(1, 9001) if way is EGRESS else udp4(9001, 1, size=3600)
    ratios = []
    for _ in range(6):  # a sender that loses its CPU for longer than the queue sends less
        send_until_dropped(rig, frame, way, **fields)
        start, before = time.monotonic_ns(), rig.data.count(way.number, BULK).wire_bytes
        while time.monotonic_ns() < start + 150_000_000:
            for _ in range(20):
                rig.send(frame, way, **fields)
        passed = rig.data.count(way.number, BULK).wire_bytes - before
        elapsed = time.monotonic_ns() - start
        ratios.append(8 * passed * 1e9 / elapsed / rate)
        assert ratios[-1] < 1.03, f"got {ratios[-1]:.4f} of the ceiling, want at most 1.03"
        if ratios[-1] > 0.97:
            return
    raise AssertionError(f"got {max(ratios):.4f} of the ceiling at best, want at least 0.97")


def test_classes_and_directions_have_meters_of_their_own(rig: Rig) -> None:
    meter(rig, MBIT)
    send_until_dropped(rig, tcp4(1, 9001), wire_len=BIG)
    got = [
        rig.send(tcp4(1, 7000), wire_len=BIG).returned,
        rig.send(tcp4(1, 2), wire_len=BIG).returned,
        rig.send(tcp4(9001, 1), INGRESS, wire_len=BIG).returned,
    ]
    assert got == [UNSPEC] * 3, f"got {got}, want other classes and the other direction to pass"


# --- leases


def _burst(rig: Rig, direction: Direction = EGRESS) -> list[int]:
    """Send what 1 Mbit/s cannot take and 900 Mbit/s can."""
    return [rig.send(tcp4(1, 9001), direction, wire_len=BIG).returned for _ in range(4)]


def test_under_a_lease_the_live_ceiling_holds_and_past_it_the_safe_one(rig: Rig) -> None:
    ahead = 10**6
    meter(rig, 900 * MBIT, MBIT, deadline=rig.clock.read() + ahead)
    leases = rig.reason(Code.LEASE)
    assert _burst(rig) == [UNSPEC] * 4, "got drops under the lease"
    assert rig.reason(Code.LEASE) == leases, "got the lease counted as over"
    meter(rig, 900 * MBIT, MBIT, deadline=rig.clock.read() - 1)
    got = _burst(rig)
    assert got == [UNSPEC] * 3 + [SHOT], f"got {got}, want the safe ceiling"
    assert rig.reason(Code.LEASE) == leases + 4


def test_a_lease_ends_by_itself_at_its_jiffy(rig: Rig) -> None:
    meter(rig, 900 * MBIT, MBIT)
    ahead = max(5, rig.jiffies_per_s // 10)
    record = rig.data.read_class(0, BULK)
    record.deadline_jiffies = deadline = rig.clock.read() + ahead
    rig.data.write_class(0, BULK, record)
    leases = rig.reason(Code.LEASE)
    assert rig.send(tcp4(1, 9001)).returned == UNSPEC
    assert rig.reason(Code.LEASE) == leases or rig.clock.read() >= deadline
    rig.wait(lambda: rig.clock.read() >= deadline, "the end of the lease")
    got = _burst(rig)
    assert got == [UNSPEC] * 3 + [SHOT], f"got {got}, want the safe ceiling"
    record.deadline_jiffies = rig.clock.read() + 10**6
    rig.data.write_class(0, BULK, record)
    over = rig.reason(Code.LEASE)
    rig.clear()
    assert _burst(rig) == [UNSPEC] * 4, "got drops after the renewal"
    assert rig.reason(Code.LEASE) == over


def test_without_a_lease_the_ceiling_never_ends(rig: Rig) -> None:
    meter(rig, 900 * MBIT, MBIT, deadline=0)
    leases = rig.reason(Code.LEASE)
    assert _burst(rig) == [UNSPEC] * 4
    assert rig.reason(Code.LEASE) == leases


def test_with_a_tree_only_a_safe_ceiling_below_the_live_one_is_metered(rig: Rig) -> None:
    for deadline, want in ((0, [UNSPEC] * 4), (1, [UNSPEC] * 3 + [SHOT])):
        rig.apply(POLICY, ceilings={"bulk": Ceilings(900 * MBIT, MBIT, deadline)})
        got = _burst(rig)
        assert got == want, f"deadline {deadline}: got {got}, want {want}"
        priority = rig.send(tcp4(1, 2)).priority
        assert priority == 0x10012, f"got {priority:#x}, want the leaf as before"


def test_a_safe_ceiling_above_the_live_one_moves_to_the_twin_leaf(rig: Rig) -> None:
    for deadline, want in ((0, 0x10013), (10**15, 0x10013), (1, 0x10023)):
        rig.apply(POLICY, ceilings={"bulk": Ceilings(MBIT, 900 * MBIT, deadline)})
        out = [rig.send(tcp4(1, 9001), wire_len=BIG) for _ in range(4)]
        got = {(done.returned, done.priority) for done in out}
        assert got == {(UNSPEC, want)}, f"deadline {deadline}: got {got}, want {want:#x}"
        assert rig.explain(tcp4(1, 9001)).priority == want


# --- shadow


def test_shadow_counts_as_always_and_changes_no_packet(rig: Rig) -> None:
    text = (
        "shadow = true\n"
        + (HEAD + CLASS_TABLES).replace(
            "[classes.bulk]", '[classes.bulk]\ndscp = "cs1"\nmark = 0x10'
        )
        + PORT_RULES
        + "\n[marks]\negress_mask = 0xf0\ningress_mask = 0xf0\n"
    )
    rig.apply(
        text,
        profile=Profile.POLICE,
        ceilings={"bulk": Ceilings(MBIT, MBIT)},
        write_priority=1,
    )
    assert rig.control().shadow
    for direction in (EGRESS, INGRESS):
        rig.clear()
        frame = tcp4(9001, 9001, tos=ECT0, size=3600 if direction is INGRESS else 10)
        before = rig.data.count(direction.number, BULK), rig.totals(direction)
        fields = {"wire_len": BIG} if direction is EGRESS else {}
        out = [rig.send(frame, direction, priority=6, mark=0xABCD, **fields) for _ in range(60)]
        got = {(done.returned, done.priority, done.mark, done.frame == frame) for done in out}
        assert got == {(UNSPEC, 6, 0xABCD, True)}, f"{direction}: got {got}, want no change"
        count = rig.data.count(direction.number, BULK)
        assert count.drops > before[0].drops, f"{direction}: got no drop counted"
        assert count.ce_marks > before[0].ce_marks, f"{direction}: got no mark counted"
        total = count.packets + count.drops - before[0].packets - before[0].drops
        assert total == 60, f"got {total} counted, want 60"
    rig.apply(POLICY)


# --- IFB


def test_ingress_is_redirected_to_the_ifb_only_under_a_fresh_lease(rig: Rig) -> None:
    rig.apply(POLICY, ingress=IngressMode.IFB, ifb_lease_jiffies=1)
    stale = rig.reason(Code.IFB_STALE, INGRESS)
    done = rig.send(tcp4(9001, 9001), INGRESS, priority=6)
    assert (done.returned, done.priority) == (UNSPEC, 6), f"got {done}, want it to pass"
    assert done.cb[0] != SHP_TO_IFB, f"got {done}, want no redirect"
    assert rig.reason(Code.IFB_STALE, INGRESS) == stale + 1
    rig.apply(POLICY, ingress=IngressMode.IFB, ifb_lease_jiffies=2**62)
    done = rig.send(tcp4(9001, 9001), INGRESS, priority=6)
    assert (done.returned, done.priority) == (UNSPEC, 0x10013), f"got {done}, want our redirect"
    assert done.cb[0] == SHP_TO_IFB, f"got {done}, want it handed to the redirect"
    assert rig.reason(Code.IFB_STALE, INGRESS) == stale + 1
    done = rig.send(tcp4(9001, 9001))
    assert (done.returned, done.cb[0]) == (UNSPEC, 0), "got egress redirected"


def test_a_device_without_link_layer_is_never_redirected(rig: Rig) -> None:
    lease = 2**62
    rig.apply(POLICY, ingress=IngressMode.IFB, l3_only=True, ifb_lease_jiffies=lease)
    done = rig.send(tcp4(9001, 9001)[14:] + bytes(20), INGRESS)
    assert (done.returned, done.cb[0]) == (UNSPEC, 0), f"got {done}, want it to pass"
    rig.apply(POLICY)
