# SPDX-License-Identifier: Apache-2.0
"""Statuses as an engine gives them, for tests that need no kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

from shapeagent.model.reports import ClassStatus, InterfaceStatus

CLASSES = ("signal", "stream", "normal", "bulk")
MBIT = 1_000_000


def class_status(name: str = "bulk", direction: str = "egress", **changes: Any) -> ClassStatus:
    """Return a class of a link of 100 Mbit/s without traffic."""
    shaped = direction == "egress"
    one = ClassStatus(
        name=name,
        number=CLASSES.index(name) if name in CLASSES else 0,
        direction=direction,
        guarantee_bits_per_s=10 * MBIT if shaped else 0,
        ceiling_bits_per_s=80 * MBIT if shaped else None,
        safe_ceiling_bits_per_s=40 * MBIT if shaped else None,
        ceiling_in_force_bits_per_s=80 * MBIT if shaped else None,
        lease_s_left=None,
        packets=0,
        wire_bytes=0,
        drops=0,
        drop_wire_bytes=0,
        ce_marks=0,
        no_socket_packets=0,
        over_segment_packets=0,
        backlog_bytes=0 if shaped else None,
        queue_drops=0 if shaped else None,
        queue_sent_bytes=0 if shaped else None,
        queue_sent_packets=0 if shaped else None,
    )
    return dataclasses.replace(one, **changes)


def interface_status(device: str = "eth0", **changes: Any) -> InterfaceStatus:
    """Return an interface on which all is well."""
    one = InterfaceStatus(
        device=device,
        index=2,
        netns=None,
        profile="htb",
        ingress="count",
        hook="tcx",
        shadow=False,
        link_rate_bits_per_s=100 * MBIT,
        segment_limit_bytes=3028,
        policy_source="built-in",
        policy_digest="ab" * 32,
        attached_unix_s=1_893_456_000.0,
        programs={"shp_egress": 7, "shp_ingress": 8},
        verified_instructions={"shp_egress": 3000},
        whitelist_entries=2,
        whitelist_generation=5,
        classes=tuple(
            class_status(name, direction) for direction in ("egress", "ingress") for name in CLASSES
        ),
        reasons={"egress": {"default": 3, "rule-port": 9, "ce-mark": 1}, "ingress": {}},
        problems=(),
        warnings=(),
    )
    return dataclasses.replace(one, **changes)
