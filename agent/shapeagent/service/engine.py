# SPDX-License-Identifier: Apache-2.0
"""The one object that owns attaching, changing, explaining and detaching.

The command line uses it in process, the agent behind gRPC. Everything that
changes the kernel or the state is done under one lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shapeagent.kernel import abi, maps, qdisc
from shapeagent.kernel import netns as namespaces
from shapeagent.kernel.clock import JiffiesClock
from shapeagent.kernel.datapath import Datapath
from shapeagent.kernel.link import read_device
from shapeagent.kernel.monitor import Watch
from shapeagent.kernel.probe import require_privileges
from shapeagent.kernel.rtnl import NetlinkRefusal, Rtnl
from shapeagent.kernel.signals import InterruptGuard
from shapeagent.kernel.sysfs import holding_sysfs
from shapeagent.model.errors import ConflictError, FailedError, InputError, ShapeError
from shapeagent.model.reports import (
    AttachPlan,
    AttachReport,
    AttachRequest,
    ClassStatus,
    DetachReport,
    ExplainRequest,
    Explanation,
    InterfaceStatus,
    PolicyDocument,
    ResidueReport,
)
from shapeagent.model.types import DeviceFacts, Direction, Policy, Profile, TreePlan
from shapeagent.policy.meters import least_paced_rate
from shapeagent.policy.plan import class_rate_change, twin_minor, with_changes
from shapeagent.service import describing, following, recovering
from shapeagent.service.ceilings import Enforcement, ceiling_states, class_words, tree_of
from shapeagent.service.hook import Place
from shapeagent.service.keptpolicy import policy_of
from shapeagent.service.state import (
    LOCK_WAIT_S,
    RUN_DIR,
    AttachState,
    CeilingState,
    Files,
    StateDir,
    list_states,
    locked,
)
from shapeagent.service.whitelistcalls import WhitelistCalls, WhitelistSession

if TYPE_CHECKING:
    from shapeagent.service.whitelisting import Whitelist

BPFFS_DIR = Path("/sys/fs/bpf/shapectl")

_MIN_CEILING_BITS_PER_S = 64_000
_DRAIN_LIMIT_S = 0.5  # how long a renewal waits for the twin's queue
_DRAIN_POLL_S = 0.002
_MOST_KEPT = 128  # of what is remembered for each attachment and direction


class Attached:
    """One attachment, open: state, policy, maps and netlink socket."""

    def __init__(
        self,
        engine: Engine,
        rtnl: Rtnl,
        store: StateDir,
        state: AttachState,
        key: str,
        *,
        pins: Path | None = None,
    ) -> None:
        self.engine = engine
        self.rtnl = rtnl
        self.store = store
        self.state = state
        self.key = key
        self.pins = pins or engine.bpffs_dir / key
        text = store.read_policy(state.policy_digest)
        self.policy = _as_attached(
            policy_of(store.folder, text, state.policy_source, state.link_rate_bits_per_s), state
        )
        if not (self.pins / "ctl").exists():
            raise FileNotFoundError(self.pins / "ctl")
        self.maps = maps.PinnedMaps(self.pins)
        self.datapath = Datapath(self.maps, state.kernel.possible_cpus)
        self.clock = JiffiesClock()
        self._trees: dict[Direction, TreePlan | None] = {}
        self.stamp = store.stamp()  # of the state that this is
        self.is_kept = False  # by an engine that keeps it open
        self._whitelist: Whitelist | None = None

    @property
    def whitelist(self) -> Whitelist:
        """The whitelist, read when it is first asked for; what a kill left half done is ended."""
        if self._whitelist is None:
            from shapeagent.service.whitelisting import Whitelist

            self._whitelist = Whitelist(self)
        return self._whitelist

    @property
    def enforcement(self) -> Enforcement:
        """How ceilings are held on this interface."""
        return Enforcement.of(self.state)

    @property
    def place(self) -> Place:
        """Where our programs stand."""
        return Place.of(self.rtnl, self.state, self.pins)

    def tree(self, direction: Direction) -> TreePlan | None:
        """Return the qdisc tree that stands in a direction, None where there is none."""
        if direction not in self._trees:
            self._trees[direction] = self.engine.planned(self.key, direction, self)
        return self._trees[direction]

    def save(self, state: AttachState) -> None:
        """Write a new state."""
        self.store.write(state)
        self.state, self.stamp = state, self.store.stamp()

    @contextlib.contextmanager
    def saving(self, state: AttachState, *, lasting: bool = True) -> Iterator[None]:
        """Change the kernel in the body; the new state is in force where that did not fail."""
        with self.store.writing(state, lasting=lasting):
            yield
        self.state, self.stamp = state, self.store.stamp()

    def set_tree(self, direction: Direction, tree: TreePlan | None) -> None:
        """Note the tree that stands after a change."""
        self._trees[direction] = tree

    def close(self, *, for_good: bool = False) -> None:
        """Close every descriptor, unless the engine keeps it open for the next call."""
        if self.is_kept and not for_good:
            return
        if self._whitelist is not None:
            self._whitelist.close()
        self.maps.close()
        self.clock.close()


class Session(WhitelistSession):
    """Changes of one attachment while its lock is held; made by `Engine.session`."""

    def set_ceiling(
        self,
        class_name: str,
        ceiling_bits_per_s: int,
        *,
        lease_s: float | None = None,
        direction: str = "egress",
    ) -> None:
        """Set a ceiling in place; see Engine.class_set."""
        _set_ceiling(self._attached, class_name, ceiling_bits_per_s, lease_s, direction)

    def class_status(self, class_name: str, direction: str = "egress") -> ClassStatus:
        """Return one class as it is now."""
        return describing.class_status(self._attached, class_name, Direction(direction))


def _as_attached(policy: Policy, state: AttachState) -> Policy:
    """Return the policy with what the attach request overrode."""
    request = state.request
    egress, ingress = request.get("egress_mark_mask"), request.get("ingress_mark_mask")
    return dataclasses.replace(
        policy,
        shadow=state.shadow,
        egress_mark_mask=policy.egress_mark_mask if egress is None else egress,
        ingress_mark_mask=policy.ingress_mark_mask if ingress is None else ingress,
    )


class Engine(WhitelistCalls):
    """Attach, change, explain and detach the interfaces of one network namespace."""

    def __init__(
        self,
        *,
        netns: str | None = None,
        progress: Callable[[str], None] | None = None,
        warn: Callable[[str], None] | None = None,
        run_dir: Path = RUN_DIR,
        bpffs_dir: Path = BPFFS_DIR,
        lists_dir: Path | None = None,
        holds_lock: bool = False,
    ) -> None:
        """Args: lists_dir: where whitelists outlast a reboot (`listplace`); None: they do not."""
        self.netns = netns
        self.progress = progress or (lambda _: None)
        self.warn = warn or (lambda _: None)  # what an administrator must hear of
        self.run_dir = run_dir
        self.bpffs_dir = bpffs_dir
        self.lists_dir = lists_dir
        self._holds_lock = holds_lock  # the agent does, for its life, and has one writer
        self._rtnl: Rtnl | None = None
        self._kept: dict[str, Attached] = {}
        # for who holds the lock for life: what was found there and whole by the name of a device
        self._links: Watch | None = None
        self._found_whole: dict[str, tuple[Attached, Files]] = {}
        self._found_right: dict[int, tuple[TreePlan, tuple[tuple[object, ...], ...]]] = {}
        # of an attachment and direction: the tree, and the state and policy that it was planned for
        self._planned: dict[tuple[str, Direction], tuple[AttachState, Policy, TreePlan | None]] = {}

    def lock(self, wait_s: float = LOCK_WAIT_S) -> contextlib.AbstractContextManager[None]:
        """Return a context that holds the one writer's lock; see `state.locked`."""
        return contextlib.nullcontext() if self._holds_lock else locked(self.run_dir, wait_s)

    def planned(self, key: str, direction: Direction, attached: Attached) -> TreePlan | None:
        """Return the tree that stands in a direction of an attachment; planned once a state."""
        known = self._planned.get((key, direction))
        if known is not None and known[:2] == (attached.state, attached.policy):
            return known[2]
        tree = tree_of(attached.policy, attached.state, direction)
        if len(self._planned) >= _MOST_KEPT:
            self._planned.clear()
        self._planned[key, direction] = (attached.state, attached.policy, tree)
        return tree

    def tree_problem(self, rtnl: Rtnl, index: int, tree: TreePlan) -> str:
        """Return what is not as planned in the tree of a device, "" where all is.

        What was found right once is not compared field by field again as long
        as the kernel shows the same bytes for the same plan.
        """
        try:
            found = qdisc.configuration(rtnl, index)
            known = self._found_right.get(index)
            if known is not None and known[0] is tree and known[1] == found:
                return ""
            # the queues' limits follow the ceilings at attach: `class set` leaves them
            qdisc.read_back(rtnl, index, tree, leaf_limits=False)
        except ShapeError as error:
            return error.message
        if len(self._found_right) >= _MOST_KEPT:
            self._found_right.clear()
        self._found_right[index] = (tree, found)
        return ""

    # --- attach and detach

    def plan_attach(self, request: AttachRequest) -> AttachPlan:
        """Return what `attach` would do; nothing is changed.

        Raises:
            InputError: the request, the policy or the device is wrong.
            ConflictError: someone else's qdisc or filter is in the way.
        """
        from shapeagent.service import planning

        require_privileges()
        with self.reading() as rtnl:
            return planning.make_plan(self, rtnl, request).report

    def attach(self, request: AttachRequest) -> AttachReport:
        """Attach a device. Idempotent: the same request again changes nothing.

        Effects: pins under the bpffs folder, state under the run folder, a
            qdisc tree, clsact and one filter per direction, segment limits.
        Undo: `detach`.
        Raises: as plan_attach; UnsupportedError where compiler, headers or
            kernel lack something. An error in the middle undoes what was done.
        """
        from shapeagent.service import attaching

        require_privileges()
        with self._changing_kernel() as rtnl:
            self.forget()
            return attaching.attach(self, rtnl, request)

    def detach(
        self, device: str, *, dry_run: bool = False, unless_confirmed: str | None = None
    ) -> DetachReport:
        """Detach a device and put back what was there. Idempotent.

        Args:
            unless_confirmed: only while the attach with this token waits for its confirmation.

        Raises:
            InputError: "no-such-device" where nothing of that name is known.
        """
        from shapeagent.service import detaching

        require_privileges()
        with self._changing_kernel() as rtnl:
            self.forget()
            return detaching.detach(
                self, rtnl, device, dry_run=dry_run, unless_confirmed=unless_confirmed
            )

    def confirm(self, device: str) -> float:
        """Keep an attach that would else be undone; returns the seconds that were left.

        Raises:
            ConflictError: "not-attached", "nothing-to-confirm", "attach-unfinished".
        """
        from shapeagent.service import confirming

        require_privileges()
        with self._changing_kernel() as rtnl:
            attached = self._open(rtnl, device, repair=True)
            try:
                return confirming.confirm(attached.store, device)
            finally:
                attached.close()

    # --- policy

    def policy(self, device: str | None = None) -> PolicyDocument:
        """Return the policy in force on a device; without one, what an attach would use.

        Raises:
            ConflictError: "not-attached".
        """
        from shapeagent.service import policies

        require_privileges()
        if device is None:
            return policies.default_document()
        with namespaces.open_rtnl(self.netns) as rtnl:
            attached = self._open(rtnl, device)
            try:
                return policies.document_of(attached)
            finally:
                attached.close()

    def set_policy(
        self, device: str, text: str, source: str, *, expected_digest: str | None = None
    ) -> AttachReport:
        """Put another policy in force on an attached device; only what differs is changed.

        Args:
            source: what status calls it.

        Raises:
            ConflictError: "not-attached"; "policy-differs" where not the expected one is in force.
            InputError: "policy-invalid", and as `attach`; the old policy stays.
        """
        from shapeagent.service import attaching, policies

        require_privileges()
        with self._changing_kernel() as rtnl:
            attached = self._open(rtnl, device, repair=True)
            try:
                request = policies.request_with(attached, text, source, expected_digest)
            finally:
                attached.close()
            self.forget()
            return attaching.attach(self, rtnl, request)

    # --- looking

    def residue(self, *, wait_s: float = 2.0) -> ResidueReport:
        """Return anything of ours that is left: it belongs to no attachment in force.

        Looks into the engine's namespace, or from the host's into every named
        one too, at both folders, and at all programs and maps of the kernel.

        Args:
            wait_s: the kernel frees programs and maps some time after their
                last user; so long they are waited for.
        """
        from shapeagent.service import residue

        require_privileges()
        return residue.find(self, wait_s)

    def status(self, device: str | None = None) -> tuple[InterfaceStatus, ...]:
        """Return the attached interfaces of the namespace, or one of them.

        Raises:
            ConflictError: "not-attached" where the named device is not.
        """
        require_privileges()
        # in one thread that enters the namespace, where each look would start its own
        return namespaces.run_in_netns(self.netns, lambda: self._status(device))

    def _status(self, device: str | None) -> tuple[InterfaceStatus, ...]:
        found = []
        with self.reading() as rtnl, rtnl.looking(), holding_sysfs():
            for key in self._keys(rtnl, device):
                try:
                    found.append(self._status_of(rtnl, key))
                except ShapeError as error:
                    if device is not None:
                        raise  # one was asked for; else it must not hide the others
                    found.append(describing.broken_status(key, self.netns, error))
        if device is not None and not found:
            raise _not_attached(device)
        return tuple(found)

    def _status_of(self, rtnl: Rtnl, key: str) -> InterfaceStatus:
        damage = recovering.repair_if_free(self, key)
        attached = self._open_key(rtnl, key)
        try:
            return describing.interface_status(attached, self.netns, damage)
        finally:
            attached.close()

    def class_list(self, device: str) -> tuple[ClassStatus, ...]:
        """Return the classes of a device, egress first."""
        return self.status(device)[0].classes

    def explain(self, device: str, request: ExplainRequest) -> Explanation:
        """Ask the loaded program about a 5-tuple; every map stays as it is.

        Raises:
            InputError: an address, protocol or direction is wrong.
        """
        return next(iter(self._explaining(device, request=request)))

    def explain_pcap(self, device: str, path: Path, direction: str) -> Iterator[Explanation]:
        """Ask the loaded program about each packet of a capture.

        Raises:
            InputError: "bad-capture".
        """
        yield from self._explaining(device, path=path, direction=direction)

    def _explaining(
        self,
        device: str,
        *,
        request: ExplainRequest | None = None,
        path: Path | None = None,
        direction: str = "egress",
    ) -> Iterator[Explanation]:
        from shapeagent.service import explaining

        require_privileges()
        with self.reading() as rtnl:
            attached = self._open(rtnl, device)
            try:
                yield from explaining.explain(attached, request, path, direction)
            finally:
                attached.close()

    # --- for the agent's own thread

    @contextlib.contextmanager
    def reading(self) -> Iterator[Rtnl]:
        """Give a socket in the engine's namespace; who holds the lock for life keeps it open."""
        if not self._holds_lock:
            with namespaces.open_rtnl(self.netns) as rtnl:
                yield rtnl
            return
        if self._rtnl is None:
            self._rtnl = namespaces.open_rtnl(self.netns)
        try:
            yield self._rtnl
        except OSError as error:
            if not isinstance(error, NetlinkRefusal):  # the socket, not what was asked (F15)
                self.close()
            raise

    def close(self) -> None:
        """Close what is kept open between calls; the next call opens it again."""
        self.forget()
        if self._rtnl is not None:
            self._rtnl.close()
            self._rtnl = None
        if self._links is not None:
            self._links.close()
            self._links = None

    def forget(self, keys: Iterable[str] | None = None) -> None:
        """Close the attachments that are kept open: all, or these."""
        self._found_whole.clear()
        for key in list(self._kept) if keys is None else keys:
            attached = self._kept.pop(key, None)
            if attached is not None:
                attached.close(for_good=True)

    def forget_gone(self) -> None:
        """Close those that another program has undone, so that the kernel can free their maps."""
        gone = [key for key, one in self._kept.items() if one.stamp != one.store.stamp()]
        if gone:
            self.forget(gone)

    def keeps(self, attached: Attached) -> bool:
        """Return whether an attachment is kept open still: it is the one that is in force."""
        return self._kept.get(attached.key) is attached

    def opened(self, rtnl: Rtnl, device: DeviceFacts) -> Attached | None:
        """Return the attachment of this very device, None where there is none or it did not end.

        Close it. Raises: ShapeError where it is there and cannot be opened.
        """
        key = self.key_of(rtnl, device.index)
        state = following.state_of(self, rtnl, device)
        if state is None or not state.complete:
            return None
        return self._open_key(rtnl, key)

    # --- ceilings

    def class_set(
        self,
        device: str,
        class_name: str,
        ceiling_bits_per_s: int,
        *,
        lease_s: float | None = None,
        direction: str = "egress",
    ) -> ClassStatus:
        """Set the ceiling of a class in place; no packet is lost.

        Args:
            ceiling_bits_per_s: wire bits; from the guarantee (at least 64 kbit/s) to the link rate.
            lease_s: past it the class's safe ceiling holds, kept by the
                kernel. None: no lease.

        Raises:
            InputError: "no-such-class", "ceiling-out-of-range", "bad-lease",
                "not-shaped" (ingress is only counted).
        """
        with self.session(device) as session:
            session.set_ceiling(
                class_name, ceiling_bits_per_s, lease_s=lease_s, direction=direction
            )
            return session.class_status(class_name, direction)

    @contextlib.contextmanager
    def session(self, device: str) -> Iterator[Session]:
        """Hold the lock and keep one attachment open, for many changes.

        A controller opens one: a change then costs a fifth of `class_set`,
        which opens everything, changes once and closes it again. The whitelist
        stays in memory meanwhile.
        """
        require_privileges()
        with self._changing_kernel() as rtnl:
            attached = self._open(rtnl, device, repair=True)
            try:
                yield Session(attached)
                attached.store.sync()  # once, not at each change
            finally:
                attached.close()

    @contextlib.contextmanager
    def _whitelisting(self, device: str) -> Iterator[Session]:
        require_privileges()
        with self._changing_kernel() as rtnl:
            attached = self._open(rtnl, device, repair=True)
            try:
                yield Session(attached)
            finally:
                attached.close()

    def _store_of(self, device: str) -> StateDir:
        require_privileges()
        with self.reading() as rtnl:
            key = next(iter(self._keys(rtnl, device)), None)
        if key is None:
            raise _not_attached(device)
        return self.store(key)

    @contextlib.contextmanager
    def _changing_kernel(self) -> Iterator[Rtnl]:
        """Hold the lock and a socket; a signal unwinds what was begun, and only once."""
        with InterruptGuard(), self.lock(), self.reading() as rtnl:
            yield rtnl

    # --- finding

    def store(self, key: str) -> StateDir:
        """Return the state folder of an attachment, with the kernel's copies behind it."""
        return StateDir(self.run_dir, key, self.bpffs_dir / key)

    def key_of(self, rtnl: Rtnl, index: int) -> str:
        """Return the folder name of an interface: namespace cookie and index."""
        return f"{namespaces.read_netns_cookie(rtnl)}-{index}"

    def _keys(self, rtnl: Rtnl, device: str | None) -> list[str]:
        keys = self._all_keys(rtnl)
        if device is None:
            return keys
        try:
            wanted: str | None = self.key_of(rtnl, read_device(rtnl, device).index)
        except InputError as error:
            if error.reference != "no-such-device":
                raise
            wanted = self.key_by_name(rtnl, device)
            if wanted is None:
                raise
        return [key for key in keys if key == wanted]

    def _all_keys(self, rtnl: Rtnl) -> list[str]:
        prefix = f"{namespaces.read_netns_cookie(rtnl)}-"
        known = list_states(self.run_dir, self.bpffs_dir)
        return [key for key in known if key.startswith(prefix)]

    def key_by_name(self, rtnl: Rtnl, device: str) -> str | None:
        """Return the attachment of a device that is gone or was made again, by its name."""
        for key in self._all_keys(rtnl):
            with contextlib.suppress(FailedError, ConflictError):  # such a neighbour hides nobody
                state = self.store(key).read()
                if state is not None and state.device == device:
                    return key
        return None

    def _open(self, rtnl: Rtnl, device: str, *, repair: bool = False) -> Attached:
        if not repair or not self._holds_lock:
            return self._look_for(rtnl, device, repair=repair)
        known = self._known_whole(device)
        if known is not None:
            return known
        attached = self._look_for(rtnl, device, repair=True)
        if attached.is_kept:
            self._found_whole[device] = (attached, attached.store.stamps())
        return attached

    def _known_whole(self, device: str) -> Attached | None:
        """Return an attachment that is open, of which no file and no link has changed since.

        A change then asks the kernel for nothing that it was asked before: that is half of a
        whitelist update.
        """
        if self._links is None:
            self._links = Watch(self.netns)
        if self._links.has_changed():
            self._found_whole.clear()
        attached, files = self._found_whole.pop(device, (None, None))
        if attached is None or not self.keeps(attached):
            return None
        now = attached.store.stamps()
        if files is None or now[0] != attached.stamp or now[1:] != files[1:]:
            return None
        self._found_whole[device] = (attached, now)
        return attached

    def _look_for(self, rtnl: Rtnl, device: str, *, repair: bool) -> Attached:
        for key in self._keys(rtnl, device):
            if repair:
                recovering.repair(self, key)
            attached = self._open_key(rtnl, key)
            try:
                following.require_present(self.netns, rtnl, attached.state)
            except BaseException:
                attached.close()
                raise
            return attached
        raise _not_attached(device)

    def _open_key(self, rtnl: Rtnl, key: str) -> Attached:
        store = self.store(key)
        kept = self._kept.get(key)
        if kept is not None and kept.stamp == store.stamp():
            return kept
        self.forget([key])
        attached = self._open_anew(rtnl, store, key)
        if self._holds_lock:
            attached.is_kept = True
            self._kept[key] = attached
        return attached

    def _open_anew(self, rtnl: Rtnl, store: StateDir, key: str) -> Attached:
        state = store.read()
        if state is None or not state.complete:
            raise ConflictError(
                "attach-unfinished",
                f"An attach or detach of {state.device if state else key} did not end.",
                hint=f"shapectl attach {state.device if state else ''} undoes it and attaches "
                "again; shapectl detach only undoes it",
            )
        if state.abi_version != abi.SHP_ABI_VERSION:
            from shapeagent.service import swapping

            swapping.refuse_newer(state)
            raise ConflictError(
                "other-version-attached",
                f"{state.device} runs a classifier of an earlier version, with maps of layout "
                f"{state.abi_version}; this shapectl has {abi.SHP_ABI_VERSION}.",
                hint=f"shapectl attach {state.device} swaps it in place; no packet goes past it",
            )
        try:
            return Attached(self, rtnl, store, state, key)
        except FileNotFoundError as error:
            raise ConflictError(
                "attachment-incomplete",
                f"A pin or file of {state.device}'s attachment is gone: {error}.",
                hint=f"shapectl detach {state.device}, then attach again",
            ) from error


def _not_attached(device: str) -> ConflictError:
    return ConflictError(
        "not-attached",
        f"shapectl is not attached to {device}.",
        hint=f"shapectl attach {device}",
    )


def _set_ceiling(
    attached: Attached,
    class_name: str,
    ceiling_bits_per_s: int,
    lease_s: float | None,
    direction_text: str,
) -> None:
    state, policy = attached.state, attached.policy
    try:
        direction = Direction(direction_text)
        traffic_class = policy.class_named(class_name)
    except KeyError as error:
        raise InputError(
            "no-such-class",
            f"The policy has no class {class_name!r}.",
            hint=f"one of {', '.join(one.name for one in policy.classes)}",
        ) from error
    except ValueError as error:
        raise InputError(
            "bad-direction", f"{direction_text!r} is no direction.", hint="egress or ingress"
        ) from error
    if direction is Direction.INGRESS and state.ingress == "count":
        raise InputError(
            "not-shaped",
            f"What arrives on {state.device} is only counted.",
            hint=f"attach {state.device} with --ingress police",
        )
    least = max(_MIN_CEILING_BITS_PER_S, _guarantee(policy, class_name, direction))
    why = "its guarantee"
    tree = attached.tree(direction)
    if tree is not None and class_name in tree.paced:
        slow = least_paced_rate(tree.segment_wire_bytes)
        if slow > least:
            least, why = slow, "below it edt's queue would be longer than 20 ms"
    if not least <= ceiling_bits_per_s <= state.link_rate_bits_per_s:
        raise InputError(
            "ceiling-out-of-range",
            f"A ceiling of {ceiling_bits_per_s} bit/s for {class_name} is not between "
            f"{least} ({why}) and {state.link_rate_bits_per_s} bit/s (the link).",
        )
    if lease_s is not None and not 0.01 <= lease_s <= 7 * 86_400:
        raise InputError("bad-lease", f"A lease of {lease_s} s is not between 10 ms and 7 days.")
    now = attached.clock.read()
    old = state.ceilings[direction.value][class_name]
    deadline = 0
    if lease_s is not None:
        deadline = now + max(1, round(lease_s * 1e9 / state.kernel.jiffy_ns))
    new = CeilingState(ceiling_bits_per_s, old.safe_bits_per_s, deadline)
    was_expired = bool(old.deadline_jiffies) and now >= old.deadline_jiffies
    ceilings = {**state.ceilings}
    ceilings[direction.value] = {**ceilings[direction.value], class_name: new}
    with attached.saving(dataclasses.replace(state, ceilings=ceilings), lasting=False):
        _apply_ceiling(attached, direction, traffic_class.number, class_name, old, new, was_expired)


def _guarantee(policy: Policy, class_name: str, direction: Direction) -> int:
    if direction is Direction.INGRESS:
        return 0
    return policy.class_named(class_name).guarantee_bits_per_s


def _apply_ceiling(
    attached: Attached,
    direction: Direction,
    number: int,
    class_name: str,
    old: CeilingState,
    new: CeilingState,
    was_expired: bool,
) -> None:
    """Change tree and record, in the order that loses and reorders nothing.

    Back from a twin leaf (bpf-facts 5.13): first the twin gets the new rate,
    then its queue runs out, then the record sends packets to the live leaf,
    and last the twin gets its safe rate again.
    """
    state = attached.state
    tree = attached.tree(direction)
    on_twin = (
        was_expired
        and tree is not None
        and tree.profile is Profile.HTB
        and old.safe_bits_per_s > old.live_bits_per_s
    )
    if on_twin:
        lifted = dataclasses.replace(new, safe_bits_per_s=new.live_bits_per_s)
        tree = _change_tree(attached, direction, class_name, lifted, tree)
        _wait_for_drain(attached, direction, twin_minor(number))
    else:
        tree = _change_tree(attached, direction, class_name, new, tree)
    ceilings = {**ceiling_states(state, direction), class_name: new}
    record = class_words(attached.policy, state, direction, class_name, ceilings, tree)
    attached.datapath.write_class(direction.number, number, record)
    if on_twin:
        tree = _change_tree(attached, direction, class_name, new, tree)
    attached.set_tree(direction, tree)


def _tree_index(attached: Attached, direction: Direction) -> int:
    return attached.state.ifb_index if direction is Direction.INGRESS else attached.state.index


def _change_tree(
    attached: Attached,
    direction: Direction,
    class_name: str,
    new: CeilingState,
    tree: TreePlan | None,
) -> TreePlan | None:
    """Change the rates of a class in place; returns the tree that then stands."""
    state = attached.state
    if tree is None or tree.profile is not Profile.HTB:
        return tree
    changes = class_rate_change(
        tree,
        attached.policy,
        state.facts,
        state.kernel,
        class_name,
        live_ceiling_bits_per_s=new.live_bits_per_s,
        safe_ceiling_bits_per_s=new.safe_bits_per_s,
        link_rate_bits_per_s=state.link_rate_bits_per_s,
        segment_limit_bytes=state.segment_limit_bytes,
        direction=direction,
    )
    queues = {node.minor: node.leaf for node in tree.classes}
    index = _tree_index(attached, direction)
    for change in changes:
        qdisc.change_class(attached.rtnl, index, tree.handle, change)
        if change.leaf is not None and change.leaf != queues[change.minor]:
            parent = tree.handle << 16 | change.minor
            qdisc.change_leaf(attached.rtnl, index, parent, change.leaf)
    return with_changes(tree, changes)


def _wait_for_drain(attached: Attached, direction: Direction, minor: int) -> None:
    """Wait until a leaf is empty, but not for ever: under load it may never be."""
    deadline = time.monotonic() + _DRAIN_LIMIT_S
    while time.monotonic() < deadline:
        found = qdisc.class_stats(attached.rtnl, _tree_index(attached, direction)).get(minor)
        if found is None or found.backlog_packets == 0:
            return
        time.sleep(_DRAIN_POLL_S)
