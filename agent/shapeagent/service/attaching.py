# SPDX-License-Identifier: Apache-2.0
"""Attach, step by step, with an undo for each step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shapeagent.kernel import abi, bpf, filters, link, maps, qdisc, routes
from shapeagent.kernel.cgroup import find_cgroup
from shapeagent.kernel.compile import Image, LoadedProgram, find_image, load_image
from shapeagent.kernel.datapath import Datapath
from shapeagent.kernel.guardian import stop_guardian
from shapeagent.kernel.identity import read_identity
from shapeagent.kernel.probe import ensure_bpffs
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import ConflictError, FailedError, ShapeError
from shapeagent.model.reports import AttachReport, AttachRequest
from shapeagent.model.types import DeviceFacts, Direction, IngressMode, Policy, Profile
from shapeagent.policy.rules import compile_rules
from shapeagent.service import confirming, following, keptpolicy, recovering, selftest, swapping
from shapeagent.service.ceilings import initial_ceilings, tree_of
from shapeagent.service.describing import interface_status
from shapeagent.service.filling import fill, ifb_lease, write_classes, write_config
from shapeagent.service.hook import (
    PROGRAMS,
    Place,
    has_other_programs,
    needs_clsact,
    refuse_shared_hook,
)
from shapeagent.service.planning import Wanted, make_plan
from shapeagent.service.records import rule_write
from shapeagent.service.repairing import repair
from shapeagent.service.restoring import put_root_back, take_over, undo_text
from shapeagent.service.state import AttachState, StateDir

if TYPE_CHECKING:
    from shapeagent.service.engine import Attached, Engine


class _Undo:
    """The steps taken back, last first, when something fails."""

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[[], object], bool]] = []

    def add(self, step: Callable[[], object], *, only_if_clean: bool = False) -> None:
        """Add a step; `only_if_clean` keeps the record that a detach needs to try again."""
        self._steps.append((step, only_if_clean))

    def run(self) -> list[ShapeError | OSError]:
        """Undo everything; returns why some of it could not be undone."""
        failed: list[ShapeError | OSError] = []
        for step, only_if_clean in reversed(self._steps):
            if only_if_clean and any(not _says_gone(one) for one in failed):
                continue
            try:
                step()
            except (ShapeError, OSError) as error:
                failed.append(error)
        self._steps.clear()
        return failed


def _says_gone(error: ShapeError | OSError) -> bool:
    """Return whether an undo failed only since the device is gone, and its state with it."""
    return isinstance(error, ShapeError) and error.reference == "interface-gone"


def request_fields(request: AttachRequest) -> dict[str, Any]:
    """Return a request as the state keeps it: the policy's text stands in a file of its own."""
    fields = dataclasses.asdict(request)
    del fields["policy_text"]
    return fields


def attach(engine: Engine, rtnl: Rtnl, request: AttachRequest) -> AttachReport:
    """Attach a device; see Engine.attach."""
    started = time.monotonic()
    wanted = make_plan(engine, rtnl, request)
    for remains in following.remains_of(engine, rtnl, wanted.device):
        for text in following.clear_remains(engine, rtnl, remains):
            engine.progress(text)
        wanted = make_plan(engine, rtnl, request)  # its segment limits are what they were
    key = engine.key_of(rtnl, wanted.device.index)
    store = engine.store(key)
    recovering.repair(engine, key)
    state = store.read()
    if state is not None and not state.complete:
        # killed in the middle: back to what was there, then as if nothing had been
        engine.progress("undoing what did not end")
        from shapeagent.service import detaching

        detaching.detach(engine, rtnl, wanted.device.name, dry_run=False)
        wanted, state = make_plan(engine, rtnl, request), None
    if state is not None:
        if request.confirm_s is not None:
            raise ConflictError(
                "confirm-attached",
                f"{wanted.device.name} is attached already, and --confirm could only undo that.",
                hint="leave out --confirm; status shows whether the attach is still unconfirmed.",
            )
        return _attach_again(engine, rtnl, store, state, wanted, started)
    engine.progress("compiling the classifier")
    image, compiled = find_image()
    undo = _Undo()
    try:
        state = _build(engine, rtnl, store, wanted, image, undo)
    except BaseException as error:
        left = undo.run()
        if not isinstance(error, ShapeError):
            raise
        raise _attach_error(rtnl, wanted.device, error, left) from error
    pending = confirming.read_pending(store)
    return AttachReport(
        plan=wanted.report,
        changed=True,
        compiled=compiled,
        compile_s=round(image.compile_s if compiled else 0.0, 4),
        total_s=round(time.monotonic() - started, 4),
        verified_instructions=dict(state.verified),
        source_digest=state.source_digest,
        unconfirmed_s=None if pending is None else round(pending.left_s, 1),
        undone_by="" if pending is None else pending.guardian.text,
    )


def _attach_error(
    rtnl: Rtnl, device: DeviceFacts, error: ShapeError, left: list[ShapeError | OSError]
) -> ShapeError:
    """Return the error to show, with what could not be undone."""
    if _is_gone(rtnl, device.index):
        # what was on the device went with it: that it cannot be undone is no news (C34)
        left = [one for one in left if not _says_gone(one)]
        error = FailedError(
            "interface-gone",
            f"{device.name} went away while shapectl was attaching.",
            hint="See `ip link` and try again.",
            details=(error.message,),
        )
    if not left:
        return error
    return FailedError(
        error.reference,
        f"{error.message} Not all of it could be undone: {'; '.join(map(str, left))}",
        hint=error.hint,
        details=error.details,
    )


def _is_gone(rtnl: Rtnl, index: int) -> bool:
    try:
        link.read_device_by_index(rtnl, index)
    except ShapeError as error:
        return error.reference in ("interface-gone", "no-such-device")
    return False


def _initial_state(engine: Engine, wanted: Wanted, image: Image) -> AttachState:
    return AttachState(
        device=wanted.device.name,
        index=wanted.device.index,
        netns=engine.netns,
        complete=False,
        profile=wanted.profile.value,
        profile_reason=wanted.profile_reason,
        ingress=wanted.ingress.value,
        hook=wanted.hook.value,
        shadow=wanted.policy.shadow,
        link_rate_bits_per_s=wanted.link_rate_bits_per_s,
        link_rate_source=wanted.link_rate_source,
        segment_limit_bytes=wanted.segment_limit_bytes,
        policy_source=wanted.policy.source,
        policy_digest=wanted.policy.digest,
        source_digest=image.digest,
        abi_version=abi.SHP_ABI_VERSION,
        request=request_fields(wanted.request),
        facts=wanted.device,
        kernel=wanted.kernel,
        attached_unix_s=time.time(),
        device_identity=read_identity(engine.netns, wanted.device.name, wanted.device.index),
        gso_before=wanted.gso_before if wanted.gso_wanted != wanted.gso_before else None,
        ceilings=initial_ceilings(wanted.policy, wanted.link_rate_bits_per_s),
    )


def _build(
    engine: Engine, rtnl: Rtnl, store: StateDir, wanted: Wanted, image: Image, undo: _Undo
) -> AttachState:
    """Do every step; each leaves its undo behind before the next begins."""
    state = _initial_state(engine, wanted, image)
    pins = engine.bpffs_dir / store.folder.name
    undo.add(store.remove, only_if_clean=True)
    confirm_s = wanted.request.confirm_s
    if confirm_s is not None:
        pending = confirming.arm(engine, store, state.device, confirm_s)
        # where the undo fails, what waits tries again
        undo.add(partial(stop_guardian, pending.guardian), only_if_clean=True)
    store.write_policy(wanted.policy.text)
    _keep_policy(store, wanted.policy.text, state)
    store.write_snapshot(wanted.before)
    store.write_undo(undo_text(rtnl, store, state, wanted.before, wanted.egress_tree, pins))
    store.write(state)

    engine.progress("making the maps and loading the programs")
    ensure_bpffs()
    maps.remove_pins(pins)  # an attach that was killed before it had a filter
    undo.add(lambda: maps.remove_pins(pins), only_if_clean=True)
    opened = maps.create_pinned(pins)
    store.keep_copies()
    programs: dict[str, LoadedProgram] = {}
    try:
        programs = load_image(image, opened)
        for name, program in programs.items():
            bpf.pin(program.fd, str(pins / name))
        state = dataclasses.replace(
            state,
            program_ids={name: program.id for name, program in programs.items()},
            verified={name: one.verified_instructions for name, one in programs.items()},
        )
        store.write(state)
        state = _change_device(engine, rtnl, store, state, wanted, pins, undo)
        datapath = Datapath(opened, wanted.kernel.possible_cpus)
        state = fill(datapath, wanted.policy, state, wanted.request.ingress_lease_s)
        engine.progress("attaching the programs")
        if needs_clsact(wanted.hook, wanted.ingress):
            state = _add_clsact(rtnl, store, state, undo)
        state = dataclasses.replace(state, bytes_before=link.read_traffic(rtnl, state.index))
        place = Place.of(rtnl, state, pins)
        _add_programs(place, state, programs, undo)
        if state.ifb_index:
            state = _add_redirect(rtnl, store, state, pins, undo)
        selftest.run(place, state.device, datapath)
    finally:
        bpf.close_all([*opened.values(), *(program.fd for program in programs.values())])
    _reroute(engine, rtnl, store, state, wanted.request.reroute_ipv6)
    _read_back(rtnl, state, wanted, pins)
    if state.ifb_index:
        ids = state.our_ids
        refuse_shared_hook(rtnl, engine.netns, state.index, state.device, ids)
    state = dataclasses.replace(state, complete=True)
    store.write(state)
    return state


def _keep_policy(store: StateDir, text: str, state: AttachState) -> None:
    """Keep what the policy's text means, so that later commands need not validate it again."""
    keptpolicy.renew(store.folder, text, state.policy_source, state.link_rate_bits_per_s)


def _change_device(
    engine: Engine,
    rtnl: Rtnl,
    store: StateDir,
    state: AttachState,
    wanted: Wanted,
    pins: Path,
    undo: _Undo,
) -> AttachState:
    """Segment limit, egress tree, IFB with its tree."""
    index = wanted.device.index
    if wanted.gso_wanted != wanted.gso_before:
        from shapeagent.service.detaching import restore_gso

        undo.add(lambda: restore_gso(engine, rtnl, index, wanted.gso_before))
        link.set_gso(rtnl, index, wanted.gso_wanted)
        state = dataclasses.replace(state, gso_set=link.read_gso(rtnl, index))
        store.write(state)
    if wanted.egress_tree is not None:
        tree = wanted.egress_tree
        engine.progress(f"building the {wanted.profile.value} tree")
        if wanted.takes_over:
            take_over(rtnl, index, pins, wanted.before)
        undo.add(lambda: put_root_back(rtnl, index, tree, wanted.before, pins))
        qdisc.apply_tree(rtnl, index, tree, takeover=wanted.takes_over)
    if wanted.enforcement.ingress_tree is not None:
        state = _make_ifb(rtnl, store, state, wanted, undo)
        store.write_undo(undo_text(rtnl, store, state, wanted.before, wanted.egress_tree, pins))
    return state


def _make_ifb(
    rtnl: Rtnl, store: StateDir, state: AttachState, wanted: Wanted, undo: _Undo
) -> AttachState:
    ifb = link.create_ifb(rtnl, wanted.device.name)
    undo.add(lambda: link.delete_ifb(rtnl, ifb.index))
    state = dataclasses.replace(state, ifb=ifb.name, ifb_index=ifb.index)
    store.write(state)
    tree = tree_of(wanted.policy, state, Direction.INGRESS)
    if tree is not None:
        qdisc.apply_tree(rtnl, ifb.index, tree)
    link.set_up(rtnl, ifb.index)
    return state


def _add_clsact(rtnl: Rtnl, store: StateDir, state: AttachState, undo: _Undo) -> AttachState:
    index, ids = state.index, state.our_ids
    # the journal first: who is killed in between leaves a clsact, and a detach must know whose
    state = dataclasses.replace(state, clsact_created=not filters.has_clsact(rtnl, index))
    store.write(state)
    created = filters.ensure_clsact(rtnl, index)
    netns = state.netns
    undo.add(
        lambda: filters.remove_clsact_if_empty(
            rtnl,
            index,
            created_by_us=created,
            has_other_programs=has_other_programs(netns, index, ids),
        )
    )
    if created != state.clsact_created:
        state = dataclasses.replace(state, clsact_created=created)
        store.write(state)
    return state


def _add_programs(
    place: Place, state: AttachState, programs: dict[str, LoadedProgram], undo: _Undo
) -> None:
    ids = state.our_ids
    for direction, name in PROGRAMS.items():
        undo.add(partial(place.remove, direction, ids))
        place.add(direction, programs[name].fd)


def _add_redirect(
    rtnl: Rtnl, store: StateDir, state: AttachState, pins: Path, undo: _Undo
) -> AttachState:
    """Add the filter that hands to the IFB what the classifier marked for it."""
    descriptor = filters.load_redirect()
    try:
        bpf.pin(descriptor, str(pins / filters.REDIRECT_NAME))
        number = bpf.program_facts(descriptor).id
        state = dataclasses.replace(
            state, program_ids={**state.program_ids, filters.REDIRECT_NAME: number}
        )
        store.write(state)
        undo.add(lambda: filters.del_redirect(rtnl, state.index, our_program_ids=(number,)))
        filters.add_redirect(rtnl, state.index, state.ifb_index, descriptor)
    finally:
        bpf.close_all([descriptor])
    return state


def _reroute(
    engine: Engine, rtnl: Rtnl, store: StateDir, state: AttachState, with_ipv6: bool
) -> None:
    """Make living flows take up the segment limit that now holds (bpf-facts 2.10)."""
    if state.gso_before is not None:
        routes.reroute_ipv4(engine.netns)
    if with_ipv6:
        found = routes.plan_ipv6_routes(rtnl, state.index)
        store.write(dataclasses.replace(state, ipv6_routes=tuple(route.address for route in found)))
        routes.reroute_ipv6(rtnl, found)
        store.write(state)


def _read_back(rtnl: Rtnl, state: AttachState, wanted: Wanted, pins: Path) -> None:
    if wanted.egress_tree is not None:
        qdisc.read_back(rtnl, state.index, wanted.egress_tree)
    Place.of(rtnl, state, pins).read_back(state.program_ids, state.device)


def _attach_again(
    engine: Engine,
    rtnl: Rtnl,
    store: StateDir,
    state: AttachState,
    wanted: Wanted,
    started: float,
) -> AttachReport:
    """Attached already: renew, take up a changed policy in place, or refuse."""
    from shapeagent.service.engine import Attached

    facts = following.require_present(engine.netns, rtnl, state)
    compiled, swapped = False, swapping.is_due(state, engine.bpffs_dir / store.folder.name)
    if swapped:
        state, compiled = swapping.swap(engine, rtnl, store, state)
    state, repaired = repair(engine, rtnl, store, state, facts)
    _refuse_other_shape(state, wanted)
    attached = Attached(engine, rtnl, store, state, store.folder.name)
    try:
        problems = interface_status(attached, engine.netns, {}).problems
        if problems:
            raise ConflictError(
                "attachment-damaged",
                f"{state.device} is attached, but not as it was left.",
                details=problems,
                hint=f"shapectl detach {state.device}, then attach again",
            )
        selftest.run(attached.place, state.device, attached.datapath)
        changed = state.policy_digest != wanted.policy.digest
        if changed:
            _take_up_policy(attached, wanted)
        else:
            changed = _refresh_cgroups(attached)
        if state.ifb_index:
            config = attached.datapath.read_config()
            config.ifb_lease_jiffies = ifb_lease(state, wanted.request.ingress_lease_s)
            attached.datapath.write_config(config)
        _keep_policy(store, wanted.policy.text, attached.state)
    finally:
        attached.close()
    return AttachReport(
        plan=wanted.report,
        changed=changed or swapped or bool(repaired),
        repaired=(*(("other version of the classifier: swapped",) if swapped else ()), *repaired),
        compiled=compiled,
        compile_s=0.0,
        total_s=round(time.monotonic() - started, 4),
        verified_instructions=dict(state.verified),
        source_digest=state.source_digest,
    )


def _refresh_cgroups(attached: Attached) -> bool:
    """Follow cgroups that were made again under their path: they have new ids."""
    write, levels, missing = rule_write(compile_rules(attached.policy), find_cgroup)
    if frozenset(write.cgroups) == attached.datapath.cgroup_rules():
        return False
    config = attached.datapath.read_config()
    config.cgroup_levels |= levels  # old rules still ask at their own
    attached.datapath.write_config(config)
    attached.datapath.replace_rules(write)
    config.cgroup_levels = levels
    attached.datapath.write_config(config)
    attached.save(dataclasses.replace(attached.state, missing_cgroups=missing))
    return True


def _refuse_other_shape(state: AttachState, wanted: Wanted) -> None:
    """What cannot be changed in place needs a detach first."""
    pairs = (
        ("profile", state.profile, wanted.profile.value),
        ("ingress", _ingress_asked(state), wanted.ingress.value),
        ("hook", state.hook, wanted.hook.value),
        ("shadow", state.shadow, wanted.policy.shadow),
        ("link rate", state.link_rate_bits_per_s, wanted.link_rate_bits_per_s),
        ("segment limit", state.segment_limit_bytes, wanted.segment_limit_bytes),
        ("classes", sorted(state.ceilings["egress"]), sorted(_names(wanted.policy))),
    )
    differing = [
        f"{name}: {have} now, {want} asked for" for name, have, want in pairs if have != want
    ]
    if differing:
        raise ConflictError(
            "attached-differently",
            f"{state.device} is attached in another way.",
            details=differing,
            hint=f"shapectl detach {state.device}, then attach again",
        )


def _ingress_asked(state: AttachState) -> str:
    """Return what was asked for; by now it may be policing, for want of an IFB."""
    return IngressMode.IFB.value if state.request.get("ingress") == "ifb" else state.ingress


def _names(policy: Policy) -> list[str]:
    return [one.name for one in policy.classes]


def _take_up_policy(attached: Attached, wanted: Wanted) -> None:
    """Put a changed policy in force in place: rules by one switch, rates without loss."""
    policy, state = wanted.policy, attached.state
    if _names(attached.policy) != _names(policy) or (
        attached.policy.default_class != policy.default_class
    ):
        raise ConflictError(
            "attached-differently",
            f"The policy of {state.device} has its classes in another order, or another default.",
            hint=f"shapectl detach {state.device}, then attach again",
        )
    write, levels, missing = rule_write(compile_rules(policy), find_cgroup)
    new = dataclasses.replace(
        state,
        policy_source=policy.source,
        policy_digest=policy.digest,
        request=request_fields(wanted.request),
        ceilings=initial_ceilings(policy, state.link_rate_bits_per_s),
        missing_cgroups=missing,
    )
    for direction in Direction:
        tree = tree_of(policy, new, direction)
        if tree is not None and tree.profile is Profile.HTB:
            index = state.index if direction is Direction.EGRESS else state.ifb_index
            for node in tree.classes:
                qdisc.change_class(attached.rtnl, index, tree.handle, node)
                if node.leaf is not None and node.leaf.kind == "fq_codel":
                    parent = tree.handle << 16 | node.minor
                    qdisc.change_leaf(attached.rtnl, index, parent, node.leaf)
    write_classes(attached.datapath, policy, new)
    lease = attached.datapath.read_config().ifb_lease_jiffies
    write_config(attached.datapath, policy, new, cgroup_levels=levels, ifb_lease_jiffies=lease)
    attached.datapath.replace_rules(write)
    attached.store.write_policy(policy.text)
    attached.save(new)
