# SPDX-License-Identifier: Apache-2.0
"""Damaged state files: put aside, and made again from what the kernel holds.

State, policy, snapshot, undo lines and the note of --confirm come from the
kernel's copies, the whitelist (`liststore.rebuild`) from its lists. What is made again is compared
with the programs that are pinned and on the device.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING

from shapeagent.kernel import bpf
from shapeagent.model.errors import ConflictError, ShapeError
from shapeagent.service import listfacts
from shapeagent.service.state import AttachState, StateDir

if TYPE_CHECKING:
    from shapeagent.service.engine import Engine

_MOST_NOTES = 8


def repair(engine: Engine, key: str) -> None:
    """Put right what is damaged in the folder of an attachment, and say so loudly.

    What cannot be put right stays as it is, for detach to make the best of it. Hold the lock.

    Effects: a damaged file is moved to NAME.corrupt-TIME beside it.
    """
    store = engine.store(key)
    state = _read(store)
    damage = store.damage(state)
    damage.pop(listfacts.FILE_NAME, None)  # that needs the maps: `whitelisting` puts it right
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


def repair_if_free(engine: Engine, key: str) -> dict[str, str]:
    """As `repair`, for who does not hold the lock: what another process holds is left for later.

    Returns: file → why, of what is damaged still, the whitelist included.
    """
    store = engine.store(key)
    damage = store.damage(_read(store))
    if not damage.keys() - {listfacts.FILE_NAME}:
        return damage
    try:
        with engine.lock(wait_s=0.0):
            repair(engine, key)
    except ShapeError as error:
        names = ", ".join(damage.keys() - {listfacts.FILE_NAME})
        engine.warn(f"{store.folder}: {names} damaged, not put right: {error.message}")
    return store.damage(_read(store))


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
