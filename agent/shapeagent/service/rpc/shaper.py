# SPDX-License-Identifier: Apache-2.0
"""The methods of ShaperService: attach, look at and change interfaces."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shapeagent.client.messages import to_message
from shapeagent.model.errors import InputError
from shapeagent.model.reports import AttachRequest, ExplainRequest
from shapeagent.proto.shapectl.v1 import common_pb2
from shapeagent.proto.shapectl.v1 import shaper_pb2 as pb
from shapeagent.service.engine import Engine, Session
from shapeagent.service.rpc.changes import Done, Runner, Told
from shapeagent.service.rpc.guard import Call
from shapeagent.service.rpc.requests import (
    asked_of,
    check_link_rate,
    check_policy_size,
    check_segment_limit,
    device_of,
    direction_of,
    word,
)

_MOST_CAPTURE_PACKETS = 10_000  # a second of the writer's time
_PER_ANSWER = 100  # explanations
_MOST_RESIDUE_WAIT_S = 10.0
_ENUMS = common_pb2.DESCRIPTOR.enum_types_by_name


class ShaperServicer:
    """Its methods are named and called as gRPC's generated code wants it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    # --- attach and detach

    def PlanAttach(self, request: pb.PlanAttachRequest, call: Call) -> pb.PlanAttachResponse:
        """Return what an attach would do."""
        wanted = attach_request(request.spec)
        plan = self._runner.look(call, request.netns, lambda engine: engine.plan_attach(wanted))
        return pb.PlanAttachResponse(plan=to_message(plan, pb.AttachPlan))

    def Attach(self, request: pb.AttachRequest, call: Call) -> pb.AttachResponse:
        """Attach a device."""
        wanted = attach_request(request.spec)

        def work(engine: Engine) -> Done[pb.AttachResponse]:
            report = engine.attach(wanted)
            plan = report.plan
            text = (
                f"profile {plan.profile}, ingress {plan.ingress}, "
                f"link {plan.link_rate_bits_per_s} bit/s, policy {plan.policy_source}"
            )
            return Done(
                pb.AttachResponse(report=to_message(report, pb.AttachReport)),
                new=f"{text} ({plan.policy_digest[:12]})",
                told=Told("attached", text) if report.changed else None,
            )

        asked = asked_of(request, call, wanted.device)
        return self._runner.change(call, asked, request.netns, work, pb.AttachResponse)

    def Detach(self, request: pb.DetachRequest, call: Call) -> pb.DetachResponse:
        """Put a device back to what it was."""
        device = device_of(request.device)

        def work(engine: Engine) -> Done[pb.DetachResponse]:
            report = engine.detach(device, dry_run=request.dry_run)
            is_told = report.changed and not request.dry_run
            return Done(
                pb.DetachResponse(report=to_message(report, pb.DetachReport)),
                new="planned" if request.dry_run else "detached",
                told=Told("detached", "it is as it was before attach") if is_told else None,
            )

        asked = asked_of(request, call, device)
        return self._runner.change(call, asked, request.netns, work, pb.DetachResponse)

    def Confirm(self, request: pb.ConfirmRequest, call: Call) -> pb.ConfirmResponse:
        """Keep an attach that would else be undone."""
        device = device_of(request.device)

        def work(engine: Engine) -> Done[pb.ConfirmResponse]:
            left_s = engine.confirm(device)
            told = Told("confirmed", f"{left_s:.1f} s were left")
            return Done(pb.ConfirmResponse(left_s=left_s), new="confirmed", told=told)

        asked = asked_of(request, call, device)
        return self._runner.change(call, asked, request.netns, work, pb.ConfirmResponse)

    # --- looking

    def GetStatus(self, request: pb.GetStatusRequest, call: Call) -> pb.GetStatusResponse:
        """Return the attached interfaces."""
        device = device_of(request.device) if request.device else None
        found = self._runner.look(call, request.netns, lambda engine: engine.status(device))
        return pb.GetStatusResponse(
            interfaces=[to_message(one, pb.InterfaceStatus) for one in found]
        )

    def Explain(self, request: pb.ExplainRequest, call: Call) -> pb.ExplainResponse:
        """Return what the loaded program says about a packet."""
        device = device_of(request.device)
        wanted = explain_request(request)
        found = self._runner.look(
            call, request.netns, lambda engine: engine.explain(device, wanted)
        )
        return pb.ExplainResponse(explanation=to_message(found, pb.Explanation))

    def ExplainCapture(
        self, request: pb.ExplainCaptureRequest, call: Call
    ) -> Iterator[pb.ExplainCaptureResponse]:
        """Yield what the loaded program says about each packet of a capture."""
        device = device_of(request.device)
        direction = direction_of(request.direction)
        descriptor = os.memfd_create("capture", os.MFD_CLOEXEC)
        with os.fdopen(descriptor, "wb") as file:
            file.write(request.capture)
            file.flush()
            path = Path(f"/proc/self/fd/{descriptor}")
            found = self._runner.look(
                call,
                request.netns,
                lambda engine: list(
                    itertools.islice(
                        engine.explain_pcap(device, path, direction), _MOST_CAPTURE_PACKETS + 1
                    )
                ),
            )
        if len(found) > _MOST_CAPTURE_PACKETS:
            raise InputError(
                "capture-too-large",
                f"The capture has over {_MOST_CAPTURE_PACKETS:,} packets.",
                hint="editcap -c 10000 splits it",
            )
        for start in range(0, len(found), _PER_ANSWER):
            part = found[start : start + _PER_ANSWER]
            yield pb.ExplainCaptureResponse(
                explanations=[to_message(one, pb.Explanation) for one in part]
            )

    def GetResidue(self, request: pb.GetResidueRequest, call: Call) -> pb.GetResidueResponse:
        """Return anything of ours that belongs to no attachment in force."""
        wait_s = request.wait_s if request.HasField("wait_s") else 2.0
        if not 0 <= wait_s <= _MOST_RESIDUE_WAIT_S:  # also NaN
            raise InputError("bad-wait", f"{wait_s} s is not between 0 and {_MOST_RESIDUE_WAIT_S}.")
        found = self._runner.look(call, request.netns, lambda engine: engine.residue(wait_s=wait_s))
        return pb.GetResidueResponse(report=to_message(found, pb.ResidueReport))

    # --- ceilings

    def SetClass(self, request: pb.SetClassRequest, call: Call) -> pb.SetClassResponse:
        """Set the ceiling of a class in place."""
        device = device_of(request.device)
        direction = direction_of(request.direction)
        lease_s = request.lease_s if request.HasField("lease_s") else None

        def work(engine: Engine) -> Done[pb.SetClassResponse]:
            with engine.session(device) as session:
                old = _ceiling_of(session, request.class_name, direction)
                session.set_ceiling(
                    request.class_name,
                    request.ceiling_bits_per_s,
                    lease_s=lease_s,
                    direction=direction,
                )
                row = session.class_status(request.class_name, direction)
            lease = "" if lease_s is None else f" for {lease_s:g} s"
            new = f"{request.ceiling_bits_per_s} bit/s{lease}"
            return Done(
                pb.SetClassResponse(status=to_message(row, pb.ClassStatus)),
                old=old,
                new=new,
                told=Told("class-set", f"{direction} {row.name}: at most {new}"),
            )

        asked = asked_of(request, call, device, f"{device} {direction} {request.class_name[:64]}")
        return self._runner.change(call, asked, request.netns, work, pb.SetClassResponse)


def attach_request(spec: pb.AttachSpec) -> AttachRequest:
    """Return what the engine is asked for.

    Raises: InputError bad-request, policy-too-large, bad-lease, link-rate-out-of-range,
        segment-limit.
    """
    check_policy_size(spec.policy_text)
    lease_s = spec.ingress_lease_s if spec.HasField("ingress_lease_s") else 3600.0
    if not 0.01 <= lease_s <= 7 * 86_400:  # also NaN
        raise InputError("bad-lease", f"A lease of {lease_s} s is not between 10 ms and 7 days.")
    if spec.HasField("link_rate_bits_per_s"):
        check_link_rate(spec.link_rate_bits_per_s)
    if spec.HasField("segment_limit"):
        check_segment_limit(spec.segment_limit)

    def given(name: str) -> Any:
        return getattr(spec, name) if spec.HasField(name) else None

    return AttachRequest(
        device=device_of(spec.device),
        policy_path=spec.policy_source or None if spec.HasField("policy_text") else None,
        policy_text=given("policy_text"),
        profile=word(_ENUMS["Profile"], spec.profile),
        link_rate_bits_per_s=given("link_rate_bits_per_s"),
        ingress=word(_ENUMS["IngressMode"], spec.ingress) or "count",
        ingress_lease_s=lease_s,
        shadow=spec.shadow,
        segment_limit=given("segment_limit"),
        reroute_ipv6=spec.reroute_ipv6,
        egress_mark_mask=given("egress_mark_mask"),
        ingress_mark_mask=given("ingress_mark_mask"),
        yes_management=spec.yes_management,
        confirm_s=given("confirm_s"),
        hook=word(_ENUMS["Hook"], spec.hook),
        takeover=spec.takeover,
    )


def explain_request(request: pb.ExplainRequest) -> ExplainRequest:
    """Return what the engine is asked. Raises: InputError bad-port, dscp-range, bad-request."""
    for name in ("source_port", "destination_port"):
        if getattr(request, name) > 65_535:
            raise InputError("bad-port", f"{getattr(request, name)} is no port (0 to 65535).")
    if request.dscp > 63:
        raise InputError("dscp-range", f"{request.dscp} is no DSCP: a number from 0 to 63.")
    return ExplainRequest(
        source=request.source[:64],
        destination=request.destination[:64],
        protocol=request.protocol[:16] or "tcp",
        source_port=request.source_port if request.HasField("source_port") else None,
        destination_port=(
            request.destination_port if request.HasField("destination_port") else None
        ),
        direction=direction_of(request.direction),
        dscp=request.dscp,
        mark=request.mark,
    )


def _ceiling_of(session: Session, class_name: str, direction: str) -> str:
    """Return a ceiling in words, "" where there is no such class."""
    with contextlib.suppress(IndexError, KeyError):
        return f"{session.class_status(class_name, direction).ceiling_bits_per_s} bit/s"
    return ""
