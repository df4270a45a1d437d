# SPDX-License-Identifier: Apache-2.0
"""The engine as the agent's callers have it: what they say is kept, and the reconciler hears it.

All of it happens in the writer's thread, so no look of the reconciler can fall
between a detach and the note that it was wanted.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from shapeagent.kernel.link import read_device_by_index
from shapeagent.model.errors import ShapeError
from shapeagent.model.reports import AttachReport, AttachRequest, DetachReport
from shapeagent.service.engine import Engine

#: Gives the context in which a caller's wish about an interface is carried out; a request of None:
#: leave it detached. What the context cannot keep is refused before anything is changed.
Wanting = Callable[[str, AttachRequest | None], AbstractContextManager[None]]


class CommandedEngine(Engine):
    """Keeps every attach and detach that a caller asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.wanting: Wanting = lambda _device, _request: contextlib.nullcontext()

    def attach_unasked(self, request: AttachRequest) -> AttachReport:
        """Attach a device by the agent's own decision: nothing is told."""
        return super().attach(request)

    def attach(self, request: AttachRequest) -> AttachReport:
        """Attach a device; see Engine.attach."""
        if request.confirm_s is not None:  # wanted only once it is confirmed
            return super().attach(request)
        with self.wanting(request.device, request):
            return super().attach(request)

    def confirm(self, device: str) -> float:
        """Keep an attach; see Engine.confirm."""
        with self.wanting(device, self._request_of(device)):
            return super().confirm(device)

    def set_policy(
        self, device: str, text: str, source: str, *, expected_digest: str | None = None
    ) -> AttachReport:
        """Put another policy in force; see Engine.set_policy."""
        wanted = dataclasses.replace(
            self._request_of(device), policy_text=text, policy_path=source or None
        )
        with self.wanting(device, wanted):
            return super().set_policy(device, text, source, expected_digest=expected_digest)

    def detach(
        self, device: str, *, dry_run: bool = False, unless_confirmed: str | None = None
    ) -> DetachReport:
        """Detach a device; see Engine.detach."""
        if dry_run:
            return super().detach(device, dry_run=True, unless_confirmed=unless_confirmed)
        with self.wanting(device, None):
            return super().detach(device, unless_confirmed=unless_confirmed)

    def detach_unasked(self, device: str) -> DetachReport:
        """Detach a device by the agent's own decision: nothing is told."""
        return super().detach(device)

    def undo_unfinished(self, wanted: Collection[str]) -> tuple[DetachReport, ...]:
        """Return what was undone: attaches and detaches that a kill cut off.

        Args:
            wanted: interfaces that are left alone: who wants them attached attaches them again.
        """
        with self.reading() as rtnl:
            unfinished = []
            prefix = self.key_of(rtnl, 0).removesuffix("0")
            folders = (*self.run_dir.glob(f"{prefix}*/"), *self.bpffs_dir.glob(f"{prefix}*/"))
            for key in sorted({folder.name for folder in folders}):
                with contextlib.suppress(ShapeError, ValueError):
                    state = self.store(key).read()
                    if state is None:  # killed before there was one: all that it has is its index
                        device = read_device_by_index(rtnl, int(key.removeprefix(prefix))).name
                    elif not state.complete:
                        device = state.device
                    else:
                        continue
                    if device not in wanted:
                        unfinished.append(device)
        return tuple(map(self.detach_unasked, unfinished))

    def _request_of(self, device: str) -> AttachRequest:
        with self.reading() as rtnl:
            attached = self._open(rtnl, device)
            try:
                text = attached.policy.text  # that of the request may be a file of then
                fields = {**attached.state.request, "confirm_s": None, "device": device}
                return AttachRequest(**{**fields, "policy_text": text})
            finally:
                attached.close()
