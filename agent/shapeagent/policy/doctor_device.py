# SPDX-License-Identifier: Apache-2.0
"""What is wrong with one network device for shapectl, from what was seen of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from shapeagent.model.hostfacts import DeviceAnswers, HostFacts, InterfaceFacts, TrafficSample
from shapeagent.model.reports import Finding, Severity
from shapeagent.model.units import format_rate
from shapeagent.policy.doctor import ok
from shapeagent.policy.placement import (
    OVERHEAD_BYTES,
    Place,
    double_shaping,
    judge_placement,
    on_the_way,
)

_RDMA_ACTIVE_BITS_PER_S = 1_000_000  # less is keep-alives
_SEGMENT_HARM_US = 25.0  # as segment_limit = auto (design §4)
_RING_HARM_US = 1_000.0
_JUMBO_BYTES = 1_500
_MIN_IPV6_MTU = 1_280
_ONE_LOCK_QUEUES = 8
_ONE_LOCK_BITS_PER_S = 25_000_000_000


def examine_device(
    device: InterfaceFacts,
    answers: DeviceAnswers | None,
    host: HostFacts,
    others: Mapping[str, InterfaceFacts],
) -> tuple[Finding, ...]:
    """Return the findings about one device.

    Args:
        answers: what the kernel says of it, None where it was not asked.
        others: name → each device that is above or below it, as far as known.
    """
    kind = (answers.kind if answers else "") or device.kind
    if kind:  # only hardware knows its speed: a veth invents one
        device = dataclasses.replace(device, speed_bits_per_s=None)
    return (
        *_examine_link(device, kind),
        *_examine_placement(device, kind, answers, others),
        *(_examine_owners(device, answers) if answers else ()),
        *(_examine_offloads(device, answers) if answers else ()),
        *_examine_queues(device, answers),
        *_examine_mtu(device, kind, host, others),
        *_examine_manager(device, host),
    )


def examine_rdma(
    first: TrafficSample, last: TrafficSample, only: str | None = None
) -> tuple[Finding, ...]:
    """Return what passes a device by RDMA, where TC cannot see it (C25).

    Args:
        first, last: two samples of the same counters; equal times say nothing of now.
        only: the device to judge; None judges all.
    """
    before = {(port.device, port.port): port for port in first.ports}
    span_s = last.time_s - first.time_s
    found = []
    for port in last.ports:
        subject = port.netdev or port.device
        if only is not None and only != subject:
            continue
        start = before.get((port.device, port.port), port)
        if port.sent_bytes is None or start.sent_bytes is None:
            found.append(_rdma_unknown(subject, f"{port.device} port {port.port}"))
            continue
        moved = max(0, port.sent_bytes - start.sent_bytes)
        received = max(0, (port.received_bytes or 0) - (start.received_bytes or 0))
        rate = int(8 * max(moved, received) / span_s) if span_s > 0 else 0
        name = f"{port.device} port {port.port}, {port.link_layer or 'unknown link'}"
        if rate >= _RDMA_ACTIVE_BITS_PER_S:
            plain = last.sent_bytes.get(port.netdev, 0) - first.sent_bytes.get(port.netdev, 0)
            plain_rate = int(8 * max(0, plain) / span_s)
            found.append(_rdma_active(subject, name, rate, plain_rate))
        elif port.sent_bytes or port.received_bytes:
            found.append(_rdma_used(subject, name))
        else:
            found.append(ok("rdma", f"RDMA is there ({name}) and carried nothing yet", subject))
    return tuple(found)


_RDMA_WHY = (
    "RDMA passes by TC, so shapectl neither sees nor holds it, and protects nobody from it on "
    "the same wire."
)
_RDMA_FIX = "give RDMA a traffic class of its own on NIC and switch: mlnx_qos -i {0}, or dcb ets"


def _rdma_active(subject: str, name: str, rate_bits_per_s: int, plain_bits_per_s: int) -> Finding:
    return Finding(
        "rdma-active",
        Severity.WARNING,
        subject,
        f"RDMA moves {_rate(rate_bits_per_s)} right now ({name}), all that TC can see "
        f"{_rate(plain_bits_per_s)}.",
        _RDMA_WHY,
        _RDMA_FIX.format(subject),
    )


def _rdma_used(subject: str, name: str) -> Finding:
    return Finding(
        "rdma-used",
        Severity.INFO,
        subject,
        f"RDMA has been used ({name}), and is quiet right now.",
        _RDMA_WHY,
        _RDMA_FIX.format(subject),
    )


def _rdma_unknown(subject: str, name: str) -> Finding:
    return Finding(
        "rdma-unknown",
        Severity.INFO,
        subject,
        f"RDMA is there ({name}), and its counters cannot be read.",
        _RDMA_WHY,
        "rdma statistic show",
    )


def _rate(bits_per_s: int) -> str:
    """Return a measured rate with three digits at most."""
    digits = len(str(bits_per_s))
    return format_rate(round(bits_per_s, -max(0, digits - 3)))


def _examine_link(device: InterfaceFacts, kind: str) -> Iterator[Finding]:
    name = device.name
    if not device.up or device.carrier is False:
        what = "is down" if not device.up else "has no carrier"
        yield Finding(
            "link-down",
            Severity.WARNING,
            name,
            f"{name} {what}.",
            "Nothing can be measured on it, and its speed is unknown.",
            f"ip link set {name} up; then look at cable and switch: ip link show {name}",
        )
    if device.speed_bits_per_s and not kind:
        yield ok("link", f"{_hardware_text(device)}{format_rate(device.speed_bits_per_s)}", name)
        return
    why = "Rates and bursts are computed from the link rate; a virtual device invents one."
    yield Finding(
        "link-rate-unknown",
        Severity.INFO,
        name,
        f"{name}{f' ({kind})' if kind else ''} has no speed that can be believed.",
        why,
        f"shapectl attach {name} --link-rate 10gbit (what the wire really carries)",
    )


def _hardware_text(device: InterfaceFacts) -> str:
    return f"{device.driver}, " if device.driver else ""


def _examine_placement(
    device: InterfaceFacts,
    kind: str,
    answers: DeviceAnswers | None,
    others: Mapping[str, InterfaceFacts],
) -> Iterator[Finding]:
    places = {name: _place(facts) for name, facts in others.items()}
    places[device.name] = place = dataclasses.replace(_place(device), kind=kind)
    yield judge_placement(place, places)
    if answers is not None:
        yield from double_shaping(device.name, places, answers.shaped_neighbours)


def neighbours(device: InterfaceFacts, others: Mapping[str, InterfaceFacts]) -> tuple[str, ...]:
    """Return the devices above and below one that carry its packets too."""
    return on_the_way(device.name, {name: _place(facts) for name, facts in others.items()})


def _place(device: InterfaceFacts) -> Place:
    return Place(
        name=device.name,
        kind=device.kind,
        hardware=device.hardware,
        master=device.master,
        lowers=device.lowers,
        uppers=device.uppers,
        known=device.placed,
    )


def _examine_owners(device: InterfaceFacts, answers: DeviceAnswers) -> Iterator[Finding]:
    name = device.name
    if answers.attached:
        yield ok("attached", f"shapectl is attached (root {answers.root or 'left alone'})", name)
    elif answers.default_root:
        kind = answers.root.partition(" ")[0] or "none"
        yield ok("root-qdisc", f"the root qdisc is the kernel's default ({kind})", name)
    else:
        yield Finding(
            "root-qdisc-foreign",
            Severity.WARNING,
            name,
            f'The root qdisc "{answers.root}" was set by someone else.',
            "attach refuses to replace it, unless it is told to and can put it back.",
            f"shapectl attach {name} --takeover keeps a copy and restores it on detach; "
            "--profile police leaves it alone",
        )
    if answers.hook == "ingress":
        yield Finding(
            "ingress-qdisc-foreign",
            Severity.ERROR,
            name,
            "Someone uses the older ingress qdisc.",
            "clsact takes its place, and attach does not take it from them.",
            f"tc filter show dev {name} ingress; when nobody needs it: tc qdisc del dev {name} "
            "ingress",
        )
    if answers.slot_taken:
        yield Finding(
            "filter-slot-foreign",
            Severity.ERROR,
            name,
            "A filter that is not ours has our place (pref 21320, handle 0x5348).",
            "attach refuses to replace it.",
            f"tc filter show dev {name} egress; tc filter show dev {name} ingress",
        )
    yield from _examine_programs(device, answers)


def _examine_programs(device: InterfaceFacts, answers: DeviceAnswers) -> Iterator[Finding]:
    name = device.name
    if answers.filters:
        yield Finding(
            "filters-shared",
            Severity.INFO,
            name,
            f"Others have filters here: {'; '.join(answers.filters)}.",
            "A tcx link of ours (Linux 6.6) runs before them; with --hook clsact one that ends the "
            "hook before ours (any action but continue) hides it.",
            f"tc filter show dev {name} egress; after attach: shapectl status {name}",
        )
    if answers.tcx:
        yield Finding(
            "tcx-shared",
            Severity.INFO,
            name,
            f"Others have programs here that tc does not show: {'; '.join(answers.tcx)}.",
            "attach puts its tcx links in front of them. One that comes before ours later, and "
            "does not say NEXT, hides it: status says so.",
            f"bpftool net show dev {name}; after attach: shapectl status {name}",
        )
    if answers.has_fq and not answers.attached and (answers.filters or answers.tcx):
        yield Finding(
            "edt-writer",
            Severity.WARNING,
            name,
            "There is an fq, and a program that may write departure times for it (as Cilium's "
            "bandwidth manager does).",
            "attach does not take the fq away from it.",
            f"shapectl attach {name} --profile police",
        )
    if answers.xdp:
        yield Finding(
            "xdp",
            Severity.INFO,
            name,
            f"An XDP program is there (id {answers.xdp}).",
            "What it drops, sends back or redirects never reaches TC, and is not counted.",
            f"bpftool prog show id {answers.xdp}",
        )
    if answers.ingress_chains:
        yield Finding(
            "ingress-hook-shared",
            Severity.INFO,
            name,
            f"nftables stands at the ingress hook: {', '.join(answers.ingress_chains)}.",
            "--ingress ifb is refused there; --ingress police and count work.",
            f"shapectl attach {name} --ingress police",
        )
    if answers.tcx is None:
        yield Finding(
            "programs-unknown",
            Severity.INFO,
            name,
            "Whether there are tcx programs could not be seen.",
            "One that came in front of ours, and does not say NEXT, would hide it.",
            "sudo shapectl doctor",
        )
    elif not (answers.filters or answers.tcx or answers.xdp):
        yield ok("programs", "no BPF program or filter of others", name)


def _examine_offloads(device: InterfaceFacts, answers: DeviceAnswers) -> Iterator[Finding]:
    name, found = device.name, answers.offloads
    if found is None:
        return
    if found.lro:
        yield Finding(
            "lro-on",
            Severity.WARNING,
            name,
            "Large receive offload (LRO) is on.",
            "It joins packets so that they cannot be told apart again: what is forwarded breaks, "
            "and what arrives is counted wrongly.",
            f"ethtool -K {name} lro off",
        )
    rate = device.speed_bits_per_s
    slot_us = answers.gso_max_bytes * 8e6 / rate if rate else 0.0
    if found.gso and slot_us > _SEGMENT_HARM_US and not answers.attached:
        yield Finding(
            "gso-large",
            Severity.INFO,
            name,
            f"One segment may have {answers.gso_max_bytes:,} bytes: it holds the wire for "
            f"{slot_us:.0f} µs.",
            "No priority can pass a segment that is being sent.",
            f"shapectl attach {name} lowers the limit while attached; see --segment-limit",
        )
    states = (("tso", found.tso), ("gso", found.gso), ("gro", found.gro), ("lro", found.lro))
    text = ", ".join(f"{word} {'on' if state else 'off'}" for word, state in states)
    if found.gro:
        yield ok("offloads", text, name)
        return
    yield Finding(
        "gro-off",
        Severity.INFO,
        name,
        f"Generic receive offload is off ({text}).",
        "Every frame passes the stack alone, which costs CPU at high rates.",
        f"ethtool -K {name} gro on",
    )


def _examine_queues(device: InterfaceFacts, answers: DeviceAnswers | None) -> Iterator[Finding]:
    name = device.name
    if device.hardware_classes > 1:
        yield Finding(
            "hardware-classes",
            Severity.INFO,
            name,
            f"The NIC has {device.hardware_classes} hardware traffic classes (mqprio or DCB).",
            "The low bits of a packet's priority choose among them; shapectl keeps to best effort "
            "there, and profile edt is refused.",
            f"tc qdisc show dev {name}; dcb buffer show dev {name}",
        )
    rate = device.speed_bits_per_s or 0
    if device.tx_queues > _ONE_LOCK_QUEUES and rate > _ONE_LOCK_BITS_PER_S:
        yield ok("queues", f"{device.tx_queues} transmit queues: profile edt, where fq is", name)
    else:
        yield ok("queues", f"{device.tx_queues} transmit, {device.rx_queues} receive", name)
    if device.hardware:
        yield from _examine_rings(device, answers)


def _examine_rings(device: InterfaceFacts, answers: DeviceAnswers | None) -> Iterator[Finding]:
    name = device.name
    ring = answers.ring if answers else None
    if device.byte_limits:
        yield ok("bql", "the driver limits its queue by bytes (BQL)", name)
    elif device.byte_limits is False:
        rate = device.speed_bits_per_s
        text = "The driver uses no byte queue limits (BQL)"
        if ring is not None and rate:
            hold_us = ring.tx * device.mtu * 8e6 / rate
            text += f": its ring of {ring.tx} holds up to {hold_us:,.0f} µs of full frames"
            if hold_us < _RING_HARM_US:
                yield ok("bql", f"{text[0].lower()}{text[1:]}", name)
                return
        fix = f"shapectl attach {name} --link-rate RATE, 2 % below the wire's"
        if ring is not None and ring.tx > 256:
            fix += f"; or: ethtool -G {name} tx 256"
        yield Finding(
            "bql-missing",
            Severity.WARNING,
            name,
            f"{text}.",
            "What the ring has taken waits in order, whatever its class.",
            fix,
        )
    if ring is None:
        return
    if device.rx_missed and ring.rx < ring.rx_max:
        yield Finding(
            "rx-ring-small",
            Severity.WARNING,
            name,
            f"The NIC has dropped {device.rx_missed:,} packets for lack of room; its receive "
            f"ring has {ring.rx} of {ring.rx_max} places.",
            "These losses come before TC, so no class is spared.",
            f"ethtool -G {name} rx {ring.rx_max}",
        )
    else:
        yield ok("rings", f"{ring.tx} transmit, {ring.rx} receive descriptors", name)


def _examine_mtu(
    device: InterfaceFacts, kind: str, host: HostFacts, others: Mapping[str, InterfaceFacts]
) -> Iterator[Finding]:
    name, mtu = device.name, device.mtu
    problems = False
    for other in (others[one] for one in device.lowers if one in others):
        least = other.mtu - OVERHEAD_BYTES.get(kind, 0)
        uneven = kind in ("bond", "team", "bridge") and mtu != other.mtu
        if mtu > least or uneven:
            problems = True
            yield Finding(
                "mtu-mismatch",
                Severity.WARNING,
                name,
                f"{name} has MTU {mtu}, and {other.name} below it {other.mtu}.",
                "Small packets pass and full ones do not: connections are made, then hang.",
                f"ip link set {other.name} mtu {mtu + other.mtu - least}; or: ip link set {name} "
                f"mtu {least}",
            )
    if mtu > _JUMBO_BYTES and host.tcp_mtu_probing == 0:
        problems = True
        yield Finding(
            "mtu-jumbo",
            Severity.INFO,
            name,
            f"MTU {mtu}, and TCP does not probe for a smaller one.",
            "Where one hop takes less and its ICMP is lost, connections are made, then hang; "
            "it looks like a stutter and is no queue.",
            f"ping -M do -s {mtu - 28} PEER; sysctl -w net.ipv4.tcp_mtu_probing=1",
        )
    if 0 < mtu < _MIN_IPV6_MTU:
        problems = True
        yield Finding(
            "mtu-small",
            Severity.WARNING,
            name,
            f"MTU {mtu} is below {_MIN_IPV6_MTU}, the least of IPv6.",
            "The kernel turns IPv6 off on the device.",
            f"ip link set {name} mtu 1500",
        )
    if not problems:
        yield ok("mtu", f"MTU {mtu}", name)


def _examine_manager(device: InterfaceFacts, host: HostFacts) -> Iterator[Finding]:
    by = [
        (word, look)
        for word, look, indexes in (
            ("systemd-networkd", f"networkctl status {device.name}", host.managers.networkd),
            ("NetworkManager", f"nmcli device show {device.name}", host.managers.network_manager),
        )
        if device.index in indexes
    ]
    if len(by) > 1:
        yield Finding(
            "managed-twice",
            Severity.WARNING,
            device.name,
            f"{' and '.join(word for word, _ in by)} both manage {device.name}.",
            "Each sets it up again after the other.",
            f"nmcli device set {device.name} managed no",
        )
    for word, look in by[:1] if len(by) == 1 else ():
        yield Finding(
            "managed",
            Severity.INFO,
            device.name,
            f"{word} manages {device.name}.",
            "When it sets the device up again, MTU and segment limits may change; status tells.",
            look,
        )
