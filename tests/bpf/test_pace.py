# SPDX-License-Identifier: Apache-2.0
"""Profile edt: departure times, marks and drops by them, leases, and what the link still has."""

from __future__ import annotations

import itertools
import time

import pytest

from shapeagent.kernel import abi, maps
from shapeagent.model.codes import Code
from shapeagent.model.types import DeviceFacts, Profile, TreePlan
from shapeagent.policy.meters import pace_for
from shapeagent.policy.plan import plan_tree
from shapeagent.service.records import Ceilings
from tests.bpf.frames import tcp4, tcp6, udp4
from tests.bpf.kit import (
    BULK,
    EGRESS,
    INGRESS,
    LINK_BITS_PER_S,
    NORMAL,
    POLICY,
    SHOT,
    UNSPEC,
    Outcome,
    Rig,
)

MBIT = 1_000_000
SEGMENT = 1538
RATE = MBIT  # 12 ms a frame: a test run takes microseconds, a busy machine milliseconds
WIRE_LEN = SEGMENT - abi.SHP_WIRE_OVERHEAD
FRAME_NS = 8 * SEGMENT * 1_000_000_000 // RATE
ECT0, CE = 2, 3
SIGNAL_PORT, BULK_PORT, NORMAL_PORT = 7000, 9001, 2


def pace(
    rig: Rig,
    live: int = RATE,
    safe: int | None = None,
    *,
    deadline: int = 0,
    link: bool = False,
    link_rate: int = LINK_BITS_PER_S,
    text: str = POLICY,
    more: dict[str, Ceilings] | None = None,
) -> TreePlan:
    """Put profile edt in force, bulk at a ceiling; `link`: the device is faster than the link."""
    rig.apply(text)
    speed = None if link else link_rate
    device = DeviceFacts("none", 1, "", False, 1500, 1, True, speed, 65536, 65535, None)
    tree = plan_tree(
        rig.policy,
        device,
        rig.kernel,
        link_rate_bits_per_s=link_rate,
        profile=Profile.EDT,
        segment_limit_bytes=1514,
    )
    assert tree.segment_wire_bytes == SEGMENT
    ceilings = {"bulk": Ceilings(live, live if safe is None else safe, deadline)}
    rig.apply(text, profile=Profile.EDT, tree=tree, ceilings=ceilings | (more or {}))
    return tree


def bulk(
    rig: Rig, count: int, *, tcp: bool = False, source: int = 1, tstamp: int = 0
) -> list[Outcome]:
    frame = tcp4(source, BULK_PORT) if tcp else udp4(source, BULK_PORT)
    return [rig.send(frame, wire_len=WIRE_LEN, tstamp=tstamp) for _ in range(count)]


def clock(rig: Rig, slot: int = BULK) -> int:
    meter = maps.read_array(rig.maps["meters"], slot, abi.Meter)
    assert isinstance(meter, abi.Meter)
    return int(meter.tat_ns)


def wind(rig: Rig, ahead_ns: int, slot: int = BULK) -> int:
    """Set a clock so far ahead of now; returns what it then says."""
    value = time.monotonic_ns() + ahead_ns
    maps.write_array(rig.maps["meters"], slot, abi.Meter(tat_ns=value))
    return value


def test_packets_leave_at_the_ceiling_one_after_the_other(rig: Rig) -> None:
    pace(rig)
    before = time.monotonic_ns()
    out = bulk(rig, 6)
    after = time.monotonic_ns()
    assert out[0].tstamp == 0, f"got a stamp of {out[0].tstamp} on an idle class, want none"
    stamps = [done.tstamp for done in out[1:]]
    assert before + FRAME_NS <= stamps[0] <= after + FRAME_NS, f"got {stamps[0]}, want a frame on"
    steps = {late - early for early, late in itertools.pairwise(stamps)}
    assert all(abs(step - FRAME_NS) <= 1 for step in steps), f"got {steps}, want {FRAME_NS}"
    assert {done.priority for done in out} == {2}, f"got {out[0].priority}, want TC_PRIO_BULK"
    assert {done.returned for done in out} == {UNSPEC}


def test_a_long_segment_takes_its_time_on_the_wire(rig: Rig) -> None:
    pace(rig, 100 * MBIT)
    frame = udp4(1, BULK_PORT, size=1400)
    want = 8 * (30_000 + 20 * abi.SHP_WIRE_OVERHEAD) * 1_000_000_000 // (100 * MBIT)
    before = time.monotonic_ns()
    rig.send(frame, wire_len=30_000, gso_segs=20, gso_size=1448)
    after = time.monotonic_ns()
    got = clock(rig)
    assert before + want - 1 <= got <= after + want, f"got a clock at {got}, want {want} ns more"


def test_a_later_stamp_of_the_sender_stays_and_holds_up_nobody(rig: Rig) -> None:
    pace(rig)
    asked = time.monotonic_ns() + 1_000_000_000
    own = bulk(rig, 1, tstamp=asked)[0]
    assert own.tstamp == asked, f"got {own.tstamp}, want {asked} as the sender asked"
    following = bulk(rig, 1)[0].tstamp
    assert following < asked - 900_000_000, f"got {following}, want the class's own next departure"
    early = bulk(rig, 1, tstamp=1)[0].tstamp
    assert early > following, f"got {early}, want it behind {following}"


@pytest.mark.parametrize("stamp_ns", [11_000_000_000, 1_700_000_000_000_000_000])
def test_c24_a_stamp_of_another_clock_is_replaced(rig: Rig, stamp_ns: int) -> None:
    """A time of arrival, by the wall clock, would keep the packet in fq up to its horizon."""
    pace(rig)
    stamp_ns += time.monotonic_ns()
    first = bulk(rig, 1, tstamp=stamp_ns)[0].tstamp
    assert first == 0, f"got {first} on an idle class, want no stamp"
    before = clock(rig)
    second = bulk(rig, 1, tstamp=stamp_ns)[0].tstamp
    assert second == before, f"got {second}, want the class's next departure, {before}"


def test_an_idle_class_is_not_held_back(rig: Rig) -> None:
    pace(rig)
    wind(rig, -1_000_000_000)
    done = bulk(rig, 1)[0]
    assert done.tstamp == 0, f"got {done.tstamp}, want no stamp"
    ahead = clock(rig) - time.monotonic_ns()
    assert ahead <= FRAME_NS, f"got {ahead} ns: idle time must not be saved up, nor lost"


def test_urgent_and_default_classes_leave_at_once(rig: Rig) -> None:
    pace(rig, more={"signal": Ceilings(500 * MBIT, 500 * MBIT)})
    wind(rig, 10 * FRAME_NS)
    sent = {
        "signal": rig.send(tcp4(1, SIGNAL_PORT), wire_len=WIRE_LEN),
        "stream": rig.send(tcp4(8443, 5), wire_len=WIRE_LEN),
        "normal": rig.send(tcp4(1, NORMAL_PORT), wire_len=WIRE_LEN),
    }
    for name, want in (("signal", 7), ("stream", 6), ("normal", 0)):
        got = (sent[name].tstamp, sent[name].priority, sent[name].returned)
        assert got == (0, want, UNSPEC), f"{name}: got {got}, want no stamp and priority {want}"


def test_a_ceiling_of_an_urgent_class_is_a_bucket_and_no_queue(rig: Rig) -> None:
    pace(rig, more={"stream": Ceilings(MBIT, MBIT)})
    out = [rig.send(tcp4(8443, 5), wire_len=60_000) for _ in range(5)]
    assert {done.tstamp for done in out} == {0}, "got a stamp on a token stream, want none"
    assert out[-1].returned == SHOT, f"got {[done.returned for done in out]}, want a bucket"


def test_arriving_packets_get_no_stamp(rig: Rig) -> None:
    pace(rig)
    out = [rig.send(udp4(BULK_PORT, 1), INGRESS) for _ in range(20)]
    assert {(done.returned, done.tstamp) for done in out} == {(UNSPEC, 0)}
    flags = rig.data.read_class(INGRESS.number, BULK).flags
    assert not flags & (abi.SHP_C_PACE | abi.SHP_C_LINK), f"got {flags:#x}, want no pacing"


# --- marks and drops


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_marks_beyond_two_segments(rig: Rig, family: str) -> None:
    pace(rig)
    plan = pace_for(RATE, SEGMENT)
    assert (plan.ce_ns, plan.drop_ns) == (2 * FRAME_NS, 8 * FRAME_NS)
    v4 = family == "v4"
    frame = tcp4(1, BULK_PORT, tos=ECT0) if v4 else tcp6(1, BULK_PORT, traffic_class=ECT0)
    marked = []
    for queue in (1.5, 2.5):
        wind(rig, int(queue * FRAME_NS))
        done = rig.send(frame, wire_len=WIRE_LEN)
        tos = done.frame[15] if v4 else (done.frame[14] & 15) << 4 | done.frame[15] >> 4
        marked.append(tos & 3)
    assert marked == [ECT0, CE], f"got ECN bits {marked}, want CE beyond two segments"


def test_datagrams_are_dropped_beyond_eight_segments_again_and_again(rig: Rig) -> None:
    pace(rig)
    wind(rig, int(7.5 * FRAME_NS))
    assert bulk(rig, 1)[0].returned == UNSPEC
    before = rig.reason(Code.CEILING), rig.data.count(0, BULK).drops, clock(rig)
    out = [done.returned for done in bulk(rig, 6)]
    assert out == [SHOT] * 6, f"got {out}, want each dropped"
    after = rig.reason(Code.CEILING), rig.data.count(0, BULK).drops, clock(rig)
    assert after == (before[0] + 6, before[1] + 6, before[2]), f"got {after} after {before}"


def test_a_tcp_flow_never_loses_two_packets_in_a_row(rig: Rig) -> None:
    pace(rig)
    wind(rig, 9 * FRAME_NS)
    got: dict[int, list[int]] = {port: [] for port in range(10, 18)}
    for _ in range(4):
        for port, seen in got.items():
            if clock(rig) > time.monotonic_ns() + 30 * FRAME_NS:
                wind(rig, 9 * FRAME_NS)
            seen.append(bulk(rig, 1, tcp=True, source=port)[0].returned)
    for port, seen in got.items():
        assert seen == [SHOT, UNSPEC] * 2, f"port {port}: got {seen}, want each second one spared"


def test_a_flow_that_was_spared_is_in_order_behind_what_waits(rig: Rig) -> None:
    pace(rig)
    wound = wind(rig, 9 * FRAME_NS)
    dropped, spared = bulk(rig, 2, tcp=True)
    assert (dropped.returned, spared.returned) == (SHOT, UNSPEC)
    assert spared.tstamp == wound, f"got {spared.tstamp}, want {wound}, the next departure"
    assert clock(rig) == wound + FRAME_NS, "got a spared packet that nobody paid for"


def test_nobody_is_spared_beyond_four_times_the_limit(rig: Rig) -> None:
    pace(rig)
    wind(rig, 33 * FRAME_NS)
    out = [done.returned for done in bulk(rig, 4, tcp=True)]
    assert out == [SHOT] * 4, f"got {out}, want all dropped: the queue must end somewhere"


@pytest.mark.parametrize("tcp", [True, False])
def test_a_flood_through_the_limit_keeps_the_rate(rig: Rig, tcp: bool) -> None:
    """Stamps handed out over 100 ms lie no denser than the ceiling."""
    rate = 200 * MBIT
    pace(rig, rate)
    frames = [tcp4(port, BULK_PORT) if tcp else udp4(port, BULK_PORT) for port in range(1, 9)]
    start, sent, last = time.monotonic_ns(), 0, 0
    while time.monotonic_ns() < start + 100_000_000:
        for frame in frames:
            done = rig.send(frame, wire_len=WIRE_LEN)
            if done.returned == UNSPEC:
                sent += 1
                assert not done.tstamp or done.tstamp > last, "got a stamp that went back"
                last = max(last, done.tstamp)
    span = max(last, time.monotonic_ns()) - start
    got = 8 * SEGMENT * (sent - 1) * 1_000_000_000 / span
    assert got <= rate * 1.01, f"got {got / MBIT:.1f} Mbit/s, want {rate / MBIT:.0f} at most"


# --- ceilings that change, leases


def test_stamps_never_go_back_when_a_ceiling_rises(rig: Rig) -> None:
    pace(rig)
    last = bulk(rig, 5)[-1].tstamp
    record = rig.data.read_class(0, BULK)
    record.live_cost = pace_for(1000 * RATE, SEGMENT).cost
    rig.data.write_class(0, BULK, record)
    first, second = (done.tstamp for done in bulk(rig, 2))
    assert first == last + FRAME_NS, f"got {first}, want it behind {last}"
    assert second - first == FRAME_NS // 1000, f"got {second - first} ns, want the new rate"


def test_past_the_lease_the_safe_ceiling_paces_by_the_same_clock(rig: Rig) -> None:
    pace(rig, RATE, 2 * RATE, deadline=rig.clock.read() + 10**6)
    live = [done.tstamp for done in bulk(rig, 3)][1:]
    assert live[1] - live[0] == FRAME_NS, f"got {live}, want the live ceiling"
    record = rig.data.read_class(0, BULK)
    record.deadline_jiffies = 1
    rig.data.write_class(0, BULK, record)
    leases = rig.reason(Code.LEASE)
    safe = [done.tstamp for done in bulk(rig, 3)]
    assert safe[0] == live[-1] + FRAME_NS, f"got {safe[0]}, want it behind {live[-1]}"
    assert safe[2] - safe[1] == FRAME_NS // 2, f"got {safe}, want the safe ceiling"
    assert rig.reason(Code.LEASE) == leases + 3


def test_a_default_class_is_paced_only_under_a_ceiling_and_then_in_order(rig: Rig) -> None:
    frame = udp4(1, NORMAL_PORT)

    def normal(count: int) -> list[int]:
        return [rig.send(frame, wire_len=WIRE_LEN).tstamp for _ in range(count)]

    pace(rig)
    assert normal(5) == [0] * 5, "got a stamp without a ceiling, want none"
    free = rig.data.read_class(0, NORMAL)
    pace(rig, more={"normal": Ceilings(RATE, RATE)})
    last = normal(5)[-1]
    assert last > time.monotonic_ns(), "got no stamp under a ceiling"
    rig.data.write_class(0, NORMAL, free)
    got = normal(2)
    assert got == [last + FRAME_NS] * 2, f"got {got}, want them behind what waits"
    wind(rig, -1, NORMAL)
    assert normal(1) == [0], "got a stamp when nothing waits any more"


# --- the link


def test_bulk_yields_what_the_others_send(rig: Rig) -> None:
    link_rate = 20 * MBIT  # eight frames, the longest queue, are then 4.9 ms
    text = POLICY.replace('"10%"\nsafe_ceiling', '"1mbit"\nsafe_ceiling')
    pace(rig, link_rate, link=True, link_rate=link_rate, text=text)
    frame_ns = 8 * SEGMENT * 1_000_000_000 // link_rate
    for _ in range(50):  # until the host leaves us the milliseconds of queue
        wind(rig, 0)
        wound = wind(rig, 2_000_000, abi.SHP_METER_LINK)
        first = bulk(rig, 1)[0].tstamp
        between = [rig.send(tcp4(1, SIGNAL_PORT), wire_len=WIRE_LEN).tstamp for _ in range(3)]
        second = bulk(rig, 1)[0].tstamp
        if time.monotonic_ns() < wound:
            break
    else:
        pytest.fail("got no five packets through the program in 2 ms, in 50 tries")
    assert between == [0, 0, 0], f"got stamps {between} on signal"
    assert first == wound, f"got {first}, want {wound}, when the link is free"
    assert abs(second - first - 4 * frame_ns) <= 4, f"got {second - first} ns, want four frames"


def test_what_the_others_send_beyond_their_part_does_not_starve_bulk(rig: Rig) -> None:
    pace(rig, LINK_BITS_PER_S, link=True)
    for _ in range(200):  # 96 ms of the link: 20 ms count
        rig.send(udp4(1, NORMAL_PORT), wire_len=60_000)
    ahead = clock(rig, abi.SHP_METER_LINK) - time.monotonic_ns()
    assert ahead <= 20_500_000, f"got a link taken for {ahead} ns, want 20 ms and one packet"
    assert ahead >= 10_000_000, f"got {ahead} ns, want what they sent to count"


def test_a_device_that_is_the_link_keeps_no_clock_of_it(rig: Rig) -> None:
    pace(rig)
    rig.send(tcp4(1, SIGNAL_PORT), wire_len=WIRE_LEN)
    bulk(rig, 3)
    assert clock(rig, abi.SHP_METER_LINK) == 0, "got a link clock that moved"
    assert rig.data.read_class(EGRESS.number, 0).flags & abi.SHP_C_LINK == 0
