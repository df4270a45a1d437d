# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeagent.model.errors import ConflictError, ShapeError, UnsupportedError
from shapeagent.model.types import (
    DeviceFacts,
    Direction,
    GsoLimits,
    HtbClassPlan,
    KernelFacts,
    Policy,
    Profile,
    TrafficClass,
    TreePlan,
)
from shapeagent.policy import plan

MBIT = 1_000_000
GBIT = 1_000_000_000
RATES = st.integers(min_value=MBIT, max_value=400 * GBIT)
MTUS = st.integers(min_value=576, max_value=9_000)
DEV_KERNEL = KernelFacts("6.18", frozenset({"htb", "tbf", "clsact", "bfifo", "mq"}), 4_000_000, 2)
DEBIAN = KernelFacts("6.1", DEV_KERNEL.qdiscs | {"prio", "fq_codel", "fq"}, 4_000_000, 2)
BARE = KernelFacts("6.18", frozenset({"clsact", "bfifo"}), 4_000_000, 2)


def device(**changes: Any) -> DeviceFacts:
    facts = DeviceFacts(
        name="d0",
        index=2,
        kind="veth",
        l3_only=False,
        mtu=1500,
        tx_queues=1,
        up=True,
        speed_bits_per_s=None,
        gso_max_size=65_536,
        gso_max_segs=65_535,
        gso_ipv4_max_size=65_536,
    )
    return dataclasses.replace(facts, **changes)


def policy(
    link: int, classes: tuple[TrafficClass, ...] | None = None, segment_limit: int | None = None
) -> Policy:
    four = (
        TrafficClass("signal", 0, 0, link // 20, link, link),
        TrafficClass("stream", 1, 1, link * 3 // 10, link, link),
        TrafficClass("normal", 2, 2, link * 2 // 10, link, link),
        TrafficClass("bulk", 3, 3, link * 45 // 100, link * 8 // 10, link // 2),
    )
    return Policy(
        classes=classes or four,
        rules=(),
        default_class=(classes or four)[-2 if len(classes or four) > 1 else 0].name,
        control_class=(classes or four)[0].name,
        link_rate_bits_per_s=link,
        segment_limit_bytes=segment_limit,
        egress_mark_mask=0,
        ingress_mark_mask=0,
        shadow=False,
        source="test",
        text="",
        digest="",
    )


def many_classes(link: int, count: int) -> tuple[TrafficClass, ...]:
    return tuple(
        TrafficClass(f"c{number}", number, number % 8, link // count, link, link // 2)
        for number in range(count)
    )


def htb(link: int, *, mtu: int = 1500, kernel: KernelFacts = DEV_KERNEL, **more: Any) -> TreePlan:
    facts = device(mtu=mtu)
    return plan.plan_tree(
        more.pop("policy", policy(link)),
        facts,
        kernel,
        link_rate_bits_per_s=link,
        profile=more.pop("profile", Profile.HTB),
        segment_limit_bytes=more.pop("segment", plan.auto_segment_limit(link, mtu)),
        **more,
    )


def leaf_of(tree: TreePlan, name: str, *, twin: bool = False) -> HtbClassPlan:
    return next(n for n in tree.classes if n.traffic_class == name and n.leaf and n.twin == twin)


# Segment limit and wire scale


@pytest.mark.parametrize(
    ("rate", "mtu", "want"),
    [
        (100 * MBIT, 1500, 3_028),
        (GBIT, 1500, 3_125),
        (10 * GBIT, 1500, 31_250),
        (20 * GBIT, 1500, 62_500),
        (25 * GBIT, 1500, 0),
        (GBIT, 9000, 18_028),
    ],
)
def test_auto_segment_limit_is_25_us_of_the_link(rate: int, mtu: int, want: int) -> None:
    got = plan.auto_segment_limit(rate, mtu)
    assert got == want, f"got {got} B, want {want} B"


@pytest.mark.parametrize(
    ("limit", "want"), [(3_028, 2), (6_250, 4), (12_500, 8), (65_536, 45), (1_000, 1)]
)
def test_segments_per_packet_are_those_seen_on_veth(limit: int, want: int) -> None:
    got = plan.segments_per_packet(limit, 65_535, 1500)  # bpf-facts §4
    assert got == want, f"got {got} segments, want {want}"


@given(RATES, MTUS, st.sampled_from([0, 3_028, 12_500, 65_536]))
def test_full_packets_reach_the_wire_rate_and_no_more(rate: int, mtu: int, limit: int) -> None:
    scale = plan.wire_scale(device(mtu=mtu), limit)
    kernel_rate = scale.kernel_bytes_per_s(rate)
    wire = kernel_rate * 8 * scale.packet_wire_bytes / scale.packet_bytes
    assert wire <= rate * (1 + 1e-12), f"got {wire} bit/s on the wire, want at most {rate}"
    assert wire >= rate * 0.999, f"got {wire} bit/s on the wire, want {rate}"
    back = scale.wire_bits_per_s(kernel_rate)
    assert abs(back - rate) <= 10, f"C60: got {back} bit/s back, want {rate}"


def test_segment_limit_lowers_all_three_limits_and_raises_none() -> None:
    now = GsoLimits(65_536, 65_535, 65_536)
    got = plan.capped_gso(now, 3_028, 1500)
    assert got == GsoLimits(3_028, 2, 3_028), f"got {got}"
    assert plan.capped_gso(now, 0, 1500) == now
    low = GsoLimits(2_000, 1, None)
    assert plan.capped_gso(low, 3_028, 1500) == low


def test_segment_limit_above_the_devices_own_changes_nothing() -> None:
    own = device(gso_max_size=16_000)
    got = plan.resolve_segment_limit(policy(10 * GBIT), own, 10 * GBIT, Profile.HTB)
    assert got == 0, f"got {got}, want 0"


@pytest.mark.parametrize(
    ("rate", "mtu", "profile", "want"),
    [
        (100 * MBIT, 1500, Profile.HTB, 3_028),
        (100 * MBIT, 1500, Profile.PRIO, 0),
        (5 * GBIT, 1500, Profile.PRIO, 0),
        (10 * GBIT, 1500, Profile.PRIO, 31_250),
        (10 * GBIT, 1500, Profile.HTB, 31_250),
        (GBIT, 9000, Profile.HTB, 18_028),
        (GBIT, 9000, Profile.PRIO, 0),
        (10 * GBIT, 9000, Profile.PRIO, 0),
    ],
)
def test_auto_leaves_splitting_to_tbf_where_that_is_cheaper(
    rate: int, mtu: int, profile: Profile, want: int
) -> None:
    got = plan.resolve_segment_limit(policy(rate), device(mtu=mtu), rate, profile)
    assert got == want, f"got {got}, want {want}"


def test_a_segment_limit_that_was_asked_for_holds_under_tbf_too() -> None:
    asked = dataclasses.replace(policy(GBIT), segment_limit_bytes=9_000)
    assert plan.resolve_segment_limit(asked, device(), GBIT, Profile.PRIO) == 9_000


@pytest.mark.parametrize(
    ("rate", "mtu", "named"),
    [(100 * MBIT, 1500, True), (GBIT, 1500, False), (GBIT, 9000, True), (2 * GBIT, 9000, False)],
)
def test_plan_names_prio_where_it_measured_better(rate: int, mtu: int, named: bool) -> None:
    _, why = plan.choose_profile(device(mtu=mtu), DEBIAN, None, rate)
    assert ("--profile prio" in why) is named, f"got {why!r}"


# HTB


@given(RATES, MTUS, st.booleans())
def test_bursts_hold_two_segments_and_50_us(rate: int, mtu: int, capped: bool) -> None:
    segment = plan.auto_segment_limit(rate, mtu) if capped else 0
    packet = plan.wire_scale(device(mtu=mtu), segment).packet_bytes
    for node in htb(rate, mtu=mtu, segment=segment).classes:
        for burst, speed in (
            (node.burst_bytes, node.rate_bytes_per_s),
            (node.cburst_bytes, node.ceil_bytes_per_s),
        ):
            want = max(2 * packet, speed * 50e-6)
            assert want <= burst <= want + 1, f"C55: got {burst} B, want {want} B at {speed} B/s"


def test_burst_is_bounded_in_time() -> None:
    for rate in (100 * MBIT, GBIT, 10 * GBIT, 100 * GBIT):
        root = htb(rate).classes[0]
        burst_s = root.cburst_bytes / root.ceil_bytes_per_s
        assert burst_s <= 0.001, f"C56: got {burst_s} s at {rate} bit/s, want at most 1 ms"


@given(RATES, MTUS)
def test_quantum_is_at_least_a_frame_and_warns_nobody(rate: int, mtu: int) -> None:
    for node in htb(rate, mtu=mtu).classes:
        assert mtu <= node.quantum_bytes <= 60_000, f"C58: got {node.quantum_bytes} at MTU {mtu}"


@given(RATES, MTUS, st.integers(min_value=1, max_value=16))
def test_own_rates_fit_the_link_and_every_rate_its_ceiling(rate: int, mtu: int, count: int) -> None:
    tree = htb(rate, mtu=mtu, policy=policy(rate, many_classes(rate, count)))
    root = tree.classes[0]
    leaves = sum(node.rate_bytes_per_s for node in tree.classes if node.leaf)
    slack = 2 * count  # a rate is at least 1
    assert leaves <= root.rate_bytes_per_s + slack, f"got {leaves}, want {root.rate_bytes_per_s}"
    for node in tree.classes:
        assert 0 < node.rate_bytes_per_s <= node.ceil_bytes_per_s <= root.ceil_bytes_per_s


@given(st.integers(min_value=1, max_value=16))
def test_class_ids_are_unique_in_range_and_best_effort(count: int) -> None:
    tree = htb(GBIT, policy=policy(GBIT, many_classes(GBIT, count)))
    minors = [node.minor for node in tree.classes]
    assert len(set(minors)) == len(minors) == 1 + 3 * count, f"C59: got {minors}"
    for minor in minors:
        assert 0x10 <= minor <= 0xFFFE, f"C59: got {minor:#x}"
        assert minor & 0xF == 0, f"got hardware class {minor & 0xF}, want 0 (best effort)"


def test_class_number_without_an_id_is_refused() -> None:
    for number in (-1, 255, 65_536):
        with pytest.raises(ValueError, match="class id"):
            plan.inner_minor(number)


def test_parents_come_before_children() -> None:
    seen = {0}
    for node in htb(GBIT).classes:
        assert node.parent_minor in seen, f"got parent {node.parent_minor:x} after its child"
        seen.add(node.minor)


def test_every_class_has_a_twin_leaf_under_one_parent() -> None:
    tree = htb(GBIT)
    for name in ("signal", "stream", "normal", "bulk"):
        live, twin = leaf_of(tree, name), leaf_of(tree, name, twin=True)
        assert live.parent_minor == twin.parent_minor
        inner = next(node for node in tree.classes if node.minor == live.parent_minor)
        want = max(live.ceil_bytes_per_s, twin.ceil_bytes_per_s)
        assert inner.ceil_bytes_per_s == want, f"{name}: got {inner.ceil_bytes_per_s}, want {want}"
        assert live.priority == twin.priority
        assert tree.priorities[name] == plan.MAJOR << 16 | live.minor
        assert tree.safe_priorities[name] == plan.MAJOR << 16 | twin.minor


def test_packets_without_a_class_go_to_the_default() -> None:
    tree = htb(GBIT)
    assert tree.default_minor == leaf_of(tree, "normal").minor


def test_ceiling_is_the_wire_rate_that_full_packets_get() -> None:
    tree = htb(100 * MBIT)
    scale = plan.wire_scale(device(), 3_028)
    got = scale.wire_bits_per_s(leaf_of(tree, "bulk").ceil_bytes_per_s)
    assert abs(got - 80 * MBIT) <= 10, f"got {got} bit/s, want 80 Mbit/s"


def test_ingress_without_a_ceiling_is_limited_by_the_link_only() -> None:
    tree = htb(GBIT, direction=Direction.INGRESS)
    root = tree.classes[0]
    for node in tree.classes:
        assert node.ceil_bytes_per_s == root.ceil_bytes_per_s, f"got a limit on {node}"


@given(RATES, MTUS)
def test_fifo_holds_four_packets_and_two_milliseconds(rate: int, mtu: int) -> None:
    tree = htb(rate, mtu=mtu)
    packet = plan.wire_scale(device(mtu=mtu), plan.auto_segment_limit(rate, mtu)).packet_bytes
    for node in tree.classes:
        if node.leaf is None:
            continue
        assert node.leaf.kind == "bfifo"
        want = max(4 * packet, node.ceil_bytes_per_s * 0.002)
        assert node.leaf.limit_bytes >= want, f"got {node.leaf.limit_bytes} B, want {want} B"


def test_fifo_of_bulk_holds_what_eight_local_senders_keep_in_it() -> None:
    leaf = leaf_of(htb(100 * MBIT), "bulk").leaf
    assert leaf is not None
    assert leaf.limit_bytes == 65_536, f"got {leaf.limit_bytes} B, want 64 KiB"


def test_fifo_floor_is_no_long_queue_at_a_low_rate() -> None:
    for node in htb(MBIT).classes:
        if node.leaf:
            seconds = node.leaf.limit_bytes / node.ceil_bytes_per_s
            assert seconds <= 0.4, f"got {seconds} s of queue, want at most 0.4 s"


@given(RATES, MTUS)
def test_fq_codel_gets_host_values(rate: int, mtu: int) -> None:
    for node in htb(rate, mtu=mtu, kernel=DEBIAN).classes:
        leaf = node.leaf
        if leaf is None:
            continue
        assert leaf.kind == "fq_codel"
        assert leaf.ecn
        assert leaf.target_us >= 100
        frames_us = 2 * (mtu + 38) * 1e6 / node.ceil_bytes_per_s
        assert leaf.target_us >= frames_us * 0.98, f"got {leaf.target_us} us, want {frames_us} us"
        assert leaf.interval_us >= 20 * leaf.target_us
        assert 1 << 20 <= leaf.limit_bytes <= 32 << 20


def test_fq_codel_target_is_no_internet_default_on_a_fast_link() -> None:
    leaf = leaf_of(htb(GBIT, kernel=DEBIAN), "bulk").leaf
    assert leaf is not None
    assert leaf.target_us == 100, f"got {leaf.target_us} us, want 100 us"
    assert leaf.interval_us == 5_000, f"got {leaf.interval_us} us, want 5 ms"


# In-place changes


def change(
    tree: TreePlan, live: int, safe: int, kernel: KernelFacts = DEV_KERNEL
) -> tuple[HtbClassPlan, ...]:
    return plan.class_rate_change(
        tree,
        policy(GBIT),
        device(),
        kernel,
        "bulk",
        live_ceiling_bits_per_s=live,
        safe_ceiling_bits_per_s=safe,
        link_rate_bits_per_s=GBIT,
        segment_limit_bytes=3_125,
    )


def test_lower_ceiling_changes_the_leaf_before_the_node_above() -> None:
    tree = htb(GBIT)
    got = change(tree, 200 * MBIT, 500 * MBIT)
    assert [node.minor for node in got] == [0x400, 0x420], f"got {got}"
    assert got[0].leaf == leaf_of(tree, "bulk").leaf, "the queue must stay as it is"


def test_higher_ceiling_changes_the_node_above_first() -> None:
    got = change(htb(GBIT), GBIT, 500 * MBIT)
    assert [node.minor for node in got] == [0x420, 0x400], f"got {got}"


def test_a_changed_ceiling_moves_the_target_of_fq_codel_and_not_its_limit() -> None:
    tree = htb(GBIT, kernel=DEBIAN)
    before = leaf_of(tree, "bulk").leaf
    lower = plan.with_changes(tree, change(tree, 20 * MBIT, 10 * MBIT, DEBIAN))
    after = leaf_of(lower, "bulk").leaf
    assert before is not None
    assert after is not None
    assert after.limit_bytes == before.limit_bytes, f"got {after}, want no packet to drop"
    fresh = plan.plan_leaf(DEBIAN, plan.wire_scale(device(), 3_125), 20 * MBIT, urgent=False)
    want = (fresh.target_us, fresh.interval_us)
    assert (after.target_us, after.interval_us) == want, f"got {after}, want {want}"
    assert after.target_us > 10 * before.target_us, f"got {after} after {before}"


def test_change_and_change_back_is_the_first_plan() -> None:
    tree = htb(GBIT)
    lower = plan.with_changes(tree, change(tree, 20 * MBIT, 10 * MBIT))
    assert leaf_of(lower, "bulk").ceil_bytes_per_s < leaf_of(tree, "bulk").ceil_bytes_per_s
    back = plan.with_changes(lower, change(lower, 800 * MBIT, 500 * MBIT))
    assert back == tree
    assert change(back, 800 * MBIT, 500 * MBIT) == ()


@given(st.integers(min_value=MBIT, max_value=GBIT), st.integers(min_value=MBIT, max_value=GBIT))
def test_change_touches_its_class_only(live: int, safe: int) -> None:
    got = change(htb(GBIT), live, safe)
    assert {node.traffic_class for node in got} <= {"bulk"}
    assert all(node.rate_bytes_per_s <= node.ceil_bytes_per_s for node in got)


# prio


def prio(
    link: int, facts: DeviceFacts, classes: tuple[TrafficClass, ...] | None = None
) -> TreePlan:
    return plan.plan_tree(
        policy(link, classes),
        facts,
        DEBIAN,
        link_rate_bits_per_s=link,
        profile=Profile.PRIO,
        segment_limit_bytes=0,
    )


def test_prio_bands_follow_priority_and_sit_under_a_tbf() -> None:
    tree = prio(100 * MBIT, device())
    assert tree.priorities == {
        "signal": 0x53490001,
        "stream": 0x53490002,
        "normal": 0x53490003,
        "bulk": 0x53490004,
    }
    assert tree.default_minor == 3
    assert tree.tbf_rate_bytes_per_s == 12_500_000
    assert tree.tbf_overhead_bytes == 24
    assert tree.tbf_burst_bytes == 1538 + 625, f"got {tree.tbf_burst_bytes}, want a frame, 50 us"


def test_prio_stands_alone_where_the_device_pushes_back() -> None:
    tree = prio(GBIT, device(kind="", speed_bits_per_s=GBIT))
    assert tree.tbf_rate_bytes_per_s == 0
    assert tree.priorities["signal"] == 0x53480001


@given(st.integers(min_value=MBIT, max_value=34 * GBIT), MTUS)
def test_tbf_burst_holds_a_frame_and_50_us_but_not_two_frames(rate: int, mtu: int) -> None:
    got = prio(rate, device(mtu=mtu)).tbf_burst_bytes
    frame, slack = mtu + 14 + 24, int(rate * 50e-6 / 8)
    assert got >= frame
    assert got >= slack
    assert got < max(2 * frame, slack + 1), f"got {got} B, want TBF to split two frames"


def test_prio_with_one_class_still_has_two_bands() -> None:
    assert len(prio(GBIT, device(), many_classes(GBIT, 1)).bands) == 2
    assert len(prio(GBIT, device(), many_classes(GBIT, 16)).bands) == 16


# edt


def edt(link: int, facts: DeviceFacts, policy_in: Policy | None = None, **more: Any) -> TreePlan:
    chosen = policy_in or policy(link)
    limit = plan.resolve_segment_limit(chosen, facts, link, Profile.EDT)
    return plan.plan_tree(
        chosen,
        facts,
        more.pop("kernel", DEBIAN),
        link_rate_bits_per_s=link,
        profile=Profile.EDT,
        segment_limit_bytes=limit,
    )


def test_edt_paces_what_stands_behind_the_default_class() -> None:
    tree = edt(GBIT, device())
    assert tree.priorities == {"signal": 7, "stream": 6, "normal": 0, "bulk": 2}
    assert (tree.paced_always, tree.paced) == (("bulk",), ("normal", "bulk"))
    assert tree.safe_priorities == tree.priorities, "a lease must not change the queue"


@given(st.integers(min_value=2, max_value=16))
def test_edt_never_paces_the_control_class_nor_what_is_served_before_the_default(
    count: int,
) -> None:
    chosen = policy(GBIT, many_classes(GBIT, count))
    tree = edt(GBIT, device(), chosen)
    default = chosen.class_named(chosen.default_class)
    for one in chosen.classes:
        urgent = one.name == chosen.control_class or one.priority < default.priority
        assert (one.name in tree.paced) == (not urgent), f"{one}: got {tree.paced}"
        assert tree.priorities[one.name] in ((6, 7) if urgent else (0, 2)), f"got {tree}"


def test_edt_paces_the_last_class_where_it_is_the_default() -> None:
    classes = (
        TrafficClass("signal", 0, 0, GBIT // 10, GBIT, GBIT),
        TrafficClass("rest", 1, 3, GBIT // 10, GBIT, GBIT // 2),
    )
    chosen = dataclasses.replace(policy(GBIT, classes), default_class="rest")
    tree = edt(GBIT, device(), chosen)
    assert (tree.paced_always, tree.priorities["rest"]) == (("rest",), 2), f"got {tree}"


def test_edt_holds_the_link_only_where_the_device_is_faster() -> None:
    clock = edt(GBIT, device()).link_clock
    assert clock is not None
    assert (clock.rate_bits_per_s, clock.rest_bits_per_s) == (GBIT, GBIT * 55 // 100), f"{clock}"
    assert edt(GBIT, device(speed_bits_per_s=10 * GBIT)).link_clock is not None
    assert edt(GBIT, device(speed_bits_per_s=GBIT)).link_clock is None


@pytest.mark.parametrize(
    ("rate", "mtu", "want"),
    [
        (100 * MBIT, 1500, 1_514),
        (300 * MBIT, 1500, 3_028),
        (300 * MBIT, 9000, 9_014),
        (GBIT, 9000, 18_028),
        (25 * GBIT, 1500, 0),
    ],
)
def test_edt_lets_a_long_frame_go_alone(rate: int, mtu: int, want: int) -> None:
    got = plan.auto_segment_limit(rate, mtu, Profile.EDT)
    assert got == want, f"got {got} B, want {want} B"
    segments = plan.capped_gso(GsoLimits(65_536, 65_535, 65_536), got, mtu).max_segments
    assert segments == (1 if want in (1_514, 9_014) else 2 if want else 65_535), f"got {segments}"
    assert edt(rate, device(mtu=mtu)).segment_wire_bytes <= max(1, segments) * (mtu + 38)


@given(RATES, MTUS)
def test_fq_drops_nothing_before_the_program_does(rate: int, mtu: int) -> None:
    tree = edt(rate, device(mtu=mtu))
    assert tree.fq is not None
    hard_ns = 4 * max(500_000, 8 * tree.segment_wire_bytes * 8_000_000_000 // rate)
    frames = rate * hard_ns // (8_000_000_000 * 84)
    assert tree.fq.flow_limit_packets >= min(frames, 100_000), f"got {tree.fq}"
    assert tree.fq.limit_packets >= tree.fq.flow_limit_packets + 10_000, f"got {tree.fq}"


def test_edt_names_the_classes_whose_queue_would_be_long() -> None:
    assert plan.slow_paced_classes(edt(20 * MBIT, device()), policy(20 * MBIT), 20 * MBIT) == ()
    slow = plan.slow_paced_classes(edt(8 * MBIT, device()), policy(8 * MBIT), 8 * MBIT)
    assert slow == ("bulk",), f"got {slow}, want bulk with a safe ceiling of 4 Mbit/s"


def test_edt_states_bands_only_where_fq_has_them() -> None:
    new = dataclasses.replace(DEBIAN, fq_bands=True)
    for kernel, want in ((DEBIAN, False), (new, True)):
        tree = edt(GBIT, device(), kernel=kernel)
        assert tree.fq is not None
        assert tree.fq.bands is want
    assert edt(GBIT, device(tx_queues=8)).queues == 8


# Profile


@pytest.mark.parametrize(
    ("facts", "kernel", "link", "want"),
    [
        (device(), DEV_KERNEL, 10 * GBIT, Profile.HTB),
        (device(tx_queues=64), DEV_KERNEL, 25 * GBIT, Profile.HTB),
        (device(tx_queues=8), DEV_KERNEL, 100 * GBIT, Profile.HTB),
        (device(tx_queues=64), DEV_KERNEL, 100 * GBIT, Profile.POLICE),
        (device(tx_queues=64), DEBIAN, 100 * GBIT, Profile.EDT),
        (device(tx_queues=64), DEBIAN, 25 * GBIT, Profile.HTB),
        (device(tx_queues=64, hardware_classes=4), DEBIAN, 100 * GBIT, Profile.POLICE),
        (device(), BARE, GBIT, Profile.POLICE),
        (
            device(),
            dataclasses.replace(DEBIAN, qdiscs=DEBIAN.qdiscs - {"htb"}),
            GBIT,
            Profile.PRIO,
        ),
        (device(egress_qos_map=True), DEBIAN, GBIT, Profile.POLICE),
        (device(hardware_classes=4), DEBIAN, GBIT, Profile.HTB),
    ],
)
def test_profile_is_chosen_by_what_kernel_and_device_can(
    facts: DeviceFacts, kernel: KernelFacts, link: int, want: Profile
) -> None:
    got, reason = plan.choose_profile(facts, kernel, None, link)
    assert got is want, f"got {got} ({reason}), want {want}"
    assert reason


@pytest.mark.parametrize(
    ("facts", "kernel", "requested", "link", "error", "reference"),
    [
        (device(), BARE, Profile.HTB, GBIT, UnsupportedError, "profile-unsupported"),
        (device(), DEV_KERNEL, Profile.PRIO, GBIT, UnsupportedError, "profile-unsupported"),
        # C52: TBF is not used above 34 Gbit/s.
        (device(), DEBIAN, Profile.PRIO, 35 * GBIT, UnsupportedError, "profile-unsupported"),
        (device(egress_qos_map=True), DEBIAN, Profile.HTB, GBIT, ConflictError, "egress-qos-map"),
        (device(hardware_classes=4), DEBIAN, Profile.PRIO, GBIT, ConflictError, "hardware-classes"),
        (device(hardware_classes=4), DEBIAN, Profile.EDT, GBIT, ConflictError, "hardware-classes"),
        (device(), DEV_KERNEL, Profile.EDT, GBIT, UnsupportedError, "profile-unsupported"),
        (device(kind="ifb"), DEBIAN, Profile.EDT, GBIT, UnsupportedError, "profile-unsupported"),
        (
            device(tx_queues=2),
            dataclasses.replace(DEBIAN, qdiscs=DEBIAN.qdiscs - {"mq"}),
            Profile.EDT,
            GBIT,
            UnsupportedError,
            "profile-unsupported",
        ),
    ],
)
def test_profile_that_cannot_work_is_refused(
    facts: DeviceFacts,
    kernel: KernelFacts,
    requested: Profile,
    link: int,
    error: type[ShapeError],
    reference: str,
) -> None:
    with pytest.raises(error) as caught:
        plan.choose_profile(facts, kernel, requested, link)
    assert caught.value.reference == reference
    assert caught.value.hint


def test_police_has_no_tree() -> None:
    tree = htb(GBIT, profile=Profile.POLICE)
    assert (tree.classes, tree.bands, tree.priorities) == ((), (), {})
