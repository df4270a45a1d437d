# SPDX-License-Identifier: Apache-2.0
"""An engine that lives in an agent: the same methods, over gRPC.

Every change carries a fresh request id, and a repetition carries the same: so a
call that was cut off can be made again without changing anything twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shapeagent.client.address import AgentAddress, TlsFiles
from shapeagent.client.connection import Connection, fresh_id
from shapeagent.client.files import read_bytes, read_text
from shapeagent.client.messages import from_message, word_number
from shapeagent.client.remoteevents import RemoteEvents
from shapeagent.client.remotelist import RemoteWhitelist
from shapeagent.model.errors import InputError
from shapeagent.model.reports import (
    AttachPlan,
    AttachReport,
    AttachRequest,
    ClassStatus,
    DetachReport,
    ExplainRequest,
    Explanation,
    Happened,
    InterfaceStatus,
    PolicyDocument,
    ResidueReport,
    WhitelistChange,
    WhitelistRow,
)
from shapeagent.model.types import PackedBatch, WhitelistEntry
from shapeagent.policy.packed import pack_entries
from shapeagent.proto.shapectl.v1 import (
    common_pb2,
    policy_pb2,
    policy_pb2_grpc,
    shaper_pb2,
    shaper_pb2_grpc,
)

MOST_CAPTURE_BYTES = 4_000_000  # a message has 4 MiB
_ENUMS = common_pb2.DESCRIPTOR.enum_types_by_name


class RemoteEngine:
    """What `service.engine.Engine` does, done by an agent."""

    def __init__(
        self,
        address: AgentAddress,
        *,
        tls: TlsFiles | None = None,
        netns: str | None = None,
        why: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Open a channel; nothing is sent yet. Close it.

        Args:
            why: for the agent's audit log.
            timeout_s: of each call; None: 30 s, for an attach 120 s.

        Raises: as `open_channel`.
        """
        self.address = address
        self.netns = netns
        self._why = why
        self._connection = Connection(address, tls, timeout_s)
        channel = self._connection.channel
        self._shaper = shaper_pb2_grpc.ShaperServiceStub(channel)
        self._policy = policy_pb2_grpc.PolicyServiceStub(channel)
        self._events = RemoteEvents(self._connection)
        self._whitelist = RemoteWhitelist(self._connection, self._netns, why)

    def close(self) -> None:
        """Close the channel."""
        self._connection.close()

    def hello(self) -> None:
        """Return where the agent answers that it serves. Raises: as `Connection.hello`."""
        self._connection.hello()

    # --- attach and detach

    def plan_attach(self, request: AttachRequest) -> AttachPlan:
        """Return what `attach` would do."""
        wanted = shaper_pb2.PlanAttachRequest(spec=_spec(request), netns=self._netns)
        return from_message(
            self._connection.call(self._shaper.PlanAttach, wanted, long=True).plan, AttachPlan
        )

    def attach(self, request: AttachRequest) -> AttachReport:
        """Attach a device; a policy file is read here and sent."""
        wanted = shaper_pb2.AttachRequest(
            request_id=fresh_id(), spec=_spec(request), netns=self._netns, why=self._why
        )
        return from_message(
            self._connection.call(self._shaper.Attach, wanted, long=True).report, AttachReport
        )

    def detach(self, device: str, *, dry_run: bool = False) -> DetachReport:
        """Detach a device and put back what was there."""
        wanted = shaper_pb2.DetachRequest(
            request_id=fresh_id(),
            device=device,
            dry_run=dry_run,
            netns=self._netns,
            why=self._why,
        )
        return from_message(
            self._connection.call(self._shaper.Detach, wanted, long=True).report, DetachReport
        )

    def confirm(self, device: str) -> float:
        """Keep an attach that would else be undone; returns the seconds that were left."""
        wanted = shaper_pb2.ConfirmRequest(
            request_id=fresh_id(), device=device, netns=self._netns, why=self._why
        )
        return float(self._connection.call(self._shaper.Confirm, wanted).left_s)

    # --- policy

    def policy(self, device: str | None = None) -> PolicyDocument:
        """Return the policy in force on a device; without one, what an attach would use."""
        wanted = policy_pb2.GetPolicyRequest(device=device or "", netns=self._netns)
        return from_message(self._connection.call(self._policy.GetPolicy, wanted), PolicyDocument)

    def set_policy(
        self, device: str, text: str, source: str, *, expected_digest: str | None = None
    ) -> AttachReport:
        """Put another policy in force on an attached device."""
        wanted = policy_pb2.SetPolicyRequest(
            request_id=fresh_id(),
            device=device,
            text=text,
            source=source,
            expected_digest=expected_digest or "",
            netns=self._netns,
            why=self._why,
        )
        answer = self._connection.call(self._policy.SetPolicy, wanted, long=True)
        return from_message(answer.report, AttachReport)

    # --- looking

    def residue(self, *, wait_s: float = 2.0) -> ResidueReport:
        """Return anything of ours that is left on the agent's host."""
        wanted = shaper_pb2.GetResidueRequest(netns=self._netns, wait_s=wait_s)
        return from_message(
            self._connection.call(self._shaper.GetResidue, wanted).report, ResidueReport
        )

    def status(self, device: str | None = None) -> tuple[InterfaceStatus, ...]:
        """Return the attached interfaces, or one of them."""
        wanted = shaper_pb2.GetStatusRequest(device=device or "", netns=self._netns)
        answer = self._connection.call(self._shaper.GetStatus, wanted)
        return tuple(from_message(one, InterfaceStatus) for one in answer.interfaces)

    def class_list(self, device: str) -> tuple[ClassStatus, ...]:
        """Return the classes of a device, egress first."""
        return self.status(device)[0].classes

    def explain(self, device: str, request: ExplainRequest) -> Explanation:
        """Ask the loaded program about a 5-tuple."""
        wanted = shaper_pb2.ExplainRequest(
            device=device,
            source=request.source,
            destination=request.destination,
            protocol=request.protocol,
            source_port=request.source_port,
            destination_port=request.destination_port,
            direction=_number("Direction", request.direction),
            dscp=request.dscp,
            mark=request.mark,
            netns=self._netns,
        )
        return from_message(
            self._connection.call(self._shaper.Explain, wanted).explanation, Explanation
        )

    def explain_pcap(self, device: str, path: Path, direction: str) -> Iterator[Explanation]:
        """Ask the loaded program about each packet of a capture of this host."""
        wanted = shaper_pb2.ExplainCaptureRequest(
            device=device,
            capture=read_bytes(path, MOST_CAPTURE_BYTES),
            direction=_number("Direction", direction),
            netns=self._netns,
        )
        with self._connection.named_errors():
            for answer in self._shaper.ExplainCapture(wanted, timeout=self._connection.time_s()):
                for one in answer.explanations:
                    yield from_message(one, Explanation)

    def events(
        self, device: str | None = None, *, kinds: Sequence[str] = (), follow: bool = False
    ) -> Iterator[Happened]:
        """Yield the events that the agent remembers, and where asked to, each new one.

        See `RemoteEvents.watch`.
        """
        return self._events.watch(device or "", kinds, follow=follow)

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
        """Set the ceiling of a class in place."""
        wanted = shaper_pb2.SetClassRequest(
            request_id=fresh_id(),
            device=device,
            class_name=class_name,
            ceiling_bits_per_s=ceiling_bits_per_s,
            lease_s=lease_s,
            direction=_number("Direction", direction),
            netns=self._netns,
            why=self._why,
        )
        return from_message(
            self._connection.call(self._shaper.SetClass, wanted).status, ClassStatus
        )

    # --- whitelist

    def whitelist_add(
        self, device: str, entries: Sequence[WhitelistEntry], *, yes_everything: bool = False
    ) -> WhitelistChange:
        """Add entries; one that is there already with another class is changed."""
        return self.whitelist_apply(device, pack_entries(entries), yes_everything=yes_everything)

    def whitelist_import(
        self, device: str, entries: Sequence[WhitelistEntry], *, yes_everything: bool = False
    ) -> WhitelistChange:
        """Add many entries at once."""
        return self.whitelist_add(device, entries, yes_everything=yes_everything)

    def whitelist_remove(self, device: str, entries: Sequence[WhitelistEntry]) -> WhitelistChange:
        """Remove entries by address and match."""
        return self.whitelist_apply(device, remove=pack_entries(entries))

    def whitelist_replace(
        self,
        device: str,
        entries: Sequence[WhitelistEntry],
        *,
        yes_everything: bool = False,
        expected_generation: int | None = None,
    ) -> WhitelistChange:
        """Replace the whole whitelist."""
        return self.whitelist_apply(
            device,
            pack_entries(entries),
            replace=True,
            yes_everything=yes_everything,
            expected_generation=expected_generation,
        )

    def whitelist_apply(
        self,
        device: str,
        add: Sequence[PackedBatch] = (),
        remove: Sequence[PackedBatch] = (),
        *,
        replace: bool = False,
        expected_generation: int | None = None,
        yes_everything: bool = False,
    ) -> WhitelistChange:
        """Make one change of packed batches; see Engine.whitelist_apply."""
        return self._whitelist.change(
            device,
            add=add,
            remove=remove,
            replace=replace,
            yes_everything=yes_everything,
            expected_generation=expected_generation,
        )

    def whitelist_list(self, device: str) -> tuple[WhitelistRow, ...]:
        """Return the entries that have not expired; begins anew where the list changes meanwhile.

        Raises: ConflictError generation-differs where it never stands still.
        """
        return self._whitelist.rows(device)

    @property
    def _netns(self) -> str:
        return self.netns or ""


def _spec(request: AttachRequest) -> shaper_pb2.AttachSpec:
    """Return an attach request as a message, with the text of its policy file.

    Raises: InputError file-missing, file-unreadable, not-utf8; PrivilegeError file-forbidden.
    """
    text, source = request.policy_text, request.policy_path
    if text is None and source is not None:
        text, source = read_text(source), "stdin" if source == "-" else source
    return shaper_pb2.AttachSpec(
        device=request.device,
        policy_text=text,
        policy_source=source or "",
        profile=_word("Profile", request.profile),
        link_rate_bits_per_s=request.link_rate_bits_per_s,
        ingress=_word("IngressMode", request.ingress),
        ingress_lease_s=request.ingress_lease_s,
        shadow=request.shadow,
        segment_limit=request.segment_limit,
        reroute_ipv6=request.reroute_ipv6,
        egress_mark_mask=request.egress_mark_mask,
        ingress_mark_mask=request.ingress_mark_mask,
        yes_management=request.yes_management,
        confirm_s=request.confirm_s,
        hook=_word("Hook", request.hook),
        takeover=request.takeover,
    )


def _word(enum: str, word: str | None) -> Any:
    return 0 if word is None else _number(enum, word)


def _number(enum: str, word: str) -> Any:
    found = word_number(_ENUMS[enum], word)
    if not found:
        raise InputError("bad-request", f"{word!r} is no {enum.lower()}.")
    return found
