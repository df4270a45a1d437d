# SPDX-License-Identifier: Apache-2.0
"""Another version of the classifier in the place of the one that runs: no packet goes past it.

Where the layout of the maps is the same, the new programs take up the pinned
maps, and flows, meters and counters go on. Where it is an older one, new maps
are filled from what is remembered (policy, ceilings, whitelist) and the
counters are copied. A swap that was killed is done again as a whole: the
state lists every program that may stand in our place meanwhile.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shapeagent.kernel import abi, bpf, link, maps
from shapeagent.kernel.compile import (
    PROGRAMS,
    LoadedProgram,
    find_image,
    load_image,
    read_source,
    set_again,
)
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import ConflictError
from shapeagent.service import hook, selftest
from shapeagent.service.filling import fill, rewrite
from shapeagent.service.hook import Place
from shapeagent.service.state import AttachState, StateDir

if TYPE_CHECKING:
    from shapeagent.service.engine import Attached, Engine

_NEXT = "-next"  # behind the name of a pin folder: that of new maps, until they are in force
_COPIED = ("counts", "reasons")


def is_due(state: AttachState, pins: Path) -> bool:
    """Return whether an attachment runs another version, or a swap of it did not end."""
    same = (state.abi_version, state.source_digest) == (abi.SHP_ABI_VERSION, read_source()[1])
    return bool(state.spare_ids) or not same or maps.have_other_shapes(pins)


def next_pins(pins: Path) -> Path:
    """Return where a swap keeps the maps of a new layout until they are in force."""
    return pins.with_name(pins.name + _NEXT)


def refuse_newer(state: AttachState) -> None:
    """Return unless the attachment is of a later version than this program.

    Raises: ConflictError newer-version-attached.
    """
    if state.abi_version > abi.SHP_ABI_VERSION:
        raise ConflictError(
            "newer-version-attached",
            f"{state.device} runs a classifier of a later version, with maps of layout "
            f"{state.abi_version}; this shapectl knows {abi.SHP_ABI_VERSION}. It goes on shaping.",
            hint="use the later shapectl, or with it: "
            f"shapectl detach {state.device}, then attach with this one",
        )


def swap(
    engine: Engine, rtnl: Rtnl, store: StateDir, state: AttachState
) -> tuple[AttachState, bool]:
    """Return the state with this version's programs in force, and whether they were compiled.

    Raises: ConflictError newer-version-attached, attachment-damaged,
        filter-slot-foreign; FailedError hidden; what compiling raises. Then
        what ran before runs on.
    """
    refuse_newer(state)
    image, compiled = find_image()
    pins = engine.bpffs_dir / store.folder.name
    same = state.abi_version == abi.SHP_ABI_VERSION and not maps.have_other_shapes(pins)
    engine.progress("swapping the programs" if same else "swapping programs and maps")
    folder = pins if same else next_pins(pins)
    if not same:
        maps.remove_pins(folder)  # of a swap that was killed
        bpf.close_all(list(maps.create_pinned(folder).values()))
    attached = _open(engine, rtnl, store, state, folder)
    try:
        fresh = load_image(image, attached.maps, begin_anew=False)
        try:
            tried = dataclasses.replace(
                state, spare_ids=(*state.spare_ids, *(one.id for one in fresh.values()))
            )
            store.write(tried)
            _prepare(attached, tried, pins, same=same)
            _change_over(attached, tried, pins, fresh, same=same)
        except BaseException:
            bpf.close_all([one.fd for one in fresh.values()])
            if not same:
                maps.remove_pins(folder)
            raise
        if not maps.has_our_shape(pins, "counts"):
            before = link.read_traffic(rtnl, state.index)
            tried = dataclasses.replace(tried, bytes_before=before)  # as our counters begin anew
        state = _finish(pins, folder, tried, fresh, image.digest)
        store.write(state)
        bpf.close_all([one.fd for one in fresh.values()])
    finally:
        attached.close()
    return state, compiled


def _open(
    engine: Engine, rtnl: Rtnl, store: StateDir, state: AttachState, folder: Path
) -> Attached:
    from shapeagent.service.engine import Attached

    return Attached(engine, rtnl, store, state, store.folder.name, pins=folder)


def _prepare(attached: Attached, state: AttachState, pins: Path, *, same: bool) -> None:
    """Write the records as this version makes them, before its programs read them."""
    datapath, policy = attached.datapath, attached.policy
    if same:
        rewrite(datapath, policy, state)
        return
    fill(datapath, policy, state, float(state.request.get("ingress_lease_s", 0)))
    from shapeagent.service import liststore

    liststore.fill_new_maps(attached)
    for name in _COPIED:
        _copy_counters(pins, name, attached.maps[name], state.kernel.possible_cpus)


def _copy_counters(pins: Path, name: str, fd: int, cpus: int) -> None:
    """Copy an array of counters where the old one has the same shape; else they begin at 0."""
    if not maps.has_our_shape(pins, name):
        return
    source = bpf.get_pinned(str(pins / name))
    try:
        maps.copy_percpu(source, fd, maps.SHAPES[name], cpus)
    finally:
        os.close(source)


def _change_over(
    attached: Attached,
    state: AttachState,
    pins: Path,
    fresh: Mapping[str, LoadedProgram],
    *,
    same: bool,
) -> None:
    """Put the new programs in force, or leave the old ones there."""
    place = Place.of(attached.rtnl, state, pins)
    try:
        if same:
            set_again(attached.maps, {name: one.fd for name, one in fresh.items()})
        _put(place, state, {name: one.fd for name, one in fresh.items()})
        place.read_back({name: one.id for name, one in fresh.items()}, state.device)
        selftest.run(place, state.device, attached.datapath)
    except BaseException:
        old = {name: bpf.get_pinned(str(pins / name)) for name in PROGRAMS}
        try:
            if same:
                set_again(attached.maps, old)
            _put(place, state, old)
        finally:
            bpf.close_all(list(old.values()))
        raise


def _put(place: Place, state: AttachState, programs: Mapping[str, int]) -> None:
    for direction, name in hook.PROGRAMS.items():
        place.swap(direction, programs[name], state.our_ids)


def _finish(
    pins: Path,
    folder: Path,
    state: AttachState,
    fresh: Mapping[str, LoadedProgram],
    digest: str,
) -> AttachState:
    """Give the new pins the names of the old ones. Each is a rename, so none is ever missing."""
    before = maps.maps_in_use(pins)
    for name, program in fresh.items():
        beside = folder / f"{name}{_NEXT}"
        beside.unlink(missing_ok=True)
        bpf.pin(program.fd, str(beside))
        beside.rename(pins / name)
    if folder != pins:
        for name in sorted(os.listdir(folder)):
            (folder / name).rename(pins / name)
        folder.rmdir()
        maps.remove_unused(pins, before)
    return dataclasses.replace(
        state,
        program_ids={**state.program_ids, **{name: one.id for name, one in fresh.items()}},
        verified={name: one.verified_instructions for name, one in fresh.items()},
        source_digest=digest,
        abi_version=abi.SHP_ABI_VERSION,
        spare_ids=(),
    )
