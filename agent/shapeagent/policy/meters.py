# SPDX-License-Identifier: Apache-2.0
"""Numbers for the token buckets that the kernel program keeps (GCRA, bpf-facts §2.4).

A bucket is one time: when the traffic so far would have left at the rate.
How far that lies ahead of now is its virtual queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from shapeagent.model.types import Budget

COST_SHIFT = 20  # SHP_COST_SHIFT in bpf/abi.h; a test compares both

# One segmentation-offload packet of 64 KB with its headers repeated on the
# wire: 45 frames of 1,538 B. A bucket that holds less never lets it pass.
LARGEST_SEGMENT_WIRE_BYTES = 69_210
# A policer keeps no queue. A TCP flow between near hosts cannot be slower than
# its least window per round trip (800 Mbit/s at 30 us), so it runs until it is
# dropped and then waits for its retransmission timer, 200 ms at least
# (TCP_RTO_MIN): a bucket that holds less than that leaves the ceiling unused.
# Measured at 20 and 50 Mbit/s: 5 ms of bucket 11 to 28 % of the ceiling,
# 200 ms 92 to 95 %, 250 ms 98 to 99 %.
DROP_QUEUE_NS = 250_000_000
# ECN-capable packets are told before: beyond a few milliseconds, and one packet.
CE_QUEUE_NS = 5_000_000
SEGMENTS_IN_QUEUE = 2
# Departure times do keep a queue, so a sender can be told early. After Meta's
# HBM (linux samples/bpf/hbm_kern.h: MARK_THRESH_NS 50 us, DROP_THRESH_NS 500 us).
PACE_CE_NS = 50_000
PACE_CE_SEGMENTS = 2
PACE_DROP_NS = 500_000
PACE_DROP_SEGMENTS = 8
PACE_MAX_DROP_NS = 20_000_000  # a longer queue would be one big FIFO (cilium#29083)
PACE_HARD_SHIFT = 2  # spared packets too are dropped at 4 times the limit (bpf/lib/pace.h)
# Unpaced classes may be so far ahead of what paced ones leave them: a decode step of
# 256 streams is 5 ms of 100 Mbit/s.
LINK_BURST_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class MeterPlan:
    """A ceiling as the kernel program meters it."""

    cost: int  # ns per wire byte << COST_SHIFT
    ce_ns: int  # virtual queue beyond which ECN-capable packets are marked CE
    drop_ns: int  # virtual queue beyond which packets are dropped


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """What one source may send in a class, as the kernel program meters it."""

    cost: int  # ns per wire byte << COST_SHIFT
    burst_ns: int


def cost_of(rate_bits_per_s: int) -> int:
    """Return the nanoseconds that one byte takes at the rate, shifted left by COST_SHIFT.

    Exact to 0.003 % up to 400 Gbit/s. At 1 kbit/s a 64 KB packet still fits a u64.
    """
    if rate_bits_per_s <= 0:
        raise ValueError(f"rate must be positive, got {rate_bits_per_s} bit/s")
    return max(1, ((8_000_000_000 << COST_SHIFT) + rate_bits_per_s // 2) // rate_bits_per_s)


def meter_for(
    rate_bits_per_s: int, largest_segment_wire_bytes: int = LARGEST_SEGMENT_WIRE_BYTES
) -> MeterPlan:
    """Return the meter of a ceiling: what it marks, and what it drops.

    Args:
        rate_bits_per_s: the ceiling, wire bits.
        largest_segment_wire_bytes: of one packet before segmentation; less
            than a 64 KB packet is not believed, since forwarded packets
            ignore the device's segment limit.
    """
    segment_bytes = max(largest_segment_wire_bytes, LARGEST_SEGMENT_WIRE_BYTES)
    segment_ns = -(-segment_bytes * 8_000_000_000 // rate_bits_per_s)
    drop_ns = max(DROP_QUEUE_NS, SEGMENTS_IN_QUEUE * segment_ns)
    ce_ns = min(max(CE_QUEUE_NS, segment_ns), drop_ns // 2)
    return MeterPlan(cost=cost_of(rate_bits_per_s), ce_ns=ce_ns, drop_ns=drop_ns)


def pace_for(rate_bits_per_s: int, segment_wire_bytes: int) -> MeterPlan:
    """Return the marks and drops of a class that leaves by departure time.

    Args:
        segment_wire_bytes: the largest packet under the segment limit, on the wire.
    """
    segment_ns = -(-segment_wire_bytes * 8_000_000_000 // rate_bits_per_s)
    return MeterPlan(
        cost=cost_of(rate_bits_per_s),
        ce_ns=max(PACE_CE_NS, PACE_CE_SEGMENTS * segment_ns),
        drop_ns=max(PACE_DROP_NS, PACE_DROP_SEGMENTS * segment_ns),
    )


def least_paced_rate(segment_wire_bytes: int) -> int:
    """Return the least rate, in bits per second, whose queue limit is no longer than 20 ms."""
    bits = 8 * PACE_DROP_SEGMENTS * segment_wire_bytes
    return -(-bits * 1_000_000_000 // PACE_MAX_DROP_NS)


def budget_for(budget: Budget, tick_ns: int) -> BudgetPlan:
    """Return the meter of a source's budget.

    The kernel program reads jiffies for it (a real clock costs 30 ns), so the
    burst has two ticks of slack: within one tick time stands still, and a
    steady sender at the rate must not overflow.
    """
    burst_ns = -(-budget.burst_bytes * 8_000_000_000 // budget.rate_bits_per_s)
    return BudgetPlan(cost=cost_of(budget.rate_bits_per_s), burst_ns=burst_ns + 2 * tick_ns)
