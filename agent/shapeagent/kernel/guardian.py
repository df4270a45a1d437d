# SPDX-License-Identifier: Apache-2.0
"""A command that runs later, whatever becomes of the session that asked for it.

Where systemd runs: a transient timer. Else a shell that sleeps, in a session and,
where cgroup v2 is mounted, in a cgroup of its own: neither the end of a login
session nor a kill of its scope reaches it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shapeagent.kernel.cgroup import find_cgroup_mount
from shapeagent.kernel.processes import process_start_ticks
from shapeagent.model.errors import FailedError, UnsupportedError

SYSTEMD_DIR = Path("/run/systemd/system")  # there where systemd is PID 1: sd_booted(3)
CGROUP_NAME = "shapectl-confirm"
_SYSTEMCTL_S = 10.0
_START_S = 5.0
_END_S = 1.0
_LEAVE_S = 0.3
_TRIES = 40  # of half a second: another command may hold the lock
# $1: a file to write when the clock runs; $2: a cgroup.procs, or nothing; $3: seconds; the rest:
# the command. The shell moves itself, so that its `sleep` never is in the session's cgroup: the
# end of that would end the wait.
_SCRIPT = f"""\
ready=$1 procs=$2 left=$3
shift 3
[ -z "$procs" ] || echo $$ >"$procs"
echo ready >"$ready"
sleep "$left"
tries=0
until "$@"; do
	tries=$((tries + 1))
	[ "$tries" -lt {_TRIES} ] || exit 1
	sleep 0.5
done
"""


@dataclass(frozen=True, slots=True)
class Guardian:
    """What waits: a systemd timer by its name, else a process by pid and start."""

    unit: str = ""
    pid: int = 0
    start_ticks: int = 0

    @property
    def text(self) -> str:
        """Names it for a person."""
        return f"systemd timer {self.unit}.timer" if self.unit else f"process {self.pid}"


def start_guardian(
    name: str, delay_s: float, argv: Sequence[str], environment: Mapping[str, str], ready: Path
) -> Guardian:
    """Return what will run `argv` after `delay_s` seconds; it counts already.

    Args:
        name: of the unit; letters, digits and dashes.
        environment: all of it that the command gets beside PATH.
        ready: a file in a folder of root's, written by the process once it runs.

    Raises: FailedError guardian-failed.

    Effects: a transient timer or a process. Undo: `stop_guardian`.
    """
    if _systemd_fits():
        return _start_timer(name, delay_s, argv, environment)
    return _start_process(delay_s, argv, environment, ready)


def stop_guardian(guardian: Guardian) -> None:
    """End what waits, if it still does."""
    if guardian.unit:
        _systemctl("stop", f"{guardian.unit}.timer")
        return
    if is_waiting(guardian):
        with contextlib.suppress(ProcessLookupError):
            # the shell and the sleep that it waits for; its group is its own
            os.killpg(guardian.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + _END_S
        while is_waiting(guardian) and time.monotonic() < deadline_s:
            time.sleep(0.002)
    _remove_cgroup()


def is_waiting(guardian: Guardian) -> bool:
    """Return whether it is still there."""
    if guardian.unit:
        return _systemctl("is-active", "--quiet", f"{guardian.unit}.timer")
    return bool(guardian.pid) and process_start_ticks(guardian.pid) == guardian.start_ticks


def _systemd_fits() -> bool:
    """A unit runs in the namespaces of PID 1: elsewhere it would look at another host."""
    import shutil

    if not SYSTEMD_DIR.is_dir() or shutil.which("systemd-run") is None:
        return False
    try:
        return all(
            os.readlink(f"/proc/self/ns/{kind}") == os.readlink(f"/proc/1/ns/{kind}")
            for kind in ("net", "mnt")
        )
    except OSError:
        return False


def _start_timer(
    name: str, delay_s: float, argv: Sequence[str], environment: Mapping[str, str]
) -> Guardian:
    import subprocess

    settings = [f"--setenv={key}={value}" for key, value in environment.items()]
    words = ["systemd-run", "--quiet", "--collect", f"--unit={name}", *settings]
    words += [f"--on-active={delay_s:g}s", "--timer-property=AccuracySec=50ms"]
    words += ["--property=Restart=on-failure", "--property=RestartSec=500ms"]
    words += ["--property=StartLimitIntervalSec=0"]
    try:
        done = subprocess.run(
            [*words, "--", *argv],
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_SYSTEMCTL_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(f"systemd-run: {error}") from error
    if done.returncode:
        raise _failed(f"systemd-run: {done.stderr.strip()}")
    return Guardian(unit=name)


def _systemctl(*words: str) -> bool:
    import subprocess

    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["systemctl", *words],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=_SYSTEMCTL_S, check=False,
        )  # fmt: skip
        return done.returncode == 0
    return False


def _start_process(
    delay_s: float, argv: Sequence[str], environment: Mapping[str, str], ready: Path
) -> Guardian:
    import subprocess

    ready.unlink(missing_ok=True)
    ready.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    words = ["shapectl-confirm", str(ready), _make_cgroup(), f"{delay_s:.3f}"]
    try:
        child = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, *words, *argv],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, cwd="/", env={"PATH": path, **environment},
        )  # fmt: skip
    except OSError as error:
        raise _failed(f"/bin/sh: {error.strerror}") from error
    guardian = Guardian(pid=child.pid, start_ticks=process_start_ticks(child.pid) or 0)
    deadline_s = time.monotonic() + _START_S
    while not ready.exists():
        if child.poll() is not None or time.monotonic() > deadline_s:
            stop_guardian(guardian)
            raise _failed("the waiting process did not start")
        time.sleep(0.005)
    ready.unlink(missing_ok=True)
    child.returncode = 0  # it outlives us: no warning about a child that still runs
    return guardian


def _make_cgroup() -> str:
    """Return the list of members of a cgroup of our own, "" where none can be had."""
    try:
        folder = find_cgroup_mount().folder / CGROUP_NAME
        folder.mkdir(exist_ok=True)
    except (OSError, UnsupportedError):
        return ""
    return str(folder / "cgroup.procs")


def leave_cgroup() -> None:
    """Move this process and the shell that waits for it out of that cgroup, and remove it."""
    with contextlib.suppress(OSError, UnsupportedError):
        mount = find_cgroup_mount().folder
        if not (mount / CGROUP_NAME).is_dir():
            return
        for pid in (os.getpid(), os.getppid()):
            (mount / "cgroup.procs").write_text(str(pid))
    _remove_cgroup()


def _remove_cgroup() -> None:
    """Remove the cgroup, unless another wait is in it; who was killed may need a moment."""
    deadline_s = time.monotonic() + _LEAVE_S
    while True:
        try:
            (find_cgroup_mount().folder / CGROUP_NAME).rmdir()
            return
        except UnsupportedError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline_s:
                return
        time.sleep(0.002)


def _failed(why: str) -> FailedError:
    return FailedError(
        "guardian-failed",
        f"Nothing can wait for the confirmation: {why}.",
        hint="attach without --confirm; nothing was changed.",
    )
