# SPDX-License-Identifier: Apache-2.0
"""`shapectl` through an agent: --agent, the environment, the lock, and one that hangs."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rpckit import DEVICE, FakeEngine, Service, serving

from shapeagent.client import local
from shapeagent.client.address import AgentAddress, TlsFiles, parse_address
from shapeagent.client.channel import open_channel
from shapeagent.client.packing import MOST_IN_BATCH, batches_of
from shapeagent.client.remote import RemoteEngine
from shapeagent.model.errors import InputError
from shapeagent.policy.packed import pack_entries
from shapeagent.policy.whitelist import LineDefaults, parse_entry
from shapeagent.service.rpc.contracts import Role
from shapeagent.service.state import RUN_DIR
from shapectl.cli import main
from shapectl.session import Session

_ROOT = Path(__file__).resolve().parents[2]
_SERVE = """
import sys, threading
from pathlib import Path
from rpckit import FakeEngine, serving
with serving(Path(sys.argv[1]), FakeEngine()):
    print("ready", flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def service(tmp_path: Path, engine: FakeEngine) -> Iterator[Service]:
    with serving(tmp_path, engine) as one:
        yield one


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@contextmanager
def lock_held(run_dir: Path, holder: dict[str, Any] | None) -> Iterator[None]:
    """Hold the lock as an agent does, which says so in the file."""
    run_dir.mkdir(exist_ok=True)
    descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        text = f"{os.getpid():<20}\n" if holder is None else json.dumps(holder) + "\n"
        os.pwrite(descriptor, text.encode(), 0)
        yield
    finally:
        os.close(descriptor)


# --- commands


@pytest.mark.parametrize(
    ("words", "called"),
    [
        (["status"], "status"),
        (["status", DEVICE], "status"),
        (["attach", DEVICE, "--link-rate", "100mbit"], "attach"),
        (["attach", DEVICE, "--dry-run"], "plan_attach"),
        (["detach", DEVICE], "detach"),
        (["confirm", DEVICE], "confirm"),
        (["class", "show"], "status"),
        (["class", "set", "bulk", "--ceiling", "50%"], "set_ceiling"),
        (["explain", "10.0.0.5:41000", "10.0.0.9:2379"], "explain"),
        (["whitelist", "add", "192.0.2.7"], "whitelist_apply"),
        (["whitelist", "remove", "192.0.2.7"], "whitelist_apply"),
        (["whitelist", "list"], "whitelist_page"),
        (["whitelist", "export"], "whitelist_page"),
    ],
    ids=lambda one: "-".join(one[:2]) if isinstance(one, list) else "",
)
def test_commands_go_to_the_agent(
    service: Service,
    engine: FakeEngine,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    called: str,
) -> None:
    address = service.address().target
    code, found = run_json(capsys, "--agent", address, *words)
    assert code == 0, f"got {code}: {found}"
    assert called in engine.names(), f"got {engine.names()}"


def test_residue_of_an_agent(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "residue", "--agent", service.address().target)
    assert code == 1, f"got {code}: {found}, want 1 where something is left"


def test_the_environment_names_an_agent(
    service: Service,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SHAPECTL_AGENT", service.address().target)
    code, found = run_json(capsys, "status")
    assert (code, found["interfaces"][0]["device"]) == (0, DEVICE)
    assert found["interfaces"][0]["profile"] == "htb", f"got {found}"


@pytest.mark.parametrize(
    ("words", "reference", "exit_code"),
    [
        (["status", "gone"], "not-attached", 5),
        (["class", "set", "none", "--ceiling", "1mbit"], "no-such-class", 2),
    ],
)
def test_errors_of_the_agent_are_shown_as_its_own(
    service: Service,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reference: str,
    exit_code: int,
) -> None:
    code, found = run_json(capsys, "--agent", service.address().target, *words)
    assert (code, found["error"]) == (exit_code, reference)


def test_an_observer_is_told_what_is_missing(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    address = service.address(Role.OBSERVER).target
    code, found = run_json(capsys, "--agent", address, "detach", DEVICE)
    assert (code, found["error"]) == (3, "denied")
    assert "admin" in found["message"]


def test_no_agent_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began_s = time.monotonic()
    code, found = run_json(capsys, "--agent", str(tmp_path / "none.sock"), "status")
    assert (code, found["error"]) == (1, "agent-unreachable")
    assert time.monotonic() - began_s < 6


# --- this host's agent


def test_the_holder_of_the_lock_is_asked(
    service: Service,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(local, "RUN_DIR", tmp_path / "run")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with lock_held(tmp_path / "run", {"pid": os.getpid(), "sockets": str(service.folder)}):
        code, _ = run_json(capsys, "status")
    assert (code, engine.names()) == (0, ["status"])


def test_who_is_not_root_takes_the_strongest_socket_that_opens(
    service: Service,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert local.usable_socket(service.folder) == service.address(Role.ADMIN)
    (service.folder / "admin.sock").unlink()
    assert local.usable_socket(service.folder) == service.address(Role.OPERATOR)
    assert local.usable_socket(service.folder / "none") is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"1234                \n",
        b"{",
        b"[1]",
        b'{"pid": "x", "sockets": "/run/shapectl"}',
        b'{"pid": 1}',
        b'{"pid": 1, "sockets": "relative"}',
        b'{"pid": 1, "sockets": "/x", "netns": 5}',
        b"\xff\xfe",
    ],
)
def test_a_lock_that_names_no_agent(text: bytes) -> None:
    assert local.parse_holder(text) is None


def test_a_lock_that_names_one() -> None:
    found = local.parse_holder(b'{"pid": 7, "sockets": "/run/x", "netns": "lab"}\n')
    assert found == AgentAddress("unix:/run/x/admin.sock", 7, "lab")


def test_a_lock_that_nobody_holds_is_of_an_agent_that_is_gone(tmp_path: Path) -> None:
    holder = {"pid": 7, "sockets": str(tmp_path)}
    with lock_held(tmp_path, holder):
        assert local.agent_of(tmp_path) == AgentAddress(f"unix:{tmp_path}/admin.sock", 7)
    assert local.agent_of(tmp_path) is None
    assert local.agent_of(tmp_path / "none") is None
    with lock_held(tmp_path, None):  # a command, for a moment
        assert local.agent_of(tmp_path) is None


def test_the_folders_are_those_of_the_service() -> None:
    assert local.RUN_DIR == RUN_DIR


@pytest.mark.parametrize("stops", [True, False], ids=["stopped", "deaf"])
def test_an_agent_that_hangs_gives_exit_5_with_its_pid(
    stops: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """F36: the lock is held, and nobody answers."""
    env = {**os.environ, "PYTHONPATH": f"{_ROOT / 'agent'}:{_ROOT / 'tests/netns'}:{_ROOT}"}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(tmp_path)], stdout=subprocess.PIPE, env=env
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        if stops:
            process.send_signal(signal.SIGSTOP)
        else:
            (tmp_path / "s" / "admin.sock").unlink()
        monkeypatch.setattr(local, "RUN_DIR", tmp_path / "run")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        holder = {"pid": process.pid, "sockets": str(tmp_path / "s")}
        with lock_held(tmp_path / "run", holder):
            began_s = time.monotonic()
            code, found = run_json(capsys, "status")
            took_s = time.monotonic() - began_s
        assert (code, found["error"]) == (5, "agent-hung")
        assert str(process.pid) in found["message"], f"got {found}"
        assert 1.5 < took_s < 5, f"got {took_s:.1f} s, want 2"
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def test_a_namespace_that_the_agent_does_not_serve_is_worked_on_here(
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(local, "RUN_DIR", tmp_path / "run")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    holder = {"pid": 7, "sockets": str(service.folder), "netns": "lab"}
    with lock_held(tmp_path / "run", holder):
        assert Session()._agent_address() is None
        assert Session(netns="other")._agent_address() is None
        assert Session(netns="lab")._agent_address() is not None
        assert Session(netns="x", agent="/a.sock")._agent_address() == AgentAddress("unix:/a.sock")


_SCRIPT = """
import sys
from shapectl.cli import main
code = main(sys.argv[1:])
print("modules:", *sorted(sys.modules))
sys.exit(code)
"""


def test_a_remote_client_loads_no_kernel_room(service: Service) -> None:
    """Design 3: neither pyroute2 (120-200 ms) nor bcc (73 MB), nor anything that needs them."""
    env = {**os.environ, "PYTHONPATH": f"{_ROOT / 'agent'}:{_ROOT / 'ctl'}"}
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, "--agent", service.address().target, "status", "--json"],
        capture_output=True, text=True, check=False, timeout=60, env=env,
    )  # fmt: skip
    assert run.returncode == 0, f"got {run.returncode}: {run.stderr}"
    loaded = set(run.stdout.split("modules:")[1].split())
    heavy = loaded & {"pyroute2", "bcc", "pydantic", "shapeagent.kernel", "shapeagent.service"}
    assert not heavy, f"got {heavy}"


# --- addresses


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("unix:/run/shapectl/admin.sock", "unix:/run/shapectl/admin.sock"),
        ("/run/shapectl/admin.sock", "unix:/run/shapectl/admin.sock"),
        ("unix:///run/x", "unix:/run/x"),
        ("agent.example.org", "dns:///agent.example.org:7443"),
        ("agent.example.org:1", "dns:///agent.example.org:1"),
        ("192.0.2.7:65535", "dns:///192.0.2.7:65535"),
        ("[2001:db8::7]", "ipv6:[2001:db8::7]:7443"),
        ("[::1]:9", "ipv6:[::1]:9"),
    ],
)
def test_addresses(text: str, target: str) -> None:
    assert parse_address(text).target == target


@pytest.mark.parametrize(
    "text",
    ["", "unix:", "unix:relative", "host:0", "host:65536", "host:x", "::1", "2001:db8::7:80",
     "http://host", "a b", "host:1:2", "/x\0y"],
)  # fmt: skip
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_address(text)
    assert caught.value.reference == "agent-address"


def test_tcp_wants_certificates(tmp_path: Path) -> None:
    address = parse_address("127.0.0.1:1")
    with pytest.raises(InputError) as caught:
        open_channel(address)
    assert caught.value.reference == "agent-certificates"
    with pytest.raises(InputError) as caught:
        open_channel(address, TlsFiles.beside(tmp_path / "client-operator.pem"))
    assert caught.value.reference == "agent-certificates"


def test_the_files_beside_a_certificate() -> None:
    found = TlsFiles.beside(Path("/c/client-operator.pem"))
    names = [one.name for one in (found.ca, found.certificate, found.key)]
    assert names == ["ca.pem", "client-operator.pem", "client-operator-key.pem"]


def test_packing_bounds_its_batches() -> None:
    template = parse_entry("2001:db8::", LineDefaults(traffic_class="bulk"))[0]
    many = [
        dataclasses.replace(template, destination=(n.to_bytes(16, "big"), 128))
        for n in range(1, MOST_IN_BATCH + 2)
    ]
    found = [len(one.hosts6) // 16 for one in batches_of(pack_entries(many))]
    assert found == [MOST_IN_BATCH, 1], f"got {found}"
    assert all(one.ByteSize() < 4 << 20 for one in batches_of(pack_entries(many)))


# --- events


def test_events_as_lines(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    address = service.address(Role.OBSERVER).target
    assert main(["events", "--agent", address]) == 0
    assert capsys.readouterr().out == "", "got events, want none yet"
    service.events.add("attached", "eth1", "profile htb", who="unix:admin")
    service.events.add("put-back", "eth2", "the \x1b[31mqdisc\nof another")
    assert main(["events", "--agent", address]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith("profile htb (by unix:admin)"), f"got {out}"
    assert "\x1b" not in out, f"got {out!r}"
    assert len(out.splitlines()) == 2, f"got {out!r}"
    assert main(["events", "--agent", address, "--kind", "put-back", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["device"] == "eth2"
    assert main(["events", "--agent", address, "--device", "eth9"]) == 0
    assert capsys.readouterr().out == ""


def test_events_want_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "RUN_DIR", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    code, found = run_json(capsys, "events")
    assert (code, found["error"]) == (5, "no-agent")


def test_events_that_are_followed_go_on_after_a_restart(tmp_path: Path, engine: FakeEngine) -> None:
    """C110: none twice, and those of the new run from its first."""
    found: list[str] = []
    with serving(tmp_path, engine) as first:
        remote = RemoteEngine(first.address())
        first.events.add("x", "", "one")
        watched = remote.events(follow=True)
        found.append(next(watched).text)
        first.events.add("x", "", "two")
        found.append(next(watched).text)
    with serving(tmp_path, engine) as second:
        second.events.add("x", "", "three")
        second.events.add("x", "", "four")
        found += [next(watched).text, next(watched).text]
        del watched
    remote.close()
    assert found == ["one", "two", "three", "four"]


def test_an_agent_that_was_never_there_is_not_waited_for(tmp_path: Path) -> None:
    remote = RemoteEngine(AgentAddress(f"unix:{tmp_path}/none"), timeout_s=2.0)
    with pytest.raises(Exception, match="No agent answers"):
        next(remote.events(follow=True))
    remote.close()
