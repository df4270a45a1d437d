# SPDX-License-Identifier: Apache-2.0
"""The methods of PolicyService: the policy in force, and another one in its place."""

from __future__ import annotations

from shapeagent.client.messages import to_message
from shapeagent.model.errors import InputError
from shapeagent.proto.shapectl.v1 import policy_pb2 as pb
from shapeagent.proto.shapectl.v1 import shaper_pb2
from shapeagent.service.engine import Engine
from shapeagent.service.rpc.changes import Done, Runner, Told
from shapeagent.service.rpc.guard import Call
from shapeagent.service.rpc.requests import asked_of, check_policy_size, device_of

_MOST_SOURCE_CHARACTERS = 200


class PolicyServicer:
    """Its methods are named and called as gRPC's generated code wants it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def GetPolicy(self, request: pb.GetPolicyRequest, call: Call) -> pb.GetPolicyResponse:
        """Return the policy in force on a device, or what an attach would use."""
        device = device_of(request.device) if request.device else None
        found = self._runner.look(call, request.netns, lambda engine: engine.policy(device))
        return to_message(found, pb.GetPolicyResponse)

    def SetPolicy(self, request: pb.SetPolicyRequest, call: Call) -> pb.SetPolicyResponse:
        """Put another policy in force on an attached device."""
        device = device_of(request.device)
        check_policy_size(request.text)
        if len(request.source) > _MOST_SOURCE_CHARACTERS:
            raise InputError(
                "bad-request", f"`source` has over {_MOST_SOURCE_CHARACTERS} characters."
            )

        def work(engine: Engine) -> Done[pb.SetPolicyResponse]:
            old = engine.policy(device)
            report = engine.set_policy(
                device,
                request.text,
                request.source,
                expected_digest=request.expected_digest or None,
            )
            plan = report.plan
            new = f"{plan.policy_source} ({plan.policy_digest[:12]})"
            return Done(
                pb.SetPolicyResponse(report=to_message(report, shaper_pb2.AttachReport)),
                old=f"{old.source} ({old.digest[:12]})",
                new=new,
                told=Told("policy-changed", new) if report.changed else None,
            )

        asked = asked_of(request, call, device)
        return self._runner.change(call, asked, request.netns, work, pb.SetPolicyResponse)
