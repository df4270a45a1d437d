# SPDX-License-Identifier: Apache-2.0
"""A real agent in a pair's namespace, with mTLS on TCP, and clients of it in processes beside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from netlab_perf import Pair
from perflib import HERE, ROOT

PORT = 9_595
METRICS_PORT = 9_911
_DOMAIN = "fleet.example"
_MOST_START_S = 120.0
_CLIENT = HERE / "agent_client.py"


def _environment() -> dict[str, str]:
    folders = [str(ROOT / "agent"), str(ROOT / "ctl"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def _inside(ends: Pair, *words: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{ends.near.namespace}", *words]


class Lines(threading.Thread):
    """Reads what a process logs, and when each line came (CLOCK_MONOTONIC, seconds)."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._stream = stream
        self._changed = threading.Condition()
        self._ended = False
        self.lines: list[tuple[float, str]] = []

    def run(self) -> None:
        for raw in self._stream:
            with self._changed:
                self.lines.append((time.monotonic(), raw.decode(errors="replace").rstrip()))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, pattern: str, count: int = 1, timeout_s: float = _MOST_START_S) -> float:
        """Return when the last of so many lines that match came."""
        wanted = re.compile(pattern)

        def times() -> list[float]:
            return [at_s for at_s, line in self.lines if wanted.search(line)]

        with self._changed:
            self._changed.wait_for(lambda: len(times()) >= count or self._ended, timeout_s)
            found = times()
        assert len(found) >= count, f"got no {count} × {pattern!r} in {self.text()}"
        return found[count - 1]

    def text(self) -> str:
        """Return all lines."""
        return "\n".join(line for _, line in self.lines)


@dataclass
class AgentRun:
    """A running agent: when its process was started, and what it logs."""

    child: subprocess.Popen[bytes]
    started_s: float  # CLOCK_MONOTONIC
    log: Lines

    def kill(self) -> None:
        """Kill it, and return when it is gone."""
        self.child.send_signal(signal.SIGKILL)
        self.child.wait(10)

    def pss_bytes(self) -> int:
        """Return its proportional set size."""
        text = Path(f"/proc/{self.child.pid}/smaps_rollup").read_text()
        found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
        assert found is not None, f"got {text}"
        return int(found[1]) * 1024

    def cpu_s(self) -> float:
        """Return the CPU time of all its threads that live."""
        tasks = Path(f"/proc/{self.child.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@dataclass
class AgentLab:
    """Where agents of one pair keep their things; they follow one another."""

    ends: Pair
    folder: Path
    devices: Sequence[str]
    link_rate: str = "10gbit"
    profile: str = "htb"
    more: str = ""  # of the configuration
    reconcile: str = "2s"
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        """The configuration, written anew each time."""
        engine, folder = self.ends.engine, self.folder
        certs = folder / "certs"
        roles = "\n".join(
            f'"spiffe://{_DOMAIN}/{name}" = "{name}"' for name in ("admin", "operator", "observer")
        )
        tables = "\n".join(
            f'[[interface]]\ndevice = "{device}"\nlink_rate = "{self.link_rate}"\n'
            f'profile = "{self.profile}"\n{self.more}'
            for device in self.devices
        )
        path = folder / "agent.toml"
        path.write_text(
            f'[agent]\nrun_dir = "{engine.run_dir}"\nbpffs_dir = "{engine.bpffs_dir}"\n'
            f'state_dir = "{folder / "lib"}"\nreconcile = "{self.reconcile}"\n'
            f'[sockets]\nfolder = "{engine.run_dir}"\n'
            f'operator_group = "root"\nobserver_group = "root"\n'
            f'[audit]\npath = "{folder / "log" / "audit.jsonl"}"\n'
            f'[tcp]\naddress = "127.0.0.1:{PORT}"\ncertificate = "{certs}/server.pem"\n'
            f'key = "{certs}/server-key.pem"\nclient_ca = "{certs}/ca.pem"\n'
            f'trust_domain = "{_DOMAIN}"\n[tcp.roles]\n{roles}\n{tables}\n'
        )
        return path

    def socket(self, role: str = "admin") -> str:
        """Return the address of a Unix socket."""
        return f"unix:{self.ends.engine.run_dir}/{role}.sock"

    @contextlib.contextmanager
    def running(self) -> Iterator[AgentRun]:
        """Give an agent that answers; it has ended afterwards."""
        words = [sys.executable, "-m", "shapectl", "agent", "run", "--config", str(self.config)]
        started_s = time.monotonic()
        child = subprocess.Popen(
            _inside(self.ends, *words), stderr=subprocess.PIPE,
            env={**_environment(), **self.environment},
        )  # fmt: skip
        assert child.stderr is not None
        log = Lines(child.stderr)
        log.start()
        try:
            log.wait_for(r"listening: metrics on")
            yield AgentRun(child, started_s, log)
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(30)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
            log.join(10)
            child.stderr.close()


@contextlib.contextmanager
def agent_lab(ends: Pair, devices: Sequence[str] = (), **options: Any) -> Iterator[AgentLab]:
    """Give a place for agents of a pair; what they attached is detached afterwards."""
    wanted = list(devices) or [ends.near.device]
    with tempfile.TemporaryDirectory(prefix="shp-perf-") as name:
        lab = AgentLab(ends, Path(name), wanted, **options)
        words = ("agent", "certs", "--out", str(lab.folder / "certs"), "--trust-domain", _DOMAIN)
        clients = [f"--client={role}=/{role}" for role in ("admin", "operator", "observer")]
        subprocess.run(
            [sys.executable, "-m", "shapectl", *words, "--server-name", "127.0.0.1", *clients],
            check=True, capture_output=True, timeout=60, env=_environment(),
        )  # fmt: skip
        try:
            yield lab
        finally:
            for device in wanted:
                ends.engine.detach(device)


class Client:
    """A process in the agent's namespace that calls it; see agent_client.py."""

    def __init__(self, lab: AgentLab, *, over: str, role: str = "operator") -> None:
        """Args: over: "tcp" (mTLS) or "unix"."""
        words = [lab.socket(role)] if over == "unix" else [f"127.0.0.1:{PORT}"]
        if over == "tcp":
            words.append(str(lab.folder / "certs" / f"client-{role}.pem"))
        self._child = subprocess.Popen(
            _inside(lab.ends, sys.executable, str(_CLIENT), lab.ends.near.device, *words),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(),
        )  # fmt: skip

    def ask(self, verb: str, *arguments: object) -> Any:
        """Return what a command of the client came to."""
        self.tell(verb, *arguments)
        return self.answer()

    def tell(self, verb: str, *arguments: object) -> None:
        """Give it a command; `answer` waits for its end."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self._child.stdin.flush()

    def answer(self) -> Any:
        """Return what the last command came to."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert line, f"got an end of the client: exit {self._child.wait(10)}"
        return json.loads(line)

    def __enter__(self) -> Client:
        self.ask("hello")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()
