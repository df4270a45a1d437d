# SPDX-License-Identifier: Apache-2.0
"""From policy and state into the maps: classes, configuration, rules."""

from __future__ import annotations

import contextlib
import dataclasses

from shapeagent.kernel.cgroup import find_cgroup
from shapeagent.kernel.clock import JiffiesClock
from shapeagent.kernel.datapath import Datapath
from shapeagent.model.types import Direction, IngressMode, Policy, Profile
from shapeagent.policy.rules import compile_rules
from shapeagent.service.ceilings import Enforcement, ceiling_states, class_words, tree_of
from shapeagent.service.records import config_record, rule_write
from shapeagent.service.state import AttachState


def fill(
    datapath: Datapath, policy: Policy, state: AttachState, ingress_lease_s: float
) -> AttachState:
    """Write everything but lists into maps that nobody reads yet. Returns the state it made."""
    write, levels, missing = rule_write(compile_rules(policy), find_cgroup)
    datapath.write_control(dataclasses.replace(datapath.read_control(), shadow=state.shadow))
    datapath.replace_rules(write)
    write_classes(datapath, policy, state)
    lease = ifb_lease(state, ingress_lease_s)
    write_config(datapath, policy, state, cgroup_levels=levels, ifb_lease_jiffies=lease)
    return dataclasses.replace(state, missing_cgroups=missing)


def write_classes(datapath: Datapath, policy: Policy, state: AttachState) -> None:
    """Write the record of every class in both directions."""
    for direction in Direction:
        ceilings = ceiling_states(state, direction)
        tree = tree_of(policy, state, direction)
        for one in policy.classes:
            record = class_words(policy, state, direction, one.name, ceilings, tree)
            datapath.write_class(direction.number, one.number, record)


def write_config(
    datapath: Datapath,
    policy: Policy,
    state: AttachState,
    *,
    cgroup_levels: int,
    ifb_lease_jiffies: int,
) -> None:
    """Write the configuration of the interface."""
    datapath.write_config(
        config_record(
            policy,
            state.facts,
            state.kernel,
            profile=Profile(state.profile),
            ingress=IngressMode(state.ingress),
            segment_limit_bytes=state.segment_limit_bytes,
            cgroup_levels=cgroup_levels,
            ifb_lease_jiffies=ifb_lease_jiffies,
            tree=tree_of(policy, state, Direction.EGRESS),
        )
    )


def rewrite(datapath: Datapath, policy: Policy, state: AttachState) -> None:
    """Write classes and configuration again; cgroup levels and the lease of an IFB stay."""
    old = datapath.read_config()
    by_ifb = Enforcement.of(state).ingress_tree is not None
    write_classes(datapath, policy, state)
    write_config(
        datapath,
        policy,
        state,
        cgroup_levels=old.cgroup_levels,
        ifb_lease_jiffies=old.ifb_lease_jiffies if by_ifb else 0,
    )


def ifb_lease(state: AttachState, lease_s: float) -> int:
    """Return the deadline of a redirect that begins now, in jiffies; 0 without an IFB."""
    if not state.ifb_index:
        return 0
    with contextlib.closing(JiffiesClock()) as clock:
        return clock.read() + max(1, round(lease_s * 1e9 / state.kernel.jiffy_ns))
