# SPDX-License-Identifier: Apache-2.0
"""The ceilings in force and who holds them: tree, program, or nobody."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from shapeagent.kernel import abi
from shapeagent.model.types import (
    Direction,
    IngressMode,
    Policy,
    Profile,
    TrafficClass,
    TreePlan,
)
from shapeagent.policy.plan import ceilings_of, plan_tree
from shapeagent.service.records import Ceilings, class_record
from shapeagent.service.state import AttachState, CeilingState


@dataclass(frozen=True, slots=True)
class Enforcement:
    """Who holds ceilings, by direction: a qdisc tree, the program's meters, or nobody."""

    egress_tree: Profile | None
    egress_metered: bool
    ingress_tree: Profile | None
    ingress_metered: bool

    @classmethod
    def of(cls, state: AttachState) -> Enforcement:
        """Return how an attachment holds its ceilings."""
        return cls.choose(Profile(state.profile), IngressMode(state.ingress), shadow=state.shadow)

    @classmethod
    def choose(cls, profile: Profile, ingress: IngressMode, *, shadow: bool) -> Enforcement:
        """Return who holds ceilings under a profile. Shadow meters only to count."""
        tree = None if shadow or profile is Profile.POLICE else profile
        by_ifb = ingress is IngressMode.IFB and not shadow
        return cls(
            egress_tree=tree,
            egress_metered=tree is not Profile.HTB,
            ingress_tree=Profile.HTB if by_ifb else None,
            ingress_metered=ingress is not IngressMode.COUNT,
        )

    def tree(self, direction: Direction) -> Profile | None:
        """Return the kind of tree of a direction, None where there is none."""
        return self.egress_tree if direction is Direction.EGRESS else self.ingress_tree

    def metered(self, direction: Direction) -> bool:
        """Return whether the program meters ceilings in a direction."""
        return self.egress_metered if direction is Direction.EGRESS else self.ingress_metered


def initial_ceilings(
    policy: Policy, link_rate_bits_per_s: int
) -> dict[str, dict[str, CeilingState]]:
    """Return the policy's own ceilings: direction → class → state, without leases."""
    return {
        direction.value: {
            one.name: CeilingState(*ceilings_of(one, direction, link_rate_bits_per_s))
            for one in policy.classes
        }
        for direction in Direction
    }


def ceiling_states(state: AttachState, direction: Direction) -> Mapping[str, CeilingState]:
    """Return the ceilings of a direction as last set."""
    return state.ceilings[direction.value]


def policy_in_force(policy: Policy, state: AttachState, direction: Direction) -> Policy:
    """Return the policy with the ceilings as last set, for planning the tree that stands."""
    ceilings = ceiling_states(state, direction)

    def in_force(one: TrafficClass) -> TrafficClass:
        found = ceilings[one.name]
        safe = found.safe_bits_per_s
        if direction is Direction.EGRESS:
            return dataclasses.replace(
                one, ceiling_bits_per_s=found.live_bits_per_s, safe_ceiling_bits_per_s=safe
            )
        return dataclasses.replace(
            one, ingress_ceiling_bits_per_s=found.live_bits_per_s, safe_ceiling_bits_per_s=safe
        )

    classes = tuple(in_force(one) for one in policy.classes)
    return dataclasses.replace(policy, classes=classes)


def tree_of(policy: Policy, state: AttachState, direction: Direction) -> TreePlan | None:
    """Return the qdisc tree that stands in a direction, None where there is none."""
    profile = Enforcement.of(state).tree(direction)
    if profile is None:
        return None
    return plan_tree(
        policy_in_force(policy, state, direction),
        state.facts,
        state.kernel,
        link_rate_bits_per_s=state.link_rate_bits_per_s,
        profile=profile,
        segment_limit_bytes=state.segment_limit_bytes,
        direction=direction,
    )


def class_words(
    policy: Policy,
    state: AttachState,
    direction: Direction,
    class_name: str,
    ceilings: Mapping[str, CeilingState],
    tree: TreePlan | None,
) -> abi.Class:
    """Return the map record of one class in one direction.

    Args:
        tree: what `tree_of` gives; its class ids do not depend on ceilings.
    """
    wanted = ceilings[class_name]
    enforcement = Enforcement.of(state)
    return class_record(
        policy,
        policy.class_named(class_name),
        direction,
        Ceilings(wanted.live_bits_per_s, wanted.safe_bits_per_s, wanted.deadline_jiffies),
        kernel=state.kernel,
        link_rate_bits_per_s=state.link_rate_bits_per_s,
        tree=tree,
        metered=enforcement.metered(direction),
    )
