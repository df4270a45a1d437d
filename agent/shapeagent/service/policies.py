# SPDX-License-Identifier: Apache-2.0
"""The policy of an attachment as a document: what is in force, and another one in its place."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from shapeagent.model.errors import ConflictError
from shapeagent.model.reports import AttachRequest, PolicyDocument
from shapeagent.service.documents import read_policy

if TYPE_CHECKING:
    from shapeagent.service.engine import Attached


def default_document() -> PolicyDocument:
    """Return the policy that an attach without one would use. Raises: as `read_policy`."""
    text, source = read_policy(None)
    return PolicyDocument(text, source, _digest(text))


def document_of(attached: Attached) -> PolicyDocument:
    """Return the policy in force."""
    return PolicyDocument(
        attached.policy.text, attached.state.policy_source, _digest(attached.policy.text)
    )


def request_with(
    attached: Attached, text: str, source: str, expected_digest: str | None
) -> AttachRequest:
    """Return the request that attached a device, with another policy.

    Raises: ConflictError policy-differs.
    """
    found = document_of(attached).digest
    if expected_digest is not None and expected_digest != found:
        raise ConflictError(
            "policy-differs",
            f"The policy in force has the digest {found}, not {expected_digest}.",
            hint="read it, merge, and try again with the new digest",
        )
    fields = {**attached.state.request, "confirm_s": None}  # it is attached already
    fields["device"] = attached.state.device
    fields["policy_path"] = source or None
    return AttachRequest(**fields, policy_text=text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
