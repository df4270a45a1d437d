# SPDX-License-Identifier: Apache-2.0
"""Our errors as gRPC statuses, with details that a program can read.

Details travel in a trailer, and a client refuses trailers of more than 8 KiB
(grpc.max_metadata_size): long ones are cut so that the reference and the first
details always arrive.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
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

ERROR_DOMAIN = "shapectl.v1"

#: base64 makes a third more of it, and the message travels a second time.
_MOST_STATUS_BYTES = 4_000
_MOST_TEXT_CHARACTERS = 500

_BY_REFERENCE = {
    "not-attached": code_pb2.NOT_FOUND,
    "no-such-device": code_pb2.NOT_FOUND,
    "no-such-method": code_pb2.UNIMPLEMENTED,
    "generation-differs": code_pb2.ABORTED,
    "policy-differs": code_pb2.ABORTED,
    "request-in-progress": code_pb2.ABORTED,
    "agent-busy": code_pb2.UNAVAILABLE,
    "agent-stopping": code_pb2.UNAVAILABLE,
    "locked": code_pb2.UNAVAILABLE,
    "needs-root-cli": code_pb2.FAILED_PRECONDITION,
    "still-running": code_pb2.DEADLINE_EXCEEDED,
    "call-too-long": code_pb2.DEADLINE_EXCEEDED,
    "map-full": code_pb2.RESOURCE_EXHAUSTED,
    "slow-client": code_pb2.RESOURCE_EXHAUSTED,
    "stream-too-large": code_pb2.RESOURCE_EXHAUSTED,
    "too-many-streams": code_pb2.RESOURCE_EXHAUSTED,
}
_BY_CLASS: dict[type[ShapeError], int] = {
    InputError: code_pb2.INVALID_ARGUMENT,
    PrivilegeError: code_pb2.PERMISSION_DENIED,
    UnsupportedError: code_pb2.FAILED_PRECONDITION,
    ConflictError: code_pb2.FAILED_PRECONDITION,
    PartialError: code_pb2.INTERNAL,
    FailedError: code_pb2.INTERNAL,
}
_WORDS = {code.value[0]: code for code in grpc.StatusCode}


def code_of(error: ShapeError) -> grpc.StatusCode:
    """Return the status code that an error has."""
    number = _BY_REFERENCE.get(error.reference)
    if number is None:
        found = (code for kind, code in _BY_CLASS.items() if isinstance(error, kind))
        number = next(found, code_pb2.INTERNAL)
    code: grpc.StatusCode = _WORDS[number]
    return code


def status_of(error: ShapeError) -> Any:
    """Return the `grpc.Status` of an error, for `ServicerContext.abort_with_status`."""
    code = code_of(error)
    detail = ErrorDetail(
        reference=error.reference,
        message=_cut(error.message),
        hint=_cut(error.hint or ""),
        details=[_cut(one) for one in error.details],
        exit_code=error.exit_code,
    )
    info = error_details_pb2.ErrorInfo(reason=error.reference, domain=ERROR_DOMAIN)
    left_out = 0
    while detail.ByteSize() > _MOST_STATUS_BYTES and detail.details:
        del detail.details[-1]
        left_out += 1
    if left_out:
        detail.details.append(f"... and {left_out} more")
    status = status_pb2.Status(code=code.value[0], message=detail.message)
    for one in (info, detail):
        packed = any_pb2.Any()
        packed.Pack(one)
        status.details.append(packed)
    return rpc_status.to_status(status)


def _cut(text: str) -> str:
    """Return text of a bounded length that is valid in a message."""
    clean = text.encode("utf-8", "replace").decode()
    if len(clean) <= _MOST_TEXT_CHARACTERS:
        return clean
    return clean[: _MOST_TEXT_CHARACTERS - 1] + "…"
