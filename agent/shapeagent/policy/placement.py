# SPDX-License-Identifier: Apache-2.0
"""On which of the devices that carry the same packets a tree belongs, and on how many: one. Pure.

The hierarchy is that of masters (bond, bridge) and, for VLAN and macvlan, of
the device below. A veth's IFLA_LINK is its peer, and no hierarchy (C43).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from shapeagent.model.reports import Finding, Severity

#: Device type → bytes that its header takes from the MTU of the device below.
OVERHEAD_BYTES = {"vxlan": 50, "geneve": 50, "gre": 24, "wireguard": 80}
_TUNNELS = (*OVERHEAD_BYTES, "ipip", "sit", "tun")
_BONDS = ("bond", "team")


@dataclass(frozen=True, slots=True)
class Place:
    """A device among the others of its namespace, by their names."""

    name: str
    kind: str  # "" = hardware or unknown; bond, bridge, vlan, tun, …
    hardware: bool
    master: str
    lowers: tuple[str, ...]
    uppers: tuple[str, ...]
    known: bool = True  # False: what is above and below could not be seen


def on_the_way(name: str, places: Mapping[str, Place]) -> tuple[str, ...]:
    """Return the devices, at any distance, that carry the same packets: those below, then above."""
    below, above = (_reach(name, places, up=up) for up in (False, True))
    return tuple(dict.fromkeys((*below, *above)))


def _reach(name: str, places: Mapping[str, Place], *, up: bool) -> tuple[str, ...]:
    found: dict[str, None] = {}
    wanted = [name]
    while wanted:
        place = places.get(wanted.pop(0))
        near = () if place is None else place.uppers if up else place.lowers
        new = [one for one in near if one not in found and one != name]
        found |= dict.fromkeys(new)
        wanted += new
    return tuple(found)


def carriers(device: Place, places: Mapping[str, Place]) -> tuple[str, ...]:
    """Return the devices at the bottom that carry its packets: hardware where there is some."""
    below = _reach(device.name, places, up=False)
    bottom = [name for name in below if name not in places or not places[name].lowers]
    hardware = [name for name in bottom if name in places and places[name].hardware]
    return tuple(hardware or bottom)


def judge_placement(device: Place, places: Mapping[str, Place]) -> Finding:
    """Return whether a tree belongs on the device, why, and where it does else."""
    name, kind = device.name, device.kind
    below = ", ".join(device.lowers)
    better = carriers(device, places)
    master = places.get(device.master)
    master_kind = master.kind if master else ""
    if kind in _BONDS:
        return _misplaced(
            "placement-bond",
            name,
            f"{name} is a {kind} of {below or 'no device'}.",
            "Packets wait in the queues of its members; a tree on top has one lock for all, and "
            "sees no member's backlog.",
            better,
        )
    if kind == "bridge":
        return _misplaced(
            "placement-bridge",
            name,
            f"{name} is a bridge of {below or 'no device'}.",
            "Only this host's own packets pass its queue; what it forwards goes from port to port.",
            better,
        )
    if kind in ("vlan", "macvlan", "ipvlan"):
        return _misplaced(
            "placement-vlan",
            name,
            f"{name} is a {kind} on {below or 'another device'}.",
            "It shares the wire with everything else on that device, which a tree here does not "
            "see; tags are no obstacle below.",
            better,
        )
    if kind in _TUNNELS:
        return Finding(
            "placement-tunnel",
            Severity.INFO,
            name,
            f"{name} is a tunnel ({kind}).",
            "Here packets are seen without the outer header, on the device below only with it.",
            "ip route get ADDRESS shows the device below, which carries the queue",
        )
    if master_kind in _BONDS and master is not None:
        members = ", ".join(master.lowers) or name
        return Finding(
            "placement-member",
            Severity.INFO,
            name,
            f"{name} is a member of {master.name} ({members}).",
            "This is the right place, on every member: each carries a part of the traffic.",
            "; ".join(f"shapectl attach {one}" for one in master.lowers or (name,)),
        )
    if master_kind == "bridge" and master is not None:
        return Finding(
            "placement-port",
            Severity.INFO,
            name,
            f"{name} is a port of bridge {master.name}.",
            "What the bridge forwards has no socket: cgroup and mark rules do not see it, and its "
            "packets may be longer than the segment limit.",
            "attach on the host side of each pod's veth too, or use port and address rules",
        )
    if not device.known:
        return Finding(
            "placement-unknown",
            Severity.INFO,
            name,
            f"Whether {name} belongs to a bond or bridge could not be seen.",
            "A queue on the wrong one of them holds nothing.",
            "sudo shapectl doctor",
        )
    text = f"{name} is no part of a bond, bridge or VLAN"
    if device.uppers:
        text = f"{name} carries {', '.join(device.uppers)}: the right place"
    return Finding("placement", Severity.OK, name, text, "", "")


def _misplaced(identity: str, name: str, what: str, why: str, better: tuple[str, ...]) -> Finding:
    fix = "; ".join(f"shapectl attach {one}" for one in better)
    return Finding(identity, Severity.WARNING, name, what, why, fix or f"ip -d link show {name}")


def double_shaping(
    name: str, places: Mapping[str, Place], shaped: Collection[str]
) -> Iterator[Finding]:
    """Yield a finding for each shaped device that the same packets pass.

    Args:
        shaped: devices with a qdisc tree that someone set.
    """
    for other in on_the_way(name, places):
        if other in shaped:
            yield Finding(
                "double-shaping",
                Severity.WARNING,
                name,
                f"{other}, on the same way, has a qdisc tree of its own.",
                "Packets would wait in two trees, and the second undoes the order of the first.",
                f"tc qdisc show dev {other}; attach to one of the two only",
            )
