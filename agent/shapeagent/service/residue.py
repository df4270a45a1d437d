# SPDX-License-Identifier: Apache-2.0
"""Anything of ours that is left and belongs to no attachment in force."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shapeagent.kernel import bpf, filters, link, routes, snapshot
from shapeagent.kernel import netns as namespaces
from shapeagent.kernel.rtnl import TC_H_ROOT, Rtnl
from shapeagent.kernel.tclines import tool_words
from shapeagent.kernel.tcobjects import What
from shapeagent.model.errors import ConflictError, FailedError, ShapeError
from shapeagent.model.reports import ResidueItem, ResidueReport
from shapeagent.model.types import Direction, GsoLimits
from shapeagent.policy.plan import MAJOR
from shapeagent.service.following import look
from shapeagent.service.state import KEPT_UNDO_SUFFIX, AttachState, StateDir, list_states

if TYPE_CHECKING:
    from shapeagent.service.engine import Engine

_CLOCK = "shp_clock"  # of whoever reads jiffies right now
_POLL_S = 0.02


@dataclass
class _Known:
    """What the state folders say: attachments in force, and those that did not end."""

    living: dict[str, AttachState]
    ended: dict[str, AttachState | None]  # None: the state is damaged or missing
    other_version: set[str]


def find(engine: Engine, wait_s: float) -> ResidueReport:
    """Return what is left; see Engine.residue."""
    deadline = time.monotonic() + wait_s
    places = _places(engine)
    try:
        known = _read_states(engine, places)
        items = [*_folders(engine, known, places)]
        for cookie, (netns, rtnl) in places.items():
            items += _in_namespace(cookie, netns, rtnl, known)
        programs, loose = _programs(known)
        while loose and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            programs, loose = _programs(known)
        items += programs
    finally:
        for _, rtnl in places.values():
            rtnl.close()
    return ResidueReport(attached=len(known.living), items=tuple(items))


def _places(engine: Engine) -> dict[int, tuple[str | None, Rtnl]]:
    """Return cookie → (name, socket): the engine's namespace; where it has none, all named ones."""
    names: list[str | None] = [engine.netns]
    if engine.netns is None:
        names += namespaces.list_netns()
    found: dict[int, tuple[str | None, Rtnl]] = {}
    for name in names:
        try:
            rtnl = namespaces.open_rtnl(name)
        except ShapeError:
            if name == engine.netns:
                raise
            continue  # it went away while we looked, or is none
        cookie = namespaces.read_netns_cookie(rtnl)
        if cookie in found:
            rtnl.close()
        else:
            found[cookie] = (name, rtnl)
    return found


def _read_states(engine: Engine, places: dict[int, tuple[str | None, Rtnl]]) -> _Known:
    known = _Known({}, {}, set())
    folders = {folder.name for folder in _listed(engine.run_dir) if folder.is_dir()}
    for key in sorted(folders.union(list_states(engine.run_dir, engine.bpffs_dir))):
        state = None
        try:
            state = engine.store(key).read()
        except ConflictError:
            known.other_version.add(key)
            continue
        except FailedError:
            pass
        if state is not None and state.complete and _is_there(key, state, places):
            known.living[key] = state
        else:
            known.ended[key] = state
    return known


def _is_there(key: str, state: AttachState, places: dict[int, tuple[str | None, Rtnl]]) -> bool:
    """Return whether the device of a state exists; one of a namespace we do not see counts."""
    cookie = key.partition("-")[0]
    place = places.get(int(cookie)) if cookie.isdigit() else None
    if place is None:
        return True
    return look(place[0], place[1], state).facts is not None


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _folders(
    engine: Engine, known: _Known, places: dict[int, tuple[str | None, Rtnl]]
) -> Iterator[ResidueItem]:
    def is_asked_for(key: str) -> bool:
        # with a namespace given, the folders of the others are not asked for
        cookie = key.partition("-")[0]
        return engine.netns is None or not cookie.isdigit() or int(cookie) in places

    for key, state in known.ended.items():
        if not is_asked_for(key):
            continue
        folder = engine.run_dir / key
        device = state.device if state else None
        fix = f"shapectl detach {device}" if device else f"rm -r -- {folder}"
        what = f"state of an attach that did not end or whose device is gone: {folder}"
        yield ResidueItem("state", what, fix, device, state.netns if state else None)
        if state is None or _is_there(key, state, places):
            yield from _limits(engine.store(key), places)
        else:
            yield from _moved_limits(key, state, places)
    for key in sorted(known.other_version):
        if is_asked_for(key):
            yield ResidueItem(
                "state",
                f"state of another version of shapectl: {engine.run_dir / key}",
                "shapectl detach, by the shapectl that attached it",
            )
    for path in _listed(engine.run_dir):
        if path.name.endswith(KEPT_UNDO_SUFFIX) and is_asked_for(path.name):
            yield ResidueItem(
                "undo",
                f"lines that put back a qdisc tree, kept when another one stood there: {path}",
                f"rm -- {path}",
            )
    for pins in _listed(engine.bpffs_dir):
        if (
            pins.name in known.living
            or pins.name in known.other_version
            or not is_asked_for(pins.name)
        ):
            continue
        count = len(_listed(pins))
        yield ResidueItem("pin", f"{count} pins in {pins}", f"rm -r -- {pins}")


def _limits(store: StateDir, places: dict[int, tuple[str | None, Rtnl]]) -> Iterator[ResidueItem]:
    """Yield the segment limits that are lower than before an attach that did not end."""
    cookie, _, index = store.folder.name.partition("-")
    place = places.get(int(cookie)) if cookie.isdigit() and index.isdigit() else None
    if place is None:
        return
    netns, rtnl = place
    with contextlib.suppress(ShapeError):
        wanted = store.read_snapshot()
        if wanted is None or link.read_gso(rtnl, int(index)) == wanted.gso:
            return
        device = link.read_device_by_index(rtnl, int(index)).name
        yield ResidueItem(
            "segment-limit",
            f"gso_max_size and gso_max_segs of {device} are not as they were",
            f"{tool_words('ip', netns)} link set dev {device} "
            f"gso_max_size {wanted.gso.max_size_bytes} gso_max_segs {wanted.gso.max_segments}",
            device,
            netns,
        )


def _moved_limits(
    key: str, state: AttachState, places: dict[int, tuple[str | None, Rtnl]]
) -> Iterator[ResidueItem]:
    """Yield the segment limits that a device took along into another namespace."""
    place = places.get(int(key.partition("-")[0]))
    moved = look(place[0], place[1], state).moved if place is not None else None
    before = state.gso_before
    if moved is None or before is None:
        return
    with namespaces.open_rtnl(moved.netns) as there:
        if link.read_gso(there, moved.index) == state.gso_set:
            yield ResidueItem(
                "segment-limit",
                f"gso_max_size and gso_max_segs of {moved.name} are not as they were: it took them "
                "along",
                f"{tool_words('ip', moved.netns)} link set dev {moved.name} gso_max_size "
                f"{before.max_size_bytes} gso_max_segs {before.max_segments}",
                moved.name,
                moved.netns,
            )


def _programs(known: _Known) -> tuple[list[ResidueItem], bool]:
    """Return (programs of no attachment in force, with their maps; whether some may be going).

    Maps are known by their programs. They are not opened by id: a program
    array that is opened and closed while the kernel is about to clear it stays
    for ever (prog_array_map_clear() in kernel/bpf/arraymap.c takes a reference,
    and gives it back only where its work was not queued already).
    """

    def ids(states: Iterable[AttachState | None]) -> set[int]:
        return {number for one in states if one for number in one.our_ids}

    living, held = ids(known.living.values()), ids(known.ended.values())
    items, loose = [], False
    living_maps: set[int] = set()
    other_maps: dict[int, str] = {}
    for number in bpf.program_ids():
        facts = _facts(number)
        if facts is not None and number in living:
            living_maps |= set(facts.map_ids)
        elif facts is not None and _is_ours(facts.name):
            loose = loose or number not in held
            other_maps |= dict.fromkeys(facts.map_ids, f"program {number} {facts.name}")
            items.append(
                ResidueItem(
                    "program",
                    f"program {number} {facts.name}",
                    f"bpftool prog show id {number}; it ends with its last pin, filter or "
                    "descriptor",
                    id=number,
                )
            )
    items += [
        ResidueItem(
            "map",
            f"map {number} of {holder}",
            f"bpftool map show id {number}; it ends with its last pin, program or descriptor",
            id=number,
        )
        for number, holder in sorted(other_maps.items())
        if number not in living_maps
    ]
    return items, loose


def _is_ours(program: str) -> bool:
    return program.startswith(filters.PROGRAM_PREFIX) and program != _CLOCK


def _facts(number: int) -> bpf.ProgramFacts | None:
    """Return the facts about a program, None where it has gone meanwhile."""
    try:
        descriptor = bpf.program_by_id(number)
    except FileNotFoundError:
        return None
    try:
        return bpf.program_facts(descriptor)
    finally:
        os.close(descriptor)


def _in_namespace(
    cookie: int, netns: str | None, rtnl: Rtnl, known: _Known
) -> Iterator[ResidueItem]:
    living = {
        state.index: state
        for key, state in known.living.items()
        if key.partition("-")[0] == str(cookie)
    }
    ifbs = {state.ifb_index for state in living.values()}
    for device in link.list_devices(rtnl):
        # an attach that is killed between making and marking one leaves it without an alias
        unmarked = not device.alias and link.is_ifb_of_ours(rtnl, device)
        ours = unmarked or device.alias.startswith(link.IFB_ALIAS)
        if ours and device.index not in ifbs:
            yield ResidueItem(
                "ifb",
                f"device {device.name}: {device.alias or 'an IFB of our name, without a mark'}",
                f"{tool_words('ip', netns)} link delete dev {device.name}",
                device.name,
                netns,
            )
        if device.index in living or ours:
            continue
        with contextlib.suppress(ShapeError):  # a device that went away meanwhile
            yield from _on_device(device.name, device.index, netns, rtnl)


def _on_device(name: str, index: int, netns: str | None, rtnl: Rtnl) -> Iterator[ResidueItem]:
    tc = tool_words("tc", netns)
    for direction in Direction:
        for one in filters.list_filters(rtnl, index, direction):
            if one.in_our_slot or one.in_redirect_slot:
                yield ResidueItem(
                    "filter",
                    f"{one} on {name}",
                    f"{tc} filter del dev {name} {direction.value} protocol all pref {one.pref} "
                    f"handle {one.handle:#x} bpf",
                    name,
                    netns,
                    id=one.program_id,
                )
    found = snapshot.take(rtnl, index, _NO_LIMITS)
    for root in found.objects:
        if root.what is What.QDISC and root.parent == TC_H_ROOT and root.handle >> 16 == MAJOR:
            yield ResidueItem(
                "qdisc", f"root {root} of {name}", f"{tc} qdisc del dev {name} root", name, netns
            )
    for route in routes.find_ipv6_routes(rtnl, index):
        yield ResidueItem(
            "route",
            f"IPv6 host route {route.address} on {name}",
            f"{tool_words('ip', netns)} -6 route flush dev {name} proto {routes.ROUTE_PROTOCOL}",
            name,
            netns,
        )


_NO_LIMITS = GsoLimits(0, 0, None)
