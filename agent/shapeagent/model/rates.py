# SPDX-License-Identifier: Apache-2.0
"""Rates from two looks at the same counters, as a pure function.

A counter that is smaller than before began anew (attached again, swapped, its
qdisc rebuilt): what it shows now is then what came since, as in Prometheus'
`rate()`. What was not there before, or in no time, has no rate: None, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from shapeagent.model.reports import ClassStatus, InterfaceStatus

#: What a frame takes on the wire beyond what a queue counts: preamble, FCS and gap.
FRAME_EXTRA_BYTES = 24
_LEAST_INTERVAL_S = 0.001  # below it a rate would be noise


@dataclass(frozen=True, slots=True)
class Sample:
    """The interfaces at a moment of a monotonic clock."""

    at_s: float
    interfaces: tuple[InterfaceStatus, ...]


@dataclass(frozen=True, slots=True)
class ClassRate:
    """One class in one direction, between two samples. None: it cannot be told."""

    name: str
    direction: str
    bits_per_s: float | None  # wire bits that the classifier let into the class
    packets_per_s: float | None
    drops_per_s: float | None  # above the ceiling and in the queue
    ce_marks_per_s: float | None
    sent_bits_per_s: float | None  # wire bits that left its queue; without one, as above
    ceiling_bits_per_s: int | None  # that is in force now; None: nobody holds one
    ceiling_use: float | None  # share of it that was sent
    backlog_bytes: int | None
    queue_delay_s: float | None  # backlog over the rate at which the queue empties


@dataclass(frozen=True, slots=True)
class InterfaceRates:
    """The classes of one interface, between two samples."""

    device: str
    netns: str | None
    profile: str
    link_rate_bits_per_s: int
    problems: tuple[str, ...]
    classes: tuple[ClassRate, ...]


def interface_rates(before: Sample | None, after: Sample) -> tuple[InterfaceRates, ...]:
    """Return the rates of each interface of the later sample.

    An interface that was attached again in between, or whose name another
    device has now, is compared with nothing.
    """
    known: dict[tuple[str, int, float], InterfaceStatus] = {}
    interval_s = 0.0
    if before is not None:
        known = {_identity(one): one for one in before.interfaces}
        interval_s = after.at_s - before.at_s
    found = []
    for one in after.interfaces:
        old = known.get(_identity(one))
        rows = {(row.name, row.direction): row for row in old.classes} if old else {}
        found.append(
            InterfaceRates(
                device=one.device,
                netns=one.netns,
                profile=one.profile,
                link_rate_bits_per_s=one.link_rate_bits_per_s,
                problems=one.problems,
                classes=tuple(
                    class_rate(rows.get((row.name, row.direction)), row, interval_s)
                    for row in one.classes
                ),
            )
        )
    return tuple(found)


def _identity(one: InterfaceStatus) -> tuple[str, int, float]:
    return one.netns or "", one.index, one.attached_unix_s


def class_rate(before: ClassStatus | None, after: ClassStatus, interval_s: float) -> ClassRate:
    """Return the rates of a class between two looks at it, `interval_s` apart."""

    def per_s(old: int | None, new: int | None) -> float | None:
        if before is None or old is None or new is None or interval_s < _LEAST_INTERVAL_S:
            return None
        return (new - old if new >= old else new) / interval_s

    old = before or after
    came = per_s(old.wire_bytes, after.wire_bytes)
    bits_per_s = None if came is None else 8 * came
    sent_bits_per_s = bits_per_s
    if after.queue_sent_bytes is not None:
        sent = per_s(old.queue_sent_bytes, after.queue_sent_bytes)
        frames = per_s(old.queue_sent_packets, after.queue_sent_packets)
        sent_bits_per_s = None
        if sent is not None and frames is not None:
            sent_bits_per_s = 8 * (sent + FRAME_EXTRA_BYTES * frames)
    ceiling = after.ceiling_in_force_bits_per_s
    return ClassRate(
        name=after.name,
        direction=after.direction,
        bits_per_s=bits_per_s,
        packets_per_s=per_s(old.packets, after.packets),
        drops_per_s=_sum(per_s(old.drops, after.drops), per_s(old.queue_drops, after.queue_drops)),
        ce_marks_per_s=per_s(old.ce_marks, after.ce_marks),
        sent_bits_per_s=sent_bits_per_s,
        ceiling_bits_per_s=ceiling,
        ceiling_use=sent_bits_per_s / ceiling if ceiling and sent_bits_per_s is not None else None,
        backlog_bytes=after.backlog_bytes,
        queue_delay_s=_delay_s(after.backlog_bytes, sent_bits_per_s),
    )


def _sum(first: float | None, second: float | None) -> float | None:
    """Return the sum; of a class without a queue only the first counts."""
    if first is None:
        return None
    return first + (second or 0.0)


def _delay_s(backlog_bytes: int | None, sent_bits_per_s: float | None) -> float | None:
    if backlog_bytes is None:
        return None
    if backlog_bytes == 0:
        return 0.0
    if not sent_bits_per_s:  # something waits, and nothing left: nobody knows how long
        return None
    return 8 * backlog_bytes / sent_bits_per_s
