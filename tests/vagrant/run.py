# SPDX-License-Identifier: Apache-2.0
"""`make test-vagrant`: box, `vagrant up`, checks, demo, netns suite, `vagrant destroy`.

On libvirt under TCG, since KVM cannot be counted on, and as a user without
privileges: for root, libvirt's `qemu:///session` would be the system daemon.
Everything lives in one private folder that is removed at the end, whatever
happened; the transcript stays in build/vagrant/transcript.txt.

Exit status: 0; 1 a step failed; 2 to 4 as shapectl's; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from shapeagent.model.errors import (
    FailedError,
    InputError,
    PrivilegeError,
    ShapeError,
    UnsupportedError,
)

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "vagrant"
PRIVATE_PARENT = Path("/var/tmp")
NOBODY = 65534
NEED_MB = (
    4000  # the box three times over (file, unpacked, libvirt's pool), and what the guest writes
)
TOOLS = ("vagrant", "qemu-system-x86_64", "libvirtd", "qemu-img", "mmdebstrap", "rsync", "setpriv")
COPIED = (".git", ".venv", "build", "dist", ".vagrant", "__pycache__", ".*_cache", ".hypothesis")
NOT_HERE = "not vm and not host and not slow and not rates"  # what an emulated CPU is too slow for
_TERMINAL_NOISE = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]|[^\r\n]*\r(?!\n)")


@dataclass
class Transcript:
    """Prints lines and keeps them, with the wall time of each step."""

    file: IO[str]
    began_s: float = field(default_factory=time.monotonic)
    steps: list[tuple[str, float, str]] = field(default_factory=list)

    def line(self, text: str) -> None:
        for stream in (sys.stdout, self.file):
            print(text, file=stream, flush=True)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        begin_s = time.monotonic()
        self.line(f"== {name}")
        result = "failed"
        try:
            yield
            result = "ok"
        finally:
            took_s = time.monotonic() - begin_s
            self.steps.append((name, took_s, result))
            self.line(f"== {name}: {result}, {took_s:.1f} s")

    def summary(self) -> None:
        self.line(f"\n{'step':<44}{'wall time':>10}")
        for name, took_s, result in self.steps:
            self.line(f"{name:<44}{took_s:>8.1f} s{'' if result == 'ok' else '  ' + result}")
        self.line(f"{'all':<44}{time.monotonic() - self.began_s:>8.1f} s")


@dataclass
class Place:
    """The private folder, its user, and how commands run there."""

    folder: Path
    uid: int
    gid: int
    ssh_port: int

    @property
    def project(self) -> Path:
        return self.folder / "project"

    @property
    def serial_log(self) -> Path:
        return self.project / "vagrant" / ".vagrant" / "serial.log"

    def command(self, *words: str) -> list[str]:
        drop = ["setpriv", f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups"]
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "LANG": "C.UTF-8",
            "HOME": str(self.folder),
            "USER": pwd.getpwuid(self.uid).pw_name,
            "XDG_RUNTIME_DIR": str(self.folder / "run"),
            "VAGRANT_HOME": str(self.folder / "vagrant.d"),
            "VAGRANT_CHECKPOINT_DISABLE": "1",
            "VAGRANT_DEFAULT_PROVIDER": "libvirt",
            # icount: the tests' deadlines count the guest's work, not the host's
            "SHAPECTL_VM_TCG": os.environ.get("SHAPECTL_VM_TCG", "icount"),
            "SHAPECTL_VM_SSH_PORT": str(self.ssh_port),
        }
        return [*drop, "env", "-i", *(f"{k}={v}" for k, v in environment.items()), *words]

    def processes(self) -> list[int]:
        """Return the processes that were started for this folder: their words name it."""
        found = []
        mark = bytes(self.folder)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                words = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                if mark in words and entry.stat().st_uid == self.uid:
                    found.append(int(entry.name))
        return found


def check_host() -> None:
    """Return when the run can begin.

    Raises: PrivilegeError, UnsupportedError missing-tool, FailedError no-disk-space.
    """
    if os.geteuid() != 0:
        raise PrivilegeError(
            "missing-privilege", "Building the box needs root.", hint="sudo make test-vagrant"
        )
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if missing:
        raise UnsupportedError(
            "missing-tool",
            f"Not installed: {', '.join(missing)}.",
            hint="sudo packaging/setup-vagrant.sh",
        )
    free_mb = shutil.disk_usage(PRIVATE_PARENT).free // 1_000_000
    if free_mb < NEED_MB:
        raise FailedError(
            "no-disk-space",
            f"{PRIVATE_PARENT} has {free_mb} MB free, and a run needs {NEED_MB}.",
            hint="make room and run it again",
        )


def choose_user() -> tuple[int, int]:
    """Return uid and gid of the user behind sudo, else of nobody."""
    uid, gid = int(os.environ.get("SUDO_UID", "0")), int(os.environ.get("SUDO_GID", "0"))
    return (uid, gid) if uid else (NOBODY, NOBODY)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def private_place(transcript: Transcript) -> Iterator[Place]:
    """Give a folder with a copy of the tree and the box; nothing of it is left afterwards."""
    uid, gid = choose_user()
    # Short, since libvirt makes a socket 81 bytes below it.
    folder = Path(tempfile.mkdtemp(prefix="shpv-", dir=PRIVATE_PARENT))
    place = Place(folder, uid, gid, free_port())
    try:
        (folder / "run").mkdir(mode=0o700)
        box_dir = place.project / "build" / "vagrant"
        box_dir.mkdir(parents=True)
        excludes = [f"--exclude={name}" for name in COPIED]
        subprocess.run(["rsync", "-a", *excludes, f"{ROOT}/", f"{place.project}/"], check=True)
        for name in ("shapectl.box", "shapectl.box.digest"):
            shutil.copy(OUT / name, box_dir / name)
        subprocess.run(["chown", "-R", f"{uid}:{gid}", str(folder)], check=True)
        yield place
    finally:
        # From here on a second Ctrl-C would leave a VM behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        destroy(place, transcript)
        end_processes(place)
        shutil.rmtree(folder, ignore_errors=True)


def destroy(place: Place, transcript: Transcript) -> None:
    """Return when the VM is gone; what `vagrant destroy` leaves, `end_processes` ends."""
    if not (place.project / "vagrant" / ".vagrant" / "machines").exists():
        return
    with contextlib.suppress(ShapeError), transcript.step("vagrant destroy"):
        run(place, transcript, "vagrant", "destroy", "-f", "--no-tty", limit_s=180)


def end_processes(place: Place, patience_s: float = 10.0) -> None:
    """Return when no process of the folder is left: libvirt's daemons, and QEMU where it hangs."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        deadline_s = time.monotonic() + patience_s
        while pids := place.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)
            if time.monotonic() > deadline_s:
                break
            selectors.DefaultSelector().select(0.1)


def run(place: Place, transcript: Transcript, *words: str, limit_s: float) -> None:
    """Return when the command has ended well; its output goes to the transcript.

    Raises: FailedError step-failed, step-timeout.
    """
    child = subprocess.Popen(
        place.command(*words),
        cwd=place.project / "vagrant",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert child.stdout is not None
    what = " ".join(words)
    try:
        _copy_output(child.stdout, transcript, time.monotonic() + limit_s)
        code = child.wait(timeout=10)
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        raise FailedError(
            "step-timeout",
            f"{what} did not end within {limit_s:.0f} s.",
            hint="is the machine busy? The transcript says how far it came",
        ) from error
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
    if code:
        raise FailedError("step-failed", f"{what} ended with status {code}.", hint="see above")


def _copy_output(stream: IO[bytes], transcript: Transcript, deadline_s: float) -> None:
    """Copy lines until the end of the stream, without progress bars."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            if not selector.select(left_s):
                continue
            data = os.read(stream.fileno(), 65536)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines if data else [*lines, rest]:
                text = _TERMINAL_NOISE.sub(b"", line).decode(errors="replace").rstrip()
                if text:
                    transcript.line(f"  {text}")
            if not data:
                return


def build_box(transcript: Transcript) -> None:
    done = subprocess.Popen(
        [str(ROOT / "vagrant" / "build-box.sh")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.stdout is not None
    try:
        _copy_output(done.stdout, transcript, time.monotonic() + 1800)
    except TimeoutError as error:
        raise FailedError(
            "step-timeout", "build-box.sh took over 30 minutes.", hint=f"see {OUT}/build-box.log"
        ) from error
    finally:
        if done.poll() is None and sys.exc_info()[0] is not None:
            done.terminate()
        code = done.wait()
    if code:
        raise FailedError(
            "step-failed", f"build-box.sh ended with status {code}.", hint="see above"
        )


def show_serial(place: Place, transcript: Transcript) -> None:
    """Print the end of the guest's console: all that a VM without SSH says."""
    transcript.line(f"-- the last lines of the guest's console ({place.serial_log.name})")
    try:
        lines = place.serial_log.read_bytes().decode(errors="replace").splitlines()
    except OSError as error:
        lines = [f"none: {error.strerror}"]
    for line in lines[-30:]:
        transcript.line(f"  | {line.rstrip()}")


def guest_steps(tests: str) -> tuple[tuple[str, str, float], ...]:
    """Return name, command in the guest, and limit in seconds of each step."""
    root = "cd /vagrant && sudo env PYTHONDONTWRITEBYTECODE=1"
    return (
        ("attach eth0, refuse mgmt0", f"{root} .venv/bin/python tests/vagrant/guest.py", 900),
        ("shapectl demo", f"{root} .venv/bin/shapectl demo", 600),
        (
            "pytest",
            f"{root} .venv/bin/python -m pytest -v -p no:cacheprovider -m '{NOT_HERE}' {tests}",
            7200,
        ),
    )


def run_all(transcript: Transcript, tests: str) -> None:
    """Return when every step has ended well. Raises: ShapeError at the end, for all that failed."""
    with transcript.step("build-box.sh"):
        build_box(transcript)
    failed: list[str] = []
    with private_place(transcript) as place:
        try:
            with transcript.step("vagrant up"):
                run(place, transcript, "vagrant", "up", "--no-tty", limit_s=1200)
        except ShapeError:
            show_serial(place, transcript)
            raise
        for name, command, limit_s in guest_steps(tests):
            try:
                with transcript.step(name):
                    run(place, transcript, "vagrant", "ssh", "-c", command, limit_s=limit_s)
            except ShapeError as error:
                transcript.line(f"error: {error.reference}: {error.message}")
                failed.append(name)
                if error.reference == "step-timeout":
                    show_serial(place, transcript)
    left = [place.folder] if place.folder.exists() else []
    if left or place.processes():
        raise FailedError(
            "left-behind", f"Left: {left}, processes {place.processes()}.", hint="ps; rm -r"
        )
    if failed:
        raise FailedError("step-failed", f"Failed: {', '.join(failed)}.", hint="see above")


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", default="tests/netns", help="what pytest runs in the VM")
    tests = parser.parse_args().tests
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if re.search(r"[;&|<>$`\\\n]", tests):
            raise InputError(
                "bad-tests",
                f"TESTS={tests!r} is more than arguments of pytest.",
                hint="TESTS=tests/netns",
            )
        check_host()
        OUT.mkdir(parents=True, exist_ok=True)
        with (OUT / "transcript.txt").open("w", encoding="utf-8") as file:
            transcript = Transcript(file)
            try:
                run_all(transcript, tests)
            finally:
                transcript.summary()
    except ShapeError as error:
        print(f"error: {error.reference}\n{error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; the VM is gone", file=sys.stderr)
        return 130
    print(f"test-vagrant: all passed ({OUT / 'transcript.txt'})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
