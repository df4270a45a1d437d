# SPDX-License-Identifier: Apache-2.0
"""Detach: put back what was there, whatever the attach had come to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shapeagent.kernel import bpf, filters, link, maps, routes, tcx
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import ConflictError, FailedError, InputError, ShapeError
from shapeagent.model.reports import DetachReport
from shapeagent.model.types import Direction, GsoLimits, Policy, TreePlan
from shapeagent.service import confirming, following, recovering, swapping
from shapeagent.service.ceilings import tree_of
from shapeagent.service.documents import load_policy_text
from shapeagent.service.hook import PROGRAMS, Place, has_other_programs
from shapeagent.service.restoring import put_root_back
from shapeagent.service.state import AttachState, StateDir

if TYPE_CHECKING:
    from shapeagent.service.engine import Engine


def detach(
    engine: Engine, rtnl: Rtnl, device: str, *, dry_run: bool, unless_confirmed: str | None = None
) -> DetachReport:
    """Detach a device; see Engine.detach."""
    key, state = _find(engine, rtnl, device, unless_confirmed, dry_run=dry_run)
    if key is None:
        return DetachReport(device, engine.netns, False, (), _not_attached(engine, rtnl, device))
    pins = engine.bpffs_dir / key
    store = engine.store(key)
    if unless_confirmed is not None and not confirming.waits_for(store, unless_confirmed):
        return DetachReport(device, engine.netns, False, (), ("confirmed",))
    steps: list[str] = []
    notes: list[str] = []
    if state is not None and state.complete and not dry_run:
        # the journal: what is killed from here on is finished by the next command
        _note_begin(store, state, notes)
    if state is None:
        _drop_filters(rtnl, device, pins, steps, notes, dry_run=dry_run)
        # without pins the attach died before its state: the device was never changed
        if not dry_run and pins.exists():
            notes += _keep_way_back(store)
    else:
        _undo_device(engine, rtnl, store, state, steps, notes, dry_run=dry_run)
    steps.append(f"remove the pins in {pins} and the state in {store.folder}")
    if not dry_run:
        try:
            maps.remove_pins(swapping.next_pins(pins))
            maps.remove_pins(pins)
        except ConflictError as error:
            notes.append(error.message)
        if unless_confirmed is None:  # else that is who calls
            confirming.disarm(store)
        if unless_confirmed is None:
            store.forget_whitelist()
        store.remove()
    return DetachReport(device, engine.netns, not dry_run, tuple(steps), tuple(notes))


def _note_begin(store: StateDir, state: AttachState, notes: list[str]) -> None:
    """Write the journal; a full disk is no reason to keep what someone wants gone (F30)."""
    try:
        store.write(dataclasses.replace(state, complete=False))
    except FailedError as error:
        notes.append(error.message)


def _find(
    engine: Engine, rtnl: Rtnl, device: str, token: str | None, *, dry_run: bool
) -> tuple[str | None, AttachState | None]:
    """Return the key and state of an attachment; a damaged state counts as none.

    The device's own; else what is left of one that is gone and had its name,
    or of its own in the namespace that it came from; by an old name, where no
    device has it now, that of the device which had it.

    Args:
        token: of the attach that waits for its confirmation, whatever its device is named now.
    """
    key = _key_of_pending(engine, rtnl, token) if token is not None else None
    if key is None:
        try:
            facts = link.read_device(rtnl, device)
        except InputError:
            key = engine.key_by_name(rtnl, device)
            if key is None:
                raise
        else:
            key = engine.key_of(rtnl, facts.index)
            if not _is_known(engine, key):
                remains = following.remains_of(engine, rtnl, facts)
                key = remains[0].key if remains else None
    if key is None:
        return None, None
    try:
        if not dry_run:
            recovering.repair(engine, key)
        return key, engine.store(key).read()
    except FailedError:
        return key, None


def _key_of_pending(engine: Engine, rtnl: Rtnl, token: str) -> str | None:
    cookie = engine.key_of(rtnl, 0).partition("-")[0]
    for key, _ in following.all_states(engine):
        pending = confirming.read_pending(engine.store(key))
        if key.partition("-")[0] == cookie and pending is not None and pending.token == token:
            return key
    return None


def _not_attached(engine: Engine, rtnl: Rtnl, device: str) -> tuple[str, ...]:
    """Return the note that it is not attached, and where the one went that had its name."""
    key = engine.key_by_name(rtnl, device)
    state = engine.store(key).read() if key is not None else None
    facts = following.look(engine.netns, rtnl, state).facts if state is not None else None
    if facts is None:
        return ("not attached",)
    words = following.netns_words(engine.netns)
    return (
        "not attached",
        f"what was {device} at its attach is {facts.name} now: shapectl {words}detach {facts.name}",
    )


def _is_known(engine: Engine, key: str | None) -> bool:
    return key is not None and any(
        (folder / key).exists() for folder in (engine.run_dir, engine.bpffs_dir)
    )


def _drop_filters(
    rtnl: Rtnl, device: str, pins: Path, steps: list[str], notes: list[str], *, dry_run: bool
) -> None:
    """Without a state only the pins say which filters are ours."""
    notes.append(
        f"no state was found: the filters go, qdiscs and segment limits of {device} stay as they "
        f"are (see: tc qdisc show dev {device})"
    )
    index = link.read_device(rtnl, device).index

    def drop(name: str, what: str, delete: Callable[..., object]) -> None:
        try:
            descriptor = bpf.get_pinned(str(pins / name))
        except FileNotFoundError:
            return
        number = bpf.program_facts(descriptor).id
        bpf.close_all([descriptor])
        steps.append(f"delete our {what}")
        if dry_run:
            return
        try:
            delete(our_program_ids=(number,))
        except ShapeError as error:
            notes.append(error.message)

    drop(
        filters.REDIRECT_NAME,
        "redirect to the IFB",
        partial(filters.del_redirect, rtnl, index),
    )
    for direction, name in PROGRAMS.items():
        if not dry_run:
            tcx.remove_link(pins, direction)
        drop(
            name,
            f"{direction.value} filter",
            partial(filters.del_filter, rtnl, index, direction),
        )


def _undo_device(
    engine: Engine,
    rtnl: Rtnl,
    store: StateDir,
    state: AttachState,
    steps: list[str],
    notes: list[str],
    *,
    dry_run: bool,
) -> None:
    index, key = state.index, store.folder.name
    where = following.locate(engine, rtnl, key, state)
    if where.facts is None:
        remains = following.Remains(key, state, where)
        undone, said = following.undo_remains(engine, rtnl, remains, dry_run=dry_run)
        steps += undone
        notes += said
        return

    def do(text: str, action: Callable[[], object]) -> None:
        steps.append(text)
        if dry_run:
            return
        try:
            action()
        except ShapeError as error:
            notes.append(error.message)

    ids = state.our_ids
    place = Place.of(rtnl, state, engine.bpffs_dir / store.folder.name)
    if state.ifb_index:
        do(
            "delete our redirect to the IFB",
            lambda: filters.del_redirect(rtnl, index, our_program_ids=ids),
        )
    for direction in Direction:
        do(
            f"detach our {direction.value} program",
            partial(place.remove, direction, ids),
        )
    if following.ifbs_of(engine, rtnl, key, state):
        do("delete our IFB", lambda: _delete_ifbs(engine, rtnl, key, state))
    policy = _stored_policy(engine, rtnl, state, notes)
    tree = tree_of(policy, state, Direction.EGRESS) if policy else None
    trouble: ShapeError | None = None
    if tree is None and policy is None and not dry_run:
        notes += _keep_way_back(store)
    if tree is not None:
        try:
            _restore_root(engine, rtnl, store, state, tree, steps, notes, dry_run=dry_run)
        except ShapeError as error:
            trouble = error
    if state.gso_before is not None:
        _undo_gso(engine, rtnl, state, do, notes)
    leftover = routes.find_ipv6_routes(rtnl, index)
    if leftover:
        do("remove our IPv6 host routes", lambda: routes.remove_ipv6_routes(rtnl, leftover))
    if state.clsact_created:
        do("delete clsact if nobody else uses it", lambda: _drop_clsact(engine, rtnl, state, notes))
    if trouble is not None:
        store.write(dataclasses.replace(state, complete=False))
        raise FailedError(
            trouble.reference,
            f"{state.device} is detached, but not all is as it was: {trouble.message}",
            details=trouble.details,
            hint=f"shapectl detach {state.device} tries again; {store.undo_path} has the old tree "
            "in words of tc",
        ) from trouble


def _restore_root(
    engine: Engine,
    rtnl: Rtnl,
    store: StateDir,
    state: AttachState,
    tree: TreePlan,
    steps: list[str],
    notes: list[str],
    *,
    dry_run: bool,
) -> None:
    """Put back the root that stood there; a root that is not ours stays, and the way back too.

    Raises: FailedError restore-refused, restore-differs, or what the kernel said.
    """
    try:
        before = store.read_snapshot()
    except FailedError as error:
        before = None
        notes.append(error.message)
        if not dry_run:
            notes += _keep_way_back(store)
    default = before is None or before.is_default
    what = "the kernel makes its default"
    if before is not None and not default:
        what = f'put back "{before.root_text}"'
    steps.append(f"delete our {state.profile} root qdisc of {state.device} ({what})")
    if dry_run:
        return
    pins = engine.bpffs_dir / store.folder.name
    try:
        notes += put_root_back(rtnl, state.index, tree, before, pins)
    except ConflictError as error:
        notes.append(" ".join((error.message, *_keep_way_back(store))))


def _keep_way_back(store: StateDir) -> tuple[str, ...]:
    """Keep the lines that make a foreign tree again, where there are any; says where."""
    try:
        wanted = store.read_snapshot()
        has_tree = wanted is not None and not wanted.is_default
    except FailedError:
        has_tree = True  # nobody knows
    if not has_tree or not store.undo_path.exists():
        return ()
    return (f"What stood there before is kept in words of tc: {store.keep_undo()}",)


def _delete_ifbs(engine: Engine, rtnl: Rtnl, key: str, state: AttachState) -> None:
    for found in following.ifbs_of(engine, rtnl, key, state):
        link.delete_ifb(rtnl, found.index)


def _undo_gso(
    engine: Engine,
    rtnl: Rtnl,
    state: AttachState,
    do: Callable[[str, Callable[[], object]], None],
    notes: list[str],
) -> None:
    before = state.gso_before
    assert before is not None
    if state.gso_set is not None and link.read_gso(rtnl, state.index) != state.gso_set:
        notes.append("someone changed the segment limits meanwhile: left as they are")
        return
    do(
        f"set gso_max_size back to {before.max_size_bytes}, gso_max_segs to {before.max_segments}",
        lambda: restore_gso(engine, rtnl, state.index, before),
    )


def _drop_clsact(engine: Engine, rtnl: Rtnl, state: AttachState, notes: list[str]) -> None:
    gone = filters.remove_clsact_if_empty(
        rtnl,
        state.index,
        created_by_us=True,
        has_other_programs=has_other_programs(engine.netns, state.index, state.our_ids),
    )
    if not gone:
        notes.append("clsact stays: someone else uses it")


def _stored_policy(
    engine: Engine, rtnl: Rtnl, state: AttachState, notes: list[str]
) -> Policy | None:
    store = engine.store(engine.key_of(rtnl, state.index))
    try:
        return load_policy_text(
            store.read_policy(state.policy_digest), state.policy_source, state.link_rate_bits_per_s
        )
    except (ShapeError, OSError) as error:
        notes.append(f"the policy in force cannot be read ({error}): the root qdisc is left alone")
        return None


def restore_gso(engine: Engine, rtnl: Rtnl, index: int, before: GsoLimits) -> None:
    """Set the segment limits back and let living flows take them up."""
    link.set_gso(rtnl, index, before)
    routes.reroute_ipv4(engine.netns)
