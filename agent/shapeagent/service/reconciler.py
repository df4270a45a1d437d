# SPDX-License-Identifier: Apache-2.0
"""Keeps the interfaces of the agent's configuration as they are wanted.

Called by the writer's thread between calls: after each netlink event, and
every few seconds. Where no link, qdisc or filter has changed since, it looks
only for what sends no message: whitelist entries that end, and tcx links; at
each event, and every ten seconds, it reads everything anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shapeagent.kernel.link import read_device
from shapeagent.kernel.monitor import Watch
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.kernel.sysfs import holding_sysfs
from shapeagent.model.errors import ConflictError, FailedError, InputError, ShapeError
from shapeagent.model.reports import AttachRequest
from shapeagent.model.types import DeviceFacts, Hook
from shapeagent.policy.reconcile import Choice, Dispute, Retry
from shapeagent.service import following, reapplying
from shapeagent.service.commanded import CommandedEngine
from shapeagent.service.engine import Attached, Session
from shapeagent.service.reapplying import Lost, Part
from shapeagent.telemetry.events import EventLog

ACTIONS = ("attach", "adopt", "repair", "put-back", "failed")
CONFLICTS = tuple(part.value for part in Part)
_FULL_EVERY_S = 10.0  # queues that ethtool changed, a cgroup that came
_AGAIN_S = 0.2  # after something was put back: whether it stays


class Counters(Protocol):
    """Where actions and conflicts are counted."""

    def reconcile_action(self, action: str) -> None: ...

    def conflict(self, kind: str) -> None: ...


@dataclass(slots=True)
class Watched:
    """One wanted interface."""

    request: AttachRequest
    condition: str = "new"  # "waiting", "attached", "disputed", "yielded", "failed"
    text: str = ""  # why, in words
    retry: Retry = field(default_factory=Retry)
    disputes: dict[Part, Dispute] = field(default_factory=dict)
    has_lists: bool = False  # the whitelist of this attachment is in force
    is_new: bool = True  # not seen attached yet, and not by a call
    settled: Attached | None = None  # where all was as wanted at the last look


class Reconciler:
    """Compares wanted with found; `look` is the writer's idle function."""

    def __init__(
        self,
        engine: CommandedEngine,
        requests: Sequence[AttachRequest],
        events: EventLog,
        counters: Counters,
        *,
        every_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._events = events
        self._counters = counters
        self._every_s = every_s
        self._clock = clock
        self._watched = {one.device: Watched(one) for one in requests}
        self._began = False
        self._watch: Watch | None = None
        self._full_due_s = 0.0

    def close(self) -> None:
        """Close what it listens with; a later look opens it again."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    @property
    def watched(self) -> Mapping[str, Watched]:
        """The wanted interfaces by name."""
        return self._watched

    def set_requests(self, requests: Sequence[AttachRequest]) -> None:
        """Take up what is wanted by now. What is no longer named is left as it is."""
        old = self._watched
        self._watched = {
            one.device: old[one.device]
            if one.device in old and old[one.device].request == one
            else Watched(one)
            for one in requests
        }

    def begin_anew(self, device: str) -> None:
        """Note that a caller attached an interface: disputes about it begin anew."""
        if device in self._watched:
            self._watched[device] = Watched(self._watched[device].request, is_new=False)

    def look(self) -> float:
        """Look at everything once and put right what can be; returns when to look again (s)."""
        next_s = self._every_s
        if not self._began:
            self._began = True
            self._undo_unfinished()
        self._engine.forget_gone()
        standing = self._standing()
        for device, one in self._watched.items():
            attached = standing.get(device)
            one.settled = None  # until this look has ended well
            try:
                if attached is None:
                    next_s = min(next_s, self._look_at(one))
                else:
                    self._expire(one, attached)
                    next_s = min(next_s, self._settled(one, attached))
            except ShapeError as error:
                next_s = min(next_s, self._failed(one, error))
            except Exception as error:  # one interface must not keep the others from us
                self._engine.close()  # its socket may be what is wrong (F15)
                wrapped = FailedError("internal", f"{type(error).__name__}: {error}")
                next_s = min(next_s, self._failed(one, wrapped))
        return max(0.05, next_s)

    def _undo_unfinished(self) -> None:
        """Undo what an agent before this one was killed at, where nobody wants it attached."""
        try:
            for done in self._engine.undo_unfinished(self._watched.keys()):
                text = "a change that was cut off was undone"
                self._events.add("undone", done.device, text)
        except ShapeError as error:
            self._events.add("failed", "", f"{error.reference}: {error.message}")

    def _standing(self) -> dict[str, Attached]:
        """Return what is attached as it is wanted, by device; the rest needs a closer look."""
        if self._is_quiet():
            return {
                device: one.settled
                for device, one in self._watched.items()
                if one.settled is not None and self._still_stands(one.settled)
            }
        found: dict[str, Attached] = {}
        with (
            contextlib.suppress(ShapeError, OSError),
            self._engine.reading() as rtnl,
            rtnl.looking(),  # only reads: what several ask for is asked of the kernel once
            holding_sysfs(),
        ):
            for device in self._watched:
                with contextlib.suppress(ShapeError, OSError):
                    attached = self._found_right(rtnl, device)
                    if attached is not None:
                        found[device] = attached
        return found

    def _is_quiet(self) -> bool:
        """Return whether nothing has changed in the kernel since the last look, as far as it says.

        Asked before anything is read: what comes meanwhile counts for the next look.
        """
        try:
            if self._watch is None:
                self._watch = Watch(self._engine.netns, traffic_control=True)
                changed = True
            else:
                changed = self._watch.has_changed()
        except (OSError, ShapeError):  # then it looks each time
            self.close()
            changed = True
        now_s = self._clock()
        if changed or now_s >= self._full_due_s:
            self._full_due_s = now_s + _FULL_EVERY_S
            return False
        return True

    def _still_stands(self, attached: Attached) -> bool:
        """Return whether what was as wanted still is, by what sends no message."""
        if not self._engine.keeps(attached):
            return False
        with contextlib.suppress(ShapeError, OSError):
            return attached.state.hook != Hook.TCX.value or not reapplying.lost_programs(attached)
        return False

    def _found_right(self, rtnl: Rtnl, device: str) -> Attached | None:
        facts = _find(rtnl, device)
        attached = None if facts is None else self._engine.opened(rtnl, facts)
        if facts is None or attached is None:
            return None
        if not attached.is_kept:
            attached.close()
            return None
        is_right = not self._drifted(attached, facts) and not reapplying.find_lost(attached)
        return attached if is_right else None

    def _look_at(self, one: Watched) -> float:
        with self._engine.reading() as rtnl:
            facts = _find(rtnl, one.request.device)
            attached = None if facts is None else self._engine.opened(rtnl, facts)
        if facts is not None and attached is not None:
            try:
                return self._keep(one, attached, facts)
            finally:
                attached.close()
        waits_for = _waits_for(facts, one.request)
        if waits_for:
            self._say(one, "waiting", waits_for)
            return self._every_s
        left_s = one.retry.due_s - self._clock()
        return left_s if left_s > 0 else self._attach(one)

    def _attach(self, one: Watched) -> float:
        report = self._engine.attach_unasked(one.request)
        one.has_lists = one.is_new = False
        one.retry.succeeded()
        action = "attach" if report.changed else "adopt"
        self._counters.reconcile_action(action)
        for text in report.repaired:
            self._events.add("repaired", one.request.device, text)
        self._say(one, "attached", report.plan.profile_reason)
        return _AGAIN_S

    def _keep(self, one: Watched, attached: Attached, facts: DeviceFacts) -> float:
        """Look at what is attached: numbers that follow the device first, then what is lost."""
        if self._drifted(attached, facts):
            done = self._engine.attach_unasked(dataclasses.replace(one.request, device=facts.name))
            for text in done.repaired:
                self._counters.reconcile_action("repair")
                self._events.add("repaired", one.request.device, text)
            return _AGAIN_S
        self._expire(one, attached)
        lost = reapplying.find_lost(attached)
        if not lost:
            return self._settled(one, attached)
        return min(self._dispute(one, attached, each) for each in lost)

    def _expire(self, one: Watched, attached: Attached) -> None:
        """Remove whitelist entries whose time is over.

        The first look brings a kept list back into force.
        """
        if one.has_lists and not attached.state.whitelist_entries:
            return
        one.has_lists = True
        done = Session(attached).whitelist_expire()
        if done.removed:
            text = f"{done.removed} whitelist entries have ended; {done.total} are left"
            self._events.add("whitelist-expired", one.request.device, text)

    def _drifted(self, attached: Attached, facts: DeviceFacts) -> bool:
        return bool(following.drifts_of(attached.state, facts))

    def _settled(self, one: Watched, attached: Attached) -> float:
        if attached.is_kept:
            one.settled = attached
        if one.is_new:
            self._counters.reconcile_action("adopt")
        one.is_new = False
        now_s = self._clock()
        for part, dispute in one.disputes.items():
            if dispute.settled(now_s):
                self._events.add(
                    "dispute-ended", one.request.device, f"our {part.value} stands again"
                )
        self._say(one, "attached", "")
        return self._every_s

    def _dispute(self, one: Watched, attached: Attached, lost: Lost) -> float:
        device, now_s = one.request.device, self._clock()
        dispute = one.disputes.setdefault(lost.part, Dispute())
        if dispute.yielded and not lost.holder:
            dispute.settled(now_s)  # the other has gone: the place is free
        choice, due_s = dispute.choose(now_s)
        if choice is Choice.WAIT:
            self._say(one, "disputed", str(lost))
            return due_s - now_s
        if choice is Choice.YIELD:
            if self._say(one, "yielded", f"{lost}; left to them after {len(dispute.tries)} tries"):
                self._counters.conflict(lost.part.value)
            return self._every_s
        dispute.applied(now_s)
        try:
            reapplying.put_back(attached, lost)
        except ConflictError as error:  # someone else's, and not ours to replace
            dispute.yielded = True
            self._counters.conflict(lost.part.value)
            self._say(one, "yielded", error.message)
            return self._every_s
        self._counters.reconcile_action("put-back")
        self._events.add("put-back", device, str(lost), part=lost.part.value, holder=lost.holder)
        return _AGAIN_S

    def _failed(self, one: Watched, error: ShapeError) -> float:
        now_s = self._clock()
        due_s = one.retry.failed(now_s)
        words = f"{error.reference}: {error.message}"
        if self._say(one, "failed", words):
            self._counters.reconcile_action("failed")
        return due_s - now_s

    def _say(self, one: Watched, condition: str, text: str) -> bool:
        """Note a condition; an event is added and True returned where it is another one."""
        changed = (one.condition, one.text) != (condition, text) and (
            one.condition != condition or bool(text)
        )
        if changed:
            self._events.add(condition, one.request.device, text or condition)
        one.condition, one.text = condition, text
        return changed


def _find(rtnl: Rtnl, device: str) -> DeviceFacts | None:
    try:
        return read_device(rtnl, device)
    except InputError as error:
        if error.reference == "no-such-device":
            return None
        raise


def _waits_for(facts: DeviceFacts | None, request: AttachRequest) -> str:
    """Return what an interface lacks before it can be attached (F34), "" for nothing.

    A rate that is given needs no carrier to be known.
    """
    if facts is None:
        return "the interface does not exist"
    if request.link_rate_bits_per_s is None and not facts.carrier:
        return "it has no carrier, so its speed is not known"
    return ""
