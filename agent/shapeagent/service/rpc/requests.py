# SPDX-License-Identifier: Apache-2.0
"""What several methods read from their requests in the same way."""

from __future__ import annotations

import re
from typing import Any

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from shapeagent.client.messages import number_word
from shapeagent.model.errors import InputError
from shapeagent.model.units import MAX_RATE_BITS_PER_S, MIN_RATE_BITS_PER_S, parse_size
from shapeagent.proto.shapectl.v1 import common_pb2
from shapeagent.service.rpc.changes import Asked
from shapeagent.service.rpc.guard import Call
from shapeagent.service.rpc.requestids import digest_of

MAX_POLICY_CHARACTERS = 1 << 20
_DEVICE = re.compile(r"[^\s/\x00]{1,15}")  # dev_valid_name(), net/core/dev.c
_DIRECTION = common_pb2.DESCRIPTOR.enum_types_by_name["Direction"]


def device_of(text: str) -> str:
    """Return the name of an interface. Raises: InputError device-missing, no-such-device."""
    if not text:
        raise InputError(
            "device-missing", "The request names no interface.", hint="GetStatus lists them"
        )
    if _DEVICE.fullmatch(text) is None:
        raise InputError("no-such-device", f"{text[:40]!a} is no name of an interface.")
    return text


def word(enum: EnumDescriptor, number: int) -> str | None:
    """Return the word of an enum's number, None where it is unspecified.

    Raises: InputError bad-request: it is no number of the enum.
    """
    if number not in enum.values_by_number:
        raise InputError("bad-request", f"{number} is no {enum.name}.")
    return number_word(enum, number)


def direction_of(number: int) -> str:
    """Return a direction; unspecified is egress. Raises: InputError bad-request."""
    return word(_DIRECTION, number) or "egress"


def check_policy_size(text: str) -> None:
    """Raise InputError policy-too-large where a text is too long for a policy."""
    if len(text) > MAX_POLICY_CHARACTERS:
        raise InputError(
            "policy-too-large", f"The policy has over {MAX_POLICY_CHARACTERS:,} characters."
        )


def check_link_rate(bits_per_s: int) -> None:
    """Raise InputError link-rate-out-of-range where no link has such a rate."""
    if not MIN_RATE_BITS_PER_S <= bits_per_s <= MAX_RATE_BITS_PER_S:
        raise InputError(
            "link-rate-out-of-range",
            f"A link rate of {bits_per_s} bit/s is not between {MIN_RATE_BITS_PER_S} and "
            f"{MAX_RATE_BITS_PER_S}.",
        )


def check_segment_limit(text: str) -> None:
    """Raise InputError segment-limit, or as `parse_size`, where a text is no segment limit."""
    from shapeagent.model.schema import MAX_SEGMENT_BYTES, MIN_SEGMENT_BYTES

    if text in ("auto", "off"):
        return
    if len(text) > 32 or not MIN_SEGMENT_BYTES <= parse_size(text) <= MAX_SEGMENT_BYTES:
        raise InputError(
            "segment-limit",
            f"{text[:32]!a} is not auto, off, or between {MIN_SEGMENT_BYTES} and "
            f"{MAX_SEGMENT_BYTES} bytes.",
        )


def asked_of(request: Any, call: Call, device: str, what: str | None = None) -> Asked:
    """Return what a request for a change says of itself.

    Args:
        request: has `request_id` and `why`.
        what: the object for the audit log, where it is not the device.
    """
    assert isinstance(request, Message)
    return Asked(
        request_id=request.request_id,  # type: ignore[attr-defined]
        digest=digest_of(call.method, request.SerializeToString(deterministic=True)),
        device=device,
        object=device if what is None else what,
        why=request.why,  # type: ignore[attr-defined]
    )
