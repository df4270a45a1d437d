# SPDX-License-Identifier: Apache-2.0
"""The engine as the agent's callers have it: what they say is kept, and the reconciler hears it.

All of it happens in the writer's thread, so no look of the reconciler can fall
between a detach and the note that it was wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shapeagent.model.reports import AttachReport, AttachRequest, DetachReport
from shapeagent.service.engine import Engine


class CommandedEngine(Engine):
    """Tells of every attach and detach that a caller asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.on_attached: Callable[[AttachRequest], None] = lambda _: None
        self.on_detached: Callable[[str], None] = lambda _: None

    def attach_unasked(self, request: AttachRequest) -> AttachReport:
        """Attach a device by the agent's own decision: nothing is told."""
        return super().attach(request)

    def attach(self, request: AttachRequest) -> AttachReport:
        """Attach a device; see Engine.attach."""
        report = super().attach(request)
        if request.confirm_s is None:  # else it is wanted only once it is confirmed
            self.on_attached(request)
        return report

    def confirm(self, device: str) -> float:
        """Keep an attach; see Engine.confirm."""
        left_s = super().confirm(device)
        self.on_attached(self._request_of(device))
        return left_s

    def set_policy(
        self, device: str, text: str, source: str, *, expected_digest: str | None = None
    ) -> AttachReport:
        """Put another policy in force; see Engine.set_policy."""
        report = super().set_policy(device, text, source, expected_digest=expected_digest)
        self.on_attached(self._request_of(device))
        return report

    def detach(
        self, device: str, *, dry_run: bool = False, unless_confirmed: str | None = None
    ) -> DetachReport:
        """Detach a device; see Engine.detach."""
        report = super().detach(device, dry_run=dry_run, unless_confirmed=unless_confirmed)
        if not dry_run:
            self.on_detached(device)
        return report

    def detach_unasked(self, device: str) -> DetachReport:
        """Detach a device by the agent's own decision: nothing is told."""
        return super().detach(device)

    def _request_of(self, device: str) -> AttachRequest:
        with self.reading() as rtnl:
            attached = self._open(rtnl, device)
            try:
                text = attached.policy.text  # that of the request may be a file of then
                fields = {**attached.state.request, "confirm_s": None, "device": device}
                return AttachRequest(**{**fields, "policy_text": text})
            finally:
                attached.close()
