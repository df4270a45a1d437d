# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shapeagent.model.types import DeviceFacts, Profile
from shapeagent.policy.following import carry_ceiling, chooses_hardware, find_drifts

GBIT = 1_000_000_000
NIC = DeviceFacts(
    name="eth0",
    index=2,
    kind="",
    l3_only=False,
    mtu=1500,
    tx_queues=4,
    up=True,
    speed_bits_per_s=10 * GBIT,
    gso_max_size=65_536,
    gso_max_segs=65_535,
    gso_ipv4_max_size=65_536,
)


def drifts(
    before: DeviceFacts = NIC,
    *,
    profile: Profile = Profile.HTB,
    from_device: bool = True,
    **changes: Any,
) -> list[str]:
    found = find_drifts(
        before,
        dataclasses.replace(before, **changes),
        profile=profile,
        link_rate_bits_per_s=10 * GBIT,
        rate_from_device=from_device,
    )
    return [one.kind.value for one in found]


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, []),
        ({"name": "wan.0"}, ["name"]),
        ({"mtu": 9000}, ["mtu"]),
        ({"speed_bits_per_s": 25 * GBIT}, ["speed"]),
        ({"speed_bits_per_s": None, "carrier": False, "up": False}, []),
        ({"gso_max_size": 3028, "gso_max_segs": 2}, []),  # that is what we set
        ({"name": "e", "mtu": 1400, "speed_bits_per_s": GBIT}, ["name", "mtu", "speed"]),
    ],
)
def test_what_changed_is_found(changes: dict[str, Any], want: list[str]) -> None:
    """F11, F13."""
    got = drifts(**changes)
    assert got == want, f"got {got}, want {want}"


def test_a_given_rate_does_not_follow_the_device() -> None:
    """F11: the bottleneck may lie behind the device."""
    got = drifts(from_device=False, speed_bits_per_s=25 * GBIT)
    assert got == [], f"got {got}, want none"


@pytest.mark.parametrize(
    ("profile", "classes", "qos_map", "want"),
    [
        (Profile.HTB, 8, False, False),  # its class ids are best effort in every map
        (Profile.HTB, 0, True, True),
        (Profile.PRIO, 8, False, True),
        (Profile.EDT, 2, False, True),
        (Profile.EDT, 0, False, False),
        (Profile.POLICE, 8, True, False),
    ],
)
def test_priorities_are_not_written_where_they_would_choose_hardware(
    profile: Profile, classes: int, qos_map: bool, want: bool
) -> None:
    """F37."""
    now = dataclasses.replace(NIC, hardware_classes=classes, egress_qos_map=qos_map)
    got = chooses_hardware(now, profile)
    assert got is want, f"got {got}, want {want}"
    assert ("priorities" in drifts(profile=profile, **_changed(now))) is want
    assert ("priorities" in drifts(now, profile=profile, hardware_classes=0, egress_qos_map=False)
            ) is want  # fmt: skip


def _changed(now: DeviceFacts) -> dict[str, Any]:
    return {"hardware_classes": now.hardware_classes, "egress_qos_map": now.egress_qos_map}


@pytest.mark.parametrize(
    ("live", "want"),
    [
        ((8 * GBIT, 5 * GBIT), (16 * GBIT, 10 * GBIT)),  # the policy's shares follow the link
        ((3 * GBIT, 5 * GBIT), (3 * GBIT, 10 * GBIT)),  # what a controller set stays
        ((8 * GBIT, 30 * GBIT), (16 * GBIT, 20 * GBIT)),  # at most the link
    ],
)
def test_ceilings_under_another_link_rate(live: tuple[int, int], want: tuple[int, int]) -> None:
    got = carry_ceiling(live, (8 * GBIT, 5 * GBIT), (16 * GBIT, 10 * GBIT), 20 * GBIT)
    assert got == want, f"got {got}, want {want}"
