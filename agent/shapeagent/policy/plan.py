# SPDX-License-Identifier: Apache-2.0
"""From policy, device and kernel to the numbers of a qdisc tree. Pure.

The HTB tree, for each class n (0..15):

    5348:10             root class, rate = ceil = link
      5348:(n+1)20      inner node: guarantee, ceil max(live, safe ceiling)
        5348:(n+1)00    live leaf:  guarantee, ceil live ceiling
        5348:(n+1)10    twin leaf:  next to nothing, ceil safe ceiling

The twin takes the class's packets when a lease runs out and the safe ceiling
is above the live one; the inner node keeps both together under one ceiling
while the live leaf drains (bpf-facts §5.13).

All minors end in 0: the low four bits of skb->priority choose the hardware
traffic class (mqprio, DCB), and 0 is best effort there, for every class.

Rates are wire rates: 24 B per frame of preamble, FCS and gap count. HTB adds
its `overhead` once per packet, and a segmentation-offload packet is N frames,
so the rates it gets are scaled by what it sees of N full frames over what
they take on the wire (`WireScale`). Single frames are then held up to 1.6 %
under their rate, never over it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from shapeagent.model.errors import ConflictError, UnsupportedError
from shapeagent.model.types import (
    DeviceFacts,
    Direction,
    FqPlan,
    GsoLimits,
    HtbClassPlan,
    KernelFacts,
    LeafPlan,
    LinkClock,
    Policy,
    Profile,
    TrafficClass,
    TreePlan,
)
from shapeagent.policy.meters import PACE_HARD_SHIFT, least_paced_rate, pace_for

WIRE_OVERHEAD_BYTES = 24  # preamble 8, FCS 4, gap 12 (IEEE 802.3)
ETHERNET_HEADER_BYTES = 14
TCP_HEADERS_BYTES = 52  # IPv4 20, TCP 20, time stamps 12
LEGACY_GSO_BYTES = 65_536  # GSO_LEGACY_MAX_SIZE

# "SH": nobody else's 1: is taken for ours, nor ours for theirs.
MAJOR = 0x5348
ROOT_MINOR = 0x10
MIN_MINOR, MAX_MINOR = 0x10, 0xFFFE

# Segment limit: 25 us of the link, where one segment cannot be pre-empted.
SEGMENT_NS = 25_000
# fq splits no packet. Where one frame takes longer than this (below 123 Mbit/s at
# 1,500 bytes), edt lets it go alone: that costs at most 10,000 packets a second.
LONE_FRAME_NS = 100_000
# Timer slack of the kernel: a shorter burst leaves the link idle (C55).
BURST_NS = 50_000
MAX_QUANTUM_BYTES = 60_000  # well under 200,000, where HTB would warn (C58)
HTB_DEFAULT_MAX_BITS_PER_S = 25_000_000_000  # HTB's root is one lock
HTB_DEFAULT_MAX_QUEUES = 8
# `make bench`, signal p99 where a frame takes 123 us: htb 255 us, prio 159; where it takes 72
# (1 Gbit/s, 9,000 bytes) 140 and 89; where it takes 41 it is 109 and 111.
PRIO_BETTER_FRAME_NS = 60_000
TBF_SPLIT_BELOW_FRAMES = 11  # above it, small packets cost less than splitting large ones
TBF_MAX_BITS_PER_S = ((1 << 32) - 1) * 8  # its rate is a u32 of bytes per second (C52)
MIN_RATE_BYTES_PER_S = 1_000
TWIN_RATE_PART = 100  # the twin's own rate: a hundredth of the guarantee

# bfifo: 2 ms, at least 4 packets, and never so small that the senders of
# this host overrun it at once: each TCP socket keeps about two packets in the
# qdisc (TCP small queues), so eight flows with 3 KB packets need 49 KB. A
# decode step sends one segment per stream back to back, so urgent classes,
# whose queue is empty otherwise, get four times that.
FIFO_NS = 2_000_000
FIFO_FLOOR_BYTES = 65_536
FIFO_URGENT_FLOOR_BYTES = 262_144
FIFO_FLOOR_MAX_NS = 100_000_000  # the floor must not become a queue of its own
FIFO_MIN_FRAMES = 16
# fq_codel on a host: RTTs of tens of microseconds, not of the Internet.
CODEL_MIN_TARGET_US = 100
CODEL_MIN_INTERVAL_US = 5_000
CODEL_INTERVAL_TARGETS = 20
CODEL_MEMORY_NS = 40_000_000
CODEL_MIN_MEMORY_BYTES = 1 << 20
CODEL_MAX_MEMORY_BYTES = 32 << 20

# skb->priority under edt: fq looks at the low four bits (linux/pkt_sched.h).
TC_PRIO_BESTEFFORT, TC_PRIO_BULK, TC_PRIO_INTERACTIVE, TC_PRIO_CONTROL = 0, 2, 6, 7
FQ_LIMIT_PACKETS = 10_000  # the kernel's default, for what is not paced
FQ_MIN_FLOW_LIMIT_PACKETS = 100  # the kernel's default
FQ_MAX_PACED_PACKETS = 100_000
# Flows without a socket (forwarded, unconnected) share a queue by hash, and in it an
# unpaced packet waits for the stamp of a paced one: make that rare. 8 MB at most.
FQ_ORPHAN_MASK = 0xFFFF
FQ_HORIZON_US = 10_000_000  # the kernel's default
LEAST_WIRE_BYTES = 84  # of a frame: 60, and what the NIC adds


@dataclass(frozen=True, slots=True)
class WireScale:
    """How bytes as HTB counts them relate to bytes on the wire."""

    frame_bytes: int  # a full frame as the qdisc sees it, link-layer header included
    segments: int  # full frames in the largest packet

    @property
    def packet_bytes(self) -> int:
        """The largest packet as HTB counts it, overhead included."""
        return self.segments * self.frame_bytes + WIRE_OVERHEAD_BYTES

    @property
    def packet_wire_bytes(self) -> int:
        """The largest packet on the wire."""
        return self.segments * (self.frame_bytes + WIRE_OVERHEAD_BYTES)

    def kernel_bytes_per_s(self, wire_bits_per_s: int) -> int:
        """Return the rate to give to HTB for a wire rate, rounded down."""
        return wire_bits_per_s * self.packet_bytes // (8 * self.packet_wire_bytes)

    def wire_bits_per_s(self, kernel_bytes_per_s: int) -> int:
        """Return the wire rate of a rate that HTB has, rounded to the nearest bit."""
        packet = self.packet_bytes
        return (kernel_bytes_per_s * 8 * self.packet_wire_bytes + packet // 2) // packet


def segments_per_packet(limit_bytes: int, max_segments: int, mtu: int) -> int:
    """Return how many full frames the largest local TCP packet holds, at least 1."""
    mss = max(1, mtu - TCP_HEADERS_BYTES)
    room = limit_bytes - TCP_HEADERS_BYTES - ETHERNET_HEADER_BYTES
    return max(1, min(max_segments, room // mss))


def wire_scale(device: DeviceFacts, segment_limit_bytes: int) -> WireScale:
    """Return the scale of a device under a segment limit (0 = off: the device's own)."""
    header = 0 if device.l3_only else ETHERNET_HEADER_BYTES
    largest = device.gso_max_size
    if segment_limit_bytes:
        largest = min(largest, segment_limit_bytes)
    segments = segments_per_packet(largest, max(1, device.gso_max_segs), device.mtu)
    return WireScale(frame_bytes=device.mtu + header, segments=segments)


def frame_time_ns(mtu: int, link_rate_bits_per_s: int) -> int:
    """Return how long a full frame takes on the wire, in ns, its 24 B of overhead included."""
    wire_bytes = mtu + ETHERNET_HEADER_BYTES + WIRE_OVERHEAD_BYTES
    return wire_bytes * 8_000_000_000 // link_rate_bits_per_s


def auto_segment_limit(link_rate_bits_per_s: int, mtu: int, profile: Profile | None = None) -> int:
    """Return the segment limit in bytes for a link: 25 us of it, at least two frames, 0 = off.

    Off where one 64 KB segment takes under 25 us (above 20.9 Gbit/s): there
    the limit would cost CPU for nothing. Two frames, not one, since TCP sends
    at least two segments a packet when it can (tcp_min_tso_segs); under edt
    one, where it takes longer than 100 us.
    """
    limit = link_rate_bits_per_s * SEGMENT_NS // 8_000_000_000
    if limit > LEGACY_GSO_BYTES:
        return 0
    frame = mtu + ETHERNET_HEADER_BYTES
    if profile is Profile.EDT and frame_time_ns(mtu, link_rate_bits_per_s) > LONE_FRAME_NS:
        return frame
    return min(max(limit, 2 * frame), LEGACY_GSO_BYTES)


def segment_cpu_s_per_gb(limit_bytes: int) -> float:
    """Return about how many CPU seconds a GB of bulk costs under a segment limit, 0 = off.

    Each packet through the stack costs about the same, so it goes with their
    number. Source: `make perf` on two EPYC cores, kernel 6.18, over veth: 0.36
    without, 0.72 at 31,250 B, 5.2 at 3,125 B.
    """
    return 0.36 + (15_000 / limit_bytes if limit_bytes else 0.0)


def resolve_segment_limit(
    policy: Policy, device: DeviceFacts, link_rate_bits_per_s: int, profile: Profile
) -> int:
    """Return the segment limit to set in bytes; 0 = leave the device as it is.

    TBF splits what its bucket does not hold, and at lower rates that costs less
    CPU than packets that TCP made small (`make bench` at 300 Mbit/s: 22 against
    27 us a frame), so under it `auto` is off.
    """
    wanted = policy.segment_limit_bytes
    if wanted is None:
        wanted = auto_segment_limit(link_rate_bits_per_s, device.mtu, profile)
        few = TBF_SPLIT_BELOW_FRAMES * (device.mtu + ETHERNET_HEADER_BYTES)
        if tbf_splits(device, link_rate_bits_per_s, profile) and wanted < few:
            wanted = 0
    return wanted if wanted < device.gso_max_size else 0


def tbf_splits(device: DeviceFacts, link_rate_bits_per_s: int, profile: Profile) -> bool:
    """Return True where a TBF of ours stands at the root and splits large packets."""
    return profile is Profile.PRIO and needs_tbf(device, link_rate_bits_per_s)


def capped_gso(current: GsoLimits, segment_limit_bytes: int, mtu: int) -> GsoLimits:
    """Return the limits to set for a segment limit: never above what the device has now.

    The number of segments is limited with it: a packet of many tiny segments
    is short in bytes and long on the wire. Never below two, TCP's own least,
    except where the limit is one frame.
    """
    if not segment_limit_bytes:
        return current
    segments = segments_per_packet(segment_limit_bytes, 0xFFFF, mtu)
    if segment_limit_bytes != mtu + ETHERNET_HEADER_BYTES:
        segments = max(2, segments)
    ipv4 = current.ipv4_max_size_bytes
    return GsoLimits(
        max_size_bytes=min(current.max_size_bytes, segment_limit_bytes),
        max_segments=min(current.max_segments, segments),
        ipv4_max_size_bytes=None if ipv4 is None else min(ipv4, segment_limit_bytes),
    )


def choose_profile(
    device: DeviceFacts,
    kernel: KernelFacts,
    requested: Profile | None,
    link_rate_bits_per_s: int,
) -> tuple[Profile, str]:
    """Return the profile to use and why.

    Raises: UnsupportedError profile-unsupported; ConflictError
        egress-qos-map, hardware-classes where a requested profile would
        change what the device reads from skb->priority.
    """
    if requested is not None:
        problem = _profile_problem(requested, device, kernel, link_rate_bits_per_s)
        if problem is not None:
            raise problem
        return requested, "asked for"
    problem = _profile_problem(Profile.HTB, device, kernel, link_rate_bits_per_s)
    if problem is None:
        if link_rate_bits_per_s <= HTB_DEFAULT_MAX_BITS_PER_S:
            reason = "the kernel has htb and the link is not above 25 Gbit/s"
            prio = _profile_problem(Profile.PRIO, device, kernel, link_rate_bits_per_s)
            if prio is None and frame_time_ns(device.mtu, link_rate_bits_per_s) > (
                PRIO_BETTER_FRAME_NS
            ):
                reason += (
                    "; --profile prio keeps the delay of signal up to a third shorter here, "
                    "but knows no guarantees: a class can starve those below it"
                )
            return Profile.HTB, reason
        if device.tx_queues <= HTB_DEFAULT_MAX_QUEUES:
            return Profile.HTB, "the kernel has htb and the device at most 8 transmit queues"
        one_lock = f"htb's one lock would slow {device.tx_queues} queues above 25 Gbit/s"
        other = _profile_problem(Profile.EDT, device, kernel, link_rate_bits_per_s)
        if other is None:
            return Profile.EDT, one_lock
        return Profile.POLICE, f"{one_lock}; no edt: {other.message}"
    if _profile_problem(Profile.PRIO, device, kernel, link_rate_bits_per_s) is None:
        return Profile.PRIO, f"no htb here ({problem.message})"
    return Profile.POLICE, problem.message


def needs_tbf(device: DeviceFacts, link_rate_bits_per_s: int) -> bool:
    """Return True where the device is faster than the link, so that prio needs a TBF above it."""
    speed = device.speed_bits_per_s
    return speed is None or link_rate_bits_per_s < speed


def ceilings_of(
    traffic_class: TrafficClass, direction: Direction, link_rate_bits_per_s: int
) -> tuple[int, int]:
    """Return (live, safe) ceiling of a class in one direction, in bits per second.

    A class without an ingress ceiling is not limited on ingress: both are the link's.
    """
    if direction is Direction.EGRESS:
        live = traffic_class.ceiling_bits_per_s
    elif traffic_class.ingress_ceiling_bits_per_s is None:
        return link_rate_bits_per_s, link_rate_bits_per_s
    else:
        live = traffic_class.ingress_ceiling_bits_per_s
    safe = traffic_class.safe_ceiling_bits_per_s
    return min(live, link_rate_bits_per_s), min(safe, link_rate_bits_per_s)


def slow_paced_classes(
    tree: TreePlan, policy: Policy, link_rate_bits_per_s: int
) -> tuple[str, ...]:
    """Return the paced classes with a ceiling at which 8 segments take more than 20 ms."""
    least = least_paced_rate(tree.segment_wire_bytes)
    return tuple(
        one.name
        for one in policy.classes
        if one.name in tree.paced
        and min(ceilings_of(one, Direction.EGRESS, link_rate_bits_per_s)) < least
    )


def live_minor(class_number: int) -> int:
    """Return the HTB minor of a class's live leaf."""
    return _minor(class_number, 0x00)


def twin_minor(class_number: int) -> int:
    """Return the HTB minor of a class's twin leaf, for the safe ceiling."""
    return _minor(class_number, 0x10)


def inner_minor(class_number: int) -> int:
    """Return the HTB minor of the node above both leaves of a class."""
    return _minor(class_number, 0x20)


def plan_tree(
    policy: Policy,
    device: DeviceFacts,
    kernel: KernelFacts,
    *,
    link_rate_bits_per_s: int,
    profile: Profile,
    segment_limit_bytes: int,
    direction: Direction = Direction.EGRESS,
) -> TreePlan:
    """Return the qdisc tree of one direction; of `police` one without qdiscs.

    Args:
        segment_limit_bytes: as set on the device while attached, 0 = off.
    """
    scale = wire_scale(device, segment_limit_bytes)
    if profile is Profile.HTB:
        return _plan_htb(policy, kernel, scale, link_rate_bits_per_s, direction)
    if profile is Profile.PRIO:
        return _plan_prio(policy, device, kernel, scale, link_rate_bits_per_s)
    if profile is Profile.EDT:
        return _plan_edt(policy, device, kernel, scale, link_rate_bits_per_s)
    return TreePlan(profile=profile, handle=0, default_minor=0)


def class_rate_change(
    plan: TreePlan,
    policy: Policy,
    device: DeviceFacts,
    kernel: KernelFacts,
    class_name: str,
    *,
    live_ceiling_bits_per_s: int,
    safe_ceiling_bits_per_s: int,
    link_rate_bits_per_s: int,
    segment_limit_bytes: int,
    direction: Direction = Direction.EGRESS,
) -> tuple[HtbClassPlan, ...]:
    """Return the HTB classes to change in place for new ceilings of one class, in order.

    The node above both leaves goes first when its ceiling rises and last when
    it falls. Empty where nothing changes, or the tree is not HTB.

    Args:
        plan: the tree in force, earlier changes included (`with_changes`).
    """
    if plan.profile is not Profile.HTB:
        return ()
    old = policy.class_named(class_name)
    changed = dataclasses.replace(old, safe_ceiling_bits_per_s=safe_ceiling_bits_per_s)
    if direction is Direction.EGRESS:
        changed = dataclasses.replace(changed, ceiling_bits_per_s=live_ceiling_bits_per_s)
    else:
        changed = dataclasses.replace(changed, ingress_ceiling_bits_per_s=live_ceiling_bits_per_s)
    classes = tuple(changed if one.name == class_name else one for one in policy.classes)
    wanted = plan_tree(
        dataclasses.replace(policy, classes=classes),
        device,
        kernel,
        link_rate_bits_per_s=link_rate_bits_per_s,
        profile=plan.profile,
        segment_limit_bytes=segment_limit_bytes,
        direction=direction,
    )
    present = {node.minor: node for node in plan.classes}
    nodes = [
        dataclasses.replace(node, leaf=_leaf_in_place(present[node.minor].leaf, node.leaf))
        for node in wanted.classes
        if node.traffic_class == class_name
    ]
    inner = next(node for node in nodes if node.minor == inner_minor(old.number))
    if inner.ceil_bytes_per_s < present[inner.minor].ceil_bytes_per_s:
        nodes = [*(node for node in nodes if node is not inner), inner]
    return tuple(node for node in nodes if node != present[node.minor])


def _leaf_in_place(present: LeafPlan | None, wanted: LeafPlan | None) -> LeafPlan | None:
    """Return what a queue can become without a drop: its limit stays, its target follows."""
    if present is None or wanted is None or present.kind != wanted.kind:
        return present
    return dataclasses.replace(wanted, limit_bytes=present.limit_bytes)


def with_changes(plan: TreePlan, changes: Sequence[HtbClassPlan]) -> TreePlan:
    """Return the tree with the changed classes in place of those of the same minor."""
    new = {node.minor: node for node in changes}
    return dataclasses.replace(
        plan, classes=tuple(new.get(node.minor, node) for node in plan.classes)
    )


def plan_leaf(
    kernel: KernelFacts, scale: WireScale, rate_bits_per_s: int, *, urgent: bool
) -> LeafPlan:
    """Return the queue of a class whose ceiling is the rate.

    Args:
        urgent: the class is served before another one, so its queue is short
            by itself and its limit only has to hold bursts.
    """
    if "fq_codel" in kernel.qdiscs:
        # Four full frames, and two of the largest packets, leave in this time.
        frames = 4 * (scale.frame_bytes + WIRE_OVERHEAD_BYTES)
        queue_bytes = max(frames, 2 * scale.packet_wire_bytes)
        target = max(CODEL_MIN_TARGET_US, -(-queue_bytes * 8_000_000 // rate_bits_per_s))
        memory = 2 * rate_bits_per_s * CODEL_MEMORY_NS // 8_000_000_000
        return LeafPlan(
            kind="fq_codel",
            limit_bytes=min(max(memory, CODEL_MIN_MEMORY_BYTES), CODEL_MAX_MEMORY_BYTES),
            target_us=target,
            interval_us=max(CODEL_MIN_INTERVAL_US, CODEL_INTERVAL_TARGETS * target),
            ecn=True,
        )
    floor = min(
        FIFO_URGENT_FLOOR_BYTES if urgent else FIFO_FLOOR_BYTES,
        rate_bits_per_s * FIFO_FLOOR_MAX_NS // 8_000_000_000,
    )
    limit = max(
        4 * scale.packet_bytes,
        rate_bits_per_s * FIFO_NS // 8_000_000_000,
        FIFO_MIN_FRAMES * scale.frame_bytes,
        floor,
    )
    return LeafPlan(kind="bfifo", limit_bytes=min(limit, 0xFFFFFFFF))


def _minor(class_number: int, part: int) -> int:
    minor = 0x100 * (class_number + 1) + part
    if not (class_number >= 0 and MIN_MINOR <= minor <= MAX_MINOR):
        raise ValueError(f"class number {class_number} has no class id in 10..fffe (hex)")
    return minor


def _profile_problem(
    profile: Profile, device: DeviceFacts, kernel: KernelFacts, link_rate_bits_per_s: int
) -> ConflictError | UnsupportedError | None:
    """Return why the profile cannot be used, None where it can."""
    if profile is Profile.POLICE:
        return None
    if device.egress_qos_map:
        return ConflictError(
            "egress-qos-map",
            f"{device.name} maps skb->priority to VLAN priorities, and {profile} writes it.",
            hint="Use --profile police, or attach to the device below the VLAN.",
        )
    missing = {profile.value} - kernel.qdiscs
    if profile is not Profile.HTB and device.hardware_classes:
        return ConflictError(
            "hardware-classes",
            f"{device.name} chooses between {device.hardware_classes} hardware classes by "
            f"skb->priority, and {profile}'s band numbers would change that.",
            hint="Use --profile htb (its class ids are best effort there) or police.",
        )
    if profile is Profile.EDT:
        if device.kind == "ifb":
            return UnsupportedError(
                "profile-unsupported",
                f"{device.name} is an IFB: its packets carry the time of their arrival, which "
                "fq would take for a departure time.",
                hint="Use --profile htb or police.",
            )
        missing = {"fq", "mq"} if device.tx_queues > 1 else {"fq"}
        missing -= kernel.qdiscs
    if profile is Profile.PRIO and needs_tbf(device, link_rate_bits_per_s):
        missing |= {"tbf"} - kernel.qdiscs
        if link_rate_bits_per_s > TBF_MAX_BITS_PER_S:
            return UnsupportedError(
                "profile-unsupported",
                "tbf holds no rate above 34 Gbit/s.",
                hint="Use --profile htb or police.",
            )
    if missing:
        return UnsupportedError(
            "profile-unsupported",
            f"Kernel {kernel.release} has no qdisc {', '.join(sorted(missing))}.",
            hint="Use --profile police, or load the module: modprobe "
            + " ".join(f"sch_{kind}" for kind in sorted(missing)),
        )
    return None


def _burst(scale: WireScale, rate_bytes_per_s: int) -> int:
    """Return max(2 largest packets, 50 us of the rate) in bytes (C55, C56)."""
    return max(2 * scale.packet_bytes, -(-rate_bytes_per_s * BURST_NS // 1_000_000_000))


def _quantum(scale: WireScale) -> int:
    """Return one largest packet, at least one frame; HTB would warn of much less or more."""
    return max(scale.frame_bytes, min(scale.packet_bytes, MAX_QUANTUM_BYTES))


def _htb_node(
    scale: WireScale, minor: int, parent: int, rate: int, ceil: int, *, priority: int = 0
) -> HtbClassPlan:
    """Return a class with rates in bytes per second, the rate cut to the ceiling."""
    ceil = max(ceil, 1)
    rate = max(min(rate, ceil), 1)
    return HtbClassPlan(
        minor=minor,
        parent_minor=parent,
        rate_bytes_per_s=rate,
        ceil_bytes_per_s=ceil,
        burst_bytes=_burst(scale, rate),
        cburst_bytes=_burst(scale, ceil),
        quantum_bytes=_quantum(scale),
        priority=priority,
        overhead_bytes=WIRE_OVERHEAD_BYTES,
    )


def _own_rates(
    classes: Sequence[TrafficClass], scale: WireScale, link_bytes_per_s: int
) -> dict[str, tuple[int, int]]:
    """Return class → (live, twin) own rate in bytes per second; all together fit the link.

    HTB knows no rate 0, so a class without a guarantee gets next to nothing,
    and where guarantees fill the link all are scaled down to make room.
    """
    least = max(1, min(MIN_RATE_BYTES_PER_S, link_bytes_per_s // 256))
    rates = {}
    for one in classes:
        live = max(least, scale.kernel_bytes_per_s(one.guarantee_bits_per_s))
        rates[one.name] = (live, max(1, live // TWIN_RATE_PART))
    total = sum(live + twin for live, twin in rates.values())
    if total <= link_bytes_per_s:
        return rates
    return {
        name: (max(1, live * link_bytes_per_s // total), max(1, twin * link_bytes_per_s // total))
        for name, (live, twin) in rates.items()
    }


def _plan_htb(
    policy: Policy,
    kernel: KernelFacts,
    scale: WireScale,
    link_rate_bits_per_s: int,
    direction: Direction,
) -> TreePlan:
    link = scale.kernel_bytes_per_s(link_rate_bits_per_s)
    own_rates = _own_rates(policy.classes, scale, link)
    last_priority = max(one.priority for one in policy.classes)
    nodes = [_htb_node(scale, ROOT_MINOR, 0, link, link)]
    for one in policy.classes:
        live_bits, safe_bits = ceilings_of(one, direction, link_rate_bits_per_s)
        live, safe = scale.kernel_bytes_per_s(live_bits), scale.kernel_bytes_per_s(safe_bits)
        live_rate, twin_rate = own_rates[one.name]
        inner = _htb_node(
            scale, inner_minor(one.number), ROOT_MINOR, live_rate, max(live, safe),
            priority=one.priority,
        )  # fmt: skip
        nodes.append(dataclasses.replace(inner, traffic_class=one.name))
        leaves = (
            (live_minor(one.number), live_rate, live, live_bits, False),
            (twin_minor(one.number), twin_rate, safe, safe_bits, True),
        )
        for minor, rate, ceil, ceiling_bits, twin in leaves:
            node = _htb_node(scale, minor, inner.minor, rate, ceil, priority=one.priority)
            urgent = one.priority < last_priority
            leaf = plan_leaf(kernel, scale, max(1, ceiling_bits), urgent=urgent)
            nodes.append(dataclasses.replace(node, traffic_class=one.name, twin=twin, leaf=leaf))
    numbers = {one.name: one.number for one in policy.classes}
    return TreePlan(
        profile=Profile.HTB,
        handle=MAJOR,
        default_minor=live_minor(numbers[policy.default_class]),
        classes=tuple(nodes),
        priorities={name: MAJOR << 16 | live_minor(n) for name, n in numbers.items()},
        safe_priorities={name: MAJOR << 16 | twin_minor(n) for name, n in numbers.items()},
    )


def _plan_prio(
    policy: Policy,
    device: DeviceFacts,
    kernel: KernelFacts,
    scale: WireScale,
    link_rate_bits_per_s: int,
) -> TreePlan:
    """Return strict bands, the most urgent first; class ceilings are metered by the program.

    The TBF above them splits large packets, so it counts each frame with its
    overhead, and its rate needs no scale. It splits none that its burst holds,
    and TCP makes many of two frames: so the burst is less than two, unless 50 us
    of the link are more. Two frames were 44 us of delay in the lab (1 Gbit/s, MTU
    9,000).
    """
    order = sorted(policy.classes, key=lambda one: (one.priority, one.number))
    bands = [
        plan_leaf(kernel, scale, link_rate_bits_per_s, urgent=one is not order[-1]) for one in order
    ]
    if len(bands) == 1:  # prio has at least two
        bands.append(bands[0])
    under_tbf = needs_tbf(device, link_rate_bits_per_s)
    major = MAJOR + 1 if under_tbf else MAJOR
    band_of = {one.name: band for band, one in enumerate(order)}
    plan = TreePlan(
        profile=Profile.PRIO,
        handle=MAJOR,
        default_minor=band_of[policy.default_class] + 1,
        bands=tuple(bands),
        priorities={name: major << 16 | (band + 1) for name, band in band_of.items()},
        safe_priorities={name: major << 16 | (band + 1) for name, band in band_of.items()},
    )
    if not under_tbf:
        return plan
    rate = link_rate_bits_per_s // 8
    frame = scale.frame_bytes + WIRE_OVERHEAD_BYTES
    slack = rate * BURST_NS // 1_000_000_000
    burst = max(frame + min(slack, frame // 2), slack)
    return dataclasses.replace(
        plan,
        tbf_rate_bytes_per_s=rate,
        tbf_burst_bytes=burst,
        # Of the queue that tbf makes and prio replaces: what all bands hold.
        tbf_limit_bytes=min(sum(leaf.limit_bytes for leaf in bands), 0xFFFFFFFF),
        tbf_overhead_bytes=WIRE_OVERHEAD_BYTES,
    )


def _plan_edt(
    policy: Policy,
    device: DeviceFacts,
    kernel: KernelFacts,
    scale: WireScale,
    link_rate_bits_per_s: int,
) -> TreePlan:
    """Return one fq per transmit queue; the program stamps what is paced with its departure.

    Paced is what stands behind the default class, at its ceiling, be it the
    link rate. Classes at the default's own priority are paced under a ceiling
    below the link. The control class and what is served before the default
    never wait for a time stamp: their ceilings are token buckets.
    """
    default = policy.class_named(policy.default_class)
    control = policy.class_named(policy.control_class)
    last = max(one.priority for one in policy.classes)
    behind = min(default.priority + 1, last)
    free = [one for one in policy.classes if one is not control]
    always = tuple(one.name for one in free if one.priority >= behind)
    paced = tuple(one.name for one in free if one.priority >= default.priority)

    def priority(one: TrafficClass) -> int:
        if one.name in paced:
            return TC_PRIO_BULK if one.name in always else TC_PRIO_BESTEFFORT
        return TC_PRIO_CONTROL if one.priority <= control.priority else TC_PRIO_INTERACTIVE

    priorities = {one.name: priority(one) for one in policy.classes}
    segment = scale.packet_wire_bytes
    hard_ns = pace_for(link_rate_bits_per_s, segment).drop_ns << PACE_HARD_SHIFT
    packets = link_rate_bits_per_s * hard_ns // (8_000_000_000 * LEAST_WIRE_BYTES)
    packets = min(max(packets, FQ_MIN_FLOW_LIMIT_PACKETS), FQ_MAX_PACED_PACKETS)
    clock = None
    if needs_tbf(device, link_rate_bits_per_s):
        kept = sum(one.guarantee_bits_per_s for one in policy.classes if one.name in always)
        rest = max(link_rate_bits_per_s - kept, link_rate_bits_per_s // 100, 1)
        clock = LinkClock(link_rate_bits_per_s, rest)
    return TreePlan(
        profile=Profile.EDT,
        handle=MAJOR,
        default_minor=0,
        priorities=priorities,
        safe_priorities=priorities,
        fq=FqPlan(
            limit_packets=FQ_LIMIT_PACKETS + packets,
            flow_limit_packets=packets,
            orphan_mask=FQ_ORPHAN_MASK,
            horizon_us=FQ_HORIZON_US,
            bands=kernel.fq_bands,
        ),
        queues=device.tx_queues,
        paced=paced,
        paced_always=always,
        segment_wire_bytes=segment,
        link_clock=clock,
    )
