# SPDX-License-Identifier: Apache-2.0
"""What the agent refused, as the error that the engine raised there."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from shapeagent.model.errors import (
    ConflictError,
    FailedError,
    InputError,
    PartialError,
    PrivilegeError,
    ShapeError,
    UnsupportedError,
)
from shapeagent.proto.shapectl.v1.common_pb2 import ErrorDetail

_BY_EXIT_CODE: dict[int, type[ShapeError]] = {
    one.exit_code: one
    for one in (
        FailedError,
        InputError,
        PrivilegeError,
        UnsupportedError,
        ConflictError,
        PartialError,
    )
}


def error_of(error: Any, address: str) -> ShapeError:
    """Return the named error behind a `grpc.RpcError`.

    Args: address: which agent was asked, for messages.
    """
    detail = _detail(error)
    if detail is not None:
        kind = _BY_EXIT_CODE.get(detail.exit_code, FailedError)
        return kind(
            detail.reference, detail.message, hint=detail.hint or None, details=detail.details
        )
    return _without_detail(error.code(), error.details() or "", address)


def _detail(error: Any) -> ErrorDetail | None:
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):  # a proxy has made something else of it
        return None
    for one in status.details if status is not None else ():
        found = ErrorDetail()
        try:
            if one.Unpack(found) and found.reference:
                return found
        except DecodeError:
            return None
    return None


def _without_detail(code: grpc.StatusCode, words: str, address: str) -> ShapeError:
    """Return the error of a call that gRPC itself, or something between, has ended."""
    said = f"{address}: {words or code.name}"
    if code is grpc.StatusCode.UNAVAILABLE:
        return FailedError(
            "agent-unreachable",
            f"No agent answers at {said}.",
            hint="is it running, and are address and certificates right?",
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return FailedError(
            "agent-timeout",
            f"The agent at {address} did not answer in time.",
            hint="shapectl status shows what came of it; the same command again is safe",
        )
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
        return PrivilegeError("denied", f"Refused by {said}.")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in words:
        return InputError(
            "message-too-large",
            f"A message is larger than the agent takes: {said}.",
            hint="send it in parts: a whitelist as a stream of batches, a capture cut by editcap",
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return FailedError("agent-limit", f"A limit was reached: {said}.", hint="try again later")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return UnsupportedError(
            "agent-other-version",
            f"The agent does not know the call: {said}.",
            hint="shapectl --version; the agent's host may have an earlier one",
        )
    return FailedError("agent-failed", f"The call failed: {said} ({code.name}).")
