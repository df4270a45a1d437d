# SPDX-License-Identifier: Apache-2.0
"""Where an attached device is by now: renamed, moved, gone, or another one at its index."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapeagent.kernel import filters, identity, link, maps, routes, tcx
from shapeagent.kernel import netns as namespaces
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import FailedError, InputError, ShapeError
from shapeagent.model.types import DeviceFacts, Direction, Profile
from shapeagent.model.units import format_rate
from shapeagent.policy.following import Drift, find_drifts
from shapeagent.service import confirming
from shapeagent.service.state import AttachState, list_states

if TYPE_CHECKING:
    from shapeagent.service.engine import Engine

FROM_DEVICE = "read from the device"  # where a link rate that nobody gave comes from


@dataclass(frozen=True, slots=True)
class Moved:
    """Where a device went: `netns` None is the namespace of this process."""

    netns: str | None
    name: str
    index: int

    def __str__(self) -> str:
        return f"{self.name} in namespace {self.netns}" if self.netns else self.name


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What became of an attached device. `facts` is None where it is not at its index any more."""

    facts: DeviceFacts | None
    successor: str = ""  # another device, which has its index now
    moved: Moved | None = None

    def gone_text(self, state: AttachState) -> str:
        """Return the sentence that says that it is gone, and where to."""
        text = f"interface {state.device} (index {state.index}) is gone"
        if self.moved is not None:
            text += f": it is {self.moved} now"
        if self.successor:
            text += f"; index {state.index} is {self.successor} now, another device"
        return text


def look(netns: str | None, rtnl: Rtnl, state: AttachState) -> Whereabouts:
    """Return where the device of an attachment in the socket's namespace is. Reads only.

    Args:
        netns: the name of the socket's namespace, None for this process's own.
    """
    try:
        facts = link.read_device_by_index(rtnl, state.index)
    except FailedError as error:
        if error.reference != "interface-gone":
            raise
        return Whereabouts(None, moved=_find_moved(netns, state))
    if _is_same(netns, rtnl, state, facts):
        return Whereabouts(facts)
    return Whereabouts(None, successor=facts.name, moved=_find_moved(netns, state))


def _is_same(netns: str | None, rtnl: Rtnl, state: AttachState, facts: DeviceFacts) -> bool:
    now = identity.read_identity(netns, facts.name, facts.index)
    if now and state.device_identity:
        return now == state.device_identity
    ids = set(state.our_ids)
    for direction in Direction:
        found = [one.program_id for one in filters.list_filters(rtnl, facts.index, direction)]
        found += tcx.list_programs(netns, facts.index, direction)
        if not ids.isdisjoint(found):
            return True
    return (facts.name, facts.kind) == (state.device, state.facts.kind)


def _find_moved(netns: str | None, state: AttachState) -> Moved | None:
    if not state.device_identity:
        return None
    for place in dict.fromkeys((netns, None, *namespaces.list_netns())):
        with contextlib.suppress(ShapeError):
            found = identity.find_identity(place, state.device_identity)
            if found is not None:
                return Moved(place, *found)
    return None


def require_present(netns: str | None, rtnl: Rtnl, state: AttachState) -> DeviceFacts:
    """Return the facts about the attached device.

    Raises: FailedError interface-gone, before anything is written to what has its index now.
    """
    found = look(netns, rtnl, state)
    if found.facts is None:
        text = found.gone_text(state)
        raise FailedError(
            "interface-gone",
            f"{text[0].upper()}{text[1:]}.",
            hint=f"shapectl {netns_words(netns)}detach {state.device} removes what is left of it; "
            "attach it again where it is",
        )
    return found.facts


def state_of(engine: Engine, rtnl: Rtnl, device: DeviceFacts) -> AttachState | None:
    """Return the state of the attachment to this very device, None where there is none.

    Raises: FailedError state-damaged.
    """
    state = engine.store(engine.key_of(rtnl, device.index)).read()
    if state is None or look(engine.netns, rtnl, state).facts is None:
        return None
    return state


# --- what is left of an attachment whose device is gone


@dataclass(frozen=True, slots=True)
class Remains:
    """An attachment whose device is not where it was."""

    key: str
    state: AttachState
    where: Whereabouts


def remains_of(engine: Engine, rtnl: Rtnl, device: DeviceFacts) -> tuple[Remains, ...]:
    """Return the attachments that ended where this device is concerned.

    Those of its own former place, those of a device that is gone and had its
    index, and those of one that is gone and had its name.
    """
    own = identity.read_identity(engine.netns, device.name, device.index)
    here = engine.key_of(rtnl, device.index)
    cookie = here.partition("-")[0]
    found = []
    for key, state in all_states(engine):
        if own and state.device_identity == own and key != here:
            moved = Moved(engine.netns, device.name, device.index)
            found.append(Remains(key, state, Whereabouts(None, moved=moved)))
        elif key.partition("-")[0] == cookie and (key == here or state.device == device.name):
            where = look(engine.netns, rtnl, state)
            if where.facts is None:
                found.append(Remains(key, state, where))
    return tuple(found)


def locate(engine: Engine, rtnl: Rtnl, key: str, state: AttachState) -> Whereabouts:
    """Return where the device of any attachment is, be it of another namespace than ours."""
    if key == engine.key_of(rtnl, state.index):
        return look(engine.netns, rtnl, state)
    return Whereabouts(None, moved=_find_moved(engine.netns, state))


def all_states(engine: Engine) -> Iterator[tuple[str, AttachState]]:
    """Yield (key, state) of every attachment, in every namespace; damaged ones are left out."""
    for key in list_states(engine.run_dir, engine.bpffs_dir):
        with contextlib.suppress(FailedError):
            state = engine.store(key).read()
            if state is not None:
                yield key, state


def clear_remains(engine: Engine, rtnl: Rtnl, remains: Remains) -> tuple[str, ...]:
    """Return what is worth a note, once nothing is left of such an attachment."""
    steps, notes = undo_remains(engine, rtnl, remains, dry_run=False)
    store = engine.store(remains.key)
    maps.remove_pins(engine.bpffs_dir / remains.key)
    confirming.disarm(store)
    store.remove()
    return (*notes, *steps)


def undo_remains(
    engine: Engine, rtnl: Rtnl, remains: Remains, *, dry_run: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (steps, notes) of undoing what does not go with a device; its pins and state stay.

    What has its index by now is not touched. Qdiscs and filters end when a
    device goes or changes its namespace; its segment limits go with it.

    Effects: our IFB is deleted, and the segment limits are set back where the device is found.
    """
    state, where = remains.state, remains.where
    steps: list[str] = []
    notes = [f"{where.gone_text(state)}, and what was on it went with it"]
    with _old_namespace(engine, rtnl, remains) as old:
        if old is None and state.ifb:
            notes.append(f"the namespace of its IFB {state.ifb} was not found: left alone")
        for one in ifbs_of(engine, old, remains.key, state) if old is not None else ():
            steps.append(f"delete our IFB {one.name}")
            if not dry_run:
                assert old is not None
                link.delete_ifb(old, one.index)
    if state.gso_before is not None and state.gso_set is not None:
        before = state.gso_before
        words = f"gso_max_size {before.max_size_bytes} gso_max_segs {before.max_segments}"
        if where.moved is None:
            notes.append(
                "if it lives on in a namespace without a name, its segment limits are set back "
                f"there by: ip link set dev {state.device} {words}"
            )
        else:
            _restore_limits(state, where.moved, words, steps, notes, dry_run=dry_run)
    return tuple(steps), tuple(notes)


def _restore_limits(
    state: AttachState,
    moved: Moved,
    words: str,
    steps: list[str],
    notes: list[str],
    *,
    dry_run: bool,
) -> None:
    assert state.gso_before is not None
    with namespaces.open_rtnl(moved.netns) as there:
        if link.read_gso(there, moved.index) != state.gso_set:
            notes.append(f"someone changed the segment limits of {moved}: left as they are")
            return
        steps.append(f"set {words} of {moved} back")
        if not dry_run:
            link.set_gso(there, moved.index, state.gso_before)
            routes.reroute_ipv4(moved.netns)


@contextlib.contextmanager
def _old_namespace(engine: Engine, rtnl: Rtnl, remains: Remains) -> Iterator[Rtnl | None]:
    """Give a socket in the namespace of an attachment, None where that is not found."""
    cookie = remains.key.partition("-")[0]
    if cookie == str(namespaces.read_netns_cookie(rtnl)):
        yield rtnl
        return
    try:
        other = namespaces.open_rtnl(remains.state.netns)
    except InputError:  # the namespace is gone, and all in it
        yield None
        return
    with other:
        yield other if cookie == str(namespaces.read_netns_cookie(other)) else None


def ifbs_of(
    engine: Engine, rtnl: Rtnl, key: str, state: AttachState
) -> tuple[link.LinkIdentity, ...]:
    """Return the IFBs of an attachment, one too that an attach died before it could note.

    Not those of another attachment that has taken up its name.
    """
    others = {
        one.ifb_index
        for other, one in all_states(engine)
        if other != key and other.partition("-")[0] == key.partition("-")[0]
    }
    noted = [
        one
        for one in link.list_devices(rtnl)
        if one.index == state.ifb_index and one.alias.startswith(link.IFB_ALIAS)
    ]  # it may have another name on it, where taking up a new name was cut short
    found = {one.index: one for one in (*noted, *link.find_ifbs(rtnl, state.device))}
    return tuple(one for one in found.values() if one.index not in others)


# --- words


def drifts_of(state: AttachState, facts: DeviceFacts) -> tuple[Drift, ...]:
    """Return what about the device is not as it was when its numbers were computed."""
    return find_drifts(
        state.facts,
        facts,
        profile=Profile(state.profile),
        link_rate_bits_per_s=state.link_rate_bits_per_s,
        rate_from_device=state.link_rate_source == FROM_DEVICE,
    )


def netns_words(netns: str | None) -> str:
    """Return the option that names a namespace, with a blank behind it; none for one's own."""
    return f"--netns {netns} " if netns else ""


def attach_words(state: AttachState, name: str) -> str:
    """Return the command that attaches a device as this attachment was asked for."""
    request = state.request
    words = ["attach", name]
    rate = request.get("link_rate_bits_per_s")
    if rate is not None:
        words += ["--link-rate", format_rate(rate)]
    for option in ("profile", "segment_limit"):
        if request.get(option) is not None:
            words += [f"--{option.replace('_', '-')}", str(request[option])]
    if request.get("ingress", "count") != "count":
        words += ["--ingress", str(request["ingress"])]
    if request.get("policy_path") is not None:
        words += ["--policy", str(request["policy_path"])]
    if request.get("shadow"):
        words.append("--shadow")
    for option, key in (("--mark", "egress_mark_mask"), ("--mark-ingress", "ingress_mark_mask")):
        if request.get(key) is not None:
            words += [option, f"{request[key]:#x}"]
    return f"shapectl {netns_words(state.netns)}{shlex.join(words)}"
