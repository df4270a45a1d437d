# SPDX-License-Identifier: Apache-2.0
"""Take up what happened to an attached device, in place, as far as nothing is lost by it.

Each repair states absolute values, so one that was cut short is done again as
a whole; the state says so only once the kernel's answer agrees.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from shapeagent.kernel import abi, bpf, filters, link, qdisc, routes
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import ConflictError, ShapeError
from shapeagent.model.types import DeviceFacts, Direction, GsoLimits, IngressMode, Policy, Profile
from shapeagent.policy.following import carry_ceiling
from shapeagent.policy.plan import capped_gso, resolve_segment_limit, slow_paced_classes
from shapeagent.service import following
from shapeagent.service.ceilings import (
    initial_ceilings,
    tree_of,
)
from shapeagent.service.filling import rewrite
from shapeagent.service.hook import refuse_shared_hook
from shapeagent.service.planning import asked_segment_limit
from shapeagent.service.restoring import undo_text
from shapeagent.service.state import AttachState, CeilingState, StateDir

if TYPE_CHECKING:
    from shapeagent.service.engine import Attached, Engine


def repair(
    engine: Engine, rtnl: Rtnl, store: StateDir, state: AttachState, facts: DeviceFacts
) -> tuple[AttachState, tuple[str, ...]]:
    """Return the state that then holds, and what was repaired; nothing where all is as it was.

    What someone else put in the place of ours is left alone: `status` names it.

    Args:
        facts: the attached device as it is now.
    Raises: ConflictError edt-ceiling-too-low, InputError from the policy, where
        the numbers of a changed device cannot be; FailedError readback-differs.
    """
    if state.abi_version != abi.SHP_ABI_VERSION:
        return state, ()
    done: list[str] = []
    if state.request.get("ingress") == IngressMode.IFB.value and not state.shadow:
        state = _repair_ifb(engine, rtnl, store, state, done)
    _rebuild_leaves(engine, rtnl, store, state, done)
    drifts = following.drifts_of(state, facts)
    if drifts and _trees_are_ours(engine, rtnl, store, state):
        state = _retune(engine, rtnl, store, state, facts)
        done += [f"{facts.name} {one.text.partition(':')[0]}: taken up" for one in drifts]
    return state, tuple(done)


def _open(
    engine: Engine, rtnl: Rtnl, store: StateDir, state: AttachState, link_rate: int | None = None
) -> Attached:
    """Return the attachment with its policy resolved against a link rate."""
    from shapeagent.service.engine import Attached

    if link_rate is not None:
        state = dataclasses.replace(state, link_rate_bits_per_s=link_rate)
    return Attached(engine, rtnl, store, state, store.folder.name)


def _trees_are_ours(engine: Engine, rtnl: Rtnl, store: StateDir, state: AttachState) -> bool:
    attached = _open(engine, rtnl, store, state)
    try:
        return all(
            tree is None or qdisc.is_ours(qdisc.dump_tree(rtnl, index), tree)
            for tree, index in (
                (attached.tree(Direction.EGRESS), state.index),
                (attached.tree(Direction.INGRESS), state.ifb_index),
            )
        )
    finally:
        attached.close()


# --- the IFB (F40)


def _ifb_trouble(attached: Attached) -> str:
    """Return what is wrong with the IFB: "down", "gone" (or not as it was), "" for nothing."""
    state = attached.state
    tree = attached.tree(Direction.INGRESS)
    if not state.ifb_index or tree is None:
        return "gone"
    if all(one.index != state.ifb_index for one in _own_ifbs(attached)):
        return "gone"
    try:
        facts = link.read_device_by_index(attached.rtnl, state.ifb_index)
        qdisc.read_back(attached.rtnl, state.ifb_index, tree, leaf_limits=False)
    except ShapeError:
        return "gone"
    listed = filters.list_filters(attached.rtnl, state.index, Direction.INGRESS)
    redirect = filters.find_redirect(listed)
    if redirect is None or redirect.program_id != state.program_ids.get(filters.REDIRECT_NAME):
        return "" if redirect is not None else "gone"  # someone else's filter stays
    return "" if facts.up else "down"


def _own_ifbs(attached: Attached) -> tuple[link.LinkIdentity, ...]:
    key = attached.store.folder.name
    return following.ifbs_of(attached.engine, attached.rtnl, key, attached.state)


def _repair_ifb(
    engine: Engine, rtnl: Rtnl, store: StateDir, state: AttachState, done: list[str]
) -> AttachState:
    attached = _open(engine, rtnl, store, state)
    try:
        trouble = _ifb_trouble(attached)
        if trouble == "down":
            link.set_up(rtnl, state.ifb_index)
            done.append(f"{state.ifb} was down: set up again")
        if trouble != "gone":
            return state
        _stop_redirect(attached)
        try:
            _make_ifb(attached)
        except (ShapeError, FileNotFoundError) as error:
            if state.ifb_index:
                reason = error.message if isinstance(error, ShapeError) else str(error)
                done.append(f"the IFB is gone: what arrives is policed instead ({reason})")
            _police(attached)
            return attached.state
        done.append(f"the IFB was gone or changed: {attached.state.ifb} was made anew")
        return attached.state
    finally:
        attached.close()


def _stop_redirect(attached: Attached) -> None:
    """Police from the next packet on, then take away what loses packets to a lost IFB."""
    config = attached.datapath.read_config()
    config.ifb_lease_jiffies = 0
    attached.datapath.write_config(config)
    state = attached.state
    ids = state.our_ids
    filters.del_redirect(attached.rtnl, state.index, our_program_ids=ids)
    for one in _own_ifbs(attached):
        link.delete_ifb(attached.rtnl, one.index)


def _make_ifb(attached: Attached) -> None:
    rtnl, state = attached.rtnl, attached.state
    refuse_shared_hook(rtnl, attached.engine.netns, state.index, state.device, state.our_ids)
    descriptor = bpf.get_pinned(str(attached.pins / filters.REDIRECT_NAME))
    try:
        ifb = link.create_ifb(rtnl, state.device)
        state = dataclasses.replace(
            state, ingress=IngressMode.IFB.value, ifb=ifb.name, ifb_index=ifb.index
        )
        attached.save(state)
        tree = tree_of(attached.policy, state, Direction.INGRESS)
        attached.set_tree(Direction.INGRESS, tree)
        if tree is not None:
            qdisc.apply_tree(rtnl, ifb.index, tree)
        rewrite(attached.datapath, attached.policy, attached.state)
        filters.add_redirect(rtnl, state.index, ifb.index, descriptor)
    finally:
        os.close(descriptor)


def _police(attached: Attached) -> None:
    for one in _own_ifbs(attached):
        link.delete_ifb(attached.rtnl, one.index)
    attached.save(
        dataclasses.replace(attached.state, ingress=IngressMode.POLICE.value, ifb=None, ifb_index=0)
    )
    attached.set_tree(Direction.INGRESS, None)
    rewrite(attached.datapath, attached.policy, attached.state)


# --- leaves of mq (F35)


def _rebuild_leaves(
    engine: Engine, rtnl: Rtnl, store: StateDir, state: AttachState, done: list[str]
) -> None:
    if state.shadow or state.profile != Profile.EDT.value:
        return
    attached = _open(engine, rtnl, store, state)
    try:
        tree = attached.tree(Direction.EGRESS)
    finally:
        attached.close()
    if tree is not None and qdisc.is_ours(qdisc.dump_tree(rtnl, state.index), tree):
        queues = qdisc.rebuild_leaves(rtnl, state.index, tree)
        if queues:
            numbers = ", ".join(map(str, queues))
            done.append(f"transmit queues {numbers} had no fq of ours: rebuilt")


# --- numbers (F11, F13, F37)


def _retune(
    engine: Engine, rtnl: Rtnl, store: StateDir, state: AttachState, facts: DeviceFacts
) -> AttachState:
    """Compute every number anew for the device as it is, and put it in force in place."""
    rate = state.link_rate_bits_per_s
    if state.link_rate_source == following.FROM_DEVICE and facts.speed_bits_per_s:
        rate = facts.speed_bits_per_s
    old = _open(engine, rtnl, store, state)
    old_policy = old.policy
    old.close()
    attached = _open(engine, rtnl, store, state, rate)
    try:
        new, gso = _new_state(rtnl, state, facts, old_policy, attached.policy)
        attached.state = new
        trees = {one: tree_of(attached.policy, new, one) for one in Direction}
        _refuse_slow(attached, rate)
        if gso is not None:
            link.set_gso(rtnl, new.index, gso)
        for direction, tree in trees.items():
            attached.set_tree(direction, tree)
            if tree is not None:
                qdisc.change_tree(rtnl, _index(new, direction), tree)
        rewrite(attached.datapath, attached.policy, attached.state)
        for direction, tree in trees.items():
            if tree is not None:
                qdisc.read_back(rtnl, _index(new, direction), tree, leaf_limits=False)
        if gso is not None:
            routes.reroute_ipv4(engine.netns)
        if new.device != state.device:
            _take_up_name(attached, state)
        attached.save(new)
        _write_undo(attached)
    finally:
        attached.close()
    return new


def _index(state: AttachState, direction: Direction) -> int:
    return state.ifb_index if direction is Direction.INGRESS else state.index


def _new_state(
    rtnl: Rtnl,
    state: AttachState,
    facts: DeviceFacts,
    old_policy: Policy,
    policy: Policy,
) -> tuple[AttachState, GsoLimits | None]:
    """Return the state of the device as it is, and the segment limits to set, None for none."""
    rate = policy.link_rate_bits_per_s
    current = link.read_gso(rtnl, state.index)
    before = state.gso_before or current
    facts = dataclasses.replace(
        facts,
        gso_max_size=before.max_size_bytes,
        gso_max_segs=before.max_segments,
        gso_ipv4_max_size=before.ipv4_max_size_bytes,
    )
    asked = state.request.get("segment_limit")
    if asked is not None:
        policy = dataclasses.replace(policy, segment_limit_bytes=asked_segment_limit(asked))
    limit = 0
    if not state.shadow:
        limit = resolve_segment_limit(policy, facts, rate, Profile(state.profile))
    wanted = capped_gso(before, limit, facts.mtu)
    new = dataclasses.replace(
        state,
        device=facts.name,
        facts=facts,
        link_rate_bits_per_s=rate,
        segment_limit_bytes=limit,
        ceilings=_carried(state, old_policy, policy),
    )
    if current not in (state.gso_set or before, before, wanted):
        return new, None  # someone else's by now: `status` says so
    limited = wanted != before
    new = dataclasses.replace(
        new, gso_before=before if limited else None, gso_set=wanted if limited else None
    )
    return new, None if wanted == current else wanted


def _carried(
    state: AttachState, old_policy: Policy, policy: Policy
) -> dict[str, dict[str, CeilingState]]:
    """Return the ceilings in force, under another link rate where that changed."""
    was = initial_ceilings(old_policy, state.link_rate_bits_per_s)
    becomes = initial_ceilings(policy, policy.link_rate_bits_per_s)

    def carried(direction: str, name: str, one: CeilingState) -> CeilingState:
        old, new = was[direction][name], becomes[direction][name]
        live, safe = carry_ceiling(
            (one.live_bits_per_s, one.safe_bits_per_s),
            (old.live_bits_per_s, old.safe_bits_per_s),
            (new.live_bits_per_s, new.safe_bits_per_s),
            policy.link_rate_bits_per_s,
        )
        return dataclasses.replace(one, live_bits_per_s=live, safe_bits_per_s=safe)

    return {
        direction: {name: carried(direction, name, one) for name, one in classes.items()}
        for direction, classes in state.ceilings.items()
    }


def _refuse_slow(attached: Attached, rate: int) -> None:
    tree = attached.tree(Direction.EGRESS)
    slow = slow_paced_classes(tree, attached.policy, rate) if tree and tree.paced else ()
    if slow:
        device = attached.state.device
        raise ConflictError(
            "edt-ceiling-too-low",
            f"{device} has changed, and edt's queue of 8 packets would take more than 20 ms at "
            f"the ceiling or safe ceiling of {', '.join(slow)}: its numbers stay as they were.",
            hint=f"shapectl detach {device}, then attach it with --profile htb",
        )


def _take_up_name(attached: Attached, old: AttachState) -> None:
    """Give the IFB the name of its device: by it a detach finds one that is in no state."""
    key = attached.store.folder.name
    for one in following.ifbs_of(attached.engine, attached.rtnl, key, old):
        link.mark_ifb(attached.rtnl, one.index, attached.state.device)


def _write_undo(attached: Attached) -> None:
    before = attached.store.read_snapshot()
    if before is not None:
        tree = attached.tree(Direction.EGRESS)
        text = undo_text(attached.rtnl, attached.store, attached.state, before, tree, attached.pins)
        attached.store.write_undo(text)
