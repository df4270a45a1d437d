# SPDX-License-Identifier: Apache-2.0
"""Status: what is wanted, what the kernel holds, and where the two differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapeagent.kernel import filters, qdisc
from shapeagent.kernel.cgroup import find_cgroup
from shapeagent.kernel.datapath import ClassCount
from shapeagent.kernel.link import read_device_by_index, read_gso
from shapeagent.model.errors import ShapeError
from shapeagent.model.reports import ClassStatus, InterfaceStatus
from shapeagent.model.types import DeviceFacts, Direction, Hook, Profile, RuleKind
from shapeagent.policy.following import chooses_hardware
from shapeagent.policy.plan import (
    TC_PRIO_BESTEFFORT,
    TC_PRIO_BULK,
    TC_PRIO_CONTROL,
    TC_PRIO_INTERACTIVE,
    live_minor,
    twin_minor,
)
from shapeagent.policy.rules import compile_rules
from shapeagent.service import following, selftest
from shapeagent.service.ceilings import ceiling_states
from shapeagent.service.confirming import read_pending
from shapeagent.service.hook import PROGRAMS, list_ingress_sharers
from shapeagent.service.placement import shaped_beside
from shapeagent.service.records import rule_write
from shapeagent.service.selftest import Reach
from shapeagent.service.state import CeilingState

if TYPE_CHECKING:
    from shapeagent.service.engine import Attached

_FQ_PRIORITIES = {
    TC_PRIO_CONTROL: "control",
    TC_PRIO_INTERACTIVE: "interactive",
    TC_PRIO_BESTEFFORT: "best effort",
    TC_PRIO_BULK: "bulk",
}
_NO_SOCKET_SHARE = 0.05  # above it cgroup and mark rules miss too much
_ENCAP_SHARE = 0.05
_MIN_PACKETS = 1_000  # before a share means anything


def priority_text(priority: int) -> str:
    """Return skb->priority as tc writes a class id; one without a major by fq's name for it."""
    if priority in _FQ_PRIORITIES:
        return f"{_FQ_PRIORITIES[priority]} ({priority})"
    return f"{priority >> 16:x}:{priority & 0xFFFF:x}"


def ceiling_in_force(attached: Attached, class_name: str, direction: Direction) -> int | None:
    """Return the ceiling that holds now, None where nobody holds one."""
    if not _is_enforced(attached, direction):
        return None
    found = ceiling_states(attached.state, direction)[class_name]
    now = attached.clock.read() if found.deadline_jiffies else 0
    return _bits_per_s_at(found, now)


def _bits_per_s_at(ceiling: CeilingState, now_jiffies: int) -> int:
    if ceiling.deadline_jiffies and now_jiffies >= ceiling.deadline_jiffies:
        return ceiling.safe_bits_per_s
    return ceiling.live_bits_per_s


def _is_enforced(attached: Attached, direction: Direction) -> bool:
    how = attached.enforcement
    if attached.state.shadow:
        return False
    return how.tree(direction) is not None or how.metered(direction)


def class_status(attached: Attached, class_name: str, direction: Direction) -> ClassStatus:
    """Return one class in one direction."""
    number = attached.policy.class_named(class_name).number
    counts = {number: attached.datapath.count(direction.number, number)}
    return _class_rows(attached, direction, counts, only=class_name)[0]


def _class_rows(
    attached: Attached,
    direction: Direction,
    counts: Sequence[ClassCount] | Mapping[int, ClassCount],
    *,
    only: str | None = None,
) -> list[ClassStatus]:
    """Return the classes of one direction. `counts`: class number → what was counted."""
    state = attached.state
    enforced = _is_enforced(attached, direction)
    queues = _queues(attached, direction)
    ceilings = ceiling_states(state, direction)
    leased = any(one.deadline_jiffies for one in ceilings.values())
    now = attached.clock.read() if leased else 0
    rows = []
    for one in attached.policy.classes:
        if only not in (None, one.name):
            continue
        count = counts[one.number]
        ceiling = ceilings[one.name]
        left = None
        if ceiling.deadline_jiffies:
            left = max(0, ceiling.deadline_jiffies - now) * state.kernel.jiffy_ns / 1e9
        queue = queues.get(one.number, _Queue())
        egress = direction is Direction.EGRESS
        rows.append(
            ClassStatus(
                name=one.name,
                number=one.number,
                direction=direction.value,
                guarantee_bits_per_s=one.guarantee_bits_per_s if egress else 0,
                ceiling_bits_per_s=ceiling.live_bits_per_s if enforced else None,
                safe_ceiling_bits_per_s=ceiling.safe_bits_per_s if enforced else None,
                ceiling_in_force_bits_per_s=_bits_per_s_at(ceiling, now) if enforced else None,
                lease_s_left=left,
                packets=count.packets,
                wire_bytes=count.wire_bytes,
                drops=count.drops,
                drop_wire_bytes=count.drop_wire_bytes,
                ce_marks=count.ce_marks,
                no_socket_packets=count.no_socket,
                over_segment_packets=count.over_segment,
                backlog_bytes=queue.backlog_bytes,
                queue_drops=queue.drops,
                queue_sent_bytes=queue.sent_bytes,
                queue_sent_packets=queue.sent_packets,
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class _Queue:
    """What the queues of one class hold and did, twin leaf included; None without a queue."""

    backlog_bytes: int | None = None
    drops: int | None = None
    sent_bytes: int | None = None
    sent_packets: int | None = None


def _queues(attached: Attached, direction: Direction) -> dict[int, _Queue]:
    """Return class number → its queues in the tree of a direction."""
    tree = attached.tree(direction)
    if tree is None or tree.profile is Profile.EDT:  # fq has no queue per class
        return {}
    index = attached.state.index if direction is Direction.EGRESS else attached.state.ifb_index
    try:
        stats = qdisc.class_stats(attached.rtnl, index)
    except ShapeError:
        return {}  # the device is gone: `problems` says so
    found = {}
    for one in attached.policy.classes:
        if tree.profile is Profile.HTB:
            minors = [live_minor(one.number), twin_minor(one.number)]
        else:
            minors = [tree.priorities[one.name] & 0xFFFF]
        rows = [stats[minor] for minor in minors if minor in stats]
        if rows:
            found[one.number] = _Queue(
                sum(row.backlog_bytes for row in rows),
                sum(row.drops for row in rows),
                sum(row.sent_bytes for row in rows),
                sum(row.sent_packets for row in rows),
            )
    return found


def broken_status(key: str, netns: str | None, error: ShapeError) -> InterfaceStatus:
    """Return the row of an attachment that cannot be read, so that it is seen."""
    return InterfaceStatus(
        device=key,
        index=int(key.rpartition("-")[2]),
        netns=netns,
        profile="unknown",
        ingress="unknown",
        hook="unknown",
        shadow=False,
        link_rate_bits_per_s=0,
        segment_limit_bytes=0,
        policy_source="unknown",
        policy_digest="",
        attached_unix_s=0.0,
        programs={},
        verified_instructions={},
        whitelist_entries=0,
        whitelist_generation=0,
        classes=(),
        reasons={},
        problems=tuple(text for text in (error.message, error.hint) if text),
        warnings=(),
    )


def interface_status(
    attached: Attached, netns: str | None, damage: Mapping[str, str]
) -> InterfaceStatus:
    """Return the whole status of one attachment.

    Args:
        damage: file of its state → why it cannot be used.
    """
    state = attached.state
    counts = attached.datapath.counts()
    rows = [
        row
        for direction in Direction
        for row in _class_rows(attached, direction, counts[direction.number])
    ]
    by_direction = attached.datapath.all_reasons()
    reasons = {direction.value: by_direction[direction.number] for direction in Direction}
    where = following.look(netns, attached.rtnl, state)
    programs: dict[str, int] = {}
    reaches: list[Reach] = []
    if where.facts is None:
        again = f"shapectl {following.netns_words(netns)}detach {state.device}"
        problems = [f"{where.gone_text(state)}: {again} removes what is left of it"]
    else:
        programs, problems = _programs(attached)
        problems += _problems(attached, netns, where.facts)
        reaches = _reaches(attached, counts)
        problems += [str(one) for one in reaches if one.is_hidden and one.ahead]
    pending = read_pending(attached.store)
    entries, generation = attached.store.whitelist_facts(state)
    return InterfaceStatus(
        device=where.facts.name if where.facts else state.device,
        index=state.index,
        netns=netns,
        profile=state.profile,
        ingress=state.ingress,
        hook=state.hook,
        shadow=state.shadow,
        link_rate_bits_per_s=state.link_rate_bits_per_s,
        segment_limit_bytes=state.segment_limit_bytes,
        policy_source=state.policy_source,
        policy_digest=state.policy_digest,
        attached_unix_s=state.attached_unix_s,
        programs=programs,
        verified_instructions=dict(state.verified),
        whitelist_entries=entries,
        whitelist_generation=generation,
        classes=tuple(rows),
        reasons=reasons,
        problems=tuple(problems),
        warnings=(
            *_device_warnings(attached, where.facts),
            *_damage_warnings(attached, damage),
            *_warnings(attached, rows, reasons),
            *(str(one) for one in reaches if not (one.is_hidden and one.ahead)),
        ),
        unconfirmed_s=None if pending is None else round(pending.left_s, 1),
    )


def _reaches(attached: Attached, counts: Sequence[Sequence[ClassCount]]) -> list[Reach]:
    try:
        return selftest.reaches(attached.place, counts, attached.state.bytes_before)
    except ShapeError:
        return []  # the device is gone: `problems` says so


def _programs(attached: Attached) -> tuple[dict[str, int], list[str]]:
    programs: dict[str, int] = {}
    problems: list[str] = []
    place = attached.place
    what = "link" if place.hook is Hook.TCX else "filter"
    for direction, name in PROGRAMS.items():
        want = attached.state.program_ids.get(name)
        try:
            found = place.holder(direction)
        except ShapeError as error:
            problems.append(error.message)
            continue
        if found is None:
            problems.append(f"our {direction.value} {what} is gone")
        elif found in attached.state.spare_ids:
            again = f"shapectl attach {attached.state.device}"
            problems.append(f"a swap to another version did not end: {again} ends it")
        elif found != want:
            problems.append(
                f"the {direction.value} {what} holds program {found}, not ours ({want})"
            )
        else:
            programs[name] = found
    return programs, problems


def _problems(attached: Attached, netns: str | None, facts: DeviceFacts) -> list[str]:
    state = attached.state
    again = following.attach_words(state, facts.name)
    found = [
        f"{facts.name} {one.text}: {again} takes it up" for one in following.drifts_of(state, facts)
    ]
    for direction in Direction:
        tree = attached.tree(direction)
        if tree is None:
            continue
        index = state.index if direction is Direction.EGRESS else state.ifb_index
        problem = attached.engine.tree_problem(attached.rtnl, index, tree)
        found += [problem] if problem else []
    if state.ifb_index:
        found += _ifb_problems(attached, netns)
    if state.gso_set is not None and read_gso(attached.rtnl, state.index) != state.gso_set:
        found.append("someone changed the segment limits (gso_max_size)")
    return found


def _device_warnings(attached: Attached, facts: DeviceFacts | None) -> list[str]:
    state = attached.state
    if facts is None:
        return []
    found = []
    if not facts.carrier:
        found.append(
            f"{facts.name} {'has no carrier' if facts.up else 'is down'}: nothing is sent; what "
            "stands on it stays"
        )
    if chooses_hardware(facts, Profile(state.profile)) and not following.drifts_of(state, facts):
        found.append(
            f"no priorities are written, since {facts.name} chooses hardware queues by them: "
            f"shapectl detach {facts.name}, then attach it with --profile htb or police"
        )
    if not state.shadow:
        found += [
            f"{other}, on the same way, is shaped too, and packets wait in both trees: shapectl "
            f"detach {other}, or shapectl detach {facts.name}"
            for other in shaped_beside(attached.engine, attached.rtnl, facts.name)
        ]
    if state.request.get("ingress") == "ifb" and state.ingress != "ifb":
        found.append(
            "what arrives is policed, since its IFB was lost: "
            f"{following.attach_words(state, facts.name)} tries to make it again"
        )
    return found


def _stale_cgroups(attached: Attached) -> list[str]:
    if not any(rule.kind is RuleKind.CGROUP for rule in attached.policy.rules):
        return []
    tables = compile_rules(attached.policy)
    write, _levels, _missing = rule_write(tables, find_cgroup)
    if frozenset(write.cgroups) == attached.datapath.cgroup_rules():
        return []
    again = f"shapectl attach {attached.state.device} takes it up"
    return [f"a cgroup that a rule names came, went or was made again: {again}"]


def _damage_warnings(attached: Attached, damage: Mapping[str, str]) -> list[str]:
    """What was put right stays said until detach; what could not be is said as long as it is so."""
    store = attached.store
    found = list(attached.state.recovered)
    aside = store.quarantined()
    if found and aside:
        found.append(f"what was damaged is kept in {store.folder}: {', '.join(aside)}")
    found += [f"{store.folder / name} is damaged: {why}" for name, why in damage.items()]
    return found


def _ifb_problems(attached: Attached, netns: str | None) -> list[str]:
    """A redirect to an IFB that is down or gone loses the packet (bpf-facts row 4)."""
    state = attached.state
    found = []
    again = following.attach_words(state, state.device)
    loss = f"what arrives is lost until the redirect's lease ends; {again} repairs it"
    try:
        if not read_device_by_index(attached.rtnl, state.ifb_index).up:
            found.append(f"{state.ifb} is down: {loss}")
    except ShapeError:
        found.append(f"{state.ifb} is gone: {loss}")
    filter_ids = state.program_ids
    redirect = filters.find_redirect(
        filters.list_filters(attached.rtnl, state.index, Direction.INGRESS)
    )
    if redirect is None or redirect.program_id != filter_ids.get(filters.REDIRECT_NAME):
        found.append(f"our redirect to {state.ifb} is gone: what arrives is not shaped")
    name = read_device_by_index(attached.rtnl, state.index).name
    found += [
        f"someone else uses the ingress hook, and what goes to {state.ifb} passes it by: {one}"
        for one in list_ingress_sharers(attached.rtnl, netns, state.index, name, state.our_ids)
    ]
    return found


def _warnings(
    attached: Attached, rows: list[ClassStatus], reasons: dict[str, dict[str, int]]
) -> list[str]:
    found = _stale_cgroups(attached)
    egress = [row for row in rows if row.direction == "egress"]
    packets = sum(row.packets for row in egress)
    if packets >= _MIN_PACKETS:
        shares = {
            "without a socket: cgroup and mark rules miss them; attach on the host side of the "
            "veth": sum(row.no_socket_packets for row in egress),
            "above the segment limit: they come from elsewhere; limit their own device": sum(
                row.over_segment_packets for row in egress
            ),
        }
        for what, count in shares.items():
            if count > _NO_SOCKET_SHARE * packets:
                found.append(f"{100 * count / packets:.0f} % of packets are {what}")
    for direction, counts in reasons.items():
        total = sum(row.packets for row in rows if row.direction == direction)
        hidden = sum(count for name, count in counts.items() if name.startswith("encap"))
        if total >= _MIN_PACKETS and hidden > _ENCAP_SHARE * total:
            found.append(
                f"{100 * hidden / total:.0f} % of {direction} packets are encapsulated: "
                "only their outer header is classified"
            )
    found += [
        f"rule names cgroup {path}, which is not there" for path in attached.state.missing_cgroups
    ]
    return found
