# SPDX-License-Identifier: Apache-2.0
"""Dataclasses and messages say the same, and errors arrive as they were raised."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from rpckit import CLASS, EXPLANATION, PLAN, FakeEngine

from shapeagent.client.errors import error_of
from shapeagent.client.messages import from_message, to_message
from shapeagent.model import reports
from shapeagent.model.errors import (
    ConflictError,
    FailedError,
    InputError,
    PartialError,
    PrivilegeError,
    ShapeError,
    UnsupportedError,
)
from shapeagent.proto.shapectl.v1 import event_pb2, policy_pb2, shaper_pb2, whitelist_pb2
from shapeagent.service.rpc.statuses import code_of, status_of
from shapeagent.telemetry.events import Event

PAIRS = [
    (reports.AttachPlan, shaper_pb2.AttachPlan),
    (reports.ClassPlanRow, shaper_pb2.ClassPlanRow),
    (reports.AttachReport, shaper_pb2.AttachReport),
    (reports.DetachReport, shaper_pb2.DetachReport),
    (reports.ClassStatus, shaper_pb2.ClassStatus),
    (reports.InterfaceStatus, shaper_pb2.InterfaceStatus),
    (reports.Explanation, shaper_pb2.Explanation),
    (reports.ResidueItem, shaper_pb2.ResidueItem),
    (reports.ResidueReport, shaper_pb2.ResidueReport),
    (reports.PolicyDocument, policy_pb2.GetPolicyResponse),
    (reports.WhitelistChange, whitelist_pb2.WhitelistChange),
    (reports.WhitelistRow, whitelist_pb2.WhitelistRow),
    (Event, event_pb2.Event),
]


@pytest.mark.parametrize(("plain", "message"), PAIRS, ids=lambda one: one.__name__)
def test_both_have_the_same_fields(plain: Any, message: type[Message]) -> None:
    """A field that is added to one of them only is noticed here."""
    wanted = {one.name: one for one in dataclasses.fields(plain)}
    found = message.DESCRIPTOR.fields_by_name
    assert set(found) == set(wanted), f"got {set(found) ^ set(wanted)} in one of them only"
    for name, one in wanted.items():
        has_none = "None" in str(one.type)
        assert found[name].has_presence is has_none or found[name].message_type is not None, (
            f"got {name} optional or not otherwise than {one.type}"
        )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (PLAN, shaper_pb2.AttachPlan),
        (CLASS, shaper_pb2.ClassStatus),
        (EXPLANATION, shaper_pb2.Explanation),
        (FakeEngine().status()[0], shaper_pb2.InterfaceStatus),
        (FakeEngine().attach(reports.AttachRequest("eth7")), shaper_pb2.AttachReport),
        (FakeEngine().residue(), shaper_pb2.ResidueReport),
        (FakeEngine().policy(), policy_pb2.GetPolicyResponse),
        (Event(3, 1.5, "attached", "eth7", "text", {"a": "b"}), event_pb2.Event),
        (reports.WhitelistRow("pair", "a", "b", "bulk", "", "", None), whitelist_pb2.WhitelistRow),
    ],
    ids=lambda one: type(one).__name__,
)
def test_there_and_back(value: Any, message: type[Message]) -> None:
    made = to_message(value, message)
    read = message.FromString(made.SerializeToString())
    assert from_message(read, type(value)) == value


def test_what_cannot_be_read_stays_unknown() -> None:
    broken = dataclasses.replace(
        FakeEngine().status()[0], profile="unknown", ingress="unknown", hook="unknown"
    )
    made = to_message(broken, shaper_pb2.InterfaceStatus)
    assert made.profile == 0, f"got {made.profile}, want unspecified"
    assert from_message(made, reports.InterfaceStatus) == broken


def over_the_wire(error: ShapeError) -> ShapeError:
    """Return the error as a client rebuilds it from the status."""
    status = status_of(error)
    call = SimpleNamespace(
        code=lambda: status.code,
        details=lambda: status.details,
        trailing_metadata=lambda: status.trailing_metadata,
    )
    return error_of(call, "there")


@pytest.mark.parametrize(
    "kind",
    [FailedError, InputError, PrivilegeError, UnsupportedError, ConflictError, PartialError],
)
def test_errors_arrive_as_they_were_raised(kind: type[ShapeError]) -> None:
    error = kind("some-reference", "What failed: ü.", hint="do this", details=("one", "two"))
    found = over_the_wire(error)
    assert type(found) is kind
    assert found.as_dict() == error.as_dict()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("x", ""), "INVALID_ARGUMENT"),
        (InputError("no-such-device", ""), "NOT_FOUND"),
        (ConflictError("not-attached", ""), "NOT_FOUND"),
        (ConflictError("x", ""), "FAILED_PRECONDITION"),
        (ConflictError("generation-differs", ""), "ABORTED"),
        (ConflictError("agent-busy", ""), "UNAVAILABLE"),
        (PrivilegeError("denied", ""), "PERMISSION_DENIED"),
        (PrivilegeError("needs-root-cli", ""), "FAILED_PRECONDITION"),
        (UnsupportedError("x", ""), "FAILED_PRECONDITION"),
        (FailedError("x", ""), "INTERNAL"),
        (FailedError("map-full", ""), "RESOURCE_EXHAUSTED"),
        (PartialError("x", ""), "INTERNAL"),
    ],
    ids=lambda one: getattr(one, "reference", one),
)
def test_status_codes(error: ShapeError, code: str) -> None:
    assert code_of(error) is grpc.StatusCode[code]


_TEXTS = st.text(st.characters(codec=None), max_size=3_000)


@given(message=_TEXTS, hint=_TEXTS, details=st.lists(_TEXTS, max_size=60))
def test_a_status_always_fits_a_trailer(message: str, hint: str, details: list[str]) -> None:
    error = InputError("bad-thing", message, hint=hint, details=details)
    status = status_of(error)
    size = sum(len(key) + len(value) for key, value in status.trailing_metadata)
    assert size < 6_000, f"got {size} bytes of trailer for {len(details)} details"
    found = over_the_wire(error)
    assert (found.reference, found.exit_code) == ("bad-thing", 2)
    if details:
        assert found.details, "got no detail, want the first"


def test_cut_details_say_how_many() -> None:
    found = over_the_wire(InputError("bad", "m", details=[f"{n:0>400}" for n in range(50)]))
    kept = len(found.details) - 1
    assert 5 < kept < 50, f"got {kept}"
    assert found.details[-1] == f"... and {50 - kept} more", f"got {found.details[-1]}"


@pytest.mark.parametrize(
    ("code", "reference", "exit_code"),
    [
        ("UNAVAILABLE", "agent-unreachable", 1),
        ("DEADLINE_EXCEEDED", "agent-timeout", 1),
        ("PERMISSION_DENIED", "denied", 3),
        ("RESOURCE_EXHAUSTED", "agent-limit", 1),
        ("UNIMPLEMENTED", "agent-other-version", 4),
        ("UNKNOWN", "agent-failed", 1),
    ],
)
def test_what_grpc_itself_says_gets_a_name(code: str, reference: str, exit_code: int) -> None:
    call = SimpleNamespace(
        code=lambda: grpc.StatusCode[code], details=lambda: "words", trailing_metadata=lambda: ()
    )
    found = error_of(call, "there")
    assert (found.reference, found.exit_code) == (reference, exit_code)
    assert "there" in found.message, f"got {found.message}"


def test_details_of_someone_else_are_not_believed() -> None:
    """A trailer that is no status, or one that disagrees with the code."""
    for data in (b"\xff\xff", b"", b"\x08\x05"):
        call = SimpleNamespace(
            code=lambda: grpc.StatusCode.INTERNAL,
            details=lambda: "words",
            trailing_metadata=lambda data=data: (("grpc-status-details-bin", data),),
        )
        assert error_of(call, "there").reference == "agent-failed", f"got another for {data!r}"
