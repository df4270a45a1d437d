# SPDX-License-Identifier: Apache-2.0
"""Who may call what: every method of every descriptor on the socket of every role (C107)."""

from __future__ import annotations

import re
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from rpckit import FakeEngine, Service, code_of, refusal, serving

from shapeagent.model.errors import FailedError
from shapeagent.service.rpc.contracts import Role
from shapeagent.service.rpc.roles import LEAST_ROLE, check_complete
from shapeagent.service.rpc.server import FOREIGN_SERVICES, SERVICES, method_names
from shapeagent.service.rpc.sockets import prepare_folder

#: Each line is one decision; the table of the code must say the same.
WANTED = {
    "PlanAttach": "operator", "Attach": "admin", "Detach": "admin", "Confirm": "admin",
    "GetStatus": "observer", "Explain": "observer", "ExplainCapture": "operator",
    "SetClass": "operator", "GetResidue": "operator",
    "GetPolicy": "observer", "SetPolicy": "admin",
    "UpdateWhitelist": "operator", "StreamWhitelist": "operator",
    "ListWhitelist": "observer", "WatchWhitelist": "observer",
    "WatchEvents": "observer",
    "Check": "observer", "List": "observer", "Watch": "observer",
    "ServerReflectionInfo": "observer",
}  # fmt: skip
METHODS = [
    (service.full_name, method)
    for service in (*SERVICES, *FOREIGN_SERVICES)
    for method in service.methods
]
_IDS = [f"{service.rpartition('.')[2]}.{method.name}" for service, method in METHODS]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("roles"), FakeEngine()) as one:
        yield one


def raw_call(
    channel: Any, path: str, method: Any, *, timeout_s: float = 5.0, **options: Any
) -> Any:
    """Call a method with an empty request; returns the first answer."""
    request = GetMessageClass(method.input_type)()
    kind = "stream_" if method.client_streaming else "unary_"
    kind += "stream" if method.server_streaming else "unary"
    multi = getattr(channel, kind)(path)
    argument = iter([request.SerializeToString()])
    answer = multi(
        argument if method.client_streaming else next(argument), timeout=timeout_s, **options
    )
    if not method.server_streaming:
        return answer
    try:
        return next(answer, None)
    finally:
        answer.cancel()


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(("name", "method"), METHODS, ids=_IDS)
def test_matrix(service: Service, name: str, method: Any, role: Role) -> None:
    path = f"/{name}/{method.name}"
    allowed = role.includes(Role(WANTED[method.name]))
    before = len(service.audit.denials)
    # what a call says about itself never counts
    metadata = (("role", "admin"), ("authorization", "Bearer admin"), ("x-role", "admin"))
    code = "OK"
    with service.channel(role) as channel:
        try:
            raw_call(channel, path, method, metadata=metadata)
        except grpc.RpcError as error:
            code = code_of(error)
    if allowed:
        assert code != "PERMISSION_DENIED", f"got {code} for {role} on {path}"
        return
    assert code == "PERMISSION_DENIED", f"got {code} for {role} on {path}, want a denial"
    line = service.audit.denials[before]
    found = (line.who, line.role, line.method, line.result)
    assert found == (f"unix:{role}", role, path, "denied"), f"got {found}"


def test_table_and_descriptors_agree() -> None:
    served = set(method_names())
    assert served == LEAST_ROLE.keys(), f"got {served ^ LEAST_ROLE.keys()} in one of them only"
    assert {name.rpartition("/")[2]: str(role) for name, role in LEAST_ROLE.items()} == WANTED


def test_the_page_says_what_the_table_says() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
    found = dict(re.findall(r"^\| `(\w+/\w+)` \| (\w+) \|$", page, re.M))
    ours = {
        name.removeprefix("/shapectl.v1."): str(role)
        for name, role in LEAST_ROLE.items()
        if name.startswith("/shapectl.v1.")
    }
    assert found == ours, f"got {found.items() ^ ours.items()}"


def test_a_method_without_a_role_does_not_start() -> None:
    with pytest.raises(RuntimeError, match="/x\\.Y/Z"):
        check_complete(["/x.Y/Z"])


@pytest.mark.parametrize("role", list(Role))
def test_unknown_methods_are_refused_and_written_down(service: Service, role: Role) -> None:
    before = len(service.audit.denials)
    with service.channel(role) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/shapectl.v1.ShaperService/Format\x7f")(b"", timeout=5)
    assert code_of(caught.value) == "UNIMPLEMENTED"
    assert refusal(caught.value).reference == "no-such-method"
    line = service.audit.denials[before]
    assert line.result == "no-such-method", f"got {line}"
    assert "\x7f" not in line.method, f"got {line.method!r}"


def test_denied_before_the_first_message_is_read(service: Service) -> None:
    """The client never sends one, and has its answer all the same."""
    answered = threading.Event()

    def never() -> Iterator[bytes]:
        answered.wait(10)
        yield b""

    with service.channel(Role.OBSERVER) as channel:
        call = channel.stream_unary("/shapectl.v1.WhitelistService/StreamWhitelist")
        began_s = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            call(never(), timeout=10)
        took_s = time.monotonic() - began_s
        answered.set()
    assert code_of(caught.value) == "PERMISSION_DENIED"
    assert took_s < 5, f"got a denial after {took_s} s, want it at once"


def test_sockets_have_their_modes(service: Service) -> None:
    mode = stat.S_IMODE(service.folder.stat().st_mode)
    assert mode == 0o711, f"got {mode:o}"
    found = {one.name: stat.S_IMODE(one.stat().st_mode) for one in service.folder.iterdir()}
    assert found == {"admin.sock": 0o600, "operator.sock": 0o600, "observer.sock": 0o600}


def test_every_denial_has_a_named_error(service: Service) -> None:
    with service.channel(Role.OBSERVER) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/shapectl.v1.ShaperService/Attach")(b"", timeout=5)
    error = refusal(caught.value)
    assert (error.reference, error.exit_code) == ("denied", 3)
    assert "admin" in error.message, f"got {error.message}"


def test_folder_of_someone_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(FailedError) as caught:
        prepare_folder(tmp_path / "open")
    assert caught.value.reference == "socket-folder"
