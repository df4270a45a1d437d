# SPDX-License-Identifier: Apache-2.0
"""Damaged state files: put aside, and made again from what the kernel holds.

State, policy, snapshot, undo lines and the note of --confirm come from the
kernel's copies, the whitelist from its lists. What is made again is compared
with the programs that are pinned and on the device.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING

from shapeagent.kernel import bpf
from shapeagent.kernel.lists import read_lists
from shapeagent.model.errors import ConflictError, InputError, ShapeError
from shapeagent.model.types import WhitelistEntry
from shapeagent.service.state import AttachState, StateDir

if TYPE_CHECKING:
    from shapeagent.service.engine import Attached, Engine

_MOST_NOTES = 8


def repair(engine: Engine, key: str) -> None:
    """Put right what is damaged in the folder of an attachment, and say so loudly.

    What cannot be put right stays as it is, for detach to make the best of it. Hold the lock.

    Effects: a damaged file is moved to NAME.corrupt-TIME beside it.
    """
    store = engine.store(key)
    state = _read(store)
    damage = store.damage(state)
    damage.pop("whitelist", None)  # that needs the maps: repair_whitelist
    if not damage:
        return
    notes = []
    for name, why in damage.items():
        path = store.folder / name
        try:
            done = store.restore_kept(name)
        except ShapeError as error:
            engine.warn(f"{path} is damaged ({why}) and cannot be put right: {error.message}")
            continue
        if done:
            notes.append(f"{name} was damaged ({why}): made again from the kernel's copy")
            engine.warn(f"{path} was damaged ({why}): put aside, made again from the kernel's copy")
        else:
            engine.warn(f"{path} is damaged ({why}), and the kernel has no copy of it")
    state = _read(store)
    if state is not None and notes:
        ids = _pinned_ids(store, state)
        if ids != state.program_ids:
            notes.append(f"programs {ids} are pinned, not {state.program_ids}: these are taken")
        _remember(engine, store, dataclasses.replace(state, program_ids=ids), notes)


def repair_if_free(engine: Engine, key: str) -> None:
    """As `repair`, for who does not hold the lock: what another process holds is left for later."""
    store = engine.store(key)
    damage = store.damage(_read(store))
    damage.pop("whitelist", None)
    if not damage:
        return
    try:
        with engine.lock(wait_s=0.0):
            repair(engine, key)
    except ShapeError as error:
        engine.warn(f"{store.folder}: {', '.join(damage)} damaged, not put right: {error.message}")


def repair_whitelist(engine: Engine, attached: Attached) -> None:
    """Make a damaged whitelist again from the kernel's lists, which were in force all the time.

    Owners and reasons are kept where the lines that are left name what the kernel holds.
    Hold the lock.
    """
    store = attached.store
    try:
        text = store.read_whitelist()
        if text or not attached.state.whitelist_entries:
            return
        why = "it is missing"
    except ShapeError as error:
        why = error.message
    known = {_place(entry): entry for entry in _salvaged(store.salvage_whitelist())}
    names = {one.number: one.name for one in attached.policy.classes}
    now_jiffies, now_unix_s = attached.clock.read(), time.time()
    entries, lost = [], 0
    for found in read_lists(attached.datapath.maps, attached.datapath.read_control().active_lists):
        expires = None
        if found.expires_jiffies:
            if found.expires_jiffies <= now_jiffies:
                continue
            left_s = (found.expires_jiffies - now_jiffies) * attached.state.kernel.jiffy_ns / 1e9
            expires = now_unix_s + left_s
        entry = WhitelistEntry(
            match=found.match,
            traffic_class=names[found.class_number],
            source=found.source,
            destination=found.destination,
            expires_unix_s=expires,
        )
        old = known.get(_place(entry))
        if old is not None and (old.expires_unix_s is None) == (expires is None):
            entry = old
        else:
            lost += 1
        entries.append(entry)
    note = f"whitelist was damaged: {len(entries)} entries read from the kernel"
    if lost:
        note += f", of {lost} owner and reason are lost"
    engine.warn(f"{store.folder / 'whitelist'} ({why}): {note}")
    from shapeagent.policy.whitelist import export_list

    text = export_list(entries)
    state = dataclasses.replace(
        attached.state,
        whitelist_entries=len(entries),
        recovered=(*attached.state.recovered, note)[-_MOST_NOTES:],
    )
    with store.writing(state, whitelist=text):
        store.quarantine("whitelist")
    attached.state = state


def _place(entry: WhitelistEntry) -> tuple[object, ...]:
    return entry.match, entry.source, entry.destination, entry.traffic_class


def _salvaged(data: bytes) -> tuple[WhitelistEntry, ...]:
    """Return the entries of the lines that are left."""
    text = data.replace(b"\0", b"").decode(errors="ignore")
    try:
        from shapeagent.policy.whitelist import LineDefaults, parse_list

        return parse_list(text, LineDefaults(), lenient=True).entries
    except InputError:
        return ()


def _read(store: StateDir) -> AttachState | None:
    try:
        return store.read()
    except ConflictError:
        raise  # of another version: that is no damage
    except ShapeError:
        return None


def _pinned_ids(store: StateDir, state: AttachState) -> dict[str, int]:
    """Return the ids of the programs of a state as they are pinned, where they are."""
    found = dict(state.program_ids)
    for name in found:
        try:
            descriptor = bpf.get_pinned(str(store.pins / name)) if store.pins else -1
        except OSError:
            continue
        if descriptor >= 0:
            found[name] = bpf.program_facts(descriptor).id
            os.close(descriptor)
    return found


def _remember(engine: Engine, store: StateDir, state: AttachState, notes: list[str]) -> None:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    texts = (*state.recovered, *(f"{at}: {note}" for note in notes))
    try:
        store.write(dataclasses.replace(state, recovered=texts[-_MOST_NOTES:]))
    except ShapeError as error:
        engine.warn(error.message)
