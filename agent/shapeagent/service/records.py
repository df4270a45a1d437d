# SPDX-License-Identifier: Apache-2.0
"""From policy and plan to the records that the maps hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shapeagent.kernel import abi
from shapeagent.kernel.cgroup import CgroupRef
from shapeagent.kernel.datapath import RuleWrite
from shapeagent.model.types import (
    DeviceFacts,
    Direction,
    IngressMode,
    KernelFacts,
    Policy,
    Profile,
    TrafficClass,
    TreePlan,
)
from shapeagent.policy.following import chooses_hardware
from shapeagent.policy.meters import LINK_BURST_NS, budget_for, cost_of, meter_for, pace_for
from shapeagent.policy.rules import RuleTables

# New flows per CPU and second that may enter the cache: a scan or SYN flood
# beyond it goes uncached, and live flows stay (F41). An LRU of 131,072
# entries then holds at least 6 s of flood.
INSERTS_PER_S = 20_000
MAX_CGROUP_LEVEL = 15  # the program asks at 15 levels below the root (rules.h)
HOLD_S = 1.0  # a moved flow stays at least so long, whatever the policy's hold

_INGRESS_MODES = {
    IngressMode.COUNT: abi.SHP_INGRESS_COUNT,
    IngressMode.POLICE: abi.SHP_INGRESS_POLICE,
    IngressMode.IFB: abi.SHP_INGRESS_IFB,
}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The ceilings of one class in one direction, bits per second, and the lease's deadline."""

    live_bits_per_s: int
    safe_bits_per_s: int
    deadline_jiffies: int = 0  # 0 = no lease


def rule_write(
    tables: RuleTables, resolve: Callable[[str], CgroupRef | None]
) -> tuple[RuleWrite, int, tuple[str, ...]]:
    """Return the rules as the maps take them, the cgroup levels, and cgroups not found.

    Args:
        resolve: cgroup path → id and level now, None where there is none.
    """
    cgroups, levels, missing = [], 0, []
    for path, rule, directions in tables.cgroups:
        found = resolve(path)
        if found is None or not 1 <= found.level <= MAX_CGROUP_LEVEL:
            missing.append(path)
            continue
        cgroups.append((found.id, rule, directions))
        levels |= 1 << found.level
    flags = 0
    if tables.has_mark:
        flags |= abi.SHP_F_RULE_MARK
    if cgroups:
        flags |= abi.SHP_F_RULE_CGROUP
    if tables.has_dscp:
        flags |= abi.SHP_F_RULE_DSCP
    if tables.datagrams_look:
        flags |= abi.SHP_F_DGRAM_LOOK
    write = RuleWrite(
        ports=tables.ports,
        fields=tables.fields,
        marks=tables.marks,
        cgroups=cgroups,
        rules=[(number, class_number, int(code)) for number, class_number, code in tables.rules],
        flags=flags,
    )
    return write, levels, tuple(missing)


def config_record(
    policy: Policy,
    device: DeviceFacts,
    kernel: KernelFacts,
    *,
    profile: Profile,
    ingress: IngressMode,
    segment_limit_bytes: int,
    cgroup_levels: int,
    ifb_lease_jiffies: int = 0,
    tree: TreePlan | None = None,
) -> abi.Config:
    """Return the configuration record of an interface.

    Args:
        tree: of egress, if any.
    """
    per_second = round(1e9 / kernel.jiffy_ns)
    holds = [c.budget.hold_s for c in policy.classes if c.budget is not None]
    clock = tree.link_clock if tree is not None else None
    return abi.Config(
        link_cost=cost_of(clock.rate_bits_per_s) if clock else 0,
        link_rest_cost=cost_of(clock.rest_bits_per_s) if clock else 0,
        link_burst_ns=LINK_BURST_NS if clock else 0,
        tick_ns=kernel.jiffy_ns,
        hold_jiffies=round(max([HOLD_S, *holds]) * per_second),
        insert_window_jiffies=per_second,
        insert_limit=INSERTS_PER_S,
        ifb_lease_jiffies=ifb_lease_jiffies,
        segment_limit_bytes=segment_limit_bytes,
        egress_mark_mask=policy.egress_mark_mask,
        ingress_mark_mask=policy.ingress_mark_mask,
        cgroup_levels=cgroup_levels,
        l3_device=device.l3_only,
        default_class=policy.class_named(policy.default_class).number,
        control_class=policy.class_named(policy.control_class).number,
        ingress_mode=_INGRESS_MODES[ingress],
        class_count=len(policy.classes),
        write_priority=not (
            profile is Profile.POLICE or policy.shadow or chooses_hardware(device, profile)
        ),
    )


def class_record(
    policy: Policy,
    traffic_class: TrafficClass,
    direction: Direction,
    ceilings: Ceilings,
    *,
    kernel: KernelFacts,
    link_rate_bits_per_s: int,
    tree: TreePlan | None,
    metered: bool,
) -> abi.Class:
    """Return one class of one direction.

    Args:
        tree: the qdisc tree that reads skb->priority in this direction, if any.
        metered: the program itself holds the ceilings; else the tree holds the
            live one, and a safe one above it by the twin leaf.
    """
    record = abi.Class(
        dscp=abi.SHP_NO_DSCP if traffic_class.dscp is None else traffic_class.dscp,
        mark=traffic_class.mark or 0,
        deadline_jiffies=ceilings.deadline_jiffies,
        overflow_class=traffic_class.number,
    )
    if direction is Direction.INGRESS:
        record.dscp = abi.SHP_NO_DSCP
    if tree is not None:
        record.live_priority = tree.priorities.get(traffic_class.name, 0)
        record.safe_priority = tree.safe_priorities.get(traffic_class.name, record.live_priority)
    if traffic_class.budget is not None:
        budget = budget_for(traffic_class.budget, kernel.jiffy_ns)
        record.budget_cost = budget.cost
        record.budget_burst_ns = budget.burst_ns
        record.overflow_class = policy.class_named(traffic_class.budget.overflow_class).number
    _set_meters(record, ceilings, link_rate_bits_per_s, metered, tree)
    if tree is not None and traffic_class.name in tree.paced:
        _set_pace(record, traffic_class.name, ceilings, link_rate_bits_per_s, tree)
    elif tree is not None and tree.link_clock is not None:
        record.flags |= abi.SHP_C_LINK
    return record


def _set_pace(
    record: abi.Class,
    name: str,
    ceilings: Ceilings,
    link_rate_bits_per_s: int,
    tree: TreePlan,
) -> None:
    """Let a class leave by departure time; without a ceiling only behind what still waits."""
    record.flags = abi.SHP_C_PACE
    live = pace_for(ceilings.live_bits_per_s, tree.segment_wire_bytes)
    safe = pace_for(ceilings.safe_bits_per_s, tree.segment_wire_bytes)
    free = name not in tree.paced_always
    record.live_cost = 0 if free and ceilings.live_bits_per_s >= link_rate_bits_per_s else live.cost
    record.safe_cost = 0 if free and ceilings.safe_bits_per_s >= link_rate_bits_per_s else safe.cost
    record.live_ce_ns, record.live_drop_ns = live.ce_ns, live.drop_ns
    record.safe_ce_ns, record.safe_drop_ns = safe.ce_ns, safe.drop_ns


def _set_meters(
    record: abi.Class,
    ceilings: Ceilings,
    link_rate_bits_per_s: int,
    metered: bool,
    tree: TreePlan | None,
) -> None:
    live = meter_for(ceilings.live_bits_per_s)
    safe = meter_for(ceilings.safe_bits_per_s)
    record.live_cost, record.live_ce_ns, record.live_drop_ns = live.cost, live.ce_ns, live.drop_ns
    record.safe_cost, record.safe_ce_ns, record.safe_drop_ns = safe.cost, safe.ce_ns, safe.drop_ns
    if metered and ceilings.live_bits_per_s < link_rate_bits_per_s:
        record.flags |= abi.SHP_C_METER_LIVE
    if ceilings.safe_bits_per_s < (link_rate_bits_per_s if metered else ceilings.live_bits_per_s):
        record.flags |= abi.SHP_C_METER_SAFE
    if tree is not None and ceilings.safe_bits_per_s > ceilings.live_bits_per_s:
        record.flags |= abi.SHP_C_TWIN_SAFE
