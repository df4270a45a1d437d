# SPDX-License-Identifier: Apache-2.0
"""The sockets' files: who can open them, from the first moment, and after a kill."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rpckit import FakeEngine, serving, wait_for

from shapeagent.model.errors import FailedError, InputError
from shapeagent.service.rpc.contracts import Role
from shapeagent.service.rpc.sockets import SocketPlan, default_plans

_ROOT = Path(__file__).resolve().parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="other users' processes need root")

_CONNECT = """
import socket, sys
for path in sys.argv[1:]:
    one = socket.socket(socket.AF_UNIX)
    try:
        one.connect(path)
        print("open")
    except OSError as error:
        print(type(error).__name__)
"""

_SERVE = """
import sys, threading
from pathlib import Path
from rpckit import FakeEngine, serving
with serving(Path(sys.argv[1]), FakeEngine()):
    print("ready", flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's."""
    made = Path(tempfile.mkdtemp(prefix="shp-rpc-"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


def modes(folder: Path) -> dict[str, int]:
    return {one.name: stat.S_IMODE(one.lstat().st_mode) for one in folder.iterdir()}


@as_root
def test_a_group_opens_its_socket_and_no_other(folder: Path) -> None:
    plans = (
        SocketPlan(Role.ADMIN, None),
        SocketPlan(Role.OPERATOR, "games"),
        SocketPlan(Role.OBSERVER, "users"),
    )
    with serving(folder, FakeEngine(), plans=plans) as service:
        found = modes(service.folder)
        assert found == {"admin.sock": 0o600, "operator.sock": 0o660, "observer.sock": 0o660}
        paths = [str(service.folder / f"{role}.sock") for role in Role]
        for groups, wanted in (
            ([], "PermissionError PermissionError PermissionError"),
            (["users"], "open PermissionError PermissionError"),
            (["games"], "PermissionError open PermissionError"),
        ):
            run = subprocess.run(
                ["/usr/bin/python3", "-c", _CONNECT, *paths],
                user="nobody", group="nogroup", extra_groups=groups,
                capture_output=True, text=True, check=True, timeout=30,
            )  # fmt: skip
            assert run.stdout.split() == wanted.split(), f"got {run.stdout} for {groups}"
        listed = subprocess.run(
            ["ls", str(service.folder)], user="nobody", group="nogroup", extra_groups=[],
            capture_output=True, check=False, timeout=30,
        )  # fmt: skip
        assert listed.returncode != 0, "got a listing by nobody, want none"


def test_a_group_that_is_missing_leaves_the_socket_to_root(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plans = [SocketPlan(Role.OBSERVER, "no-such-group-here")]
    with serving(tmp_path, FakeEngine(), plans=plans) as service:
        assert modes(service.folder) == {"observer.sock": 0o600}
    assert "groupadd --system no-such-group-here" in caplog.text


def test_no_moment_with_a_wider_mode(tmp_path: Path) -> None:
    """Also under a umask that takes nothing away."""
    target = tmp_path / "s"
    seen: set[tuple[str, int]] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            for path in target.glob("*.sock"):
                try:
                    seen.add((path.name, stat.S_IMODE(path.lstat().st_mode)))
                except FileNotFoundError:
                    continue

    looker = threading.Thread(target=look)
    before = os.umask(0)
    looker.start()
    try:
        for _ in range(20):
            with serving(tmp_path, FakeEngine()) as service:
                assert stat.S_IMODE(service.folder.stat().st_mode) == 0o711
    finally:
        ended.set()
        looker.join()
        os.umask(before)
    assert len(seen) == 3, f"got {seen}, want each socket seen once"
    assert {mode for _, mode in seen} == {0o600}, f"got {seen}"


def test_sockets_go_at_the_end_and_nothing_else_is_left(tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine()) as service:
        left = service.folder
    assert not list(left.iterdir()), f"got {list(left.iterdir())}"


def test_what_a_killed_agent_left_is_replaced(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{_ROOT / 'agent'}:{_ROOT / 'tests/netns'}:{_ROOT}"}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(tmp_path)], stdout=subprocess.PIPE, env=env
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    assert (tmp_path / "s" / "admin.sock").is_socket(), "got nothing left, want stale sockets"
    (tmp_path / "s" / ".bind-leftover").mkdir()
    with serving(tmp_path, FakeEngine()) as service:
        assert set(modes(service.folder)) == {f"{role}.sock" for role in Role}
        with service.remote() as remote:
            remote.hello()


def test_an_agent_that_ends_leaves_the_sockets_of_the_next(tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine()) as first, serving(tmp_path, FakeEngine()) as second:
        first.servers.stop(0.1)
        with second.remote() as remote:
            remote.hello()
        assert set(modes(second.folder)) == {f"{role}.sock" for role in Role}


def test_a_path_that_no_socket_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught, serving(tmp_path / ("x" * 100), FakeEngine()):
        pass
    assert caught.value.reference == "socket-path"


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("")
    with pytest.raises(FailedError) as caught, serving(tmp_path, FakeEngine()):
        pass
    assert caught.value.reference == "socket-folder"


def test_the_default_sockets() -> None:
    found = {plan.file_name: plan.group for plan in default_plans()}
    assert found == {
        "admin.sock": None, "operator.sock": "shapectl-operator", "observer.sock": "shapectl",
    }  # fmt: skip


def test_calls_at_work_end_before_the_servers_do(tmp_path: Path) -> None:
    engine = FakeEngine()
    with serving(tmp_path, engine) as service, service.remote() as remote:
        engine.hold.clear()
        answer: list[object] = []
        caller = threading.Thread(target=lambda: answer.append(remote.status()))
        caller.start()
        wait_for(lambda: bool(engine.calls), "the call to begin")
        stopper = threading.Thread(target=lambda: service.servers.stop(5.0))
        stopper.start()
        path = service.folder / "admin.sock"
        wait_for(lambda: not path.exists(), "the sockets to go")
        engine.hold.set()
        caller.join(10)
        stopper.join(10)
        assert len(answer) == 1, "got no answer, want that of the call at work"


def test_the_servers_close_their_descriptors(tmp_path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    with serving(tmp_path, FakeEngine()):
        pass
    before = count()
    for _ in range(5):
        with serving(tmp_path, FakeEngine()) as service, service.remote() as remote:
            remote.status()
    wait_for(lambda: count() <= before + 3, f"the descriptors of five servers to go, had {before}")
