# SPDX-License-Identifier: Apache-2.0
"""From a request to a plan: what attach would do, decided and printed. Reads only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shapeagent.kernel import filters, link, prepared, snapshot, tcx
from shapeagent.kernel.probe import read_kernel_facts
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.kernel.snapshot import DeviceSnapshot
from shapeagent.model.errors import ConflictError, InputError
from shapeagent.model.reports import AttachPlan, AttachRequest, ClassPlanRow, Finding
from shapeagent.model.types import (
    DeviceFacts,
    Direction,
    GsoLimits,
    Hook,
    IngressMode,
    KernelFacts,
    LeafPlan,
    Policy,
    Profile,
    TrafficClass,
    TreePlan,
)
from shapeagent.model.units import format_rate, parse_size
from shapeagent.policy.meters import least_paced_rate, pace_for
from shapeagent.policy.plan import (
    MAJOR,
    TC_PRIO_BULK,
    TC_PRIO_CONTROL,
    TC_PRIO_INTERACTIVE,
    capped_gso,
    choose_profile,
    live_minor,
    plan_tree,
    resolve_segment_limit,
    segment_cpu_s_per_gb,
    slow_paced_classes,
    tbf_splits,
)
from shapeagent.service import following
from shapeagent.service.ceilings import Enforcement
from shapeagent.service.confirming import check_confirm
from shapeagent.service.documents import read_policy
from shapeagent.service.hook import (
    choose_hook,
    has_other_programs,
    needs_clsact,
    refuse_shared_hook,
)
from shapeagent.service.keptpolicy import policy_of
from shapeagent.service.management import ManagementCheck, check_management
from shapeagent.service.state import AttachState

if TYPE_CHECKING:
    from shapeagent.service.engine import Engine


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request made definite: everything that attach needs, and the plan to print."""

    request: AttachRequest
    device: DeviceFacts
    kernel: KernelFacts
    policy: Policy
    profile: Profile
    profile_reason: str
    ingress: IngressMode
    hook: Hook
    link_rate_bits_per_s: int
    link_rate_source: str
    segment_limit_bytes: int
    gso_before: GsoLimits
    gso_wanted: GsoLimits
    egress_tree: TreePlan | None
    management: ManagementCheck
    before: DeviceSnapshot
    report: AttachPlan
    placement: tuple[Finding, ...] = ()  # that it stands in a wrong place
    not_in_lines: tuple[str, ...] = ()  # of the root taken over: what has no line of tc

    @property
    def enforcement(self) -> Enforcement:
        """How ceilings will be held."""
        return Enforcement.choose(self.profile, self.ingress, shadow=self.policy.shadow)

    @property
    def takes_over(self) -> bool:
        """Whether a root qdisc of someone else's is replaced, to be put back on detach."""
        return self.egress_tree is not None and not self.before.is_default


def make_plan(engine: Engine, rtnl: Rtnl, request: AttachRequest) -> Wanted:
    """Return the request made definite. Reads only.

    Raises: InputError, ConflictError, UnsupportedError, each named.
    """
    check_confirm(request.confirm_s)
    device = link.read_device(rtnl, request.device)
    kernel = read_kernel_facts(engine.run_dir / prepared.NAME)
    state = following.state_of(engine, rtnl, device)
    rate, rate_source = _link_rate(request, device, state)
    folder = engine.store(engine.key_of(rtnl, device.index)).folder
    policy = _policy(request, rate, folder)
    asked = _asked_profile(request)
    if state is not None and state.request.get("profile") == request.profile:
        # what stands stays, even where the choice would be another one today
        profile, reason = Profile(state.profile), state.profile_reason
    else:
        profile, reason = choose_profile(device, kernel, asked, rate)
    if policy.shadow and state is None:
        reason += "; shadow: no qdisc is touched"
    ingress = _ingress(request, device)
    enforcement = Enforcement.choose(profile, ingress, shadow=policy.shadow)
    management = check_management(rtnl, device, own_netns=engine.netns is None)
    before = snapshot.take(rtnl, device.index, link.read_gso(rtnl, device.index))
    placement: tuple[Finding, ...] = ()
    asked_hook = request.hook
    if state is not None and asked_hook is None:
        asked_hook = state.hook
    hook = choose_hook(asked_hook, has_tcx=tcx.is_supported())
    if state is None:
        from shapeagent.service.placement import check_placement

        placement = check_placement(engine, rtnl, device, shadow=policy.shadow)
        if needs_clsact(hook, ingress):
            from shapeagent.kernel.pieces import require_pieces

            require_pieces(
                ifb=enforcement.ingress_tree is not None, kept=engine.run_dir / prepared.NAME
            )
        if not request.yes_management:
            management.refuse_unconfirmed(device.name)
        _refuse_foreign(engine, rtnl, device, enforcement, before, takeover=request.takeover)
        if needs_clsact(hook, ingress):
            _refuse_foreign_filters(rtnl, device, before)
        if enforcement.ingress_tree is not None:
            refuse_shared_hook(rtnl, engine.netns, device.index, device.name)
        gso = before.gso
    else:
        gso = state.gso_before or link.read_gso(rtnl, device.index)
        device = dataclasses.replace(
            device,
            gso_max_size=gso.max_size_bytes,
            gso_max_segs=gso.max_segments,
            gso_ipv4_max_size=gso.ipv4_max_size_bytes,
        )
    limit = 0 if policy.shadow else resolve_segment_limit(policy, device, rate, profile)
    tree = None
    if enforcement.egress_tree is not None:
        tree = plan_tree(
            policy,
            device,
            kernel,
            link_rate_bits_per_s=rate,
            profile=enforcement.egress_tree,
            segment_limit_bytes=limit,
        )
        slow = slow_paced_classes(tree, policy, rate) if tree.paced else ()
        if slow and asked is not None:
            raise _too_slow(request, tree, slow)
        if slow:
            tree, profile = None, Profile.POLICE
            reason += f"; no edt: the ceiling of {', '.join(slow)} is too low for it"
    wanted = Wanted(
        request=request,
        device=device,
        kernel=kernel,
        policy=policy,
        profile=profile,
        profile_reason=reason,
        ingress=ingress,
        hook=hook,
        link_rate_bits_per_s=rate,
        link_rate_source=rate_source,
        segment_limit_bytes=limit,
        gso_before=gso,
        gso_wanted=capped_gso(gso, limit, device.mtu),
        egress_tree=tree,
        management=management,
        placement=placement,
        # what stands there is ours, where we are attached already
        before=before if state is None else dataclasses.replace(before, objects=()),
        report=_EMPTY_REPORT,
    )
    if wanted.takes_over:
        from shapeagent.kernel import tclines

        lacking = tclines.try_lines(before, queues=device.tx_queues)
        if engine.netns is not None and before.program_ids:
            lacking += ("its bpf filters: tc -n hides /sys/fs/bpf",)
        wanted = dataclasses.replace(wanted, not_in_lines=lacking)
    return dataclasses.replace(wanted, report=_report(engine, wanted))


#: What a policy is called that came over the API without a name.
API_SOURCE = "API"

_EMPTY_REPORT = AttachPlan(
    device="",
    netns=None,
    profile="",
    profile_reason="",
    ingress="",
    hook="",
    link_rate_bits_per_s=0,
    link_rate_source="",
    segment_limit_bytes=0,
    segment_limit_note="",
    policy_source="",
    policy_digest="",
    classes=(),
    steps=(),
    warnings=(),
)


def _link_rate(
    request: AttachRequest, device: DeviceFacts, state: AttachState | None
) -> tuple[int, str]:
    if request.link_rate_bits_per_s is not None:
        return request.link_rate_bits_per_s, "given"
    if device.speed_bits_per_s:
        return device.speed_bits_per_s, following.FROM_DEVICE
    if state is not None and state.link_rate_source == following.FROM_DEVICE:
        return state.link_rate_bits_per_s, state.link_rate_source  # until there is a carrier again
    hint = f"shapectl attach {device.name} --link-rate 10gbit"
    if not device.kind and not device.carrier:
        raise InputError(
            "link-rate-unknown",
            f"{device.name} {'has no carrier' if device.up else 'is down'}, so its speed is not "
            "known yet.",
            hint=f"ip link set {device.name} up, and look at cable and switch; or: {hint}",
        )
    raise InputError(
        "link-rate-unknown",
        f"{device.name} has no speed that can be believed"
        f"{f' (a {device.kind} device)' if device.kind else ''}.",
        hint=hint,
    )


def _policy(request: AttachRequest, link_rate_bits_per_s: int, folder: Path) -> Policy:
    if request.policy_text is not None:
        text, source = request.policy_text, request.policy_path or API_SOURCE
    else:
        text, source = read_policy(request.policy_path)
    policy = policy_of(folder, text, source, link_rate_bits_per_s)
    changes: dict[str, object] = {"shadow": request.shadow or policy.shadow}
    if request.egress_mark_mask is not None:
        changes["egress_mark_mask"] = request.egress_mark_mask
    if request.ingress_mark_mask is not None:
        changes["ingress_mark_mask"] = request.ingress_mark_mask
    if request.segment_limit is not None:
        changes["segment_limit_bytes"] = asked_segment_limit(request.segment_limit)
    return dataclasses.replace(policy, **changes)  # type: ignore[arg-type]


def asked_segment_limit(text: str) -> int | None:
    """Return the segment limit of a request in bytes: None is auto, 0 off."""
    if text == "auto":
        return None
    return 0 if text == "off" else parse_size(text)


def _asked_profile(request: AttachRequest) -> Profile | None:
    if request.profile is None:
        return None
    try:
        return Profile(request.profile)
    except ValueError as error:
        raise InputError(
            "bad-profile",
            f"{request.profile!r} is no profile.",
            hint=f"one of {', '.join(one.value for one in Profile)}",
        ) from error


def _too_slow(request: AttachRequest, tree: TreePlan, slow: tuple[str, ...]) -> InputError:
    least = format_rate(least_paced_rate(tree.segment_wire_bytes))
    return InputError(
        "edt-ceiling-too-low",
        f"edt's queue holds 8 packets, here of {tree.segment_wire_bytes} bytes on the wire, and "
        f"they would take more than 20 ms at the ceiling or safe ceiling of {', '.join(slow)}.",
        hint=f"Ceilings from {least} on, a smaller --segment-limit, or shapectl attach "
        f"{request.device} --profile htb.",
    )


def _ingress(request: AttachRequest, device: DeviceFacts) -> IngressMode:
    try:
        ingress = IngressMode(request.ingress)
    except ValueError as error:
        raise InputError(
            "bad-ingress-mode",
            f"{request.ingress!r} is no way to treat what arrives.",
            hint=f"one of {', '.join(one.value for one in IngressMode)}",
        ) from error
    if ingress is IngressMode.IFB and device.l3_only:
        raise InputError(
            "ifb-needs-link-header",
            f"{device.name} has no link-layer header, which a redirect to an IFB needs.",
            hint=f"shapectl attach {device.name} --ingress police",
        )
    return ingress


def _refuse_foreign(
    engine: Engine,
    rtnl: Rtnl,
    device: DeviceFacts,
    enforcement: Enforcement,
    before: DeviceSnapshot,
    *,
    takeover: bool,
) -> None:
    """Refuse what is not ours and would be lost or in the way."""
    if enforcement.egress_tree is not None:
        kinds = {one.kind for one in before.objects} | {kind for _, kind in before.defaults}
        if "fq" in kinds:
            _refuse_edt_writer(engine, rtnl, device)
        if not before.is_default:
            _refuse_foreign_root(device, before, takeover=takeover)


def _refuse_foreign_filters(rtnl: Rtnl, device: DeviceFacts, before: DeviceSnapshot) -> None:
    """Refuse where the older ingress qdisc stands, or anything in the place of our filters."""
    if before.hook not in ("", "clsact"):
        raise ConflictError(
            "ingress-qdisc-foreign",
            f'The "{before.hook}" qdisc of {device.name} is owned by someone else, and clsact '
            "would take its place.",
            hint=f"see who uses it: tc filter show dev {device.name} ingress",
        )
    for direction in Direction:
        found = filters.list_filters(rtnl, device.index, direction)
        holder = filters.find_ours(found)
        if holder is not None:
            raise ConflictError(
                "filter-slot-foreign",
                f"Our filter slot on {device.name} is taken: {holder}.",
                hint=f"shapectl detach {device.name}, if it is left from a shapectl that died",
            )


def _refuse_foreign_root(device: DeviceFacts, before: DeviceSnapshot, *, takeover: bool) -> None:
    """Refuse a root of someone else's: unless it is to be taken over and can be put back.

    Raises: ConflictError qdisc-busy, qdisc-not-restorable; UnsupportedError scratch-missing.
    """
    ours = (MAJOR, MAJOR + 1)
    if any(one.handle >> 16 in ours for one in before.objects):
        raise ConflictError(
            "qdisc-busy",
            f'The root qdisc "{before.root_text}" of {device.name} has handles of ours, and '
            "shapectl is not attached there.",
            hint=f"shapectl residue; if nobody needs it: tc qdisc del dev {device.name} root",
        )
    if takeover:
        snapshot.prove(before, device.name, queues=device.tx_queues)
        return
    raise ConflictError(
        "qdisc-busy",
        f'Cannot attach to {device.name}: root qdisc "{before.root_text}" is not ours.',
        hint=f"shapectl attach {device.name} --takeover keeps a copy and restores it on detach; "
        f"--profile police leaves it alone",
    )


def _refuse_edt_writer(engine: Engine, rtnl: Rtnl, device: DeviceFacts) -> None:
    """Refuse to take an fq, the kernel's default too, from a program that may need it.

    Cilium's bandwidth manager is one: it stamps packets and lets fq pace them.
    """
    others = filters.list_filters(rtnl, device.index, Direction.EGRESS)
    if others or has_other_programs(engine.netns, device.index):
        name = str(others[0]) if others else "a tcx program"
        raise ConflictError(
            "edt-writer",
            f"{device.name} has an fq, and a program that may write departure times for it "
            f"({name}): without its fq they would be sent at once.",
            hint=f"shapectl attach {device.name} --profile police leaves qdiscs alone",
        )


def _leaf_text(leaf: LeafPlan | None) -> str:
    if leaf is None:
        return "none"
    if leaf.kind == "fq_codel":
        return f"fq_codel target {leaf.target_us}us interval {leaf.interval_us}us"
    return f"{leaf.kind} {leaf.limit_bytes} bytes"


def _class_rows(wanted: Wanted) -> tuple[ClassPlanRow, ...]:
    rows = []
    tree = wanted.egress_tree
    nodes = {node.minor: node for node in tree.classes} if tree else {}
    for one in wanted.policy.classes:
        burst, quantum, queue, burst_us = 0, 0, "the device's own", 0.0
        by = "token bucket" if one.ceiling_bits_per_s < wanted.link_rate_bits_per_s else "none"
        node = nodes.get(live_minor(one.number))
        if node is not None and tree is not None:
            burst, quantum = node.burst_bytes, node.quantum_bytes
            burst_us = 1e6 * burst / node.ceil_bytes_per_s
            queue = _leaf_text(node.leaf)
            by = f"htb class {tree.handle:x}:{node.minor:x}"
        elif tree is not None and tree.bands:
            band = (tree.priorities[one.name] & 0xFFFF) - 1
            queue = f"band {band}: {_leaf_text(tree.bands[band])}"
        elif tree is not None and tree.fq is not None:
            queue = _fq_text(tree, one.name)
            by = _edt_text(tree, one, by)
        rows.append(
            ClassPlanRow(
                name=one.name,
                number=one.number,
                guarantee_bits_per_s=one.guarantee_bits_per_s,
                ceiling_bits_per_s=one.ceiling_bits_per_s,
                safe_ceiling_bits_per_s=one.safe_ceiling_bits_per_s,
                burst_bytes=burst,
                burst_us=round(burst_us, 1),
                quantum_bytes=quantum,
                queue=queue,
                enforced_by="nobody (shadow)" if wanted.policy.shadow else by,
            )
        )
    return tuple(rows)


def _fq_text(tree: TreePlan, name: str) -> str:
    """Return where in fq a class is: before 6.7 its internal flow or not, since then a band."""
    assert tree.fq is not None
    priority = tree.priorities[name]
    if not tree.fq.bands:
        return "fq, always first" if priority == TC_PRIO_CONTROL else "fq"
    bands = {TC_PRIO_CONTROL: 0, TC_PRIO_INTERACTIVE: 0, TC_PRIO_BULK: 2}
    return f"fq band {bands.get(priority, 1)}"


def _edt_text(tree: TreePlan, one: TrafficClass, unpaced: str) -> str:
    ceiling = min(one.ceiling_bits_per_s, one.safe_ceiling_bits_per_s)
    link = tree.link_clock.rate_bits_per_s if tree.link_clock else one.ceiling_bits_per_s
    if one.name not in tree.paced or (one.name not in tree.paced_always and ceiling >= link):
        return unpaced
    pace = pace_for(one.ceiling_bits_per_s, tree.segment_wire_bytes)
    return (
        f"departure times, CE beyond {pace.ce_ns / 1000:.0f} us of queue, "
        f"drops beyond {pace.drop_ns / 1000:.0f} us"
    )


def _report(engine: Engine, wanted: Wanted) -> AttachPlan:
    policy = wanted.policy
    limit = wanted.segment_limit_bytes
    note = "off: the device's own limit stays"
    if tbf_splits(wanted.device, wanted.link_rate_bits_per_s, wanted.profile):
        note += ", and tbf splits what is larger than its burst"
    if limit:
        slot_us = limit * 8e6 / wanted.link_rate_bits_per_s
        note = (
            f"holds the wire for {slot_us:.0f} us; a GB of bulk then costs about "
            f"{segment_cpu_s_per_gb(limit):.1f} s of CPU instead of {segment_cpu_s_per_gb(0):.1f}"
        )
    return AttachPlan(
        device=wanted.device.name,
        netns=engine.netns,
        profile=wanted.profile.value,
        profile_reason=wanted.profile_reason,
        ingress=wanted.ingress.value,
        hook=wanted.hook.value,
        link_rate_bits_per_s=wanted.link_rate_bits_per_s,
        link_rate_source=wanted.link_rate_source,
        segment_limit_bytes=limit,
        segment_limit_note=note,
        policy_source=policy.source,
        policy_digest=policy.digest,
        classes=_class_rows(wanted),
        steps=_steps(wanted),
        warnings=_plan_warnings(wanted),
        takes_over=wanted.before.root_text if wanted.takes_over else None,
    )


def _steps(wanted: Wanted) -> tuple[str, ...]:
    device = wanted.device.name
    steps = ["compile the classifier, or take it from the cache", "make and pin the maps"]
    if wanted.gso_wanted != wanted.gso_before:
        steps.append(
            f"set gso_max_size of {device} from {wanted.gso_before.max_size_bytes} to "
            f"{wanted.gso_wanted.max_size_bytes}, gso_max_segs from "
            f"{wanted.gso_before.max_segments} to {wanted.gso_wanted.max_segments}"
        )
    if wanted.egress_tree is not None:
        name = f"{wanted.profile.value} {wanted.egress_tree.handle:x}:"
        if wanted.egress_tree.fq is not None:
            name = f"fq {wanted.egress_tree.handle:x}:"
            if wanted.egress_tree.queues > 1:
                name = f"mq {wanted.egress_tree.handle:x}: with an fq per transmit queue,"
        if wanted.takes_over:
            steps.append(
                f'keep a copy of {device}\'s root qdisc "{wanted.before.root_text}" with all under '
                "it (made again on a scratch device: it can be put back)"
            )
        steps.append(
            f"replace the root qdisc of {device} by {name} for "
            f"{format_rate(wanted.link_rate_bits_per_s)} on the wire, 24 bytes per frame of "
            "preamble, FCS and gap counted (what the old root holds at that moment is lost)"
        )
    if wanted.enforcement.ingress_tree is not None:
        steps.append(f"make an IFB with an HTB tree for what arrives on {device}")
    if needs_clsact(wanted.hook, wanted.ingress):
        steps.append(
            f"add clsact to {device} unless it is there (the kernel may lose a packet in flight "
            "when clsact comes or goes)"
        )
    if wanted.hook is Hook.TCX:
        steps.append("attach one program per direction by a tcx link, before those that are there")
    else:
        steps.append("add one filter per direction to clsact")
    if wanted.ingress is IngressMode.IFB:
        steps.append("add the filter that hands to the IFB")
    if wanted.gso_wanted != wanted.gso_before:
        steps.append("let living IPv4 flows look up their route again (they take up the limit)")
    if wanted.request.reroute_ipv6:
        steps.append("add and remove one IPv6 host route per prefix, for living IPv6 flows")
    steps.append("read everything back")
    return tuple(steps)


def _edt_warnings(wanted: Wanted, tree: TreePlan) -> list[str]:
    """Say what edt holds and what it does not."""
    paced = ", ".join(tree.paced_always) or "no class"
    found = []
    if tree.link_clock is not None:
        found.append(
            f"edt holds the link rate by {paced} alone, which yields what the others send: where "
            f"they alone send more than "
            f"{format_rate(tree.link_clock.rest_bits_per_s)}, nobody holds them"
        )
    else:
        found.append(
            f"edt paces {paced}; the link rate itself is held by {wanted.device.name}'s own speed"
        )
    assert tree.fq is not None
    if not tree.fq.bands:
        found.append(
            f"fq of kernel {wanted.kernel.release} has one band (three since 6.7): the control "
            "class is still first, and bulk waits for its time stamps; the others share by flow"
        )
    return found


def _plan_warnings(wanted: Wanted) -> tuple[str, ...]:
    found = []
    if wanted.ingress is IngressMode.IFB:
        found.append(
            f"the IFB redirect is renewed by attaching again within "
            f"{wanted.request.ingress_lease_s:.0f} s; past that the kernel polices instead"
        )
    if not wanted.device.up:
        found.append(f"{wanted.device.name} is down")
    elif not wanted.device.carrier:
        found.append(f"{wanted.device.name} has no carrier")
    found += [f"{one.what} {one.why} Better: {one.fix}" for one in wanted.placement]
    if wanted.egress_tree is not None and wanted.egress_tree.fq is not None:
        found += _edt_warnings(wanted, wanted.egress_tree)
    limited = any(one.ingress_ceiling_bits_per_s for one in wanted.policy.classes)
    if limited and wanted.ingress is IngressMode.COUNT:
        found.append("the policy has ingress ceilings, but what arrives is only counted")
    if wanted.not_in_lines:
        found.append(
            "detach puts back the whole root qdisc, but shapectl-panic-off has only tc, and no "
            "words for this: " + "; ".join(wanted.not_in_lines)
        )
    found += wanted.management.warnings(wanted.device.name)
    return tuple(found)
