# SPDX-License-Identifier: Apache-2.0
"""What became of a device since attach, and what that means for what stands on it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shapeagent.model.types import DeviceFacts, Profile
from shapeagent.model.units import format_rate


class DriftKind(StrEnum):
    """What about a device is not as it was at attach."""

    NAME = "name"
    MTU = "mtu"
    SPEED = "speed"
    PRIORITIES = "priorities"


@dataclass(frozen=True, slots=True)
class Drift:
    """One thing that is not as it was, in words that go on after the device's name."""

    kind: DriftKind
    text: str


def find_drifts(
    before: DeviceFacts,
    now: DeviceFacts,
    *,
    profile: Profile,
    link_rate_bits_per_s: int,
    rate_from_device: bool,
) -> tuple[Drift, ...]:
    """Return what an attachment must take up, none where all is as it was.

    An unknown speed (no carrier) is none: the rate in force stays.

    Args:
        before: the device as it was when its numbers were computed.
        link_rate_bits_per_s: in force.
        rate_from_device: nobody gave the rate, so it follows the device's speed.
    """
    found = []
    if now.name != before.name:
        found.append(Drift(DriftKind.NAME, f"was named {before.name} at attach"))
    if now.mtu != before.mtu:
        found.append(
            Drift(
                DriftKind.MTU,
                f"has MTU {now.mtu} and had {before.mtu} at attach: bursts, quantum and segment "
                "limit are still those of then",
            )
        )
    speed = now.speed_bits_per_s
    if rate_from_device and speed is not None and speed != link_rate_bits_per_s:
        found.append(
            Drift(
                DriftKind.SPEED,
                f"carries {format_rate(speed)}, and is shaped for "
                f"{format_rate(link_rate_bits_per_s)}",
            )
        )
    if chooses_hardware(now, profile) != chooses_hardware(before, profile):
        what = "chooses hardware queues or VLAN priorities by skb->priority, which profile "
        what += f"{profile.value} writes"
        if chooses_hardware(before, profile):
            what = "no longer chooses hardware queues by skb->priority, so it may be written again"
        found.append(Drift(DriftKind.PRIORITIES, what))
    return tuple(found)


def chooses_hardware(device: DeviceFacts, profile: Profile) -> bool:
    """Return whether the priorities that a profile writes would move packets in the hardware.

    HTB's class ids end in 0, which is best effort in every map but a VLAN's.
    """
    if profile is Profile.POLICE:
        return False
    return device.egress_qos_map or (profile is not Profile.HTB and device.hardware_classes > 0)


def carry_ceiling(
    live: tuple[int, int], was: tuple[int, int], becomes: tuple[int, int], link_rate_bits_per_s: int
) -> tuple[int, int]:
    """Return the (live, safe) ceiling of a class under another link rate.

    One that somebody set stays, at most the link; one that the policy gave follows it.

    Args:
        live: in force; was, becomes: the policy's under the old and the new link rate.
    """
    kept = [
        new if have == old else min(have, link_rate_bits_per_s)
        for have, old, new in zip(live, was, becomes, strict=True)
    ]
    return kept[0], kept[1]
