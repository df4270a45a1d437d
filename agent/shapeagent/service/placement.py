# SPDX-License-Identifier: Apache-2.0
"""Where a device stands among the others, and whether one on the same way is shaped already."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from shapeagent.kernel import link, sessions
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import ConflictError
from shapeagent.model.reports import Finding, Severity
from shapeagent.model.types import DeviceFacts
from shapeagent.policy.placement import Place, double_shaping, judge_placement, on_the_way
from shapeagent.service.following import all_states, look

if TYPE_CHECKING:
    from shapeagent.service.engine import Engine


def read_places(rtnl: Rtnl) -> dict[str, Place]:
    """Return the devices of the socket's namespace with what is above and below each.

    A device below that is in another namespace is not seen.
    """
    links = sessions.list_places(rtnl)
    names = {one.index: one.name for one in links}
    found = {}
    for one in links:
        lowers = [other.name for other in links if other.master == one.index]
        lowers += [names[one.parent]] if one.parent in names else []
        uppers = [names[one.master]] if one.master in names else []
        uppers += [other.name for other in links if other.parent == one.index]
        found[one.name] = Place(
            name=one.name,
            kind=one.kind,
            hardware=not one.kind and not one.loopback,
            master=names.get(one.master, ""),
            lowers=tuple(lowers),
            uppers=tuple(uppers),
        )
    return found


def check_placement(
    engine: Engine, rtnl: Rtnl, device: DeviceFacts, *, shadow: bool
) -> tuple[Finding, ...]:
    """Return what is worth a warning about where the device stands.

    Raises: ConflictError double-shaping where shapectl shapes another device
        that the same packets pass; own-ifb.
    """
    if any(one.index == device.index for one in _own_ifbs(rtnl)):
        raise ConflictError(
            "own-ifb",
            f"{device.name} is an IFB that shapectl made for another device.",
            hint="shapectl status shows whose; its tree is the one of --ingress ifb",
        )
    places = read_places(rtnl)
    if device.name not in places:
        return ()  # it went away while we looked: the next step says so
    near = on_the_way(device.name, places)
    for name in () if shadow else _shaped_by_us(engine, rtnl, near):
        raise ConflictError(
            "double-shaping",
            f"shapectl shapes {name} already, and the packets of {device.name} pass it too: they "
            "would wait in two trees, and the second undoes the order of the first.",
            hint=f"leave {device.name} as it is; or: shapectl detach {name}, then shapectl attach "
            f"{device.name}",
        )
    from shapeagent.kernel import livefacts

    trees = livefacts.read_qdiscs(rtnl)
    index_of = {one.name: one.index for one in sessions.list_places(rtnl)}
    shaped = [one for one in near if livefacts.is_shaped(trees.get(index_of.get(one, 0), []))]
    found = (
        judge_placement(places[device.name], places),
        *double_shaping(device.name, places, shaped),
    )
    return tuple(one for one in found if one.severity is Severity.WARNING)


def _own_ifbs(rtnl: Rtnl) -> tuple[link.LinkIdentity, ...]:
    return tuple(one for one in link.list_devices(rtnl) if one.alias.startswith(link.IFB_ALIAS))


def shaped_beside(engine: Engine, rtnl: Rtnl, device: str) -> tuple[str, ...]:
    """Return the other devices on the way of a device's packets that shapectl shapes too.

    Someone may have put one into the other after both were attached.
    """
    return _shaped_by_us(engine, rtnl, on_the_way(device, read_places(rtnl)))


def _shaped_by_us(engine: Engine, rtnl: Rtnl, near: Collection[str]) -> tuple[str, ...]:
    """Return those of the devices whose packets shapectl changes."""
    if not near:
        return ()
    cookie = engine.key_of(rtnl, 0).partition("-")[0]
    found = []
    for key, state in all_states(engine):
        if key.partition("-")[0] == cookie and not state.shadow:
            facts = look(engine.netns, rtnl, state).facts
            if facts is not None and facts.name in near:
                found.append(facts.name)
    return tuple(found)
