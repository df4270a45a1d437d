# SPDX-License-Identifier: Apache-2.0
"""What the interfaces say, as metrics: one function from statuses to families.

No address, flow, program id or path is a label, so the number of series is
bounded by interfaces, directions, classes and codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

from shapeagent.model.codes import Code
from shapeagent.model.reports import ClassStatus, InterfaceStatus
from shapeagent.telemetry.exposition import Family, Value, label_text

_T = TypeVar("_T")
_ClassValue = Callable[[ClassStatus], Value | None]
_InterfaceValue = Callable[[InterfaceStatus], Value | None]


def _bytes_per_s(bits_per_s: int | None) -> float | None:
    return None if bits_per_s is None else bits_per_s / 8


#: name, help, value; None: this class has no such thing, and there is no sample.
_CLASS_COUNTERS: tuple[tuple[str, str, _ClassValue], ...] = (
    ("class_packets", "Packets that were put into the class.", lambda row: row.packets),
    (
        "class_wire_bytes",
        "Bytes of those packets as the wire carries them, preamble and gap included.",
        lambda row: row.wire_bytes,
    ),
    (
        "class_ceiling_dropped_wire_bytes",
        "Wire bytes of the packets that the classifier dropped above the ceiling.",
        lambda row: row.drop_wire_bytes,
    ),
    (
        "class_ce_marks",
        "Packets that were marked as having met congestion (ECN CE).",
        lambda row: row.ce_marks,
    ),
    (
        "class_no_socket_packets",
        "Packets without a socket: cgroup and mark rules cannot see them.",
        lambda row: row.no_socket_packets,
    ),
    (
        "class_over_segment_packets",
        "Packets larger than the segment limit of the interface.",
        lambda row: row.over_segment_packets,
    ),
    (
        "class_queue_sent_bytes",
        "Bytes that left the queue of the class, without preamble, FCS and gap.",
        lambda row: row.queue_sent_bytes,
    ),
    (
        "class_queue_sent_packets",
        "Packets that left the queue of the class.",
        lambda row: row.queue_sent_packets,
    ),
)

_CLASS_GAUGES: tuple[tuple[str, str, _ClassValue], ...] = (
    (
        "class_guarantee_bytes_per_second",
        "Rate that the class always gets.",
        lambda row: _bytes_per_s(row.guarantee_bits_per_s),
    ),
    (
        "class_ceiling_bytes_per_second",
        "Rate that the class may not exceed while its lease holds.",
        lambda row: _bytes_per_s(row.ceiling_bits_per_s),
    ),
    (
        "class_safe_ceiling_bytes_per_second",
        "Rate that the class may not exceed once its lease is over.",
        lambda row: _bytes_per_s(row.safe_ceiling_bits_per_s),
    ),
    (
        "class_ceiling_in_force_bytes_per_second",
        "Rate that the class may not exceed now.",
        lambda row: _bytes_per_s(row.ceiling_in_force_bits_per_s),
    ),
    (
        "class_lease_remaining_seconds",
        "Time until the safe ceiling holds; 0 once it does. No sample without a lease.",
        lambda row: row.lease_s_left,
    ),
    (
        "class_backlog_bytes",
        "Bytes that wait in the queue of the class.",
        lambda row: row.backlog_bytes,
    ),
)

_INTERFACE_GAUGES: tuple[tuple[str, str, _InterfaceValue], ...] = (
    (
        "interface_link_rate_bytes_per_second",
        "Rate of the bottleneck that the plan was made for.",
        lambda one: _bytes_per_s(one.link_rate_bits_per_s),
    ),
    (
        "interface_segment_limit_bytes",
        "Largest segment that is handed to the wire; 0 where it is not limited.",
        lambda one: one.segment_limit_bytes,
    ),
    (
        "interface_attached_timestamp_seconds",
        "When the interface was attached, in seconds since 1970.",
        lambda one: one.attached_unix_s,
    ),
    (
        "interface_programs",
        "Classifiers of ours that stand on the interface; 2 where all is well.",
        lambda one: len(one.programs),
    ),
    (
        "interface_problems",
        "Things that are not as attach left them; `shapectl status` names them.",
        lambda one: len(one.problems),
    ),
    (
        "interface_warnings",
        "Things worth a look; `shapectl status` names them.",
        lambda one: len(one.warnings),
    ),
    (
        "interface_unconfirmed_seconds",
        "Time until the attach is undone unless it is confirmed. No sample once it is.",
        lambda one: one.unconfirmed_s,
    ),
    ("whitelist_entries", "Entries of the whitelist.", lambda one: one.whitelist_entries),
    (
        "whitelist_generation",
        "Generation of the whitelist that is in force.",
        lambda one: one.whitelist_generation,
    ),
)


def interface_families(statuses: Iterable[InterfaceStatus]) -> list[Family]:
    """Return the metrics of all interfaces; every series appears once.

    Of two attachments with one name (a device that is gone and the new one
    that took its name) only that whose programs are found, else the later one,
    is shown: a page with a series twice is rejected as a whole (case C99).
    """
    found = _one_of_each_name(statuses)
    rows = [
        (
            row,
            _labels_of_class(one.device, row.direction, row.name),
        )
        for one in found
        for row in one.classes
    ]
    families = [
        Family(f"shapectl_{name}", "counter", text, _sampled(rows, value))
        for name, text, value in _CLASS_COUNTERS
    ]
    families.append(_drops(found))
    families += [
        Family(f"shapectl_{name}", "gauge", text, _sampled(rows, value))
        for name, text, value in _CLASS_GAUGES
    ]
    families += _reasons(found)
    devices = [(one, label_text(interface=one.device)) for one in found]
    families += [
        Family(f"shapectl_{name}", "gauge", text, _sampled(devices, value))
        for name, text, value in _INTERFACE_GAUGES
    ]
    families.append(
        Family(
            "shapectl_interface_info",
            "gauge",
            "How the interface is shaped; always 1.",
            [
                (
                    label_text(
                        interface=one.device,
                        profile=one.profile,
                        ingress=one.ingress,
                        hook=one.hook,
                        shadow=str(one.shadow).lower(),
                        policy_digest=one.policy_digest[:12],
                    ),
                    1,
                )
                for one in found
            ],
        )
    )
    return families


def _one_of_each_name(statuses: Iterable[InterfaceStatus]) -> list[InterfaceStatus]:
    best: dict[str, InterfaceStatus] = {}
    for one in statuses:
        known = best.get(one.device)
        if known is None or _rank(one) > _rank(known):
            best[one.device] = one
    return list(best.values())


def _rank(one: InterfaceStatus) -> tuple[bool, float]:
    return bool(one.programs), one.attached_unix_s


@lru_cache(maxsize=4096)
def _labels_of_class(device: str, direction: str, name: str) -> str:
    return label_text(interface=device, direction=direction, class_=name)


@lru_cache(maxsize=4096)
def _labels_of_drops(device: str, direction: str, name: str, reason: str) -> str:
    return label_text(interface=device, direction=direction, class_=name, reason=reason)


@lru_cache(maxsize=4096)
def _labels_of_code(device: str, direction: str, code: str) -> str:
    return label_text(interface=device, direction=direction, code=code)


def _sampled(
    rows: Iterable[tuple[_T, str]], value: Callable[[_T], Value | None]
) -> list[tuple[str, Value]]:
    found = ((labels, value(row)) for row, labels in rows)
    return [(labels, number) for labels, number in found if number is not None]


def _drops(found: Sequence[InterfaceStatus]) -> Family:
    rows: list[tuple[str, Value]] = []
    for one in found:
        for row in one.classes:
            place = (one.device, row.direction, row.name)
            rows.append((_labels_of_drops(*place, "ceiling"), row.drops))
            if row.queue_drops is not None:
                rows.append((_labels_of_drops(*place, "queue"), row.queue_drops))
    return Family(
        "shapectl_class_drops",
        "counter",
        "Packets of the class that were dropped: above its ceiling, or in its queue.",
        rows,
    )


def _reasons(found: Sequence[InterfaceStatus]) -> tuple[Family, Family]:
    verdicts: list[tuple[str, Value]] = []
    notes: list[tuple[str, Value]] = []
    for one in found:
        for direction, counts in one.reasons.items():
            for code in Code:  # also those that never were: a rate needs their zero
                rows = notes if code.is_note else verdicts
                label = code.label
                labels = _labels_of_code(one.device, direction, label)
                rows.append((labels, counts.get(label, 0)))
    return (
        Family(
            "shapectl_verdicts",
            "counter",
            "Packets by what decided their class.",
            verdicts,
        ),
        Family(
            "shapectl_notes",
            "counter",
            "Packets by what was noticed beside the decision.",
            notes,
        ),
    )
